"""When the steps of a schedule end, where transfers go on beside the computation."""

from seqpart.offload.graph_ranges import GRAPH_BUFFERS
from seqpart.schedule.steps import AT_HOME, Step, Verb


class Clock:
    """When steps end: loads go ahead of the computation as far as there are slots, saves go on behind it."""

    def __init__(self, slots: int, stays: frozenset[int]) -> None:
        self._free, self._stays = [0.0] * slots, stays
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
        if step.verb in AT_HOME:  # homes are read that others have written
            self._computing = self._reading = self._writing = max(self._computing, self._reading, self._writing) + seconds
            return self._computing
        if step.verb is Verb.LOAD:
            slot = 0.0
            if p not in self._stays:
                slot = min(self._free)
                self._free.remove(slot)
            begins = max(self._reading, slot)
            self._ready[p], self._whole[p] = begins + first * seconds, begins + seconds
            self._reading = self._whole[p]
            return self._reading
        if step.verb is Verb.DROP:
            self._writing = max(self._writing, self._computing) + seconds
            if p not in self._stays:
                self._free.append(self._writing)
            del self._ready[p], self._whole[p]
            return self._writing
        begins = max(self._computing, self._whole[p] if step.verb is Verb.UPDATE else self._ready[p])
        if graph:
            buffer = self._graph_buffers.pop(0)
            if step.verb is Verb.BACKWARD:
                buffer = self._reading = max(self._reading, buffer) + times * graph
            begins = max(begins, buffer)
        self._computing = begins + times * seconds
        written = boundary + (graph if step.verb is Verb.FORWARD else 0.0)
        if written:  # behind the first one all others may still have to be written, and behind the last one that alone
            first, last = begins + seconds, self._computing
            self._writing = max(self._writing + times * written, first + times * written, last + written)
        if graph:
            self._graph_buffers.append(self._writing if step.verb is Verb.FORWARD else self._computing)
        return self._computing
