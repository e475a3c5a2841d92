"""Predicts memory, traffic and time of a schedule from the blocks' costs alone. Ints in, ints out.

The planner uses it to see which cut fits and how long it takes; a test runs the same steps for real and compares the two,
step by step.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from seqpart.model.packs import DEVICE, BoundaryRouting, Tiers, Value
from seqpart.profile.machine import Speeds
from seqpart.profile.partition import Parting, PartitionCost
from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.schedule.phases import Phases, shortened
from seqpart.schedule.progress import Progress
from seqpart.schedule.steps import REWRITES_HOMES, START, Position, Step, Verb, steps_of
from seqpart.store.graph_ranges import GRAPH_BUFFERS


class Disk:
    """A disk that serves one request at a time: in the order of the calls, later calls also in the gaps."""

    def __init__(self) -> None:
        self._busy: list[tuple[float, float]] = []
        """Busy intervals (begin, end), in order."""

    def serve(self, begins: float, seconds: float) -> float:
        """Returns the time at which `seconds` of work end that may begin at `begins`."""
        if not self._busy or self._busy[-1][0] <= begins:  # after all others, as most are
            last = self._busy.pop() if self._busy and self._busy[-1][1] >= begins else (begins, begins)
            self._busy.append((last[0], last[1] + seconds))
            return last[1] + seconds
        first, ends, others = begins, begins + seconds, list[tuple[float, float]]()
        for busy in self._busy:
            if busy[1] < begins or busy[0] > ends:
                others.append(busy)
            else:
                ends += busy[1] - max(busy[0], begins)
                first = min(first, busy[0])
        if seconds:
            self._busy = sorted([*others, (first, ends)])
        return ends

    def forget(self, before: float) -> None:
        """Drops intervals that end before `before`: no later request begins earlier."""
        while self._busy and self._busy[0][1] < before:
            del self._busy[0]


class Clock:
    """Computes when steps end: loads are prefetched as far as there are slots, and saves overlap with the computation."""

    def __init__(
        self, slots: int, stays: frozenset[int], *, at_host: frozenset[int] = frozenset(),
        graphs_at_host: frozenset[int] = frozenset(), boundaries_on_disk: bool = True,
        slotless: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        """at_host, graphs_at_host: partitions whose homes and graphs are in host memory, not on the disk. slotless: partitions
        that take a slot for their optimizer state alone."""
        self._free, self._stays, self._slotless, self._taken = [0.0] * slots, stays, slotless, set[int]()
        self._at_host, self._graphs_at_host, self._boundaries_on_disk = at_host, graphs_at_host, boundaries_on_disk
        self._disk = Disk()
        self._ready: dict[int, float] = {}
        self._whole: dict[int, float] = {}
        """Times at which each partition's weights (`_ready`) and its optimizer state (`_whole`) are loaded."""
        self._computing = self._reading = self._writing = self._stepping = 0.0
        self._stepped: dict[int, float] = {}
        """Times at which each partition's last step on the host is over."""
        self._graph_buffers = [0.0] * GRAPH_BUFFERS
        """Times at which the buffers are free."""

    def take(self, step: Step, seconds: float, graph: float, boundary: float, times: int, first: float = 1.0) -> float:
        """Returns the time at which `step` ends, which stands for `times` equal ones of `seconds` each.

        graph: seconds to offload a graph after FORWARD, or to bring it back for BACKWARD. boundary: seconds to write the
        boundary that the step leaves. first: for LOAD, the share of the time that weights take.
        """
        p = step.partition
        by_disk = p not in self._at_host
        if step.verb in REWRITES_HOMES:  # they read homes that other steps have written: nothing overlaps
            self._computing = self._reading = self._writing = max(self._computing, self._reading, self._writing) + seconds
            return self._computing
        if step.verb is Verb.LOAD:
            slot = 0.0
            if p not in self._stays and (step.more or p not in self._slotless):
                slot = min(self._free)
                self._free.remove(slot)
                self._taken.add(p)
            self._disk.forget(min(self._reading, self._computing))
            self._ready[p] = self._moved(max(self._reading, slot, self._stepped.get(p, 0.0)), first * seconds, by_disk)
            self._reading = self._whole[p] = self._moved(self._ready[p], (1 - first) * seconds, by_disk)
            return self._reading
        if step.verb is Verb.DROP:
            self._writing = self._moved(max(self._writing, self._computing), seconds, by_disk)
            if p in self._taken:
                self._free.append(self._writing)
                self._taken.remove(p)
            del self._ready[p], self._whole[p]
            return self._writing
        return self._work(step, seconds, graph, boundary, times)

    def step_on_host(self, p: int, seconds: float, gradients: float) -> float:
        """Returns the time at which the device goes on, while its gradients leave and the host makes p's optimizer step."""
        self._writing = max(self._writing, self._computing) + gradients
        self._stepping = self._stepped[p] = max(self._stepping, self._writing) + seconds
        return self._computing

    def refresh(self, p: int, seconds: float) -> None:
        """Loads the weights of a partition on the device again, after its step on the host."""
        self._reading = self._ready[p] = max(self._reading, self._stepped.get(p, self._computing)) + seconds

    def _moved(self, begins: float, seconds: float, by_disk: bool) -> float:
        return self._disk.serve(begins, seconds) if by_disk else begins + seconds

    def _work(self, step: Step, seconds: float, graph: float, boundary: float, times: int) -> float:
        p, leaves = step.partition, step.verb is Verb.FORWARD
        graph_by_disk = p not in self._graphs_at_host
        begins = max(self._computing, self._whole.get(p, 0.0) if step.verb is Verb.UPDATE else self._ready[p])
        if graph:
            buffer = self._graph_buffers.pop(0)
            if not leaves:
                buffer = self._reading = self._moved(max(self._reading, buffer), times * graph, graph_by_disk)
            begins = max(begins, buffer)
        self._computing = begins + times * seconds
        written = boundary + (graph if leaves else 0.0)
        if written:  # after the first one all others may still have to be written, and after the last one that alone
            by_disk = (boundary > 0 and self._boundaries_on_disk) or (graph > 0 and leaves and graph_by_disk)
            moved = self._moved(max(self._writing, begins + seconds), times * written, by_disk)
            self._writing = max(moved, self._computing + written)
        if graph:
            self._graph_buffers.append(self._writing if leaves else self._computing)
        return self._computing


