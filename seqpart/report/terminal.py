"""Terminal output: fitting it to the width, surviving closed pipes, and logging."""

import contextlib
import errno
import io
import logging
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, TextIO, cast
from unittest.mock import patch

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from seqpart.units import format_seconds, format_size

_LEAVE_OUT = (
    "home", "graph", "boundary row", "optimizer", "gradients", "micro-batch", "activations", "weights", "boundary", "device",
)  # fmt: skip
"""Columns of the plan that are left out on a narrow terminal, the least important first."""
_BETWEEN = 3
"""Characters between two columns of the table, and at its edges together."""
UNLIMITED = 1 << 12
"""Characters of a line where nothing limits it: a file has no width, and rich would cut tables at 80."""
_QUANTITY = re.compile(r"(?<=[0-9]) (?=(?:[KMGT]?B|%|s|min|h|d|x|samples(?:/s)?|parameters|rows?|updates?)\b|%)")
_UNBROKEN = "\N{NO-BREAK SPACE}"


def wrapped(text: str, width: int) -> str:
    """Wraps `text` to `width` characters, between words and never between a number and its unit."""
    return "\n".join(_wrapped_line(line, width) for line in text.split("\n"))


def _wrapped_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indent = " " * min(len(line) - len(line.lstrip()) + 2, width // 4)
    parts = textwrap.wrap(
        _QUANTITY.sub(_UNBROKEN, line), max(width, 10), subsequent_indent=indent, break_long_words=False,
        break_on_hyphens=False, replace_whitespace=False, drop_whitespace=True,
    )  # fmt: skip
    return "\n".join(parts).replace(_UNBROKEN, " ")


def fitted(text: str, stream: TextIO) -> str:
    """Returns `text` unchanged for a file, wrapped for a terminal."""
    return wrapped(text, shutil.get_terminal_size().columns) if stream.isatty() else text


def plan_table(rows: Sequence[Mapping[str, str]], width: int | None) -> tuple[Table, tuple[str, ...]]:
    """Returns (the table of `rows`, the columns left out to fit `width`). width None: all columns."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    out: list[str] = []
    for name in _LEAVE_OUT:
        if width is None or sum(size + _BETWEEN for key, size in widths.items() if key not in out) <= width:
            break
        out.append(name)
    table = Table(box=SIMPLE, pad_edge=False)
    for name in widths:
        if name not in out:
            table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell for name, cell in row.items() if name not in out))
    return table, tuple(name for name in widths if name in out)


def as_lines(table: Table) -> str:
    console = Console(file=io.StringIO(), width=UNLIMITED, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip())


def as_many(parts: Sequence[str], width: int | None, *, short: str = "") -> str:
    """Returns the first of `parts`, or `short` if that does not fit `width`, and as many of the others as do."""
    line = short if short and width is not None and len(parts[0]) > width else parts[0]
    for part in parts[1:]:
        if width is not None and len(line) + len(part) > width:
            break
        line += part
    return line


def bar_line(
    spellings: Sequence[str], share: float, left: float | None, speed: float, peak: int, limit: int, *, width: int
) -> str:
    """Returns the live line: progress, time left, the pass, and as much of peak, bar and speed as fits `width`.

    spellings: what runs, in shorter and shorter words. share: from 0 to 1. left: seconds, None while nobody knows.
    """
    done = f" {100 * share:3.0f} %"
    ends = f"  ETA {'?' if left is None else format_seconds(left)}"
    needs = f"  peak {format_size(peak)} of {format_size(limit)}"
    runs = f"  {speed:.0f} samples/s"
    room = width - 1 - len(done) - len(ends)  # the last column is the cursor's
    what = next((words for words in spellings if len(words) <= room), spellings[-1][: max(0, room)])
    room -= len(what)
    shown = [ends]
    for part in (needs, runs):
        if len(part) <= room:
            shown.append(part)
            room -= len(part)
    size = min(30, room - 1)
    bar = f" {'#' * round(share * size):.<{size}}" if size >= 5 else ""
    return f"{what}{bar}{done}{''.join(shown)}"[: max(1, width - 1)]  # fewer columns than a percentage and an ETA take


def width_of(console: Console) -> int | None:
    """Returns the terminal's width; None if the output is no terminal."""
    return console.width if console.is_terminal else None


def width_for_table(console: Console) -> int | None:
    """Returns the width for tables; None for no limit."""
    asked = os.environ.get("COLUMNS", "")
    return int(asked) if width_of(console) is None and asked.isdecimal() and int(asked) else width_of(console)


_SILENT = (errno.EPIPE, errno.EIO, errno.EBADF)
"""Errors of a closed output, which are ignored."""


class Output:
    """Writes to the stream that `stream` returns. After the first error text is dropped, and no error is raised."""

    def __init__(self, stream: Callable[[], IO[str] | None]) -> None:
        self._stream = stream
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._present(), name)

    def write(self, text: str) -> int:
        self._do(lambda stream: stream.write(_writable(text, stream)))
        return len(text)

    def flush(self) -> None:
        self._do(lambda stream: stream.flush())

    def isatty(self) -> bool:
        stream = self._present()
        return self.error is None and stream is not None and not stream.closed and stream.isatty()

    @property
    def lost(self) -> str:
        """Why text was lost; empty if none was, or if the reader is gone."""
        error = self.error
        return error.strerror or "" if isinstance(error, OSError) and error.errno not in _SILENT else ""

    def _do(self, work: Callable[[IO[str]], object]) -> None:
        stream = self._present()
        if self.error is None and stream is not None:
            try:
                work(stream)
            except (OSError, ValueError) as error:  # ValueError: it was closed
                self.error = error

    def _present(self) -> IO[str] | None:
        stream = self._stream()
        return cast("IO[str] | None", getattr(stream, "rich_proxied_file", stream))  # beside a live bar rich stands before it


