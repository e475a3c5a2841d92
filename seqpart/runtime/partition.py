"""One partition on the device, with its optimizer.

    AT_HOME --load--> LOADING --> RESIDENT --drop--> SAVING --> AT_HOME

    who holds the weights:  the store   both       the slot       both     the store

A slot is one flat buffer that partitions use in turn: weights, at the same places in each visit, then optimizer state,
then gradients that wait for their norm. Parameters and state are views of it, so loading is a read into it and saving a
write out of it. Both go on in the store's threads while another partition computes. Weights that stay while the rest comes
and goes have memory of their own, and go home when all is to be at home.
"""

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from seqpart.device.compiler import take_step, without_symbols
from seqpart.device.device import Device
from seqpart.methods.ist.statistics import Around, EarlierBuffers, as_it_is
from seqpart.model.blocks import Block, Tied
from seqpart.model.optimizers import GradientNorm, Optimizer
from seqpart.model.packs import Pack
from seqpart.model.scheduler import Groups, note_rates, tune
from seqpart.model.tensors import attach, detach
from seqpart.profile.blocks import BlockCost
from seqpart.profile.partition import Flow, borrowed_costs, gradient_layouts, slot_bytes, state_layouts
from seqpart.runtime.boundary_io import clone_as_it_lies
from seqpart.runtime.graph_offload import Graph, GraphOffload, packing
from seqpart.runtime.slots import Slot, Wait, bring_back, divided
from seqpart.store.layout import Layout
from seqpart.store.store import Store, Transfer


