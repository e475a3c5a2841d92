"""Where the time of a run went: seconds and bytes of each kind of step, added up."""

import time
from dataclasses import asdict, dataclass

_SECONDS = 10.0
"""A run that is killed has left its sums as they were at most so long before, at the end of a step."""


@dataclass(slots=True)
class Sum:
    count: int = 0
    seconds: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0

    def add(self, seconds: float, bytes_read: int, bytes_written: int, *, count: int = 1) -> None:
        self.count += count
        self.seconds += seconds
        self.bytes_read += bytes_read
        self.bytes_written += bytes_written


class Tally:
    """Of one process."""

    def __init__(self) -> None:
        self._sums: dict[str, Sum] = {}
        self._told, self._changed = time.monotonic(), False

    def add(self, kind: str, seconds: float, bytes_read: int, bytes_written: int) -> None:
        self._sums.setdefault(kind, Sum()).add(seconds, bytes_read, bytes_written)
        self._changed = True

    def due(self, after: float = _SECONDS) -> bool:
        """Whether there is something to tell, and it was last told more than `after` seconds ago."""
        return self._changed and time.monotonic() - self._told > after

    def told(self) -> dict[str, dict[str, int | float]]:
        """The sums so far, by kind, as JSON."""
        self._told, self._changed = time.monotonic(), False
        return {kind: {**asdict(found), "seconds": round(found.seconds, 4)} for kind, found in self._sums.items()}
