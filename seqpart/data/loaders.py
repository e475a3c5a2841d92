"""Turns the user's data into rows that are read once and kept, or into a source of rows that is read anew in every epoch."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset, default_collate

from seqpart.capture.inputs import Several
from seqpart.config import Config
from seqpart.data.generators import generators_kept
from seqpart.data.padding import ITEM, Padding, Sizes, padded, padded_source, sizes_of, tokenizer_says
from seqpart.data.source import Job, Part, Source, SourceReader, kept_type
from seqpart.data.splits import ROWS_AT_ONCE, Split, UnstableRows, as_pair, as_split, is_pair, split_of, spread, targets_of
from seqpart.data.test_sets import are_named
from seqpart.errors import DataError, OptionError, refusing
from seqpart.fields import values_of

C = TypeVar("C", bound=Config)

_FLOOR = -1
"""Rows of an epoch of a stream with drop_last that is not counted yet: as many as make whole batches."""
LOOKED_AT = 1 << 16
"""Most rows of a stream that are counted if the run may end before the stream does: a shorter stream has epochs."""
SECONDS_BETWEEN_LINES = 5.0
"""Seconds between two progress messages."""
_STAGES = 16
"""Parts of a stream's lists among which a DataLoader is looked for."""
_COMPARED = 16
"""Items whose labels are compared with the data set's `targets`, and items that identify the data."""


def training_rows(
    data: object, settings: Config, name: str = "training", padding: Padding | None = None, *, whole: bool = False
) -> Split:  # fmt: skip
    """Returns the training rows of a pair, a data set, a stream or a loader. Raises DataError for what cannot be honoured.

    Rows are read once and kept if they stay the same when read again, and with `cache` "rows" always; else they are read anew.
    padding: with a length, see `for_data`. whole: all labels are read, as where partitions run on them one after another.
    """
    if not is_loader(data):
        data = padded(data, name, padding)
    if isinstance(data, Split):
        if settings.cache == "none" and data.source is None:
            raise OptionError(
                f"--cache none: this {data.name} data is read from its files in order, and so its rows are kept. Leave it out, "
                "or give a data set whose rows can be read by their numbers."
            )
        return data
    if not is_loader(data) and settings.cache != "none" and not getattr(data, "read_anew", False):
        with generators_kept(), suppress(UnstableRows):
            return as_split(data, name, one_draw=name != "training" or settings.cache == "rows")
    split = _of_source(source_of(data, name, padding), settings, whole=whole or settings.cache == "rows")
    return _kept(split) if settings.cache == "rows" else split


def test_rows(
    data: object, train: Split, settings: Config, padding: Padding | None = None, *, whole: bool = True
) -> Split:  # fmt: skip
    """Returns the test rows, read like the training rows: anew if those are not kept. Every pass sees the same draws.

    data: None, or an empty Split, for a run without test rows. whole: as in `training_rows`; only the first of partitions that
    run one after another reads rows with their labels.
    """
    if data is None or (isinstance(data, Split) and not data.count):
        return replace(train, name="test", count=0, labels=train.labels[:0], open=lambda: (), source=None)
    if not is_loader(data):
        data = padded(data, "test", padding)
    if train.source is None and not is_loader(data):
        with generators_kept(), suppress(UnstableRows):
            return as_split(data, "test")
    if isinstance(data, Split) and data.source is not None:
        return data
    source = _stream_of(data) if isinstance(data, Split) else source_of(data, "test", padding)
    if train.source is None:
        return _kept(_of_source(source, settings, whole=True))
    return _of_source(source, settings, whole=whole)


def is_loader(data: object) -> bool:
    """True if `data` is a DataLoader or a stream, which has no rows by number."""
    if isinstance(data, DataLoader | IterableDataset):
        return True
    return hasattr(data, "__iter__") and not hasattr(data, "__getitem__") and not isinstance(data, str | Split)


