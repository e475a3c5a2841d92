"""Paths and small text files that come from outside, looked at before they are used: plans, options, markers, manifests."""

import errno
import json
import stat
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from seqpart.errors import OptionError

MOST_BYTES = 256 << 20
"""A plan takes 1 KB for each partition; whoever names a larger file means another."""
_SHOWN = 60


def short(value: object) -> str:
    """`value` as it may stand in a message."""
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 20]}...{text[-12:]} ({len(text)} characters)"


def refuse_unusable(option: str, path: Path) -> None:
    """Raises OptionError for a path that no file can have: a zero byte, a name that is too long, links in a circle."""
    if (fault := path_fault(path)) is not None:
        raise OptionError(f"{option}: expected a path; found {fault}.")


def path_fault(path: Path) -> str | None:
    """Why no file can have it, in words; None where one can."""
    try:
        path.stat()
    except ValueError:  # UnicodeEncodeError is one
        return f"{short(str(path))}, which no file can be called"
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            return f"{short(str(path))}: {error.strerror}"
    return None


def read_text(path: Path) -> str:
    """The text of a regular file. Raises OSError or ValueError, in words: a pipe would make us wait, a device never ends."""
    if not stat.S_ISREG((found := path.stat()).st_mode):
        raise OSError(errno.EINVAL, "it is a directory" if stat.S_ISDIR(found.st_mode) else "it is no regular file", str(path))
    if found.st_size > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has {found.st_size} bytes, and we read {MOST_BYTES} at most", str(path))
    return path.read_text(encoding="utf-8")


def read_table(
    option: str, path: Path, kind: str = "TOML", parse: Callable[[str], dict[str, Any]] = tomllib.loads, *, cure: str = ""
) -> dict[str, Any]:
    """The table in a file of that kind. Raises OptionError, with the cure where the file cannot be read."""
    refuse_unusable(option, path)
    try:
        return parse(read_text(path))
    except OSError as error:
        raise OptionError(f"{option}: cannot read {path}: {error.strerror}.{cure}") from None
    except RecursionError:
        raise OptionError(f"{option}: {path} is not {kind} that we can read: it is nested too deeply.") from None
    except ValueError as error:  # TOMLDecodeError is one; so is what int says to a number of too many digits
        why = "it is no text in UTF-8" if isinstance(error, UnicodeDecodeError) else error
        raise OptionError(f"{option}: {path} is not {kind}: {why}.") from None


def parsed(text: str | bytes) -> Any:
    """JSON. Raises ValueError for anything else, also for what is nested more deeply than Python calls itself."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def with_suggestion(names: Sequence[str], known: Iterable[str], others: Mapping[str, str] | None = None) -> str:
    """`names`, none of which is known, and the known ones that they are near to, in words.

    others: names that somebody may think of, and what they should give.
    """
    words = {word.strip("-"): word for word in known} | dict(others or {})
    bare = [name.strip("-") for name in names]
    near = [[word for word in words if word.startswith(name)] or get_close_matches(name, words, n=1) for name in bare]
    found = dict.fromkeys(words[word] for nearest in near for word in nearest[:1])
    return f"{', '.join(names)}." + (f" Did you mean {' and '.join(found)}?" if found else "")


def nearest(values: Iterable[object], words: Collection[str]) -> str:
    """` Did you mean adamw?`, of the first of `values` that is near one of the words; "" where none is."""
    for value in values:
        if isinstance(value, str) and value not in words:
            word = value.strip().lower()
            short_for = [one for one in words if "-" in one and word == "".join(part[:1] for part in one.split("-"))]
            near = short_for or get_close_matches(word, words, 1)
            if near:
                return f" Did you mean {near[0]}?"
    return ""
