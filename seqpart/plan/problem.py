"""The planning problem: the chain and its costs, the machine and the limit; and what follows from these alone."""

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from seqpart.data.boundary_cache import writer_bytes
from seqpart.data.reader import reader_bytes
from seqpart.data.row_packs import RowPack
from seqpart.device.limit import WARM_UP_BYTES, growth_beside, left_of, limit_for, margin_of, refused, what_helps
from seqpart.device.pages import PAGE, aligned_bytes, round_up
from seqpart.errors import DataError, ModelError, OptionError
from seqpart.methods.method import Method
from seqpart.model.blocks import Chain
from seqpart.model.optimizers import Optimizer
from seqpart.model.packs import DEVICE, ROWS, BoundaryRouting, Tiers
from seqpart.plan.plan import Plan
from seqpart.plan.simulator import Resources
from seqpart.profile.blocks import BlockCost
from seqpart.profile.machine import Speeds
from seqpart.profile.partition import LossCost, PartitionCost, prefix_costs
from seqpart.store.graph_ranges import GRAPH_BUFFERS
from seqpart.store.host_pool import first_piece, pieces_for
from seqpart.store.layout import Layout
from seqpart.store.row_file import RowLayout
from seqpart.units import format_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The machine that a plan is made for: its speeds, and the memory that other things hold there."""

    device: str
    host_counts: bool
    """True if host buffers count against the limit (CPU), False if not (CUDA)."""
    runtime: int
    """Bytes that libraries hold."""
    growth: int
    """Most bytes that kernels may keep in the run."""
    live_bytes: int = 0
    """Bytes of modules given alive, which are in memory before and after everything else."""
    export_bytes: int = 0
    """Bytes that an export in mid-run takes, with nothing else on the device; 0: there is none."""
    heap_below: int
    """Tensors of fewer bytes come from the allocator's heap."""
    may_keep_heap: bool = False
    """True if freed memory may stay in the process for later tensors."""
    speeds: Speeds
    contention: float = 0.0
    """Slowdown of the computation, in seconds per second of overlapped transfer."""
    boundary_tiers: tuple[str, ...]
    """Places where boundaries may wait within an update, the fastest first."""
    graph_tiers: tuple[str, ...] = ()
    """Places for offloaded graphs, the fastest first: host, disk."""
    host_room: int
    """Bytes of host memory that boundaries may take."""
    host_budget: int = 0
    """Bytes of host memory for boundaries, homes and rows."""

    def peak(self, work: int, heap: int = 0) -> int:
        """Peak of the process or device while a partition takes `work` bytes, beside a kept heap of `heap` bytes."""
        least, work = WARM_UP_BYTES if self.host_counts else 0, max(work, self.export_bytes)
        return max(self.runtime + max(heap + work, least), self.beside(max(work, self.live_bytes)))

    def beside(self, nbytes: int) -> int:
        """Peak of the process or device that holds `nbytes` and nothing else, with the allowance for growth."""
        return self.runtime + nbytes + (growth_beside(self.growth, nbytes) if self.host_counts else self.growth)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Everything that a plan is made from: the chain and its costs, the machine, the limit and the settings."""

    chain: Chain
    method: Method
    """The method, or the first of those that the plan chooses from."""
    machine: Machine
    limit: int
    costs_at: Callable[[int], Sequence[BlockCost]]
    """Block costs at a micro-batch."""
    counted_at: Callable[[int], Sequence[BlockCost]]
    """Block costs at a micro-batch without what real runs added, which differs from process to process."""
    states: Sequence[Layout]
    loss_of: Callable[[int], LossCost]
    optimizer: Optimizer | None
    """The one with the most state, of those that a partition may get; it has the `states`."""
    batch_size: int
    """Rows of an update; the largest, where partitions differ in it."""
    the_batch: int | None
    """Rows of an update; None where partitions differ in it."""
    micro_batch: int | None
    starts: tuple[int, ...] | None
    count: int | None
    defers_updates: bool
    label_row: int
    """Bytes of one row's labels on the device."""
    input_row: RowLayout
    row_pack: Callable[[BlockCost], RowPack]
    """Layout of a row of the boundary cache after a block."""
    can_cut_after: Callable[[BlockCost], bool]
    """True if a partition may end with this block."""
    learns_alone: Callable[[BlockCost], bool] = lambda _: True
    """True if no other differentiable value crosses the cut after this block."""
    train_rows: int
    test_rows: int
    saved: Plan | None = None
    """A saved plan whose choices are reused if they fit."""
    auto: bool = False
    """True if each partition may stay on the device while others stream."""
    steps: tuple[bool, ...] = (False,)
    """Values of `host_steps` to choose from."""
    host_steps: bool = False
    """True if optimizer steps are computed on the host wherever they can be."""
    draft: bool = False
    """True if memory that is left over need not be spent well."""
    pair_rows: Callable[[int], int] = lambda rows: rows
    """Most rows of one pair of classes in a micro-batch."""
    known: dict[tuple[int, int, bool], tuple[list[PartitionCost], Iterator[PartitionCost]]] = field(
        default_factory=dict, compare=False
    )
    """Cache of `cost_of`."""
    placed: "dict[tuple[object, ...], HostPlaces]" = field(default_factory=dict, compare=False)
    """Cache of `host_places`."""

    @property
    def available(self) -> int:
        """Bytes of the limit that a plan may use."""
        return self.limit - margin_of(self.limit)


