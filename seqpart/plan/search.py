"""Finds the fastest of many ways to run a cut that fits, and spends the memory that is left on saving time."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter

from seqpart.methods.method import Method
from seqpart.model.packs import DEVICE, Tiers
from seqpart.plan.dynamic import most_saved
from seqpart.plan.prediction import (
    Kind,
    Option,
    Prediction,
    carried_out,
    first_that_learns,
    heap_bytes,
    heaps_of,
    increments,
    least_at_end,
    least_peak,
    options_of,
    predict,
)
from seqpart.plan.problem import Parts, Problem, least_slot
from seqpart.plan.simulator import Resources

_REPAIRS = 800
"""Budget for refining a plan: simulated partitions, summed over simulations."""

_FEW, _MORE_OF_FEW = 4, 4
"""With at most _FEW partitions, _MORE_OF_FEW times the budget: each choice is a large part of the plan, so more are tried."""

_LOOKED_AT = 2000
"""Moves that are weighed before any of them is simulated."""

_RIVALS, _NEAR = 4, 1.5
"""At most _RIVALS plans are refined, those that take at most _NEAR times as long as the fastest."""

_WORTH_IT = 1 / 1.02
"""A plan with offloaded graphs or boundaries is taken only if it needs less than this share of the seconds."""

_ROUGHLY = 1.01
"""Tolerance for bounds: a candidate that was not simulated itself may take less than its estimate by this factor."""


def fastest(
    problem: Problem, method: Method, micro_batch: int, candidates: Iterable[tuple[Parts, Resources]]
) -> Prediction | None:
    """Returns the fastest candidate that fits, with its spare memory spent; None if none fits.

    Tries the most promising first, and none that cannot be the fastest.
    """
    best: dict[tuple[int, Resources], Prediction] = {}
    rough = _roughly(problem, method, micro_batch, candidates)
    for least, parts, resources in sorted(rough, key=itemgetter(0)):
        # A slot, a heap or boundaries may be worth more where partitions stay: each kind of candidate is refined by itself.
        rivals = len(parts), resources
        known = min((prediction.seconds for prediction in best.values()), default=math.inf)
        if least >= known:
            break
        plain = predict(problem, method, micro_batch, parts, resources)
        if plain.peak > problem.available:
            continue
        for prediction in (plain, *(spent(problem, plain) if len(parts) > 1 else ())):
            if rivals not in best or prediction.seconds < best[rivals].seconds:
                best[rivals] = prediction
    ranked = sorted(best.values(), key=lambda prediction: prediction.seconds)[:_RIVALS]
    if problem.draft:
        return next(iter(ranked), None)
    near = [one for one in ranked if one.seconds <= _NEAR * ranked[0].seconds]
    near += [away for one in near if (away := _offloading(problem, one)) is not None]
    better = [one if _ends(problem, one) else refined(problem, one, _REPAIRS // len(near)) for one in near]
    return min(better, key=_rank, default=None)


def _rank(prediction: Prediction) -> float:
    """Seconds for comparing plans: those with offloaded graphs or boundaries count for more, by 1 / _WORTH_IT."""
    candidate = prediction.candidate
    return prediction.seconds / (_WORTH_IT if candidate.offloads or candidate.resources.tiers else 1.0)


def _offloading(problem: Problem, found: Prediction) -> Prediction | None:
    """The best other way to spend the memory of `found`, with offloaded graphs; None if there is none."""
    if not problem.machine.graph_tiers or _holds_all(found):
        return None
    now = found.candidate
    resources = replace(now.resources, stays=frozenset(), weights_stay=frozenset(), slots=now.resources.slots or 1)
    plain = predict(problem, found.method, now.micro_batch, now.parts, resources)
    if plain.peak > problem.available:
        return None
    options = options_of(problem, plain, offload=True)
    orders = _orders(options)
    # Memory for partitions that stay instead of kept graphs: first the buffers through which all offloaded graphs go.
    streamed = _orders([option for option in options if option.kind is not Kind.KEEP])
    orders += [tuple(sorted(order, key=lambda option: not option.kind.away)) for order in streamed]
    others = [_filled(problem, plain, (), order) for order in orders]
    # All together: one at a time, each would have to find room for buffers that all share.
    gaining = [option for option in options if option.kind.away and option.worth(_PRICES[0]) > 0]
    for away in ([option for option in gaining if option.kind is kind] for kind in (Kind.HOST, Kind.DISK)):
        whole = carried_out(problem, plain, away)
        if away and whole.peak <= problem.available:
            others += [_filled(problem, whole, away, order) for order in orders]
    return min((other for other in others if other.candidate.offloads), key=_rank, default=None)


def _holds_all(prediction: Prediction, *, may_stay: bool = True) -> bool:
    """True if all partitions (which `may_stay`), and all graphs that can be kept, stay on the device: nothing is to gain."""
    candidate = prediction.candidate
    graphs = len(candidate.parts) - 1 - first_that_learns(candidate.parts)
    stays = prediction.method.stays or not may_stay or len(candidate.resources.stays) == len(candidate.parts)
    return stays and len(candidate.keeps - candidate.offloads) >= graphs


def _ends(problem: Problem, prediction: Prediction) -> bool:
    """True if no other answer is faster: all that may stay on the device does so, boundaries too."""
    return not prediction.candidate.resources.tiers and _holds_all(prediction, may_stay=problem.auto)


_PRICES = (0.1, 0.4, 1.0)
"""Price of a second of transfers, in seconds of computing: nearly hidden by it, in part, not at all."""


def _orders(options: Sequence[Option]) -> list[tuple[Option, ...]]:
    """Returns orders of the options that save time, one per price: by seconds saved per byte."""

    def ordered(price: float) -> tuple[Option, ...]:
        alone = dict(zip(increments(options), options, strict=True))
        # Among equals the last partition comes first: its graph is there for the shortest time.
        order = sorted(alone, key=lambda option: (-option.worth(price) / max(1, option.nbytes), -option.partition))
        return tuple(alone[option] for option in order if option.worth(price) > 0)

    return list(dict.fromkeys(map(ordered, _PRICES)))


def _roughly(
    problem: Problem, method: Method, micro_batch: int, candidates: Iterable[tuple[Parts, Resources]]
) -> Iterator[tuple[float, Parts, Resources]]:
    """(bound, candidate) of those that may fit, with a kept heap and without: no plan from it takes fewer seconds. Candidates
    that differ in slots and heap alone share a simulation."""
    simulated: dict[tuple[tuple[int, ...], Tiers], tuple[Prediction, int]] = {}
    for parts, resources in candidates:
        if least_peak(problem, method, micro_batch, parts, resources) > problem.available:
            continue
        key = tuple(first for first, _, _ in parts), resources.tiers
        if key not in simulated:
            plain = predict(problem, method, micro_batch, parts, resources)
            least, _ = heaps_of(problem, plain.working, [cost for _, _, cost in parts])
            simulated[key] = plain, least - problem.machine.growth - plain.working
        plain, holes = simulated[key]
        peak = plain.peak + _slots(problem, parts, resources) - _slots(problem, parts, plain.candidate.resources)
        may_keep = problem.machine.may_keep_heap and not resources.tiers
        for heap in (True, False) if may_keep else (False,):
            kept = holes if heap else 0
            if peak + kept <= problem.available * _ROUGHLY:
                way = replace(resources, keeps_heap=heap)
                yield _least(problem, plain, way, max(0, problem.available - peak - kept)), parts, way


def _slots(problem: Problem, parts: Parts, resources: Resources) -> int:
    return sum(sorted((least_slot(problem, cost) for _, _, cost in parts), reverse=True)[: resources.slots])


def _least(problem: Problem, plain: Prediction, resources: Resources, left: int) -> float:
    """Lower bound of the seconds, however the `left` bytes are spent: all on computing, or all on transfers."""
    parts = plain.candidate.parts
    share = min(1.0, *(cost.kept_share for _, _, cost in parts)) if resources.keeps_heap else 1.0
    # Boundaries on the device make another candidate, which has a bound of its own.
    options = [option for option in increments(options_of(problem, plain)) if option.kind is not Kind.BOUNDARY]
    if resources.slots == 1 and not any(option.takes(resources) <= left for option in options):  # nothing overlaps
        return plain.moving * (1 + problem.machine.contention) + share * plain.computing
    # All kept graphs are there at the last partition's backward, which need not be where the peak is.
    at_end = least_at_end(problem, plain.method, plain.candidate.micro_batch, parts, resources)
    room = left + max(0, plain.working - at_end)
    computing = plain.computing - most_saved(((o.compute, o.takes(resources)) for o in options), room)
    moving = plain.moving - most_saved(((o.transfer, o.takes(resources)) for o in options), left)
    return max(share * computing, moving) + problem.machine.contention * moving


def smallest_of(problem: Problem, ways: Iterable[tuple[Method, int, Parts, Resources]]) -> Prediction | None:
    """Returns the prediction with the lowest peak of all `ways`, tried in the order of their least peaks."""
    best: Prediction | None = None
    bounds = ((least_peak(problem, *way), way) for way in ways)
    for least, way in sorted(bounds, key=itemgetter(0)):
        if best is not None and least >= best.peak:
            break
        prediction = predict(problem, *way)
        best = prediction if best is None or prediction.peak < best.peak else best
    return best


def spent(problem: Problem, plain: Prediction) -> Iterator[Prediction]:
    """Spends the memory left by `plain` on partitions that stay and on kept graphs, in several orders.

    Computing and transfers overlap in part, and an update takes about the longer of the two, so what a second of transfers is
    worth is not known beforehand.
    """
    for order in _orders(options_of(problem, plain)):
        yield _filled(problem, plain, (), order)


def _filled(problem: Problem, plain: Prediction, chosen: Sequence[Option], options: Sequence[Option]) -> Prediction:
    """`plain` with `chosen` and as many of `options`, in their order, as fit beside them."""
    best, taken = plain, tuple(chosen)
    while more := _packed(problem, best, taken, options):
        while more and (tried := carried_out(problem, plain, (*taken, *more))).peak > problem.available:
            more = more[: len(more) // 2]
        if not more:
            break
        best, taken = tried, (*taken, *more)
    return best


def _packed(problem: Problem, now: Prediction, taken: Sequence[Option], options: Sequence[Option]) -> list[Option]:
    """Options beside `taken`, in their order, that fit by the sum of bytes: what stays counts while all partitions work, a kept
    graph from its own forward pass to its backward pass, so while later partitions work."""
    per_byte = heap_bytes(1) if now.candidate.resources.keeps_heap else 1
    left = [problem.available - now.peak + per_byte * (now.working - work) for work in now.works]
    others_wait = not now.method.stays and now.candidate.micro_batch < problem.batch_size  # graphs of other micro-batches
    chosen = {kind: {o.partition: o for o in taken if o.kind is kind} for kind in Kind}
    packed: list[Option] = []
    for option in options:
        p, kind = option.partition, option.kind
        if option in taken or (kind is Kind.WEIGHTS and p in chosen[Kind.STAY]):
            continue
        inner = chosen[Kind.WEIGHTS].get(p) if kind is Kind.STAY else None
        nbytes = (option if inner is None else option.beyond(inner)).takes(now.candidate.resources)
        first = (p if others_wait else p + 1) if kind in (Kind.KEEP, Kind.BOUNDARY) else 0
        if min(left[first:], default=0) >= nbytes:
            packed.append(option)
            chosen[kind][p] = option
            left[first:] = (room - nbytes for room in left[first:])
    return packed


def refined(problem: Problem, best: Prediction, repairs: int) -> Prediction:
    """Improves `best` by moves (see `_moves`: an option added, or exchanged) as long as one fits and is faster.

    Simulates about `repairs` partitions in all, so that its time does not grow with the number of partitions.
    """
    count = len(best.candidate.parts)
    left = around = (repairs * _MORE_OF_FEW if count <= _FEW else repairs) // count if count > 1 else 0
    better = left > 0
    options = options_of(problem, best, offload=bool(best.candidate.offloads))
    while better and left > 0:
        better = False
        now = best.candidate
        host = now.resources.graphs_at_host
        answers = {
            Kind.STAY: now.resources.stays, Kind.WEIGHTS: now.resources.weights_stay, Kind.KEEP: now.keeps - now.offloads,
            Kind.HOST: host,
            Kind.DISK: now.offloads - host, Kind.BOUNDARY: {p for p, tier in enumerate(now.resources.tiers) if tier == DEVICE},
        }  # fmt: skip
        chosen = [option for option in options if option.partition in answers[option.kind]]
        others = [option for option in options if option not in chosen]
        for out, come in _promising(chosen, others, best.candidate.resources, problem.available - best.peak, left):
            left -= 1
            tried = carried_out(problem, best, [option for option in (*chosen, *come) if option not in out])
            if tried.peak <= problem.available and tried.seconds < best.seconds:
                best, better = tried, True
                break
        if not better:
            tried = _around(problem, best, options, around // 3)
            best, better, around = tried, tried is not best, 0
    return best


def _around(problem: Problem, best: Prediction, options: Sequence[Option], count: int) -> Prediction:
    """The best of `best` and `count` plans that begin with one or two options and are filled with others. It finds what sums
    of bytes miss: if the largest partition stays, the slot shrinks."""
    found, plain = [best], carried_out(problem, best, ())
    order = sorted(options, key=lambda option: -option.worth(1.0) / max(1, option.nbytes))
    starts = (start for size in (1, 2) for start in itertools.combinations(order, size))
    for start in itertools.islice(starts, count):
        began = carried_out(problem, plain, start)
        if began.peak <= problem.available:
            found.append(_filled(problem, began, start, order))
    return min(found, key=_rank)


def _promising(
    chosen: Sequence[Option], others: Sequence[Option], resources: Resources, room: int, count: int
) -> "Iterator[tuple[_Chosen, _Chosen]]":
    """At most `count` moves that save seconds of some kind: first those that fit by the sum of bytes, then others."""
    seldom: list[tuple[_Chosen, _Chosen]] = []
    for out, come in itertools.islice(_moves(chosen, others), _LOOKED_AT):
        computing = sum(o.compute for o in come) - sum(o.compute for o in out)
        moving = sum(o.transfer for o in come) - sum(o.transfer for o in out)
        if computing >= 0 or moving >= 0:
            more = sum(o.takes(resources) for o in come) - sum(o.takes(resources) for o in out)
            if (computing <= 0 and moving <= 0) or more > room:
                seldom.append((out, come))
                continue
            count -= 1
            yield out, come
        if count <= 0:
            return
    yield from seldom[:count]


_Chosen = tuple[Option, ...]


def _moves(chosen: Sequence[Option], others: Sequence[Option]) -> Iterator[tuple[_Chosen, _Chosen]]:
    """Moves (options removed, options added), the most promising first."""
    others = sorted(others, key=lambda option: -option.worth(1.0))
    chosen = sorted(chosen, key=lambda option: option.worth(1.0))
    yield from (((), (option,)) for option in others)
    yield from (((out,), (option,)) for option in others for out in chosen)
    yield from (((), pair) for pair in itertools.combinations(others, 2))
    yield from (((out,), pair) for pair in itertools.combinations(others, 2) for out in chosen)
    yield from ((pair, (option,)) for pair in itertools.combinations(chosen, 2) for option in others)
