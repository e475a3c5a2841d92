"""The plan: which cut, which micro-batch, which tiers, what it will take, and why. Made before anything is trained.

A plan is a frozen value of ints. It can be printed, saved as JSON, compared and reused; the run is held to it.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
"""Renamed fields of format 2, which checkpoints of 0.2.0 hold: it kept graphs from one partition on, and none stayed."""
RECOMPUTED, KEPT = "again", "kept"
Graph = Annotated[str, word_of(RECOMPUTED, KEPT, "pinned", "ram", "disk")]
"""The part of a graph that FORWARD leaves: nothing, so that BACKWARD recomputes it; all of it, on the device; or its saved
tensors, offloaded to a tier."""
BoundaryTier = Annotated[str, word_of(DEVICE, "host", "disk")]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionPlan:
    """Plan of one partition: blocks first..last (last not included), and the bytes that it takes at its micro-batch."""

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
    """Peak bytes of the whole process (CPU) or device (CUDA), runtime included."""
    tier: str
    stays: bool = False
    """True if it is on the device from the beginning of a phase to its end, while others come and go."""
    weights_stay: bool = False
    """True if its weights stay on the device, while its optimizer state comes and goes."""
    graph: Graph = RECOMPUTED
    """The part of the graph that FORWARD leaves for BACKWARD."""
    boundary_tier: BoundaryTier = DEVICE
    """Place of its boundary (values that it is the first to take), and of their gradients, within an update."""
    why: str = ""
    """Why it stays or comes in turn, and why its graph waits where it does."""
    optimizer_on: str = DEVICE
    """Place where its optimizer step is computed: `device` or `host`."""
    rows_in_memory: bool = False
    """True if the rows that enter it lie in memory under the limit, instead of being read from the disk in every epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A plan of a run under `limit`. `fingerprint` names the model and input shape that it was made for."""

    method: str
    device: str
    limit: Whole
    margin: Whole
    runtime: Whole
    """Bytes taken by the libraries (CPU) or the context (CUDA) before any training; measured."""
    growth: Whole
    """Bytes allowed for workspaces of kernels, and for small objects."""
    full_state: Whole
    """Bytes of weights, gradients and optimizer state of the whole network: what plain training must hold."""
    parameters: Whole
    """Number of trainable parameters."""
    partitions: tuple[PartitionPlan, ...]
    host_limit: Whole
    disk_bytes: Whole
    seconds: Finite
    reasons: tuple[str, ...]
    fingerprint: str
    slots: Whole
    """Partitions that may be on the device at once."""
    update_seconds: Finite = 0.0
    """Seconds of one update of an exact method, after the first."""
    heap: Whole = 0
    """Bytes of the C library's kept heap; 0: freed memory leaves the process."""
    tile: Whole = 0
    """Most bytes of a tile's weight: layers with larger weights are cut into tiles; 0: none is."""
    loss_chunks: Positive = 1
    """Chunks of positions that the last layer and the loss are computed over; 1: all logits of a micro-batch at once."""
    frozen: Whole = 0
    """Number of frozen parameters."""
    live_bytes: Whole = 0
    """Bytes of modules given alive: all in memory when the run begins, before it empties them, and when it ends."""

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
        return frozenset(p for p, part in enumerate(self.partitions) if part.graph != RECOMPUTED)

    @property
    def offloads(self) -> frozenset[int]:
        return frozenset(p for p, part in enumerate(self.partitions) if part.graph not in (RECOMPUTED, KEPT))

    @property
    def host_steps(self) -> frozenset[int]:
        """Partitions whose optimizer step is computed on the host."""
        return frozenset(p for p, part in enumerate(self.partitions) if part.optimizer_on != DEVICE)

    @property
    def rows_in_memory(self) -> frozenset[int]:
        return frozenset(p for p, part in enumerate(self.partitions) if part.rows_in_memory)

    @property
    def graphs_at_host(self) -> frozenset[int]:
        """Partitions whose graphs are offloaded to host memory: others go to the disk."""
        return frozenset(p for p in self.offloads if self.partitions[p].graph != "disk")

    @property
    def tiers(self) -> Tiers:
        """Tiers of the partitions' boundaries; () if all wait on the device."""
        return tiers_of(part.boundary_tier for part in self.partitions)

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(part.first for part in self.partitions)

    @property
    def micro_batch(self) -> int:
        return max(part.micro_batch for part in self.partitions)

    def untouched(self, costs: Sequence[BlockCost], batch: int) -> int:
        """Most bytes that graphs of batches of `batch` rows, and a block at work, reserve on the device without touching them.

        costs: costs of all blocks.
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
        """Reads a plan from JSON. Raises ValueError that says what is wrong."""
        found = parsed(text)
        try:
            found = _of_today(found)
        except (KeyError, TypeError, AttributeError):
            raise ValueError("it does not have the fields of a plan") from None
        plan = as_type(cls, found)
        edges = [0, *(part.last for part in plan.partitions)]
        if not plan.partitions or [part.first for part in plan.partitions] != edges[:-1] or edges != sorted(set(edges)):
            raise ValueError("its partitions do not follow each other from block 0 on, without gaps")
        if twice := [part.first for part in plan.partitions if part.stays and part.weights_stay]:
            raise ValueError(f"the partition from block {twice[0]} on has both `stays` and `weights_stay`: expected one")
        return plan


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanWording:
    """Words in a plan's reasons for what was given to it and not chosen by it."""

    method: str = ""
    """Reason for the method, where it was fixed though `auto` might have chosen anew."""
    cut: str = "as asked"
    micro_batch: str = "as asked"
    otherwise: str = (
        "not all of the plan is reused: partitions and weights that stay, and offloaded graphs, go with --method auto; "
        "what does not fit, or is not possible, is chosen again"
    )
    """Said where not all choices of a saved plan could be reused."""


