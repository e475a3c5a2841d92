"""The device's few large buffers, in which partitions lie one after the other.

    count 1    the one buffer is reused, and made anew when a larger partition comes
    count 2    one partition computes while the previous one goes home out of the other buffer and the next one comes

A buffer that was given back may still be on its way home: who takes it gets the wait along with it, and may wait in a
thread of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from seqpart.device import Device

Wait = Callable[[], object]


@dataclass(slots=True, eq=False)
class Slot:
    """A flat uint8 buffer, page-aligned on the CPU; `free` returns when nobody uses what it held before."""

    buffer: torch.Tensor
    free: Wait


def at_once() -> None:
    """Nothing to wait for."""


class Slots:
    """At most `count` buffers; they are this object's memory, and last as long as it."""

    def __init__(self, count: int, device: Device) -> None:
        self.count, self._device = count, device
        self._idle: list[Slot] = []
        self._taken = 0

    @property
    def has_room(self) -> bool:
        return self._taken < self.count

    def take(self, nbytes: int) -> Slot:
        """A buffer of at least `nbytes`. There must be room."""
        assert self.has_room, "more partitions are loaded than the plan has slots"
        self._taken += 1
        fitting = [slot for slot in self._idle if len(slot.buffer) >= nbytes]
        if fitting:
            best = min(fitting, key=lambda slot: len(slot.buffer))
            self._idle.remove(best)
            return best
        if self._taken + len(self._idle) > self.count:  # too small: its memory goes before the larger one comes
            smallest = min(range(len(self._idle)), key=lambda index: len(self._idle[index].buffer))
            self._idle.pop(smallest).free()
        return Slot(self._device.empty(nbytes), at_once)

    def give(self, slot: Slot, free: Wait) -> None:
        """Back again; `free` returns when its bytes are no longer needed."""
        slot.free = free
        self._taken -= 1
        self._idle.append(slot)
