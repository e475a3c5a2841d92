"""Simulated streams whose copies happen late: when the program waits for them, or before that by chance.

Kernels of the stream that computes run at once, since the program goes on with their results; accesses after them must be
ordered by events all the same, see ordering.py. Copies of the other streams are delayed: one whose wait is missing reads, or
leaves, other bytes. The order in which streams go on is drawn from a seed.

Beside the clocks that order accesses there is one of seconds: when everything would end on the simulated hardware.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from seqpart.device.ordering import HOST, Clock, act, join

COMPUTING = "the stream that computes"
_LATE_SHARE, _LATE_SECONDS = 0.1, 0.02
"""Share of copies for which a thread is late, and seconds of delay; with seed 0 none is."""


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """An event after the first `position` entries of a stream."""

    stream: "Stream"
    position: int
    clock: Clock
    seconds: float


@dataclass(slots=True, eq=False)
class Stream:
    name: str
    clock: Clock
    seconds: float
    """Time at which everything issued so far is over."""
    late: "deque[Callable[[], None] | Event]"
    """Entries issued and not done: copies, and events to wait for."""
    issued: int = 0
    done: int = 0


class Streams:
    """The stream that computes, and others by name. Usable from any thread, under one lock."""

    def __init__(self, names: tuple[str, ...], seed: int) -> None:
        self.lock = threading.RLock()
        self._streams = {name: Stream(name, {}, 0.0, deque()) for name in (COMPUTING, *names)}
        self._thread = threading.local()
        self.host: Clock = {}
        self._random = random.Random(seed)
        self._haste = self._random.choice((0.0, 0.0, 0.2, 0.8))
        """Probability that a copy happens before the program waits for it."""
        self._late_share = _LATE_SHARE if seed else 0.0  # whose copies are issued in another order takes another time

    # --- the calling thread ---------------------------------------------------------------------------------------

    @property
    def current(self) -> Stream:
        return self._streams[getattr(self._thread, "stream", COMPUTING)]

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        before = getattr(self._thread, "stream", COMPUTING)
        self._thread.stream = name
        try:
            yield
        finally:
            self._thread.stream = before

    @property
    def seconds(self) -> float:
        """Simulated time of the calling thread."""
        return float(getattr(self._thread, "seconds", 0.0))

    def reach(self, seconds: float) -> None:
        """Advances the time of the calling thread to `seconds`."""
        self._thread.seconds = max(self.seconds, seconds)

    def dawdle(self) -> None:
        """Delays the calling thread now and then."""
        with self.lock:
            late = self._random.random() < self._late_share
        if late:
            time.sleep(_LATE_SECONDS)

    # --- issuing --------------------------------------------------------------------------------------------------

    def begin(self, stream: Stream) -> float:
        """Begins the stream's next action, after all that it and the calling thread did. Returns when it can begin."""
        act(HOST, self.host)
        join(stream.clock, self.host)
        act(stream.name, stream.clock)
        return max(stream.seconds, self.seconds)

    def issue(self, stream: Stream, item: Callable[[], None] | Event) -> None:
        """Issues a copy, or an event to wait for; done at once in the stream that computes."""
        stream.issued += 1
        stream.late.append(item)
        if stream.name == COMPUTING:
            self.finish(stream)
        self._hurry()

    def record(self) -> Event:
        with self.lock:
            stream = self.current
            join(stream.clock, self.host)
            return Event(stream, stream.issued, dict(stream.clock), max(stream.seconds, self.seconds))

    def follow(self, event: Event) -> None:
        """Makes the current stream wait for `event`."""
        with self.lock:
            stream = self.current
            join(stream.clock, event.clock)
            stream.seconds = max(stream.seconds, event.seconds)
            self.issue(stream, event)

    def is_known(self, event: Event) -> bool:
        """True if the calling thread has waited for `event`, or for a later one."""
        with self.lock:
            return all(self.host.get(stream, 0) >= position for stream, position in event.clock.items())

    def wait(self, event: Event) -> None:
        """Makes the calling thread wait for `event`."""
        with self.lock:
            self.finish(event.stream, event.position)
            join(self.host, event.clock)
            self.reach(event.seconds)
            self._hurry()

    # --- doing ----------------------------------------------------------------------------------------------------

    def finish(self, stream: Stream, position: int | None = None) -> None:
        """Does the first `position` entries of the stream; None: all, as before a kernel runs at once there."""
        while stream.done < (stream.issued if position is None else position):
            self._one(stream)

    def _one(self, stream: Stream) -> None:
        item = stream.late.popleft()
        stream.done += 1
        if isinstance(item, Event):
            self.finish(item.stream, item.position)
        else:
            item()

    def _hurry(self) -> None:
        while self._random.random() < self._haste:
            waiting = [stream for stream in self._streams.values() if stream.late]
            if not waiting:
                return
            self._one(self._random.choice(waiting))