Part = tuple[int, int, PartitionCost]
"""(first block, last block (not included), cost) of a partition."""
Parts = tuple[Part, ...]
ALONE = Resources()
"""One slot, boundaries on the device."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A cut at one micro-batch, and how its partitions are run."""

    micro_batch: int
    parts: Parts
    resources: Resources = ALONE
    keeps: frozenset[int] = frozenset()
    """Partitions that keep their graphs."""
    offloads: frozenset[int] = frozenset()
    """Partitions of `keeps` whose graphs are offloaded."""
    heap: int = 0
    """Bytes of a kept heap; 0: freed memory leaves the process."""
    rows: Mapping[int, int] = field(default_factory=dict, hash=False)
    """Bytes of the rows that enter a partition, for partitions whose rows lie in memory."""
    why: tuple[str, ...] = ()
    """Reasons for each partition's choices."""
    seconds: float = 0.0
    """Seconds of one update, where the plan was chosen by them."""

    @property
    def heap_reason(self) -> list[str]:
        text = "freed memory stays in the process for later tensors: there is room for a heap of"
        return [f"{text} {format_size(self.heap)}"] if self.heap else []


def measurable(problem: Problem, micro_batch: int) -> bool:
    """True if the model takes `micro_batch` rows, and a single one where the division leaves that: BatchNorm refuses it.

    Raises ModelError for the largest micro-batch, where no other would help.
    """
    batch, is_largest = problem.the_batch, micro_batch == micro_batches(problem)[0]
    try:
        problem.costs_at(micro_batch)
    except (ModelError, DataError):  # DataError: from the block that takes the data's rows
        if is_largest:
            raise
        return False
    if batch is None or 1 not in sizes_of(problem.train_rows, batch, min(micro_batch, batch)):
        return True
    try:
        problem.costs_at(1)
    except (ModelError, DataError) as error:
        if is_largest:
            raise ModelError(
                f"{problem.train_rows} rows in batches of {batch} and micro-batches of {micro_batch} leave a single row, and "
                f"{error.with_flags} Give another --batch-size or --micro-batch-size."
            ) from None
        return False
    return True


def possible_micro_batches(problem: Problem) -> list[int]:
    """Returns the candidates of `micro_batches` that the model takes."""
    return [rows for rows in micro_batches(problem) if measurable(problem, rows)]


def micro_batches(problem: Problem) -> list[int]:
    """Candidate micro-batches, largest first: the batch and its halves, or the one that was asked for."""
    if problem.micro_batch is not None:
        return [min(problem.micro_batch, problem.batch_size)]
    sizes = [problem.batch_size]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def sizes_of(rows: int, batch: int, micro_batch: int) -> set[int]:
    last = rows % batch or batch
    return {micro_batch, batch % micro_batch, last % micro_batch, min(last, micro_batch)} - {0}


def shares_of(rows: int, batch: int, micro_batch: int) -> tuple[float, ...]:
    """The sizes of micro-batches that occur in an epoch, as parts of `micro_batch`."""
    return tuple(size / micro_batch for size in sorted(sizes_of(rows, batch, micro_batch)))


def starts_of(problem: Problem) -> list[int]:
    """Blocks at which a partition may begin: those with parameters, own or shared. A block without any joins the one before
    it; so does a frozen one where every partition must learn, as it has a loss of its own or is part of a subnet."""
    if problem.starts is not None:
        return list(problem.starts)
    costs = problem.costs_at(micro_batches(problem)[0])  # not a small one: BatchNorm refuses a single row
    begin = [
        number for number, cost in enumerate(costs) if cost.trainable or cost.tied or (cost.frozen and problem.method.exact)
    ]
    return [0, *(number for number in begin[1:] if problem.can_cut_after(costs[number - 1]))]