class Partition:
    """Partition `number`: some blocks of the chain, moved in and out of slots that the executor owns."""

    def __init__(
        self, number: int, blocks: Sequence[Block], costs: Sequence[BlockCost], store: Store, device: Device,
        *, optimizer: Optimizer, seed: int, autocast: torch.dtype | None = None, borrows: bool = True,
        weights_stay: bool = False, frozen: Collection[int] = (),
    ) -> None:  # fmt: skip
        """frozen: parameters, by id, that do not learn though the plan has room for it."""
        self.number, self.blocks, self.weights_stay = number, blocks, weights_stay
        self._costs, self._store, self._device = costs, store, device
        flow = Flow(costs)
        self.entering, self.leaving, self._written, self._used_up = flow.came, flow.leaving, flow.written, flow.used_up(costs)
        self._choice, self._seed, self._autocast, self._frozen = optimizer, seed, autocast, frozen
        self.tied = [(block, tie) for block in blocks for tie in block.tied if tie.owner not in blocks]
        """(block, tie): parameters used here whose home is in another partition."""
        self._borrows, self.lenders = borrows, list[Partition]()
        """Partitions whose homes come along; their last save is to be waited for."""
        self._borrowed = borrowed_costs(blocks, costs) if borrows else {}
        self._states, self._gradients = state_layouts(costs, optimizer), gradient_layouts(costs)
        self.optimizer: torch.optim.Optimizer | None = None
        self.built: weakref.ref[torch.optim.Optimizer] | None = None
        """The optimizer of the last visit, if somebody else holds it."""
        self.trainable: dict[tuple[int, int], nn.Parameter] = {}
        """Parameters that learn in this visit, by their places in the model."""
        self._modules: list[list[nn.Module]] = []
        """Of each block, all that it consists of: to walk through them by name at every step takes longer than a small step."""
        self._buffered = {block: cost.changing for block, cost in zip(blocks, costs, strict=True) if cost.changing}
        self.buffers = EarlierBuffers(self._buffered, self._attach)
        self._slot: Slot | None = None
        self._own: torch.Tensor | None = None
        """Memory of weights that stay while the rest comes and goes."""
        self._filled = self.unsaved = False
        """Whether they are there, and newer than their homes."""
        self._regions: list[list[torch.Tensor]] = []
        self.transfer = self._weights = self._state = Transfer(device)
        """The last one, in or out, which the next follows. Of one in: weights, and what only the optimizer step needs."""
        self._to_update = self.changed = False
        self._waiting: list[str] | None = None
        """Parameters whose gradients are at home."""
        self._graphs: dict[int, Graph] = {}

    @property
    def _weight_bytes(self) -> int:
        return sum(cost.layout.padded_nbytes for cost in self._costs)

    def needs(self, *, to_update: bool, gradients: bool) -> int:
        """Bytes of the slot for this visit. `gradients`: theirs will go home, or come back."""
        kept = gradients or (to_update and self._waiting is not None)
        borrowed = sum(cost.layout.padded_nbytes for cost in self._borrowed.values())
        own = self._weight_bytes if self.weights_stay else 0
        return borrowed + slot_bytes(self._costs, self._choice if to_update else None, gradients=kept) - own

    # --- coming ---------------------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """For weights that stay while the rest comes and goes: memory that is this partition's until `release`."""
        if self.weights_stay and self._own is None:
            self._own = self._device.empty(self._weight_bytes)

    def begin_load(self, slot: Slot | None, *, to_update: bool) -> None:
        """Start to read weights, and with `to_update` optimizer state and waiting gradients, into `slot`, if any is needed."""
        self._slot, self._to_update = slot, to_update
        rest = slot.buffer if slot is not None else torch.empty(0, dtype=torch.uint8)
        own, borrowed = [cost.layout for cost in self._costs], [cost.layout for cost in self._borrowed.values()]
        others = [borrowed, self._states if to_update else [], self._gradients]
        apart = [] if self._own is None else divided(self._own, [own])
        self._regions = [*apart, *divided(rest, others if apart else [own, *others])]
        homes, states = [block.home for block in (*self.blocks, *self._borrowed)], list[tuple[str, torch.Tensor]]()
        if to_update:
            named = zip((block.state_home for block in self.blocks), self._regions[2], strict=True)
            states = [(home, region) for home, region in named if home in self._store]
            if self._waiting is not None:
                states += zip((block.gradient_home for block in self.blocks), self._regions[3], strict=True)
        before = [self.transfer, *(lender.transfer for lender in self.lenders)]
        first = self._own is not None and not self._filled
        made = self._device.mark() if first else None  # what computes may not be through with what that memory was before

        def ready() -> None:
            if slot is not None:
                slot.free()
            if first:
                self._device.after(made)
            for transfer in before:
                transfer.follow()

        weights = [] if self._filled else list(zip(homes, self._regions[0] + self._regions[1], strict=True))
        # State that is not at home yet begins as zeros in the slot, which must be free then.
        waits = weights or (to_update and any(block.state_home not in self._store for block in self.blocks))
        self._weights = self._store.begin_get(weights, ready) if waits else Transfer(self._device)
        self._state = self._store.begin_get(states, ready) if slot is not None else Transfer(self._device)
        # A visit without a slot waits for nothing, and state of the last one may still be on its way home.
        self.transfer = self._weights.with_other(self._state).with_other(self.transfer.going_on())

    def finish_load(self, *, learns: bool) -> int:
        """Let the modules' tensors be views of the slot, once its weights are there. Returns the bytes read from the disk."""
        self._weights.follow()
        self._filled = self._own is not None
        self._attach()
        if self._filled:
            self.buffers.begin_visit()
        self.buffers.come_back()
        self.learn(learns)
        if self._to_update:
            self._build_optimizer()
            self._fetch_gradients()
        return self._weights.nbytes + self._state.nbytes

    def learn(self, learns: bool) -> None:
        """Whether gradients of the parameters are wanted; those that the user froze stay frozen."""
        for block, cost in zip(self.blocks, self._costs, strict=True):
            own = {spec.name for spec in cost.layout.specs}
            for name, parameter in block.module.named_parameters():
                if name in own:
                    parameter.requires_grad_(learns and name in cost.trainable and id(parameter) not in self._frozen)
        for block, tie in self.tied if self._borrows else ():
            parameter = block.module.get_parameter(tie.name)
            planned = tie.owner_name in self._borrowed[tie.owner].trainable
            parameter.requires_grad_(learns and planned and id(parameter) not in self._frozen)
        for block in self.blocks:
            block.module.train()  # once at least: a module's own may leave parts as they are
        self._modules = [list(block.module.modules()) for block in self.blocks]
        self.trainable = {
            (block.places.get(name, block.number), number): parameter
            for block, cost in zip(self.blocks, self._costs, strict=True)
            for number, (name, parameter) in enumerate(block.module.named_parameters())
            if parameter.requires_grad and name in cost.trainable
        }

    def _build_optimizer(self) -> None:
        if not self.trainable:
            return
        self.optimizer = self._choice.build(list(self.trainable.values()))
        self.built = weakref.ref(self.optimizer)
        note_rates(self.optimizer)
        for block, cost, layout, region in zip(self.blocks, self._costs, self._states, self._regions[2], strict=True):
            if not (begun := block.state_home in self._store):
                region.zero_()
            named = [(name, p) for name, p in block.module.named_parameters() if p.requires_grad and name in cost.trainable]
            self._choice.adopt(self.optimizer, named, layout.views(region), begun=begun)

    def _fetch_gradients(self) -> None:
        if self._waiting is None:
            return
        for block, layout, region in zip(self.blocks, self._gradients, self._regions[3], strict=True):
            views = layout.views(region)
            for name, parameter in block.module.named_parameters():
                if f"{block.home}.{name}" in self._waiting:
                    parameter.grad = views[name]
        self._waiting = None

    # --- work -----------------------------------------------------------------------------------------------------

    def forward(self, taken: Pack, *, training: bool, key: tuple[int, ...], around: Around = as_it_is) -> Pack:
        """What leaves for what enters; the random state of each block is a function of `key` and the block."""
        values = dict(taken)  # to train it stays as it is: it may be needed again, and is no leaf to write into
        for value in self._written if training else ():
            values[value.number] = clone_as_it_lies(values[value.number])
        for block, modules, used_up in zip(self.blocks, self._modules, self._used_up, strict=True):
            module = block.module
            if any(part.training is not training for part in modules):
                module.train(training)
            self._device.seed(self._seed, *key, block.draws_as)
            with without_symbols(), around(modules), self.autocast():
                given = module(*(values[number] for number in block.takes))
            values.update(zip(block.gives, given, strict=True) if block.is_cut_out else ((block.gives[0], given),))
            for number in used_up:
                del values[number]
        return values

    def autocast(self) -> AbstractContextManager[None]:
        return self._device.autocast(self._autocast)

    def _attach(self) -> None:
        for block, cost, region in zip(self.blocks, self._costs, self._regions[0], strict=True):
            attach(block.module, cost.layout.views(region))
        borrowed = {
            owner: cost.layout.views(region)
            for (owner, cost), region in zip(self._borrowed.items(), self._regions[1], strict=True)
        }
        for block, tie in self.tied if self._borrows else ():
            attach(block.module, {tie.name: borrowed[tie.owner][tie.owner_name]})

    def keep_graph(self, m: int, graph: Graph) -> None:
        """Until `kept_graph`. What autograd saved of the weights must have been packed, see `packing`."""
        self._graphs[m] = graph

    def kept_graph(self, m: int) -> Graph:
        """Of micro-batch `m`; forgotten here."""
        return self._graphs.pop(m)

    def packing(self, offload: GraphOffload | None) -> torch.autograd.graph.saved_tensors_hooks:
        """Inside, autograd saves places instead of views of the slot; they are found in the slot of the next visit."""
        changing = [block.module.get_buffer(name) for block, names in self._buffered.items() for name in names]
        buffer = self._weights_in()
        assert buffer is not None
        return packing(buffer, self._weights_in, changing, None if any(c.writes_late for c in self._costs) else offload)

    def _weights_in(self) -> torch.Tensor | None:
        """The buffer in which they lie, while it is loaded."""
        return self._own if self._own is not None else self._slot.buffer if self._slot is not None else None

    def part_gradients(self, passed_down: Iterable[torch.Tensor] = (), others: Iterable[int] = ()) -> None:
        """Give each gradient memory of its own. Autograd may let two weights, or a weight and the input, have one tensor,
        as in x + a[None] + b[None]; then what a later micro-batch adds to the one, or a norm clips, would change both.

        others: addresses of memory that somebody else will use again.
        """
        known = {*others, *(gradient.untyped_storage().data_ptr() for gradient in passed_down)}
        for parameter in self.trainable.values():
            if parameter.grad is not None and (place := parameter.grad.untyped_storage().data_ptr()) in known:
                parameter.grad = parameter.grad.clone()
            elif parameter.grad is not None:
                known.add(place)

    def scale_gradients(self, factor: float) -> None:
        """Of the parameters whose home is here: what a later partition shares comes to the one that owns it."""
        for parameter in self.trainable.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def gradient_norms(self) -> dict[tuple[int, int], GradientNorm]:
        """Of each trained parameter that has a gradient, by its place among those of the model."""
        return {place: GradientNorm.of(p.grad) for place, p in self.trainable.items() if p.grad is not None}

    def finish_state(self) -> None:
        """What the optimizer step needs is there, for what is issued from now on."""
        self._state.follow()
        self._state = Transfer(self._device)  # there, for all further steps of this visit

    def update(self, rate: float | Groups = 1.0, clip: tuple[float, torch.Tensor] | None = None) -> None:
        """Optimizer step at a `rate` as `tune` takes it, gradients scaled by `clip` (limit, total norm) and then freed."""
        self.finish_state()
        if clip is not None and self.trainable:
            nn.utils.clip_grads_with_norm_(list(self.trainable.values()), *clip)
        if self.optimizer is not None:
            tune(self.optimizer, rate)
            take_step(self.optimizer)
        self.buffers.forget()
        self.changed = self.changed or self.optimizer is not None or bool(self._buffered)
        self.forget_gradients()

    def tested(self) -> None:
        """Behind a forward pass in evaluation: buffers that it changed are there to stay, as in a plain loop."""
        if any(cost.tests_change for cost in self._costs):
            self.buffers.forget()
            self.changed = True

    def abandon_update(self) -> None:
        """Forget what the micro-batches of an unfinished update left: gradients, graphs and running statistics."""
        self.forget_gradients()
        self._graphs, self._waiting = {}, None
        self.buffers.undo()

    def forget_gradients(self) -> None:
        for parameter in self.trainable.values():
            parameter.grad = None

    @contextmanager
    def collect_tied_gradients(self) -> Iterator[dict[Tied, torch.Tensor | None]]:
        """Inside, gradients of parameters with a home elsewhere begin at nothing; behind it the dict holds what came."""
        found: dict[Tied, torch.Tensor | None] = {}
        parameters = {tie: block.module.get_parameter(tie.name) for block, tie in self.tied}
        before = {tie: parameter.grad for tie, parameter in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = None
        yield found
        for tie, parameter in parameters.items():  # of one that several blocks use, with the first of them
            found[tie], parameter.grad = parameter.grad, None
        for tie, parameter in parameters.items():
            parameter.grad = before[tie]

    # --- going ----------------------------------------------------------------------------------------------------

    def save(self, *, keep_state: bool, again: bool = False, weights: bool = True) -> Transfer:
        """Start to send home what changed, and stay. The slot must rest until the transfer is over.

        again: the next update does so too, and until then its files need no checksums. weights: those that stay go too.
        """
        for block, cost, region in zip(self.blocks, self._costs, self._regions[0], strict=True) if self.changed else ():
            bring_back(block.module, cost.layout.views(region))
        self.unsaved = self.unsaved or self.changed
        items = self._weights_home() if weights and self.unsaved else []
        if self.changed and keep_state and self._to_update:
            items += [
                (b.state_home, s, r) for b, s, r in zip(self.blocks, self._states, self._regions[2], strict=True) if s.specs
            ]
        self.changed = False
        self.transfer = self._begin_put(items, checksummed=not again).with_other(self.transfer.going_on())
        return self.transfer

    def _weights_home(self) -> list[tuple[str, Layout, torch.Tensor]]:
        """What is to be put there; others stay as they are."""
        self.unsaved = False
        layouts = [cost.layout for cost in self._costs]
        regions = self._regions[0] if self._own is None else divided(self._own, [layouts])[0]
        every = zip(self.blocks, self._costs, regions, strict=True)
        return [(b.home, c.layout, r) for b, c, r in every if c.trainable or b in self._buffered]

    def save_weights(self) -> Transfer:
        """Start to send home those that stay, wherever the rest is."""
        put = self._begin_put(self._weights_home(), checksummed=False)
        self.transfer = put.with_other(self.transfer.going_on())
        return put

    def begin_drop(
        self, *, keep_state: bool, gradients: bool = False, again: bool = False, stay: bool = False
    ) -> tuple[Slot | None, Wait, int]:
        """Start to send home what changed, let go of the slot. Returns it, when it is free, and the bytes to be written.

        stay: weights that stay do so until the next visit. Without `keep_state` its optimizer state is forgotten at home too.
        """
        if self._graphs or gradients:  # the update belongs to a later visit, and they are not to be written before
            self.buffers.leave()
        self.buffers.end_visit()
        self.finish_state()  # also where no step was made
        waiting = self._gradients_home() if gradients else Transfer(self._device)
        keep_state = keep_state or self._choice.average is not None  # an average is what the run is to leave
        saved = self.save(keep_state=keep_state, again=again, weights=not (self.weights_stay and stay))
        if not keep_state:
            for block in [block for block, state in zip(self.blocks, self._states, strict=True) if state.specs]:
                self._store.discard(block.state_home)
        slot, mark = self._slot, self._device.mark()

        def free() -> None:
            self._device.after(mark)
            saved.follow()
            waiting.follow()

        self.transfer = saved.with_other(waiting)
        self._let_go()
        return slot, free, saved.nbytes + waiting.nbytes

    def _gradients_home(self) -> Transfer:
        names, items = [], []
        for block, layout, region in zip(self.blocks, self._gradients, self._regions[3], strict=True):
            views = layout.views(region)
            for name, parameter in block.module.named_parameters():
                if parameter.grad is not None and name in views:
                    views[name].copy_(parameter.grad)
                    names.append(f"{block.home}.{name}")
            items.append((block.gradient_home, layout, region))
        self._waiting = names
        return self._begin_put(items, checksummed=False)

    def _begin_put(self, items: Sequence[tuple[str, Layout, torch.Tensor]], *, checksummed: bool) -> Transfer:
        """Start to send these home, behind what computes now."""
        mark = self._device.mark()
        return self._store.begin_put(items, lambda: self._device.after(mark), checksummed=checksummed)

    def _let_go(self) -> None:
        for block in self.blocks:
            others = [] if self._borrows else [tie.name for other, tie in self.tied if other is block]
            detach(block.module, [*others, *block.buffers_made])
        self.buffers.forget()
        self.optimizer, self._slot, self._regions = None, None, []
        self.trainable, self._modules, self.changed = {}, [], False

    def release(self) -> None:
        """Hold nothing on the device any more, whatever happened before."""
        for transfer in self.transfer, self._state:
            transfer.settle()  # its bytes must not arrive in memory that is gone
        self.transfer = self._state = Transfer(self._device)  # nor its error in the next visit
        self._graphs, self._waiting = {}, None
        self.buffers.release()
        self._own, self._filled, self.unsaved = None, False, False
        self._let_go()
