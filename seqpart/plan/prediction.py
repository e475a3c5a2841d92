"""Predicts the memory and time of a cut with the simulator, and lists the options of its partitions."""

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import seqpart.plan.problem as planning
from seqpart.data.row_packs import RowPack
from seqpart.device.heap import heap_for, least_heap_for
from seqpart.device.limit import RUNTIME_VARIES
from seqpart.device.pages import round_up
from seqpart.methods.exact import whole_network
from seqpart.methods.method import Method, PartitionTraining, Workload, test_phases
from seqpart.model.packs import DEVICE, tiers_of
from seqpart.plan.problem import Candidate, Parts, Problem
from seqpart.plan.simulator import PredictedStep, Resources, Simulation, simulate
from seqpart.profile.partition import PartitionCost
from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.schedule.phases import Epochs, Phases, rooms_for_gradients
from seqpart.schedule.steps import Verb
from seqpart.units import format_size

WALKED_UPDATES = 2
"""Updates that are simulated. The second stands for all later ones: its beginning waits for what the first has left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A candidate with its predicted peak of the whole process or device, in bytes, and its seconds for one update."""

    method: Method
    candidate: Candidate
    peak: int
    seconds: float
    computing: float
    moving: float
    """Seconds of transfers in one update; they may overlap with `computing`."""
    stepping: float = 0.0
    """Seconds of optimizer steps on the host in one update, which overlap with both."""
    works: tuple[int, ...]
    """Most bytes beside the slots, while each partition works."""

    @property
    def working(self) -> int:
        """Most bytes beside the slots while any partition works: a kept heap has room for so much."""
        return max(self.works)


def first_that_learns(parts: Parts) -> int:
    """The first partition with trainable parameters; the number of partitions if none has any."""
    return next((p for p, (_, _, cost) in enumerate(parts) if cost.trainable), len(parts))


def least_peak(problem: Problem, method: Method, micro_batch: int, parts: Parts, resources: Resources) -> int:
    """Lower bound of the peak in bytes, found without simulation."""
    costs = [cost for _, _, cost in parts]
    held = sum(sorted((planning.least_slot(problem, cost) for cost in costs), reverse=True)[: resources.slots])
    lowest = first_that_learns(parts)
    most = gradients = 0
    for p, cost in reversed(list(enumerate(costs))):
        most = max(most, gradients + (cost.train_peak if p >= lowest else cost.forward_peak))
        gradients += cost.gradients if method.stays and cost.trainable else 0  # held until the end of the update
    return problem.machine.peak(held + max(most, least_at_end(problem, method, micro_batch, parts, resources)))


def least_at_end(problem: Problem, method: Method, micro_batch: int, parts: Parts, resources: Resources) -> int:
    """Least bytes beside the slots at the last partition's backward: boundaries that wait on the device are there too."""
    costs = [cost for _, _, cost in parts]
    if resources.tiers:
        return costs[-1].train_peak
    own, lowest = {value.number for value in costs[-1].entering}, max(1, first_that_learns(parts))
    others = {value.number for cost in costs[lowest:-1] for value in cost.entering} - own
    given = {value.number: value.nbytes for cost in costs for value in cost.leaving}
    at_once = planning.graphs_at_once(method, min(problem.batch_size, problem.train_rows), micro_batch)
    return costs[-1].train_peak + at_once * sum(given.get(number, 0) for number in others)


