"""The order of accesses to a simulated device's memory: the actors' clocks, and an error where no event orders two accesses."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from seqpart.device.caching_allocator import Block

HOST = "the host"
Clock = dict[str, int]
"""{actor: number of its actions that are known to be over}."""


class Unordered(RuntimeError):
    """Raised for two accesses to the same bytes, one of them a write, in no defined order: a defect of the program."""


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
    block: Block | None = None
    """Its block in the allocator."""
    lent: set[str] = field(default_factory=set)
    """Streams that use it, for which the allocator waits before it reuses the memory."""
    accesses: "list[_Access]" = field(default_factory=list)


def join(clock: Clock, other: Clock) -> None:
    for actor, action in other.items():
        if clock.get(actor, 0) < action:
            clock[actor] = action


def act(actor: str, clock: Clock) -> int:
    """Counts the actor's next action in its own clock, and returns its number."""
    clock[actor] = clock.get(actor, 0) + 1
    return clock[actor]


def touch(memory: Memory, first: int, last: int, *, write: bool, actor: str, clock: Clock, what: str) -> None:
    """Notes an access of `actor`, whose clock is at that action. Raises Unordered."""
    now = _Access(first, last, write, actor, clock[actor], what)
    for before in memory.accesses:
        overlaps = before.first < last and first < before.last and (write or before.write)
        if overlaps and before.actor != actor and clock.get(before.actor, 0) < before.action:
            raise Unordered(f"{memory.name}: {before} and {now} are not ordered by any event.")
    memory.accesses = [*_needed(memory.accesses, now), now]


def _needed(accesses: Iterable[_Access], now: _Access) -> Iterable[_Access]:
    """The accesses without those that `now` replaces: what is ordered after it is ordered after them."""
    for before in accesses:
        inside = now.first <= before.first and before.last <= now.last
        if not (inside and (now.write or (before.actor == now.actor and not before.write))):
            yield before
