"""Pads rows of several lengths to a number, or to the longest row of all data; rows and sources that are padded so."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch

from seqpart.capture.inputs import as_tensor, is_several
from seqpart.data.source import ChangedItems, ChangedStream, Source
from seqpart.data.splits import Split, is_pair
from seqpart.errors import DataError, OptionError
from seqpart.text import short

Key = str | int
"""A tensor in a batch: its name, or its place from 0 if x has no names; `labels` for the labels."""
Sizes = dict[Key, int]
"""Length of each tensor that has a second dimension."""
TOKENS = ("input_ids", "decoder_input_ids")
LABELS, IGNORED = "labels", -100
ZEROS = ("attention_mask", "decoder_attention_mask", "token_type_ids", "position_ids")
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
BATCH, ITEM = 1, 0
"""The dimension that is a row's length."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Pads rows of several lengths to one length, as a plan needs them: `Trainer(model, ..., padding=Padding(128))`.

    length: the length of every padded sequence; "longest": that of the longest row of all data that a call gets, which are
        then read once before the plan; or a length for each tensor by its name, as {"input_ids": 128, "labels": 32}, and then
        no other is padded. Tensors without names use their place in x as their name; a single x has 0.
    token: pads `input_ids`, `decoder_input_ids` and an x without a name that comes first and is int64.
        None: the padding token of the `tokenizer` of a DataLoader's collate_fn, if it has one, and else 0.
    side: "right" or "left" of the row. None: the same tokenizer's side, and else right.
    values: the padding value of other tensors, by name or place. `attention_mask`, `decoder_attention_mask`, `token_type_ids`
        and `position_ids` have 0, and `labels` of whole numbers -100, which no loss counts, unless it says otherwise. For all
        other tensors no value is guessed: they keep their shape, and are refused if their lengths differ.

    A batch, as a DataLoader makes it (a dict, a pair (x, y) or a tuple with its labels last), is padded by a call:
    `padding(batch)`. Rows that are longer than `length` are refused and never cut.

    Raises OptionError for an invalid length, side or number; a call raises DataError for what cannot be padded.
    """

    length: int | Literal["longest"] | Mapping[Key, int]
    _: KW_ONLY
    token: int | None = None
    side: Literal["left", "right"] | None = None
    values: Mapping[Key, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = self.length.values() if isinstance(self.length, Mapping) else [self.length]
        if not all(_is_whole(one, least=1) or one == "longest" == self.length for one in given):
            raise OptionError(
                f'padding: expected a length from 1 up, "longest", or lengths by name; found length={short(self.length)}.'
            )
        if self.token is not None and not _is_whole(self.token):
            raise OptionError(f"padding: expected a token, a whole number from 0 up; found token={short(self.token)}.")
        if self.side not in (None, "left", "right"):
            raise OptionError(f'padding: expected side="left" or "right"; found {short(self.side)}.')
        if not isinstance(self.values, Mapping) or not all(isinstance(one, Real) for one in self.values.values()):
            raise OptionError(f'padding: expected values={{"name": number}}; found {short(self.values)}.')

    def __call__(self, batch: Any) -> Any:
        """Returns `batch`, whose tensors have rows as their first dimension, with its sequences padded."""
        return self.of_batch(batch, "padding")

    def of_batch(self, batch: Any, where: str) -> Any:
        """Returns a padded batch. where: names the batch in errors."""
        return self._padded(batch, BATCH, where)

    def for_items(self, name: str) -> Callable[[Any, int], Any]:
        """Returns a function that pads one row of the data set `name`, given with its number."""
        return lambda item, number: self._padded(item, ITEM, f"{name} data: item {number}")

    def or_else(self, token: int | None, side: Literal["left", "right"] | None) -> "Padding":
        """Returns this padding with `token` and `side` filled in if it has none."""
        return replace(self, token=token if self.token is None else self.token, side=self.side or side)

    def value_of(self, key: Key, dtype: torch.dtype) -> float | None:
        """Returns the padding value of a tensor, or None if it is not known."""
        if key in self.values:
            return self.values[key]
        if key in TOKENS or (key == 0 and dtype == torch.int64):
            return self.token or 0
        if key in ZEROS:
            return 0
        return IGNORED if key == LABELS and dtype in _SIGNED else None

    def refuse_unknown(self, keys: Iterable[Key], where: str) -> None:
        """Raises DataError for the first of `keys`, tensors whose rows have several lengths, without a padding value."""
        for key in keys:
            if key not in self.values and key not in (*TOKENS, *ZEROS, LABELS, 0):
                raise _unknown(key, where)

    def _padded(self, found: Any, dim: int, where: str) -> Any:
        seen: set[Key] = set()

        def change(key: Key, part: Any) -> Any:
            seen.add(key)
            return self._filled(key, part, dim, where)

        padded = _changed(found, change)
        missing = {*self.values, *(self.length if isinstance(self.length, Mapping) else ())} - seen
        if seen and missing:
            raise DataError(
                f"{where}: expected padding only for {', '.join(sorted(map(_named, seen)))}; found padding for "
                f"{', '.join(sorted(map(_named, missing)))}. Give names that the data has."
            )
        return padded

    def _filled(self, key: Key, part: Any, dim: int, where: str) -> Any:
        if len(shape := _shape(part)) <= dim:
            return part
        size = self._size(key, part)
        if size is None or size == shape[dim]:
            return part
        if size < shape[dim]:
            raise DataError(
                f"{where}: expected rows of {_named(key)} of at most {size} places, the length of padding; found one of "
                f"{shape[dim]}. Give padding a length of {shape[dim]} or more, or let the data set cut its rows."
            )
        tensor = _tensor(part)
        if (value := self.value_of(key, tensor.dtype)) is None:
            raise _unknown(key, where)
        filling = tensor.new_full((*shape[:dim], size - shape[dim], *shape[dim + 1 :]), value)
        return torch.cat([filling, tensor] if self.side == "left" else [tensor, filling], dim)

    def _size(self, key: Key, part: Any) -> int | None:
        """Returns the padded length of a tensor, or None if it is not padded."""
        if isinstance(self.length, Mapping):
            return self.length.get(key)
        if isinstance(self.length, str):
            raise OptionError(
                "padding: which row is the longest is known of whole data, and not of one batch. Give these data to fit, "
                "evaluate or session, or give padding a length."
            )
        return None if self.value_of(key, _tensor(part[:1]).dtype) is None else self.length


def as_padding(given: object) -> Padding | None:
    """Returns the Trainer's `padding` argument. Raises OptionError if it is no Padding."""
    if given is None or isinstance(given, Padding):
        return given
    cure = f"Padding({given!r})" if isinstance(given, int) or given == "longest" else "Padding(LENGTH)"
    raise OptionError(f"padding: expected a seqpart.Padding; found {short(given)}. Give {cure}.")