def first_batch(data: object, settings: Config, name: str, padding: Padding | None) -> Split:
    """Returns the first rows of a loader, a stream or a data set: one batch."""
    source = source_of(data if is_loader(data) else padded(data, name, padding), name, padding)
    rows = source.batch if source.collate is not None else max(values_of(settings.batch_size))
    with generators_kept():
        source = counted(source, rows)
    rows = min(rows, source.count)
    return _kept(_of_source(replace(source, count=rows, rows=rows, goes_on=source.streams), settings, whole=True))


# --- from loaders to sources ------------------------------------------------------------------------------------------


def source_of(data: Any, name: str, padding: Padding | None = None) -> Source:
    """Returns the source of a loader, a stream or a data set. Raises DataError for one that cannot be repeated.

    padding: for a loader's batches, or a stream's items; a data set must be padded already.
    """
    data = as_pair(data, f"{name} data")
    if isinstance(data, DataLoader):
        source = _of_loader(data, name)
    elif is_loader(data):
        if iter(data) is data and not isinstance(data, IterableDataset):  # litdata's begins anew in `__iter__`
            raise DataError(
                f"{name} data: a {type(data).__name__} can be read once, but every epoch reads its rows again. Give an object "
                "whose __iter__ starts from the beginning each time: an IterableDataset."
            )
        source = Source(items=data, name=name, count=_known(data), rows=_known(data), streams=True)
    elif isinstance(data, tuple | list) and len(data) == 2 and hasattr(data[1], "shape"):
        items = Pair(*data)
        source = Source(items=items, name=name, count=len(items), rows=len(items))
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        source = Source(items=data, name=name, count=len(data), rows=len(data))
    else:
        raise DataError(
            f"{name} data: expected a pair (x, y) of tensors or arrays, a data set, an IterableDataset or a DataLoader; "
            f"found {type(data).__name__}."
        )
    if source.sampler is not None:
        _refuse_unrepeatable(source)
    return padded_source(source, padding) if is_loader(data) else source


class Pair:
    """A data set whose items are the rows of x and y."""

    def __init__(self, x: Any, y: Any) -> None:
        self._x, self._y = x, y

    def __len__(self) -> int:
        return int(self._y.shape[0])

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if isinstance(self._x, dict):
            return {name: part[index] for name, part in self._x.items()}, self._y[index]
        if isinstance(self._x, tuple | list):
            return Several(part[index] for part in self._x), self._y[index]
        return self._x[index], self._y[index]


class _InOrder:
    """A stream of the rows of a split that opens its files anew for every pass."""

    def __init__(self, split: Split) -> None:
        self._split = split

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        at = 0
        for rows in self._split.open():
            for row in rows.to(self._split.dtype):
                yield row, self._split.labels[at]
                at += 1


def _stream_of(split: Split) -> Source:
    if split.form:
        raise DataError(f"{split.name} data: its rows have several inputs and are kept; give them as a data set of items.")
    return Source(items=_InOrder(split), name=split.name, count=split.count, rows=split.count, streams=True)


def _known(items: Any) -> int:
    """Returns len(items), or 0 if it has no length."""
    try:
        return len(items)
    except (TypeError, NotImplementedError):
        return 0


def _of_loader(loader: "DataLoader[Any]", name: str) -> Source:
    where, items, batch = f"{name} data: the DataLoader", loader.dataset, loader.batch_size
    if batch is None:  # also with a batch_sampler of the user's; the loader's own may be of its library's class
        kind = "batch_size=None" if loader.batch_sampler is None else type(loader.batch_sampler).__name__
        raise DataError(
            f"{where} makes batches of its own, of any size ({kind}), but every update must have the same number of rows. Give "
            "batch_size, and a sampler for the order; or take batches of up to a size in a loop of your own, Trainer.session."
        )
    streams = isinstance(items, IterableDataset)
    count = _known(items)
    sampler, shuffles, rows = None, False, count
    if not streams:
        sampler, shuffles = _order_of(loader.sampler, count)
        rows = count if sampler is None else _known(loader.sampler)
    sampled = 0 if sampler is None else rows
    if sampler is not None and not rows:
        raise DataError(
            f"{name} data: the set is empty: the DataLoader's sampler has len() 0, or none. Let its __len__ return the number "
            "of its rows, one or more."
        )
    if loader.drop_last:
        rows = _FLOOR if streams and not count else _in_whole_batches(rows, batch, name)
    generator = loader.generator
    return Source(
        items=items, name=name, count=count, rows=rows, streams=streams, batch=batch, shuffles=shuffles, sampler=sampler,
        sampled=sampled, collate=None if loader.collate_fn is default_collate else loader.collate_fn,
        seed=generator.initial_seed() if generator is not None else None,
        workers=loader.num_workers, begin_worker=loader.worker_init_fn,
    )  # fmt: skip


