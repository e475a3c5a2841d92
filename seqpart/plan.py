"""The plan: which cut, which micro-batch, which tiers, what it will take, and why. Made before anything is trained.

A plan is a frozen value of ints. It can be printed, saved as JSON, compared and reused; the run is held to it.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self, TypeVar

from seqpart.activations import reader_bytes, writer_bytes
from seqpart.blocks import Chain
from seqpart.costs import BlockCost
from seqpart.errors import DataError, ModelError, OptionError
from seqpart.layout import Layout
from seqpart.meter import WARM_UP_BYTES, left_of, limit_for, refused
from seqpart.rows import RowLayout
from seqpart.simulate import LossCost, Means, PartitionCost, Rates, growing
from seqpart.textfile import parsed
from seqpart.units import format_size

T = TypeVar("T")

FORMAT = 2


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
    given: int = 0
    """Weights of modules given alive: all in memory when the run begins, before it empties them, and when it ends."""

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
            found = parsed(text)
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
    counted_at: Callable[[int], Sequence[BlockCost]]
    """The same without what real runs added, which is other bytes in every process."""
    states: Sequence[Layout]
    loss_of: Callable[[int], LossCost]
    fused: bool
    heap_below: int
    batch_size: int
    """The largest, where partitions differ in it."""
    the_batch: int | None
    """Rows of an update; None where partitions differ in it."""
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
    given: int = 0
    """Bytes of modules given alive, which are in memory before and after everything else."""
    known: dict[tuple[int, int, bool], dict[int, PartitionCost]] = field(default_factory=dict, compare=False)
    """Of `costs_from`: what it has found already."""

    def peak(self, work: int) -> int:
        """Of the process or device, where a partition takes `work` bytes."""
        warm_up = WARM_UP_BYTES if self.host_counts else 0
        return self.runtime + max(self.growth + work, warm_up, self.given + self.growth if self.given else 0)


ALONE = Means()
"""One slot, boundaries on the device."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A cut at one micro-batch: first block, last block and cost of every partition; and how they are run."""

    micro_batch: int
    parts: tuple[tuple[int, int, PartitionCost], ...]
    means: Means = ALONE
    keeps_graph_from: int | None = None


def measurable(request: Request, micro_batch: int) -> bool:
    """Whether the model takes so few rows at a time, and one where the division leaves one: BatchNorm refuses that.

    Raises ModelError for the largest micro-batch, where no other would help.
    """
    batch, is_largest = request.the_batch, micro_batch == micro_batches(request)[0]
    try:
        request.costs_at(micro_batch)
    except (ModelError, DataError):  # the second of the block that takes the data's rows
        if is_largest:
            raise
        return False
    if batch is None or 1 not in sizes_of(request.train_rows, batch, min(micro_batch, batch)):
        return True
    try:
        request.costs_at(1)
    except (ModelError, DataError) as error:
        if is_largest:
            raise ModelError(
                f"{request.train_rows} rows in batches of {batch}, {micro_batch} at a time, leave a single row, and {error} "
                "Give another --batch-size or --micro-batch-size."
            ) from None
        return False
    return True


def fewest_rows(request: Request) -> int:
    """The smallest micro-batch that the model takes."""
    return next(rows for rows in reversed(micro_batches(request)) if measurable(request, rows))


def micro_batches(request: Request) -> list[int]:
    """Candidates, largest first: the batch and its halves, or the one that was asked for."""
    if request.micro_batch is not None:
        return [min(request.micro_batch, request.batch_size)]
    sizes = [request.batch_size]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def sizes_of(rows: int, batch: int, micro_batch: int) -> set[int]:
    """The sizes of micro-batches that occur in an epoch."""
    last = rows % batch or batch
    return {micro_batch, batch % micro_batch, last % micro_batch, min(last, micro_batch)} - {0}


def shares_of(rows: int, batch: int, micro_batch: int) -> tuple[float, ...]:
    """The sizes of micro-batches that occur in an epoch, as parts of `micro_batch`."""
    return tuple(size / micro_batch for size in sorted(sizes_of(rows, batch, micro_batch)))


def starts_of(request: Request) -> list[int]:
    """Blocks at which a partition may begin: blocks that learn; what does not stays with what it follows."""
    if request.starts is not None:
        return list(request.starts)
    costs = request.costs_at(micro_batches(request)[0])  # not a small one: BatchNorm refuses a single row
    learning = [number for number, cost in enumerate(costs) if cost.trainable]
    return [0, *(number for number in learning[1:] if request.cuts_behind(costs[number - 1]))]


def costs_from(request: Request, micro_batch: int, first: int, *, counted: bool = False) -> dict[int, PartitionCost]:
    """Cost of every partition that may begin at `first`, by its last block (not included), shortest first."""
    key = micro_batch, first, counted
    if key not in request.known:
        costs = (request.counted_at if counted else request.costs_at)(micro_batch)
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
    return request.peak(cost.slot + work)


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


def too_many(request: Request, count: int) -> OptionError:
    return OptionError(
        f"--partitions {count}: the model has {len(starts_of(request))} blocks at which a partition can begin; "
        f"it cannot be cut into {count}."
    )


def refuse_given(request: Request, peak: int) -> None:
    """Raises DoesNotFit where `peak` is what a model given alive takes, and no cut would help."""
    if request.given and peak <= request.peak(0):
        raise refused(
            f"the model was given alive, which needs {format_size(peak)}, and {left_of(request.limit)}.\n"
            f"  Its weights, {format_size(request.given)}, are all in memory when the run begins and when it ends, beside the "
            f"runtime of {format_size(request.runtime)}.\n"
            "  Give factories, which build one block at a time, or give more.",
            limit_for(peak),
        )


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
