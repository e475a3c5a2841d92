"""A text file as tokens of a given tokenizer: a row is a window of them, its labels are the tokens that follow.

The tokenizer is read from a directory, and from nowhere else. The file is encoded in pieces of whole lines, about 64,000
characters each, without the tokens that mark a beginning or an end, and kept once, of which rows and labels are views.
"""

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from seqpart.data.splits import Split
from seqpart.errors import DataError, OptionError, first_line
from seqpart.zoo.text import context_of, pieces, refuse_short, splits_of

Encode = Callable[[str], list[int]]

_FILE = "tokenizer.json"
_LONGEST = 1 << 20
"""Characters of a line after which it is cut at the end of a word."""


def load(path: Path, folder: Path | None, context: int | None = None) -> tuple[Split, Split]:
    """Returns (training, test): windows of `context` tokens side by side; the last tenth of the tokens is the test split.

    folder: with the tokenizer. Raises OptionError for what is none, DataError for a file that is no text or too short.
    """
    context = context_of(context, "tokens")
    if not path.is_file():
        raise DataError(f"--data hf-text:{path}: no such file.")
    tokens = _tokens(path, tokenizer(folder))
    refuse_short(path, len(tokens), context, "token")
    return splits_of(tokens, context)


def tokenizer(folder: Path | None) -> Encode:
    """Returns the function from text to tokens of the tokenizer in `folder`: its tokenizer.json, or what transformers reads.

    Raises OptionError where there is none, or no library for it.
    """
    if folder is None:
        raise OptionError("--data hf-text:FILE needs --tokenizer DIR, a directory with tokenizer.json, or --model hf:DIR.")
    if not folder.is_dir():
        raise OptionError(f"--tokenizer {folder}: no such directory. Give one with tokenizer.json.")
    try:
        return _of_file(folder / _FILE) if (folder / _FILE).is_file() else _of_transformers(folder)
    except ImportError as error:
        raise OptionError(f'--tokenizer {folder}: {error.name} is missing: pip install "seqpart[hf]".') from None
    except Exception as error:
        raise OptionError(f"--tokenizer {folder}: no tokenizer can be read there: {first_line(error)}") from error


def _of_file(path: Path) -> Encode:
    """Reads tokenizer.json without transformers, whose import takes 100 MB of the limit."""
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(str(path))
    found.no_truncation()
    found.no_padding()
    return lambda text: list(found.encode(text, add_special_tokens=False).ids)


def _of_transformers(folder: Path) -> Encode:
    import transformers

    found: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return lambda text: list(found(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"])


def _tokens(path: Path, encode: Encode) -> torch.Tensor:
    found = deque(np.array(encode(piece), np.int32) for piece in _whole_lines(path))
    most = max((int(piece.max()) for piece in found if len(piece)), default=0)
    tokens, at = np.zeros(sum(map(len, found)), np.int16 if most < 1 << 15 else np.int32), 0
    while found:
        piece = found.popleft()
        tokens[at : at + len(piece)] = piece
        at += len(piece)
    return torch.from_numpy(tokens)


def _whole_lines(path: Path) -> Iterator[str]:
    """Yields the text in pieces that end with a line, or a word if lines are very long."""
    rest = ""
    for piece in pieces(path):
        rest += piece
        end = rest.rfind("\n") + 1
        if not end and len(rest) > _LONGEST:
            end = rest.rfind(" ") + 1 or len(rest)
        if end:
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest
