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
    homes, ties, passes, learned, heaps = _Homes(), _Ties(), _Passes(), _Learned(), [0] * len(shares)
    inference = flops = 0
    late, timed, with_heap = False, (0.0, 0.0), 0.0
    for block, state in zip(blocks, states, strict=True):
        homes.take(block, state)
        ties.take(block)
        given_inside = passes.take(block, ties)
        learned.take(block)
        for index, share in enumerate(shares):
            sizes = (int(size * share) for size in block.saved_sizes)
            heaps[index] += sum(size for size in sizes if size < heap_below)
        inference = max(inference, block.inference_peak + given_inside)
        flops += block.head_flops + (0 if block.forward_seconds else block.flops)
        timed = timed[0] + block.forward_seconds, timed[1] + block.backward_seconds
        with_heap += block.kept_seconds or COMPUTING_SHARE * (block.forward_seconds + block.backward_seconds)
        late = late or block.writes_late

        loss_peak, targets = loss_of(block)
        came, leaving, heap = passes.flow.came, passes.flow.leaving, max(heaps)
        copied, output = sum(value.nbytes for value in passes.flow.written), sum(value.nbytes for value in leaving)
        beside = sum(value.nbytes for value in came) + copied + targets + homes.buffers
        outside = (value for value in leaving if value.number in passes.held)
        earlier = sum(value.nbytes for value in outside if value.giver != block.gives[-1].giver)
        forward = max(passes.forward, passes.alive + loss_peak)
        yield PartitionCost(
            weights=homes.weights, rewritten=homes.rewritten, state=homes.state, slot=homes.slot + ties.slot,
            state_slot=homes.state_slot, waiting=homes.waiting, buffers=homes.buffers, narrow=homes.narrow,
            borrowed=sum(owner.weights for owner in ties.owners), ties=tuple(ties.used.items()), lent=ties.lent,
            largest_tie=ties.largest, gradients=passes.gradients, saved=passes.alive + copied,
            kept=passes.kept + copied + homes.buffers - earlier,
            graph=passes.graph + sum(round_up(value.nbytes, ALIGNMENT) for value in came) + round_up(copied, ALIGNMENT),
            forward_peak=beside + passes.forward,
            train_peak=beside + max(forward, max(passes.backward, passes.adding) + heap),
            accumulate_peak=beside + passes.gradients + max(forward, max(passes.again, passes.adding_again) + heap),
            inference_peak=beside - homes.buffers + heap + max(inference, output + loss_peak),
            update_peak=beside + heap + passes.gradients + learned.step_room(optimizer, homes.state, in_lists=in_lists),
            entering=came, leaving=leaving, rows=came[0].rows, row_flops=flops // came[0].rows,
            parameters=learned.count, frozen=homes.frozen, trainable=learned.any, writes_late=late,
            forward_seconds=timed[0], backward_seconds=timed[1],
            kept_share=with_heap / sum(timed) if with_heap else COMPUTING_SHARE,
        )  # fmt: skip


class _Homes:
    """Bytes of the blocks' homes, and of the slot that these are loaded into."""

    def __init__(self) -> None:
        self.weights = self.rewritten = self.state = self.slot = self.state_slot = self.waiting = 0
        self.buffers = self.frozen = self.narrow = 0

    def take(self, block: BlockCost, state: Layout) -> None:
        self.weights += block.weights
        self.rewritten += block.weights if block.trainable or block.buffers else 0
        self.state += state.nbytes
        self.slot += block.layout.padded_nbytes + state.padded_nbytes
        self.state_slot += state.padded_nbytes
        self.waiting += block.gradient_layout.padded_nbytes
        self.buffers += block.buffers
        self.frozen += block.frozen
        self.narrow += block.narrow.nbytes


class _Ties:
    """Parameters that blocks of the partition share with one another, with earlier partitions and with later ones."""

    def __init__(self) -> None:
        self._seen: list[BlockCost] = []
        self._borrowers: dict[int, int] = {}
        """{id of a block of the partition: number of blocks after the last one that use its parameters}."""
        self.owners: list[BlockCost] = []
        """Blocks of earlier partitions whose homes are loaded too, in `slot` bytes."""
        self.used: dict[int, int] = {}
        """{number of such a block: bytes of its parameters that are used}."""
        self.slot = self.largest = 0
        self.lent = self.lent_before = 0
        """Bytes of own parameters that blocks after the last one use; of these, parameters of blocks before the last one."""

    def take(self, block: BlockCost) -> None:
        self._seen.append(block)
        for owner, (number, nbytes) in zip(block.borrows, block.tied, strict=True):
            if any(owner is other for other in self._seen):
                self._borrowers[id(owner)] -= 1
                self.lent -= 0 if self._borrowers[id(owner)] else owner.lent
                continue
            self.largest = max(self.largest, min(nbytes, max(spec.nbytes for spec in owner.layout.specs)))
            if not any(owner is other for other in self.owners):
                self.owners.append(owner)
                self.slot += owner.layout.padded_nbytes
                self.used[number] = nbytes
        self.lent_before = self.lent
        self.lent, self._borrowers[id(block)] = self.lent + block.lent, block.borrowers


