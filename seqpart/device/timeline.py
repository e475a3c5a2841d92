"""Memory over time in a file of the run, thinned so that its length grows with the logarithm of the run's.

    {"began": "2026-11-25T04:00:42+00:00", "limit": 2000000000, "source": "RssAnon + RssShmem of the process tree"}
    [0.05, 312475648]        seconds since `began`, and the most bytes that were held since the point before

Lines are only ever appended, each by one write: what a killed run leaves can be read. A run that goes on appends another head.
"""

import json
import os
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

from seqpart.files import added_to, made, write_all

MEMORY = "memory.jsonl"
_FIRST = 0.05
"""Seconds that a point stands for, at first."""
_POINTS = 512
"""Points after which each stands for twice the time: 6,000 in a week."""


class Timeline:
    """A log of memory samples, from any thread."""

    def __init__(self) -> None:
        self.began, self._start = datetime.now(UTC), time.monotonic()
        self._every, self._count, self._next, self._highest = _FIRST, 0, 0.0, 0
        self._kept: list[str] = []
        """Lines not yet in a file."""
        self._file: int | None = None
        self._lock = threading.Lock()

    def note(self, used: int) -> None:
        """Adds a sample: `used` bytes are held now."""
        with self._lock:
            self._highest = max(self._highest, used)
            now = time.monotonic() - self._start
            if now >= self._next:
                self._point(now)

    def _point(self, now: float) -> None:
        self._kept.append(f"[{now:.3f}, {self._highest}]\n")
        self._highest, self._next, self._count = 0, now + self._every, self._count + 1
        if self._count % _POINTS == 0:
            self._every *= 2
        if self._file is not None:
            self._write()

    def leave(self, path: Path, *, limit: int, source: str, add: bool) -> None:
        """Writes points so far, and later ones, to the file `path`; with `add` after those of the run that is resumed."""
        head = {"began": self.began.isoformat(timespec="milliseconds"), "limit": limit, "source": source}
        with self._lock:
            try:
                self._file = added_to(path) if add else made(path, 0o666, flags=os.O_APPEND)
            except OSError:  # the log beside it says why
                return
            self._kept.insert(0, json.dumps(head) + "\n")
            self._write()

    def _write(self) -> None:
        assert self._file is not None
        lines, self._kept = "".join(self._kept), []
        try:
            write_all(self._file, lines.encode())
        except OSError:  # a full disk ends the run where that matters; the proof does not need this file
            self._let_go()

    def close(self) -> None:
        with self._lock:
            if self._file is None:
                return
            if self._highest:
                self._point(time.monotonic() - self._start)
            self._let_go()

    def _let_go(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None
