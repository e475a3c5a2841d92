"""Chooses the fastest exact plan that fits, by simulation of one candidate after the other.

A candidate is a method, a cut, the slots, the place where boundaries wait, which partitions stay on the device and which keep
their graphs. All exact methods give the same bits, so only memory and time decide; `auto` decides between the methods as well.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import seqpart.plan.problem as planning
from seqpart.device.limit import RUNTIME_VARIES, left_of, limit_for, refused
from seqpart.errors import DoesNotFit
from seqpart.methods.exact import STREAMED
from seqpart.methods.method import Method
from seqpart.model.packs import DEVICE, tiers_in_words, tiers_of
from seqpart.plan.dynamic import Piece, best_cut
from seqpart.plan.plan import AS_ASKED, Plan, PlanWording
from seqpart.plan.prediction import Kind, Option, Prediction, options_of, predict
from seqpart.plan.problem import Candidate, Parts, Problem
from seqpart.plan.search import fastest, smallest_of
from seqpart.plan.simulator import Resources
from seqpart.profile.partition import PartitionCost
from seqpart.units import format_size

_SPEEDS_ERR = 0.1
"""Relative error of predicted times: rates are measured for milliseconds, on a machine that does other work too."""


def choose_exact(
    problem: Problem, methods: Sequence[Method], wording: PlanWording = AS_ASKED
) -> tuple[Method, Candidate, tuple[str, ...]]:
    """Returns the fastest exact method and candidate that fit, and why. Raises DoesNotFit, naming what would help."""
    if 1 in (problem.count, len(problem.starts or ())):  # in one partition all methods are one
        methods = methods[:1]
    tried = [(method, _fastest_anywhere(problem, method)) for method in methods]
    found = [prediction for _, prediction in tried if prediction is not None]
    if not found:
        raise _does_not_fit(replace(problem, host_steps=problem.steps[-1]), methods)
    best = _simplest(found)
    best = replace(best, candidate=replace(best.candidate, why=_whys(problem, best), seconds=best.seconds))
    return best.method, best.candidate, tuple(_reasons(problem, best, tried, wording))


def _simplest(found: Sequence[Prediction]) -> Prediction:
    """The first prediction within the rates' error of the fastest: methods come in order of simplicity."""
    within = (1 + _SPEEDS_ERR) * min(prediction.seconds for prediction in found)
    return next(prediction for prediction in found if prediction.seconds <= within)


def _fastest_anywhere(problem: Problem, method: Method) -> Prediction | None:
    """The fastest plan with optimizer steps where they may be: on the host if that is faster, beyond the rates' error."""
    ways = [fastest_of(replace(problem, host_steps=on_host, placed={}), method) for on_host in problem.steps]
    found = [one for one in ways if one is not None]
    return _simplest(found) if found else None


def fastest_of(problem: Problem, method: Method) -> Prediction | None:
    """Returns the fastest plan at the largest micro-batch at which any fits: smaller ones do the same work less efficiently."""
    for micro_batch in planning.micro_batches(problem):
        if not planning.measurable(problem, micro_batch):
            return None
        again = _saved_answers(problem, method, micro_batch)
        # The runtime differs a little between processes.
        if again is not None and again.peak <= problem.available + RUNTIME_VARIES:
            return again
        if method.in_pairs:
            best = next((one for one in _paired(problem, method, micro_batch) if one.peak <= problem.available), None)
        else:
            best = fastest(problem, method, micro_batch, candidates(problem, method, micro_batch))
        if best is not None:
            return best
    return None


def _paired(problem: Problem, method: Method, micro_batch: int) -> Iterator[Prediction]:
    """Predictions for a method in pairs: with a third slot, in which the next score is prefetched, and without."""
    assert problem.starts is not None
    parts = planning.parts_of(problem, problem.pair_rows(micro_batch), problem.starts)
    for slots in (3, 2):
        resources = Resources(slots=slots, stays=frozenset({0}))
        if slots <= len(parts) - 2:
            yield predict(problem, method, micro_batch, parts, resources, keeps=frozenset(range(len(parts) - 2)))