def _in_whole_batches(rows: int, batch: int, name: str) -> int:
    """Returns `rows` without those of an incomplete last batch. Raises DataError if none are left."""
    if rows < batch:
        raise DataError(
            f"{name} data: the DataLoader has drop_last, {rows} rows and batches of {batch}: nothing is left of them."
        )
    return rows - rows % batch


def _order_of(sampler: Any, count: int) -> tuple[Any, bool]:
    """Returns (the sampler, if it is none of torch's two plain ones, else None; true if rows are shuffled)."""
    whole = type(sampler) in (SequentialSampler, RandomSampler) and len(sampler.data_source) == count
    if type(sampler) is SequentialSampler and whole:
        return None, False
    if type(sampler) is RandomSampler and whole and not sampler.replacement and sampler.num_samples == count:
        return None, True
    return sampler, True


def _refuse_unrepeatable(source: Source) -> None:
    draws = source.draws(0, "train", 0, 1)
    with generators_kept():
        first, second = (source.order(draws, shuffle=True) for _ in range(2))
    if not np.array_equal(first, second):
        raise DataError(
            f"{source.name} data: the sampler gives another order for the same epoch and seeds when it is iterated again, so a "
            "killed run could not resume. Let it draw from torch's, numpy's or Python's own generators, from its `generator`, "
            "or by `set_epoch`."
        )


def with_loader(settings: C, train: Split) -> C:
    """Returns `settings` with the batch size and order of the training rows' loader.

    Raises OptionError if the two contradict each other, and for options that do not go with rows that are read again.
    """
    source = train.source or train.kept_from
    if train.source is None:
        if settings.workers:
            raise OptionError("--workers read rows that are not kept, and these are. Leave it out, or give --cache none.")
        if settings.views > 1:
            raise OptionError(
                "--cached-views keeps several draws of rows that are read again, and these rows are kept once. Leave it out."
            )
    if not isinstance(source, Source):
        return settings
    if source.batch:
        batch = values_of(settings.batch_size)[0]
        if batch not in (source.batch, Config.batch_size):
            raise OptionError(f"--batch-size {batch}: the DataLoader has batches of {source.batch}. Give one of the two.")
        if batch != source.batch:
            settings = replace(settings, batch_size=source.batch)
    if source.shuffles is not None or source.streams:
        shuffles = bool(source.shuffles) and not source.streams
        if train.source is None and settings.shuffle != "auto":  # kept rows may come in any order
            return settings
        if settings.shuffle not in ("auto", shuffles):
            raise OptionError(
                f"--shuffle {'yes' if settings.shuffle else 'no'}: "
                + ("a data set that streams gives its own order" if source.streams else "the DataLoader says otherwise")
                + ". Leave it out."
            )
        settings = replace(settings, shuffle=shuffles)
    return settings


# --- from sources to splits -------------------------------------------------------------------------------------------


def _of_source(source: Source, settings: Config, *, whole: bool = False) -> Split:
    """Returns a split whose rows are read when they are needed. whole: read all labels, also floats and those of positions.

    Without `whole` it has all labels if each is one class; else those of the first rows, for their type and shape.
    """
    draws = source.draws(settings.seed, "test" if source.name == "test" else "train", 0, 0)
    steps = None if whole or source.name == "test" else settings.max_steps
    with generators_kept():
        source = counted(source, None if steps is None else steps * (source.batch or max(values_of(settings.batch_size))))
        source = _tested(source) if source.name in ("test", "evaluation") else source
        like, kept = _first(source, draws)
        classes = not like.labels.is_floating_point() and not like.label_form and like.labels.ndim == 1 and not source.goes_on
        part = Part(source, like, kept)
        labels = _labels_of(part, like, draws) if classes or whole else like.labels
    return replace(
        like, count=source.count, labels=labels, open=lambda: (rows for rows, _ in _passed(part, draws)), source=source,
        kept=kept, padded=source.padded, some=partial(_some, source, draws),
    )  # fmt: skip


