"""Computes what a partition costs, its slot and the bytes of its work, from the costs of its blocks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from seqpart.device.heap import COMPUTING_SHARE
from seqpart.device.pages import round_up
from seqpart.model.blocks import Block
from seqpart.model.optimizers import Optimizer
from seqpart.model.packs import Value
from seqpart.profile.blocks import BlockCost
from seqpart.store.layout import ALIGNMENT, Layout

LossCost = Callable[[BlockCost], tuple[int, int]]
"""A function from a block to (peak, targets): bytes of the loss after its output, while it is computed and between."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionCost:
    """Bytes and operations of one partition for one micro-batch. The peaks are beyond the slot."""

    weights: int
    rewritten: int
    """Weights of blocks that learn or have buffers, which an update changes."""
    borrowed: int
    """Weights of blocks in other partitions that are loaded too, because a parameter of theirs is used here."""
    ties: tuple[tuple[int, int], ...]
    """(number of a block in another partition, bytes of its parameters that are used here): their gradients go there."""
    largest_tie: int = 0
    """Most bytes of one of these parameters: each gradient goes by itself."""
    lent: int
    """Bytes of its own parameters that later partitions use: their gradients come, and are added to its own in new memory."""
    state: int
    slot: int
    """Weights and optimizer state as they lie in the slot, page by page."""
    state_slot: int = 0
    """Optimizer state in the slot."""
    waiting: int
    """Gradients as they lie in the slot, while they wait for their norm."""
    gradients: int
    saved: int
    """Bytes that autograd keeps between forward and backward, the output included."""
    kept: int
    """Bytes that a kept graph holds beyond the boundaries on its two sides."""
    graph: int
    """All bytes that a graph holds, the boundaries on its two sides too, each storage aligned to a cache line."""
    forward_peak: int
    """Most bytes of a forward pass with a graph."""
    train_peak: int
    """Most bytes of one forward and backward, gradients among them."""
    accumulate_peak: int
    """Most bytes of one forward and backward when gradients of an earlier micro-batch are there already."""
    inference_peak: int
    update_peak: int
    """Most bytes during the optimizer step, gradients among them."""
    buffers: int
    entering: tuple[Value, ...]
    leaving: tuple[Value, ...]
    """Values that come from other partitions (`entering`), and values that others take (`leaving`)."""
    row_flops: int
    """Operations of one row's forward pass, for the blocks that were not timed."""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    """Seconds of the blocks that were run for real, with `rows` rows."""
    kept_share: float = COMPUTING_SHARE
    """Ratio of these seconds with a kept heap to those without."""
    rows: int = 1
    """Rows of the micro-batch that these costs are for."""
    parameters: int
    """Number of trainable parameters."""
    writes_late: bool = False
    """True if its graph, when kept, has to stay on the device."""
    frozen: int = 0
    """Number of frozen parameters."""
    narrow: int = 0
    """Bytes of the weights in 16 bits that may be loaded so: see `BlockCost.narrow`."""
    trainable: bool

    @property
    def input(self) -> int:
        """Bytes of the entering boundary of one micro-batch."""
        return sum(value.nbytes for value in self.entering)

    @property
    def output(self) -> int:
        """Bytes of the leaving boundary of one micro-batch."""
        return sum(value.nbytes for value in self.leaving)

    @property
    def input_row(self) -> int:
        return sum(value.row for value in self.entering)

    @property
    def output_row(self) -> int:
        return sum(value.row for value in self.leaving)

    @property
    def tied(self) -> int:
        """Bytes of parameters of other partitions that are used here."""
        return sum(nbytes for _, nbytes in self.ties)

    @property
    def weights_slot(self) -> int:
        """Bytes of weights alone in the slot, page by page: these stay where the optimizer state comes and goes."""
        return self.slot - self.state_slot

    def slot_bytes(self, gradients: bool, weights_stay: bool = False, *, stateless: bool = False) -> int:
        """Bytes of its slot, with room for waiting `gradients` or without, and without weights that stay elsewhere, or
        optimizer state that is never loaded."""
        beside = (self.weights_slot if weights_stay else 0) + (self.state_slot if stateless else 0)
        return self.slot + (self.waiting if gradients else 0) - beside


