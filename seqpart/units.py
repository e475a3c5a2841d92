"""The one place where bytes and times meet text. Everywhere else a size is an int, in bytes.

`GB` is 10^9 bytes and `GiB` is 2^30, as accelerate reads them. Sizes are printed in decimal units, the units
in which limits are usually given, so that a limit and a peak can be compared by eye.
"""

import re
import reprlib
from datetime import UTC, datetime

from seqpart.errors import OptionError

_FACTORS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _FACTORS[f"{_letter}b"] = 1000**_power
    _FACTORS[f"{_letter}ib"] = 1024**_power

_SIZE = re.compile(r"\s*(\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})\s*([a-z]*)\s*", re.IGNORECASE)
_LARGEST = 2 * 10**18
"""Bytes. No machine has more, and no float holds a number of 400 digits."""


def parse_size(text: str | int | float, *, total: int | None = None, free: int | None = None, name: str = "size") -> int:
    """Bytes meant by `text`.

    `2GB`, `1.5GiB`, `1500MiB`: with a unit. An int or `2000000000`: bytes. `0.8`: that share of `total`.
    `auto`: all of `free`. Raises OptionError for anything else, and for a share or `auto` where `total` or `free`
    is unknown.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return _positive(text, name, text)
    if isinstance(text, float):
        text = repr(text)
    if str(text).strip().lower() == "auto":
        if free is None:
            raise OptionError(f"{name}: 'auto' has no meaning here. Give a size such as 2GB.")
        return free
    match = _SIZE.fullmatch(str(text))
    if not match or match[2].lower() not in _FACTORS:
        raise OptionError(f"{name}: expected a size such as 2GB, 1.5GiB, 0.8 (a share) or auto; found {reprlib.repr(text)}.")
    number, unit = match[1], match[2].lower()
    if not unit and "." in number:
        return _share(float(number), total, name)
    return _positive(_scaled(number, _FACTORS[unit]), name, text)


def _scaled(number: str, factor: int) -> int:
    """`number` x `factor` with integers, so that 0.1GB is exactly 100000000 bytes."""
    whole, _, fraction = number.partition(".")
    return int(int((whole or "0") + fraction) * factor // 10 ** len(fraction))


def _share(share: float, total: int | None, name: str) -> int:
    if not 0 < share <= 1:
        raise OptionError(f"{name}: a number with a point is a share of the device, above 0 and up to 1.0; found {share}.")
    if total is None:
        raise OptionError(f"{name}: a share such as {share} has no meaning here. Give a size such as 2GB.")
    return int(share * total)


def _positive(size: int, name: str, found: object) -> int:
    if size <= 0:
        raise OptionError(f"{name}: expected a size above zero; found {found!r}.")
    if size > _LARGEST:
        raise OptionError(f"{name}: expected at most {format_size(_LARGEST)}; found more.")
    return size


def format_size(size: int) -> str:
    """`1.94 GB`, `312.4 MB`, `96 B`: for people."""
    for unit, factor, digits in (("GB", 10**9, 2), ("MB", 10**6, 1), ("KB", 10**3, 1)):
        if abs(size) >= factor:
            return f"{size / factor:.{digits}f} {unit}"
    return f"{size} B"


def format_seconds(seconds: float) -> str:
    """`42 s`, `12 min`, `5 h 12 min`, `20 d 5 h`: for people."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 100 else f"{hours // 24} d {hours % 24} h"


def format_limit(size: int) -> str:
    """The least whole number of megabytes that is not under `size`, as `parse_size` reads it: `623MB`."""
    return f"{-(-size // 10**6)}MB"


def now() -> str:
    """`2026-11-25T04:00:42.123+00:00`: ISO 8601, in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