AS_ASKED = PlanWording()


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """A request for a plan, beside what was checked and measured. Make another one with `replace`."""

    methods: tuple[Method, ...]
    limit: int
    label_bytes: int
    """Synthetic labels of more bytes are drawn where they are needed; a resumed run keeps the value that it began with, since
    products with pieces round otherwise."""
    micro_batch: int | None = None
    """Rows per micro-batch; None: as the settings say."""
    starts: tuple[int, ...] | None = None
    """First blocks of the partitions; None: as the settings say."""
    trained_epochs: tuple[float, ...] = ()
    """Epochs of the first partitions, in a resumed run that has trained them already."""
    may_keep_heap: bool = True
    """True until memory runs out with a kept heap."""
    spare: int = 0
    """Bytes of the limit that the plan must leave, because one that fitted ran out of memory."""
    saved: Plan | None = None
    """A plan whose choices are to be reused."""
    wording: PlanWording = AS_ASKED
    loss_chunks: Positive = 1
    """Chunks of positions that the loss is computed over."""
    draft: bool = False
    """True for a plan that only says which blocks, with how many rows, are to be run for real before the plan is made."""


def _of_today(found: dict[str, Any]) -> dict[str, Any]:
    """Converts a plan of an older format to the fields of this one. Raises ValueError for another format; wrong types raise
    whatever they cause."""
    version = found.pop("format")
    if version not in (2, 3, 4, FORMAT):
        raise ValueError(f"its format is {version}; expected 2 to {FORMAT}")
    parts = found["partitions"]
    if version == 2:
        since = found.pop("keeps_graph_from")
        found = {_RENAMED.get(name, name): value for name, value in found.items()}
        parts = [{**part, "graph": KEPT if since is not None and since <= p else RECOMPUTED} for p, part in enumerate(parts)]
    elif version == 3:  # it had two fields for a graph, which could wait on the disk or the device alone
        parts = [
            {
                **{name: value for name, value in part.items() if name not in ("keeps_graph", "offloads_graph")},
                "graph": "disk" if part.get("offloads_graph") else KEPT if part.get("keeps_graph") else RECOMPUTED,
            }
            for part in parts
        ]
    if version < 5:
        tier = found.pop("boundary_tier")  # one for all
        parts = [{**part, "boundary_tier": tier} for part in parts]
    return {**found, "partitions": parts}


def as_text_rows(plan: Plan) -> list[dict[str, Any]]:
    """One dict of printable cells for each partition."""
    choices = bool(plan.stays or plan.weights_stay or plan.keeps or plan.tiers or plan.host_steps) and len(plan.partitions) > 1
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
    """Cells for the choices of a partition. The last one runs forward and backward in one step: its graph is always kept."""
    part, last = plan.partitions[number], len(plan.partitions) - 1
    graph = KEPT if part.graph == RECOMPUTED and number == last else part.graph
    where = {"boundary": part.boundary_tier} if plan.tiers else {}
    device = "stays" if part.stays else "weights stay" if part.weights_stay else "in turn"
    step = {"optimizer step": part.optimizer_on} if plan.host_steps else {}
    return {"device": device, "graph": graph, **where, **step}
