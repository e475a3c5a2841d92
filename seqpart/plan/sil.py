"""Plans partitions that are trained alone: the fewest that fit, at the largest micro-batch that allows so few; or why not."""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace

import seqpart.plan.problem as planning
from seqpart.device.limit import growth_beside, left_of, limit_for, refused
from seqpart.errors import DoesNotFit
from seqpart.methods.method import PartitionTraining, Workload
from seqpart.plan.dynamic import Piece, best_cut
from seqpart.plan.plan import AS_ASKED, PlanWording
from seqpart.plan.prediction import WALKED_UPDATES, heaps_of, peaks_by_partition, with_heap, works_of
from seqpart.plan.problem import Candidate, Part, Problem
from seqpart.plan.simulator import Resources, Simulation, simulate
from seqpart.profile.partition import PartitionCost
from seqpart.schedule.phases import Phases
from seqpart.units import format_size

SMALLEST_EASY_MICRO_BATCH = 32
"""Smaller micro-batches slow the matrix kernels down; they are taken only when nothing else fits."""


def choose_cut(problem: Problem, wording: PlanWording = AS_ASKED) -> tuple[Candidate, tuple[str, ...]]:
    """The fewest partitions that fit, at the largest micro-batch that allows so few. Raises DoesNotFit that says why.

    If possible, cuts only where no other differentiable value crosses: a partition's loss judges one value alone.
    """
    alone = replace(problem, can_cut_after=lambda cost: problem.can_cut_after(cost) and problem.learns_alone(cost))
    best = _fewest(alone)
    if best is None and planning.starts_of(alone) != planning.starts_of(problem):
        best = _fewest(problem)
    if best is None:
        raise _does_not_fit(problem)
    best = _with_heap(problem, best)
    return best, _reasons(problem, best, wording)


def _fewest(problem: Problem) -> Candidate | None:
    """The best candidate that fits, over micro-batches."""
    found: list[Candidate] = []
    for micro_batch in planning.micro_batches(problem):
        if found and (micro_batch < SMALLEST_EASY_MICRO_BATCH or len(found[-1].parts) <= _least_count(problem, micro_batch)):
            break
        if not planning.measurable(problem, micro_batch):
            break
        candidate = _cut_at(problem, micro_batch, problem.available)
        if candidate is not None:
            found.append(candidate)
    return min(found, key=lambda candidate: (len(candidate.parts), -candidate.micro_batch), default=None)


