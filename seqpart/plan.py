"""The plan: which cut, which micro-batch, which tiers, what it will take, and why. Made before anything is trained.

A plan is a frozen value of ints. It can be printed, saved as JSON, compared and reused; the run is held to it.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self, TypeVar

from seqpart.activations import reader_bytes, writer_bytes
from seqpart.blocks import Chain
from seqpart.costs import BlockCost
from seqpart.cutting import Piece, best_cut
from seqpart.errors import DoesNotFit, ModelError, OptionError
from seqpart.layout import Layout
from seqpart.meter import WARM_UP_BYTES, left_of, limit_for, margin_of
from seqpart.rows import RowLayout
from seqpart.simulate import LossCost, Means, PartitionCost, Rates, growing
from seqpart.units import format_limit, format_size

T = TypeVar("T")

FORMAT = 2
SMALLEST_EASY_MICRO_BATCH = 32
"""Smaller micro-batches slow the matrix kernels down; they are taken only when nothing else fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionPlan:
    """Blocks first..last (last not included), and what the partition takes at its micro-batch, in bytes."""

    first: int
    last: int
    micro_batch: int
    weights: int
    state: int
    slot: int
    gradients: int
    activations: int
    buffers: int
    """Host buffers of the boundary cache, where they count against the limit."""
    boundary_row: int
    peak: int
    """Of the whole process (CPU) or device (CUDA), runtime included."""
    tier: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run will do under `limit`. `fingerprint` names the model and input shape that it was made for."""

    method: str
    device: str
    limit: int
    margin: int
    runtime: int
    """Taken by the libraries (CPU) or the context (CUDA) before any training; measured."""
    growth: int
    """Allowed for what kernels take inside one operation, and for small objects."""
    full_state: int
    """Weights, gradients and optimizer state of the whole network: what plain training must hold."""
    parameters: int
    partitions: tuple[PartitionPlan, ...]
    host_limit: int
    disk_bytes: int
    seconds: float
    reasons: tuple[str, ...]
    fingerprint: str
    slots: int
    """Partitions that may be on the device at once."""
    relay: str
    """Where boundaries wait within an update: device, host or disk."""
    keeps_graph_from: int | None
    """Partitions from this one on keep activations for backward instead of computing them again."""

    @property
    def peak(self) -> int:
        return max(part.peak for part in self.partitions)

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(part.first for part in self.partitions)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, name: str) -> Self:
        """Raises OptionError, naming the file, for anything that `to_json` did not write."""
        try:
            found = json.loads(text)
            version = found.pop("format")
            parts = tuple(_typed(PartitionPlan, part) for part in found.pop("partitions"))
            found["reasons"] = tuple(found["reasons"])
            if version != FORMAT:
                raise ValueError(f"format {version}")
            edges = [0, *(part.last for part in parts)]
            if not parts or [part.first for part in parts] != edges[:-1] or edges != sorted(set(edges)):
                raise ValueError("its partitions do not follow each other")
            if min(part.micro_batch for part in parts) < 1:
                raise ValueError("micro_batch 0")
            return _typed(cls, {**found, "partitions": parts})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OptionError(f"--plan: {name} is not a plan that --plan-out wrote ({error}).") from None


def _typed(kind: type[T], values: dict[str, Any]) -> T:
    """A dataclass from JSON. Raises ValueError for a number or text of another type, TypeError for other fields."""
    for known in fields(kind):  # type: ignore[arg-type]
        value = values.get(known.name)
        if known.type in (int, str) and type(value) is not known.type:
            raise ValueError(f"{known.name} is {value!r}")
    return kind(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What make_plan is asked to fit."""

    chain: Chain
    device: str
    host_counts: bool
    """Whether host buffers count against the limit (CPU), or not (CUDA)."""
    limit: int
    runtime: int
    growth: int
    costs_at: Callable[[int], Sequence[BlockCost]]
    """Block costs at a micro-batch."""
    states: Sequence[Layout]
    loss_of: Callable[[int], LossCost]
    fused: bool
    heap_below: int
    batch_size: int
    micro_batch: int | None
    starts: tuple[int, ...] | None
    count: int | None
    rates: Rates
    clips: bool
    relays: tuple[str, ...]
    """Places where boundaries may wait within an update, the fastest first."""
    host_room: int
    """Bytes of host memory that boundaries may take there."""
    label_row: int
    """Bytes of one row's labels on the device."""
    input_row: RowLayout
    cache_row: Callable[[BlockCost], RowLayout]
    cuts_behind: Callable[[BlockCost], bool]
    """Whether a partition may end with a block."""
    train_rows: int
    test_rows: int
    known: dict[tuple[int, int], dict[int, PartitionCost]] = field(default_factory=dict, compare=False)
    """Of `costs_from`: what it has found already."""


