"""One partition on the device, with its optimizer.

    AT_HOME --load--> LOADING --> RESIDENT --drop--> SAVING --> AT_HOME

    who holds the weights:  the store   both       the slot       both     the store

A slot is one flat buffer that partitions use in turn: weights, at the same offsets in each visit, then optimizer state,
then gradients that wait for the total norm. Parameters and state are views of it, so loading is a read into it and saving a
write out of it. Both run in the store's threads while another partition computes. Weights that stay on the device between
visits have memory of their own, and are saved when all homes have to be up to date.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from seqpart.device.compiler import without_symbols
from seqpart.device.device import Device
from seqpart.methods.ist.statistics import Around
from seqpart.model.blocks import Block, Tied
from seqpart.model.gradient_hooks import hooks_put_off
from seqpart.model.optimizers import Adopted, GradientNorm, Optimizer
from seqpart.model.packs import Pack
from seqpart.model.scheduler import Groups
from seqpart.model.tensors import attach, detach, twin_of
from seqpart.profile.blocks import BlockCost
from seqpart.profile.partition import Flow, borrowed_costs, gradient_layouts, slot_bytes, state_layouts
from seqpart.runtime.boundary_io import clone_as_it_lies
from seqpart.runtime.buffers import BufferSnapshots
from seqpart.runtime.graph_offload import Graph, GraphOffload, packing
from seqpart.runtime.host_steps import HostSteps
from seqpart.runtime.slots import Slot, Wait, bring_back, divided
from seqpart.store.layout import Layout
from seqpart.store.store import Store, Transfer, at_once

Learning = tuple[str, tuple[int, int], nn.Parameter]
"""(name in its block, place in the model, parameter)."""
_NOTHING = torch.empty(0, dtype=torch.uint8)


class Partition:
    """Partition `number`: some blocks of the chain, moved in and out of slots that the executor owns."""

    def __init__(
        self, number: int, blocks: Sequence[Block], costs: Sequence[BlockCost], store: Store, device: Device,
        *, optimizer: Optimizer, seed: int, autocast: torch.dtype | None = None, borrows: bool = True,
        weights_stay: bool = False, host_steps: HostSteps | None = None,
    ) -> None:  # fmt: skip
        """host_steps: makes its optimizer steps where its homes are; None: they are made on the device."""
        self.number, self.blocks, self.weights_stay = number, blocks, weights_stay
        self._costs, self._store, self._device = costs, store, device
        flow = Flow(costs)
        self.entering, self.leaving, self._written, self._used_up = flow.came, flow.leaving, flow.written, flow.used_up(costs)
        self._optimizer_choice, self._seed, self._autocast, self._host_steps = optimizer, seed, autocast, host_steps
        self.tied = [(block, tie) for block in blocks for tie in block.tied if tie.owner not in blocks]
        """(block, tie): parameters used here whose home is in another partition."""
        self._borrows, self.lenders = borrows, list[Partition]()
        """Partitions that own tied weights loaded here; loading waits for their last save."""
        self._borrowed = borrowed_costs(blocks, costs) if borrows else {}
        self._states, self._gradients = state_layouts(blocks, costs, optimizer), gradient_layouts(costs)
        self._adopted: Adopted | None = None
        """The optimizer of this visit."""
        self.built: weakref.ref[torch.optim.Optimizer] | None = None
        """Weak reference to the optimizer of the last visit: alive only if somebody else holds it."""
        self.trainable: dict[tuple[int, int], nn.Parameter] = {}
        """Parameters that learn in this visit, by their places in the model."""
        self._learning: list[dict[str, tuple[int, int]]] = []
        """{name: place} of these parameters, for each block, also after the visit."""
        self._stale = self._refreshes = False
        """True if a step on the host has changed the weights since they were loaded; if it loads them again itself."""
        self._modules: list[list[nn.Module]] = []
        """All submodules of each block, because walking them by name at every step takes longer than a small step."""
        self._buffered = {block: cost.changing for block, cost in zip(blocks, costs, strict=True) if cost.changing}
        self.buffers = BufferSnapshots(self._buffered, self._attach)
        self._slot: Slot | None = None
        self._resident: torch.Tensor | None = None
        """Memory of the weights that stay on the device between visits."""
        self._holds_weights = self.unsaved = False
        """True if `_resident` holds the weights; true if they are newer than their homes."""
        self._regions: list[list[torch.Tensor]] = []
        self._transfer = self._weights = self._state = self._stepping = Transfer(device)
        """The last transfer, in or out; of a load, its weights, and its optimizer state; the last step on the host."""
        self._to_update = self.changed = False
        self._gradients_at_home: list[str] | None = None
        """Names of parameters whose gradients are at home."""
        self.kept_graphs: dict[int, Graph] = {}
        """Graphs until BACKWARD takes them, by micro-batch. Weights that autograd saved in them must be packed: `packing`."""

    @property
    def transfer(self) -> Transfer:
        """The last transfer and step on the host, which the next load waits for."""
        return self._transfer.with_other(self._stepping)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self._adopted.optimizer if self._adopted is not None else None

    @property
    def awaits_step(self) -> bool:
        """True if its gradients wait at home for a step on the host."""
        return self._host_steps is not None and self._gradients_at_home is not None

    @property
    def _weight_bytes(self) -> int:
        return sum(cost.layout.padded_nbytes for cost in self._costs)

    def needs(self, *, to_update: bool, gradients: bool) -> int:
        """Bytes of the slot for this visit. gradients: they will be offloaded, or loaded again."""
        to_update = to_update and self._host_steps is None
        kept = gradients or (to_update and self._gradients_at_home is not None)
        borrowed = sum(cost.layout.padded_nbytes for cost in self._borrowed.values())
        own = self._weight_bytes if self.weights_stay else 0
        return borrowed + slot_bytes(self._costs, self._states if to_update else (), gradients=kept) - own

    # --- coming ---------------------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Allocates memory for weights that stay on the device between visits; this partition keeps it until `release`."""
        if self.weights_stay and self._resident is None:
            self._resident = self._device.empty(self._weight_bytes)

    def begin_load(self, slot: Slot | None, *, to_update: bool) -> None:
        """Starts to read weights, and with `to_update` optimizer state and offloaded gradients, into `slot` if there is one."""
        self._slot, self._to_update = slot, to_update
        rest = slot.buffer if slot is not None else torch.empty(0, dtype=torch.uint8)
        own, borrowed = [cost.layout for cost in self._costs], [cost.layout for cost in self._borrowed.values()]
        others = [borrowed, self._states if to_update else [], self._gradients]
        apart = [] if self._resident is None else divided(self._resident, [own])
        self._regions = [*apart, *divided(rest, others if apart else [own, *others])]
        homes, states = [block.home for block in (*self.blocks, *self._borrowed)], list[tuple[str, torch.Tensor]]()
        if to_update:
            named = zip((block.state_home for block in self.blocks), self._regions[2], strict=True)
            states = [(home, region) for home, region in named if home in self._store]
            if self._gradients_at_home is not None:
                states += zip((block.gradient_home for block in self.blocks), self._regions[3], strict=True)
        before = [self.transfer, *(lender.transfer for lender in self.lenders)]
        first = self._resident is not None and not self._holds_weights
        made = self._device.mark() if first else None  # kernels may still use what that memory was before

        def ready() -> None:
            if slot is not None:
                slot.free()
            if first:
                self._device.after(made)
            for transfer in before:
                transfer.follow()

        weights = [] if self._holds_weights else list(zip(homes, self._regions[0] + self._regions[1], strict=True))
        # State that has no home yet begins as zeros in the slot, which must be free then.
        waits = weights or (to_update and any(block.state_home not in self._store for block in self.blocks))
        self._weights = self._store.begin_get(weights, ready, narrow=True) if waits else Transfer(self._device)
        self._state = self._store.begin_get(states, ready) if slot is not None else Transfer(self._device)
        # A visit without a slot waits for nothing, and state of the last one may still be being saved.
        self._transfer = self._weights.with_other(self._state).with_other(self._transfer.going_on())

    def finish_load(self, *, learns: bool) -> int:
        """Waits for the weights and makes the modules' tensors views of the slot. Returns the bytes read from disk."""
        self._weights.follow()
        if self._host_steps is not None:
            self._host_steps.free_gradients(self.number)
        self._holds_weights = self._resident is not None
        self._attach()
        if self._holds_weights:
            self.buffers.begin_visit()
        self.buffers.come_back()
        self.learn(learns)
        if self._to_update:
            self._build_optimizer()
            self._fetch_gradients()
        return self._weights.nbytes + self._state.nbytes

    def learn(self, learns: bool) -> None:
        """Sets requires_grad of the parameters; those that are frozen during the run stay frozen."""
        for block, cost in zip(self.blocks, self._costs, strict=True):
            own = {spec.name for spec in cost.layout.specs}
            for name, parameter in block.module.named_parameters():
                if name in own:
                    parameter.requires_grad_(learns and name in cost.trainable and block.learns.get(name, True))
        for block, tie in self.tied if self._borrows else ():
            parameter = block.module.get_parameter(tie.name)
            planned = tie.owner_name in self._borrowed[tie.owner].trainable
            parameter.requires_grad_(learns and planned and tie.owner.learns.get(tie.owner_name, True))
        for block in self.blocks:
            block.module.train()  # at least once: a module's own train() may leave some submodules as they are
        self._modules = [list(block.module.modules()) for block in self.blocks]
        self._learning = [
            {
                name: (block.places.get(name, block.number), number)
                for number, (name, parameter) in enumerate(block.module.named_parameters())
                if parameter.requires_grad and name in cost.trainable
            }
            for block, cost in zip(self.blocks, self._costs, strict=True)
        ]
        self.trainable = {place: parameter for own in self._parameters() for _, place, parameter in own}

    def _parameters(self) -> list[list[Learning]]:
        """Returns (name, place, parameter on the device) of those that learn, for each block."""
        return [
            [(name, places[name], p) for name, p in block.module.named_parameters() if name in places]
            for block, places in zip(self.blocks, self._learning, strict=True)
        ]

    def _build_optimizer(self) -> None:
        for block, region in zip(self.blocks, self._regions[2], strict=True):
            if block.state_home not in self._store and self.trainable:
                region.zero_()
        begun = [block.state_home in self._store for block in self.blocks]
        self._adopt(self._parameters(), self._regions[2], begun)

    def _adopt(self, parameters: Sequence[Sequence[Learning]], states: Sequence[torch.Tensor], begun: Sequence[bool]) -> None:
        """Builds the optimizer of `parameters`, (name, place, parameter) for each block, with `states` as their state.

        begun: true for blocks that have made a step before.
        """
        named = zip(self.blocks, parameters, strict=True)
        by_place = {place: (block.exported(name), p) for block, own in named for name, place, p in own}
        if not by_place:
            return
        in_order = [by_place[place] for place in sorted(by_place)]
        names = [name for name, _ in in_order] if self._optimizer_choice.named else []
        built = self._optimizer_choice.build([parameter for _, parameter in in_order], names)
        self._adopted = Adopted(self._optimizer_choice, built, {id(parameter): name for name, parameter in in_order})
        self.built = weakref.ref(self._adopted.optimizer)
        every = zip(self.blocks, parameters, self._states, states, begun, strict=True)
        for block, own, layout, region, made in (one for one in every if one[1]):
            self._adopted.take([(name, p) for name, _, p in own], layout.views(region), block.exported, begun=made)

    def _fetch_gradients(self) -> None:
        if self._gradients_at_home is None:
            return
        for block, layout, region in zip(self.blocks, self._gradients, self._regions[3], strict=True):
            views = layout.views(region)
            for name, parameter in block.module.named_parameters():
                if f"{block.home}.{name}" in self._gradients_at_home:
                    parameter.grad = views[name]
        self._gradients_at_home = None

    # --- work -----------------------------------------------------------------------------------------------------

    def forward(self, taken: Pack, *, training: bool, key: tuple[int, ...], around: Around = nullcontext) -> Pack:
        """Maps incoming values to outgoing ones; the random state of each block is a function of `key` and the block."""
        self.refresh()
        values = dict(taken)  # training must not write into it: it may be needed again, and a leaf cannot be changed in place
        for value in self._written if training else ():
            values[value.number] = clone_as_it_lies(values[value.number])
        for block, modules, used_up in zip(self.blocks, self._modules, self._used_up, strict=True):
            module = block.module
            if any(part.training is not training for part in modules):
                module.train(training)
            self._device.seed(self._seed, *key, block.draws_as)
            with without_symbols(), around(modules), self.autocast(), block.compiled(module):
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

    def packing(self, offload: GraphOffload | None) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which autograd saves offsets instead of views of the slot; the next visit's slot has their values."""
        changing = [block.module.get_buffer(name) for block, names in self._buffered.items() for name in names]
        buffer = self._weights_in()
        assert buffer is not None
        return packing(buffer, self._weights_in, changing, None if any(c.writes_late for c in self._costs) else offload)

    def _weights_in(self) -> torch.Tensor | None:
        """The buffer that holds the weights, while the partition is loaded."""
        return self._resident if self._resident is not None else self._slot.buffer if self._slot is not None else None

    def unalias_gradients(self, passed_down: Iterable[torch.Tensor] = (), others: Iterable[int] = ()) -> None:
        """Gives each gradient memory of its own. Autograd may give two weights, or a weight and the input, one tensor, as in
        x + a[None] + b[None]; then accumulating into one of them, or clipping it, would change both.

        others: addresses of memory that will be reused elsewhere.
        """
        known = {*others, *(gradient.untyped_storage().data_ptr() for gradient in passed_down)}
        for parameter in self.trainable.values():
            if parameter.grad is not None and (place := parameter.grad.untyped_storage().data_ptr()) in known:
                parameter.grad = parameter.grad.clone()
            elif parameter.grad is not None:
                known.add(place)

    def scale_gradients(self, factor: float) -> None:
        """Multiplies the gradients of the parameters owned here; tied weights are scaled in the partition that owns them."""
        for parameter in self.trainable.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def gradient_norms(self) -> dict[tuple[int, int], GradientNorm]:
        """Gradient norm of each trainable parameter that has a gradient, by its place in the model."""
        return {place: GradientNorm.of(p.grad) for place, p in self.trainable.items() if p.grad is not None}

    def finish_state(self) -> None:
        """Makes all work issued from now on wait for the optimizer state."""
        self._follow_state()
        if self._adopted is not None and self._host_steps is None:
            self._adopted.restore()

    def _follow_state(self) -> None:
        self._state.follow()
        self._state = Transfer(self._device)  # nothing to wait for in further steps of this visit

    def update(
        self, rate: float | Groups = 1.0, clip: tuple[float, torch.Tensor] | None = None, *, stays: bool = False,
        place: tuple[int, int] = (0, 0),
    ) -> None:  # fmt: skip
        """Makes an optimizer step at `rate` (see `tune`), with gradients clipped by `clip` (limit, total norm), then freed.

        place: (stage, number of the update in it).
        stays: it is not dropped before its next forward pass, so that weights of a step on the host are loaded at once.
        """
        if self._host_steps is not None and any(self._learning):
            self._update_on_host(self._host_steps, rate, clip, place, stays=stays)
            return
        self.finish_state()
        if clip is not None and self.trainable:
            nn.utils.clip_grads_with_norm_(list(self.trainable.values()), *clip)
        if self._adopted is not None:
            self._adopted.tune(rate)
            self._adopted.step(self._seed, *place)
        self.buffers.forget()
        self.changed = self.changed or self._adopted is not None or bool(self._buffered)
        self.forget_gradients()

    def _update_on_host(
        self, host: HostSteps, rate: float | Groups, clip: tuple[float, torch.Tensor] | None, place: tuple[int, int],
        *, stays: bool,
    ) -> None:  # fmt: skip
        """Begins an optimizer step where the homes are, with gradients from the device, or from home if they waited there."""
        store, before, at_home = self._store, self.transfer, self._gradients_at_home if not self._regions else None
        begun = [block.state_home in store for block in self.blocks]
        parameters, states, taken = list[list[Learning]](), list[torch.Tensor](), list[list[str]]()
        for block, cost, layout, own in zip(self.blocks, self._costs, self._states, self._learning, strict=True):
            views = cost.layout.views(store.in_place(block.home, cost.layout)) if own else {}
            twins = {name: twin_of(block.module.get_parameter(name), views[name]) for name in own}
            parameters.append([(name, place, twins[name]) for name, place in own.items()])
            states.append(store.in_place(block.state_home, layout) if own and layout.specs else _NOTHING)
            if at_home is None:
                taken.append([name for name, place in own.items() if self.trainable[place].grad is not None])
            else:
                taken.append([name for name in own if f"{block.home}.{name}" in at_home])

        def places(regions: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            every = zip(self._gradients, regions, taken, strict=True)
            found = ((layout.views(region), names) for layout, region, names in every if names)
            return [views[name] for views, names in found for name in names]

        if at_home is not None:
            homes = zip(self.blocks, self._gradients, taken, strict=True)
            gradients = places([store.in_place(b.gradient_home, layout) if some else _NOTHING for b, layout, some in homes])
        else:
            here = [self.trainable[own[name]].grad for own, names in zip(self._learning, taken, strict=True) for name in names]
            given = [gradient for gradient in here if gradient is not None]
            gradients = host.bring(self.number, given, lambda room: places(divided(room, [self._gradients])[0]))
        self._adopt(parameters, states, begun)
        adopted, clip = self._adopted, None if clip is None else (clip[0], self._device.download(clip[1]))
        assert adopted is not None
        adopted.restore()
        adopted.tune(rate)
        learning = [p for own, names in zip(parameters, taken, strict=True) for name, _, p in own if name in names]

        def step() -> None:
            before.wait()
            for parameter, gradient in zip(learning, gradients, strict=True):
                parameter.grad = gradient
            if clip is not None:
                nn.utils.clip_grads_with_norm_(learning, *clip)
            adopted.step(self._seed, *place)
            adopted.write()
            for parameter in learning:
                parameter.grad = None
            for block, cost in zip(self.blocks, self._costs, strict=True):
                if cost.narrow.specs:
                    store.narrow(block.home, block.narrow_home, cost.narrow)
            if stays:
                self._weights = self._get_weights()

        self._stale, self._refreshes, self._gradients_at_home = bool(self._regions), stays, None
        self._stepping = host.begin(step)
        self.buffers.forget()
        self.forget_gradients()

    def _get_weights(self) -> Transfer:
        """Starts to load the weights that a step on the host has made."""
        items = zip((block.home for block in self.blocks), self._regions[0], strict=True)
        return self._store.begin_get(items, at_once, narrow=True)

    def refresh(self) -> None:
        """Makes all work issued from now on see the weights that the last step on the host has made."""
        if not self._stale:
            return
        assert self._host_steps is not None
        self._stepping.follow()
        if not self._refreshes:
            self._weights = self._get_weights()
        self._weights.follow()
        self._stale = self._refreshes = False
        self._host_steps.free_gradients(self.number)

    def tested(self) -> None:
        """After a forward pass in evaluation mode: buffers that it changed stay changed, as in a plain loop."""
        if any(cost.tests_change for cost in self._costs):
            self.buffers.forget()
            self.changed = True

    def abandon_update(self) -> None:
        """Forgets gradients, graphs and running statistics of an unfinished update."""
        self.forget_gradients()
        self.kept_graphs, self._gradients_at_home = {}, None
        self.buffers.undo()

    def forget_gradients(self) -> None:
        for parameter in self.trainable.values():
            parameter.grad = None

    @contextmanager
    def collect_tied_gradients(self) -> Iterator[dict[Tied, torch.Tensor | None]]:
        """A context in which gradients of parameters that other partitions own start as None; after it the dict holds them.

        Hooks of these parameters do not run: they get the sum of all uses, as in a model that is not cut, from their owner.
        """
        found: dict[Tied, torch.Tensor | None] = {}
        parameters = {tie: block.module.get_parameter(tie.name) for block, tie in self.tied}
        before = {tie: parameter.grad for tie, parameter in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = None
        with hooks_put_off(parameters.values()):
            yield found
        for tie, parameter in parameters.items():  # if several blocks use one parameter, the first gets its gradient
            found[tie], parameter.grad = parameter.grad, None
        for tie, parameter in parameters.items():
            parameter.grad = before[tie]

    # --- going ----------------------------------------------------------------------------------------------------

    def save(self, *, keep_state: bool, again: bool = False, weights: bool = True) -> Transfer:
        """Starts to save what changed, and stays loaded. The slot must not change until the transfer is over.

        again: the next update saves again, so these files need no checksums. weights: weights that stay are saved too.
        """
        for block, cost, region in zip(self.blocks, self._costs, self._regions[0], strict=True) if self.changed else ():
            bring_back(block.module, cost.layout.views(region))
        self.unsaved = self.unsaved or self.changed
        items = self._weights_home() if weights and self.unsaved else []
        if self.changed and keep_state and self._adopted is not None:  # else nothing learns: the state's memory has any values
            self._adopted.write()
            items += [
                (b.state_home, s, r) for b, s, r in zip(self.blocks, self._states, self._regions[2], strict=True) if s.specs
            ]
        self.changed = False
        self._transfer = self._begin_put(items, checksummed=not again).with_other(self._transfer.going_on())
        return self._transfer

    def _weights_home(self) -> list[tuple[str, Layout, torch.Tensor]]:
        """Returns (home, layout, region) of each block whose weights or buffers may have changed."""
        self.unsaved = False
        layouts = [cost.layout for cost in self._costs]
        regions = self._regions[0] if self._resident is None else divided(self._resident, [layouts])[0]
        every = zip(self.blocks, self._costs, regions, strict=True)
        return [(b.home, c.layout, r) for b, c, r in every if c.trainable or b in self._buffered]

    def save_weights(self) -> Transfer:
        """Starts to save the weights that stay on the device, whether the partition is loaded or not."""
        put = self._begin_put(self._weights_home(), checksummed=False)
        self._transfer = put.with_other(self._transfer.going_on())
        return put

    def begin_drop(
        self, *, keep_state: bool, gradients: bool = False, again: bool = False, stay: bool = False
    ) -> tuple[Slot | None, Wait, int]:
        """Starts to save what changed and gives up the slot. Returns the slot, a function that waits until it is free, and the
        bytes to be written.

        stay: weights that stay on the device are not saved now. Without `keep_state` the optimizer state is deleted, also at
        home.
        """
        if self.kept_graphs or gradients:  # a later visit makes the update: buffers must not be saved before it
            self.buffers.leave()
        self.buffers.end_visit()
        if self._refreshes:
            self.refresh()
        self._follow_state()  # also if no optimizer step was made
        waiting = self._send_gradients_home() if gradients else Transfer(self._device)
        keep_state = keep_state or self._optimizer_choice.averages  # the moving average is the run's result
        saved = self.save(keep_state=keep_state, again=again, weights=not (self.weights_stay and stay))
        if not keep_state:
            self._stepping.wait()
            for block in [block for block, state in zip(self.blocks, self._states, strict=True) if state.specs]:
                self._store.discard(block.state_home)
        slot, mark = self._slot, self._device.mark()

        def free() -> None:
            self._device.after(mark)
            saved.follow()
            waiting.follow()

        self._transfer = saved.with_other(waiting)
        self._detach()
        return slot, free, saved.nbytes + waiting.nbytes

    def _send_gradients_home(self) -> Transfer:
        names, items = [], []
        for block, layout, region in zip(self.blocks, self._gradients, self._regions[3], strict=True):
            views = layout.views(region)
            for name, parameter in block.module.named_parameters():
                if parameter.grad is not None and name in views:
                    views[name].copy_(parameter.grad)
                    names.append(f"{block.home}.{name}")
            items.append((block.gradient_home, layout, region))
        self._gradients_at_home = names
        return self._begin_put(items, checksummed=False)

    def _begin_put(self, items: Sequence[tuple[str, Layout, torch.Tensor]], *, checksummed: bool) -> Transfer:
        """Starts to save `items`, after the kernels issued so far."""
        mark = self._device.mark()
        return self._store.begin_put(items, lambda: self._device.after(mark), checksummed=checksummed)

    def _detach(self) -> None:
        for block in self.blocks:
            others = [] if self._borrows else [tie.name for other, tie in self.tied if other is block]
            detach(block.module, [*others, *block.buffers_made])
        self.buffers.forget()
        self._adopted, self._slot, self._regions, self._stale = None, None, [], False
        self.trainable, self._modules, self.changed = {}, [], False

    def release(self) -> None:
        """Frees all device memory, whatever happened before."""
        for transfer in self.transfer, self._state:
            transfer.settle()  # its bytes must not arrive in freed memory
        self._weights.settle()  # which a step on the host may have begun
        self._transfer = self._state = self._stepping = Transfer(self._device)  # nor may its error reach the next visit
        self.kept_graphs, self._gradients_at_home = {}, None
        self.buffers.release()
        self._resident, self._holds_weights, self.unsaved = None, False, False
        self._detach()