@dataclass(frozen=True, slots=True)
class Parting:
    """Costs of splitting homes into those of subnets and merging them: `buffers` bytes of memory, and for each partition of the
    whole network (bytes of its homes, of those of its parts, of those of this process's own parts)."""

    buffers: int
    homes: tuple[tuple[int, int, int], ...]


# [Note: the heap] A large tensor is a mapping of its own and leaves the process when it dies. A small one (`heap_below`
# bytes: what the C library does not map) lies on the heap, and when backward frees it a gradient that was allocated
# after it keeps the heap from shrinking. So what autograd saved in small tensors counts until the partition is
# dropped. Whether a tensor is small depends on the rows: the last micro-batch of an epoch may have fewer, hence `shares`.


def prefix_costs(
    blocks: Sequence[BlockCost], states: Sequence[Layout], loss_of: LossCost, *,
    optimizer: Optimizer | None = None, in_lists: bool = False, heap_below: int = 0, shares: Sequence[float] = (1.0,),
) -> Iterator[PartitionCost]:  # fmt: skip
    """Yields the costs of the partitions blocks[:1], blocks[:2], ..., each one block more, in constant time.

    in_lists: True if torch's optimizers take lists of parameters by default, as on a GPU. shares: sizes of micro-batches that
    occur, as fractions of the one that the costs were found for.
    """
    heaps = [0] * len(shares)
    narrow = frozen = rewritten = slot = state_slot = weights = state = waiting = gradients = flops = parameters = buffers = 0
    alive = forward = backward = again = inference = largest = second = total = unfused = graph = 0
    trainable, late, seconds, with_heap = False, False, (0.0, 0.0), 0.0
    seen: list[BlockCost] = []
    borrowed: list[BlockCost] = []
    ties, lending = dict[int, int](), dict[int, int]()
    lent = adding = adding_again = largest_tie = 0
    flow, loose, held = Flow(), dict[int, int](), set[int]()
    for block, layout in zip(blocks, states, strict=True):
        weights, state = weights + block.weights, state + layout.nbytes
        slot, waiting = slot + block.layout.padded_nbytes + layout.padded_nbytes, waiting + block.gradient_layout.padded_nbytes
        state_slot += layout.padded_nbytes
        frozen, narrow = frozen + block.frozen, narrow + block.narrow.nbytes
        rewritten += block.weights if block.trainable or block.buffers else 0
        seen.append(block)
        for owner, (number, nbytes) in zip(block.borrows, block.tied, strict=True):
            if any(owner is other for other in seen):
                lending[id(owner)] -= 1
                lent -= 0 if lending[id(owner)] else owner.lent
                adding, adding_again = (adding, adding_again) if lent else (0, 0)
                continue
            largest_tie = max(largest_tie, min(nbytes, max(spec.nbytes for spec in owner.layout.specs)))
            if not any(owner is other for other in borrowed):
                borrowed.append(owner)
                slot += owner.layout.padded_nbytes
                ties[number] = nbytes
        new, over, given_inside = flow.take(block)
        # A value without a gradient dies after its last use, unless a block that learns saves it for backward.
        if any(value.learns for value in block.gives):
            saved = {value.number: loose.pop(value.number) for value in block.takes if value.number in loose}
            held |= saved.keys() | {value.number for value in block.gives}
            alive, graph = alive + sum(saved.values()), graph + sum(round_up(size, ALIGNMENT) for size in saved.values())
        else:
            loose |= {value.number: value.nbytes for value in block.gives}
        forward = max(forward, alive + block.forward_peak)
        # The gradient that comes from the successor is as large as the output. All blocks after this one have
        # left their gradients by the time an earlier block runs backward, hence `backward + block.gradients`; and gradients of
        # values that skip a block wait meanwhile, `over`, also of values that are taken here for the first time, `new`.
        start = alive + block.saved_alone + block.output + over
        backward = max(backward + block.gradients + new, start + block.backward_peak)
        again = max(again + new, start + block.accumulate_peak)
        lent, lending[id(block)] = lent + block.lent, block.borrowers
        adding = max(adding + block.gradients + new, start + block.backward_peak + block.lent) if lent else 0
        adding_again = max(adding_again + new, start + block.accumulate_peak + block.lent) if lent else 0
        kept = alive + block.saved_alone
        alive += block.saved
        graph += sum(round_up(size, ALIGNMENT) for size in block.saved_sizes)
        for index, share in enumerate(shares):
            sizes = (int(size * share) for size in block.saved_sizes)
            heaps[index] += sum(size for size in sizes if size < heap_below)
        heap = max(heaps)
        gradients += block.gradients
        buffers += block.buffers
        inference = max(inference, block.inference_peak + given_inside)
        flops += block.head_flops + (0 if block.forward_seconds else block.flops)
        seconds = seconds[0] + block.forward_seconds, seconds[1] + block.backward_seconds
        with_heap += block.kept_seconds or COMPUTING_SHARE * (block.forward_seconds + block.backward_seconds)
        trained = [spec for spec in block.layout.specs if spec.name in block.trainable]
        parameters += sum(spec.nbytes // spec.dtype.itemsize for spec in trained)
        second, largest = sorted([second, largest, *(spec.nbytes for spec in trained)])[-2:]
        total += sum(spec.nbytes for spec in trained)
        unfused = max([unfused, *(spec.nbytes for spec in trained if spec.dtype.is_complex)])
        late = late or block.writes_late
        trainable = trainable or block.gradients > 0 or bool(trained)  # also where all that learns is lent to it
        loss_peak, targets = loss_of(block)
        came, leaving = flow.came, flow.leaving
        copied, output = sum(value.nbytes for value in flow.written), sum(value.nbytes for value in leaving)
        own = sum(value.nbytes for value in came) + copied + targets
        earlier = sum(value.nbytes for value in leaving if value.number in held and value.giver != block.gives[-1].giver)
        rows = came[0].rows
        step_room = 0 if optimizer is None else optimizer.step_room(largest, second, total, in_lists=in_lists)
        if optimizer is not None and optimizer.begins_itself:
            step_room += state  # which it makes in a first step, beside the home that this then goes to
        yield PartitionCost(
            weights=weights, rewritten=rewritten,
            borrowed=sum(owner.weights for owner in borrowed), ties=tuple(ties.items()), lent=lent, state=state,
            largest_tie=largest_tie, slot=slot, state_slot=state_slot, waiting=waiting, gradients=gradients,
            saved=alive + copied, kept=kept + copied + buffers - earlier,
            graph=graph + sum(round_up(value.nbytes, ALIGNMENT) for value in came) + round_up(copied, ALIGNMENT),
            forward_peak=own + buffers + forward, buffers=buffers, entering=came, leaving=leaving,
            train_peak=own + buffers + max(forward, alive + loss_peak, max(backward, adding) + heap),
            accumulate_peak=own + buffers + gradients + max(
                forward, alive + loss_peak, max(again, adding_again) + heap
            ),
            inference_peak=own + heap + max(inference, output + loss_peak),
            update_peak=own + buffers + heap + gradients + step_room + 3 * unfused,
            row_flops=flops // rows,
            parameters=parameters, frozen=frozen, narrow=narrow, trainable=trainable, writes_late=late,
            forward_seconds=seconds[0], backward_seconds=seconds[1], rows=rows,
            kept_share=with_heap / sum(seconds) if with_heap else COMPUTING_SHARE,
        )  # fmt: skip


class Flow:
    """The values that enter, pass through and leave a partition, to which blocks are added one by one."""

    def __init__(self, blocks: Sequence[BlockCost] = ()) -> None:
        self._came: dict[int, Value] = {}
        self._inside: dict[int, Value] = {}
        """Values given here and taken by blocks after the last one."""
        self._given: set[int] = set()
        self._where: dict[int, int] = {}
        """{value: the entering value in whose memory it lies}."""
        self._written: dict[int, Value] = {}
        for block in blocks:
            self.take(block)

    @property
    def came(self) -> tuple[Value, ...]:
        """Values that blocks take and none of them gave, in order."""
        return tuple(self._came.values())

    @property
    def leaving(self) -> tuple[Value, ...]:
        """Values that were given and are taken by others, in order."""
        return tuple(self._inside.values())

    @property
    def written(self) -> tuple[Value, ...]:
        """Entering values that are changed in place: the partition needs copies of these."""
        return tuple(self._written.values())

    def used_up(self, blocks: Sequence[BlockCost]) -> list[list[int]]:
        """For each block, the values that no later block takes and that do not leave: their memory is freed after it."""
        last = {value.number: place for place, block in enumerate(blocks) for value in (*block.gives, *block.takes)}
        return [[n for n, where in last.items() if where == place and n not in self._inside] for place in range(len(blocks))]

    def take(self, block: BlockCost) -> tuple[int, int, int]:
        """Adds a block. Returns bytes of: gradients of values that it is the first here to take (0 for the first block);
        gradients of values that skip it; values that were given inside and are there while it runs."""
        number, is_first = block.gives[-1].giver, not self._came
        given_inside = sum(value.nbytes for value in self._inside.values())
        fresh = [v for v in block.takes if v.number not in self._given and v.number not in self._came]
        self._came.update({value.number: value for value in fresh})
        passing = (v for v in (*self._came.values(), *self._inside.values()) if v.learns and v.uses[-1] > number)
        over = sum(value.nbytes for value in passing)
        self._inside = {n: value for n, value in self._inside.items() if value.uses[-1] > number}
        self._inside.update({value.number: value for value in block.gives})
        self._given.update(value.number for value in block.gives)
        where = self._where
        where.update({value.number: value.number for value in fresh})
        self._written.update({where[n]: self._came[where[n]] for n in block.writes if n in where})
        where.update({ours: where[theirs] for ours, theirs in block.passes if theirs in where})
        return 0 if is_first else sum(value.nbytes for value in fresh if value.learns), over, given_inside


def passing(blocks: Sequence[BlockCost], last: int) -> tuple[Value, ...]:
    """Values that cross the cut after block `last`: in a chain one value."""
    given = {value.number: value for block in blocks[: last + 1] for value in (*block.takes, *block.gives)}
    return tuple(value for value in given.values() if value.uses[-1:] > (last,))


def state_layouts(blocks: Sequence[Block], costs: Sequence[BlockCost], optimizer: Optimizer | None) -> list[Layout]:
    """Layout of every block's optimizer state; empty ones without an optimizer."""
    if optimizer is None:
        return [Layout(()) for _ in costs]
    return [
        optimizer.state_layout({spec.name: spec for spec in cost.layout.specs if spec.name in cost.trainable}, block.exported)
        for block, cost in zip(blocks, costs, strict=True)
    ]


def gradient_layouts(costs: Sequence[BlockCost]) -> list[Layout]:
    """Layout of every block's gradients, for gradients that wait at home for their norm."""
    return [cost.gradient_layout for cost in costs]


def slot_bytes(costs: Sequence[BlockCost], states: Sequence[Layout], *, gradients: bool = False) -> int:
    """Bytes of the slot for a partition of these blocks. states: of their optimizer; none where it is not loaded."""
    layouts = [*(cost.layout for cost in costs), *states]
    return sum(layout.padded_nbytes for layout in layouts + (gradient_layouts(costs) if gradients else []))


def borrowed_costs(blocks: Sequence[Block], costs: Sequence[BlockCost]) -> dict[Block, BlockCost]:
    """Returns {block of another partition whose home these blocks need: its cost}."""
    found = {}
    for block, cost in zip(blocks, costs, strict=True):
        owners = dict.fromkeys(tie.owner for tie in block.tied)
        found.update({owner: borrowed for owner, borrowed in zip(owners, cost.borrows, strict=True) if owner not in blocks})
    return found
