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
    Request,
    buffers_of,
    costs_from,
    fewest_rows,
    largest_relayed,
    measurable,
    micro_batches,
    refuse_given,
    relay_bytes,
    relay_room,
    starts_of,
    too_many,
)
from seqpart.planning.simulator import Means, Moment, PartitionCost, foretell
from seqpart.schedule.phases import Epochs, Phases
from seqpart.schedule.steps import Phase, Verb
from seqpart.units import format_size

WALKED_UPDATES = 3
EFFICIENT_ROWS = 32
"""Smaller micro-batches are tried only where nothing else fits."""
_RATES_ERR = 0.25
"""By which a predicted time may be wrong: rates that are measured for milliseconds, on a machine that does other work too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Foretold:
    """A candidate with its peak of the whole process or device, and seconds for one update."""

    method: Method
    candidate: Candidate
    peak: int
    seconds: float

    @property
    def fits_in(self) -> int:
        """The least limit under which it runs."""
        return limit_for(self.peak)


def choose_exact(request: Request, methods: Sequence[Method]) -> tuple[Method, Candidate, tuple[str, ...]]:
    """The fastest that fits, and why. Raises DoesNotFit, naming what would help."""
    room = request.limit - margin_of(request.limit)
    fastest = [(method, fastest_of(request, method, room)) for method in methods]
    found = [foretold for _, foretold in fastest if foretold is not None]
    if not found:
        raise _does_not_fit(request, methods)
    best = _simplest(found)
    return best.method, best.candidate, tuple(_reasons(request, best, fastest))


def _simplest(found: Sequence[Foretold]) -> Foretold:
    """The first that is not slower than the fastest by more than the rates' own error: methods come in order of simplicity."""
    within = (1 + _RATES_ERR) * min(foretold.seconds for foretold in found)
    return next(foretold for foretold in found if foretold.seconds <= within)


def fastest_of(request: Request, method: Method, room: int) -> Foretold | None:
    """At the largest micro-batch at which anything fits: smaller ones do the same work less efficiently."""
    for micro_batch in micro_batches(request):
        if not measurable(request, micro_batch):
            return None
        best: Foretold | None = None
        for foretold in _variants(request, method, micro_batch, room):
            if foretold.peak <= room and (best is None or foretold.seconds < best.seconds):
                best = foretold
        if best is not None:
            return best
    return None


def _variants(request: Request, method: Method, micro_batch: int, room: int) -> Iterator[Foretold]:
    for starts in _cuts(request, method, micro_batch):
        parts = _parts(request, micro_batch, starts)
        for slots in (len(parts),) if method.stays else (2, 1):
            if slots > len(parts):
                continue
            for relay in request.relays if len(parts) > 1 else request.relays[:1]:
                if relay == "host" and relay_room([p[2] for p in parts], request.batch_size, micro_batch) > request.host_room:
                    relay = "disk"
                foretold = foretell_exact(request, method, micro_batch, parts, Means(slots=slots, relay=relay), None)
                yield foretold
                if foretold.peak <= room and relay == "device" and not method.stays:
                    yield _with_graphs(request, foretold, room)


def _with_graphs(request: Request, foretold: Foretold, room: int) -> Foretold:
    """Keep as many graphs as there is room for: those of the last partitions, which backward needs first."""
    candidate = foretold.candidate
    none, some = len(candidate.parts) - 1, 0
    best = foretold
    while some < none:
        middle = (some + none) // 2
        tried = foretell_exact(request, foretold.method, candidate.micro_batch, candidate.parts, candidate.means, middle)
        if tried.peak <= room:
            best, none = tried, middle
        else:
            some = middle + 1
    return best