def sizes_of(found: Any, dim: int = BATCH) -> Sizes:
    """Returns the lengths of a batch's tensors, or of an item's."""
    sizes: Sizes = {}

    def note(key: Key, part: Any) -> Any:
        if len(shape := _shape(part)) > dim:
            sizes[key] = max(shape[dim], sizes.get(key, 0))
        return part

    _changed(found, note)
    return sizes


def tokenizer_says(tokenizer: Any) -> tuple[int | None, Literal["left", "right"] | None]:
    """Returns (the tokenizer's padding token, its padding side), each None if it has none."""
    token, side = getattr(tokenizer, "pad_token_id", None), getattr(tokenizer, "padding_side", None)
    return token if _is_whole(token) else None, side if side in ("left", "right") else None


# --- the tensors of a batch or an item ---------------------------------------------------------------------------------


def _changed(found: Any, change: Callable[[Key, Any], Any]) -> Any:
    """Returns a batch or an item with `change` applied to each of its tensors, and anything else unchanged."""
    if isinstance(found, Mapping):
        return {name: _labels(part, change) if name == LABELS else change(name, part) for name, part in found.items()}
    if not isinstance(found, tuple | list) or len(found) < 2:
        return found
    if len(found) > 2:
        return (*(change(place, part) for place, part in enumerate(found[:-1])), _labels(found[-1], change))
    x, y = found
    if isinstance(x, Mapping):
        x = {name: change(name, part) for name, part in x.items()}
    else:
        x = tuple(change(place, part) for place, part in enumerate(x)) if is_several(x) else change(0, x)
    return x, _labels(y, change)


def _labels(y: Any, change: Callable[[Key, Any], Any]) -> Any:
    if isinstance(y, Mapping):
        return {name: change(name, part) for name, part in y.items()}
    return tuple(change(LABELS, part) for part in y) if is_several(y) else change(LABELS, y)


def _shape(part: Any) -> tuple[int, ...]:
    """Returns the shape of a tensor, an array or a list; () for a number, and for anything else."""
    if hasattr(part, "shape"):
        return tuple(part.shape)
    try:
        return tuple(_tensor(part).shape) if isinstance(part, list | tuple) else ()
    except (TypeError, ValueError, RuntimeError):  # for example texts, which are refused when rows are made of them
        return ()


def _tensor(part: Any) -> torch.Tensor:
    # A copy: torch warns about read-only arrays.
    return part if isinstance(part, torch.Tensor) else as_tensor(np.asarray(part))


def _unknown(key: Key, where: str) -> DataError:
    return DataError(
        f"{where}: {_named(key)} has rows of several lengths, and no value to pad them with is known. Give one: "
        f"padding=Padding(..., values={{{key!r}: 0}})."
    )


def _named(key: Key) -> str:
    return key if isinstance(key, str) else f"input {key}"


def _is_whole(found: Any, least: int = 0) -> bool:
    return isinstance(found, int) and not isinstance(found, bool) and found >= least


def _collated(collate: Callable[[list[Any]], Any], padding: Padding, where: str, items: list[Any]) -> Any:
    """Pads what a collate_fn makes of items."""
    return padding.of_batch(collate(items), where)


def padded(data: Any, name: str, padding: Padding | None) -> Any:
    """Returns a pair, or a data set with [i], padded; anything else unchanged, to be refused elsewhere.

    Raises OptionError for rows that have one length already.
    """
    if padding is None:
        return data
    if isinstance(data, Split):
        raise OptionError(f"padding: the rows of this {name} data have one length. Leave it out.")
    if is_pair(data):
        return padding.of_batch(data, f"{name} data")
    return ChangedItems(data, padding.for_items(name)) if hasattr(data, "__getitem__") and hasattr(data, "__len__") else data


def padded_source(source: Source, padding: Padding | None) -> Source:
    if padding is None:
        return source
    source = replace(source, padded=repr(padding))
    if source.collate is not None:
        return replace(source, collate=partial(_collated, source.collate, padding, f"{source.name} data"))
    kind = ChangedStream if source.streams else ChangedItems
    return replace(source, items=kind(source.items, padding.for_items(source.name)))
