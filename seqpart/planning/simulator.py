"""What a schedule will do to memory, links and the clock, from the blocks' costs alone. Ints in, ints out.

The planner asks it which cut fits and how long it takes; a test runs the same steps for real and compares the two,
step by step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from seqpart.model.costs import BlockCost, written_input
from seqpart.offload.layout import Layout
from seqpart.schedule.phases import Phases, trains_again
from seqpart.schedule.steps import Phase, PhaseKind, Position, Step, Verb, steps_of

LossCost = Callable[[BlockCost], tuple[int, int]]
"""(peak, targets): bytes of the loss that stands behind a block's output, at work and at rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionCost:
    """Bytes and operations of one partition for one micro-batch. The peaks are beyond the slot."""

    weights: int
    borrowed: int
    """Weights of blocks in other partitions that come along, because a parameter of theirs is used here too."""
    tied: int
    """Bytes of those parameters, whose gradients go to the partition that owns them."""
    state: int
    slot: int
    """Weights and optimizer state as they lie in the slot, page by page."""
    waiting: int
    """Gradients as they lie in the slot, while they wait for their norm."""
    gradients: int
    saved: int
    """What autograd keeps between forward and backward, the output included."""
    kept: int
    """What a kept graph holds beyond the boundaries on its two sides."""
    forward_peak: int
    """Most bytes of a forward pass with a graph."""
    train_peak: int
    """Most bytes of one forward and backward, gradients among them."""
    accumulate_peak: int
    """The same when gradients of an earlier micro-batch are there already."""
    inference_peak: int
    update_peak: int
    """Most bytes during the optimizer step, gradients among them."""
    buffers: int
    input: int
    output: int
    """Boundaries of one micro-batch."""
    input_row: int
    output_row: int
    row_flops: int
    """Of one row's forward pass."""
    parameters: int
    """Trainable ones, counted."""
    trainable: bool

    def slot_bytes(self, gradients: bool) -> int:
        """Bytes of its slot, with or without `gradients` that wait."""
        return self.slot + (self.waiting if gradients else 0)


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
    slot = weights = state = waiting = gradients = flops = parameters = buffers = 0
    alive = forward = backward = again = inference = largest = 0
    first, trainable = blocks[0], False
    seen: list[BlockCost] = []
    borrowed: list[BlockCost] = []
    tied = 0
    for block, layout in zip(blocks, states, strict=True):
        weights, state = weights + block.weights, state + layout.nbytes
        slot, waiting = slot + block.layout.padded_nbytes + layout.padded_nbytes, waiting + block.gradient_layout.padded_nbytes
        seen.append(block)
        for owner in block.borrows:
            if not any(owner is other for other in seen + borrowed):
                borrowed.append(owner)
                slot, tied = slot + owner.layout.padded_nbytes, tied + block.tied
        forward = max(forward, alive + block.forward_peak)
        # The gradient that the successor hands over is as large as the output. Everything behind this block has
        # left its gradients by the time an earlier block runs backward, hence `backward + block.gradients`.
        start = alive + block.saved_alone + block.output
        backward = max(backward + block.gradients, start + block.backward_peak)
        again = max(again, start + block.accumulate_peak)
        kept = alive + block.saved_alone
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
        trainable = trainable or block.gradients > 0 or bool(trained)  # also where all that learns is lent to it
        loss_peak, targets = loss_of(block)
        copied = first.input if written_input(seen) else 0
        own = first.input + copied + targets
        rows = max(1, first.input // max(1, first.input_row))
        yield PartitionCost(
            weights=weights, borrowed=sum(owner.weights for owner in borrowed), tied=tied, state=state,
            slot=slot, waiting=waiting, gradients=gradients, saved=alive + copied, kept=kept + copied + buffers,
            forward_peak=own + buffers + forward, buffers=buffers, input=first.input, output=block.output,
            train_peak=own + buffers + max(forward, alive + loss_peak, backward + heap),
            accumulate_peak=own + buffers + gradients + max(forward, alive + loss_peak, again + heap),
            inference_peak=own + heap + max(inference, block.output + loss_peak),
            update_peak=own + buffers + heap + gradients + (0 if fused else 2 * largest),
            input_row=first.input_row, output_row=block.output // rows, row_flops=flops // rows,
            parameters=parameters, trainable=trainable,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """What this machine does per second, measured at start."""

    flops: float
    optimizer: float
    """Parameters updated."""
    read: float
    write: float


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """One step predicted: bytes beyond the runtime and the fixed buffers, traffic of the disk, seconds, and when it ends."""

    step: Step
    before: int
    peak: int
    after: int
    bytes_read: int
    bytes_written: int
    seconds: float
    ends: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What a plan grants a schedule beside the partitions' own work."""

    slots: int = 1
    boundary_tier: str = "device"
    """Where boundaries wait within an update: device, host or disk."""
    borrows: bool = True
    """Whether a partition brings the homes of weights that it shares; where all partitions stay, they are there."""
    label_row: int = 0
    """Bytes of one row's labels, which wait on the device from the first partition's forward to the last one's backward."""
    gradients_room: bool = False
    """Whether gradients may have to wait in the slot."""
    at_host: frozenset[int] = frozenset()
    """Partitions whose homes are in host memory and cost no disk traffic."""


class Simulator:
    """Takes the steps of a schedule one by one. A single slot grows to its largest partition so far and never shrinks."""

    def __init__(
        self, phases: Sequence[Phase], partitions: Sequence[PartitionCost], speeds: Speeds, resources: Resources | None = None
    ) -> None:
        self._phases, self._partitions, self._speeds = phases, partitions, speeds
        self._resources = resources = resources or Resources()
        capacities = sorted((part.slot_bytes(resources.gradients_room) for part in partitions), reverse=True)
        self._slots = sum(capacities[: resources.slots]) if resources.slots > 1 else 0
        self._held: dict[tuple[str, int, int], int] = {}
        """Bytes on the device by (kind, partition, micro-batch): gradients, boundaries between partitions, kept graphs."""
        self._changed: set[int] = set()
        self._stored: set[int] = set()
        """Partitions that have optimizer state at home."""
        self._waiting: set[int] = set()
        self._with_state: set[int] = set()
        self._position, self._stepped = Position(), set[int]()
        self._clock = _Clock(resources.slots)

    def run(self, steps: Iterable[Step]) -> Iterator[PredictedStep]:
        for step in steps:
            yield self.take(step)

    def take(self, step: Step) -> PredictedStep:
        work = {
            Verb.LOAD: self._load,
            Verb.FORWARD: self._forward,
            Verb.BACKWARD: self._backward,
            Verb.UPDATE: self._update,
            Verb.DROP: self._drop,
        }[step.verb]
        if self._position.phase != step.phase and step.verb is not Verb.DROP:
            self._position = Position(step.phase)
        before = self._now
        peak, read, written, seconds = work(step, self._partitions[step.partition])
        ends = self._clock.take(step, seconds)
        return PredictedStep(step, before, max(before, peak, self._now), self._now, read, written, seconds, ends)

    @property
    def _now(self) -> int:
        return self._slots + sum(self._held.values())

    def _load(self, step: Step, part: PartitionCost) -> tuple[int, int, int, float]:
        p = step.partition
        if self._resources.slots == 1:
            self._slots = max(self._slots, part.slot_bytes(self._resources.gradients_room))
        read = part.weights + (part.borrowed if self._resources.borrows else 0)
        if step.more:
            self._with_state.add(p)
            read += (part.state if p in self._stored else 0) + (part.gradients if p in self._waiting else 0)
            self._waiting.discard(p)
        read = 0 if p in self._resources.at_host else read
        return 0, read, 0, read / self._speeds.read

    def _drop(self, step: Step, part: PartitionCost) -> tuple[int, int, int, float]:
        p, written = step.partition, 0
        stage = self._phases[step.phase].stage
        again = trains_again(self._phases, self._position, p, stage, stepped=p in self._stepped)
        if p in self._changed:
            written = part.weights + (part.state if again and p in self._with_state else 0)
            self._changed.discard(p)
        if again and p in self._with_state:
            self._stored.add(p)
        elif not again:
            self._stored.discard(p)
        self._with_state.discard(p)
        if step.more:
            written += part.gradients
            self._waiting.add(p)
            self._held.pop(("gradients", p, 0))
        written = 0 if p in self._resources.at_host else written
        return 0, 0, written, written / self._speeds.write

    def _update(self, step: Step, part: PartitionCost) -> tuple[int, int, int, float]:
        p, phase = step.partition, self._phases[step.phase]
        learns = phase.trains(p) and part.trainable
        peak = self._now
        if learns:
            peak += part.update_peak - self._held.get(("gradients", p, 0), 0)
        self._held.pop(("gradients", p, 0), None)
        if learns or part.buffers:
            self._changed.add(p)
        self._stepped.add(p)
        if len(self._stepped) == len(phase.partitions):
            self._stepped.clear()
            self._position = Position(step.phase, self._position.updates + 1)
            if self._position.updates == phase.updates:
                self._position = Position(step.phase + 1)
        return peak, 0, 0, part.parameters / self._speeds.optimizer if learns else 0.0

    def _forward(self, step: Step, part: PartitionCost) -> tuple[int, int, int, float]:
        phase, p, rows = self._phases[step.phase], step.partition, self._rows(step)
        assert step.micro_batch is not None
        read = rows * part.input_row if p == phase.partition else 0
        if phase.kind is not PhaseKind.TRAIN:
            written = rows * part.output_row if p == phase.last < len(self._partitions) - 1 else 0
            peak = self._now + part.inference_peak
            if phase.partition != phase.last:
                self._held.pop(("boundary", p, step.micro_batch), None)
                if p < phase.last:
                    self._hold("boundary", p + 1, step.micro_batch, part.output)
            seconds = max(self._compute(part, rows, 1), read / self._speeds.read) + written / self._speeds.write
            if p == phase.last and phase.span(step.micro_batch).stop == phase.rows:
                self._position = Position(step.phase + 1)
            return peak, read, written, seconds
        if p == phase.partition:
            self._hold("boundary", p, step.micro_batch, part.input)
            self._held["labels", 0, step.micro_batch] = rows * self._resources.label_row
        peak = self._now + part.forward_peak - self._held.get(("boundary", p, step.micro_batch), 0)
        if p < phase.last:
            self._hold("boundary", p + 1, step.micro_batch, part.output)
        if phase.keeps_graph(p):
            self._held["graph", p, step.micro_batch] = part.kept
        if p < phase.lowest:
            self._held.pop(("boundary", p, step.micro_batch), None)
        if p == phase.last:
            self._held.pop(("labels", 0, step.micro_batch), None)
        return peak, read, 0, max(self._compute(part, rows, 1), read / self._speeds.read)

    def _backward(self, step: Step, part: PartitionCost) -> tuple[int, int, int, float]:
        phase, p, m, rows = self._phases[step.phase], step.partition, step.micro_batch, self._rows(step)
        assert phase.kind is PhaseKind.TRAIN, f"{step}: a backward in {phase}"
        assert m is not None
        alone = phase.partition == phase.last
        read = rows * part.input_row if alone else 0
        graph = self._held.pop(("graph", p, m), 0)
        if p == phase.last:
            self._held.pop(("labels", 0, m), None)
        if part.tied and not alone:
            self._hold("tied", 0, m, part.tied)
        again = ("gradients", p, 0) in self._held
        need = (part.accumulate_peak - part.gradients) if again else part.train_peak
        # The partition's input, and the gradient that comes in, are counted in its own peak: not twice.
        known = self._held.get(("boundary", p, m), 0) + self._held.pop(("boundary", p + 1, m), 0)
        peak = max(self._now + known + graph, self._now + need - self._held.get(("boundary", p, m), 0))
        if phase.trains(p):
            self._held["gradients", p, 0] = part.gradients
        if p == phase.lowest:
            self._held.pop(("boundary", p, m), None)
            self._held.pop(("tied", 0, m), None)
        passes = 2 if phase.keeps_graph(p) else 3
        return peak, read, 0, max(self._compute(part, rows, passes), read / self._speeds.read)

    def _hold(self, kind: str, p: int, m: int, nbytes: int) -> None:
        if self._resources.boundary_tier == "device":
            self._held[kind, p, m] = nbytes

    def _rows(self, step: Step) -> int:
        assert step.micro_batch is not None
        span = self._phases[step.phase].span(step.micro_batch)
        return span.stop - span.start

    def _compute(self, part: PartitionCost, rows: int, passes: int) -> float:
        # A kernel reaches its full rate only with enough rows.
        return passes * (rows + _HALF_RATE_ROWS) * part.row_flops / self._speeds.flops


_HALF_RATE_ROWS = 12
"""Rows at which a matrix kernel reaches half its rate: about that on 2 cores."""


class _Clock:
    """When steps end: loads go ahead of the computation as far as there are slots, saves go on behind it."""

    def __init__(self, slots: int) -> None:
        self._free = [0.0] * slots
        self._ready: dict[int, float] = {}
        self._computing = self._reading = self._writing = 0.0

    def take(self, step: Step, seconds: float) -> float:
        p = step.partition
        if step.verb is Verb.LOAD:
            slot = min(self._free)
            self._free.remove(slot)
            self._reading = self._ready[p] = max(self._reading, slot) + seconds
            return self._reading
        if step.verb is Verb.DROP:
            self._writing = max(self._writing, self._computing) + seconds
            self._free.append(self._writing)
            del self._ready[p]
            return self._writing
        self._computing = max(self._computing, self._ready[p]) + seconds
        return self._computing


def simulate(
    phases: Phases, partitions: Sequence[PartitionCost], speeds: Speeds, resources: Resources
) -> tuple[list[Phase], list[PredictedStep], float]:
    """(phases walked through, moments, seconds of the whole run): the first updates of a pass, and its last.

    Passes that differ in nothing but the epoch are walked through twice and counted.
    """
    short, more = _shortened(phases)
    simulator = Simulator(short, partitions, speeds, resources)
    predicted_steps = list(simulator.run(steps_of(short)))
    ends: dict[int, list[float]] = {}
    for predicted in predicted_steps:
        phase = short[predicted.step.phase]
        if predicted.step.verb is Verb.UPDATE or phase.kind is not PhaseKind.TRAIN:
            ends.setdefault(predicted.step.phase, []).append(predicted.ends)
    seconds = max(predicted.ends for predicted in predicted_steps)
    for number, (updates, repeats) in more.items():
        marks = ends[number]
        per_update = len(marks) // short[number].updates
        first, last = marks[per_update - 1], marks[-1]
        steady = (last - first) / max(1, short[number].updates - 1)
        seconds += steady * (updates * (1 + repeats) - short[number].updates)
    return short, predicted_steps, seconds


_WALKED = 4
"""Updates of a pass that are walked through."""


def _shortened(phases: Phases) -> tuple[list[Phase], dict[int, tuple[int, int]]]:
    """(phases with few updates and epochs, {number in them: (updates it stands for, passes left out)})."""
    short: list[Phase] = []
    more: dict[int, tuple[int, int]] = {}
    for phase, stands_for in (pair for stretch in phases.stretches for pair in stretch.walked()):
        more[len(short)] = phase.updates, stands_for - 1
        ragged = phase.rows % phase.batch or phase.batch
        rows = phase.rows if phase.updates <= _WALKED else (_WALKED - 1) * phase.batch + ragged
        short.append(replace(phase, rows=rows))
    return short, more
