"""Holds back Ctrl-C and the signals that end a process until the update is done, so that a checkpoint can be saved.

Python raises KeyboardInterrupt wherever the main thread happens to be, also between taking a lock that it shares with
the reader's thread and noting that it is taken. That lock stays locked, and the run hangs while it cleans up. So while
a run's threads work, a signal waits for the next safe point.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

_ENDINGS = (signal.SIGTERM, signal.SIGHUP)
"""Signals of a scheduler and of a closed terminal, which end a process that does not handle them."""
_SIGNALS = (signal.SIGINT, *_ENDINGS)
INTERRUPTED = 130
"""Exit code of a program that a signal has ended."""


def nothing_begun_yet() -> None:
    """From here on these signals end the program in words, unless they are ignored or handled: while it loads, a
    KeyboardInterrupt would be a traceback, or lost in a library. Until `begun`.

    Does nothing within another program, where torch is loaded already.
    """
    if "torch" in sys.modules or threading.current_thread() is not threading.main_thread():
        return
    for number in _SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end_before_it_began)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def hold_back() -> None:
    """Holds these signals back until `nothing_begun_yet`, also that of the program that replaces this one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def begun() -> None:
    """Ends what `nothing_begun_yet` has begun."""
    for number in _SIGNALS:
        if signal.getsignal(number) is _end_before_it_began:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _end_before_it_began(*_: object) -> None:
    os.write(2, b"interrupted: nothing was begun.\n")
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def like_ctrl_c() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP act as Ctrl-C, unless they are ignored or handled already. Only in the main thread."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in _ENDINGS:
            if signal.getsignal(number) == signal.SIG_DFL:
                before[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for ending, handler in before.items():
            signal.signal(ending, handler)


@contextlib.contextmanager
def undivided(*, after_errors: bool = False) -> Iterator[None]:
    """Holds back all signals until the end of the block, which must not stay half done. after_errors: raises them even after an
    error."""
    interrupts, failed = Interrupts(), True
    try:
        with interrupts:
            interrupts.hold()
            yield
        failed = False
    finally:
        interrupts.end("", failed=failed and not after_errors)


def put_off() -> contextlib.AbstractContextManager[None]:
    """Holds back all signals until the end of the block, and raises them even after an error. An exception raised while C++
    calls Python code that must not raise, as when a fake tensor is freed, would end the interpreter."""
    return undivided(after_errors=True)


def end_at_once() -> None:
    """Lets Ctrl-C end the process from here on: all is done, and the interpreter's shutdown would print a traceback."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class Interrupts:
    """While entered, a first SIGINT, SIGTERM or SIGHUP waits for `check`; a second one is handled at once.

    Outside the main thread, and for signals that nobody handles in Python, nothing changes.
    """

    def __init__(self, *, agreed: bool = False) -> None:
        """agreed: signals, also second ones, wait until several processes `agree` that they have come."""
        self._before: dict[int, Any] = {}
        self._waiting: int | None = None
        self._held, self._agreed, self._agrees = False, False, agreed

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if callable(signal.getsignal(number)):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._held and kind is None:
            return
        self._restore()
        if kind is None:
            self.check()

    def hold(self) -> None:
        """Makes all signals wait for `end`: training is over, and the rest takes a moment."""
        self._held = True

    def end(self, words: str, *, failed: bool) -> None:
        """Ends `hold`. Raises KeyboardInterrupt with `words` if a signal came and no other handler takes it.

        failed: an error is being raised already, and ends the caller's work too.
        """
        if not self._held:
            return
        self._held = False
        self._restore()
        if failed:
            return
        try:
            self.check()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(words) from None

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def waiting(self) -> bool:
        """True if a signal has come that was not handled yet."""
        return self._agreed if self._agrees else self.has_come

    @property
    def has_come(self) -> bool:
        """True if a signal has come to this process."""
        return self._waiting is not None

    def agree(self, *, came: bool) -> None:
        """Notes that a signal has come to this process or to another."""
        self._agreed = came
        if came and self._waiting is None and self._before:
            self._waiting = signal.SIGTERM if signal.SIGTERM in self._before else next(iter(self._before))

    def check(self) -> None:
        """Handles a pending signal at a safe point, by the handler that was set before."""
        if self._held or (self._agrees and not self._agreed):
            return
        number, self._waiting = self._waiting, None
        if number is not None:
            self._before[number](number, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._waiting is not None and not self._held and not self._agrees:
            self._before[number](number, frame)
        self._waiting = number
