"""Memory limits of this process's cgroups, v1 or v2, from its own up to the root: the kernel kills what exceeds one.

A cgroup's directory is found by `/proc/self/cgroup` and the mounts in `/proc/self/mountinfo`. In a container the mounted root
is often the container's own cgroup, and the path is the host's: the part below the mounted root is used.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

NONE = 1 << 62
"""Bytes that mean no limit; v1 uses a number of this size for it."""
_PROCESS = Path("/proc/self")


class _Names(NamedTuple):
    limits: tuple[str, ...]
    used: str
    cache: str
    """The line of memory.stat for file pages that the kernel takes back before it kills."""


_V1 = _Names(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names(("memory.max", "memory.high"), "memory.current", "inactive_file")


def limit(process: Path = _PROCESS) -> int:
    """Bytes of the smallest limit; NONE without one."""
    return min((most for most, _ in _levels(process)), default=NONE)


def free(process: Path = _PROCESS) -> int:
    """Bytes that may still be taken, not counting file pages that can be dropped as used; NONE without a limit."""
    return min((max(0, most - used) for most, used in _levels(process)), default=NONE)


def _levels(process: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use) of each cgroup of the process that has a limit."""
    for names, mounted, folder in _mounted(process):
        for level in (folder, *folder.parents):
            most = min((number for name in names.limits if (number := _number(level / name)) is not None), default=NONE)
            if most < NONE:
                yield most, max(0, (_number(level / names.used) or 0) - _cache(level, names))
            if level == mounted:
                break


def _mounted(process: Path) -> Iterator[tuple[_Names, Path, Path]]:
    """(file names, mount point, the process's own directory there) of v1's memory controller, and of v2."""
    own: dict[_Names, PurePosixPath] = {}
    for line in filter(None, _lines(process / "cgroup")):
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            own[_V2 if number == "0" else _V1] = PurePosixPath(path)
    for line in _lines(process / "mountinfo"):
        before, _, behind = line.partition(" - ")
        root, place = (part.encode().decode("unicode_escape") for part in before.split()[3:5])
        kind, _, options = behind.split()[:3]
        names = _V2 if kind == "cgroup2" else _V1
        if names in own and (kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(","))):
            mine = own[names]
            inside = mine.relative_to(root) if mine.is_relative_to(root) else PurePosixPath()
            yield names, Path(place), Path(place) / (inside if ".." not in inside.parts else "")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # no Linux, or no /proc
        return []


def _number(path: Path) -> int | None:
    """Reads a number from a file; None for `max`, and where there is no such file."""
    (text,) = _lines(path)[:1] or [""]
    return int(text) if text.isdigit() else None


def _cache(folder: Path, names: _Names) -> int:
    return next((int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.startswith(f"{names.cache} ")), 0)
