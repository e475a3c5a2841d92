"""One data set of the user with its loader's options, and how its rows are read: item by item, or in batches of a
collate_fn."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from seqpart.capture.inputs import PADS, as_tensor, described, is_several, refuse_text
from seqpart.data.generators import left_alone, own_generators, seed_generators
from seqpart.data.reader import Ints
from seqpart.data.row_types import in_type_of
from seqpart.data.splits import Split, copy_rows, refuse_nested, split_of, unreadable, x_and_y
from seqpart.device.device import Device, keyed_seed
from seqpart.errors import DataError, SeqpartError, first_line

SPLITS = "train", "test"


@dataclass(frozen=True, slots=True)
class Draws:
    """The random draws of one pass over the rows of a split, one of SPLITS."""

    seed: int
    split: str
    stage: int
    """1 in recovery."""
    epoch: int
    """From 1 in training; 0 in passes without updates, so that all draw the same; negative for further views of the rows."""

    def seed_for(self, what: str, number: int = 0) -> int:
        """Returns a seed. what: "row", "batch" (a collate_fn's draws, by the batch's number in its epoch) or "order"."""
        return keyed_seed(self.seed, what, self.split, self.stage, self.epoch, int(number))


def seed_row(seed: int, epoch: int, index: int, items: Any = None) -> None:
    """Seeds the generators as a run of that seed does before it reads item `index` of the data set `items` in a training epoch
    (from 1). Without `items`, generators that these hold for themselves are left alone."""
    seed_generators(Draws(seed, "train", 0, epoch).seed_for("row", index), own_generators(items))


def row_order(seed: int, epoch: int, count: int) -> Ints:
    """Returns the order in which a run of that seed reads `count` rows in a training epoch, if it shuffles."""
    return shuffled(Draws(seed, "train", 0, epoch), count)


def shuffled(draws: Draws, count: int) -> Ints:
    return np.random.default_rng(draws.seed_for("order")).permutation(count)


_END = object()
"""Marks the end of a stream."""
PIECE_BYTES, PIECE_ROWS = 1 << 20, 64
"""Bytes and rows of items that are stacked at a time, whichever is reached first."""
_KEPT = (torch.uint8, torch.int8, torch.int16, torch.bool)
"""Types smaller than float32 in which rows are transferred unconverted."""


class ChangedItems:
    """The user's data set with each item changed as it is read: `change(item, its number)`."""

    def __init__(self, items: Any, change: Callable[[Any, int], Any]) -> None:
        self._items, self._change = items, change

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._change(self._items[index], index)

    def __getattr__(self, name: str) -> Any:
        """Returns the data set's own attribute: `targets`, `set_epoch` and any other."""
        if name.startswith("_"):  # an object that is being copied has no _items yet
            raise AttributeError(name)
        return getattr(self._items, name)


