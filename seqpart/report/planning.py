"""Shows progress while a plan is made: one changing line on a terminal, elsewhere a plain line now and then.

Planning logs it to `seqpart.planning` at level DEBUG, where a program's own handlers can take it too.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from seqpart.report.reporter import Reporter
from seqpart.report.terminal import width_of

_LOGGER = logging.getLogger("seqpart.planning")
_SHOWN = 0.1
"""Seconds between two updates of the line on a terminal."""
_SAID = 3.0
"""Seconds between two plain lines; a faster plan prints nothing."""


@contextmanager
def planning_shown(reporter: Reporter) -> Iterator[None]:
    """Shows progress inside, unless the reporter is quiet."""
    if reporter.console.quiet:
        yield
        return
    heard, before = _LOGGER.isEnabledFor(logging.DEBUG), (_LOGGER.level, _LOGGER.propagate)
    line = _Line(reporter)
    _LOGGER.addHandler(line)
    if not heard:  # what nobody had asked for goes to our handler alone
        _LOGGER.setLevel(logging.DEBUG)
        _LOGGER.propagate = False
    try:
        yield
    finally:
        _LOGGER.removeHandler(line)
        _LOGGER.setLevel(before[0])
        _LOGGER.propagate = before[1]
        line.clear()


class _Line(logging.Handler):
    def __init__(self, reporter: Reporter) -> None:
        super().__init__()
        self._reporter, self._file = reporter, reporter.console.file
        self._width = width_of(reporter.console)
        self._last = time.monotonic() - (0 if self._width is None else _SHOWN)
        self._is_there = False

    def emit(self, record: logging.LogRecord) -> None:
        now, text = time.monotonic(), f"planning: {record.getMessage()}"
        if now - self._last < (_SAID if self._width is None else _SHOWN):
            return
        self._last = now
        if self._width is None:
            self._reporter.say(text)
        else:
            self._write(f"\r\x1b[2K{text[: self._width - 1]}\r")
            self._is_there = True

    def clear(self) -> None:
        if self._is_there:
            self._write("\r\x1b[2K")

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()