def predict(
    problem: Problem, method: Method, micro_batch: int, parts: Parts, resources: Resources,
    keeps: frozenset[int] = frozenset(), offloads: frozenset[int] = frozenset(),
) -> Prediction:  # fmt: skip
    """Simulates one way to run a cut. keeps: partitions that keep their graphs. offloads: those of them whose graphs wait off
    the device, where `resources` say; a graph with no place in host memory is recomputed."""
    costs = [part[2] for part in parts]
    boundaries = planning.host_boundaries(problem, parts, micro_batch, resources.tiers)
    wanted, at_once = offloads & resources.graphs_at_host, planning.graphs_at_once(method, problem.batch_size, micro_batch)
    while True:
        rooms = planning.graph_rooms(costs, wanted, at_once)
        places = planning.host_places(problem, parts, boundaries, states=True, graphs=rooms)
        if places.graphs >= wanted:
            break
        # Graphs with no place are recomputed.
        keeps, offloads, wanted = keeps - (wanted - places.graphs), offloads - (wanted - places.graphs), places.graphs
    resources = replace(
        resources, label_row=problem.label_row, borrows=not method.stays, at_host=places.homes,
        host_steps=places.steps - resources.weights_stay, narrow=places.narrow - resources.weights_stay,
        graphs_at_host=wanted,
        graph_buffers=planning.graph_buffer_bytes(costs, offloads - wanted if problem.machine.host_counts else offloads),
    )  # fmt: skip
    phases = _phases(problem, method, Candidate(micro_batch, parts, resources, keeps, offloads))
    resources = replace(resources, gradients_room=rooms_for_gradients(phases))
    candidate = Candidate(micro_batch, parts, resources, keeps, offloads)
    simulated = simulate(phases, costs, problem.machine.speeds, resources)
    works = works_of(simulated.steps, len(parts))
    if resources.keeps_heap:
        sizes = heaps_of(problem, max(works), costs, streamed=not method.stays and len(parts) > 1)
        candidate = with_heap(problem, candidate, sizes, lambda one: peaks_by_partition(problem, one, simulated))
    peak = max(peaks_by_partition(problem, candidate, simulated))
    count = len(simulated.phases[0].partitions)
    seconds, computing, moving, stepping = _seconds(simulated.steps, count, problem.machine.contention)
    return Prediction(
        method=method, candidate=candidate, peak=peak, seconds=seconds, computing=computing, moving=moving, stepping=stepping,
        works=works,
    )  # fmt: skip


