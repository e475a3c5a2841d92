"""Which access comes behind which: vector clocks of the host and of streams, and who touched which bytes.

What a GPU does out of step with the program is right only if every two accesses to the same bytes, of which one writes, are
ordered by events. Whether they are does not depend on when they happened to run, so one run finds a missing wait for certain.

The host is one here, whatever thread it is: threads order themselves by locks and futures, as on every device.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

HOST = "the host"
Clock = dict[str, int]
"""For everybody who acts, how many of its actions are known to be over."""


class Unordered(RuntimeError):
    """Two accesses to the same bytes, one of them a write, and nothing says which comes first: a defect of the program."""


@dataclass(frozen=True, slots=True)
class _Access:
    first: int
    last: int
    """Bytes of the memory; the last is not included."""
    write: bool
    actor: str
    action: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} ({'writes' if self.write else 'reads'} bytes {self.first} to {self.last}, by {self.actor})"


@dataclass(slots=True, eq=False)
class Memory:
    """A piece of the device's memory, or of the host's that the device reads and writes."""

    name: str
    address: int
    nbytes: int
    on_device: bool
    block: int | None = None
    """Of the allocator."""
    lent: set[str] = field(default_factory=set)
    """Streams that use it, and are waited for before its memory is somebody else's."""
    accesses: "list[_Access]" = field(default_factory=list)


def join(clock: Clock, other: Clock) -> None:
    for actor, action in other.items():
        if clock.get(actor, 0) < action:
            clock[actor] = action


def act(actor: str, clock: Clock) -> int:
    """The number of the actor's next action, which its own clock knows from now on."""
    clock[actor] = clock.get(actor, 0) + 1
    return clock[actor]


def touch(memory: Memory, first: int, last: int, *, write: bool, actor: str, clock: Clock, what: str) -> None:
    """Note an access of `actor`, whose clock stands at that action. Raises Unordered."""
    now = _Access(first, last, write, actor, clock[actor], what)
    for before in memory.accesses:
        overlaps = before.first < last and first < before.last and (write or before.write)
        if overlaps and before.actor != actor and clock.get(before.actor, 0) < before.action:
            raise Unordered(f"{memory.name}: {before} and {now} are not ordered by any event.")
    memory.accesses = [*_needed(memory.accesses, now), now]


def _needed(accesses: Iterable[_Access], now: _Access) -> Iterable[_Access]:
    """Without those that `now` stands for: what is ordered behind it is ordered behind them."""
    for before in accesses:
        inside = now.first <= before.first and before.last <= now.last
        if not (inside and (now.write or (before.actor == now.actor and not before.write))):
            yield before
