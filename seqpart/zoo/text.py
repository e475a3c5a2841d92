"""A text file as characters to predict: a row is a window of tokens, its labels are the characters that follow them.

The file is decoded a piece at a time and kept once, as tokens of one or two bytes, of which rows and labels are views.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from seqpart.data.splits import ROWS_AT_ONCE, TOKENS, Split
from seqpart.errors import DataError, OptionError

CONTEXT = 128
MOST_CHARACTERS = 1 << 15
"""Most different characters: each costs an output and a row of the embedding, and a token must fit int16."""
_PIECE = 1 << 16
"""Characters processed at once: each takes a few temporaries of 8 bytes."""


def load(path: Path, context: int | None = None) -> tuple[Split, Split]:
    """Returns (training, test): windows of `context` characters side by side; the last tenth of the text is the test split.

    Raises DataError for a file that is no UTF-8 text, too short, or of too many different characters.
    """
    context = context_of(context, "characters")
    characters, count = _looked_through(path)
    refuse_short(path, count, context, "character")
    return splits_of(_tokens(path, characters, count), context)


def context_of(asked: int | None, what: str) -> int:
    """Returns --context, or its default. Raises OptionError."""
    context = CONTEXT if asked is None else asked
    if context < 1:
        raise OptionError(f"--context: expected {what} from 1 up; found {context}.")
    return context


def refuse_short(path: Path, count: int, context: int, what: str) -> None:
    """Raises DataError where a file's `count` characters or tokens, `what` of them one is, make no rows for both splits."""
    if count <= 10 * context:
        raise DataError(
            f"{path}: {count} {what}s are too few for rows of {context}: the last tenth is the test split, and a row needs the "
            f"next {what} too. Give at least {10 * context + 1} {what}s, or a smaller --context."
        )


def splits_of(tokens: torch.Tensor, context: int) -> tuple[Split, Split]:
    """Returns (training, test): the last tenth of the tokens is the test split."""
    first_of_test = len(tokens) * 9 // 10
    return _windows("training", tokens[:first_of_test], context), _windows("test", tokens[first_of_test:], context)


def vocabulary(path: Path) -> str:
    """Returns the file's different characters in order: token i is the i-th."""
    return "".join(map(chr, _looked_through(path)[0]))


def _windows(name: str, tokens: torch.Tensor, context: int) -> Split:
    """Rows of `context` tokens side by side, and as labels the same one token later; what is left at the end is not used."""
    rows = (len(tokens) - 1) // context
    x, y = (tokens[start : start + rows * context].view(rows, context) for start in (0, 1))
    return Split(
        name=name, count=rows, shape=(context,), labels=y, open=lambda: torch.split(x, ROWS_AT_ONCE), dtype=TOKENS
    )  # fmt: skip


def _looked_through(path: Path) -> "tuple[np.ndarray[tuple[int], np.dtype[np.uint32]], int]":
    """Returns (sorted code points of the different characters, number of characters)."""
    if not path.is_file():
        raise DataError(f"--data text:{path}: no such file.")
    found: set[str] = set()
    count = 0
    for piece in pieces(path):
        found |= set(piece)
        count += len(piece)
        if "\0" in found:
            raise DataError(f"{path} is not a text: it has a zero byte. Give a UTF-8 text file.")
        if len(found) > MOST_CHARACTERS:
            raise DataError(f"{path} has more than {MOST_CHARACTERS} different characters. Give a text of fewer.")
    if not count:
        raise DataError(f"{path} is empty. Give a UTF-8 text file.")
    return np.array(sorted(map(ord, found)), np.uint32), count


def pieces(path: Path) -> Iterator[str]:
    """Yields the text of a file in pieces. Raises DataError if it is not UTF-8, or cannot be read."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            while piece := file.read(_PIECE):
                yield piece
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: {error.reason} (0x{error.object[error.start]:02x}). Give a UTF-8 text file."
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.") from None


def _tokens(path: Path, characters: "np.ndarray[tuple[int], np.dtype[np.uint32]]", count: int) -> torch.Tensor:
    tokens = np.zeros(count, np.uint8 if len(characters) <= 256 else np.int16)
    at = 0
    for piece in pieces(path):
        codes = np.frombuffer(piece.encode("utf-32-le"), np.uint32)[: count - at]  # the file may have grown
        tokens[at : at + len(codes)] = np.searchsorted(characters, codes)
        at += len(codes)
    return torch.from_numpy(tokens)
