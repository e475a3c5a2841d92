"""Packs short rows of tokens into rows of one length, of which a model of transformers sees each by itself."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from seqpart.data.padding import IGNORED
from seqpart.errors import DataError, OptionError

_WHOLE = (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.int64)


def packed(
    rows: Iterable[Any], length: int, *, shifted: bool = True, token: int = 0
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:  # fmt: skip
    """Packs rows into fewer rows of `length` tokens: (x, y) for `fit`, with as little padding as best-fit decreasing leaves.

    rows: sequences of whole numbers, or dicts with `input_ids` and, for other labels than these, `labels`, one for each token
        (-100: it does not count).
    shifted: true for y with the label of the next token in each place, as the default loss takes it; false for labels in their
        tokens' own places, as `loss="model"` and transformers take them.
    token: fills what is left of a row.

    x has `input_ids` and `position_ids`, which begin at 0 again with each of the rows: models of transformers then let tokens
    attend to those of their own row alone, if they keep no cache (`use_cache=False`, as in training here) and get no
    `attention_mask`. y has -100 where no label counts: where there is padding, and for the first token of each row.

    Raises DataError for a row that is longer, empty, padded, or not of whole numbers.
    """
    if not isinstance(length, int) or not isinstance(token, int) or length < 1:
        raise OptionError(
            f"packed: expected a length of at least 1 and a token, whole numbers; found {length!r} and {token!r}."
        )
    pairs = [_tokens(number, row, length) for number, row in enumerate(rows)]
    places = _places([len(tokens) for tokens, _ in pairs], length)
    count = 1 + max((bin for bin, _ in places), default=-1)
    if not count:
        raise DataError("packed: expected at least one row; found none.")
    ids = torch.full((count, length), token)
    positions, labels = torch.arange(length).repeat(count, 1), torch.full((count, length), IGNORED)
    ends = [0] * count
    for (bin, start), (tokens, own) in zip(places, pairs, strict=True):
        end = start + len(tokens)
        ids[bin, start:end], positions[bin, start:end] = tokens, torch.arange(len(tokens))
        first = start if shifted else start + 1
        labels[bin, first : first + len(own) - 1] = own[1:]
        ends[bin] = max(ends[bin], end)
    for bin, end in enumerate(ends):
        positions[bin, end:] -= end
    return {"input_ids": ids, "position_ids": positions}, labels


def _places(lengths: Sequence[int], length: int) -> list[tuple[int, int]]:
    """(packed row, first place in it) for each row: the longest first, each where the least space remains."""
    found = [(0, 0)] * len(lengths)
    spaces = list[tuple[int, int]]()  # (free, packed row), ascending
    count = 0
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        fitting = bisect_left(spaces, (lengths[number], -1))
        if fitting < len(spaces):
            free, bin = spaces.pop(fitting)
        else:
            free, bin, count = length, count, count + 1
        found[number] = bin, length - free
        insort(spaces, (free - lengths[number], bin))
    return found


def _tokens(number: int, row: Any, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    named = row if isinstance(row, Mapping) else {"input_ids": row}
    if "input_ids" not in named:
        raise DataError(f"packed: row {number}: expected input_ids; found {', '.join(map(str, named)) or 'an empty dict'}.")
    if (mask := named.get("attention_mask")) is not None and not torch.as_tensor(mask).all():
        raise DataError(f"packed: row {number}: expected tokens alone; found padding (attention_mask of zeros). Leave it out.")
    try:
        tokens, labels = (torch.as_tensor(named.get(name, named["input_ids"])) for name in ("input_ids", "labels"))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"packed: row {number}: expected whole numbers; found {error}.") from None
    whole = all(one.dtype in _WHOLE for one in (tokens, labels))
    if tokens.ndim != 1 or not len(tokens) or not whole or tokens.shape != labels.shape:
        raise DataError(
            f"packed: row {number}: expected tokens, whole numbers in one dimension, and as many labels; found tokens of shape "
            f"{tuple(tokens.shape)} ({tokens.dtype}) and labels of shape {tuple(labels.shape)} ({labels.dtype})."
        )
    if len(tokens) > length:
        raise DataError(f"packed: row {number} has {len(tokens)} tokens, and packed rows have {length}. Cut it, or give more.")
    return tokens, labels