def _saved_answers(problem: Problem, method: Method, micro_batch: int) -> Prediction | None:
    """Prediction with the choices of the saved plan that is to be reused; None if they do not apply."""
    saved = problem.saved
    if method.in_pairs:  # its choices are always the same
        return None
    if saved is None or saved.method != method.name or saved.starts != problem.starts:
        return None
    parts = planning.parts_of(problem, micro_batch, saved.starts)
    heap = problem.machine.may_keep_heap and saved.heap > 0 and not saved.tiers
    stays, weights = (
        frozenset() if method.stays or not problem.auto else asked - planning.sharing(problem, parts)
        for asked in (saved.stays, saved.weights_stay)
    )
    weights = frozenset(p for p in weights - stays if parts[p][2].state)
    tiers, host = problem.machine.graph_tiers, saved.graphs_at_host
    offloads = (host if "host" in tiers else frozenset()) | (saved.offloads - host if "disk" in tiers else frozenset())
    offloads -= {len(parts) - 1}
    streaming = len(parts) - len(stays)
    slots = len(parts) if method.stays else max(min(1, streaming), min(saved.slots, streaming))
    places = tiers_of(tier if tier in problem.machine.boundary_tiers else "disk" for tier in saved.tiers)
    resources = Resources(slots=slots, stays=stays, weights_stay=weights, tiers=places, keeps_heap=heap, graphs_at_host=host)
    return predict(problem, method, micro_batch, parts, resources, (saved.keeps - saved.offloads) | offloads, offloads)


def candidates(problem: Problem, method: Method, micro_batch: int) -> Iterator[tuple[Parts, Resources]]:
    """Every cut of `cuts_of` with every number of slots and every place for boundaries; spare memory is not spent yet."""
    for starts in cuts_of(problem, method, micro_batch):
        parts = planning.parts_of(problem, micro_batch, starts)
        tiers = problem.machine.boundary_tiers if len(parts) > 1 else problem.machine.boundary_tiers[:1]
        places = [planning.tiers_by_room(problem, [cost for _, _, cost in parts], micro_batch, tier) for tier in tiers]
        # With a third slot loads and saves overlap, where each direction has a link of its own.
        in_turn = (2, 1) if problem.machine.host_counts else (3, 2, 1)
        for slots, place in itertools.product((len(parts),) if method.stays else in_turn, places):
            if slots <= len(parts):
                yield parts, Resources(slots=slots, tiers=place)


_MANY = 40
"""Most partitions of the finest cut, with every possible start: steps and simulations take time too."""


def cuts_of(problem: Problem, method: Method, micro_batch: int) -> list[tuple[int, ...]]:
    """Cuts, each the first blocks of its partitions: as asked, or from the finest to the coarsest, each in balance.

    Balanced by counted bytes, so that the same request gives the same cuts, whatever real runs happened to take.
    """
    if not method.cuts:
        return [(0,)]
    if problem.starts is not None:
        return [problem.starts]
    possible = planning.starts_of(problem)
    if problem.count is not None:
        return [_balanced(problem, micro_batch, problem.count)]
    ends = [*possible[1:], len(problem.chain)]
    weights = [planning.cost_of(problem, micro_batch, *way, counted=True) for way in zip(possible, ends, strict=True)]
    sizes = [cost.slot if not method.stays else cost.saved + cost.output for cost in weights]
    found = [tuple(possible)] if 1 < len(possible) <= _MANY else []
    bound = max(sizes)
    # Gradients of shared weights wait; on the disk in buffers, each as large as the largest of them.
    buffers = 0 if method.stays else planning.BUFFERS
    sizes = [size + buffers * cost.largest_tie for size, cost in zip(sizes, weights, strict=True)]
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


_LOOKED_AT = 100
"""Most blocks at which cuts into few partitions are looked for: all ranges of them are compared."""


def _balanced(problem: Problem, micro_batch: int, count: int) -> tuple[int, ...]:
    starts = planning.starts_of(problem)
    size = len(starts) // max(_LOOKED_AT, 4 * count) + 1
    groups = (starts[at : at + size] for at in range(1, len(starts), size))

    def boundary(start: int) -> int:
        return planning.cost_of(problem, micro_batch, start - 1, start, counted=True).output_row

    starts = [0, *(min(group, key=boundary) for group in groups)]
    pieces = [
        Piece(first, last, cost.output_row, cost.slot + cost.train_peak)
        for first, last in itertools.combinations([*starts, len(problem.chain)], 2)
        for cost in [planning.cost_of(problem, micro_batch, first, last, counted=True)]
    ]
    chosen = best_cut(pieces, len(problem.chain), count)
    if chosen is None:
        raise planning.too_many(problem, count)
    return tuple(piece.first for piece in chosen)


def _smallest(problem: Problem, methods: Iterable[Method]) -> Prediction:
    """The prediction with the lowest peak at any micro-batch. Not always at the smallest: one that is the whole batch
    accumulates no gradients."""
    sizes = planning.possible_micro_batches(problem)
    alone = [method for method in methods if not method.in_pairs]
    ways = (
        (method, rows, parts, way) for method in alone for rows in sizes for parts, way in candidates(problem, method, rows)
        if method.stays or way.slots == 1  # more slots take more memory for the same work
    )  # fmt: skip
    paired = (one for method in methods if method.in_pairs for rows in sizes for one in _paired(problem, method, rows))
    found = [*paired, smallest_of(problem, ways)]
    return min((one for one in found if one is not None), key=lambda prediction: prediction.peak)


