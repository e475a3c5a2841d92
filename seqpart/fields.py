"""Reads an option by its field's annotation: checks values from Python or text, and formats them.

The annotations of the dataclass are used at run time, so that an option is described once.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin

from seqpart.errors import OptionError
from seqpart.text import nearest, short

T = TypeVar("T")
PerPartition: TypeAlias = T | tuple[T, ...]
"""One value for all partitions, or one for each."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """Additions to a field's type, in Annotated."""

    expected: str = ""
    """Description of valid values, if that of the type is not enough."""
    above: float = 0
    most: float = sys.float_info.max
    number: str = ""
    """Description of the valid range."""
    metavar: str = ""
    """Placeholder for a value in --help."""


@dataclass(frozen=True)
class Also:
    """Another flag for the same option, in Annotated."""

    flag: str


Positive = Annotated[T | None, Note(number="a number above zero")]
_WORDS = {bool: "True or False", int: "a whole number", float: "a number", Path: "a path", str: "a text"}
_MISFIT = object()
_TYPES = {"bfloat16": "bf16", "float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16"}
"""torch's names of types, and those of options, whether or not they accept them."""


def note_of(hint: Any) -> Note:
    return next((note for note in getattr(hint, "__metadata__", ()) if isinstance(note, Note)), Note())


def flags_of(name: str, hint: Any) -> tuple[str, ...]:
    return (flag_of(name), *(also.flag for also in getattr(hint, "__metadata__", ()) if isinstance(also, Also)))


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Returns the types of a union, or the only one."""
    hint = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def choices_of(hint: Any) -> tuple[str, ...]:
    return tuple(word for kind in alternatives(hint) if get_origin(kind) is Literal for word in get_args(kind))


def items_of(hint: Any) -> Any:
    """Returns the type of the items, if a value may be a tuple; else None."""
    return next((get_args(kind)[0] for kind in alternatives(hint) if get_origin(kind) is tuple), None)


def checked_value(name: str, value: Any, hint: Any, *, typed: bool = False) -> Any:
    """Converts `value` to the type: a list becomes a tuple, 1 becomes 1.0 for a float, a text a Path, a dict `name=text,...`.

    typed: text from the command line. Raises OptionError for a value of another type, and `value` itself if that is an
    OptionError from parsing.
    """
    if isinstance(value, OptionError):
        raise value
    for kind in alternatives(hint):
        if (found := _as(kind, value, typed)) is not _MISFIT:
            return found
    given = value if isinstance(value, list | tuple) else value.split(",") if typed else [value]
    near = nearest(map(_spelled, given), (*choices_of(hint), *choices_of(items_of(hint))))
    raise OptionError(f"{flag_of(name)}: expected {_expected(hint, typed)}; found {short(value)}.{near}")


def out_of_range(name: str, value: Any, hint: Any) -> str:
    """Returns what is wrong with a number; "" if nothing is."""
    note = note_of(hint)
    for number in values_of(value):
        if note.number and number is not None and not note.above < number <= note.most:
            unnamed = number > note.above and isinstance(note.most, int) and str(note.most) not in note.number
            most = f", at most {note.most}" if unnamed else ""
            return f"{flag_of(name)}: expected {note.number}{most}; found {short(number)}"
    return ""


def as_text(value: object) -> str:
    """Formats a value for the command line: `5,160`, `yes`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return ",".join(str(item).removesuffix(".0") for item in value) if isinstance(value, tuple) else str(value)


def metavar_of(hint: Any) -> str:
    """Returns the placeholder for a value in --help."""
    if note_of(hint).metavar:
        return note_of(hint).metavar
    item, kinds = items_of(hint), alternatives(hint)
    words = choices_of(hint) or choices_of(item)
    first = "{" + ",".join([*words, *(("yes", "no") if bool in kinds else ())]) + "}" if words else ""
    shown = first or {str: "TEXT"}.get(item or kinds[0], (item or kinds[0]).__name__.upper())
    return shown if item is None else f"{shown}[,...]"


def values_of(given: PerPartition[T]) -> tuple[T, ...]:
    """Returns the values as a tuple: one, or one per partition."""
    return given if isinstance(given, tuple) else (given,)


def per_partition(name: str, given: PerPartition[T], count: int) -> tuple[T, ...]:
    """Returns one value for each of `count` partitions. Raises OptionError if the numbers differ."""
    values = values_of(given)
    if len(values) == 1:
        return values * count
    if len(values) != count:
        text = as_text(values)
        raise OptionError(
            f"{name} {text if len(text) < 60 else '...'} gives {len(values)} values, and the plan has {count} partition(s). "
            f"Give one value, or {count}; or fix the number with --partitions {len(values)}."
        )
    return values


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def joined(problems: Iterable[str]) -> str:
    message = "; ".join(problem.removesuffix(".") for problem in problems)
    return message if message.endswith("?") else f"{message}."


def _spelled(value: Any) -> Any:
    """Returns the options' name of a torch.dtype or its name."""
    is_dtype = type(value).__module__ == "torch" and type(value).__name__ == "dtype"
    return _TYPES.get(str(value).removeprefix("torch."), value) if is_dtype or isinstance(value, str) else value


def _as(kind: Any, value: Any, typed: bool) -> Any:
    if get_origin(kind) is tuple:
        value = [part.strip() for part in value.split(",")] if typed else value
        if isinstance(value, str) or not isinstance(value, Sequence) or not value:
            return _MISFIT
        items = tuple(_as(get_args(kind)[0], item, typed) for item in value)
        return _MISFIT if any(item is _MISFIT for item in items) else items
    if get_origin(kind) is dict:
        words = [f"{name}={one}" for name, one in value.items()] if isinstance(value, Mapping) else []
        return ",".join(words) if words and all(isinstance(one, str) for pair in value.items() for one in pair) else _MISFIT
    if get_origin(kind) is Literal:
        word = value if isinstance(value, str) and value in get_args(kind) else _spelled(value)
        return word if isinstance(word, str) and word in get_args(kind) else _MISFIT
    if kind is Path or kind is str:
        return kind(value) if isinstance(value, str | kind) and (kind is str or value != "") else _MISFIT
    if typed and kind is bool:
        return {"yes": True, "no": False}.get(value, _MISFIT)
    if not typed and (kind is bool or isinstance(value, bool)):
        return value if kind is type(value) else _MISFIT
    if kind in (int, float) and (typed or isinstance(value, Integral if kind is int else Real)):  # numpy's numbers are such
        try:
            return kind(value)
        except (ValueError, OverflowError):  # which a whole number is that no float holds
            return _MISFIT
    fits = not typed and (value is None if kind is NoneType else callable(value) and get_origin(kind) is Callable)
    return value if fits else _MISFIT


def _expected(hint: Any, typed: bool) -> str:
    item, words, note = items_of(hint), choices_of(hint), note_of(hint)
    if typed and item in (int, float):
        return f"{_WORDS[item]}, or {_WORDS[item][2:]}s with commas"
    if note.expected:
        return note.expected.replace("True, False", "yes, no") if typed else note.expected
    if words:
        return " or ".join(words) if len(words) < 3 else f"one of {', '.join(words)}"
    kinds = " or ".join(_WORDS[kind] for kind in alternatives(hint) if kind in _WORDS)
    return kinds if item is None else f"{kinds}, or a list of them"