class ChangedStream(ChangedItems, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(self._change, self._items, itertools.count())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Source:
    """A source of rows, read every time that they are needed."""

    items: Any
    """The data set: items by number, or one after the other if it `streams`."""
    name: str
    """training or test."""
    count: int
    """Rows of the data set."""
    rows: int
    """Rows of an epoch."""
    streams: bool = False
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of `batch` items; None: each item is a row."""
    batch: int = 0
    """Items of a batch that `collate` makes."""
    shuffles: bool | None = None
    """The loader's shuffling; None: the settings decide."""
    goes_on: bool = False
    """True for a stream whose rows are not counted: at its end it begins again, and all its passes are one."""
    sampler: Any = None
    """The user's own sampler: the order of an epoch."""
    sampled: int = 0
    """Numbers that `sampler` gives for an epoch, with those that drop_last leaves out."""
    seed: int | None = None
    """Seed of the loader's own generator."""
    workers: int = 0
    """The loader's number of worker processes."""
    begin_worker: Callable[[int], object] | None = None
    """Called in each worker process, with its number, before it reads."""
    padded: str = ""
    """The padding of its rows, as a text that differs for different paddings."""

    def draws(self, seed: int, split: str, stage: int, epoch: int) -> Draws:
        own = seed if self.seed is None else keyed_seed(seed, "generator", self.seed)
        return Draws(own, split, stage, epoch)

    def order(self, draws: Draws, *, shuffle: bool) -> Ints | range:
        """Returns the numbers of items in the order of a pass. Raises DataError for a sampler's invalid ones. Draws random
        numbers."""
        if not shuffle:
            return range(self.count)
        if self.sampler is None:
            return shuffled(draws, self.count)
        found = np.fromiter(_asked(self.sampler, draws), np.int64)
        if len(found) != self.sampled:
            raise DataError(
                f"{self.name} data: the sampler gave {len(found)} numbers in epoch {draws.epoch}; its len() said "
                f"{self.sampled}. Let __len__ say how many there are, the same number in every epoch."
            )
        if len(found) and not 0 <= int(found.min()) <= int(found.max()) < self.count:
            raise DataError(f"{self.name} data: the sampler gave numbers beyond 0..{self.count - 1}, the items that there are.")
        return found


def _asked(sampler: Any, draws: Draws) -> Iterator[int]:
    """Yields the sampler's numbers of an epoch, after seeding the generators for it."""
    seed = draws.seed_for("order")
    seed_generators(seed)
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    if callable(begin := getattr(sampler, "set_epoch", None)):
        begin(draws.epoch)
    return (int(number) for number in sampler)


@dataclass(frozen=True, slots=True)
class Job:
    """A batch to be read: number `batch` of a pass over a split's part of that number, with the items `numbers`."""

    part: int
    draws: Draws
    batch: int
    numbers: Ints


class SourceReader:
    """Reads rows of a source in this process."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._pass: Draws | None = None
        self._own = list[Any]()
        self._stream: Iterator[Any] = iter(())
        self._at: tuple[Draws, int] | None = None
        """In a stream: its current pass, and the number of the next item."""
        self._begun = self._ended = 0
        """In a stream: the number of the item with which it began last, and how often it has ended in this pass."""

    def _generators(self, draws: Draws) -> list[Any]:
        """Generators of the data set's own, found anew in each pass: a callback may replace them. Those of a stream are left
        alone: its order may be theirs."""
        if draws != self._pass:
            self._pass = draws
            self._own = [] if self.source.streams else own_generators(self.source.items, self.source.collate)
        return self._own

    def read(self, draws: Draws, batch: int, numbers: Sequence[int]) -> Iterator[tuple[Any, Any]]:
        """Yields (x, labels) of the items `numbers`, in order and in pieces; `batch`: number of the pass's collated batch.

        Seeds the process's generators. Raises DataError.
        """
        with left_alone(self._generators(draws)):
            yield from self._read(draws, batch, numbers)

    def _read(self, draws: Draws, batch: int, numbers: Sequence[int]) -> Iterator[tuple[Any, Any]]:
        source = self.source
        if source.collate is not None:
            items = [self._item(draws, number) for number in numbers]
            yield self._collated(draws, batch, items)
            return
        piece: list[tuple[Any, Any]] = []
        nbytes = 0
        for number in numbers:
            piece.append(x_and_y(self._item(draws, number), f"{source.name} data: item {number}"))
            nbytes += _nbytes(piece[-1][0])
            if nbytes >= PIECE_BYTES or len(piece) == PIECE_ROWS:
                yield stacked(piece, source.name)
                piece, nbytes = [], 0
        if piece:
            yield stacked(piece, source.name)

    def item(self, draws: Draws, number: int) -> Any:
        """Returns item `number` of the data set. Seeds the process's generators. Raises DataError."""
        with left_alone(self._generators(draws)):
            return self._item(draws, number)

    def _item(self, draws: Draws, number: int) -> Any:
        try:
            if self.source.streams:
                return self._next(draws, number)
            seed_generators(draws.seed_for("row", number), self._own)
            return self.source.items[number]
        except Exception as error:
            if isinstance(error, SeqpartError) or Device().is_out_of_memory(error):
                raise
            raise unreadable(self.source.name, self.source.items, number, error) from error

    def _next(self, draws: Draws, number: int) -> Any:
        """Returns item `number` of a stream, which is read again from its beginning if it is past that item."""
        source = self.source
        if self._at is None or self._at[0] != draws or self._at[1] > number:
            self._ended = 0
            self._begin(draws, 0)
        assert self._at is not None
        while True:
            at = self._at[1]
            seed_generators(draws.seed_for("row", at))
            item = next(self._stream, _END)
            if item is _END and source.goes_on and at > self._begun:
                self._ended += 1
                self._begin(draws, at)
                continue
            if item is _END:
                raise DataError(f"{source.name} data: expected {source.count} rows in every pass; found {at} in this one.")
            self._at = draws, at + 1
            if at + 1 == source.count and not source.goes_on and next(self._stream, _END) is not _END:
                raise DataError(
                    f"{source.name} data: expected {source.count} rows in every pass, as its len() says or were counted; found "
                    "more. Let __len__ say how many there are, or leave it out (with --max-steps where there is no end)."
                )
            if at == number:
                return item

    def _begin(self, draws: Draws, at: int) -> None:
        """Starts the stream from its beginning; its first item is row `at` of the pass."""
        seed_generators(draws.seed_for("order", self._ended))
        if callable(begin := getattr(self.source.items, "set_epoch", None)):
            begin(draws.epoch + self._ended)
        self._stream, self._at, self._begun = iter(self.source.items), (draws, at), at

    def _collated(self, draws: Draws, batch: int, items: list[Any]) -> tuple[Any, Any]:
        where = f"{self.source.name} data: batch {batch}"
        seed_generators(draws.seed_for("batch", batch), self._own)
        assert self.source.collate is not None
        try:
            found = self.source.collate(items)
        except Exception as error:
            if isinstance(error, SeqpartError) or Device().is_out_of_memory(error):
                raise
            raise DataError(f"{where}: the collate_fn failed: {type(error).__name__}: {error}.") from error
        try:
            x, y = (part if is_several(part) or hasattr(part, "shape") else as_tensor(part) for part in x_and_y(found, where))
        except (TypeError, ValueError, RuntimeError) as error:  # a dict of each row
            raise DataError(
                f"{where}: expected tensors from the collate_fn, with a row of each item; found lists of what is no number: "
                f"{first_line(error)}. {PADS}"
            ) from None
        refuse_nested(x, y, where)
        count = len(next(iter(x.values())) if isinstance(x, Mapping) else x[0] if is_several(x) else x)
        if count != len(items):
            raise DataError(f"{where}: the collate_fn made {count} rows of {len(items)} items; expected one of each.")
        return x, y


def stacked(rows: Sequence[tuple[Any, Any]], name: str) -> tuple[Any, Any]:
    """Stacks several rows to (x, labels), with rows as first dimension. Raises DataError if they differ in shape."""
    for key, part in rows[0][0].items() if isinstance(rows[0][0], Mapping) else ():
        refuse_text(part, f"{name} data: item 0", key)
    try:
        return _together([x for x, _ in rows]), _together([y for _, y in rows])
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise DataError(
            f"{name} data: rows differ, or are no numbers: {first_line(error)}. Bring them to one shape (crop or "
            f"resize them), as tensors. {PADS}"
        ) from None


def _together(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: _together([part[key] for part in parts]) for key in first}
    if is_several(first):
        return tuple(_together(column) for column in zip(*parts, strict=True))
    if isinstance(first, torch.Tensor):
        return torch.stack(list(parts))
    if isinstance(first, int | float | str | None):
        return torch.tensor(parts)
    return torch.stack([as_tensor(np.asarray(part)) for part in parts])


def _nbytes(x: Any) -> int:
    parts = x.values() if isinstance(x, Mapping) else x if isinstance(x, tuple | list) else [x]
    return sum(int(getattr(part, "nbytes", 64)) for part in parts)


class Part(SourceReader):
    """Reads rows of one split into tensors, after checking that they have the first rows' shapes and types."""

    def __init__(self, source: Source, like: Split, kept: torch.dtype) -> None:
        """like: some rows of the data. kept: the type in which rows are transferred."""
        super().__init__(source)
        self._like, self._kept = like, kept
        self._label_shape, self._label_dtype = tuple(like.labels.shape[1:]), like.labels.dtype

    def anew(self) -> "Part":
        """Returns a part that has read nothing yet."""
        return Part(self.source, self._like, self._kept)

    @property
    def label_nbytes(self) -> int:
        return int(np.prod(self._label_shape)) * self._label_dtype.itemsize

    def empty(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns uninitialized memory for `count` rows and their labels."""
        rows = torch.empty((count, *self._like.shape), dtype=self._kept)
        return rows, torch.empty((count, *self._label_shape), dtype=self._label_dtype)

    def fill(self, job: Job, rows: torch.Tensor, labels: torch.Tensor) -> None:
        """Reads a batch into tensors of exactly that size. Seeds the process's generators. Raises DataError."""
        at, some = 0, ", ".join(map(str, job.numbers[:4])) + (", ..." if len(job.numbers) > 4 else "")
        for x, y in self.read(job.draws, job.batch, job.numbers.tolist()):
            where = f"{self.source.name} data: rows {at} and on of a batch of the items {some}"
            at += self._take(x, y, rows[at:], labels[at:], where)

    def _take(self, x: Any, y: Any, rows: torch.Tensor, labels: torch.Tensor, where: str) -> int:
        """Copies rows to the beginning of `rows`, (n, *shape), and `labels`; returns how many. Raises DataError."""
        like, expected_labels = self._like, self._label_shape
        split = in_type_of(like, split_of(x, y, like.name))
        for what, found, expected in (("rows", split.shape, like.shape), ("labels", split.labels.shape[1:], expected_labels)):
            if tuple(found) != expected:
                several = what == "rows" and bool(like.form)
                shapes = [described(one.form) if several else str(tuple(one.shape)) for one in (like, split)]
                shapes = shapes if what == "rows" else [str(expected), str(tuple(found))]
                raise DataError(
                    f"{where}: expected {what} of shape {shapes[0]}, as the first ones have; found {shapes[1]}. Bring all to "
                    f"one shape: crop or resize them. {PADS}"
                )
        if split.form != like.form or split.dtype != like.dtype:
            raise DataError(f"{where}: expected rows of type {like.dtype}, as the first ones have; found {split.dtype}.")
        if split.labels.is_floating_point() != self._label_dtype.is_floating_point:
            raise DataError(
                f"{where}: expected labels of type {self._label_dtype}, as the first have; found {split.labels.dtype}."
            )
        count = copy_rows(split, rows)
        labels[:count].copy_(split.labels)
        return count


def kept_type(x: Any, like: Split) -> torch.dtype:
    """Returns the type in which rows are transferred that came as `x` and become `like` on the device."""
    dtype = getattr(as_tensor(x[:1]), "dtype", None) if not like.form else None
    return dtype if dtype in _KEPT and like.dtype == torch.float32 else like.dtype