def foretell_exact(
    request: Request, method: Method, micro_batch: int, parts: tuple[tuple[int, int, PartitionCost], ...], means: Means,
    keeps_graph_from: int | None,
) -> Foretold:  # fmt: skip
    means = replace(
        means, label_row=request.label_row, borrows=not method.stays,
        gradients_room=request.clips and len(parts) > 1 and not method.stays,
    )  # fmt: skip
    candidate = Candidate(micro_batch, parts, means, keeps_graph_from)
    phases = _phases(request, method, candidate)
    costs = [part[2] for part in parts]
    walked, moments, _ = foretell(phases, costs, request.rates, means)
    peak = max(peaks_by_partition(request, candidate, walked, moments))
    updates = [moment.ends for moment in moments if moment.step.verb is Verb.UPDATE]
    per_update = len(parts)
    seconds = (updates[-1] - updates[per_update - 1]) / max(1, len(updates) // per_update - 1) or updates[-1]
    return Foretold(method=method, candidate=candidate, peak=peak, seconds=seconds)


def _phases(request: Request, method: Method, candidate: Candidate) -> Phases:
    batch = request.batch_size
    training = tuple(
        PartitionTraining(epochs=1, batch_size=batch, micro_batch=candidate.micro_batch, trainable=cost.trainable)
        for _, _, cost in candidate.parts
    )
    rows = min(request.train_rows, (WALKED_UPDATES - 1) * batch + (request.train_rows % batch or batch))
    work = Workload(
        train_rows=rows, test_rows=min(request.test_rows, candidate.micro_batch), shuffle=False, partitions=training,
        clips=request.clips, keeps_graph_from=candidate.keeps_graph_from,
    )  # fmt: skip
    train = replace(whole_network(work, streamed=not method.stays), epoch=1)
    return Phases([Epochs(train=train, epochs=1, behind=test_phases(work, stays=method.stays))])


def peaks_by_partition(request: Request, candidate: Candidate, phases: Sequence[Phase], moments: Sequence[Moment]) -> list[int]:
    """Of the whole process or device, while each partition works."""
    peaks = [0] * len(candidate.parts)
    for moment in moments:
        p = moment.step.partition
        peaks[p] = max(peaks[p], moment.peak + _buffers(request, candidate, phases, moment))
    return [request.peak(peak) for peak in peaks]


def _buffers(request: Request, candidate: Candidate, phases: Sequence[Phase], moment: Moment) -> int:
    """Host buffers of rows and of the disk relay, where they count against the limit."""
    if not request.host_counts:
        return 0
    phase = phases[moment.step.phase]
    first, last, _ = candidate.parts[phase.partition]
    reading, writing = buffers_of(request, first, last, phase.micro_batch)
    if phase.through is None:
        return reading + writing
    largest = largest_relayed([cost for _, _, cost in candidate.parts], phase.micro_batch)
    return reading + (relay_bytes(largest) if candidate.means.relay == "disk" else 0)


def _parts(request: Request, micro_batch: int, starts: Sequence[int]) -> tuple[tuple[int, int, PartitionCost], ...]:
    ends = [*starts[1:], len(request.chain)]
    return tuple((first, last, costs_from(request, micro_batch, first)[last]) for first, last in zip(starts, ends, strict=True))


def _cuts(request: Request, method: Method, micro_batch: int) -> list[tuple[int, ...]]:
    """First blocks of the partitions: as asked, or from the finest cut to the coarsest, each in balance.

    In balance by what is counted, so that the same request gives the same cuts, whatever real runs happened to take.
    """
    if not method.cuts:
        return [(0,)]
    if request.starts is not None:
        return [request.starts]
    possible = starts_of(request)
    if request.count is not None:
        return [_balanced(request, micro_batch, request.count)]
    weights = [costs_from(request, micro_batch, first, counted=True)[last] for first, last in _neighbours(request)]
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


def _neighbours(request: Request) -> list[tuple[int, int]]:
    possible = starts_of(request)
    return list(zip(possible, [*possible[1:], len(request.chain)], strict=True))


def _balanced(request: Request, micro_batch: int, count: int) -> tuple[int, ...]:
    pieces = [
        Piece(first, last, cost.output_row, cost.slot + cost.train_peak)
        for first in starts_of(request)
        for last, cost in costs_from(request, micro_batch, first, counted=True).items()
    ]
    chosen = best_cut(pieces, len(request.chain), count)
    if chosen is None:
        raise too_many(request, count)
    return tuple(piece.first for piece in chosen)


def _does_not_fit(request: Request, methods: Sequence[Method]) -> DoesNotFit:
    smallest = min(
        (foretold for method in methods for foretold in _variants(request, method, fewest_rows(request), 0)),
        key=lambda foretold: foretold.peak,
    )
    refuse_given(request, smallest.peak)
    first, last, cost = max(smallest.candidate.parts, key=lambda part: part[2].slot + part[2].train_peak)
    where = str(request.chain[first]) if last - first == 1 else f"blocks {first}..{last - 1}"
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
        f"{left_of(request.limit)}.\n"
        f"  runtime {format_size(request.runtime)}; the largest partition is {where}: weights {format_size(cost.weights)}, "
        f"gradients {format_size(cost.gradients)}, optimizer {format_size(cost.state)}, activations {format_size(cost.saved)}"
        f"\n  {cure}",
        smallest.fits_in,
    )


def _reasons(request: Request, best: Foretold, tried: Sequence[tuple[Method, Foretold | None]]) -> Iterator[str]:
    if len(tried) > 1:
        parts = []
        for method, foretold in tried:
            if foretold is None:
                parts.append(f"{method.name} does not fit")
            else:
                parts.append(f"{method.name} {foretold.seconds:.3g} s per update in {format_size(foretold.peak)}")
        why = "the fastest exact one that fits"
        if best.seconds > min(foretold.seconds for _, foretold in tried if foretold is not None):
            why = f"the simplest exact one that fits and is within {100 * _RATES_ERR:.0f} % of the fastest"
        yield f"method {best.method.name}, {why}: " + "; ".join(parts)
    candidate = best.candidate
    count = len(candidate.parts)
    if count > 1:
        asked = " as asked" if request.count or request.starts else ""
        slots = candidate.means.slots
        two = (
            ""
            if best.method.stays
            else f", {slots} slot(s): "
            + ("the next comes and the last goes while one computes" if slots > 1 else "there is no room for a second")
        )
        kept = count - 1 - candidate.keeps_graph_from if candidate.keeps_graph_from is not None else 0
        yield f"{count} partitions{asked}{two}"
        others = ", computed again for the others" if kept + 1 < count else ""
        yield f"activations kept for {kept + 1} of {count} partitions{others}; boundaries wait on {candidate.means.relay}"
    if candidate.micro_batch < request.batch_size:
        asked = "as asked" if request.micro_batch else "the largest that fits"
        yield f"micro-batch {candidate.micro_batch} of {request.batch_size}: {asked}"
