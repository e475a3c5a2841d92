"""The plan: which cut, which micro-batch, which tiers, what it will take, and why. Made before anything is trained.

A plan is a frozen value of ints. It can be printed, saved as JSON, compared and reused; the run is held to it.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Self

from seqpart.errors import OptionError
from seqpart.methods.method import Method
from seqpart.model.packs import DEVICE, Tiers, tiers_of
from seqpart.profile.blocks import BlockCost
from seqpart.schema import Finite, Positive, Whole, as_type, word_of
from seqpart.text import parsed
from seqpart.units import format_size

FORMAT = 5
_RENAMED = {"relay": "boundary_tier", "given": "live_bytes"}
"""Fields of format 2, which checkpoints of 0.2.0 hold. It had kept graphs from one partition on, and none that stayed."""
AGAIN, KEPT = "again", "kept"
Graph = Annotated[str, word_of(AGAIN, KEPT, "pinned", "ram", "disk")]
"""What FORWARD leaves of a graph: nothing, so that BACKWARD computes it again; all of it, on the device; or its saved tensors,
which wait in a tier."""
BoundaryTier = Annotated[str, word_of(DEVICE, "host", "disk")]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionPlan:
    """Blocks first..last (last not included), and what the partition takes at its micro-batch, in bytes."""

    first: Whole
    last: Positive
    micro_batch: Positive
    weights: Whole
    state: Whole
    slot: Whole
    gradients: Whole
    activations: Whole
    buffers: Whole
    """Host buffers of the boundary cache, where they count against the limit."""
    boundary_row: Whole
    peak: Whole
    """Of the whole process (CPU) or device (CUDA), runtime included."""
    tier: str
    stays: bool = False
    """On the device from the beginning of a phase to its end, while others come and go."""
    weights_stay: bool = False
    """Whether its weights do so, and its optimizer state comes and goes."""
    graph: Graph = AGAIN
    """What FORWARD leaves of it for BACKWARD."""
    boundary_tier: BoundaryTier = DEVICE
    """Where what it is the first to take from others waits within an update, and its gradient."""
    why: str = ""
    """Why it stays or comes in turn, and why its graph waits where it does."""
    rows_in_memory: bool = False
    """Whether the rows that enter it lie in memory under the limit, and are not read from the disk in every epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run will do under `limit`. `fingerprint` names the model and input shape that it was made for."""

    method: str
    device: str
    limit: Whole
    margin: Whole
    runtime: Whole
    """Taken by the libraries (CPU) or the context (CUDA) before any training; measured."""
    growth: Whole
    """Allowed for what kernels take inside one operation, and for small objects."""
    full_state: Whole
    """Weights, gradients and optimizer state of the whole network: what plain training must hold."""
    parameters: Whole
    """That learn."""
    partitions: tuple[PartitionPlan, ...]
    host_limit: Whole
    disk_bytes: Whole
    seconds: Finite
    reasons: tuple[str, ...]
    fingerprint: str
    slots: Whole
    """Partitions that may be on the device at once."""
    update_seconds: Finite = 0.0
    """Of one update of an exact method, once it has begun."""
    heap: Whole = 0
    """Bytes of the C library's heap, which stays as large as it is; 0: memory leaves the process when it is free."""
    tile: Whole = 0
    """Layers with a weight of more bytes are tiles of it, which have at most so many; 0: none is."""
    frozen: Whole = 0
    """Parameters that do not learn."""
    live_bytes: Whole = 0
    """Weights of modules given alive: all in memory when the run begins, before it empties them, and when it ends."""

    @property
    def peak(self) -> int:
        return max(part.peak for part in self.partitions)

    @property
    def stays(self) -> frozenset[int]:
        return frozenset(p for p, part in enumerate(self.partitions) if part.stays)

    @property
    def weights_stay(self) -> frozenset[int]:
        return frozenset(p for p, part in enumerate(self.partitions) if part.weights_stay)

    @property
    def keeps(self) -> frozenset[int]:
        return frozenset(p for p, part in enumerate(self.partitions) if part.graph != AGAIN)

    @property
    def offloads(self) -> frozenset[int]:
        """Those of them whose graphs do not wait on the device."""
        return frozenset(p for p, part in enumerate(self.partitions) if part.graph not in (AGAIN, KEPT))

    @property
    def rows_in_memory(self) -> frozenset[int]:
        return frozenset(p for p, part in enumerate(self.partitions) if part.rows_in_memory)

    @property
    def graphs_at_host(self) -> frozenset[int]:
        """Those of these whose graphs wait in host memory: others' are on the disk."""
        return frozenset(p for p in self.offloads if self.partitions[p].graph != "disk")

    @property
    def tiers(self) -> Tiers:
        """Of the partitions' boundaries."""
        return tiers_of(part.boundary_tier for part in self.partitions)

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(part.first for part in self.partitions)

    @property
    def micro_batch(self) -> int:
        return max(part.micro_batch for part in self.partitions)

    def untouched(self, costs: Sequence[BlockCost], batch: int) -> int:
        """Bytes that graphs of batches of `batch` rows, and a block at work, reserve on the device at most and do not hold.

        costs: of all blocks.
        """
        found = max(cost.untouched_peak for cost in costs)
        for part in self.partitions:
            micro_batches = -(-batch // self.micro_batch) if part.graph == KEPT else 1
            found += micro_batches * sum(cost.untouched for cost in costs[part.first : part.last])
        return found

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, name: str) -> Self:
        """Raises OptionError, naming the file, for anything that `to_json` did not write."""
        try:
            return cls.read(text)
        except ValueError as error:
            raise OptionError(f"--plan: {name} is not a plan that --plan-out wrote ({error}).") from None

    @classmethod
    def read(cls, text: str) -> Self:
        """Raises ValueError, in words."""
        found = parsed(text)
        try:
            found = _of_today(found)
        except (KeyError, TypeError, AttributeError):
            raise ValueError("it has not the fields of a plan") from None
        plan = as_type(cls, found)
        edges = [0, *(part.last for part in plan.partitions)]
        if not plan.partitions or [part.first for part in plan.partitions] != edges[:-1] or edges != sorted(set(edges)):
            raise ValueError("its partitions do not follow each other")
        if twice := [part.first for part in plan.partitions if part.stays and part.weights_stay]:
            raise ValueError(f"the partition from block {twice[0]} on stays as a whole, and its weights alone do")
        return plan


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanWording:
    """What a plan says of what it was given, and did not choose."""

    method: str = ""
    """Of one that `auto` might have chosen anew."""
    cut: str = "as asked"
    micro_batch: str = "as asked"
    otherwise: str = (
        "not all is as the plan says: partitions and weights that stay, and offloaded graphs, go with --method auto; what does "
        "not fit, or cannot be, is chosen anew"
    )
    """Where it could not take all answers of a saved plan."""


