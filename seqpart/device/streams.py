"""Streams whose copies happen late: when somebody waits for them, or before that by chance.

Kernels of the stream that computes run at once, since the program goes on with what they return; what waits for them is ordered
by events all the same, see ordering.py. Copies of the other streams are put off: one whose wait is missing finds, or leaves,
other bytes. In which order streams go on is drawn from a seed.

Beside the clocks that order accesses goes one of seconds: when everything would end on the hardware that is simulated.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from seqpart.device.watching import HOST, Clock, act, join

COMPUTING = "the stream that computes"
_LATE_SHARE, _LATE_SECONDS = 0.1, 0.02
"""How often a thread of copies comes late, and by how much; with seed 0 none does."""


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """Behind the first `position` entries of a stream."""

    stream: "Stream"
    position: int
    clock: Clock
    seconds: float


@dataclass(slots=True, eq=False)
class Stream:
    name: str
    clock: Clock
    seconds: float
    """When what was issued to it so far is over."""
    late: "deque[Callable[[], None] | Event]"
    """What was issued and not done: copies, and events to wait for."""
    issued: int = 0
    done: int = 0


class Streams:
    """One that computes, and others by name. From any thread; all under one lock."""

    def __init__(self, names: tuple[str, ...], seed: int) -> None:
        self.lock = threading.RLock()
        self._streams = {name: Stream(name, {}, 0.0, deque()) for name in (COMPUTING, *names)}
        self._thread = threading.local()
        self.host: Clock = {}
        self._random = random.Random(seed)
        self._haste = self._random.choice((0.0, 0.0, 0.2, 0.8))
        """How likely a copy is to happen although nobody waits for it."""
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
        """When the calling thread got to here."""
        return float(getattr(self._thread, "seconds", 0.0))

    @property
    def computed_until(self) -> float:
        """When the last kernel that was issued is over."""
        return self._streams[COMPUTING].seconds

    def reach(self, seconds: float) -> None:
        """The calling thread waits until then."""
        self._thread.seconds = max(self.seconds, seconds)

    def dawdle(self) -> None:
        """Now and then the calling thread comes late."""
        with self.lock:
            late = self._random.random() < self._late_share
        if late:
            time.sleep(_LATE_SECONDS)

    # --- issuing --------------------------------------------------------------------------------------------------

    def begin(self, stream: Stream) -> float:
        """The stream's next action, behind what it and the calling thread did so far. When it can begin."""
        act(HOST, self.host)
        join(stream.clock, self.host)
        act(stream.name, stream.clock)
        return max(stream.seconds, self.seconds)

    def issue(self, stream: Stream, item: Callable[[], None] | Event) -> None:
        """A copy, or an event to wait for: at once where the stream computes."""
        stream.issued += 1
        stream.late.append(item)
        if stream.name == COMPUTING:
            self._finish(stream, stream.issued)
        self._hurry()

    def finish_all(self, stream: Stream) -> None:
        """Before what is done at once there."""
        self._finish(stream, stream.issued)

    def record(self) -> Event:
        with self.lock:
            stream = self.current
            join(stream.clock, self.host)
            return Event(stream, stream.issued, dict(stream.clock), max(stream.seconds, self.seconds))

    def follow(self, event: Event) -> None:
        """The current stream waits for it."""
        with self.lock:
            stream = self.current
            join(stream.clock, event.clock)
            stream.seconds = max(stream.seconds, event.seconds)
            self.issue(stream, event)

    def is_known(self, event: Event) -> bool:
        """Whether the calling thread has waited for it, or for what came behind it."""
        with self.lock:
            return all(self.host.get(stream, 0) >= position for stream, position in event.clock.items())

    def wait(self, event: Event) -> None:
        """The calling thread does."""
        with self.lock:
            self._finish(event.stream, event.position)
            join(self.host, event.clock)
            self.reach(event.seconds)
            self._hurry()

    # --- doing ----------------------------------------------------------------------------------------------------

    def _finish(self, stream: Stream, position: int) -> None:
        while stream.done < position:
            self._one(stream)

    def _one(self, stream: Stream) -> None:
        item = stream.late.popleft()
        stream.done += 1
        if isinstance(item, Event):
            self._finish(item.stream, item.position)
        else:
            item()

    def _hurry(self) -> None:
        while self._random.random() < self._haste:
            waiting = [stream for stream in self._streams.values() if stream.late]
            if not waiting:
                return
            self._one(self._random.choice(waiting))
