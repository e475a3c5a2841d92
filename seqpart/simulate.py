"""What a schedule will do to memory, links and the clock, from the blocks' costs alone. Ints in, ints out.

The planner asks it which cut fits and how long it takes; a test runs the same steps for real and compares the two,
step by step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from seqpart.costs import BlockCost
from seqpart.layout import Layout
from seqpart.schedule import Phase, PhaseKind, Step, Verb

LossCost = Callable[[BlockCost], tuple[int, int]]
"""(peak, targets): bytes of the loss that stands behind a block's output, at work and at rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionCost:
    """Bytes and operations of one partition for one micro-batch. The peaks are beyond the slot."""

    weights: int
    state: int
    slot: int
    """Weights and optimizer state as they lie in the slot, page by page."""
    gradients: int
    saved: int
    """What autograd keeps between forward and backward, the output included."""
    train_peak: int
    """Most bytes of one forward and backward, gradients among them."""
    again_peak: int
    """The same when gradients of an earlier micro-batch are there already."""
    inference_peak: int
    update_peak: int
    """Most bytes during the optimizer step, gradients among them."""
    input_row: int
    output_row: int
    row_flops: int
    """Of one row's forward pass."""
    parameters: int
    """Trainable ones, counted."""
    trainable: bool


# [Note: the heap] A large tensor is a mapping of its own and leaves the process when it dies. A small one (`heap_below`
# bytes: what the C library does not map) lies on the heap, and when backward frees it a gradient that was allocated
# behind it keeps the heap from shrinking. So what autograd saved in small tensors counts until the partition is
# dropped. Whether a tensor is small depends on the rows: the last micro-batch of an epoch may have fewer, hence `shares`.


def growing(
    blocks: Sequence[BlockCost], states: Sequence[Layout], loss_of: LossCost, *, fused: bool = True, heap_below: int = 0,
    shares: Sequence[float] = (1.0,),
) -> Iterator[PartitionCost]:  # fmt: skip
    """Costs of the partitions blocks[:1], blocks[:2], ...: one block more each time, in constant time.

    `shares` are the sizes of micro-batches that occur, as parts of the one that the costs were found for.
    """
    heaps = [0] * len(shares)
    slot = weights = state = gradients = flops = parameters = buffers = 0
    alive = forward = backward = again = inference = largest = 0
    first, trainable = blocks[0], False
    for block, layout in zip(blocks, states, strict=True):
        weights, state = weights + block.weights, state + layout.nbytes
        slot += block.layout.room + layout.room
        forward = max(forward, alive + block.forward_peak)
        # The gradient that the successor hands over is as large as the output. Everything behind this block has
        # left its gradients by the time an earlier block runs backward, hence `backward + block.gradients`.
        start = alive + block.saved_alone + block.output
        backward = max(backward + block.gradients, start + block.backward_peak)
        again = max(again, start + block.again_peak)
        alive += block.saved
        for index, share in enumerate(shares):
            sizes = (int(size * share) for size in block.saved_sizes)
            heaps[index] += sum(size for size in sizes if size < heap_below)
        heap = max(heaps)
        gradients += block.gradients
        buffers += block.buffers
        inference = max(inference, block.inference_peak + (block.input if block is not first else 0))
        flops += block.flops
        trained = [spec for spec in block.layout.specs if spec.name in block.trainable]
        parameters += sum(spec.nbytes // spec.dtype.itemsize for spec in trained)
        largest = max([largest, *(spec.nbytes for spec in trained)])
        trainable = trainable or bool(trained)
        loss_peak, targets = loss_of(block)
        own = first.input + targets
        rows = max(1, first.input // max(1, first.input_row))
        yield PartitionCost(
            weights=weights, state=state, slot=slot, gradients=gradients, saved=alive,
            train_peak=own + buffers + max(forward, alive + loss_peak, backward + heap),
            again_peak=own + buffers + gradients + max(forward, alive + loss_peak, again + heap),
            inference_peak=own + heap + max(inference, block.output + loss_peak),
            update_peak=own + buffers + heap + gradients + (0 if fused else 2 * largest),
            input_row=first.input_row, output_row=block.output // rows, row_flops=flops // rows,
            parameters=parameters, trainable=trainable,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What this machine does per second, measured at start."""

    flops: float
    optimizer: float
    """Parameters updated."""
    read: float
    write: float


@dataclass(frozen=True, slots=True)
class Moment:
    """One step foretold: bytes beyond the runtime and the fixed buffers, traffic of the disk, seconds."""

    step: Step
    before: int
    peak: int
    after: int
    bytes_read: int
    bytes_written: int
    seconds: float


class Simulator:
    """Takes the steps of a schedule one by one. The slot grows to its largest partition so far and never shrinks.

    `at_host` are partitions whose homes are in host memory and cost no disk traffic.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        partitions: Sequence[PartitionCost],
        rates: Rates,
        at_host: frozenset[int] = frozenset(),
    ) -> None:
        self._phases, self._partitions, self._rates, self._at_host = phases, partitions, rates, at_host
        self._slot = self._gradients = 0
        self._changed: set[int] = set()

    def run(self, steps: Iterable[Step]) -> Iterator[Moment]:
        for step in steps:
            yield self.take(step)

    def take(self, step: Step) -> Moment:
        part = self._partitions[step.partition]
        before = self._slot + self._gradients
        if step.verb is Verb.LOAD:
            self._slot = max(self._slot, part.slot)
            read = 0 if step.partition in self._at_host else part.weights
            return Moment(step, before, self._slot, self._slot, read, 0, read / self._rates.read)
        if step.verb is Verb.DROP:
            home = step.partition in self._at_host or step.partition not in self._changed
            written = 0 if home else part.weights
            self._changed.discard(step.partition)
            return Moment(step, before, before, before, 0, written, written / self._rates.write)
        if step.verb is Verb.UPDATE:
            self._gradients = 0
            self._changed.add(step.partition)
            peak = self._slot + part.update_peak
            return Moment(step, before, peak, self._slot, 0, 0, part.parameters / self._rates.optimizer)
        return self._compute(step, part, before)

    def _compute(self, step: Step, part: PartitionCost, before: int) -> Moment:
        assert step.micro_batch is not None
        phase = self._phases[step.phase]
        span = phase.span(step.micro_batch)
        rows = span.stop - span.start
        read = rows * part.input_row
        if step.verb is Verb.FORWARD:
            kept = step.partition < len(self._partitions) - 1
            written = rows * part.output_row if kept else 0
            seconds = max(rows * part.row_flops / self._rates.flops, read / self._rates.read) + written / self._rates.write
            return Moment(step, before, before + part.inference_peak, before, read, written, seconds)
        assert phase.kind is PhaseKind.TRAIN, f"{step}: a backward in {phase}"
        peak = self._slot + (part.again_peak if self._gradients else part.train_peak)
        self._gradients = part.gradients
        seconds = max(3 * rows * part.row_flops / self._rates.flops, read / self._rates.read)
        return Moment(step, before, peak, self._slot + self._gradients, read, 0, seconds)
