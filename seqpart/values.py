"""Values of settings: whether one is of its field's type, and the text that means it on the command line.

Types at run time are the annotations of the dataclass, so that a setting is described once.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from seqpart.errors import OptionError
from seqpart.text import short

NO_LIMIT = "--mem-limit is missing. Give the limit to keep, such as --mem-limit 2GB."
_WORDS = {bool: "True or False", int: "a whole number", float: "a number", Path: "a path", str: "a text"}
_MISFIT = object()
_TYPES = {"bfloat16": "bf16", "float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16"}
"""What torch calls types that settings have shorter words for, whether or not they take them."""
IN_PYTHON = {
    "learning_rate": "lr", "bf16": 'dtype="bf16"', "resume": "fit(..., resume=DIR)", "callbacks": "fit(..., callbacks=[...])",
    "compute_metrics": "fit(..., compute_metrics=...)",
}  # fmt: skip
"""What has another name in Python, or goes elsewhere."""


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the only one."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def choices_of(hint: Any) -> tuple[str, ...]:
    """The words that a value may be: those of Literal."""
    return tuple(word for kind in alternatives(hint) if get_origin(kind) is Literal for word in get_args(kind))


def items_of(hint: Any) -> Any:
    """What a tuple of it holds, where a value may be a tuple; otherwise None."""
    return next((get_args(kind)[0] for kind in alternatives(hint) if get_origin(kind) is tuple), None)


def checked_value(name: str, value: Any, hint: Any, *, expected: str = "") -> Any:
    """`value` as its type has it: a list becomes a tuple, 1 becomes 1.0 where numbers have a point, a text a Path.

    expected: in words, where those of the types would not do. Raises OptionError for a value of another type.
    """
    for kind in alternatives(hint):
        found = _as(kind, value)
        if found is not _MISFIT:
            return found
    given = value if isinstance(value, list | tuple) else [value]
    near = nearest(map(_spelled, given), (*choices_of(hint), *choices_of(items_of(hint))))
    raise OptionError(f"{flag_of(name)}: expected {expected or _expected(hint)}; found {short(value)}.{near}")


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def said_of(names: Sequence[str], known: Iterable[str], others: Mapping[str, str] | None = None) -> str:
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
            near = get_close_matches(value.strip().lower(), words, 1)
            if near:
                return f" Did you mean {near[0]}?"
    return ""


def joined(problems: Iterable[str]) -> str:
    """What is wrong, as one message."""
    said = "; ".join(problem.removesuffix(".") for problem in problems)
    return said if said.endswith("?") else f"{said}."


def as_text(value: object) -> str:
    """As the command line would have it: `5,160`, `yes`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return ",".join(str(item).removesuffix(".0") for item in value) if isinstance(value, tuple) else str(value)


def _spelled(value: Any) -> Any:
    """A torch.dtype, or the name of one, as settings call it."""
    is_dtype = type(value).__module__ == "torch" and type(value).__name__ == "dtype"
    return _TYPES.get(str(value).removeprefix("torch."), value) if is_dtype or isinstance(value, str) else value


def _as(kind: Any, value: Any) -> Any:
    if kind is NoneType:
        return None if value is None else _MISFIT
    if get_origin(kind) is Callable:
        return value if callable(value) else _MISFIT
    if get_origin(kind) is Literal:
        word = value if isinstance(value, str) and value in get_args(kind) else _spelled(value)
        return word if isinstance(word, str) and word in get_args(kind) else _MISFIT
    if get_origin(kind) is tuple:
        return _as_tuple(get_args(kind)[0], value)
    if kind is Path:
        return Path(value) if isinstance(value, str | Path) else _MISFIT
    if isinstance(value, bool) or kind is bool:
        return value if isinstance(value, bool) and kind is bool else _MISFIT
    if kind is str:
        return value if isinstance(value, str) else _MISFIT
    if not isinstance(value, Integral if kind is int else Real):  # numpy's numbers are such
        return _MISFIT
    try:
        return kind(value)
    except OverflowError:  # a whole number that no float holds
        return _MISFIT


def _as_tuple(kind: Any, value: Any) -> Any:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        return _MISFIT
    items = tuple(_as(kind, item) for item in value)
    return _MISFIT if any(item is _MISFIT for item in items) else items


def _expected(hint: Any) -> str:
    words = choices_of(hint)
    if words:
        return " or ".join(words) if len(words) < 3 else f"one of {', '.join(words)}"
    kinds = " or ".join(_WORDS[kind] for kind in alternatives(hint) if kind in _WORDS)
    return kinds if items_of(hint) is None else f"{kinds}, or a list of them"
