"""What a schedule will do to memory, links and the clock, from the blocks' costs alone. Ints in, ints out.

The planner asks it which cut fits and how long it takes; a test runs the same steps for real and compares the two,
step by step.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from seqpart.costs.hardware import Speeds
from seqpart.costs.partition import PartitionCost
from seqpart.schedule.phases import Phases, trains_again
from seqpart.schedule.steps import Phase, PhaseKind, Position, Step, Verb, steps_of


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """One step predicted: bytes beyond the runtime and the fixed buffers, traffic of the disk, seconds, and when it ends."""

    step: Step
    before: int
    peak: int
    after: int
    slots: int
    """Of all three, bytes of the buffers in which partitions lie."""
    bytes_read: int
    bytes_written: int
    seconds: float
    ends: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What a plan grants a schedule beside the partitions' own work."""

    slots: int = 1
    """Buffers that partitions use in turn."""
    stays: frozenset[int] = frozenset()
    """Partitions that have a slot of their own, and stay in it."""
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
    keeps_heap: bool = False
    """Whether memory of tensors that die stays for those that come. See [Note: a kept heap] in memory/heap.py."""

    @property
    def at_once(self) -> int:
        """Partitions that may be on the device at the same time."""
        return self.slots + len(self.stays)


class Simulator:
    """Takes the steps of a schedule one by one. A single slot grows to its largest partition so far and never shrinks."""

    def __init__(
        self, phases: Sequence[Phase], partitions: Sequence[PartitionCost], speeds: Speeds, resources: Resources | None = None
    ) -> None:
        self._phases, self._partitions, self._speeds = phases, partitions, speeds
        self._resources = resources = resources or Resources()
        gradients = resources.gradients_room
        shared = sorted(
            (part.slot_bytes(gradients) for p, part in enumerate(partitions) if p not in resources.stays), reverse=True
        )
        self._own = sum(partitions[p].slot for p in resources.stays)
        self._shared = sum(shared[: resources.slots]) if resources.slots > 1 else 0
        self._held: dict[tuple[str, int, int], int] = {}
        """Bytes on the device by (kind, partition, micro-batch): gradients, boundaries between partitions, kept graphs."""
        self._sum = 0
        """Of all that is held."""
        self._changed: set[int] = set()
        self._stored: set[int] = set()
        """Partitions that have optimizer state at home."""
        self._waiting: set[int] = set()
        self._with_state: set[int] = set()
        self._position, self._stepped = Position(), set[int]()
        self._clock = _Clock(resources)
        self._last_trained = {
            (phase.stage, p): number for number, phase in enumerate(phases) for p in phase.partitions if phase.trains(p)
        }
        self._do = {
            Verb.LOAD: self._load,
            Verb.FORWARD: self._forward,
            Verb.BACKWARD: self._backward,
            Verb.UPDATE: self._update,
            Verb.DROP: self._drop,
        }

    def run(self, steps: Iterable[Step]) -> Iterator[PredictedStep]:
        for step in steps:
            yield self.take(step)

    def take(self, step: Step) -> PredictedStep:
        work = self._do[step.verb]
        if self._position.phase != step.phase and step.verb is not Verb.DROP:
            self._position = Position(step.phase)
        before = self._now
        peak, read, written, seconds = work(step, self._partitions[step.partition])
        ends = self._clock.take(step, seconds)
        slots = self._own + self._shared
        return PredictedStep(step, before, max(before, peak, self._now), self._now, slots, read, written, seconds, ends)

    @property
    def _now(self) -> int:
        return self._own + self._shared + self._sum

    def _keep(self, kind: str, p: int, m: int, nbytes: int) -> None:
        self._sum += nbytes - self._held.get((kind, p, m), 0)
        self._held[kind, p, m] = nbytes

    def _free(self, kind: str, p: int, m: int) -> int:
        nbytes = self._held.pop((kind, p, m), 0)
        self._sum -= nbytes
        return nbytes

    def _load(self, step: Step, part: PartitionCost) -> tuple[int, int, int, float]:
        p = step.partition
        if self._resources.slots == 1 and p not in self._resources.stays:
            self._shared = max(self._shared, part.slot_bytes(self._resources.gradients_room))
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
        later = self._last_trained.get((stage, p), -1) > self._position.phase
        again = trains_again(self._phases, self._position, p, stage, stepped=p in self._stepped, later=later)
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
            self._free("gradients", p, 0)
        written = 0 if p in self._resources.at_host else written
        return 0, 0, written, written / self._speeds.write

    def _update(self, step: Step, part: PartitionCost) -> tuple[int, int, int, float]:
        p, phase = step.partition, self._phases[step.phase]
        learns = phase.trains(p) and part.trainable
        peak = self._now
        if learns:
            peak += part.update_peak - self._held.get(("gradients", p, 0), 0)
        self._free("gradients", p, 0)
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
                self._free("boundary", p, step.micro_batch)
                if p < phase.last:
                    self._hold("boundary", p + 1, step.micro_batch, part.output)
            computing = self._computing(part, rows, forward=1, backward=0)
            seconds = max(computing, read / self._speeds.read) + written / self._speeds.write
            if p == phase.last and phase.span(step.micro_batch).stop == phase.rows:
                self._position = Position(step.phase + 1)
            return peak, read, written, seconds
        if p == phase.partition:
            self._hold("boundary", p, step.micro_batch, part.input)
            self._keep("labels", 0, step.micro_batch, rows * self._resources.label_row)
        peak = self._now + part.forward_peak - self._held.get(("boundary", p, step.micro_batch), 0)
        if p < phase.last:
            self._hold("boundary", p + 1, step.micro_batch, part.output)
        if phase.keeps_graph(p):
            self._keep("graph", p, step.micro_batch, part.kept)
        if p < phase.lowest:
            self._free("boundary", p, step.micro_batch)
        if p == phase.last:
            self._free("labels", 0, step.micro_batch)
        return peak, read, 0, max(self._computing(part, rows, forward=1, backward=0), read / self._speeds.read)

    def _backward(self, step: Step, part: PartitionCost) -> tuple[int, int, int, float]:
        phase, p, m, rows = self._phases[step.phase], step.partition, step.micro_batch, self._rows(step)
        assert phase.kind is PhaseKind.TRAIN, f"{step}: a backward in {phase}"
        assert m is not None
        alone = phase.partition == phase.last
        read = rows * part.input_row if alone else 0
        graph = self._free("graph", p, m)
        if p == phase.last:
            self._free("labels", 0, m)
        if part.tied and not alone:
            self._hold("tied", 0, m, part.tied)
        again = ("gradients", p, 0) in self._held
        need = (part.accumulate_peak - part.gradients) if again else part.train_peak
        # The partition's input, and the gradient that comes in, are counted in its own peak: not twice.
        known = self._held.get(("boundary", p, m), 0) + self._free("boundary", p + 1, m)
        peak = max(self._now + known + graph, self._now + need - self._held.get(("boundary", p, m), 0))
        if phase.trains(p):
            self._keep("gradients", p, 0, part.gradients)
        if p == phase.lowest:
            self._free("boundary", p, m)
            self._free("tied", 0, m)
        seconds = self._computing(part, rows, forward=0 if phase.keeps_graph(p) else 1, backward=1)
        return peak, read, 0, max(seconds, read / self._speeds.read)

    def _computing(self, part: PartitionCost, rows: int, *, forward: int, backward: int) -> float:
        keeps_heap = self._resources.keeps_heap
        return self._speeds.computing(part, rows, forward=forward, backward=backward, keeps_heap=keeps_heap)

    def _hold(self, kind: str, p: int, m: int, nbytes: int) -> None:
        if self._resources.boundary_tier == "device":
            self._keep(kind, p, m, nbytes)

    def _rows(self, step: Step) -> int:
        assert step.micro_batch is not None
        span = self._phases[step.phase].span(step.micro_batch)
        return span.stop - span.start


class _Clock:
    """When steps end: loads go ahead of the computation as far as there are slots, saves go on behind it."""

    def __init__(self, resources: Resources) -> None:
        self._free, self._stays = [0.0] * resources.slots, resources.stays
        self._ready: dict[int, float] = {}
        self._computing = self._reading = self._writing = 0.0

    def take(self, step: Step, seconds: float) -> float:
        p = step.partition
        if step.verb is Verb.LOAD:
            slot = 0.0
            if p not in self._stays:
                slot = min(self._free)
                self._free.remove(slot)
            self._reading = self._ready[p] = max(self._reading, slot) + seconds
            return self._reading
        if step.verb is Verb.DROP:
            self._writing = max(self._writing, self._computing) + seconds
            if p not in self._stays:
                self._free.append(self._writing)
            del self._ready[p]
            return self._writing
        self._computing = max(self._computing, self._ready[p]) + seconds
        return self._computing


def simulate(
    phases: Phases, partitions: Sequence[PartitionCost], speeds: Speeds, resources: Resources
) -> tuple[list[Phase], list[PredictedStep], float]:
    """(phases walked through, predicted steps, seconds of the whole run): the first updates of a pass, and its last.

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
