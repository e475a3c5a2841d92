"""Finds what each block costs in bytes and operations, without allocating any of it.

A block runs forward and backward on fake tensors: shapes and types without memory. A dispatch mode watches storages being made
and freed, so every live byte between the operations is counted exactly; a kernel's workspace inside one operation is not seen,
and belongs to the plan's margin.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from math import prod
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from seqpart.device.device import Device
from seqpart.device.pages import round_up
from seqpart.errors import DataError, ModelError, first_line
from seqpart.model.blocks import Block, Chain
from seqpart.model.inspection import cure_of_tokens, cure_of_types, frozen_in, has_hooks, in_other_words
from seqpart.model.packs import ROWS, Value, has_gradients
from seqpart.model.tensors import layout_of, run_fake, tensors_of, with_tensors
from seqpart.profile.fake_mode import (
    CastUses,
    FakeMode,
    LiveBytes,
    SameTypes,
    asks_for_values,
    cast,
    changes_of,
    eval_edits,
    quiet_log,
    quiet_random,
    real_module,
    refuse_changes_by_mode,
)
from seqpart.store.layout import ALIGNMENT, Layout

_NONE = Layout(())
_WORTH = 4 * 4096
"""Bytes of a weight that is worth copies of its own in 16 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCost:
    """Costs of one block for one micro-batch, in whole bytes."""

    layout: Layout
    trainable: tuple[str, ...]
    gradient_layout: Layout
    """Layout of its gradients, where they wait at home for their norm."""
    gradients: int
    held: int
    """Bytes of tensors in plain attributes (what old-style weight_norm computes), which only the module frees."""
    frozen: int = 0
    """Number of frozen weights."""
    narrow: Layout = _NONE
    """Layout in 16 bits of its own weights that autocast alone uses, see `CastUses`: loaded so they give the same results."""
    buffers: int
    """Bytes of its buffers: an update keeps a copy, in case it has to be done again."""
    changing: tuple[str, ...] = ()
    """Names of all buffers: a mask that seems constant may be written at some updates alone."""
    tests_change: bool = False
    """True if it changes buffers in evaluation too."""
    writes_late: bool = False
    """True if a kernel writes into tensors that autograd has already saved: its graph has to stay on the device."""
    forward_peak: int
    """Most bytes alive while it runs forward with a graph, beyond those before it."""
    saved: int
    """Bytes alive after its forward pass: what autograd saved, and its output."""
    saved_alone: int
    """Bytes alive after its forward pass without the output, unless autograd saved that too."""
    saved_sizes: tuple[int, ...]
    """Each storage among `saved`. See [Note: the heap] in profile/partition.py."""
    untouched: int = 0
    untouched_peak: int = 0
    """Bytes reserved but not touched, beside `saved` (two thirds of an LSTM's workspace), and while it runs."""
    backward_peak: int
    """Most bytes alive while it runs backward, beyond those before; its gradients are among them."""
    accumulate_peak: int
    """Most bytes alive while it runs backward when its gradients exist already and a second micro-batch is added to them."""
    inference_peak: int
    """Most bytes alive while it runs forward without a graph."""
    takes: tuple[Value, ...]
    gives: tuple[Value, ...]
    flops: int
    """Floating point operations of one forward pass."""
    head_flops: int = 0
    """Those of the layer behind it that the loss computes, which no real run of the block times."""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    """Seconds of a real run with as many rows; 0 where there was none."""
    kept_seconds: float = 0.0
    """Seconds of both with a kept heap: see device/heap.py."""
    borrows: "tuple[BlockCost, ...]" = ()
    """Earlier blocks whose parameters it uses too: their homes are loaded with it if they are in another partition."""
    tied: tuple[tuple[int, int], ...] = ()
    """(number of the block, bytes of its parameters that are used) for each of `borrows`."""
    lent: int = 0
    """Bytes of its own parameters that later blocks use too."""
    borrowers: int = 0
    """Number of these blocks."""
    writes: frozenset[int] = frozenset()
    """Values that it takes and changes in place, as ReLU(inplace=True) does."""
    passes: tuple[tuple[int, int], ...] = ()
    """(value that it gives, value that it takes) in one memory, as a view is."""

    def with_head(self, shape: Sequence[int]) -> "BlockCost":
        """Returns the cost together with a layer behind it whose weight has this shape, except for the memory of the loss."""
        flops = 2 * prod(self.gives[-1].shape[:-1]) * prod(shape)
        # The head's gradient is there already when the block's own are computed.
        return replace(self, backward_peak=self.backward_peak + self.gradients, head_flops=flops)

    @property
    def weights(self) -> int:
        return self.layout.nbytes

    @property
    def input(self) -> int:
        return sum(value.nbytes for value in self.takes)

    @property
    def output(self) -> int:
        return sum(value.nbytes for value in self.gives)

    @property
    def result(self) -> Value:
        """The value that a loss after it judges: the last differentiable one that it gives."""
        return next((value for value in reversed(self.gives) if value.learns), self.gives[-1])

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of one row of its result."""
        return self.result.shape[1:]

    @property
    def output_dtype(self) -> torch.dtype:
        return self.result.dtype


def measure_chain(
    chain: Chain, input_shape: tuple[int, ...], batch: int, *, granule: int = 1,
    dtype: torch.dtype = torch.float32, autocast: torch.dtype | None = None, narrows: bool = False,
    real_run: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> tuple[BlockCost, ...]:  # fmt: skip
    """Measures every block for micro-batches of `batch` rows of `input_shape` and `dtype`, each run under `autocast`.

    narrows: finds `BlockCost.narrow` too, which takes a third more time.
    real_run: makes the context for a block that needs real tensors, because its shapes depend on values.

    Raises DataError where the rows do not suit the first block, ModelError where one block's output does not suit
    the next; the message names the block and the shapes.
    """
    costs: list[BlockCost] = []
    uses, differentiable = _uses(chain), chain.differentiable

    def value(number: int, giver: int, shape: tuple[int, ...], dtype: torch.dtype) -> Value:
        learns = has_gradients(dtype) and (differentiable is None or number in differentiable)
        nbytes = round_up(torch.Size(shape).numel() * dtype.itemsize, granule)
        return Value(number, shape, dtype, nbytes, batch, learns, giver, uses.get(number, ()))

    entering = [ROWS, *(chain[first].takes[0] for first in chain.begins[1:])]
    values = {number: value(number, -1, (batch, *input_shape), dtype) for number in entering}
    known: dict[tuple[object, ...], BlockCost] = {}  # one factory builds the same structure every time
    for block in chain:
        taken = [values[number] for number in block.takes]
        key = (block.same_as, block.tied, *((one.shape, one.dtype, one.learns) for one in taken))
        if key not in known:
            logging.getLogger("seqpart.planning").debug("block %d of %d is measured", block.number + 1, len(chain))
            known[key] = _measure_block(block, taken, granule, autocast, narrows, real_run, chain)
        cost = known[key]
        numbers = dict(zip((one.number for one in cost.takes), block.takes, strict=True))
        numbers.update(zip((one.number for one in cost.gives), block.gives, strict=True))
        given = [value(n, block.number, one.shape, one.dtype) for n, one in zip(block.gives, cost.gives, strict=True)]
        values.update({one.number: one for one in given})
        takes = tuple(replace(own, example=one.example) for own, one in zip(taken, cost.takes, strict=True))
        costs.append(replace(
            cost, takes=takes, gives=tuple(given), writes=frozenset(numbers[number] for number in cost.writes),
            passes=tuple((numbers[ours], numbers[theirs]) for ours, theirs in cost.passes),
        ))  # fmt: skip
    *others, last = _lending(chain, costs)
    return (*others, last if chain.head is None else last.with_head(chain.head.shape))


def _lending(chain: Chain, costs: Sequence[BlockCost]) -> list[BlockCost]:
    """Fills in `lent`, `borrowers` and `borrows` of all blocks, and takes what they lend out of `narrow`. Each result is an
    object of its own, distinguished by identity."""
    names = {(tie.owner.number, tie.owner_name) for block in chain for tie in block.tied}
    lent: list[list[int]] = [[] for _ in costs]
    for owner, nbytes in (tie for cost in costs for tie in cost.tied):
        lent[owner].append(nbytes)
    found: list[BlockCost] = []
    for block, cost, uses in zip(chain, costs, lent, strict=True):
        specs = (spec for spec in cost.narrow.specs if (block.number, spec.name) not in names)
        narrow = Layout.of(specs, ALIGNMENT)
        borrows = tuple(found[owner] for owner, _ in cost.tied)
        found.append(replace(cost, lent=max(uses, default=0), borrowers=len(uses), borrows=borrows, narrow=narrow))
    return found


def _uses(chain: Chain) -> dict[int, tuple[int, ...]]:
    """{value: blocks that take it}; values of the last block, and of each part's last, are the model's output."""
    uses: dict[int, tuple[int, ...]] = {}
    for block in chain:
        for number in block.takes:
            uses[number] = (*uses.get(number, ()), block.number)
    return uses | {number: (len(chain),) for end in chain.ends for number in chain[end - 1].gives}


def _measure_block(
    block: Block, taken: Sequence[Value], granule: int, autocast: torch.dtype | None, narrows: bool,
    real_run: Callable[[], AbstractContextManager[object]], chain: Chain,
) -> BlockCost:  # fmt: skip
    mode = FakeMode()
    module, tensors = block.fake(mode)
    with block.left_as_it_is():
        try:
            return _measure_module(block, module, mode, tensors, taken, granule, autocast, narrows)
        except Exception as error:
            if not asks_for_values(error):
                raise
            with real_run():
                try:
                    return _measure_values(block, _with_examples(taken, chain, 0, autocast), granule, autocast, narrows)
                except (DataError, ModelError):
                    stop = 1 + max((value.giver for value in taken if not has_gradients(value.dtype)), default=-1)
                    if not stop:
                        raise
                    return _measure_values(block, _with_examples(taken, chain, stop, autocast), granule, autocast, narrows)


def _with_examples(taken: Sequence[Value], chain: Chain, stop: int, autocast: torch.dtype | None) -> list[Value]:
    """Returns what a block takes with a row of the data, and whole numbers with what the blocks before `stop` make of it."""
    if chain.row is None:
        return list(taken)
    found = dict.fromkeys((chain[first].takes[0] for first in chain.begins), chain.row())
    for block in chain[:stop]:
        with quiet_random(), block.left_as_it_is(), torch.no_grad(), cast(autocast):
            module, tensors = real_module(block, Device().torch)
            xs = (found[number].clone() for number in block.takes)
            found.update(zip(block.gives, run_fake(module.eval(), tensors, *xs), strict=True))
    return [
        replace(value, example=found.get(value.number)) if value.giver < 0 or not has_gradients(value.dtype) else value
        for value in taken
    ]


_SAMPLE = 512
"""Rows, or positions of rows, of a real run of a block whose shapes depend on values."""
_sampled: "WeakKeyDictionary[Block, dict[object, tuple[BlockCost, BlockCost]]]" = WeakKeyDictionary()


def _measure_values(
    block: Block, taken: Sequence[Value], granule: int, autocast: torch.dtype | None, narrows: bool
) -> BlockCost:
    """Measures a block whose shapes depend on values, as experts' do, with real values of few rows. More rows are
    extrapolated from two such runs, and the trial at the plan's micro-batch adds what it takes beyond that."""
    rows, positions = taken[0].rows, max(prod(value.shape[1:-1]) for value in taken)
    few = max(2, _SAMPLE // positions)

    def measured(count: int) -> BlockCost:
        with quiet_random():
            module, tensors = real_module(block, Device().torch)
        own = [value.with_rows(count) for value in taken]
        return _measure_module(block, module, nullcontext(), tensors, own, granule, autocast, narrows)

    if rows <= few:
        return measured(rows)
    known = _sampled.setdefault(block, {})
    key = (granule, autocast, narrows, *((value.with_rows(few).shape, value.dtype, value.learns) for value in taken))
    if key not in known:
        known[key] = measured(few // 2), measured(few)
    return _on_line(*known[key], rows)


def _on_line(one: BlockCost, other: BlockCost, rows: int) -> BlockCost:
    """Extrapolates the cost of `rows` rows linearly from two with fewer."""
    few, more = one.takes[0].rows, other.takes[0].rows

    def at(name: str) -> int:
        first, second = int(getattr(one, name)), int(getattr(other, name))
        return max(second, second + (second - first) * (rows - more) // (more - few))

    names = ("forward_peak", "saved", "saved_alone", "backward_peak", "accumulate_peak", "inference_peak", "flops")
    sizes = tuple(-(-size * rows // more) for size in other.saved_sizes)
    gives = tuple(value.with_rows(rows) for value in other.gives)
    return replace(other, **{name: at(name) for name in names}, saved_sizes=sizes, gives=gives)  # type: ignore[arg-type]


def _measure_module(
    block: Block, module: nn.Module, mode: AbstractContextManager[object], tensors: dict[str, torch.Tensor],
    taken: Sequence[Value], granule: int, autocast: torch.dtype | None, narrows: bool,
) -> BlockCost:  # fmt: skip
    module.train()
    shape, dtype = taken[0].shape, taken[0].dtype
    trainable, own = tuple(name for name, tensor in tensors.items() if tensor.requires_grad), block.own(tensors)
    narrow = CastUses(own, autocast) if narrows and autocast is not None else None
    try:
        with mode, quiet_random(), quiet_log(), with_tensors(module, tensors):
            refuse_changes_by_mode(module, tensors)
            with SameTypes():  # type: ignore[no-untyped-call]
                inference, flops = _watch_inference(module, tensors, taken, granule, autocast, narrow)
            found = _watch_training(block, module, tensors, taken, granule, autocast, narrow)
            changing = tuple(name for name, tensor in tensors.items() if not isinstance(tensor, nn.Parameter))
            tests = bool(changing) and eval_edits(block, module, tensors, [value.sample(learns=False) for value in taken])
    except ModelError as error:
        raise ModelError(f"{block}: {error.with_flags}") from None
    except Exception as error:
        if Device().is_out_of_memory(error) or asks_for_values(error):  # the block may well take these rows
            raise
        reason, known = in_other_words((str(error).splitlines() or [repr(error)])[0].rstrip("."))
        kind = "" if dtype == torch.float32 else f" and type {dtype}"
        packed = dtype == torch.uint8 and "float32" in reason  # of several inputs, whose floats are these
        given = torch.float32 if packed else dtype
        cure = known or cure_of_types(tensors.values(), given, autocast) or "Change the block, or the rows."
        text = (
            f"{block} cannot take {'the inputs of a row' if packed else f'rows of shape {shape[1:]}{kind}'}: {reason}. {cure}"
        )
        if block.number or known:
            raise ModelError(text) from error
        if not given.is_floating_point:
            text += " Whole numbers of 64 bits are tokens, for an embedding: give quantities as floats."
        elif tokens := cure_of_tokens(reason, dtype):
            text += f" {tokens}"
        raise DataError(text) from error
    layout = layout_of(own)
    hooked = any(map(has_hooks, module.parameters()))  # as no fake parameter is
    return replace(
        found,
        layout=layout,
        gradient_layout=Layout.of(spec for spec in layout.specs if spec.name in trainable),
        trainable=tuple(name for name in trainable if name in own),
        tied=tuple(
            (owner, sum(tensors[tie.name].nbytes for tie in block.tied if tie.owner.number == owner))
            for owner in dict.fromkeys(tie.owner.number for tie in block.tied)
        ),
        gradients=sum(round_up(tensors[name].nbytes, granule) for name in trainable),
        frozen=frozen_in(module, own, trainable),
        narrow=_narrow(layout, narrow.found if narrow is not None and not hooked else ()),
        buffers=sum(tensors[name].nbytes for name in changing),
        changing=changing,
        tests_change=tests,
        inference_peak=inference,
        flops=flops,
        held=_held(module, tensors),
    )


def _narrow(layout: Layout, names: Collection[str]) -> Layout:
    specs = (spec for spec in layout.specs if spec.name in names and spec.nbytes >= _WORTH)
    return Layout.of((replace(spec, dtype=torch.bfloat16) for spec in specs), ALIGNMENT)


def _held(module: nn.Module, known: Collection[str]) -> int:
    """Bytes of tensors in plain attributes, and of buffers that are not `known`."""
    tensors = [value for part in module.modules() for value in vars(part).values() if isinstance(value, torch.Tensor)]
    tensors += [tensor for name, tensor in tensors_of(module).items() if name not in known]
    return sum({tensor.untyped_storage()._cdata: tensor.nbytes for tensor in tensors}.values())


def _watch_training(
    block: Block, module: nn.Module, tensors: dict[str, torch.Tensor], taken: Sequence[Value], granule: int,
    autocast: torch.dtype | None = None, narrow: CastUses | None = None,
) -> BlockCost:  # fmt: skip
    peaks, saved_alone, rows = [], 0, taken[0].rows
    leaves = [[value.sample(learns=value.learns) for value in taken] for _ in range(2)]
    # Inside a chain a block's input is no leaf: it may be written into, as ReLU(inplace=True) does.
    inputs = [[leaf.clone() for leaf in own] for own in leaves]
    with LiveBytes(granule) as live:
        for own, xs in zip(leaves, inputs, strict=True):  # the second micro-batch adds to gradients that exist
            live.ignore([*xs, *tensors.values()])
            before, others = live.live, set(live.sizes)
            versions = [x._version for x in xs]
            live.restart()
            with cast(autocast), narrow or nullcontext():
                ys = _run_in_training(block, module, tensors, xs)
            written = frozenset(v.number for v, x, old in zip(taken, xs, versions, strict=True) if x._version > old)
            _refuse_bad_boundary(block, ys, rows)
            passes = tuple(
                (number, value.number)
                for number, y in zip(block.gives, ys, strict=True)
                for value, x in zip(taken, xs, strict=True)
                if y.untyped_storage()._cdata == x.untyped_storage()._cdata
            )
            forward_peak, saved = live.peak - before, live.live - before
            saved_sizes = tuple(size for key, size in live.sizes.items() if key not in others)
            gives = tuple(
                Value(number, tuple(y.shape), y.dtype, round_up(y.nbytes, granule), rows, y.requires_grad, block.number, ())
                for number, y in zip(block.gives, ys, strict=True)
            )
            roots = [y for y in ys if y.requires_grad]
            if not roots:  # nothing to train, and nothing to carry a gradient through
                peaks.append(0)
                continue
            edges = [get_gradient_edge(y) for y in roots]
            gradients = [torch.empty_like(y) for y in roots]
            # In a chain the next block's backward has let go of this output by now.
            del ys, roots
            start = live.live
            saved_alone = start - before - sum(value.nbytes for value in gives if value.learns)
            live.restart()
            with narrow or nullcontext():  # a Function's backward and hooks may read weights
                torch.autograd.backward(edges, grad_tensors=gradients)
                peaks.append(live.peak - start)
            del edges, gradients
            for leaf in own:
                leaf.grad = None
    return BlockCost(
        layout=Layout(()), trainable=(), gradient_layout=Layout(()), gradients=0, held=0, buffers=0, forward_peak=forward_peak,
        saved=saved, saved_alone=saved_alone, saved_sizes=saved_sizes, backward_peak=peaks[0], accumulate_peak=peaks[1],
        inference_peak=0, takes=tuple(taken), gives=gives, flops=0, writes=written, passes=passes,
        writes_late=live.writes_late,
    )  # fmt: skip


def _run_in_training(
    block: Block, module: nn.Module, tensors: dict[str, torch.Tensor], xs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Runs a forward pass. Raises ModelError if it changes a parameter: such a change is lost when the partition leaves."""
    ys, changed, _ = changes_of(module, tensors, xs)
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter) and name in changed:
            raise ModelError(
                f"its forward pass changes parameter {block.exported(name)} (as Embedding(max_norm=...) does, peft's "
                "target_parameters, and a moving average of weights), which only an optimizer may: recomputing the pass would "
                "change it twice. Make it a buffer, or leave it to a session's `change_weights`."
            )
    return ys


def _refuse_bad_boundary(block: Block, ys: Sequence[torch.Tensor], rows: int) -> None:
    if len(ys) != len(block.gives):
        raise ModelError("it returned a tuple; a boundary must be one tensor.")
    if block.is_cut_out:
        return
    if ys[0].shape[:1] != (rows,):
        raise ModelError(f"it turned {rows} rows into shape {tuple(ys[0].shape)}; dimension 0 must stay the batch.")
    if not ys[0].dtype.is_floating_point:
        raise ModelError(
            f"it returns {ys[0].dtype}; a boundary is floats, which carry a gradient. Join it with the next block."
        )


def _watch_inference(
    module: nn.Module, tensors: dict[str, torch.Tensor], taken: Sequence[Value], granule: int,
    autocast: torch.dtype | None = None, narrow: CastUses | None = None,
) -> tuple[int, int]:  # fmt: skip
    xs = [value.sample(learns=False) for value in taken]
    with torch.no_grad(), LiveBytes(granule) as live, cast(autocast), narrow or nullcontext():
        live.ignore([*xs, *tensors.values()])
        run_fake(module, tensors, *xs)
        peak, flops = live.peak, live.flops
        if narrow is not None and narrow.found:  # a test may use weights otherwise, and so may fewer rows
            module.eval()
            try:
                run_fake(module, tensors, *(value.with_rows(1).sample(learns=False) for value in taken))
            except Exception:
                narrow.give_up()
            module.train()
        return peak, flops


def measure_loss(
    loss: Callable[..., torch.Tensor], output_shape: tuple[int, ...], batch: int, granule: int = 1,
    dtype: torch.dtype = torch.float32, labels: Sequence[torch.Tensor] = (), block: Block | None = None,
) -> int:  # fmt: skip
    """Most bytes alive in forward and backward of `loss` on outputs (batch, *output_shape), beyond these and `labels`.

    block: one whose weights the loss takes; their gradients are new.
    """
    mode = FakeMode()
    module, tensors = (nn.Module(), dict[str, torch.Tensor]()) if block is None else block.fake(mode)
    with mode:
        # No leaf, so that the loss may change it in place.
        output = torch.empty((batch, *output_shape), dtype=dtype, requires_grad=has_gradients(dtype)).clone()
        given = [output, *map(mode.from_tensor, labels)]
    with mode, with_tensors(module, tensors), SameTypes(), LiveBytes(granule) as live:  # type: ignore[no-untyped-call]
        live.ignore([*given, *tensors.values()])
        loss(*given).backward()  # type: ignore[no-untyped-call]
        return int(live.peak)


def refuse_lost_gradients(
    chain: Sequence[Block], costs: Sequence[BlockCost], shape: tuple[int, ...], rows: int, autocast: torch.dtype | None
) -> None:
    """Raises ModelError, naming the block, for one that changes its input in place where PyTorch does not allow it.

    shape: shape of one row of the data; rows: rows of a micro-batch.
    """
    if any(block.is_cut_out for block in chain):  # cut out of a model that ran whole
        return
    shapes = [(rows, *shape), *((rows, *cost.output_shape) for cost in costs)]
    asked: set[tuple[object, ...]] = set()
    for last, cost in enumerate(costs):
        first = last - 1
        while first > 0 and costs[first].passes:
            first -= 1
        key = (*(block.same_as for block in chain[max(0, first) : last + 1]), shapes[max(0, first)])
        if cost.writes and first >= 0 and key not in asked:
            asked.add(key)
            dtype = costs[first].takes[0].dtype
            x = torch.zeros(shapes[first], dtype=dtype, device="meta", requires_grad=first > 0 and dtype.is_floating_point)
            _ask(chain[first : last + 1], x, autocast)


def _ask(blocks: Sequence[Block], like: torch.Tensor, autocast: torch.dtype | None) -> None:
    mode = FakeMode()
    with ExitStack() as stack:
        modules = []
        for block in blocks:
            module, tensors = block.fake(mode)
            stack.enter_context(block.left_as_it_is())
            stack.enter_context(with_tensors(module, tensors))
            modules.append(module.train())
        for context in (mode, quiet_random(), quiet_log(), cast(autocast)):
            stack.enter_context(context)
        y = torch.zeros(like.shape, dtype=like.dtype, requires_grad=like.requires_grad).clone()
        try:
            for module in modules:
                y = module(y)
            if y.requires_grad:
                y.sum().backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            why = first_line(error).split(" Hint:")[0]
            if "inplace" not in why and "in-place" not in why:
                return  # measuring reports other errors
            raise ModelError(
                f"{blocks[-1]} changes its input in place, which PyTorch does not allow after {blocks[-2]}: {why} Give it "
                "inplace=False, or let it write into a copy."
            ) from None
