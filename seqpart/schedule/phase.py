"""Passes over the rows: the kind of pass, its partitions, and the rows of each update."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple


class Span(NamedTuple):
    """The rows of one micro-batch: positions start..stop of the phase's row order."""

    start: int
    stop: int
    update_rows: int
    """Rows of the whole update that this micro-batch is a part of."""
    ends_update: bool


class PhaseKind(enum.Enum):
    TRAIN = "train"
    """One epoch of updates over the training rows."""
    CACHE = "cache"
    """One forward pass over the training rows; the outputs become the next partition's rows."""
    DRAW = "draw"
    """One pass over the labels of the training rows: the next partition's rows are this one's synthetic labels; it does not
    run."""
    TEST = "test"
    """One forward pass over the test rows."""
    STATISTICS = "statistics"
    """One forward pass over some training rows, which recomputes the running statistics of BatchNorm; its last step is an
    UPDATE that keeps them."""
    SPLIT = "split"
    """Beginning of a round: the parts are cut out of the whole network."""
    MERGE = "merge"
    """End of a round: the parts are put back."""
    GATHER = "gather"
    """Partitions that processes have trained at the same time are given to all of them."""


class Order(enum.Enum):
    """The order in which the micro-batches of an update go through several partitions."""

    MICRO_BATCHES = "micro-batches"
    """Each micro-batch goes through all partitions before the next."""
    PARTITIONS = "partitions"
    """All micro-batches of a partition come before the next partition's, so that one partition at a time is enough."""
    PAIRS = "pairs"
    """As PARTITIONS, where those after the first are scores, which are loaded in pairs beside the first one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochSlice:
    """The part of an epoch's updates that a phase is."""

    skips: int = 0
    """Rows in the epoch's order before its own."""
    done: int = 0
    """Updates in its epoch before its own."""
    updates_of_epoch: int | None = None
    """Updates of the whole epoch, if the phase is a part of one."""
    updates_of_stage: int | None = None
    """Updates of the whole stage, if that is no whole number of epochs."""
    rows_of: int | None = None
    """The partition whose rows it reads, if that is not its first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One pass over the training or test rows, through one partition or through several."""

    kind: PhaseKind
    partition: int
    """The first partition."""
    through: int | None = None
    """The last partition; None if there is only one."""
    rows: int
    batch: int
    """Rows of one update; in a forward pass, rows of one micro-batch."""
    micro_batch: int
    epoch: int = 0
    """Number of the epoch, from 1, in a training phase; number of the round in SPLIT and MERGE."""
    epochs: int = 1
    """Number of epochs in its stage."""
    shuffle: bool = False
    frozen: frozenset[int] = frozenset()
    """Partitions that take part and do not learn."""
    order: Order = Order.MICRO_BATCHES
    streams: frozenset[int] = frozenset()
    """Partitions that are loaded one after the other, twice in each update; the others stay on the device."""
    defers_updates: bool = False
    """True if gradients wait at home: updates for the norm over all partitions, or a score's gradients for its other pairs."""
    keeps: frozenset[int] = frozenset()
    """Partitions that keep the graph of FORWARD for BACKWARD, instead of recomputing it."""
    offloads: frozenset[int] = frozenset()
    """Those of `keeps` whose graphs are offloaded in between."""
    host_steps: frozenset[int] = frozenset()
    """Partitions whose optimizer step is computed on the host, where their weights and optimizer state rest."""
    stage: int = 0
    """Optimizer state lives as long as a stage: recovery begins a new one."""
    within: EpochSlice = EpochSlice()
    ends: int | None = None
    """The network's last partition; None: the last one there is."""
    view: int = 0
    """Number of the view that the pass writes, if several draws of each row are kept."""
    views: int = 1
    """Number of views of the training rows, which the epochs use in turn."""
    rank: int = 0
    ranks: int = 1
    """Number of this process, and of all that share the micro-batches of each update, or the parts in MERGE."""
    elsewhere: bool = False
    """True if another process makes the pass: the turn of a part, or of a partition, that is not one of this process's own."""
    independent: bool = False
    """True if processes make different passes at that time, so that the run as a whole stands nowhere."""
    divides_state: bool = False
    """True if each partition's optimizer state is on one rank alone, which makes its step and gives the others the weights."""

    def __str__(self) -> str:
        epoch = f".{self.epoch}" if self.kind in (PhaseKind.TRAIN, PhaseKind.SPLIT, PhaseKind.MERGE) else ""
        return f"[{self.kind.value} {self.partition}{'' if self.through is None else f'-{self.through}'}{epoch}]"

    @property
    def last(self) -> int:
        return self.partition if self.through is None else self.through

    @property
    def partitions(self) -> range:
        return range(self.partition, self.last + 1)

    @property
    def breadth_first(self) -> bool:
        """True if all micro-batches of a partition come before the next partition's."""
        return self.order is not Order.MICRO_BATCHES

    @property
    def in_pairs(self) -> bool:
        return self.order is Order.PAIRS

    def keeps_rows(self, p: int) -> bool:
        """True if partition p's input rows stay on the device for every pair of scores of an update, and each pair works on
        copies."""
        return self.in_pairs and p == self.partition

    @property
    def reads(self) -> tuple[str, int]:
        """(split, partition) of the rows that it reads."""
        return "test" if self.kind is PhaseKind.TEST else "train", self.source

    @property
    def enters(self) -> str:
        """The split that it reads, with the view of its rows: `train`, `train.1`. The data's own rows have no views."""
        view = (self.epoch - 1) % self.views if self.kind is PhaseKind.TRAIN else self.view
        return f"{self.reads[0]}.{view}" if view and self.source else self.reads[0]

    @property
    def leaves(self) -> str:
        """The split that it writes, with the view of its rows."""
        return f"{self.reads[0]}.{self.view}" if self.view else self.reads[0]

    @property
    def source(self) -> int:
        """The partition whose rows it reads."""
        return self.partition if self.within.rows_of is None else self.within.rows_of

    def hands_on(self, partitions: int) -> bool:
        """True if the outputs of a pass without updates are the rows of the next of `partitions` partitions."""
        return self.last < (partitions - 1 if self.ends is None else self.ends)

    def share_of(self, updates: int) -> tuple[int, int]:
        """Returns (updates of its stage after `updates` of its own, updates of the whole stage)."""
        whole = self.within.updates_of_epoch or self.updates
        stage = self.within.updates_of_stage or self.epochs * whole
        return (self.epoch - 1) * whole + self.within.done + updates, stage

    @property
    def is_turn(self) -> bool:
        """True if it is one part's training in a round."""
        return self.within.updates_of_epoch is not None and self.within.updates_of_stage is None

    @property
    def in_round(self) -> bool:
        """True if the network is in parts, of which each process has its own."""
        return self.is_turn or self.kind is PhaseKind.MERGE

    @property
    def epochs_done(self) -> float:
        """Epochs of its stage that are over after it."""
        whole = self.within.updates_of_epoch
        return self.epoch if whole is None else self.epoch - 1 + (self.within.done + self.updates) / whole

    @property
    def lowest(self) -> int:
        """The first partition that learns; no gradient goes below it. One after the last if none learns."""
        if not self.frozen:
            return self.partition
        return next((p for p in self.partitions if p not in self.frozen), self.last + 1)

    def trains(self, p: int) -> bool:
        return self.kind is PhaseKind.TRAIN and self.partition <= p <= self.last and p not in self.frozen

    def loads_state(self, p: int) -> bool:
        """True if p's optimizer state is loaded to the device, by the rank that has it, since p's step is computed there."""
        return self.trains(p) and p not in self.host_steps

    def owner_of(self, p: int) -> int:
        """Returns the rank that has p's optimizer state, if they divide it."""
        return p % self.ranks if self.divides_state else self.rank

    def drops_after_update(self, p: int) -> bool:
        """True if p is loaded again for its next forward pass, where no update waits for the norm."""
        return p in self.streams and p > self.partition

    def gradients_wait(self, p: int) -> bool:
        """True if p's gradients wait at home for its update: as it streams, and is not the last that the norm waits for."""
        return self.defers_updates and p in self.streams and (self.in_pairs or (self.trains(p) and p != self.lowest))

    def keeps_graph(self, p: int) -> bool:
        """True if p keeps its graph. The last partition runs forward in its BACKWARD, those below `lowest` have no BACKWARD."""
        return p in self.keeps and self.lowest <= p < self.last

    def offloads_graph(self, p: int) -> bool:
        """True if p keeps its graph and offloads it until BACKWARD."""
        return p in self.offloads and self.keeps_graph(p)

    @property
    def updates(self) -> int:
        return -(-self.rows // self.batch)

    @property
    def micro_batches_per_update(self) -> int:
        return -(-self.batch // self.micro_batch)

    def rows_before(self, update: int) -> int:
        return min(update * self.batch, self.rows)

    def span(self, m: int) -> Span:
        """Returns the rows of micro-batch `m`, which counts from the start of the phase."""
        update, part = divmod(m, self.micro_batches_per_update)
        start = update * self.batch
        end = min(start + self.batch, self.rows)
        stop = min(start + (part + 1) * self.micro_batch, end)
        return Span(start + part * self.micro_batch, stop, end - start, stop == end)

    def spans(self, first_update: int = 0) -> Iterator[tuple[int, Span]]:
        """Yields (m, span) of every micro-batch of this process from update `first_update` on."""
        for update in range(first_update, self.updates):
            yield from self.spans_of(update)

    def spans_of(self, update: int) -> Iterator[tuple[int, Span]]:
        return ((m, self.span(m)) for m in self.own_micro_batches(update))

    def own_micro_batches(self, update: int) -> range:
        """Returns the micro-batches of an update that this process computes: each of `ranks` a stretch of equal length, as far
        as there are some left."""
        rows, first = self.rows_before(update + 1) - self.rows_before(update), update * self.micro_batches_per_update
        count = -(-rows // self.micro_batch)
        each = -(-count // self.ranks)
        start, stop = (first + min(rank * each, count) for rank in (self.rank, self.rank + 1))
        return range(start, stop)

    def part_of(self, m: int) -> int:
        """Returns the number of micro-batch `m` among this process's own of its update."""
        update, part = divmod(m, self.micro_batches_per_update)
        return part if self.ranks == 1 else m - self.own_micro_batches(update).start  # it is asked at every step

    @property
    def own(self) -> "Phase":
        """The pass as its first process sees it, of whose rows none has more: with as many updates, of its own rows."""
        if self.ranks == 1:
            return replace(self, elsewhere=False)
        first = replace(self, rank=0)
        batch, last = (sum(s.stop - s.start for _, s in first.spans_of(update)) for update in (0, self.updates - 1))
        return replace(first, ranks=1, batch=batch, rows=(self.updates - 1) * batch + last)
