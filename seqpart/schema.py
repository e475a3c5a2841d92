"""Types with ranges that msgspec checks JSON from outside against, naming the wrong field.

A checksum shows that a file is what was written, not that its content is valid.
"""

import re
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

T = TypeVar("T")

_MOST = 1 << 62
Whole = Annotated[int, Meta(ge=0, le=_MOST)]
Positive = Annotated[int, Meta(ge=1, le=_MOST)]
Finite = Annotated[float, Meta(ge=-1.7e308, le=1.7e308)]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
PathText = Annotated[str, Meta(pattern=r"\A[^\x00\ud800-\udc7f\udd00-\udfff]+\Z", max_length=4096)]
"""A path in JSON: bytes that are not text are U+DC80 to U+DCFF."""


_WORDS = re.compile(r"`str` matching regex '\\\\A\(\?:([\w|]+)\)\\\\Z'")


def word_of(*words: str) -> Meta:
    """Returns the type of one of the given words."""
    return matching(re.compile("|".join(map(re.escape, words))))


def matching(whole: re.Pattern[str]) -> Meta:
    """Returns the type of text that matches the whole pattern, short enough for a file name. Not for a union with a list:
    msgspec 0.22 frees its pattern twice there."""
    return Meta(pattern=rf"\A(?:{whole.pattern})\Z", max_length=250)


def as_type(kind: type[T], found: object) -> T:
    """Converts `found`, from JSON, to a dataclass or a Struct, which may hold Paths. Raises ValueError that names the field of
    another type, out of range, missing or unknown."""
    try:
        made = msgspec.convert(found, kind, dec_hook=_path)
    except (msgspec.ValidationError, OverflowError, RecursionError, UnicodeError) as error:
        message, _, place = str(error).partition(" - at `$")
        message = _WORDS.sub(lambda found: f"one of {found[1].replace('|', ', ')}", message)
        place = place.strip(".`")
        raise ValueError(f"{place}: {message[:1].lower()}{message[1:]}" if place else message) from None
    _refuse_unknown(found, msgspec.to_builtins(made, enc_hook=str), "")
    return made


def _path(kind: type[Path], found: object) -> Path:
    return kind(as_type(PathText, found))


def _refuse_unknown(found: object, known: object, place: str) -> None:
    if isinstance(found, dict) and isinstance(known, dict):
        for name, value in found.items():
            if name not in known:
                raise ValueError(f"{place}{name}: unknown field")
            _refuse_unknown(value, known[name], f"{place}{name}.")
    elif isinstance(found, list | tuple) and isinstance(known, list | tuple):
        for number, (one, other) in enumerate(zip(found, known, strict=True)):
            _refuse_unknown(one, other, f"{place}{number}.")
