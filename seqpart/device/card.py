"""Tables of cards that are not in this machine: memory, and the speeds of the card, its links and its disk.

A card at hand is measured. A card that one does not have can only be described, and a data sheet's peaks would promise
too much: a table has what programs reach, and says for every number where it comes from, or that it is assumed. Your own
table is a file of the same form: seqpart/device/cards/rtx3060-12gb.toml is one to start from.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from seqpart.errors import OptionError
from seqpart.text import read_table, short
from seqpart.units import format_size, parse_size

_CARDS, _SUFFIX = Path(__file__).with_name("cards"), ".toml"
_ADAM_BYTES = 28
"""Bytes moved per parameter by a fused float32 Adam: weight, gradient and two moments read, all but the gradient written, 4
bytes each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A card, and the machine that is assumed around it."""

    name: str
    memory: int
    """Bytes that the driver offers to programs, torch's `total_memory`. nvidia-smi adds what the driver keeps for itself."""
    context: int
    """Bytes of `memory` that a PyTorch process holds beside its tensors: the context, kernels, workspaces of libraries."""
    flops: Mapping[str, float]
    """FLOP/s that a large matrix product of PyTorch reaches: `float32` without TF32, as is the default; `bfloat16`, dense;
    `tf32`, half of that where the table has none, as the data sheets of all cards have."""
    memory_bandwidth: float
    """Bytes/s, read and written together, of an elementwise kernel on large tensors."""
    h2d: float
    """Bytes/s of a large copy from pinned host memory to the card, while nothing comes back."""
    d2h: float
    """Bytes/s of a large copy from the card to pinned host memory, while nothing goes there."""
    copy_latency: float
    """Seconds that the smallest copy takes."""
    launch: float
    """Seconds that the host needs to start one kernel."""
    disk_read: float
    """Bytes/s of large reads around the page cache, from the disk that is assumed in such a machine."""
    disk_write: float
    """Bytes/s of writes that last for hours: a consumer's disk begins faster, until its cache is full."""
    sources: Mapping[str, str]
    """{field: source of its number}."""
    host_bandwidth: float = 40e9
    """Bytes/s, read and written together, of an elementwise kernel of the processor on large tensors: assumed, for two channels
    of memory."""

    @property
    def optimizer(self) -> float:
        """Parameters updated per second by a fused Adam in float32, which waits for the card's memory and nothing else."""
        return self.memory_bandwidth / _ADAM_BYTES

    @property
    def host_optimizer(self) -> float:
        """Parameters updated per second by a fused Adam in float32 on the processor."""
        return self.host_bandwidth / _ADAM_BYTES


_FIELDS = tuple(field.name for field in fields(Hardware))
_DTYPES = ("float32", "bfloat16")
_OPTIONAL = ("sources", "host_bandwidth")
_RATES = ("memory_bandwidth", "h2d", "d2h", "disk_read", "disk_write")
_TIMES = ("copy_latency", "launch")
_LEAST_RATE, _MOST_RATE = 1e6, 1e21
"""Bounds of rates per second, which catch 25 written for 25e9; every link and card is inside."""
_LONGEST, _SECONDS = 1.0, "seconds, above 0 and up to 1, such as 5e-6"
"""Most seconds of a launch or a copy's latency, which catches 5 written for 5e-6."""


def names() -> tuple[str, ...]:
    """Names of the cards whose tables come with seqpart."""
    return tuple(sorted(path.stem for path in _CARDS.glob(f"*{_SUFFIX}")))


def load(name_or_path: str) -> Hardware:
    """Loads a card of `names()`, or a .toml file of that form. Raises OptionError for anything else."""
    known = names()
    path = _CARDS / f"{name_or_path}{_SUFFIX}" if name_or_path in known else Path(name_or_path)
    if name_or_path not in known and not name_or_path.endswith(_SUFFIX):
        raise OptionError(
            f"--device: expected after sim: one of {', '.join(known)}, or the path of a {_SUFFIX} file of that form; "
            f"found {short(name_or_path)}."
        )
    table = read_table("--device", path, cure=f" The cards that need no file are {', '.join(known)}.")
    return _hardware(table, f"--device: {name_or_path}")


def _hardware(table: dict[str, Any], where: str) -> Hardware:
    _refuse_other_keys(table, where, needed=[name for name in _FIELDS if name not in _OPTIONAL], known=_FIELDS)
    flops = _table_of(table, "flops", where)
    _refuse_other_keys(flops, f"{where}: flops", needed=_DTYPES, known=(*_DTYPES, "tf32"))
    rates = {dtype: _rate(rate, f"{where}: flops.{dtype}", "FLOP") for dtype, rate in flops.items()}
    sources = _table_of(table, "sources", where)
    _refuse_other_keys(sources, f"{where}: sources", needed=(), known=_FIELDS)
    found = Hardware(
        name=_words(table["name"], f"{where}: name"),
        memory=_size(table["memory"], f"{where}: memory"),
        context=_size(table["context"], f"{where}: context"),
        flops={"tf32": rates["bfloat16"] / 2, **rates},
        sources={name: _words(text, f"{where}: sources.{name}") for name, text in sources.items()},
        **{name: _rate(table[name], f"{where}: {name}", "bytes") for name in (*_RATES, "host_bandwidth") if name in table},
        **{name: _number(table[name], f"{where}: {name}", _SECONDS, most=_LONGEST) for name in _TIMES},
    )
    if found.context >= found.memory:
        memory, context = format_size(found.memory), format_size(found.context)
        raise OptionError(f"{where}: context: expected less than the card's memory, {memory}; found {context}.")
    return found


def _refuse_other_keys(table: Collection[str], where: str, *, needed: Collection[str], known: Collection[str]) -> None:
    """Raises OptionError for all missing and unknown keys at once, so that a table is not corrected key by key."""
    missing = [name for name in needed if name not in table]
    unknown = [short(name) for name in sorted(table) if name not in known]
    problems = [f"{what} {', '.join(keys)}" for what, keys in (("has no", missing), ("has unknown", unknown)) if keys]
    if problems:
        raise OptionError(f"{where} {' and '.join(problems)}. Its keys are {', '.join(known)}.")


def _table_of(table: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    found = table.get(name, {})
    if not isinstance(found, dict):
        raise _unlike(found, f"{where}: {name}", f"a table, [{name}]")
    return found


def _words(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _unlike(value, where, "a text in quotes")
    return value


def _size(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _unlike(value, where, 'a size in quotes such as "12GB" or "300MiB", or bytes')
    return parse_size(value, name=where)


def _rate(value: object, where: str, what: str) -> float:
    return _number(value, where, f"{what} per second, from 1e6 to 1e21, such as 25e9", least=_LEAST_RATE, most=_MOST_RATE)


def _number(value: object, where: str, expected: str, *, least: float = 0.0, most: float) -> float:
    """Returns `value` as a float above zero, from `least` to `most`. Raises OptionError for anything else, nan included."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (value > 0 and least <= value <= most):
        raise _unlike(value, where, expected)
    return float(value)


def _unlike(value: object, where: str, expected: str) -> OptionError:
    try:
        found = short(value)
    except ValueError:  # hexadecimal numbers may have more digits than Python prints
        found = "a number of thousands of digits"
    return OptionError(f"{where}: expected {expected}; found {found}.")