ALONE = Means()
"""One slot, boundaries on the device."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A cut at one micro-batch: first block, last block and cost of every partition; and how they are run."""

    micro_batch: int
    parts: tuple[tuple[int, int, PartitionCost], ...]
    means: Means = ALONE
    keeps_graph_from: int | None = None


def choose_cut(request: Request) -> tuple[Candidate, tuple[str, ...]]:
    """For `sil`: fewest partitions that fit, at the largest micro-batch that reaches so few. Raises DoesNotFit, in words."""
    found: list[Candidate] = []
    for micro_batch in micro_batches(request):
        if found and micro_batch < SMALLEST_EASY_MICRO_BATCH:
            break
        if not _measurable(request, micro_batch):
            break
        candidate = _cut_at(request, micro_batch)
        if candidate is not None:
            found.append(candidate)
    if not found:
        raise _does_not_fit(request)
    best = min(found, key=lambda candidate: (len(candidate.parts), -candidate.micro_batch))
    return best, _reasons(request, best)


def _measurable(request: Request, micro_batch: int) -> bool:
    """Whether the model takes so few rows at all (BatchNorm refuses one); the largest must, or the error is the user's."""
    try:
        request.costs_at(micro_batch)
    except ModelError:
        if micro_batch == micro_batches(request)[0]:
            raise
        return False
    return True


def micro_batches(request: Request) -> list[int]:
    """Candidates, largest first: the batch and its halves, or the one that was asked for."""
    if request.micro_batch is not None:
        return [min(request.micro_batch, request.batch_size)]
    sizes = [request.batch_size]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def shares_of(rows: int, batch: int, micro_batch: int) -> tuple[float, ...]:
    """The sizes of micro-batches that occur in an epoch, as parts of `micro_batch`."""
    last = rows % batch or batch
    sizes = {micro_batch, batch % micro_batch, last % micro_batch, min(last, micro_batch)} - {0}
    return tuple(size / micro_batch for size in sorted(sizes))


def _cut_at(request: Request, micro_batch: int, limit: int | None = None) -> Candidate | None:
    room = (request.limit - margin_of(request.limit)) if limit is None else limit
    chain = len(request.chain)
    if request.count is None and request.starts is None and _fits_whole(request, micro_batch, room):
        pieces = [Piece(0, chain, 0, 0)]  # the fewest there can be: no need to try the others
    else:
        pieces = [piece for first in starts_of(request) for piece in _pieces(request, micro_batch, first, room)]
    count = len(request.starts) if request.starts is not None else request.count
    chosen = best_cut(pieces, chain, count)
    if chosen is None:
        return None
    return Candidate(micro_batch, tuple((p.first, p.last, _cost_of(request, micro_batch, p)) for p in chosen))


def _fits_whole(request: Request, micro_batch: int, room: int) -> bool:
    *_, (last, cost) = costs_from(request, micro_batch, 0).items()
    return peak_of(request, cost, 0, last, micro_batch) <= room