def _tested(source: Source) -> Source:
    """Returns the source of a test, whose rows are those of its loader in the data set's order. Raises DataError."""
    if source.sampler is not None:
        raise DataError(f"{source.name} data: all rows of it are tested, in order. Give a DataLoader without a sampler.")
    if source.rows == source.count:
        return source
    if source.shuffles or source.streams:
        raise DataError(
            f"{source.name} data: the DataLoader's drop_last leaves out {source.count - source.rows} of {source.count} rows, "
            f"{'which it draws' if source.shuffles else 'the last of a stream'}, and all are tested. Give drop_last=False."
        )
    return replace(source, items=Subset(source.items, range(source.rows)), count=source.rows)


def _some(source: Source, draws: Any) -> Sequence[torch.Tensor]:
    """Returns some rows as passes without updates draw them, if they stay the same when read again; else none."""
    numbers: Sequence[int] = range(min(source.count, source.batch if source.collate is not None else _COMPARED))
    if source.collate is None and not source.streams:
        numbers = spread(source.count, _COMPARED)

    def read() -> list[torch.Tensor]:
        pieces = SourceReader(source).read(draws, 0, numbers)
        return [rows for piece in pieces for rows in split_of(*piece, source.name).open()]

    with generators_kept():
        first, again = read(), read()
    return first if all(map(torch.equal, first, again)) else ()


def counted(source: Source, most: int | None = None) -> Source:
    """Returns `source` with its number of rows, for which a stream without len() is read once.

    most: number of rows that the run will read. A stream with more rows than `most`, or than LOOKED_AT, is not counted further:
    its count is `most`, and it starts from the beginning after its end. Progress is printed, since a stream may be endless.
    """
    if source.count or not source.streams:
        if not source.count:
            raise DataError(f"{source.name} data: the set is empty. Give at least one row.")
        return source
    count, last_written = 0, time.monotonic()
    with refusing(lambda error: DataError(f"{source.name} data: cannot be read: {type(error).__name__}: {error}.")):
        for count, _ in enumerate(source.items, 1):
            if most is not None and count > min(most, LOOKED_AT):
                return replace(source, count=most, rows=most, goes_on=True)
            if time.monotonic() > last_written + SECONDS_BETWEEN_LINES:
                cure = ". Give max_steps where it has no end" if source.name == "training" else ", all of which are needed"
                sys.stderr.write(f"{source.name} data: still counting, {count:,} rows{cure}\n")
                last_written = time.monotonic()
    rows = _in_whole_batches(count, source.batch, source.name) if count and source.rows == _FLOOR else count
    return counted(replace(source, count=count, rows=rows)) if count else counted(replace(source, streams=False))


def _first(source: Source, draws: Any) -> tuple[Split, torch.dtype]:
    """Returns the first rows, and the type in which all rows are transferred."""
    count = min(source.count, source.batch if source.collate is not None else ROWS_AT_ONCE)
    x, y = next(iter(SourceReader(source).read(draws, 0, range(count))))
    like = split_of(x, y, source.name)
    _refuse_batches(source, like)
    return like, kept_type(x, like)


def _refuse_batches(source: Source, like: Split) -> None:
    """Raises DataError if a stream's items are the batches of a DataLoader inside it, and would be taken for rows."""
    held = vars(source.items).values() if source.streams and hasattr(source.items, "__dict__") else ()
    for inner in (one for part in held for one in (part[:_STAGES] if isinstance(part, list | tuple) else (part,))):
        if isinstance(inner, DataLoader) and like.shape[:1] == like.labels.shape[1:2] == (inner.batch_size,):
            raise DataError(
                f"{source.name} data: expected rows; found batches of {inner.batch_size}, which the "
                f"{type(source.items).__name__} has from a DataLoader inside it. Give a DataLoader of the same data set."
            )