def _seconds(predicted_steps: Sequence[PredictedStep], count: int, contention: float) -> tuple[float, float, float, float]:
    """(seconds, of computing, of transfers, of steps on the host) of one update; a second of overlapped transfer adds
    `contention` seconds."""
    updates = [number for number, predicted in enumerate(predicted_steps) if predicted.step.verb is Verb.UPDATE]
    first, last = (updates[count - 1], updates[-1]) if len(updates) > count else (-1, updates[-1])
    steady = predicted_steps[first + 1 : last + 1]
    moved = sum(predicted.moving for predicted in steady)
    computed = sum(predicted.seconds for predicted in steady if predicted.step.verb not in (Verb.LOAD, Verb.DROP))
    began = predicted_steps[first].ends if first >= 0 else 0.0
    times = max(1, len(updates) // count - 1)
    stepped = sum(predicted.stepping for predicted in steady)
    took = predicted_steps[last].ends - began + contention * moved
    return took / times, computed / times, moved / times, stepped / times


def _phases(problem: Problem, method: Method, candidate: Candidate) -> Phases:
    batch = problem.batch_size
    training = tuple(
        PartitionTraining(
            epochs=1, batch_size=batch, micro_batch=candidate.micro_batch, trainable=cost.trainable, rows=cost.rows
        )
        for _, _, cost in candidate.parts
    )
    rows = min(problem.train_rows, WALKED_UPDATES * batch)
    work = Workload(
        train_rows=rows, test_rows=min(problem.test_rows, candidate.micro_batch), shuffle=False, partitions=training,
        defers_updates=problem.defers_updates, stays=candidate.resources.stays, keeps=candidate.keeps,
        offloads=candidate.offloads, host_steps=candidate.resources.host_steps,
        one_value=planning.routing_of([cost for _, _, cost in candidate.parts]).is_one_value,
    )  # fmt: skip
    if method.in_pairs:
        return method.phases(work)
    train = replace(whole_network(work, streamed=not method.stays), epoch=1)
    # The first update loads what later ones find loaded: with one update an epoch, the first of these is in the second epoch.
    epochs = WALKED_UPDATES if rows <= batch else 1
    return Phases([Epochs(train=train, epochs=epochs, following=test_phases(work, stays=method.stays))])


def works_of(predicted_steps: Sequence[PredictedStep], partitions: int) -> tuple[int, ...]:
    """Most bytes beside the slots while each of the `partitions` works."""
    works = [0] * partitions
    for predicted in predicted_steps:
        p = predicted.step.partition
        works[p] = max(works[p], predicted.peak - predicted.slots)
    return tuple(works)


def heaps_of(problem: Problem, working: int, costs: Sequence[PartitionCost], *, streamed: bool = False) -> tuple[int, int]:
    """(least, enough) bytes of a heap with room for the work of all steps. costs: costs of the partitions that share it."""
    several, replaced = len(costs) > 1, max(min(cost.gradients, cost.saved) for cost in costs)
    sizes = (size(working, replaced, several=several, streamed=streamed) for size in (least_heap_for, heap_for))
    least, enough = (size + problem.machine.growth for size in sizes)
    return least, enough


def with_heap(
    problem: Problem, candidate: Candidate, sizes: tuple[int, int], peaks: Callable[[Candidate], Sequence[int]]
) -> Candidate:
    """`candidate` with a heap that is large enough, or as large as the limit allows, but never smaller than the least."""
    least, enough = sizes
    over = max(peaks(replace(candidate, heap=enough))) - problem.available
    return replace(candidate, heap=max(least, enough - max(0, over)))


def peaks_by_partition(problem: Problem, candidate: Candidate, simulated: Simulation) -> list[int]:
    """Peaks of the whole process or device while each partition works. A kept heap is there from the first step on."""
    peaks, phases = [0] * len(candidate.parts), simulated.phases
    buffers = [_buffers(problem, candidate, phase) + rows_held(candidate.rows, phases, n) for n, phase in enumerate(phases)]
    for predicted in simulated.steps:
        p = predicted.step.partition
        work = predicted.slots if candidate.heap else predicted.peak
        peaks[p] = max(peaks[p], work + buffers[predicted.step.phase])
    return [problem.machine.peak(peak, candidate.heap) for peak in peaks]


def _buffers(problem: Problem, candidate: Candidate, phase: Phase) -> int:
    """Bytes of host buffers for rows and for boundaries on disk, where they count against the limit."""
    if not problem.machine.host_counts or phase.kind in (PhaseKind.SPLIT, PhaseKind.MERGE):
        return 0
    first, last, _ = candidate.parts[phase.partition]
    reading, writing = planning.buffers_of(
        problem, first, last, phase.micro_batch, reads_memory=phase.source in candidate.rows,
        writes_memory=phase.last + 1 in candidate.rows,
    )  # fmt: skip
    if phase.through is None:
        return reading + (writing if phase.kind is not PhaseKind.TRAIN else 0)
    costs, tiers = [cost for _, _, cost in candidate.parts], candidate.resources.tiers
    largest = planning.largest_boundary(costs, phase.micro_batch, tiers) if "disk" in tiers else 0
    return reading + (planning.exchange_bytes(largest) if largest else 0)


def rows_held(rows: Mapping[int, int], phases: Sequence[Phase], number: int) -> int:
    """Bytes of `rows`, by partition, in memory during phase `number`: from the phase that writes them to the last reader."""
    if not rows:
        return 0
    read = {phase.source for phase in phases[number:]}
    written = {0, *(phase.last + 1 for phase in phases[: number + 1] if phase.kind is not PhaseKind.TRAIN)}
    return sum(nbytes for p, nbytes in rows.items() if p in read and p in written)


def rows_for_memory(problem: Problem, boundaries: Sequence[RowPack], recovers: bool, views: int = 1) -> dict[int, int]:
    """Bytes of the rows that enter each partition, for rows that may lie in memory under the limit. boundaries: layouts of the
    rows between partitions, each in `views` views. With a recovery the data's own rows stay on the disk."""
    if not problem.machine.host_counts or problem.machine.host_budget:
        return {}
    splits = views * problem.train_rows, problem.test_rows
    data = sum(problem.input_row.home_bytes(count) for count in splits)
    rows = {} if recovers or not data else {0: data}
    return rows | {p: sum(pack.home_bytes(count) for count in splits) for p, pack in enumerate(boundaries, 1)}


def with_rows(problem: Problem, candidate: Candidate, simulated: Simulation, rows: Mapping[int, int]) -> Candidate:
    """`candidate` with as many of `rows` (bytes by partition) in memory as the limit has room for; for a saved plan, those
    that it had there."""
    saved = problem.saved
    available = problem.available + (0 if saved is None else RUNTIME_VARIES)  # the runtime differs a little between processes
    for p, nbytes in rows.items() if saved is None else [(p, rows[p]) for p in sorted(saved.rows_in_memory & rows.keys())]:
        held = replace(candidate, rows={**candidate.rows, p: nbytes})
        peak = max(peaks_by_partition(problem, held, simulated))
        if peak <= available:
            candidate = held
    return candidate


def rows_reason(rows: Mapping[int, int]) -> list[str]:
    size, of = format_size(sum(rows.values())), ", ".join(map(str, rows))
    return [f"rows that enter partition(s) {of} lie in memory: there is room for their {size}"] if rows else []


def disk_bytes(
    problem: Problem, candidate: Candidate, costs: Sequence[PartitionCost], row_packs: Sequence[RowPack],
    *, own: Sequence[PartitionCost], all_states: bool, saves: bool, remembers: bool, cached: int, views: int = 1,
) -> int:  # fmt: skip
    """Bytes on disk: homes in as many versions as checkpoints ask for, rows, offloaded graphs, and the result.

    own: those of `costs` whose optimizer state, and on the CPU weights, this rank keeps. all_states: True if the state of all
    partitions is kept at once. remembers: True if the weights of the best evaluation are kept: the best when each checkpoint
    was made, and now. cached: rows that wait at a boundary between two phases. views: views of each training row of the data.
    """
    weights, states = sum(cost.weights for cost in costs), [cost.state for cost in own]
    kept = sum(cost.weights for cost in own) if problem.machine.host_counts else weights
    state = sum(states) if all_states else max(states)
    # Where partitions stay, homes are kept as they all were when the last of them was up to date.
    versions = 4 if saves else 3 if candidate.resources.stays or candidate.resources.weights_stay else 2
    rows = problem.input_row.home_bytes(views * problem.train_rows + problem.test_rows)
    rows += 2 * max((pack.home_bytes(cached) for pack in row_packs[:-1]), default=0)
    batches = -(-problem.batch_size // candidate.micro_batch)
    graphs = batches * sum(round_up(costs[p].graph) for p in candidate.offloads - candidate.resources.graphs_at_host)
    best = (3 if saves else 1) * weights if remembers else 0
    return versions * (kept + state) + weights + best + rows + graphs + problem.machine.live_bytes


# --- options of partitions --------------------------------------------------------------------------------------------


class Kind(enum.Enum):
    STAY = enum.auto()
    """Keep weights and optimizer state on the device."""
    WEIGHTS = enum.auto()
    """Keep the weights on the device, while optimizer state comes and goes. STAY takes precedence."""
    KEEP = enum.auto()
    """Keep the graph on the device instead of recomputing it."""
    HOST = enum.auto()
    """Offload the graph to host memory. KEEP takes precedence."""
    DISK = enum.auto()
    """Offload the graph to the disk. KEEP takes precedence."""
    BOUNDARY = enum.auto()
    """Keep the boundary on the device, where other boundaries are offloaded."""

    @property
    def away(self) -> bool:
        """True if the graph is offloaded."""
        return self in (Kind.HOST, Kind.DISK)


class Option(NamedTuple):
    """A choice for one partition: the bytes that it takes, and the seconds of each kind that it saves per update."""

    partition: int
    kind: Kind
    nbytes: int
    compute: float
    transfer: float

    def worth(self, price: float) -> float:
        """Seconds that it saves, if a second of transfers counts as `price` seconds of computing."""
        return self.compute + price * self.transfer

    def beyond(self, inner: "Option") -> "Option":
        """The difference to `inner`, an option that this one includes."""
        saves = self.compute - inner.compute, self.transfer - inner.transfer
        return Option(self.partition, self.kind, self.nbytes - inner.nbytes, *saves)

    def takes(self, resources: Resources) -> int:
        """Bytes that it takes, about: a kept heap needs room for holes between graphs."""
        return heap_bytes(self.nbytes) if self.kind is Kind.KEEP and resources.keeps_heap else self.nbytes


def heap_bytes(nbytes: int) -> int:
    return heap_for(nbytes, several=True, streamed=True)


def options_of(problem: Problem, plain: Prediction, *, offload: bool = False) -> list[Option]:
    """Options of all partitions at the cut, the tier and the micro-batch of `plain`; with `offload`, offloaded graphs too."""
    candidate, speeds = plain.candidate, problem.machine.speeds
    micro_batches = -(-problem.batch_size // candidate.micro_batch)
    shared, costs = planning.sharing(problem, candidate.parts), [cost for _, _, cost in candidate.parts]
    found = []
    lowest = first_that_learns(candidate.parts)
    for p, cost in enumerate(costs):
        if lowest <= p < len(costs) - 1:
            seconds = micro_batches * speeds.computing(cost, candidate.micro_batch, forward=1, backward=0)
            at_once = 1 if plain.method.stays else micro_batches
            beside = sum(value.nbytes for value in (*cost.entering, *cost.leaving)) if candidate.resources.tiers else 0
            found.append(Option(p, Kind.KEEP, (cost.kept + beside) * at_once, seconds, 0.0))
            for tier in problem.machine.graph_tiers if offload and not cost.writes_late else ():
                kind, up, down = (
                    (Kind.HOST, speeds.up, speeds.down) if tier == "host" else (Kind.DISK, speeds.read, speeds.write)
                )
                moved = -micro_batches * (cost.graph / up + cost.graph / down)
                # All that offload share the buffers; where host memory is the device's own, none are needed.
                in_place = kind is Kind.HOST and problem.machine.host_counts
                buffers = 0 if in_place else planning.graph_buffer_bytes(costs, [p]) // len(costs)
                found.append(Option(p, kind, buffers, seconds - micro_batches * cost.graph / speeds.copy, moved))
        if problem.auto and not plain.method.stays and p not in shared:
            visits = 1 if p in (0, len(costs) - 1) else 2  # the first stays for the next update
            read, written = visits * cost.weights + cost.state, cost.rewritten + cost.state
            near = p in candidate.resources.at_host
            up, down = (speeds.up, speeds.down) if near else (speeds.read, speeds.write)
            whole = cost.slot + (cost.gradients if problem.defers_updates else 0)
            if steps_at_host := p in candidate.resources.host_steps:  # new weights come in any case, and state never does
                halved = cost.narrow if p in candidate.resources.narrow else 0
                whole, read, written = whole - cost.state_slot, (visits - 1) * (cost.weights - halved), 0
            found.append(Option(p, Kind.STAY, whole, 0.0, read / up + written / down))
            if cost.state and not steps_at_host:  # else its weights are all of it
                of_weights = visits * cost.weights / up + cost.rewritten / down
                found.append(Option(p, Kind.WEIGHTS, cost.weights_slot, 0.0, of_weights))
    return [*found, *_near(problem, plain, micro_batches)]


def increments(options: Iterable[Option]) -> Iterator[Option]:
    """Yields the options, reducing one that includes another to what it adds: both may then be chosen in turn."""
    options = list(options)
    weights = {option.partition: option for option in options if option.kind is Kind.WEIGHTS}
    for option in options:
        inner = weights.get(option.partition) if option.kind is Kind.STAY else None
        yield option if inner is None else option.beyond(inner)


def _near(problem: Problem, plain: Prediction, micro_batches: int) -> Iterator[Option]:
    """Options to keep offloaded boundaries on the device."""
    candidate, speeds = plain.candidate, problem.machine.speeds
    handing, tiers = planning.routing_of([cost for _, _, cost in candidate.parts]), candidate.resources.tiers
    for p, tier in enumerate(tiers):
        nbytes = sum(value.nbytes for value in handing.entering[p] if handing.users[value.number][0] == p)
        read, write = (speeds.up, speeds.down) if tier == "host" else (speeds.read, speeds.write)
        at_once = 1 if plain.method.stays else micro_batches
        if nbytes:  # the activation and its gradient are offloaded; the computation waits for their return
            yield Option(p, Kind.BOUNDARY, nbytes * at_once, micro_batches * nbytes / read, 2 * micro_batches * nbytes / write)


def carried_out(problem: Problem, plain: Prediction, chosen: Sequence[Option]) -> Prediction:
    """`plain` predicted anew with the options `chosen` and no others."""
    candidate = plain.candidate
    stays, weights, keeps, host, disk, near = (frozenset(o.partition for o in chosen if o.kind is kind) for kind in Kind)
    away = (host | disk) - keeps
    streaming = len(candidate.parts) - len(stays)
    slots = candidate.resources.slots if plain.method.stays else min(candidate.resources.slots or 1, streaming)
    tiers = candidate.resources.tiers
    if tiers:
        costs, tier = [cost for _, _, cost in candidate.parts], "host" if "host" in tiers else "disk"
        waiting = enumerate(planning.tiers_by_room(problem, costs, candidate.micro_batch, tier))
        tiers = tiers_of(DEVICE if p in near else tier for p, tier in waiting)
    resources = replace(
        candidate.resources, stays=stays, weights_stay=weights - stays, slots=slots, graphs_at_host=host & away, tiers=tiers
    )
    return predict(problem, plain.method, candidate.micro_batch, candidate.parts, resources, keeps | away, away)