def _pieces(request: Request, micro_batch: int, first: int, room: int) -> Iterator[Piece]:
    for last, cost in costs_from(request, micro_batch, first).items():
        if peak_of(request, cost, first, last, micro_batch) > room:
            return
        if cost.trainable or request.starts is not None or last - first == len(request.chain):
            yield Piece(first, last, cost.output_row, cost.slot + cost.train_peak)


def _cost_of(request: Request, micro_batch: int, piece: Piece) -> PartitionCost:
    return costs_from(request, micro_batch, piece.first)[piece.last]


def starts_of(request: Request) -> list[int]:
    """Blocks at which a partition may begin: blocks that learn; what does not stays with what it follows."""
    if request.starts is not None:
        return list(request.starts)
    costs = request.costs_at(micro_batches(request)[0])  # not a small one: BatchNorm refuses a single row
    learning = [number for number, cost in enumerate(costs) if cost.trainable]
    return [0, *(number for number in learning[1:] if request.cuts_behind(costs[number - 1]))]


def costs_from(request: Request, micro_batch: int, first: int) -> dict[int, PartitionCost]:
    """Cost of every partition that may begin at `first`, by its last block (not included), shortest first."""
    key = micro_batch, first
    if key not in request.known:
        costs = request.costs_at(micro_batch)
        ends = {*starts_of(request), len(request.chain)}
        grown = growing(
            costs[first:], request.states[first:], request.loss_of(micro_batch), fused=request.fused,
            heap_below=request.heap_below, shares=shares_of(request.train_rows, request.batch_size, micro_batch),
        )  # fmt: skip
        request.known[key] = {last: cost for last, cost in enumerate(grown, start=first + 1) if last in ends}
    return request.known[key]


def peak_of(request: Request, cost: PartitionCost, first: int, last: int, micro_batch: int) -> int:
    """Predicted peak of the process or device while this partition is resident."""
    reading, writing = buffers_of(request, first, last, micro_batch)
    train = max(cost.train_peak, cost.again_peak if micro_batch < request.batch_size else 0, cost.update_peak)
    work = max(train + reading if cost.trainable else 0, cost.inference_peak + reading + writing)
    return request.runtime + max(request.growth + cost.slot + work, WARM_UP_BYTES if request.host_counts else 0)


def buffers_of(request: Request, first: int, last: int, micro_batch: int) -> tuple[int, int]:
    """(reading, writing) bytes of the boundary cache's buffers that count against the limit."""
    if not request.host_counts:
        return 0, 0
    costs = request.costs_at(micro_batch)
    row = request.input_row if first == 0 else request.cache_row(costs[first - 1])
    writing = 0
    if last < len(request.chain):
        writing = writer_bytes(request.cache_row(costs[last - 1]), micro_batch)
    return reader_bytes(row, max(request.train_rows, request.test_rows), micro_batch), writing


def _does_not_fit(request: Request) -> DoesNotFit:
    smallest_micro = next(size for size in reversed(micro_batches(request)) if _measurable(request, size))
    cost, where, peak = _largest_need(request, smallest_micro)
    smallest = limit_for(peak)
    wanted = _largest_need(request, micro_batches(request)[0])[2]
    lines = [
        f"{where} alone needs {format_size(wanted)} at micro-batch {micro_batches(request)[0]}, and {left_of(request.limit)}.",
        f"  runtime {format_size(request.runtime)}, weights {format_size(cost.weights)}, gradients "
        f"{format_size(cost.gradients)}, optimizer {format_size(cost.state)}, activations at micro-batch {smallest_micro} "
        f"{format_size(cost.saved)}",
        f"  smallest limit that fits: {format_limit(smallest)} (micro-batch {smallest_micro}).",
    ]
    if request.count or request.starts:
        lines.append("  Or leave --partitions out, and the plan cuts where it must.")
    else:
        lines.append("  Or split that block into smaller ones, or use an optimizer with less state (--optimizer sgd).")
    return DoesNotFit("\n".join(lines), smallest=smallest)


