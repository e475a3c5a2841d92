"""Writes a trace of steps by stream, memory and traffic, for Perfetto (ui.perfetto.dev) and chrome://tracing.

The JSON array of the Trace Event Format: spans ("X"), counters ("C") and names ("M"), times in microseconds. Its closing
bracket may be missing, so each write ends after a whole event, and what a killed run leaves can be opened. No more than
_BUFFER bytes are kept back, and the file ends at `most` bytes.
"""

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from seqpart.files import made, write_all
from seqpart.store.atomic import unusable
from seqpart.store.direct import explaining

MOST = 256 << 20
"""Bytes of a trace: two million steps, as many as a viewer can still show."""
_BUFFER = 8 << 10
_HELD_BACK = 0.5
"""Most seconds that an event is buffered."""
_COUNTED = 0.05
"""Seconds between two values of a counter."""
_ENDS = 1 << 10
"""Bytes left for the last events."""


class Trace:
    """A trace, written to `path` from any thread. Raises StoreError if the file cannot be created."""

    def __init__(self, path: Path, *, most: int = MOST) -> None:
        self.path, self._most = path, most
        self._start = time.perf_counter()
        self._lock = threading.Lock()
        self._lanes: dict[tuple[str, int], int] = {}
        self._moved: dict[str, int] = {}
        """Bytes over each link since its counter was last written."""
        self._lines: list[str] = []
        self._held = self._size = 0
        self._flushed = self._counted = 0.0
        self._highest = 0
        self.is_full, self.error = False, ""
        """True if the file is full; and the error after which nothing was written."""
        with explaining(path, unusable):
            self._file: int | None = made(path, 0o666)
        self._add({"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "seqpart"}})

    # --- what is traced -------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Returns the seconds since the trace started."""
        return time.perf_counter() - self._start

    def span(
        self, stream: str, what: str, began: float, seconds: float, details: Mapping[str, object] | None = None,
        *, thread: int = 0,
    ) -> None:  # fmt: skip
        """Adds a span of `seconds` from `began`, a value of `now`. Spans of one stream and thread do not overlap."""
        with self._lock:
            lane, more = self._lane(stream, thread), {"args": details} if details else {}
            self._add({"ph": "X", "name": what, "pid": 1, "tid": lane, "ts": _us(began), "dur": _us(seconds), **more})

    @contextmanager
    def watched(self, stream: str, what: str, *, link: str = "", nbytes: int = 0) -> Iterator[None]:
        began = self.now()
        yield
        details = {"link": link, "bytes": nbytes} if link else {}
        self.span(stream, what, began, self.now() - began, details, thread=threading.get_ident())
        if link:
            self.moved(link, nbytes)

    def moved(self, link: str, nbytes: int) -> None:
        with self._lock:
            self._moved[link] = self._moved.get(link, 0) + nbytes

    def memory(self, used: int) -> None:
        """Records the bytes held now. Writes the counters at intervals: the highest value since, and each link's rate."""
        with self._lock:
            now = self.now()
            self._highest = max(self._highest, used)
            if (passed := now - self._counted) < _COUNTED:
                return
            self._counter("memory (MB)", now, self._highest / 1e6)
            for link, nbytes in self._moved.items():
                self._counter(f"{link} (MB/s)", now, nbytes / 1e6 / passed)
            self._moved = {link: 0 for link, nbytes in self._moved.items() if nbytes}  # once more, for the zero after it
            self._counted, self._highest = now, 0

    # --- the file -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        with self._lock:
            self._flush()
            self._write("\n]\n")
            if self._file is not None:
                os.close(self._file)
            self._file = None

    def _counter(self, name: str, now: float, value: float) -> None:
        self._add({"ph": "C", "name": name, "pid": 1, "ts": _us(now), "args": {"value": round(value, 3)}})

    def _lane(self, stream: str, thread: int) -> int:
        known = self._lanes.get((stream, thread))
        if known is not None:
            return known
        lane, others = len(self._lanes) + 1, sum(name == stream for name, _ in self._lanes)
        self._lanes[stream, thread] = lane
        name = f"{stream} {others + 1}" if others else stream
        self._add({"ph": "M", "name": "thread_name", "pid": 1, "tid": lane, "args": {"name": name}})
        self._add({"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": lane, "args": {"sort_index": lane}})
        return lane

    def _add(self, event: dict[str, Any]) -> None:
        if self._file is None or self.is_full:
            return
        line = json.dumps(event)
        self.is_full = self._size + self._held + len(line) > self._most - _ENDS
        if self.is_full:
            end = {"ph": "i", "s": "g", "name": "the trace is full", "pid": 1, "tid": 0, "ts": _us(self.now())}
            line = json.dumps(end)
        self._lines.append(line)
        self._held += len(line) + 2
        if self.is_full or self._held > _BUFFER or self.now() - self._flushed > _HELD_BACK:
            self._flush()

    def _flush(self) -> None:
        if self._lines:
            self._write((",\n" if self._size else "[\n") + ",\n".join(self._lines))
        self._lines, self._held, self._flushed = [], 0, self.now()

    def _write(self, text: str) -> None:
        if self._file is None:
            return
        try:
            write_all(self._file, text.encode())
            self._size += len(text)
        except OSError as error:  # the run goes on without it, and says so at its end
            self.error = error.strerror or type(error).__name__
            os.close(self._file)
            self._file = None


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
