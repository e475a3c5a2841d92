"""How the whole network is cut for its tests, and a subnet for its training, so that both stay under the limit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from seqpart.device.limit import left_of, limit_for, margin_of, refused, what_helps
from seqpart.errors import DoesNotFit
from seqpart.methods.exact import FULL, STREAMED
from seqpart.methods.ist.parts import Parts
from seqpart.model.blocks import Chain
from seqpart.plan.exact import choose_exact
from seqpart.plan.plan import Told
from seqpart.plan.prediction import peaks_by_partition
from seqpart.plan.problem import (
    Candidate,
    Part,
    Problem,
    cost_of,
    costs_from,
    measurable,
    micro_batches,
    parts_of,
    starts_of,
)
from seqpart.plan.simulator import simulate
from seqpart.profile.partition import PartitionCost
from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.schedule.phases import Epochs, Phases
from seqpart.store.layout import Layout
from seqpart.units import format_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuts:
    """Partitions of the whole network, and how one subnet is run; all subnets are cut alike."""

    whole: tuple[Part, ...]
    subnet: Candidate
    subnet_reasons: tuple[str, ...]


def piece_of(problem: Problem, number: int, *, trained: bool = True) -> Problem:
    """The same of one of the chains of a joint one: the whole network's (0), or a part's. trained: else it has no state."""
    first, last = problem.chain.begins[number], problem.chain.ends[number]
    states = problem.states[first:last] if trained else [Layout(())] * (last - first)
    return replace(
        problem, chain=Chain(problem.chain[first:last]), costs_at=lambda rows: problem.costs_at(rows)[first:last],
        counted_at=lambda rows: problem.counted_at(rows)[first:last], states=states, saved=None, may_keep_heap=False,
        graph_tiers=(), known={}, placed={}, **_starts(problem, first, last, number),  # type: ignore[arg-type]
    )  # fmt: skip


def _starts(problem: Problem, first: int, last: int, number: int) -> dict[str, object]:
    """Those of a plan that is made again are of the joint chain; those of --partitions are for a subnet."""
    starts, count = problem.starts, problem.count
    if starts is not None and starts[-1] >= problem.chain.ends[0]:
        return {"starts": tuple(start - first for start in starts if first <= start < last), "count": None}
    return {"starts": None, "count": None} if number == 0 else {"starts": starts, "count": count}


def choose_cuts(problem: Problem, parts: Parts, told: Told) -> Cuts:
    """At the largest micro-batch at which the whole can be tested and a subnet trained. Raises DoesNotFit, in words."""
    whole, subnet = piece_of(problem, 0, trained=False), piece_of(problem, 1)
    refusals: list[DoesNotFit] = []
    if not problem.micro_batch:
        told = replace(told, micro_batch="the largest that fits")
    for rows in micro_batches(problem):
        if not measurable(problem, rows):
            break
        try:
            return _cuts_at(whole, subnet, rows, told)
        except DoesNotFit as refusal:
            refusals.append(refusal)
    least = min(refusals, key=lambda refusal: refusal.smallest or problem.limit)
    words = ""
    if problem.runtime <= problem.limit - margin_of(problem.limit):
        words = "\n  A subnet, and a block of the whole network, have to fit: more --subnets make the first smaller."
    raise refused(f"{least.message}{words}", least.smallest or problem.limit, least.rows)


def _cuts_at(whole: Problem, subnet: Problem, rows: int, told: Told) -> Cuts:
    tested, asked = _tested(whole, rows), replace(subnet, micro_batch=rows)
    one = (subnet.count or 1) == 1 and len(subnet.starts or (0,)) == 1
    try:
        _, candidate, reasons = choose_exact(asked, (FULL if one else STREAMED,), told)
    except DoesNotFit:
        if not one or subnet.count or subnet.starts:
            raise
        _, candidate, reasons = choose_exact(asked, (STREAMED,), told)
    return Cuts(whole=tested, subnet=candidate, subnet_reasons=reasons)


def _tested(problem: Problem, rows: int) -> tuple[Part, ...]:
    """The fewest partitions of the whole network of which each fits with its rows, while nothing is trained."""
    if problem.starts is not None:
        return parts_of(problem, rows, problem.starts)
    available, found, first = problem.limit - margin_of(problem.limit), list[Part](), 0
    while first < len(problem.chain):
        fitting = None
        for last, cost in _longer(problem, rows, first):
            peak = test_peak(problem, (first, last, cost), rows)
            if peak > available and fitting is None:
                block, held = problem.chain[first], cost.slot + cost.forward_peak
                helps = what_helps(problem.limit, problem.runtime, peak, block=held)
                raise refused(
                    f"{block} of the whole network needs {format_size(peak)} to be tested, at micro-batch {rows}, and "
                    f"{left_of(problem.limit)}.\n  runtime {format_size(problem.runtime)}, weights {format_size(cost.weights)}"
                    f"\n  {helps}",
                    limit_for(peak),
                    rows,
                )
            if peak > available:
                break
            fitting = first, last, cost
        assert fitting is not None
        found.append(fitting)
        first = fitting[1]
    return tuple(found)


def _longer(problem: Problem, rows: int, first: int) -> Iterator[tuple[int, PartitionCost]]:
    """Partitions from `first` on, shortest first: the first of them has to fit."""
    return (
        iter(costs_from(problem, rows, first).items())
        if first in starts_of(problem)
        else iter([(first + 1, cost_of(problem, rows, first, first + 1))])
    )


def test_peak(problem: Problem, part: Part, rows: int) -> int:
    """Of the process or device, while the partition alone sees test rows."""
    test = Phase(
        kind=PhaseKind.TEST,
        partition=0,
        rows=min(problem.test_rows or problem.train_rows, 2 * rows),
        batch=rows,
        micro_batch=rows,
    )
    phases = Phases([Epochs(train=test, epochs=0, behind=(test,))])
    candidate: Candidate = Candidate(rows, (part,))
    walked, steps, _ = simulate(phases, [part[2]], problem.speeds, candidate.resources)
    return max(peaks_by_partition(problem, candidate, walked, steps))


def joint(problem: Problem, parts: Parts, cuts: Cuts) -> tuple[Part, ...]:
    """All partitions, numbered as the joint chain is: those of the whole, then those of each part, cut alike."""
    rows, found = cuts.subnet.micro_batch, list(cuts.whole)
    starts: Sequence[int] = [first for first, _, _ in cuts.subnet.parts]
    for part in range(parts.count):
        own, first = piece_of(problem, 1 + part), problem.chain.begins[1 + part]
        found += [(first + begin, first + end, cost) for begin, end, cost in parts_of(own, rows, starts)]
    return tuple(found)