def _least_count(problem: Problem, micro_batch: int) -> int:
    """Least number of partitions at any micro-batch: what a partition holds during an update does not depend on that."""
    if problem.count is not None or problem.starts is not None:
        return problem.count or len(problem.starts or ())
    whole = planning.cost_of(problem, micro_batch, 0, len(problem.chain))
    return -(-_held(whole) // max(1, _room(problem, problem.available)))


def _held(cost: PartitionCost) -> int:
    """Least bytes of a partition, held while it is updated."""
    return cost.slot + cost.gradients


def _room(problem: Problem, available: int) -> int:
    return available - problem.machine.runtime - growth_beside(problem.machine.growth, 0)


def _cut_at(problem: Problem, micro_batch: int, available: int) -> Candidate | None:
    chain = len(problem.chain)
    pieces = list[Piece]()
    if problem.count is None and problem.starts is None:
        whole = 0, chain, planning.cost_of(problem, micro_batch, 0, chain)
        if _peak_alone(problem, whole, micro_batch) <= available:
            pieces = [Piece(0, chain, 0, 0)]  # the fewest there can be: no need to try the others
    if not pieces:
        starts = planning.starts_of(problem)
        for number, first in enumerate(starts, 1):
            pieces += _pieces(problem, micro_batch, first, [*starts[number:], chain], available)
    count = len(problem.starts) if problem.starts is not None else problem.count
    while (chosen := best_cut(pieces, chain, count)) is not None:
        parts = {p: (p.first, p.last, planning.cost_of(problem, micro_batch, p.first, p.last)) for p in chosen}
        too_large = [p for p, part in parts.items() if _peak_alone(problem, part, micro_batch) > available]
        if not too_large:
            return Candidate(micro_batch, tuple(parts.values()))
        pieces = [piece for piece in pieces if piece not in too_large]
    return None


def _pieces(problem: Problem, micro_batch: int, first: int, ends: Sequence[int], available: int) -> Iterator[Piece]:
    """Partitions from `first` on that fit, if a longer one needs more: found by bisection, so that few are simulated.
    ends: blocks (not included) at which one may end.

    Balanced by counted bytes: the cut decides what is learned, and must not depend on what a real run happened to take.
    """
    room = _room(problem, available)
    costs = ((last, planning.cost_of(problem, micro_batch, first, last)) for last in ends)
    longer = list(itertools.takewhile(lambda part: _held(part[1]) <= room, costs))
    fitting = bisect_right(longer, available, key=lambda part: _peak_alone(problem, (first, *part), micro_batch))
    for last, cost in longer[:fitting]:
        if cost.trainable or problem.starts is not None or last - first == len(problem.chain):
            counted = planning.cost_of(problem, micro_batch, first, last, counted=True)
            # Of the row behind it what the loss takes: a mask beside that does not make a cut worse.
            row = problem.row_pack(problem.costs_at(planning.micro_batches(problem)[0])[last - 1]).loss_input_bytes
            yield Piece(first, last, row, counted.slot + counted.train_peak)


def _peak_alone(problem: Problem, part: Part, micro_batch: int) -> int:
    """Peak of the process or device while this partition is trained and makes the next one's rows with it."""
    return max(peaks_by_partition(problem, *_alone(problem, part, micro_batch)))


def _alone(problem: Problem, part: Part, micro_batch: int) -> tuple[Candidate, Simulation]:
    batch = problem.batch_size
    one = PartitionTraining(epochs=1, batch_size=batch, micro_batch=min(micro_batch, batch), trainable=part[2].trainable)
    rows = min(problem.train_rows, WALKED_UPDATES * batch)
    work = Workload(
        train_rows=rows, test_rows=min(problem.test_rows, micro_batch), shuffle=False,
        partitions=(one,) if part[1] == len(problem.chain) else (one, one),
    )  # fmt: skip
    # An inner partition's, with the phase that makes rows of its outputs.
    phases = Phases(problem.method.phases(work).stretches[:1])
    return Candidate(micro_batch, (part,)), simulate(phases, [part[2]], problem.machine.speeds, Resources())


def _with_heap(problem: Problem, candidate: Candidate) -> Candidate:
    """`candidate` with a heap that is kept for the whole run, if there is memory for it."""
    if not problem.machine.may_keep_heap:
        return candidate
    each = [_alone(problem, part, candidate.micro_batch) for part in candidate.parts]
    working = max(works_of(simulated.steps, 1)[0] for _, simulated in each)

    def peaks(kept: Candidate) -> list[int]:
        return [peaks_by_partition(problem, replace(one, heap=kept.heap), simulated)[0] for one, simulated in each]

    kept = replace(candidate, resources=replace(candidate.resources, keeps_heap=True))
    kept = with_heap(problem, kept, heaps_of(problem, working, [cost for _, _, cost in candidate.parts]), peaks)
    return kept if max(peaks(kept)) <= problem.available else candidate


def _does_not_fit(problem: Problem) -> DoesNotFit:
    needs = [(*_largest_need(problem, rows), rows) for rows in planning.possible_micro_batches(problem)]
    cost, where, peak, rows = min(needs, key=lambda need: need[2])  # not always the fewest rows: see `exact`
    planning.refuse_given(problem, peak)
    return refused(
        f"{where} alone needs {format_size(peak)}, at micro-batch {rows}, and {left_of(problem.limit)}.\n"
        f"  runtime {format_size(problem.machine.runtime)}, {planning.contents(cost)}\n"
        f"  {planning.advice(problem, peak, cost, finer=bool(problem.count or problem.starts))}",
        limit_for(peak),
        rows,
    )


def _largest_need(problem: Problem, micro_batch: int) -> tuple[PartitionCost, str, int]:
    """The partition that needs most when everything is cut as fine as allowed."""
    if problem.count is not None:
        return _best_effort(problem, micro_batch, problem.count)
    found = []
    for first in planning.starts_of(problem):
        costs = planning.costs_from(problem, micro_batch, first)
        last = next((last for last, cost in costs.items() if cost.trainable), max(costs))
        peak = _peak_alone(problem, (first, last, costs[last]), micro_batch)
        found.append((costs[last], _named(problem, first, last), peak))
    return max(found, key=lambda one: one[2])


def _best_effort(problem: Problem, micro_batch: int, count: int) -> tuple[PartitionCost, str, int]:
    """Largest need of a cut into `count` partitions, at the least limit under which one fits, found by bisection."""
    low, high = problem.machine.runtime, problem.machine.runtime
    high += 4 * sum(cost.weights * 4 + cost.saved + cost.output for cost in problem.costs_at(micro_batch)) + (1 << 30)
    if _cut_at(problem, micro_batch, high) is None:
        raise planning.too_many(problem, count)
    while high - low > 1 << 20:
        middle = (low + high) // 2
        low, high = (low, middle) if _cut_at(problem, micro_batch, middle) is not None else (middle, high)
    candidate = _cut_at(problem, micro_batch, high)
    assert candidate is not None
    first, last, cost = max(candidate.parts, key=lambda part: _peak_alone(problem, part, micro_batch))
    return cost, _named(problem, first, last), _peak_alone(problem, (first, last, cost), micro_batch)


def _named(problem: Problem, first: int, last: int) -> str:
    block = problem.chain[first]
    return str(block) if last - first == 1 else f"blocks {first}..{last - 1}, from {block.kind} on,"


def _reasons(problem: Problem, best: Candidate, wording: PlanWording) -> tuple[str, ...]:
    count = len(best.parts)
    reasons = []
    if problem.starts is not None:
        reasons.append(f"{count} partition(s): {wording.cut}")
    elif count > 1:
        asked = wording.cut if problem.count else f"the fewest that stay under {format_size(problem.limit)}"
        reasons.append(f"{count} partitions: {asked}; cut where the boundary is smallest, then in balance")
    else:
        reasons.append("1 partition: the whole network fits, so nothing is cut")
    reasons += best.heap_reason
    if best.micro_batch < problem.batch_size:
        asked = wording.micro_batch if problem.micro_batch else "the largest that fits with so few partitions"
        reasons.append(f"micro-batch {best.micro_batch} of {problem.batch_size}: {asked}")
    return tuple(reasons)