def _largest_need(request: Request, micro_batch: int) -> tuple[PartitionCost, str, int]:
    """The partition that needs most when everything is cut as fine as allowed."""
    if request.count is not None:
        best = _best_effort(request, micro_batch, request.count)
        if best is not None:
            return best
    worst: tuple[PartitionCost, str, int] | None = None
    for first in starts_of(request):
        for last, cost in costs_from(request, micro_batch, first).items():  # noqa: B007 (both are used behind the loop)
            if cost.trainable:
                break
        peak = peak_of(request, cost, first, last, micro_batch)
        if worst is None or peak > worst[2]:
            worst = (cost, _named(request, first, last), peak)
    assert worst is not None
    return worst


def too_many(request: Request, count: int) -> OptionError:
    return OptionError(
        f"--partitions {count}: the model has {len(starts_of(request))} blocks at which a partition can begin; "
        f"it cannot be cut into {count}."
    )


def _best_effort(request: Request, micro_batch: int, count: int) -> tuple[PartitionCost, str, int] | None:
    """With the number of partitions given: the least limit under which some cut of so many fits, by bisection."""
    low, high = request.runtime, request.runtime
    high += 4 * sum(cost.weights * 4 + cost.saved + cost.output for cost in request.costs_at(micro_batch)) + (1 << 30)
    if _cut_at(request, micro_batch, high) is None:
        raise too_many(request, count)
    while high - low > 1 << 20:
        middle = (low + high) // 2
        low, high = (low, middle) if _cut_at(request, micro_batch, middle) is not None else (middle, high)
    candidate = _cut_at(request, micro_batch, high)
    assert candidate is not None
    first, last, cost = max(candidate.parts, key=lambda part: peak_of(request, part[2], part[0], part[1], micro_batch))
    return cost, _named(request, first, last), peak_of(request, cost, first, last, micro_batch)


def _named(request: Request, first: int, last: int) -> str:
    block = request.chain[first]
    return str(block) if last - first == 1 else f"blocks {first}..{last - 1}, from {block.kind} on,"


def _reasons(request: Request, best: Candidate) -> tuple[str, ...]:
    count = len(best.parts)
    reasons = []
    if request.starts is not None:
        reasons.append(f"{count} partition(s): as asked")
    elif count > 1:
        asked = "as asked" if request.count else f"the fewest that stay under {format_size(request.limit)}"
        reasons.append(f"{count} partitions: {asked}; cut where the boundary is smallest, then in balance")
    else:
        reasons.append("1 partition: the whole network fits, so nothing is cut")
    if best.micro_batch < request.batch_size:
        asked = "as asked" if request.micro_batch else "the largest that fits with so few partitions"
        reasons.append(f"micro-batch {best.micro_batch} of {request.batch_size}: {asked}")
    return tuple(reasons)


def fingerprint(chain: Chain, costs: Sequence[BlockCost], input_shape: tuple[int, ...]) -> str:
    """Equal for chains with the same tensors and the same input."""
    digest = hashlib.blake2b(repr(input_shape).encode(), digest_size=8)
    for block, cost in zip(chain, costs, strict=True):
        tensors = [(spec.name, spec.shape, str(spec.dtype)) for spec in cost.layout.specs]
        digest.update(repr((block.name, tensors)).encode())
    return digest.hexdigest()


def as_text_rows(plan: Plan) -> list[dict[str, Any]]:
    """One dict of printable cells for each partition."""
    return [
        {
            "partition": str(number),
            "blocks": f"{part.first}..{part.last - 1}",
            "weights": format_size(part.weights),
            "gradients": format_size(part.gradients),
            "optimizer": format_size(part.state),
            "activations": format_size(part.activations),
            "boundary row": format_size(part.boundary_row),
            "micro-batch": str(part.micro_batch),
            "home": part.tier,
            "peak": format_size(part.peak),
        }
        for number, part in enumerate(plan.partitions)
    ]
