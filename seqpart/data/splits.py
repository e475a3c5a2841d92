"""Checks the user's data sets and turns them into the rows of boundary 0.

Rows are streamed home a chunk at a time, so a data set larger than the limit is no different from a small one.

Rows are quantities (float32, or float64 if requested) or tokens (int64), which an embedding looks up. Whole numbers of 8 or
16 bits, as in images, are quantities; those of 32 or 64 bits are tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, Subset

from seqpart.capture.inputs import (
    PADS,
    Form,
    as_tensor,
    described,
    dims_of,
    form_of,
    is_several,
    nbytes_of,
    one_row,
    packed,
    some_rows,
)
from seqpart.data.generators import own_generators, states
from seqpart.data.labels import are_several, labels_of_items, labels_of_rows, plain
from seqpart.errors import DataError, refusing
from seqpart.model.losses import label_dtype


def as_pair(data: object, where: str) -> object:
    """Returns all rows at once as (x, y) if they are a dict of tensors with `labels`, or several tensors with the labels last,
    and other data unchanged.

    Raises DataError for x alone, and for a dict without labels.
    """
    if isinstance(data, torch.Tensor | np.ndarray):
        raise DataError(
            f"{where}: expected a pair (x, y) of rows and labels; found a {type(data).__name__} alone, of shape "
            f"{tuple(data.shape)}. Give (x, y), (x, x) where rows are to come out as they went in, or a loss of what the model "
            "returns alone: Trainer(model, lambda output: ...)."
        )
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, list) for part in data) and len(data[0]) > 2:
        raise DataError(
            f"{where}: expected a pair (x, y) of tensors or arrays; found two lists, of {len(data[0])} and {len(data[1])}. "
            "Give (torch.tensor(x), torch.tensor(y))."
        )
    if isinstance(data, tuple) and len(data) == 2 and _has_dims(data[0]) and isinstance(data[1], list):
        return data if any(map(dims_of, data[1])) else (data[0], np.asarray([plain(label) for label in data[1]]))
    if isinstance(data, str):
        raise DataError(f"{where}: expected a pair (x, y) of tensors or arrays, or a data set; found the text {data[:60]!r}.")
    if hasattr(data, "columns") and hasattr(data, "iloc"):
        raise DataError(
            f"{where}: expected a pair (x, y) of tensors or arrays, or a data set; found a table of pandas. Give "
            "(table[[NAME, ...]].to_numpy(), table[NAME].to_numpy())."
        )
    if isinstance(data, Mapping) and data and all(isinstance(name, str) for name in data):
        if "train" in data and not {"label", "labels"} & set(data):
            raise DataError(f"{where}: found several data sets: {', '.join(data)}. Give one of them, as data['train'].")
        x, y = inputs_and_labels(data, where)
        return x, y if hasattr(y, "shape") or isinstance(y, Mapping) else np.asarray(y)
    if isinstance(data, tuple | list) and len(data) > 2:
        *inputs, labels = data
        if all(map(_has_dims, inputs)) and (_has_dims(labels) or isinstance(labels, Mapping)):
            return x_and_y(data, where)
    return data


def _has_dims(part: object) -> bool:
    return len(getattr(part, "shape", ())) > 0


def inputs_and_labels(found: Mapping[Any, Any], where: str) -> tuple[dict[Any, Any], Any]:
    """Returns (inputs by name, labels) of a dict with `labels`, or else `label`, as data sets of Hugging Face have it."""
    name = "label" if "labels" not in found and "label" in found else "labels"
    if name not in found:
        raise DataError(
            f"{where}: expected a dict with labels beside the inputs that the model takes by name; found "
            f"{', '.join(map(str, found)) or 'an empty one'}. Name them labels, or give a pair (x, labels)."
        )
    return {other: part for other, part in found.items() if other != name}, found[name]


def x_and_y(found: Any, where: str) -> tuple[Any, Any]:
    """Returns (x, labels) of an item or a batch: a dict with `labels`, a pair, or a tuple, labels last. Raises DataError."""
    if isinstance(found, Mapping):
        return inputs_and_labels(found, where)
    if not isinstance(found, tuple | list) or len(found) < 2:
        raise DataError(
            f"{where}: expected a pair (x, label), a tuple whose last is the label, or a dict with labels; "
            f"found {kind_of(found)}."
        )
    return (found[0] if len(found) == 2 else tuple(found[:-1])), found[-1]


def refuse_nested(x: object, y: object, where: str) -> None:
    """Raises DataError for a dict, or unlike tensors, in a part of x or of the labels y."""
    for part in (x, y):
        parts = part.items() if isinstance(part, Mapping) else enumerate(part) if isinstance(part, tuple) else ()
        for key, inner in parts:
            if isinstance(inner, Mapping):
                raise DataError(
                    f"{where}: expected a tuple or a dict of tensors; found a dict in it, as {key!r}, of "
                    f"{', '.join(map(str, inner))}. Give each of these a name of its own, and let the model, or the loss, put "
                    "them into a dict."
                )
            if isinstance(inner, tuple | list) and len({tuple(getattr(one, "shape", ())) for one in inner}) > 1:
                raise DataError(
                    f"{where}: expected a tuple or a dict of tensors; found a {type(inner).__name__} of several in it, as "
                    f"{key!r}. Give each of these a place of its own, and let the model, or the loss, put them together."
                )


def is_pair(data: object) -> TypeGuard[Sequence[Any]]:
    """True if `data` is (x, y) of all rows, or of a batch."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        return False
    x, y = data
    if hasattr(x, "shape"):
        return hasattr(y, "shape") or (are_several(y) and bool(y))
    if not is_several(x) or hasattr(y, "shape"):
        return is_several(x)
    if not are_several(y) or not y:
        return False
    if isinstance(x, Mapping):
        return not {"label", "labels"} & set(x)  # with them it is an item, and y another
    if isinstance(y, Mapping):
        return True
    # Two tuples in a list are two items.
    return isinstance(data, tuple) and len({(getattr(part, "shape", ()) or (0,))[0] for part in (*x, *y)}) == 1


