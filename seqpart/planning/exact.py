"""Which exact plan fits and is the fastest: simulated, one candidate after the other.

A candidate is a method, a cut, the slots, the place where boundaries wait, which partitions stay on the device and which keep
their graphs. All exact methods give the same bits, so only memory and time decide; `auto` decides between the methods as well.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from seqpart.costs.partition import PartitionCost
from seqpart.errors import DoesNotFit
from seqpart.memory.limit import left_of, margin_of, refused
from seqpart.methods.method import Method
from seqpart.planning.cut import Piece, best_cut
from seqpart.planning.problem import (
    Candidate,
    Parts,
    Problem,
    boundary_bytes,
    costs_from,
    fewest_rows,
    measurable,
    micro_batches,
    refuse_given,
    starts_of,
    too_many,
)
from seqpart.planning.search import Prediction, never_fits, predict, refined, sharing, spent
from seqpart.planning.simulator import Resources
from seqpart.units import format_size

_SPEEDS_ERR = 0.25
"""By which a predicted time may be wrong: rates that are measured for milliseconds, on a machine that does other work too."""


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
        if (again := _saved_answers(problem, method, micro_batch)) is not None and again.peak <= available:
            return again
        best: Prediction | None = None
        for prediction in _variants(problem, method, micro_batch, available):
            if prediction.peak <= available and (best is None or prediction.seconds < best.seconds):
                best = prediction
        if best is not None:
            return best
    return None


def _saved_answers(problem: Problem, method: Method, micro_batch: int) -> Prediction | None:
    """What the plan that is to be used again says of its partitions."""
    saved = problem.saved
    if saved is None or saved.method != method.name or saved.starts != problem.starts:
        return None
    parts = _parts(problem, micro_batch, saved.starts)
    heap = problem.may_keep_heap and saved.heap > 0
    stays = frozenset() if method.stays or not problem.may_stay else saved.stays - sharing(problem, parts)
    slots = len(parts) if method.stays else max(1, min(saved.slots, len(parts) - len(stays)))
    resources = Resources(slots=slots, stays=stays, boundary_tier=saved.boundary_tier, keeps_heap=heap)
    return predict(problem, method, micro_batch, parts, resources, saved.keeps)


def _variants(problem: Problem, method: Method, micro_batch: int, available: int) -> Iterator[Prediction]:
    best: dict[int, Prediction] = {}
    for starts in _cuts(problem, method, micro_batch):
        parts = _parts(problem, micro_batch, starts)
        for slots in (len(parts),) if method.stays else (2, 1):
            if slots > len(parts) or (available and never_fits(problem, method, parts, slots, available)):
                continue
            for prediction in _with_slots(problem, method, micro_batch, parts, slots, available):
                # A second slot takes memory that a partition which stays may be worth more of: each is made better for itself.
                rivals = 0 if method.stays else slots
                known = best.get(rivals)
                if prediction.peak <= available and (known is None or prediction.seconds < known.seconds):
                    best[rivals] = prediction
                yield prediction
    for prediction in best.values():
        if len(prediction.candidate.parts) > 1:
            yield refined(problem, prediction, available)


def _with_slots(
    problem: Problem, method: Method, micro_batch: int, parts: Parts, slots: int, available: int
) -> Iterator[Prediction]:
    """Boundaries wait in the fastest place with which it fits, the heap is kept if it can be; what memory is left is spent."""
    tiers = problem.boundary_tiers if len(parts) > 1 else problem.boundary_tiers[:1]
    for tier, heap in itertools.product(tiers, (True, False) if problem.may_keep_heap else (False,)):
        if tier == "host" and boundary_bytes([p[2] for p in parts], problem.batch_size, micro_batch) > problem.host_room:
            tier = "disk"
        plain = predict(problem, method, micro_batch, parts, Resources(slots=slots, boundary_tier=tier, keeps_heap=heap))
        yield plain
        if plain.peak <= available:
            if len(parts) > 1:
                yield from spent(problem, plain, available)
            return


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
        yield f"{count} partitions{asked}{two}"
        if problem.saved is not None and problem.saved.keeps != candidate.keeps:
            yield "which partitions stay and keep their graphs was chosen anew: as the plan says it does not fit"
        if candidate.resources.stays:
            yield f"{_named(candidate.resources.stays)} on the device: there is memory for that"
        kept, tier = len(candidate.keeps), candidate.resources.boundary_tier
        others = ", computed again for the others" if kept + 1 < count else ""
        yield f"activations kept for {kept + 1} of {count} partitions{others}; boundaries wait on {tier}"
    yield from candidate.heap_reason
    if candidate.micro_batch < problem.batch_size:
        asked = "as asked" if problem.micro_batch else "the largest that fits"
        yield f"micro-batch {candidate.micro_batch} of {problem.batch_size}: {asked}"


def _named(numbers: Iterable[int]) -> str:
    """`partitions 0-3, 7 stay`"""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    said = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
    return f"partition {said} stays" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"partitions {said} stay"