REQUEST_SECONDS = 3e-4
"""Seconds of one write or read of the disk beside its bytes, with the hand-over to a thread."""


_MOVES = {Verb.LOAD, Verb.DROP, *REWRITES_HOMES}


class PredictedStep(NamedTuple):
    """Prediction for one step: bytes beyond the runtime and the fixed buffers, disk traffic, seconds, and when it ends."""

    step: Step
    before: int
    peak: int
    after: int
    slots: int
    """Bytes of the partitions' slots, included in the three above."""
    bytes_read: int
    bytes_written: int
    seconds: float
    moving: float
    """Seconds of transfers, which may overlap with the computation."""
    stepping: float
    """Seconds of an optimizer step on the host, which overlaps with both."""
    ends: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """Resources that a plan grants to a schedule, beside memory for the partitions' own work."""

    slots: int = 1
    """Buffers that partitions use in turn."""
    stays: frozenset[int] = frozenset()
    """Partitions that stay in a slot of their own."""
    weights_stay: frozenset[int] = frozenset()
    """Partitions whose weights stay, while their optimizer state comes and goes."""
    tiers: Tiers = ()
    """Tier of each partition's boundary; () if all wait on the device."""
    borrows: bool = True
    """True if a partition loads the shared weights that it borrows; where all partitions stay, they are there."""
    label_row: int = 0
    """Bytes of one row's labels, which wait on the device from the first partition's forward to the last one's backward."""
    gradients_room: frozenset[int] = frozenset()
    """Partitions whose slot must have room for gradients."""
    at_host: frozenset[int] = frozenset()
    """Partitions whose homes are in host memory, and come and go by the device's link instead of the disk."""
    host_steps: frozenset[int] = frozenset()
    """Partitions of `at_host` whose optimizer step is computed on the host."""
    narrow: frozenset[int] = frozenset()
    """Partitions of `host_steps` whose weights come in 16 bits where these give the same results."""
    graphs_at_host: frozenset[int] = frozenset()
    """Partitions whose graphs are offloaded to host memory; other offloaded graphs go to the disk."""
    graph_buffers: int = 0
    """Bytes of the buffers through which graphs are offloaded; saved tensors are used in place in them."""
    parting: Parting | None = None
    """Sizes for splitting homes into those of subnets and merging them; None without subnets."""
    keeps_heap: bool = False
    """True if freed memory stays in the process for later tensors. See [Note: a kept heap] in device/heap.py."""

    @property
    def at_once(self) -> int:
        """Partitions that may be on the device at the same time."""
        return self.slots + len(self.stays) + len(self.weights_stay)