def kind_of(item: object) -> str:
    """Returns the item's type and its shape or length, in words."""
    shape = getattr(item, "shape", None)
    if shape is not None:
        return f"a {type(item).__name__} of shape {tuple(shape)}"
    return f"a {type(item).__name__}" + (f" of {len(item)}" if isinstance(item, tuple | list) else "")


ROWS_AT_ONCE = 256
QUANTITIES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
TOKENS = torch.int64
_WHOLE_TO = {torch.float32: 1 << 24, torch.float64: 1 << 53}
"""Largest magnitude up to which every whole number is exact in the type."""
_WIDE = (torch.int32, torch.uint32, torch.int64, torch.uint64)
LOOKED_AT = 128 << 20
"""Most bytes, 8 for each number, of rows in memory that are read to identify the data."""
READ_TWICE = 32
"""Items of a data set that are read a second time, to check that they stay the same."""


class UnstableRows(DataError):
    """Items of a data set differ when they are read again."""


class RowSource(Protocol):
    """A source of rows that are read again in every epoch; `rows`: how many an epoch has."""

    @property
    def rows(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Split:
    """Training or test rows. `open` starts a new pass over them: tensors (some rows, *shape) of numbers, in order."""

    name: str
    count: int
    shape: tuple[int, ...]
    labels: torch.Tensor
    """(count,) int64 classes or floats to regress; (count, ...) classes of positions or floats; uint8 with a label form."""
    open: Callable[[], Iterable[torch.Tensor]]
    dtype: torch.dtype = torch.float32
    """The type of its rows, one of QUANTITIES or int64 (tokens); uint8 with a form."""
    form: Form = ()
    """How several inputs are packed in a row of bytes."""
    label_form: Form = ()
    """How several labels are packed in a row of bytes."""
    source: RowSource | None = None
    """Reads its rows whenever they are needed, without keeping any; None: they are read once and kept."""
    kept_from: RowSource | None = None
    """The loader or stream of which one draw of each row is kept: its batch size and order count."""
    kept: torch.dtype | None = None
    """The type in which rows are kept or transferred, if it is a smaller one; None: `dtype`."""
    labelled: bool = True
    """False if no row has a label: they are zeros, which no loss gets."""
    padded: str = ""
    """The padding of rows that are read again; "": none."""
    sets: tuple[tuple[str, int], ...] = ()
    """(name, rows) of each of several test sets, whose rows follow one another; empty if there is one."""
    some: Callable[[], Iterable[torch.Tensor]] | None = None
    """Returns rows spread over the split, which identify it; none if they differ each time. None: use the first rows."""

    @property
    def epoch_rows(self) -> int:
        return self.count if self.source is None else self.source.rows

    @property
    def has_all_labels(self) -> bool:
        """False if only labels of the first rows are known."""
        return len(self.labels) >= self.count

    @property
    def tokens(self) -> bool:
        return self.dtype == TOKENS

    @property
    def label_type(self) -> torch.dtype:
        """The type in which a loss gets its labels."""
        return self.labels.dtype if self.label_form else label_dtype(self.labels)

    def one_label(self) -> torch.Tensor:
        """The labels for a model that computes its loss itself. Raises DataError if a row has several."""
        if self.label_form:
            raise DataError(
                f'loss="model": expected one tensor of labels; found several in a row ({described(self.label_form)}). Models '
                "that make a loss of boxes inside, as torchvision's detectors do, cannot be trained here: what they propose "
                "depends on values. Of another model join the labels in one tensor, which it takes apart."
            )
        return self.labels


def as_split(data: object, name: str, *, one_draw: bool = True) -> Split:
    """Returns a Split of a Split, a pair (x, y) of tensors or arrays, or a map-style data set of (x, y) items.

    x may also be a dict of tensors, which the model takes by name, or a tuple of tensors, which it takes in order; an item
    may be a dict with its labels as `labels`. Floats keep their types until the model is known, see `row_types`. x of whole
    numbers of 32 or 64 bits is tokens and becomes int64, of smaller ones, such as uint8 images, float32; of several tensors
    each keeps its own. A Split's `dtype` is kept. y has one label for each row; or whole numbers (rows, ...), a class for each
    position, or floats of any shape; or it is a dict or a tuple of these, for a loss that takes one.

    Raises DataError for anything else, for no rows, for rows of different shapes, for x and y of different length, and for a
    data set whose items differ when they are read again, as with random augmentation: rows are read once and kept. So does
    reading the rows: where an item has another label than `targets`, and, unless `one_draw`, where one draws random numbers.
    """
    data = as_pair(data, f"{name} data")
    if isinstance(data, Split):
        split = _known_dtype(data)
    elif is_pair(data):
        return split_of(data[0], data[1], name)
    elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        split = _from_items(data, name, one_draw=one_draw)
    elif isinstance(data, DataLoader):
        raise DataError(
            f"{name} data: a DataLoader makes batches, which the plan does here. Give its data set (loader.dataset), and "
            "batch_size, micro_batch_size and shuffle as options; a data set with augmentation is refused, since rows are kept."
        )
    else:
        raise DataError(
            f"{name} data: expected a pair (x, y) of tensors or arrays, or a data set with len() and [i]; "
            f"found {type(data).__name__}."
        )
    return _with_rows(split, name)


def split_of(x: Any, y: Any, name: str) -> Split:
    """Returns a Split of the x and the labels y of all rows, each one tensor or several, see `as_split`. Raises DataError."""
    where = f"{name} data"
    refuse_nested(x, y, where)
    labels, label_form = labels_of_rows(y, name)
    count, form = len(labels), () if hasattr(x, "shape") else form_of(x, where, whole=True)
    for part in (x,) if not form else x.values() if isinstance(x, Mapping) else x:
        if not hasattr(part, "shape"):
            kind = type(part).__name__
            raise DataError(f"{where}: expected tensors or arrays with all rows; found a {kind}. Give torch.tensor(...) of it.")
        rows = part.shape[0] if len(part.shape) else "no"  # zarr's arrays have no len()
        if rows != count:
            raise DataError(f"{where}: {rows} rows of x and {count} labels; the numbers must be equal.")
    if not form:
        _refuse_no_numbers(x, where)

    def passes(step: int = 1) -> Iterator[torch.Tensor]:  # holds no labels, which may become others
        for start in range(0, count, ROWS_AT_ONCE * step):
            own = slice(start, start + ROWS_AT_ONCE * step, step)
            if form:
                yield packed(some_rows(x, own), form, where)
            else:
                found = x[own]  # a copy: torch warns about read-only arrays, such as memory-mapped ones
                yield as_tensor(found if isinstance(found, torch.Tensor) else np.asarray(found))

    shape = (nbytes_of(form),) if form else tuple(int(n) for n in x.shape[1:])
    nbytes = count * prod(shape) * (1 if form else 8)
    split = Split(
        name=name, count=count, shape=shape, labels=labels, open=passes, dtype=torch.uint8 if form else _dtype_of(x), form=form,
        label_form=label_form, some=partial(passes, max(1, -(-nbytes // LOOKED_AT))),
    )  # fmt: skip
    return _with_rows(split, name)


def _with_rows(split: Split, name: str) -> Split:
    if not split.count:
        raise DataError(f"{name} data: the set is empty. Give at least one row.")
    if not prod(split.shape):
        raise DataError(f"{name} data: rows of shape {split.shape} hold no numbers.")
    return split


def _known_dtype(split: Split) -> Split:
    dtype = split.dtype
    if split.form or dtype in (*QUANTITIES, TOKENS):
        return split
    if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex:
        known = ", ".join(str(one).removeprefix("torch.") for one in QUANTITIES)
        raise DataError(f"{split.name} data: expected rows of {known} or int64 (tokens); found dtype={dtype}.")
    return replace(split, dtype=TOKENS)


def _dtype_of(x: object) -> torch.dtype:
    """Returns int64 for whole numbers that a float32 may round (ids, tokens, times), floats as they are, else float32."""
    dtype = getattr(x, "dtype", "")
    name = getattr(dtype, "name", str(dtype)).removeprefix("torch.")
    if name in ("int32", "uint32", "int64", "uint64"):
        return TOKENS
    return next((one for one in QUANTITIES if str(one) == f"torch.{name}"), torch.float32)


def _refuse_no_numbers(x: Any, where: str) -> None:
    """Raises DataError for an x of one tensor without a dimension for the numbers of a row, sparse, or of other values."""
    if len(x.shape) == 1 and x.shape[0]:
        raise DataError(f"{where}: x has one number a row and no dimension for it. Give x of shape (rows, 1): x[:, None].")
    if getattr(x, "layout", torch.strided) is not torch.strided:
        raise DataError(f"{where}: expected x with all its numbers; found {x.layout}. Give x.to_dense().")
    if isinstance(x, np.ndarray) and x.dtype.kind not in "buifc":
        raise DataError(f"{where}: expected x to be numbers; found an array of type {x.dtype}.")


def _from_items(items: Any, name: str, *, one_draw: bool) -> Split:
    with refusing(
        lambda error: DataError(
            f"{name} data: len() of the {type(items).__name__} failed: {type(error).__name__}: {error}. Let its __len__ return "
            "the number of its rows."
        )
    ):
        count = len(items)
    if not count:
        raise DataError(f"{name} data: the set is empty. Give at least one row.")
    x, y = _item(items, 0, name)
    refuse_nested(x, y, f"{name} data: item 0")
    several = form_of(x, f"{name} data: item 0", whole=False) if is_several(x) else ()
    dtype = torch.uint8 if several else _dtype_of(x)
    first = _row(items, 0, name, several)[0]
    own = own_generators(items)
    targets = believed = targets_of(items)
    if _other_labels(items, name, believed, several):
        believed, drawn = None, states(own)
        targets = [_item(items, i, name)[1] for i in range(count)]
        if states(own) != drawn:
            raise _unstable(name, "some items draw random numbers")

    def passes() -> Iterator[torch.Tensor]:
        for start in range(0, count, ROWS_AT_ONCE):
            drawn = states(own)
            read = [_row(items, i, name, several) for i in range(start, min(start + ROWS_AT_ONCE, count))]
            if not one_draw and states(own) != drawn:
                raise _unstable(name, f"some of the items {start}..{start + len(read) - 1} draw random numbers")
            for i, (_, label) in enumerate(read if believed is not None else (), start):
                if not _same_label(label, believed[i]):
                    raise DataError(
                        f"{name} data: item {i} has the label {label}, and the data set's `targets` has {believed[i]}. Correct "
                        "`targets`, or give --cache none, which takes labels from the items."
                    )
            rows = [row for row, _ in read]
            odd = next((i for i, row in enumerate(rows) if row.shape != first.shape), None)
            if odd is not None:
                raise DataError(
                    f"{name} data: row shapes differ: {tuple(first.shape)} in row 0 and {tuple(rows[odd].shape)} in row "
                    f"{start + odd}. Resize or crop them to one shape{getattr(items, 'resized_by', '')}. {PADS}"
                )
            yield torch.stack(rows)

    labels, label_form = labels_of_items(targets, name)
    return Split(
        name=name, count=count, shape=tuple(first.shape), labels=labels, open=passes, dtype=dtype, form=several,
        label_form=label_form, some=lambda: (_row(items, i, name, several)[0][None] for i in spread(count, READ_TWICE)),
    )  # fmt: skip


def spread(count: int, most: int) -> list[int]:
    """Returns at most `most` of `count` numbers, evenly spread, with the first and the last."""
    return sorted({int(i) for i in np.linspace(0, count - 1, most)})


def targets_of(items: Any) -> Any:
    """Returns the data set's own list of its labels; None if it has none, or if a transform makes others of them."""
    if isinstance(items, Subset):
        found = targets_of(items.dataset)
        return None if found is None else [found[index] for index in items.indices]
    found = getattr(items, "targets", None) if getattr(items, "target_transform", None) is None else None
    return found if found is not None and len(found) == len(items) else None


def _other_labels(items: Any, name: str, targets: Any, form: Form) -> bool:
    """True if some items have other labels than `targets`. Raises UnstableRows if an item changes between two reads, or draws
    random numbers."""
    chosen, own = spread(len(items), READ_TWICE), own_generators(items)
    drawn = states(own)
    read = {i: _row(items, i, name, form) for i in chosen}
    draws = states(own) != drawn
    first = {i: _digest(row, label) for i, (row, label) in read.items()}
    labels = {i: plain(label) for i, (_, label) in read.items()}
    del read
    for i in chosen:
        if draws or _digest(*_row(items, i, name, form)) != first[i]:
            raise _unstable(name, f"item {i} is another one when it is read again, or draws random numbers")
    return targets is None or not all(_same_label(label, targets[i]) for i, label in labels.items())


def _unstable(name: str, found: str) -> UnstableRows:
    return UnstableRows(
        f"{name} data: {found}: does the data set change items at random (augmentation)? Rows are read once and kept, so every "
        "epoch would see the same draw. Give --cache none, or the data set without that, and let the model's first block "
        "augment, which draws again in every epoch; or keep one draw on purpose: --cache rows, or [data[i] for i in "
        "range(len(data))]."
    )


def _same_label(label: Any, target: Any) -> bool:
    """True if an item's label is what `targets` has, or if it has none."""
    return label is None or np.array_equal(plain(label), plain(target))


def _digest(row: torch.Tensor, label: Any) -> int:
    digest = xxhash.xxh3_64(row.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    digest.update(repr(plain(label)).encode())
    return digest.intdigest()


def unreadable(name: str, items: Any, index: int, error: Exception) -> DataError:
    """Returns the error for an unreadable item; names its file if the data set lists files as torchvision's folders do."""
    samples = getattr(items, "samples", None)
    sample = samples[index] if isinstance(samples, list) and 0 <= index < len(samples) else None
    file = f" ({sample[0]})" if isinstance(sample, tuple) and sample and isinstance(sample[0], str) else ""
    return DataError(f"{name} data: item {index}{file} cannot be read: {type(error).__name__}: {error}.")


def _item(items: Any, index: int, name: str) -> tuple[Any, Any]:
    with refusing(lambda error: unreadable(name, items, index, error)):
        return x_and_y(items[index], f"{name} data: item {index}")


def _row(items: Any, index: int, name: str, form: Form) -> tuple[torch.Tensor, Any]:
    x, y = _item(items, index, name)
    where = f"{name} data: item {index}"
    with refusing(lambda error: DataError(f"{where}: expected a pair (x, label) of numbers: {error}.")):
        return (packed(one_row(x), form, where)[0] if form else as_tensor(x)), y


def form_of_rows(split: Split) -> str:
    """Describes a split's rows: `(16,) float32`, or `a dict of ids (7,) int64, mask (7,) bool`."""
    return _in_words(split.form, split.shape, split.dtype)


def form_of_labels(split: Split) -> str:
    return _in_words(split.label_form, tuple(split.labels.shape[1:]), split.labels.dtype)


def _in_words(form: Form, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    if form:
        return f"a {'tuple' if form[0].name is None else 'dict'} of {described(form)}"
    return f"{shape or 'a number'} {str(dtype).removeprefix('torch.')}"


def count_tokens(train: Split, test: Split) -> int:
    """Returns the size of the vocabulary that the token rows use; it takes a pass over them."""
    return 1 + max(int(converted(rows, split).max()) for split in (train, test) for rows in split.open())


def refuse_mismatch(train: Split, test: Split) -> None:
    if train.form != test.form:
        raise DataError(f"training rows have the inputs {described(train.form)}, and test rows {described(test.form)}.")
    if train.shape != test.shape:
        raise DataError(
            f"training rows have shape {train.shape} and test rows {test.shape}. Bring both to one shape: the same network "
            "takes them."
        )
    if train.dtype != test.dtype:
        raise DataError(
            f"training rows are {train.dtype} and test rows {test.dtype}; give both as one type. Whole numbers of 64 bits are "
            "tokens: give quantities as floats."
        )


def first_rows(split: Split, count: int) -> Split:
    """Returns the first `count` rows, or as many as there are."""
    count = min(count, split.count)

    def passes() -> Iterator[torch.Tensor]:
        left = count
        for rows in split.open():
            if left > 0:
                yield rows[:left]
            left -= len(rows)
            if left <= 0:
                return

    return replace(split, count=count, labels=split.labels[:count], open=passes)


def write_rows(split: Split, append: Callable[[torch.Tensor], None]) -> None:
    """Streams every row of `split`, in its dtype, into `append`.

    Raises DataError, naming the row, at the first NaN or infinity, and at the first token below 0.
    """
    done = 0
    for found in split.open():
        rows = converted(found, split)
        if tuple(rows.shape[1:]) != split.shape:
            raise DataError(
                f"{split.name} data: expected rows of shape {split.shape}; found {tuple(rows.shape[1:])} from row {done} on."
            )
        _refuse_bad_values(rows, split, done)
        append(rows)
        done += len(rows)
    if done != split.count:
        raise DataError(f"{split.name} data: expected {split.count} rows, as len() says; found {done}.")


def copy_rows(split: Split, into: torch.Tensor) -> int:
    """Copies every row of `split` to the beginning of `into`, (rows, *shape). Returns how many. Raises as `write_rows` does."""
    at = 0

    def append(rows: torch.Tensor) -> None:
        nonlocal at
        into[at : at + len(rows)].copy_(rows)
        at += len(rows)

    write_rows(split, append)
    return at


def converted(found: torch.Tensor, split: Split) -> torch.Tensor:
    """Returns rows converted to the split's type. Raises DataError if that would change their values."""
    if found.is_complex() and not split.dtype.is_complex:
        raise DataError(f"{split.name} data: expected real numbers; found {found.dtype}.")
    if split.tokens and found.is_floating_point():
        raise DataError(f"{split.name} data: expected tokens (whole numbers); found {found.dtype}.")
    if split.tokens and found.dtype == torch.uint64 and bool((found.view(torch.int64) < 0).any()):
        most = max(found.flatten().tolist())
        raise DataError(f"{split.name} data: {most} is beyond 63 bits, and no torch operation takes it. Hash it to fewer.")
    if split.dtype in _WHOLE_TO and found.dtype in _WIDE and len(found):
        least, most = (int(end) for end in found.to(torch.int64).aminmax())
        if max(-least, most) > _WHOLE_TO[split.dtype]:
            raise DataError(
                f"{split.name} data: x is {str(found.dtype).removeprefix('torch.')} and becomes {split.dtype}, which rounds "
                f"{most if most > -least else least}. Where these are ids or tokens, give them as 64-bit numbers, which stay "
                "whole (x.long(), x.astype('int64')); where they are quantities, give floats (x.float())."
            )
    return found.to(split.dtype)  # before the check of values: 1e300 is infinity as a float32


def _refuse_bad_values(rows: torch.Tensor, split: Split, done: int) -> None:
    if split.form:  # packing has checked them
        return
    bad = (rows.flatten(1) < 0 if split.tokens else ~rows.flatten(1).isfinite()).any(1)
    if not bool(bad.any()):
        return
    row = done + int(bad.nonzero()[0])
    if split.tokens:
        raise DataError(
            f"{split.name} data: found token {int(rows[row - done].min())} in row {row}; expected tokens that count from 0. "
            "Whole numbers of 64 bits are tokens: give quantities as floats."
        )
    raise DataError(
        f"{split.name} data: NaN or infinity (as a {rows.dtype.itemsize * 8}-bit float) in row {row}. "
        "Clean the data: one such row spoils every weight."
    )