def cost_of(problem: Problem, micro_batch: int, first: int, last: int, *, counted: bool = False) -> PartitionCost:
    """Cost of blocks first..last (last not included) as one partition. Takes time linear in its blocks, and is cached."""
    key = micro_batch, first, counted
    if key not in problem.known:
        costs = (problem.counted_at if counted else problem.costs_at)(micro_batch)
        grown = prefix_costs(
            costs[first:], problem.states[first:], problem.loss_of(micro_batch), optimizer=problem.optimizer,
            in_lists=not problem.machine.host_counts, heap_below=problem.machine.heap_below,
            shares=shares_of(problem.train_rows, problem.batch_size, micro_batch),
        )  # fmt: skip
        problem.known[key] = [], grown
    found, more = problem.known[key]
    found += itertools.islice(more, max(0, last - first - len(found)))
    return found[last - first - 1]


def costs_from(problem: Problem, micro_batch: int, first: int) -> dict[int, PartitionCost]:
    """Cost of every partition that may begin at `first`, by its last block (not included), shortest first."""
    ends = [start for start in [*starts_of(problem), len(problem.chain)] if start > first]
    return {last: cost_of(problem, micro_batch, first, last) for last in ends}


def parts_of(problem: Problem, micro_batch: int, starts: Sequence[int]) -> Parts:
    ends = [*starts[1:], len(problem.chain)]
    return tuple((first, last, cost_of(problem, micro_batch, first, last)) for first, last in zip(starts, ends, strict=True))


def buffers_of(
    problem: Problem, first: int, last: int, micro_batch: int, *, reads_memory: bool = False, writes_memory: bool = False
) -> tuple[int, int]:
    """(reading, writing) bytes of the boundary cache's buffers that count against the limit; fewer where rows lie in memory."""
    if not problem.machine.host_counts:
        return 0, 0
    costs, chain = problem.costs_at(micro_batch), problem.chain
    read = RowPack.of_one(ROWS, problem.input_row) if first in chain.begins else problem.row_pack(costs[first - 1])
    count = max(problem.train_rows, problem.test_rows)
    reading = reader_bytes(read.layout, count, micro_batch, in_memory=reads_memory) + read.working_bytes(micro_batch)
    if last in chain.ends:
        return reading, 0
    written = problem.row_pack(costs[last - 1])
    writing = writer_bytes(written.layout, micro_batch, in_memory=writes_memory) + written.working_bytes(micro_batch)
    return reading, writing


def too_many(problem: Problem, count: int) -> OptionError:
    found = f"the model has {len(starts_of(problem))} blocks at which a partition can begin"
    return OptionError(f"--partitions {count}: {found}; it cannot be cut into {count}.{whole_parts(problem)}")


def whole_parts(problem: Problem) -> str:
    """Says why modules with layers of their own are one block each, in lines of their own."""
    return "".join(f"\n  One block stays whole: {why}." for why in problem.chain.whole_parts)


def refuse_given(problem: Problem, peak: int) -> None:
    """Raises DoesNotFit if a model given alive takes `peak` by itself, so that no cut would help."""
    runtime, alive = problem.machine.runtime, problem.machine.live_bytes
    if alive and peak <= problem.machine.beside(alive):
        raise refused(
            f"the model was given alive, as modules that hold their weights: that needs {format_size(peak)}, and "
            f"{left_of(problem.limit)}.\n"
            f"  Its weights, {format_size(alive)}, are all in memory when the run begins and when it ends, together with the "
            f"runtime of {format_size(runtime)}.\n"
            "  Build it inside `with seqpart.parameters_in_file(DIR):`, or give factories, which build one block at a time, or "
            "a larger limit.",
            limit_for(peak),
        )


def advice(problem: Problem, peak: int, cost: PartitionCost, *, finer: bool) -> str:
    """What would help where the smallest plan needs `peak` bytes. cost: its largest partition's."""
    rows = cost.saved if problem.micro_batch and problem.saved is None else 0
    block, runtime = cost.slot + cost.train_peak, problem.machine.runtime
    return what_helps(problem.limit, runtime, peak, finer=finer, block=block, state=cost.state, rows=rows)


