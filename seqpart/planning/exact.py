"""Which exact plan fits and is the fastest: simulated, one candidate after the other.

A candidate is a method, a cut, the slots, the place where boundaries wait, and from where on graphs are kept. All exact
methods give the same bits, so only memory and time decide; `auto` decides between the methods as well.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from seqpart.errors import DoesNotFit
from seqpart.memory.limit import left_of, limit_for, margin_of, refused
from seqpart.methods.exact import whole_network
from seqpart.methods.method import Method, PartitionTraining, Workload, test_phases
from seqpart.planning.cut import Piece, best_cut
from seqpart.planning.problem import (
    Candidate,
    Problem,
    boundary_bytes,
    buffers_of,
    costs_from,
    exchange_bytes,
    fewest_rows,
    largest_boundary,
    measurable,
    micro_batches,
    refuse_given,
    starts_of,
    too_many,
)
from seqpart.planning.simulator import PartitionCost, PredictedStep, Resources, simulate
from seqpart.schedule.phases import Epochs, Phases
from seqpart.schedule.steps import Phase, Verb
from seqpart.units import format_size

WALKED_UPDATES = 3
EFFICIENT_ROWS = 32
"""Smaller micro-batches are tried only where nothing else fits."""
_SPEEDS_ERR = 0.25
"""By which a predicted time may be wrong: rates that are measured for milliseconds, on a machine that does other work too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A candidate with its peak of the whole process or device, and seconds for one update."""

    method: Method
    candidate: Candidate
    peak: int
    seconds: float

    @property
    def fits_in(self) -> int:
        """The least limit under which it runs."""
        return limit_for(self.peak)


def choose_exact(problem: Problem, methods: Sequence[Method]) -> tuple[Method, Candidate, tuple[str, ...]]:
    """The fastest that fits, and why. Raises DoesNotFit, naming what would help."""
    available = problem.limit - margin_of(problem.limit)
    fastest = [(method, fastest_of(problem, method, available)) for method in methods]
    found = [prediction for _, prediction in fastest if prediction is not None]
    if not found:
        raise _does_not_fit(problem, methods)
    best = _simplest(found)
    return best.method, best.candidate, tuple(_reasons(problem, best, fastest))


def _simplest(found: Sequence[Prediction]) -> Prediction:
    """The first that is not slower than the fastest by more than the rates' own error: methods come in order of simplicity."""
    within = (1 + _SPEEDS_ERR) * min(prediction.seconds for prediction in found)
    return next(prediction for prediction in found if prediction.seconds <= within)


def fastest_of(problem: Problem, method: Method, available: int) -> Prediction | None:
    """At the largest micro-batch at which anything fits: smaller ones do the same work less efficiently."""
    for micro_batch in micro_batches(problem):
        if not measurable(problem, micro_batch):
            return None
        best: Prediction | None = None
        for prediction in _variants(problem, method, micro_batch, available):
            if prediction.peak <= available and (best is None or prediction.seconds < best.seconds):
                best = prediction
        if best is not None:
            return best
    return None


def _variants(problem: Problem, method: Method, micro_batch: int, available: int) -> Iterator[Prediction]:
    for starts in _cuts(problem, method, micro_batch):
        parts = _parts(problem, micro_batch, starts)
        for slots in (len(parts),) if method.stays else (2, 1):
            if slots > len(parts):
                continue
            for boundary_tier in problem.boundary_tiers if len(parts) > 1 else problem.boundary_tiers[:1]:
                if (
                    boundary_tier == "host"
                    and boundary_bytes([p[2] for p in parts], problem.batch_size, micro_batch) > problem.host_room
                ):
                    boundary_tier = "disk"
                prediction = predict(
                    problem, method, micro_batch, parts, Resources(slots=slots, boundary_tier=boundary_tier), None
                )
                yield prediction
                if prediction.peak <= available and boundary_tier == "device" and not method.stays:
                    yield _with_graphs(problem, prediction, available)


def _with_graphs(problem: Problem, prediction: Prediction, available: int) -> Prediction:
    """Keep as many graphs as there is room for: those of the last partitions, which backward needs first."""
    candidate = prediction.candidate
    none, some = len(candidate.parts) - 1, 0
    best = prediction
    while some < none:
        middle = (some + none) // 2
        tried = predict(problem, prediction.method, candidate.micro_batch, candidate.parts, candidate.resources, middle)
        if tried.peak <= available:
            best, none = tried, middle
        else:
            some = middle + 1
    return best