def _does_not_fit(problem: Problem, methods: Sequence[Method]) -> DoesNotFit:
    smallest = _smallest(problem, methods)
    planning.refuse_given(problem, smallest.peak)
    first, last, cost = max(smallest.candidate.parts, key=lambda part: part[2].slot + part[2].train_peak)
    where = str(problem.chain[first]) if last - first == 1 else f"blocks {first}..{last - 1}"
    return refused(
        f"method {' or '.join(method.name for method in methods)} needs {format_size(smallest.peak)}, at micro-batch "
        f"{smallest.candidate.micro_batch} and in {len(smallest.candidate.parts)} partition(s), and "
        f"{left_of(problem.limit)}.\n"
        f"  runtime {format_size(problem.machine.runtime)}; the largest partition is {where}: {planning.contents(cost)}"
        f"\n  {_cure(problem, smallest, last - first, cost)}{planning.whole_parts(problem) if last - first == 1 else ''}",
        limit_for(smallest.peak),
        smallest.candidate.micro_batch,
    )


def _cure(problem: Problem, smallest: Prediction, blocks: int, cost: PartitionCost) -> str:
    """Says what would help, where the partition that needs most has `blocks` blocks."""
    if smallest.method.stays and problem.machine.runtime <= problem.available:
        needed = _smallest(problem, [STREAMED]).peak
        but = "" if needed <= problem.available else f", and needs {format_size(needed)}"
        return f"Or use --method streamed, which gives the same bits with one partition at a time{but}."
    finer = blocks > 1 and problem.saved is None and bool(problem.count or problem.starts)
    return planning.advice(problem, smallest.peak, cost, finer=finer and not smallest.method.in_pairs)


def _reasons(
    problem: Problem, best: Prediction, tried: Sequence[tuple[Method, Prediction | None]], wording: PlanWording
) -> Iterator[str]:
    if wording.method:
        yield f"method {best.method.name} {wording.method}"
    elif len(tried) > 1:
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
    if len(problem.chain) == 1:
        yield from (f"the model is one block, which cannot be cut: {why}" for why in problem.chain.whole_parts)
    candidate = best.candidate
    count = len(candidate.parts)
    if best.method.in_pairs:
        yield _element(best)
    if count > 1:
        asked = f" {wording.cut}" if (problem.count or problem.starts) and not best.method.in_pairs else ""
        yield f"{count} partitions{asked}{_shared(best)}"
        if problem.saved is not None and not _as_saved(problem.saved, best):
            yield wording.otherwise
        for why in dict.fromkeys(candidate.why):  # one line for all partitions with the same reasons
            yield f"{_named([p for p, other in enumerate(candidate.why) if other == why])}: {why}"
        yield f"boundaries wait on {tiers_in_words(candidate.resources.tiers)}"
        yield from _bound(best)
    yield from _steps_in_words(problem, best)
    yield from candidate.heap_reason
    if candidate.micro_batch < problem.batch_size:
        asked = wording.micro_batch if problem.micro_batch else "the largest that fits"
        yield f"micro-batch {candidate.micro_batch} of {problem.batch_size}: {asked}"


def _steps_in_words(problem: Problem, best: Prediction) -> Iterator[str]:
    """Says which partitions' optimizer steps are computed on the host, and why others' are not."""
    host, parts = best.candidate.resources.host_steps, best.candidate.parts
    if not host and problem.steps != (True,):
        return
    learning = [p for p, (_, _, cost) in enumerate(parts) if cost.trainable]
    if host:
        yield f"optimizer steps on the host, where weights and state rest: {_named(host)}"
    if others := [p for p in learning if p not in host]:
        yield f"optimizer steps on the device: {_named(others)} (their homes are on the disk, or they have running statistics)"


def _bound(best: Prediction) -> Iterator[str]:
    """Says, if anything is transferred, how long an update computes and transfers, and which of the two it waits for."""
    if not best.moving:
        return
    near, parts = best.candidate.resources.at_host, range(len(best.candidate.parts))
    link = "the disk" if not near else "the device's link" if near.issuperset(parts) else "the device's link and the disk"
    longest = max(best.moving, best.computing, best.stepping)
    longer = link if longest == best.moving else "the computation" if longest == best.computing else "optimizer steps"
    steps = f", steps on the host for {best.stepping:.3g} s" if best.stepping else ""
    yield (
        f"an update computes for {best.computing:.3g} s{steps} and transfers for {best.moving:.3g} s, "
        f"{'all' if steps else 'both'} at the same time: it waits for {longer}"
        f"{'' if longer == link else f', with transfers by {link}'}"
    )


