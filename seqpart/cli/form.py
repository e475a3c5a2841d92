"""The form that the parser of the command line fills in: every option as text, in the groups that --help shows.

The parser knows one type for each option. What may be a number, a word or one value for each partition comes as text, and is
read here as the field's type.
"""

import ast
import dataclasses
import inspect
import itertools
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from seqpart.cli.spelling import SPELLINGS
from seqpart.errors import OptionError
from seqpart.kinds import OF_IST
from seqpart.settings import Settings
from seqpart.text import short
from seqpart.values import alternatives, as_text, checked_value, choices_of, flag_of, items_of, joined

T = TypeVar("T")

GROUPS = {
    "limit-and-method": (
        "mem_limit", "method", "steps", "reference", "sweep", "partitions", "tile", "micro_batch_size", "device", "ram_limit",
        "plan",
    ),
    "training": (
        "epochs", "max_steps", "batch_size", "loss", "lr", "optimizer", "weight_decay", "momentum", "clip_grad_norm", "ema",
        "lr_schedule", "warmup_updates", "dtype", "shuffle", "test_every", "eval_every", "early_stopping",
        "keep_best", "best_by", "seed",
    ),
    "data-and-model": (
        "model", "weights", "weights_partial", "weights_dtype", "width", "depth", "heads", "data", "data_dir", "download",
        "image_size", "augment", "context", "tokenizer", "cache", "workers",
    ),
    "files-and-checkpoints": (
        "output_dir", "overwrite", "offload_dir", "save_every", "resume", "config",
    ),
    "output": ("dry_run", "plan_out", "print_schedule", "trace", "log", "quiet", "debug"),
    "sil": (
        "objective", "kappa", "prototype_scale", "sil_inputs", "cache_dtype", "cached_views", "recovery_epochs", "recover",
        "recovery_batch_size", "recovery_lr",
    ),
    "ist": OF_IST,
}  # fmt: skip
_DEFAULT = " Default: "
_SHOWN = {str: "TEXT", int: "INT", float: "FLOAT"}
_METAVARS = {
    "mem_limit": "SIZE", "ram_limit": "SIZE", "save_every": "OFTEN", "eval_every": "OFTEN", "partitions": "auto|INT[,...]",
    "tile": "SIZE|never|auto",
}  # fmt: skip


def form_of(kind: type[Any], *, with_help: bool) -> type[Any]:
    """A dataclass with one field for each group, which holds that group's options of `kind` as the parser takes them."""
    hints, said = get_type_hints(kind), _said_under_fields(kind) if with_help else {}
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    groups = []
    for title, names in GROUPS.items():
        asked = [_field(name, hints[name], defaults[name], said.get(name, "")) for name in names if name in defaults]
        group = dataclasses.make_dataclass(title.replace("-", "_"), asked, frozen=True, kw_only=True)
        group.__doc__ = ""
        groups.append((title.replace("-", "_"), group))
    form = dataclasses.make_dataclass(kind.__name__, groups, frozen=True, kw_only=True)
    form.__doc__ = inspect.getdoc(kind)
    return form


def filled(kind: type[T], form: Any) -> T:
    """The `kind` that a filled form means. Raises OptionError with all that is wrong."""
    hints, values, problems = get_type_hints(kind), {}, []
    settings = {field.name for field in dataclasses.fields(Settings)}
    groups = (getattr(form, field.name) for field in dataclasses.fields(form))
    for group in groups:
        for field in dataclasses.fields(group):
            try:
                value = _read(field.name, getattr(group, field.name), hints[field.name])
                if choices_of(hints[field.name]) and field.name not in settings:  # which look at their own
                    value = checked_value(field.name, value, hints[field.name])
                values[field.name] = value
            except OptionError as error:
                problems.append(error.with_flags)
    try:
        made = kind(**values)
    except OptionError as error:
        problems.append(error.with_flags)
    if problems:
        raise OptionError(joined(problems))
    return made


def _field(name: str, hint: Any, default: Any, said: str) -> tuple[str, Any, Any]:
    kinds = _kinds(hint)
    text = not _is_plain(hint)
    shown = _METAVARS.get(name) or _metavar(hint, kinds)
    asked: Any = (str | None if default is None else str) if text else hint
    said, behaviour = _divided(said) if default is None else (said, None)
    told: Any = Annotated[
        asked,
        tyro.conf.arg(
            help=said, metavar=None if hint is bool else shown, help_behavior_hint=behaviour,
            aliases=SPELLINGS.get(name, ()),
        ),
    ]  # fmt: skip
    if default is dataclasses.MISSING:
        return name, told, dataclasses.field()
    return name, told, dataclasses.field(default=as_text(default) if text and default is not None else default)


def _divided(said: str) -> tuple[str, str]:
    """(text, the default that it ends with) of what may be left out: the parser shows the second behind the first, and where
    that is empty and the text fills its line, a blank line."""
    text, word, value = said.rpartition(_DEFAULT)
    return (text, f"{word.lstrip()}{value}") if word else (said, "")


def _is_plain(hint: Any) -> bool:
    """Whether the parser reads it as it is: a switch, a text or a path, which may be left out."""
    (first, *others) = _kinds(hint)
    return not others and isinstance(first, type) and get_origin(first) is None and first not in (int, float)


def _kinds(hint: Any) -> list[Any]:
    return [kind for kind in alternatives(hint) if kind is not type(None)]


def _metavar(hint: Any, kinds: Iterable[Any]) -> str:
    words = [*choices_of(hint), *(("yes", "no") if bool in kinds else ())]
    if items_of(hint) is None:
        (first, *_) = kinds
        return f"{{{','.join(words)}}}" if words else _SHOWN.get(first, first.__name__.upper())
    one = items_of(hint)
    shown = "{" + ",".join(get_args(one)) + "}" if get_origin(one) is Literal else _SHOWN[one]
    return f"{shown}[,...]"


def _read(name: str, value: Any, hint: Any) -> Any:
    """A text as the field's type. Raises OptionError; for a word that is none of the choices the settings do."""
    if not isinstance(value, str) or _is_plain(hint) or value in choices_of(hint):
        return value
    item = items_of(hint)
    if bool in alternatives(hint):
        if value not in ("yes", "no"):
            raise _unread(name, value, "yes, no or auto")
        return value == "yes"
    if item is None and _kinds(hint) in ([int], [float]):
        try:
            return _kinds(hint)[0](value)
        except ValueError:
            raise _unread(name, value, "a whole number" if _kinds(hint) == [int] else "a number") from None
    if item is None or get_origin(item) is Literal:
        parts = tuple(part.strip() for part in value.split(","))
        return parts if item is not None and len(parts) > 1 else value
    try:
        numbers = tuple(item(part.strip()) for part in value.split(","))
    except ValueError:
        word = "whole number" if item is int else "number"
        raise _unread(name, value, f"a {word}, or {word}s with commas") from None
    return numbers if len(numbers) > 1 else numbers[0]


def _unread(name: str, text: str, expected: str) -> OptionError:
    return OptionError(f"{flag_of(name)}: expected {expected}; found {short(text)}.")


def _said_under_fields(kind: type[Any]) -> dict[str, str]:
    """name -> the text that stands under a field in the source of its class, or of one that it inherits from."""
    said = {}
    for owner in reversed([one for one in kind.__mro__ if dataclasses.is_dataclass(one)]):
        (body,) = (node.body for node in ast.parse(inspect.getsource(owner)).body if isinstance(node, ast.ClassDef))
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                said[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return said
