"""Passes over the rows: what kind of pass, through which partitions, and which rows belong to which update."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
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
    """One pass over the training rows for their labels: the next partition's rows are the synthetic labels of this one, which
    does not run."""
    TEST = "test"
    """One forward pass over the test rows."""
    STATISTICS = "statistics"
    """One forward pass over some training rows, from which running statistics of BatchNorm are made anew; its last step is an
    UPDATE that keeps them."""
    SPLIT = "split"
    """A round begins: the parts are cut out of the whole network."""
    MERGE = "merge"
    """It ends: they are put back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One pass over the training or test rows, through one partition or through several."""

    kind: PhaseKind
    partition: int
    """The first."""
    through: int | None = None
    """The last; None: there is only one."""
    rows: int
    batch: int
    """Rows of one update; in a forward pass, rows of one micro-batch."""
    micro_batch: int
    epoch: int = 0
    """Counts from 1 in a training phase; of SPLIT and MERGE, the round."""
    epochs: int = 1
    """How many there are in its stage."""
    shuffle: bool = False
    frozen: frozenset[int] = frozenset()
    """Partitions that take part and do not learn."""
    breadth_first: bool = False
    """All micro-batches of a partition come before the next partition's; else each micro-batch goes through all of them."""
    streams: frozenset[int] = frozenset()
    """Partitions that come to the device one after the other, twice in each update; the others stay there."""
    clips: bool = False
    """Whether gradients wait at home: updates for the norm over all partitions, or a score's for its other pairs."""
    in_pairs: bool = False
    """The partitions behind the first are scores that meet in pairs, each beside the first one (method psl)."""
    keeps: frozenset[int] = frozenset()
    """Partitions that keep the graph of FORWARD for BACKWARD, instead of running forward again."""
    offloads: frozenset[int] = frozenset()
    """Those of them whose graphs do not wait on the device."""
    stage: int = 0
    """Optimizer state lives as long as a stage: recovery begins a new one."""
    rows_of: int | None = None
    """The partition whose rows it begins with, where that is another than its first."""
    skips: int = 0
    """Rows of the epoch's order before its own."""
    done: int = 0
    """Updates of its epoch before its own."""
    updates_of_epoch: int | None = None
    """Where it is a piece of an epoch: the updates of all of that."""
    updates_of_stage: int | None = None
    """Where its stage is no whole number of epochs: the updates of all of that."""
    ends: int | None = None
    """The partition with which the network ends; None: the last there is."""
    view: int = 0
    """Of a pass that writes rows: which view of them, where several draws of each row are kept."""
    views: int = 1
    """Of training on rows that such passes wrote: how many views there are, which epochs take in turn."""

    def __str__(self) -> str:
        epoch = f".{self.epoch}" if self.kind in (PhaseKind.TRAIN, PhaseKind.SPLIT, PhaseKind.MERGE) else ""
        return f"[{self.kind.value} {self.partition}{'' if self.through is None else f'-{self.through}'}{epoch}]"

    @property
    def last(self) -> int:
        return self.partition if self.through is None else self.through

    @property
    def partitions(self) -> range:
        return range(self.partition, self.last + 1)

    def keeps_rows(self, p: int) -> bool:
        """Whether the rows that enter partition p wait on the device for every pair of scores of an update, and each pair works
        on copies of its own."""
        return self.in_pairs and p == self.partition

    @property
    def reads(self) -> tuple[str, int]:
        """(split, partition) of the rows that it begins with."""
        return "test" if self.kind is PhaseKind.TEST else "train", self.source

    @property
    def enters(self) -> str:
        """The split that it reads, with the view of its rows: `train`, `train.1`. The data's own rows have none."""
        view = (self.epoch - 1) % self.views if self.kind is PhaseKind.TRAIN else self.view
        return f"{self.reads[0]}.{view}" if view and self.source else self.reads[0]

    @property
    def leaves(self) -> str:
        """The same of the rows that it writes."""
        return f"{self.reads[0]}.{self.view}" if self.view else self.reads[0]

    @property
    def source(self) -> int:
        """The partition whose rows it begins with."""
        return self.partition if self.rows_of is None else self.rows_of

    def hands_on(self, partitions: int) -> bool:
        """Of a pass without updates, whether its outputs are the rows of the next of so many partitions."""
        return self.last < (partitions - 1 if self.ends is None else self.ends)

    def share_of(self, updates: int) -> tuple[int, int]:
        """(updates of its stage behind `updates` of its own, those of the whole stage)."""
        whole = self.updates if self.updates_of_epoch is None else self.updates_of_epoch
        stage = self.epochs * whole if self.updates_of_stage is None else self.updates_of_stage
        return (self.epoch - 1) * whole + self.done + updates, stage

    @property
    def is_turn(self) -> bool:
        """Whether it is one part's share of a round."""
        return self.updates_of_epoch is not None and self.updates_of_stage is None

    @property
    def epochs_done(self) -> float:
        """Epochs of its stage that are over behind it."""
        return (
            self.epoch if self.updates_of_epoch is None else self.epoch - 1 + (self.done + self.updates) / self.updates_of_epoch
        )

    @property
    def lowest(self) -> int:
        """The first partition that learns; no gradient goes below it. Behind the last where none does."""
        if not self.frozen:
            return self.partition
        return next((p for p in self.partitions if p not in self.frozen), self.last + 1)

    def trains(self, p: int) -> bool:
        return self.kind is PhaseKind.TRAIN and self.partition <= p <= self.last and p not in self.frozen

    def keeps_graph(self, p: int) -> bool:
        """The last partition runs forward in its BACKWARD, and those below the first that learns have none: nothing to keep."""
        return p in self.keeps and self.lowest <= p < self.last

    def offloads_graph(self, p: int) -> bool:
        """Whether the graph that it keeps waits elsewhere than on the device."""
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
        """Rows of micro-batch `m`, which counts from the start of the phase."""
        update, part = divmod(m, self.micro_batches_per_update)
        start = update * self.batch
        end = min(start + self.batch, self.rows)
        stop = min(start + (part + 1) * self.micro_batch, end)
        return Span(start + part * self.micro_batch, stop, end - start, stop == end)

    def spans(self, first_update: int = 0) -> Iterator[tuple[int, Span]]:
        """(m, span) of every micro-batch from update `first_update` on."""
        for update in range(first_update, self.updates):
            yield from self.spans_of(update)

    def spans_of(self, update: int) -> Iterator[tuple[int, Span]]:
        m = update * self.micro_batches_per_update
        while True:
            span = self.span(m)
            yield m, span
            if span.ends_update:
                return
            m += 1