AS_ASKED = PlanWording()


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What a plan is asked for, beside what was checked and measured: whoever asks again makes one with `replace`."""

    methods: tuple[Method, ...]
    """To choose from."""
    limit: int
    label_bytes: int
    """Synthetic labels that take more are drawn where they are needed; a run that goes on keeps to what it began with,
    since products with pieces round otherwise."""
    micro_batch: int | None = None
    """None: that of the settings."""
    starts: tuple[int, ...] | None = None
    """First blocks of the partitions; None: as the settings say."""
    trained_epochs: tuple[float, ...] = ()
    """Of the first partitions, in a run that goes on after they were trained."""
    may_keep_heap: bool = True
    """Until memory ran out where it was kept."""
    spare: int = 0
    """Bytes of the limit that the plan must leave, because one that fitted ran out of memory."""
    saved: Plan | None = None
    """A plan whose answers are to be taken again."""
    told: PlanWording = AS_ASKED

    @property
    def recovery(self) -> Plan | None:
        """The saved plan for the second stage of `sil`, whose answers it has: that streams."""
        return None if self.saved is None else replace(self.saved, method="streamed")


def _of_today(found: dict[str, Any]) -> dict[str, Any]:
    """What an older version wrote, with the fields of this one. Raises ValueError for another format, and whatever comes of
    other types."""
    version = found.pop("format")
    if version not in (2, 3, 4, FORMAT):
        raise ValueError(f"format {version}")
    parts = found["partitions"]
    if version == 2:
        since = found.pop("keeps_graph_from")
        found = {_RENAMED.get(name, name): value for name, value in found.items()}
        parts = [{**part, "graph": KEPT if since is not None and since <= p else AGAIN} for p, part in enumerate(parts)]
    elif version == 3:  # it had two answers for one question, and the disk alone beside the device
        parts = [
            {
                **{name: value for name, value in part.items() if name not in ("keeps_graph", "offloads_graph")},
                "graph": "disk" if part.get("offloads_graph") else KEPT if part.get("keeps_graph") else AGAIN,
            }
            for part in parts
        ]  # fmt: skip
    if version < 5:
        tier = found.pop("boundary_tier")  # one for all
        parts = [{**part, "boundary_tier": tier} for part in parts]
    return {**found, "partitions": parts}


def as_text_rows(plan: Plan) -> list[dict[str, Any]]:
    """One dict of printable cells for each partition."""
    choices = bool(plan.stays or plan.weights_stay or plan.keeps or plan.tiers) and len(plan.partitions) > 1
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
            **(_choices(plan, number) if choices else {}),
            "peak": format_size(part.peak),
        }
        for number, part in enumerate(plan.partitions)
    ]


def _choices(plan: Plan, number: int) -> dict[str, str]:
    """The last partition runs forward in its backward: its graph is there."""
    part, last = plan.partitions[number], len(plan.partitions) - 1
    graph = KEPT if part.graph == AGAIN and number == last else part.graph
    where = {"boundary": part.boundary_tier} if plan.tiers else {}
    device = "stays" if part.stays else "weights stay" if part.weights_stay else "in turn"
    return {"device": device, "graph": graph, **where}