def _as_saved(saved: Plan, best: Prediction) -> bool:
    """True if `best` makes the same choices for each partition as the saved plan."""
    now = best.candidate
    stays = saved.stays if best.method.stays else now.resources.stays
    asked = saved.stays, saved.weights_stay, saved.keeps, saved.offloads, saved.graphs_at_host, saved.tiers, saved.host_steps
    graphs = now.keeps, now.offloads, now.resources.graphs_at_host
    return asked == (stays, now.resources.weights_stay, *graphs, now.resources.tiers, now.resources.host_steps)


def _shared(best: Prediction) -> str:
    """Says how many slots partitions that come and go share; "" if none does."""
    slots = best.candidate.resources.slots
    if best.method.stays or not slots:
        return ""
    why = "the next is loaded and the last saved while one computes" if slots > 1 else "there is no room for a second"
    return f", {slots} slot(s): {why}"


def _whys(problem: Problem, best: Prediction) -> tuple[str, ...]:
    """Reasons of each partition, in bytes and seconds per update: why it stays or is loaded in turn, where its graph waits."""
    if best.method.in_pairs:
        scores = ["loaded in turn"] * (len(best.candidate.parts) - 2)
        return ("common to all pairs: on the device throughout", *scores, "all scores joined: only for tests")
    options = {
        (option.partition, option.kind): option
        for option in options_of(problem, best, offload=bool(problem.machine.graph_tiers))
    }
    left = f"{format_size(max(0, problem.available - best.peak))} are left"
    graph = partial(_why_graph, tier="ram" if problem.machine.host_counts else "pinned")
    return tuple(
        "; ".join(filter(None, (why(best, p, options, left) for why in (_why_there, graph, _why_boundary))))
        for p in range(len(best.candidate.parts))
    )


def _element(best: Prediction) -> str:
    """Says how many weights a pair of scores has on the device, out of all."""
    (_, _, common), *scores, _ = best.candidate.parts
    pair = sorted((cost.parameters for _, _, cost in scores), reverse=True)[:2]
    whole = common.parameters + sum(cost.parameters for _, _, cost in scores)
    return (
        f"{len(scores)} scores meet in {len(scores) * (len(scores) - 1) // 2} pairs: a pair has "
        f"{common.parameters + sum(pair):,} of {whole:,} weights on the device, {common.parameters:,} of them common"
    )


_Options = dict[tuple[int, Kind], Option]


def _why_there(best: Prediction, p: int, options: _Options, left: str) -> str:
    option = options.get((p, Kind.STAY))
    if best.method.stays or len(best.candidate.parts) == 1:
        return ""
    if option is None:
        return "loaded in turn"
    if p in best.candidate.resources.stays:
        return f"on the device throughout ({format_size(option.nbytes)}, saves {_milliseconds(option.transfer)} of transfers)"
    if p in best.candidate.resources.weights_stay:
        inner = options[p, Kind.WEIGHTS]
        more = format_size(option.nbytes - inner.nbytes)
        return (
            f"weights on the device throughout ({format_size(inner.nbytes)}, saves {_milliseconds(inner.transfer)} of "
            f"transfers), optimizer state loaded in turn (keeping it there takes {more}, {left})"
        )
    return f"loaded in turn (keeping it on the device takes {format_size(option.nbytes)}, {left})"


def _why_graph(best: Prediction, p: int, options: _Options, left: str, tier: str) -> str:
    candidate, last = best.candidate, len(best.candidate.parts) - 1
    kept, at_host = options.get((p, Kind.KEEP)), p in candidate.resources.graphs_at_host
    away = options.get((p, Kind.HOST if at_host else Kind.DISK))
    if p == last:
        return "forward and backward in one step" if last else ""
    if p in candidate.offloads and away is not None:
        moved = format_size(candidate.parts[p][2].graph)
        where = f"in {tier} memory" if at_host else "on the disk"
        return f"graph {where} ({moved} a micro-batch, saves {_milliseconds(away.compute)} of computing)"
    if p in candidate.keeps and kept is not None:
        return f"graph kept ({format_size(kept.nbytes)}, saves {_milliseconds(kept.compute)} of computing)"
    if kept is None:
        return "no backward: no parameter up to here is trained"
    return f"graph recomputed (keeping it takes {format_size(kept.nbytes)}, {left})"


def _why_boundary(best: Prediction, p: int, options: _Options, left: str) -> str:
    option, tiers = options.get((p, Kind.BOUNDARY)), best.candidate.resources.tiers
    if option is None:
        return ""
    if tiers[p] == DEVICE:
        return f"its boundary on the device ({format_size(option.nbytes)}, saves {_milliseconds(option.compute)} of waiting)"
    return f"its boundary on {tiers[p]} (on the device it would take {format_size(option.nbytes)}, {left})"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _named(numbers: Iterable[int]) -> str:
    """Formats partition numbers: `partitions 0-3, 7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    listed = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
    return f"partition {listed}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"partitions {listed}"
