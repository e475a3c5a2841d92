"""When the steps of a schedule end, where transfers go on beside the computation.

Reads and writes share the disk: both at once moved 1.07 times as many bytes a second as one behind the other, on a disk
that reads 3.0 and writes 5.1 GB/s, and at hours when the same one does 1.4 and 3.3. Links to host memory go both ways at once.
"""

from seqpart.schedule.steps import AT_HOME, Step, Verb
from seqpart.store.graph_ranges import GRAPH_BUFFERS


class Disk:
    """What it does at a time: who asked first is served first, others in the gaps."""

    def __init__(self) -> None:
        self._busy: list[tuple[float, float]] = []
        """From when to when, in order."""

    def serve(self, begins: float, seconds: float) -> float:
        """When `seconds` of work are over that may begin at `begins`."""
        if not self._busy or self._busy[-1][0] <= begins:  # behind all others, as most are
            last = self._busy.pop() if self._busy and self._busy[-1][1] >= begins else (begins, begins)
            self._busy.append((last[0], last[1] + seconds))
            return last[1] + seconds
        first, ends, others = begins, begins + seconds, list[tuple[float, float]]()
        for busy in self._busy:
            if busy[1] < begins or busy[0] > ends:
                others.append(busy)
            else:
                ends += busy[1] - max(busy[0], begins)
                first = min(first, busy[0])
        if seconds:
            self._busy = sorted([*others, (first, ends)])
        return ends

    def forget(self, before: float) -> None:
        """Nobody asks for anything that begins earlier."""
        while self._busy and self._busy[0][1] < before:
            del self._busy[0]


class Clock:
    """When steps end: loads go ahead of the computation as far as there are slots, saves go on behind it."""

    def __init__(
        self, slots: int, stays: frozenset[int], *, at_host: frozenset[int] = frozenset(),
        graphs_at_host: frozenset[int] = frozenset(), boundaries_on_disk: bool = True,
        slotless: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        """at_host, graphs_at_host: partitions whose homes and graphs do not go by the disk. slotless: those that take a slot
        for their optimizer state alone."""
        self._free, self._stays, self._slotless, self._taken = [0.0] * slots, stays, slotless, set[int]()
        self._at_host, self._graphs_at_host, self._boundaries_on_disk = at_host, graphs_at_host, boundaries_on_disk
        self._disk = Disk()
        self._ready: dict[int, float] = {}
        self._whole: dict[int, float] = {}
        """When each partition's weights are there, and when its optimizer state is."""
        self._computing = self._reading = self._writing = 0.0
        self._graph_buffers = [0.0] * GRAPH_BUFFERS
        """When each is free."""

    def take(self, step: Step, seconds: float, graph: float, boundary: float, times: int, first: float = 1.0) -> float:
        """When `step` ends, which stands for `times` equal ones, of `seconds` each. first: of a load, the share of weights.

        graph: seconds that a graph takes from FORWARD to where it waits, or from there to BACKWARD; boundary: that what
        is handed on takes.
        """
        p = step.partition
        by_disk = p not in self._at_host
        if step.verb in AT_HOME:  # homes are read that others have written
            self._computing = self._reading = self._writing = max(self._computing, self._reading, self._writing) + seconds
            return self._computing
        if step.verb is Verb.LOAD:
            slot = 0.0
            if p not in self._stays and (step.more or p not in self._slotless):
                slot = min(self._free)
                self._free.remove(slot)
                self._taken.add(p)
            self._disk.forget(min(self._reading, self._computing))
            self._ready[p] = self._moved(max(self._reading, slot), first * seconds, by_disk)
            self._reading = self._whole[p] = self._moved(self._ready[p], (1 - first) * seconds, by_disk)
            return self._reading
        if step.verb is Verb.DROP:
            self._writing = self._moved(max(self._writing, self._computing), seconds, by_disk)
            if p in self._taken:
                self._free.append(self._writing)
                self._taken.remove(p)
            del self._ready[p], self._whole[p]
            return self._writing
        return self._work(step, seconds, graph, boundary, times)

    def _moved(self, begins: float, seconds: float, by_disk: bool) -> float:
        return self._disk.serve(begins, seconds) if by_disk else begins + seconds

    def _work(self, step: Step, seconds: float, graph: float, boundary: float, times: int) -> float:
        p, leaves = step.partition, step.verb is Verb.FORWARD
        graph_by_disk = p not in self._graphs_at_host
        begins = max(self._computing, self._whole[p] if step.verb is Verb.UPDATE else self._ready[p])
        if graph:
            buffer = self._graph_buffers.pop(0)
            if not leaves:
                buffer = self._reading = self._moved(max(self._reading, buffer), times * graph, graph_by_disk)
            begins = max(begins, buffer)
        self._computing = begins + times * seconds
        written = boundary + (graph if leaves else 0.0)
        if written:  # behind the first one all others may still have to be written, and behind the last one that alone
            by_disk = (boundary > 0 and self._boundaries_on_disk) or (graph > 0 and leaves and graph_by_disk)
            moved = self._moved(max(self._writing, begins + seconds), times * written, by_disk)
            self._writing = max(moved, self._computing + written)
        if graph:
            self._graph_buffers.append(self._writing if leaves else self._computing)
        return self._computing