def contents(cost: PartitionCost) -> str:
    """Says how much of a partition is what."""
    return (
        f"weights {format_size(cost.weights)}, gradients {format_size(cost.gradients)}, optimizer {format_size(cost.state)}, "
        f"activations {format_size(cost.saved)}"
    )


def fingerprint(chain: Chain, costs: Sequence[BlockCost], input_shape: tuple[int, ...]) -> str:
    """Equal for chains with the same tensors and the same input."""
    digest = hashlib.blake2b(repr(input_shape).encode(), digest_size=8)
    for block, cost in zip(chain, costs, strict=True):
        tensors = [(spec.name, spec.shape, str(spec.dtype)) for spec in cost.layout.specs]
        digest.update(repr((block.name, tensors)).encode())
    return digest.hexdigest()


def routing_of(parts: Sequence[PartitionCost]) -> BoundaryRouting:
    return BoundaryRouting([cost.entering for cost in parts], [cost.leaving for cost in parts])


def boundary_bytes(parts: Sequence[PartitionCost], batch: int, micro_batch: int, tiers: Tiers, tier: str) -> int:
    """Bytes of one update's boundaries that wait in `tier`, each tensor rounded up to pages."""
    handing = routing_of(parts)
    nbytes = sum(size for number, size in handing.places(micro_batch).items() if handing.tier_of(number, tiers) == tier)
    if handing.tier_of(-1, tiers) == tier:
        nbytes += sum(round_up(cost.tied) + _TIED_PAGES * PAGE for cost in parts if cost.tied)
    return -(-batch // micro_batch) * nbytes


def tiers_by_room(problem: Problem, parts: Sequence[PartitionCost], micro_batch: int, tier: str) -> Tiers:
    """Places all boundaries in `tier`; in host memory as many as there is room for, and the others on the disk."""
    if tier != "host":
        return (tier,) * len(parts) if tier != DEVICE else ()
    room, batch = problem.machine.host_room, problem.batch_size
    places = (("host",) * at + ("disk",) * (len(parts) - at) for at in range(len(parts), -1, -1))
    return next(tiers for tiers in places if boundary_bytes(parts, batch, micro_batch, tiers, "host") <= room)


def host_boundaries(problem: Problem, parts: Parts, micro_batch: int, tiers: Tiers) -> int:
    """Bytes of the piece of host memory for boundaries that wait there."""
    costs = [cost for _, _, cost in parts]
    nbytes = boundary_bytes(costs, problem.batch_size, micro_batch, tiers, "host") if "host" in tiers else 0
    return first_piece(nbytes, powers_of_two=not problem.machine.host_counts) if nbytes else 0


_TIED_PAGES = 16
"""Pages added for a partition's shared weights, which are counted together and rounded up one by one."""


GraphRooms = Mapping[int, tuple[int, ...]]
"""{partition: bytes of each of its graphs that wait in host memory at the same time}."""


class HostPlaces(NamedTuple):
    """The contents of the host pool beside boundaries."""

    nbytes: int
    """Bytes of the whole pool, with boundaries."""
    homes: frozenset[int]
    """Partitions whose homes are all in the pool."""
    graphs: frozenset[int]
    """Partitions whose graphs may wait in the pool."""
    steps: frozenset[int] = frozenset()
    """Partitions whose optimizer step is computed on the host: their homes are in the pool, and room for gradients."""
    gradient_room: int = 0
    """Bytes of each of the two pieces of the pool through which gradients come to these steps."""
    narrow: frozenset[int] = frozenset()
    """Partitions of `steps` with room in the pool for copies of their weights in 16 bits."""


def host_places(
    problem: Problem, parts: Parts, boundaries: int, *, states: bool, rows: int = 0, graphs: GraphRooms = MappingProxyType({})
) -> HostPlaces:
    """Places `graphs`, then homes, then `rows` (bytes) in the host budget that `boundaries` (bytes) leave.

    states: True if optimizer state has a home as well, and gradients where updates wait for their norm.
    """
    if not problem.machine.host_budget:
        return HostPlaces(boundaries, frozenset(), frozenset())
    key = (boundaries, rows, states, problem.host_steps, *graphs.items(), *(first for first, _, _ in parts))
    if key not in problem.placed:
        costs = problem.costs_at(micro_batches(problem)[0])
        waits = problem.defers_updates and states and len(parts) > 1  # gradients, at home, for their norm
        homes = [
            (round_up(max(cost.weights, 1)), states * state.padded_nbytes, waits * cost.gradient_layout.padded_nbytes)
            for cost, state in zip(costs, problem.states, strict=True)
        ]
        placed = [[size for home in homes[first:last] for size in home if size] for first, last, _ in parts]
        may_step = [p for p, (_, _, cost) in enumerate(parts) if problem.host_steps and steps_anywhere(cost)]
        # On the CPU gradients are used where they are.
        through = 0 if problem.machine.host_counts else max((parts[p][2].waiting for p in may_step), default=0)
        rooms = [[round_up(through)] * GRADIENT_ROOMS] * bool(through)
        halved = [p for p in may_step if parts[p][2].narrow and not problem.machine.host_counts]
        copies = [
            [round_up(cost.narrow.nbytes) for cost in costs[parts[p][0] : parts[p][1]] if cost.narrow.specs] for p in halved
        ]
        groups = [*graphs.values(), *rooms, *placed, *copies]
        need = sum(map(sum, groups)) + rows
        budget = max(0, problem.machine.host_budget - boundaries)
        nbytes, fit = pieces_for(need, groups, budget, powers_of_two=not problem.machine.host_counts)
        held = frozenset(p for number, p in enumerate(graphs) if number in fit)
        first = len(graphs) + len(rooms)
        at_host = frozenset(number - first for number in fit if first <= number < first + len(placed))
        steps = at_host.intersection(may_step) if not rooms or len(graphs) in fit else frozenset[int]()
        narrow = steps.intersection(p for number, p in enumerate(halved, first + len(placed)) if number in fit)
        problem.placed[key] = HostPlaces(boundaries + nbytes, at_host, held, steps, round_up(through) if steps else 0, narrow)
    return problem.placed[key]


GRADIENT_ROOMS = 2
"""Pieces of host memory through which gradients come to steps on the host: one is filled while the other is used."""


def steps_anywhere(cost: PartitionCost) -> bool:
    """True if the partition's optimizer step may be computed where its homes are. Buffers that change are on the device."""
    return cost.trainable and cost.parameters > 0 and not cost.buffers


def least_slot(problem: Problem, cost: PartitionCost) -> int:
    """Fewest bytes of a partition's slot, wherever its optimizer step is computed."""
    return cost.slot_bytes(False, stateless=problem.host_steps and steps_anywhere(cost))


def graph_rooms(parts: Sequence[PartitionCost], partitions: Iterable[int], at_once: int) -> GraphRooms:
    """Host memory for graphs of `partitions`, each of `at_once` micro-batches at the same time."""
    return {p: (round_up(parts[p].graph),) * at_once for p in sorted(partitions)}


def graphs_at_once(method: Method, batch: int, micro_batch: int) -> int:
    """Graphs of one partition that wait at the same time: one if each micro-batch passes through all partitions by itself,
    otherwise one per micro-batch."""
    return 1 if method.stays else -(-batch // micro_batch)


def largest_boundary(parts: Sequence[PartitionCost], micro_batch: int, tiers: Tiers) -> int:
    """Bytes of the largest boundary tensor that goes by the disk; 0: none does."""
    handing = routing_of(parts)
    values = {value.number: value.nbytes_at(micro_batch) for cost in parts for value in cost.entering}
    sizes = [nbytes for number, nbytes in values.items() if handing.tier_of(number, tiers) == "disk"]
    return max(sizes + [cost.largest_tie for cost in parts if handing.tier_of(-1, tiers) == "disk"], default=0)


BUFFERS = 6
"""Buffers for boundaries on disk: what a step reads (activation, gradient), what it leaves, what comes next, what is being
written."""


def exchange_bytes(largest: int) -> int:
    """Bytes of the buffers of boundaries on disk, for tensors of at most `largest` bytes."""
    return BUFFERS * aligned_bytes(largest)


def graph_buffer_bytes(parts: Sequence[PartitionCost], offloads: Collection[int]) -> int:
    """Bytes of the buffers through which graphs of the partitions `offloads` leave and return, one micro-batch at a time."""
    return GRAPH_BUFFERS * aligned_bytes(max(parts[p].graph for p in offloads)) if offloads else 0


def sharing(problem: Problem, parts: Parts) -> set[int]:
    """Partitions that share weights with others: a borrower reads them from their home, which must be up to date."""
    of_block = {number: p for p, (first, last, _) in enumerate(parts) for number in range(first, last)}
    pairs = [(of_block[b.number], of_block[tie.owner.number]) for b in problem.chain for tie in b.tied]
    return {p for pair in pairs if pair[0] != pair[1] for p in pair}