def predict(
    problem: Problem, method: Method, micro_batch: int, parts: tuple[tuple[int, int, PartitionCost], ...], resources: Resources,
    keeps_graph_from: int | None,
) -> Prediction:  # fmt: skip
    resources = replace(
        resources, label_row=problem.label_row, borrows=not method.stays,
        gradients_room=problem.clips and len(parts) > 1 and not method.stays,
    )  # fmt: skip
    candidate = Candidate(micro_batch, parts, resources, keeps_graph_from)
    phases = _phases(problem, method, candidate)
    costs = [part[2] for part in parts]
    walked, predicted_steps, _ = simulate(phases, costs, problem.speeds, resources)
    peak = max(peaks_by_partition(problem, candidate, walked, predicted_steps))
    updates = [predicted.ends for predicted in predicted_steps if predicted.step.verb is Verb.UPDATE]
    per_update = len(parts)
    seconds = (updates[-1] - updates[per_update - 1]) / max(1, len(updates) // per_update - 1) or updates[-1]
    return Prediction(method=method, candidate=candidate, peak=peak, seconds=seconds)


def _phases(problem: Problem, method: Method, candidate: Candidate) -> Phases:
    batch = problem.batch_size
    training = tuple(
        PartitionTraining(epochs=1, batch_size=batch, micro_batch=candidate.micro_batch, trainable=cost.trainable)
        for _, _, cost in candidate.parts
    )
    rows = min(problem.train_rows, (WALKED_UPDATES - 1) * batch + (problem.train_rows % batch or batch))
    work = Workload(
        train_rows=rows, test_rows=min(problem.test_rows, candidate.micro_batch), shuffle=False, partitions=training,
        clips=problem.clips, keeps_graph_from=candidate.keeps_graph_from,
    )  # fmt: skip
    train = replace(whole_network(work, streamed=not method.stays), epoch=1)
    return Phases([Epochs(train=train, epochs=1, behind=test_phases(work, stays=method.stays))])


def peaks_by_partition(
    problem: Problem, candidate: Candidate, phases: Sequence[Phase], predicted_steps: Sequence[PredictedStep]
) -> list[int]:
    """Of the whole process or device, while each partition works."""
    peaks = [0] * len(candidate.parts)
    for predicted in predicted_steps:
        p = predicted.step.partition
        peaks[p] = max(peaks[p], predicted.peak + _buffers(problem, candidate, phases, predicted))
    return [problem.peak(peak) for peak in peaks]


def _buffers(problem: Problem, candidate: Candidate, phases: Sequence[Phase], predicted: PredictedStep) -> int:
    """Host buffers of rows and of boundaries on disk, where they count against the limit."""
    if not problem.host_counts:
        return 0
    phase = phases[predicted.step.phase]
    first, last, _ = candidate.parts[phase.partition]
    reading, writing = buffers_of(problem, first, last, phase.micro_batch)
    if phase.through is None:
        return reading + writing
    largest = largest_boundary([cost for _, _, cost in candidate.parts], phase.micro_batch)
    return reading + (exchange_bytes(largest) if candidate.resources.boundary_tier == "disk" else 0)


def _parts(problem: Problem, micro_batch: int, starts: Sequence[int]) -> tuple[tuple[int, int, PartitionCost], ...]:
    ends = [*starts[1:], len(problem.chain)]
    return tuple((first, last, costs_from(problem, micro_batch, first)[last]) for first, last in zip(starts, ends, strict=True))


def _cuts(problem: Problem, method: Method, micro_batch: int) -> list[tuple[int, ...]]:
    """First blocks of the partitions: as asked, or from the finest cut to the coarsest, each in balance.

    In balance by what is counted, so that the same request gives the same cuts, whatever real runs happened to take.
    """
    if not method.cuts:
        return [(0,)]
    if problem.starts is not None:
        return [problem.starts]
    possible = starts_of(problem)
    if problem.count is not None:
        return [_balanced(problem, micro_batch, problem.count)]
    weights = [costs_from(problem, micro_batch, first, counted=True)[last] for first, last in _neighbours(problem)]
    sizes = [cost.slot if not method.stays else cost.saved + cost.output for cost in weights]
    found: list[tuple[int, ...]] = []
    bound = max(sizes)
    while True:
        starts, held = [possible[0]], 0
        for start, size in zip(possible, sizes, strict=True):
            if held and held + size > bound:
                starts.append(start)
                held = 0
            held += size
        if len(starts) == 1 and len(possible) > 1:  # nothing to stream: that would be full training
            return found or [(possible[0], possible[-1])]
        if tuple(starts) not in found:
            found.append(tuple(starts))
        if len(starts) == 1:
            return found
        bound *= 2


def _neighbours(problem: Problem) -> list[tuple[int, int]]:
    possible = starts_of(problem)
    return list(zip(possible, [*possible[1:], len(problem.chain)], strict=True))


def _balanced(problem: Problem, micro_batch: int, count: int) -> tuple[int, ...]:
    pieces = [
        Piece(first, last, cost.output_row, cost.slot + cost.train_peak)
        for first in starts_of(problem)
        for last, cost in costs_from(problem, micro_batch, first, counted=True).items()
    ]
    chosen = best_cut(pieces, len(problem.chain), count)
    if chosen is None:
        raise too_many(problem, count)
    return tuple(piece.first for piece in chosen)


def _does_not_fit(problem: Problem, methods: Sequence[Method]) -> DoesNotFit:
    smallest = min(
        (prediction for method in methods for prediction in _variants(problem, method, fewest_rows(problem), 0)),
        key=lambda prediction: prediction.peak,
    )
    refuse_given(problem, smallest.peak)
    first, last, cost = max(smallest.candidate.parts, key=lambda part: part[2].slot + part[2].train_peak)
    where = str(problem.chain[first]) if last - first == 1 else f"blocks {first}..{last - 1}"
    cure = {
        "full": "Or use --method streamed, which gives the same bits with one partition at a time.",
        "checkpointed": "Or use --method streamed, which gives the same bits with one partition at a time.",
    }.get(
        smallest.method.name,
        "Split that block into smaller ones, use an optimizer with less state (--optimizer sgd), or give more.",
    )
    return refused(
        f"method {' or '.join(method.name for method in methods)} needs {format_size(smallest.peak)}, at micro-batch "
        f"{smallest.candidate.micro_batch} and in {len(smallest.candidate.parts)} partition(s), and "
        f"{left_of(problem.limit)}.\n"
        f"  runtime {format_size(problem.runtime)}; the largest partition is {where}: weights {format_size(cost.weights)}, "
        f"gradients {format_size(cost.gradients)}, optimizer {format_size(cost.state)}, activations {format_size(cost.saved)}"
        f"\n  {cure}",
        smallest.fits_in,
    )


def _reasons(problem: Problem, best: Prediction, tried: Sequence[tuple[Method, Prediction | None]]) -> Iterator[str]:
    if len(tried) > 1:
        parts = []
        for method, prediction in tried:
            if prediction is None:
                parts.append(f"{method.name} does not fit")
            else:
                parts.append(f"{method.name} {prediction.seconds:.3g} s per update in {format_size(prediction.peak)}")
        why = "the fastest exact one that fits"
        if best.seconds > min(prediction.seconds for _, prediction in tried if prediction is not None):
            why = f"the simplest exact one that fits and is within {100 * _SPEEDS_ERR:.0f} % of the fastest"
        yield f"method {best.method.name}, {why}: " + "; ".join(parts)
    candidate = best.candidate
    count = len(candidate.parts)
    if count > 1:
        asked = " as asked" if problem.count or problem.starts else ""
        slots = candidate.resources.slots
        two = (
            ""
            if best.method.stays
            else f", {slots} slot(s): "
            + ("the next comes and the last goes while one computes" if slots > 1 else "there is no room for a second")
        )
        kept = count - 1 - candidate.keeps_graph_from if candidate.keeps_graph_from is not None else 0
        yield f"{count} partitions{asked}{two}"
        tier = candidate.resources.boundary_tier
        others = ", computed again for the others" if kept + 1 < count else ""
        yield f"activations kept for {kept + 1} of {count} partitions{others}; boundaries wait on {tier}"
    if candidate.micro_batch < problem.batch_size:
        asked = "as asked" if problem.micro_batch else "the largest that fits"
        yield f"micro-batch {candidate.micro_batch} of {problem.batch_size}: {asked}"