def standard_output() -> IO[str]:
    """Returns the current `sys.stdout`."""
    return cast("IO[str]", Output(lambda: sys.stdout))


@contextlib.contextmanager
def lasting_output() -> Iterator[Output]:
    """Inside, printing raises no error, from any code; afterwards the interpreter's last flush raises none either.

    Its value is the standard output, whose `lost` says so when some of it is.
    """
    _open_missing()
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w") as nowhere:  # in the place of one that is not there: libraries ask streams about themselves
        out, err = Output(lambda: before[0] or nowhere), Output(lambda: before[1] or nowhere)
        sys.stdout, sys.stderr = cast("Any", out), cast("Any", err)
        try:
            yield out
        finally:
            out.flush()
            if why := out.lost:
                print(f"the output is not complete: {why}. What a run prints is in its events.jsonl too.", file=err)
            err.flush()
            sys.stdout, sys.stderr = before
            for output, stream in zip((out, err), before, strict=True):
                if output.error is not None and stream is not None:
                    _let_go(stream)


def _open_missing() -> None:
    """Opens closed standard descriptors, whose numbers the next files would get, and libraries would print into those."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


def _let_go(stream: IO[str]) -> None:
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()


def _writable(text: str, stream: IO[str]) -> str:
    """Replaces characters that the terminal's encoding lacks, as a path may have."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


LOGGER = logging.getLogger("seqpart")
LOGGER.addHandler(logging.NullHandler())  # else Python prints warnings by itself where nobody has set logging up


def is_heard(level: int) -> bool:
    """True if a handler of the program takes records of that level, which are then not printed."""
    if not LOGGER.isEnabledFor(level):
        return False
    logger: logging.Logger | None = LOGGER
    while logger is not None:
        if any(handler.level <= level and not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def printing() -> contextlib.AbstractContextManager[object]:
    """Inside, messages are printed and not passed to handlers of the user's model or data: for the command."""
    return patch.object(LOGGER, "propagate", False)
