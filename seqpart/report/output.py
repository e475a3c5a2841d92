"""Standard output and error may end before the run does: a reader has gone, a disk is full, a terminal is closed."""

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any, cast

_SILENT = (errno.EPIPE, errno.EIO, errno.EBADF)
"""Nobody is there to read: that needs no words."""


class Output:
    """What `stream` gives, as long as that takes text. From the first error on text is dropped, and no error raised."""

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
        """Why some of the text did not arrive where somebody waits for it; empty where all did, or nobody waits."""
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
    """`sys.stdout` as it is at each moment."""
    return cast("IO[str]", Output(lambda: sys.stdout))


@contextlib.contextmanager
def lasting_output() -> Iterator[Output]:
    """Inside, printing raises no error, whoever prints; behind it the interpreter's own last flush meets none either.

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
    """A standard descriptor that is closed would be the next file's number, and libraries print into that."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


def _let_go(stream: IO[str]) -> None:
    """What is left in its buffer goes nowhere."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()


def _writable(text: str, stream: IO[str]) -> str:
    """A path may have characters that the terminal's encoding has not."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text