class Simulator:
    """Predicts the steps of a schedule one by one. A single slot grows to its largest partition so far and never shrinks."""

    def __init__(
        self, phases: Sequence[Phase], partitions: Sequence[PartitionCost], speeds: Speeds, resources: Resources | None = None,
        start: Position = START, stands_for: Mapping[tuple[int, int | None], int] | None = None,
    ) -> None:  # fmt: skip
        self._phases, self._partitions, self._speeds = phases, partitions, speeds
        self._stands_for = stands_for or {}
        """Number of equal micro-batches that one stands for, by (phase, micro-batch). See schedule/phases.py."""
        self._alike = 1
        """Number of these that are held at once."""
        self._resources = resources = resources or Resources()
        shared = sorted((self._in_slot(p) for p in range(len(partitions)) if p not in resources.stays), reverse=True)
        self._own = sum(partitions[p].slot_bytes(False, stateless=p in resources.host_steps) for p in resources.stays)
        self._own += sum(partitions[p].weights_slot for p in resources.weights_stay)
        self._own += resources.graph_buffers
        self._shared = sum(shared[: resources.slots]) if resources.slots > 1 else 0
        self._routing = BoundaryRouting([part.entering for part in partitions], [part.leaving for part in partitions])
        self._held: dict[tuple[str, int, int], int] = {}
        """Bytes on the device by (kind, partition or value, micro-batch): gradients of weights, kept graphs, boundary values,
        and gradients of values that several partitions take."""
        self._shared_gradients = set[tuple[int, int]]()
        """(block that owns shared weights, micro-batch) of their gradients that wait for it."""
        self._sum = 0
        """Sum of all bytes held."""
        self._changed: set[int] = set()
        """Partitions that were updated, and not dropped since."""
        self._unsaved: set[int] = set()
        """Partitions whose weights stay on the device, and are newer than their homes."""
        self._filled: set[int] = set()
        """Partitions whose weights stay and were loaded already."""
        self._stored: set[int] = set()
        """Partitions that have optimizer state at home."""
        self._stale: set[int] = set()
        """Partitions on the device whose weights a step on the host has changed since."""
        self._leaving = 0
        """The partition whose gradients are on their way to the host."""
        self.progress = Progress(phases, start)
        self._first = 1.0
        """Share of the last load that the computation waits for: weights, and not what the optimizer step needs."""
        self._clock = Clock(
            resources.slots, resources.stays, at_host=resources.at_host, graphs_at_host=resources.graphs_at_host,
            boundaries_on_disk="disk" in resources.tiers,
            slotless=resources.weights_stay - resources.gradients_room,
        )  # fmt: skip
        self._do = {
            Verb.LOAD: self._load,
            Verb.FORWARD: self._forward,
            Verb.BACKWARD: self._backward,
            Verb.UPDATE: self._update,
            Verb.DROP: self._drop,
            Verb.SPLIT: self._part,
            Verb.MERGE: self._part,
        }

    def run(self, steps: Iterable[Step]) -> Iterator[PredictedStep]:
        return map(self.take, steps)

    def take(self, step: Step) -> PredictedStep:
        work = self._do[step.verb]
        before = self._now
        times = self._stands_for.get((step.phase, step.micro_batch), 1)
        self._alike = times if times > 1 and self._phases[step.phase].breadth_first else 1
        peak, read, written, seconds = work(step, self._partitions[step.partition])
        self.progress.begin(step)
        self.progress.finish(step)
        graph, boundary = self._graph_seconds(step), self._boundary_seconds(step)
        moving, stepping = seconds if step.verb in _MOVES else graph + boundary, 0.0
        part, speeds = self._partitions[step.partition], self._speeds
        if step.partition == self._leaving and step.verb not in (Verb.UPDATE, Verb.DROP):
            self._free("leaving", self._leaving, 0)
        if step.partition in self._stale and step.verb is not Verb.UPDATE:
            self._stale.discard(step.partition)
            if step.verb is not Verb.DROP:
                moving += self._weights_of(step.partition) / speeds.up
                self._clock.refresh(step.partition, self._weights_of(step.partition) / speeds.up)
        if step.verb is Verb.UPDATE and self._steps_on_host(step) and speeds.down != math.inf:
            loaded = step.partition in self.progress.loaded
            stepping, moving = part.parameters / speeds.host_optimizer, part.gradients / speeds.down if loaded else 0.0
            ends = self._clock.step_on_host(step.partition, stepping, moving)
        else:
            ends = self._clock.take(step, seconds, graph, boundary, times, first=self._first)
        slots, after = self._own + self._shared, self._now
        return PredictedStep(
            step, before, max(before, peak, after), after, slots,
            times * read, times * written, times * seconds, times * moving, stepping, ends,
        )  # fmt: skip

    def _graph_seconds(self, step: Step) -> float:
        """Seconds to offload a graph after its forward pass, or to bring it back before its backward pass."""
        if not self._phases[step.phase].offloads_graph(step.partition) or step.verb not in (Verb.FORWARD, Verb.BACKWARD):
            return 0.0
        graph, speeds, leaves = self._partitions[step.partition].graph, self._speeds, step.verb is Verb.FORWARD
        if step.partition in self._resources.graphs_at_host:
            return graph / (speeds.down if leaves else speeds.up)
        return REQUEST_SECONDS + graph / (speeds.write if leaves else speeds.read)

    def _boundary_seconds(self, step: Step) -> float:
        """Seconds to write the offloaded boundary that a step leaves for another partition; overlaps with the computation."""
        phase, p, part = self._phases[step.phase], step.partition, self._partitions[step.partition]
        if not self._resources.tiers or phase.kind is not PhaseKind.TRAIN:
            return 0.0
        if step.verb is Verb.FORWARD and p < phase.last:
            return self._away(part.leaving, self._speeds.write, self._speeds.down)
        if step.verb is Verb.BACKWARD and p > phase.lowest:
            return self._away(part.entering, self._speeds.write, self._speeds.down)
        return 0.0

    def _away(self, values: Sequence[Value], disk: float, link: float) -> float:
        """Seconds to move the `values` that wait off the device, at the rate of the disk or of the link."""
        by_disk, by_link = self._waiting(values, "disk"), self._waiting(values, "host")
        return (REQUEST_SECONDS + by_disk / disk if by_disk else 0.0) + by_link / link

    def _waiting(self, values: Sequence[Value], tier: str) -> int:
        return sum(value.nbytes for value in values if self._routing.tier_of(value.number, self._resources.tiers) == tier)

    def _steps_on_host(self, step: Step) -> bool:
        return step.partition in self._resources.host_steps and self._phases[step.phase].trains(step.partition)

    def _in_slot(self, p: int) -> int:
        granted = self._resources
        return self._partitions[p].slot_bytes(
            p in granted.gradients_room, p in granted.weights_stay, stateless=p in granted.host_steps
        )

    @property
    def _now(self) -> int:
        return self._own + self._shared + self._sum

    def _keep(self, kind: str, p: int, m: int, nbytes: int) -> None:
        nbytes *= 1 if kind in ("gradients", "buffers", "leaving") else self._alike
        self._sum += nbytes - self._held.get((kind, p, m), 0)
        self._held[kind, p, m] = nbytes

    def _free(self, kind: str, p: int, m: int) -> int:
        nbytes = self._held.pop((kind, p, m), 0)
        self._sum -= nbytes
        return nbytes

    def _load(self, step: Step, part: PartitionCost) -> tuple[int, int, int, float]:
        p = step.partition
        self._free("buffers", p, 0)
        if self._resources.slots == 1 and p not in self._resources.stays:
            self._shared = max(self._shared, self._in_slot(p))
        borrowed = part.borrowed if self._resources.borrows else 0
        self._first = read = 0 if p in self._filled else self._weights_of(p) + borrowed
        self._filled |= {p} & self._resources.weights_stay
        if step.more:
            read += (part.state if p in self._stored else 0) + (part.gradients if p in self.progress.away else 0)
        self._first /= max(1, read)
        near = p in self._resources.at_host
        return 0, 0 if near else read, 0, read / (self._speeds.up if near else self._speeds.read)

    def _weights_of(self, p: int) -> int:
        """Bytes of a partition's own weights as they come to the device."""
        return self._partitions[p].weights - (self._partitions[p].narrow if p in self._resources.narrow else 0)

    def _drop(self, step: Step, part: PartitionCost) -> tuple[int, int, int, float]:
        p, written, waits = step.partition, 0, step.partition not in self._changed
        with_state = self.progress.loaded[p]
        again = self.progress.needs_state(p, self._phases[step.phase].stage)
        if p in self._changed:
            written = part.state if again and with_state else 0
            self._changed.discard(p)
            self._unsaved.add(p)
        if p in self._unsaved and not (again and p in self._resources.weights_stay):
            written += part.rewritten
            self._unsaved.discard(p)
        if again and with_state:
            self._stored.add(p)
        elif not again:
            self._stored.discard(p)
        if step.more:
            written += part.gradients
            self._free("gradients", p, 0)
        if step.more or (waits and self._phases[step.phase].keeps_graph(p)):  # copies, see EarlierBuffers.leave
            self._keep("buffers", p, 0, part.buffers)
        near = p in self._resources.at_host
        return 0, 0, 0 if near else written, written / (self._speeds.down if near else self._speeds.write)

    def _part(self, step: Step, part: PartitionCost) -> tuple[int, int, int, float]:
        """SPLIT reads the homes of the whole and writes those of its parts; MERGE reads both and writes those of the whole."""
        assert self._resources.parting is not None
        whole, parts, own = self._resources.parting.homes[step.partition]
        if self._resources.slots == 1:
            self._shared = 0  # its buffer is freed
        read, written = (whole, own) if step.verb is Verb.SPLIT else (whole + parts, whole)
        seconds = read / self._speeds.read + written / self._speeds.write
        return self._now + self._resources.parting.buffers, read, written, seconds

    def _update(self, step: Step, part: PartitionCost) -> tuple[int, int, int, float]:
        p, phase = step.partition, self._phases[step.phase]
        learns = phase.trains(p) and part.trainable
        if self._steps_on_host(step):
            return self._update_on_host(p, part)
        held, freed = self._now, self._free("gradients", p, 0) + self._free("buffers", p, 0)
        peak = held + (part.update_peak - freed if learns else 0)
        if phase.keeps_rows(p):
            for m, _ in phase.spans_of(self.progress.position.updates):
                self._free_values(part.entering, m)
        if learns or part.buffers:
            self._changed.add(p)
        return peak, 0, 0, part.parameters / self._speeds.optimizer if learns else 0.0

    def _update_on_host(self, p: int, part: PartitionCost) -> tuple[int, int, int, float]:
        """On the CPU gradients are used where they are; elsewhere they leave, which the next partition's wait for."""
        self._stored.add(p)
        if p in self.progress.loaded:
            self._stale.add(p)
        self._free("leaving", self._leaving, 0)
        held, gradients = self._now, self._free("gradients", p, 0)
        if self._speeds.down == math.inf:
            own = gradients if p in self.progress.loaded else part.gradients  # those that waited at home are not held
            return held + part.update_peak - own, 0, 0, part.parameters / self._speeds.optimizer
        self._leaving = p
        self._keep("leaving", p, 0, gradients)
        return held, 0, 0, 0.0

    def _forward(self, step: Step, part: PartitionCost) -> tuple[int, int, int, float]:
        phase, p, rows = self._phases[step.phase], step.partition, self._rows(step)
        assert step.micro_batch is not None
        read = rows * part.input_row if p == phase.partition and phase.kind is not PhaseKind.DRAW else 0
        if phase.kind is not PhaseKind.TRAIN:
            written = rows * part.output_row if p == phase.last and phase.hands_on(len(self._partitions)) else 0
            if p == phase.partition and phase.breadth_first:
                self._hold_values(part.entering, step.micro_batch)
            held = self._held_of(part.entering, step.micro_batch) // self._alike if phase.breadth_first else 0
            peak = self._now + part.inference_peak - held
            if phase.partition != phase.last:
                self._free_values(self._routing.used_up(p), step.micro_batch)
                if p < phase.last:
                    self._hold_values(part.leaving, step.micro_batch)
            computing = self._computing(part, rows, forward=1, backward=0)
            seconds = max(computing, read / self._speeds.read) + written / self._speeds.write
            return peak, read, written, seconds
        if p == phase.partition:
            self._hold_values(part.entering, step.micro_batch, rows if phase.keeps_rows(p) else None)
            self._keep("labels", 0, step.micro_batch, rows * self._resources.label_row)
        offloads = phase.offloads_graph(p)  # then saved tensors are freed like others
        work = part.inference_peak if offloads else part.forward_peak
        peak = self._now + work - self._entered(phase, p, part, step.micro_batch)
        if p == phase.partition < phase.lowest:  # of the micro-batches that it stands for, one is there at a time
            peak -= self._held_of(self._routing.used_up(p), step.micro_batch) * (self._alike - 1) // self._alike
        if p < phase.last:
            self._hold_values(part.leaving, step.micro_batch)
        if phase.keeps_graph(p) and not offloads:
            sides = [*part.entering, *part.leaving] if self._resources.tiers else []  # on the device they are held already
            held = self._waiting(sides, "disk") + self._waiting(sides, "host")
            held += part.input if phase.keeps_rows(p) else 0
            self._keep("graph", p, step.micro_batch, part.kept + held)
        if p not in phase.streams:  # as they were when the update began, see EarlierBuffers.begin_update
            self._keep("buffers", p, 0, part.buffers)
        if p < phase.lowest:
            self._free_values(self._routing.used_up(p), step.micro_batch)
        if p == phase.last:
            self._free("labels", 0, step.micro_batch)
        gathering = part.graph / self._speeds.copy if offloads else 0.0
        return peak, read, 0, max(self._computing(part, rows, forward=1, backward=0) + gathering, read / self._speeds.read)

    def _backward(self, step: Step, part: PartitionCost) -> tuple[int, int, int, float]:
        phase, p, m, rows = self._phases[step.phase], step.partition, step.micro_batch, self._rows(step)
        assert phase.kind is PhaseKind.TRAIN, f"{step}: a backward in {phase}"
        assert m is not None
        alone = phase.partition == phase.last
        read = rows * part.input_row if alone else 0
        graph = self._free("graph", p, m)
        labels = self._free("labels", 0, m) if p == phase.last else 0
        again = ("gradients", p, 0) in self._held
        need = (part.accumulate_peak - part.gradients) if again else part.train_peak
        need -= self._held.get(("buffers", p, 0), 0)
        if phase.offloads_graph(p):
            need -= part.kept
        shared = sum(nbytes for owner, nbytes in part.ties if (owner, m) in self._shared_gradients)
        need += shared  # gradients that later partitions left for shared weights, and their sum with its own
        if self._routing.tier_of(-1, self._resources.tiers) != DEVICE:
            need += part.lent + shared  # copies of those that waited off the device
        # The partition's input, and the gradient that comes in, are counted in its own peak: not twice.
        own, handed = self._entered(phase, p, part, m), self._hand_down(p, m)
        waiting = (handed + graph + labels) * (self._alike - 1) // self._alike  # of the others that this one stands for
        peak = self._now + max(own + handed + graph, need - own + waiting)
        for owner, nbytes in () if alone else part.ties:
            self._hold("tied", owner, m, max(nbytes, self._free("tied", owner, m) // self._alike), -1)
            self._shared_gradients.add((owner, m))
        if phase.trains(p):
            self._keep("gradients", p, 0, part.gradients)
        if not phase.keeps_rows(p):
            self._pass_down(p, phase.lowest, m)
        if p == phase.lowest:
            for owner, _ in [one for one in self._shared_gradients if one[1] == m]:
                self._free("tied", owner, m)
                self._shared_gradients.remove((owner, m))
        seconds = self._computing(part, rows, forward=0 if phase.keeps_graph(p) else 1, backward=1)
        if not alone and not phase.keeps_graph(p):
            seconds += self._away(part.entering, self._speeds.read, self._speeds.up)  # the computation waits for it
        return peak, read, 0, max(seconds, read / self._speeds.read)

    def _computing(self, part: PartitionCost, rows: int, *, forward: int, backward: int) -> float:
        keeps_heap = self._resources.keeps_heap
        return self._speeds.computing(part, min(rows, part.rows), forward=forward, backward=backward, keeps_heap=keeps_heap)

    def _hand_down(self, p: int, m: int) -> int:
        """Frees the gradients that p takes and returns their bytes: of values that it gave, and of values that later partitions
        took as well. The last partition takes none."""
        given, again = self._partitions[p].leaving, self._routing.taken_again(p)
        return self._free_values(given, m) + sum(self._free("gradient", value.number, m) for value in (*given, *again))

    def _pass_down(self, p: int, lowest: int, m: int) -> None:
        """Replaces the values that p took by their gradients, where lower partitions learn; keeps both if others took them."""
        for value in self._partitions[p].entering:
            wanted = self._routing.wants_gradient(value, lowest)
            if not self._routing.is_first_user(p, value, lowest):
                if wanted:
                    self._hold("gradient", value.number, m, value.nbytes, value.number)
            elif not wanted:
                self._free("boundary", value.number, m)

    def _held_of(self, values: Sequence[Value], m: int) -> int:
        return sum(self._held.get(("boundary", value.number, m), 0) for value in values)

    def _entered(self, phase: Phase, p: int, part: PartitionCost, m: int) -> int:
        """Bytes held of the entering boundary that the step's own peak counts too; 0 for rows that wait for other pairs, which
        the step copies."""
        return 0 if phase.keeps_rows(p) else self._held_of(part.entering, m) // self._alike

    def _hold_values(self, values: Sequence[Value], m: int, rows: int | None = None) -> None:
        for value in values:
            nbytes = value.nbytes if rows is None else value.nbytes_at(rows)
            self._hold("boundary", value.number, m, nbytes, value.number)

    def _free_values(self, values: Sequence[Value], m: int) -> int:
        return sum(self._free("boundary", value.number, m) for value in values)

    def _hold(self, kind: str, p: int, m: int, nbytes: int, number: int) -> None:
        """Holds `nbytes` if value `number`, which they belong to, waits on the device."""
        if self._routing.tier_of(number, self._resources.tiers) == DEVICE:
            self._keep(kind, p, m, nbytes)

    def _rows(self, step: Step) -> int:
        assert step.micro_batch is not None
        span = self._phases[step.phase].span(step.micro_batch)
        return span.stop - span.start


class Simulation(NamedTuple):
    """The phases of a run that were simulated, the steps of these, and the seconds of the whole run."""

    phases: list[Phase]
    steps: list[PredictedStep]
    seconds: float


def simulate(phases: Phases, partitions: Sequence[PartitionCost], speeds: Speeds, resources: Resources) -> Simulation:
    """Simulates a run: of a pass only the first updates and the last, and of passes that differ in nothing but the epoch two,
    which are counted."""
    short, more, stands_for = shortened(phases)
    simulator = Simulator(short, partitions, speeds, resources, stands_for=stands_for)
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
        if short[number].updates == 1:
            first = ends[number - 1][-1] if number else 0.0
        steady = (last - first) / max(1, short[number].updates - 1)
        seconds += steady * (updates * (1 + repeats) - short[number].updates)
    return Simulation(short, predicted_steps, seconds)