def _passed(part: Part, draws: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (rows, labels) of all items in order."""
    source, part = part.source, part.anew()
    step = source.batch if source.collate is not None else ROWS_AT_ONCE
    for batch, start in enumerate(range(0, source.count, step)):
        numbers = np.arange(start, min(start + step, source.count))
        rows, labels = part.empty(len(numbers))
        with generators_kept():
            part.fill(Job(0, draws, batch, numbers), rows, labels)
        yield rows, labels


def _labels_of(part: Part, like: Split, draws: Any) -> torch.Tensor:
    """Returns the labels of all rows: the data set's `targets` if its items agree, else those of a pass over it."""
    source = part.source
    targets = None if source.streams else targets_of(source.items)
    if targets is not None and _agree(source, targets, like, draws):
        labels = as_split((np.zeros((source.count, 1), np.uint8), np.asarray(targets[: source.count])), source.name).labels
        if labels.dtype == like.labels.dtype and labels.shape[1:] == like.labels.shape[1:]:
            return labels
    return torch.cat([labels for _, labels in _passed(part, draws)])


def _agree(source: Source, targets: Sequence[Any], like: Split, draws: Any) -> bool:
    """True if some items, or the first batch of a collate_fn, have the labels that `targets` has."""
    if like.labels.ndim != 1 or like.labels.is_floating_point():
        return False
    if source.collate is not None:
        return [int(label) for label in like.labels] == [int(target) for target in targets[: len(like.labels)]]
    reader = SourceReader(source)
    for number in spread(source.count, _COMPARED):
        ((_, labels),) = reader.read(draws, 0, [number])
        if int(labels[0]) != int(targets[number]):
            return False
    return True


def _kept(split: Split) -> Split:
    """Returns the split with one draw of its rows kept, in the type in which they come. Raises OptionError for a sampler."""
    if isinstance(split.source, Source) and split.source.sampler is not None:
        raise OptionError(
            "--cache rows keeps each row once, and the DataLoader's sampler would not be asked. Give one without a sampler, or "
            "leave --cache out."
        )
    return replace(split, source=None, kept_from=split.source)


def for_data(padding: Padding | None, several: Sequence[Any]) -> Padding | None:
    """Returns `padding` with its length, token and side filled in from all the data that it is for, where it gives none.

    Raises DataError for rows that cannot be read.
    """
    if padding is None:
        return None
    parts = [part for data in several for part in (data.values() if are_named(data) else [data])]
    several = [part for part in parts if part is not None and not isinstance(part, Split)]
    for loader in (data for data in several if isinstance(data, DataLoader)):
        token, side = tokenizer_says(getattr(loader.collate_fn, "tokenizer", None))
        padding = padding.or_else(token, side)
    if padding.length != "longest" or not several:
        return padding
    with generators_kept():
        largest, short = spanned(sizes for data in several for sizes in _sizes(data))
    padding.refuse_unknown(short, "the data")
    return replace(padding, length=largest)


def spanned(several: Iterable[Sizes]) -> tuple[Sizes, list[str | int]]:
    """Returns (the largest size of each tensor, the tensors whose size varies)."""
    largest: Sizes = {}
    smallest: Sizes = {}
    for sizes in several:
        largest |= {key: max(size, largest.get(key, size)) for key, size in sizes.items()}
        smallest |= {key: min(size, smallest.get(key, size)) for key, size in sizes.items()}
    return largest, [key for key in largest if smallest[key] < largest[key]]


def _sizes(data: Any) -> Iterator[Sizes]:
    """Yields the sizes of the data's batches or items, in order."""
    if isinstance(data, Mapping) or is_pair(data):
        yield sizes_of(data)
        return
    source = counted(source_of(data, "training"))
    reader, draws = SourceReader(source), source.draws(0, "train", 0, 0)
    if source.collate is None:
        yield from (sizes_of(reader.item(draws, number), ITEM) for number in range(source.count))
        return
    for batch, first in enumerate(range(0, source.count, source.batch)):
        numbers = range(first, min(first + source.batch, source.count))
        yield from (sizes_of(found) for found in reader.read(draws, batch, numbers))
