"""What a schedule will do to memory, links and the clock, from the blocks' costs alone. Ints in, ints out.

The planner asks it which cut fits and how long it takes; the test of the house runs the same steps for real and
compares the two, step by step.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from seqpart.costs import BlockCost
from seqpart.layout import Layout
from seqpart.schedule import Phase, PhaseKind, Span, Step, Verb


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionCost:
    """Bytes and operations of one partition at one micro-batch."""

    weights: int
    state: int
    slot: int
    """Weights and optimizer state as they lie in the slot, page by page."""
    gradients: int
    train_peak: int
    """Most bytes of one forward and backward beyond the slot, gradients among them."""
    again_peak: int
    """The same when gradients of an earlier micro-batch are there already."""
    inference_peak: int
    update_peak: int
    """Most bytes during the optimizer step beyond the slot, gradients among them."""
    input_row: int
    output_row: int
    flops: int
    """Of one forward pass of one row."""
    parameters: int
    trainable: bool


def partition_cost(
    blocks: Sequence[BlockCost], states: Sequence[Layout], loss: tuple[int, int], micro_batch: int,
    *, fused: bool = True, fixed: int = 0,
) -> PartitionCost:  # fmt: skip
    """Compose the costs of consecutive blocks. `loss` is (saved, peak); `fixed` the bytes of its targets."""
    gradients = sum(block.gradients for block in blocks)
    largest = max((spec.nbytes for block in blocks for spec in block.layout.specs if spec.name in block.trainable), default=0)
    inference = max((b.inference_peak for b in blocks), default=0)
    # The input of a block is alive while it runs; the first one's is the reader's or the upload's.
    inference = max([inference, *(b.inference_peak + b.input for b in blocks[1:])])
    return PartitionCost(
        weights=sum(block.weights for block in blocks),
        state=sum(state.nbytes for state in states),
        slot=sum(block.layout.room for block in blocks) + sum(state.room for state in states),
        gradients=gradients,
        train_peak=fixed + blocks[0].input + _training_peak(blocks, loss, again=False),
        again_peak=fixed + blocks[0].input + _training_peak(blocks, loss, again=True),
        inference_peak=fixed + blocks[0].input + max(inference, blocks[-1].output + loss[1]),
        update_peak=fixed + gradients + (0 if fused else 2 * largest),
        input_row=blocks[0].input // micro_batch,
        output_row=blocks[-1].output // micro_batch,
        flops=sum(block.flops for block in blocks) // micro_batch,
        parameters=sum(block.gradients for block in blocks) // 4,
        trainable=any(block.trainable for block in blocks),
    )


def _training_peak(blocks: Sequence[BlockCost], loss: tuple[int, int], *, again: bool) -> int:
    """Most live bytes of forward, loss and backward through `blocks`."""
    gradients = sum(block.gradients for block in blocks) if again else 0
    alive = peak = 0
    for block in blocks:
        peak = max(peak, alive + block.forward_peak)
        alive += block.saved
    peak = max(peak, alive + loss[1])
    for block in reversed(blocks):
        alive -= block.saved
        extra = block.again_peak if again else block.backward_peak
        # block.output: the gradient that its successor (or the loss) hands to it.
        peak = max(peak, alive + block.saved_alone + block.output + gradients + extra)
        if not again:
            gradients += block.gradients
    return peak + (gradients if again else 0)


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
    """One step foretold: bytes beyond the runtime and the fixed buffers."""

    step: Step
    before: int
    peak: int
    after: int
    bytes_read: int
    bytes_written: int
    seconds: float


def simulate(
    steps: Iterable[Step], phases: Sequence[Phase], partitions: Sequence[PartitionCost], rates: Rates,
    *, resident_bytes: Mapping[int, int] | None = None, last: int | None = None,
) -> Iterator[Moment]:  # fmt: skip
    """Moments of `steps`. The slot is made once and grows to its largest partition; nothing shrinks it.

    `resident_bytes` names partitions that rest in host memory, which cost no disk traffic.
    """
    state = _State(phases, partitions, rates, resident_bytes or {}, len(partitions) - 1 if last is None else last)
    for step in steps:
        yield state.take(step)


class _State:
    def __init__(
        self, phases: Sequence[Phase], partitions: Sequence[PartitionCost], rates: Rates, at_host: Mapping[int, int], last: int
    ) -> None:
        self._phases, self._partitions, self._rates, self._at_host, self._last = phases, partitions, rates, at_host, last
        self._slot = self._gradients = 0
        self._spans: dict[int, Span] = {}
        self._span_phase = -1

    def take(self, step: Step) -> Moment:
        part = self._partitions[step.partition]
        before = self._slot + self._gradients
        if step.verb is Verb.LOAD:
            return self._load(step, part, before)
        if step.verb is Verb.DROP:
            written = 0 if step.partition in self._at_host or not self._trains(step) else part.weights
            return Moment(step, before, before, before, 0, written, written / self._rates.write)
        if step.verb is Verb.UPDATE:
            peak = before - self._gradients + part.update_peak
            self._gradients = 0
            return Moment(step, before, peak, self._slot, 0, 0, part.parameters / self._rates.optimizer)
        return self._compute(step, part, before)

    def _load(self, step: Step, part: PartitionCost, before: int) -> Moment:
        self._slot = max(self._slot, part.slot)
        read = 0 if step.partition in self._at_host else part.weights
        return Moment(step, before, self._slot, self._slot, read, 0, read / self._rates.read)

    def _trains(self, step: Step) -> bool:
        return any(ph.kind is PhaseKind.TRAIN and ph.partition == step.partition for ph in self._phases[: step.phase + 1])

    def _compute(self, step: Step, part: PartitionCost, before: int) -> Moment:
        phase = self._phases[step.phase]
        span = self._span(step)
        rows = span.stop - span.start
        read = rows * part.input_row
        if step.verb is Verb.FORWARD:
            written = rows * part.output_row if step.partition < self._last else 0
            seconds = max(rows * part.flops / self._rates.flops, read / self._rates.read) + written / self._rates.write
            return Moment(step, before, before + part.inference_peak, before, read, written, seconds)
        assert phase.kind is PhaseKind.TRAIN
        peak = self._slot + (part.again_peak if self._gradients else part.train_peak)
        self._gradients = part.gradients
        seconds = max(3 * rows * part.flops / self._rates.flops, read / self._rates.read)
        return Moment(step, before, peak, self._slot + self._gradients, read, 0, seconds)

    def _span(self, step: Step) -> Span:
        if step.phase != self._span_phase:
            self._spans, self._span_phase = dict(self._phases[step.phase].spans()), step.phase
        assert step.micro_batch is not None
        return self._spans[step.micro_batch]