class _Passes:
    """Bytes alive during a forward and a backward pass, activations and gradients, beside those of the entering values."""

    def __init__(self) -> None:
        self.flow = Flow()
        self.alive = self.kept = self.graph = self.gradients = 0
        """Bytes after the last block's forward pass; without its output; those of the graph, each storage aligned."""
        self.forward = self.backward = self.again = 0
        """Most bytes of a forward pass; of a backward pass; of one after which gradients are added to earlier ones."""
        self.adding = self.adding_again = 0
        """The same of backward passes, where gradients of parameters that later partitions use come, and are added."""
        self._loose: dict[int, int] = {}
        """{value without a gradient that no block has saved so far: its bytes}."""
        self.held = set[int]()
        """Values that blocks have saved."""

    def take(self, block: BlockCost, ties: _Ties) -> int:
        """Returns the bytes of values given inside that are there while the block runs."""
        new, over, given_inside = self.flow.take(block)
        # A value without a gradient dies after its last use, unless a block that learns saves it for backward.
        if any(value.learns for value in block.gives):
            saved = {value.number: self._loose.pop(value.number) for value in block.takes if value.number in self._loose}
            self.held |= saved.keys() | {value.number for value in block.gives}
            self.alive += sum(saved.values())
            self.graph += sum(round_up(size, ALIGNMENT) for size in saved.values())
        else:
            self._loose |= {value.number: value.nbytes for value in block.gives}
        self.forward = max(self.forward, self.alive + block.forward_peak)
        self.kept = self.alive + block.saved_alone
        # The gradient that comes from the successor is as large as the output. All blocks after this one have
        # left their gradients by the time an earlier block runs backward, hence `+ block.gradients`; and gradients of
        # values that skip a block wait meanwhile, `over`, also of values that are taken here for the first time, `new`.
        start = self.kept + block.output + over
        first, further = start + block.backward_peak, start + block.accumulate_peak
        self.backward = max(self.backward + block.gradients + new, first)
        self.again = max(self.again + new, further)
        adding, adding_again = (self.adding, self.adding_again) if ties.lent_before else (0, 0)
        self.adding = max(adding + block.gradients + new, first + block.lent) if ties.lent else 0
        self.adding_again = max(adding_again + new, further + block.lent) if ties.lent else 0
        self.alive += block.saved
        self.graph += sum(round_up(size, ALIGNMENT) for size in block.saved_sizes)
        self.gradients += block.gradients
        return given_inside


class _Learned:
    """The parameters that an optimizer step changes: their number, and the bytes that decide what a step takes."""

    def __init__(self) -> None:
        self.count, self.any = 0, False
        self._largest = self._second = self._total = self._unfused = 0

    def take(self, block: BlockCost) -> None:
        specs = [spec for spec in block.layout.specs if spec.name in block.trainable]
        self.any = self.any or block.gradients > 0 or bool(specs)  # also where all that learns is lent to it
        self.count += sum(spec.nbytes // spec.dtype.itemsize for spec in specs)
        self._second, self._largest = sorted([self._second, self._largest, *(spec.nbytes for spec in specs)])[-2:]
        self._total += sum(spec.nbytes for spec in specs)
        self._unfused = max([self._unfused, *(spec.nbytes for spec in specs if spec.dtype.is_complex)])

    def step_room(self, optimizer: Optimizer | None, state: int, *, in_lists: bool) -> int:
        """Returns the bytes that a step takes for a moment, of an optimizer with `state` bytes."""
        room = 3 * self._unfused
        if optimizer is not None:
            room += optimizer.step_room(self._largest, self._second, self._total, in_lists=in_lists)
            if optimizer.begins_itself:
                room += state  # which it makes in a first step, beside the home that this then goes to
        return room


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
