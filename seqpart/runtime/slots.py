"""The device's few large buffers, in which partitions lie one after the other.

    one slot     the buffer is reused, and made anew when a larger partition comes
    two slots    one partition computes while the previous one goes home out of the other buffer and the next one comes
    three slots  the previous one goes home while the next one comes, where each has a link of its own
    its own      of a partition that stays: nobody else is ever in it

A slot never outgrows its capacity, so a partition may have to wait for a large one although a small one is idle. A buffer
that was given back may still be on its way home: who takes it gets the wait along with it, and its copies come
behind that.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from seqpart.device.device import Device
from seqpart.store.layout import Layout

Wait = Callable[[], object]


@dataclass(slots=True, eq=False)
class Slot:
    """A flat uint8 buffer of at most `capacity` bytes, page-aligned on the CPU; what is issued to the current stream behind
    `free` finds it unused."""

    buffer: torch.Tensor
    free: Wait
    capacity: int = 0
    owner: int | None = None
    """The partition that has it alone; None: all that come and go use it in turn."""


def divided(buffer: torch.Tensor, groups: Sequence[Sequence[Layout]]) -> list[list[torch.Tensor]]:
    """Of each layout the region of `buffer`, one behind the other."""
    offset, found = 0, []
    for layouts in groups:
        regions = []
        for layout in layouts:
            regions.append(buffer[offset : offset + layout.padded_nbytes])
            offset += layout.padded_nbytes
        found.append(regions)
    return found


def bring_back(module: nn.Module, views: Mapping[str, torch.Tensor]) -> None:
    """A module may assign a new tensor to a name instead of writing into it: its value goes into the view of that name."""
    # Each name, also of a tensor that has two; and all values before any place, since they may lie in one another's.
    named = [*module.named_parameters(), *module.named_buffers(remove_duplicate=False)]
    moved = [
        (views[name], tensor.detach().clone())
        for name, tensor in named
        if name in views and tensor.data_ptr() != views[name].data_ptr()
    ]
    for view, value in moved:
        view.copy_(value)


def at_once() -> None:
    """Nothing to wait for."""


class Slots:
    """One buffer of at most so many bytes for each of `capacities`, and one for each partition in `own` (number to bytes).

    They are this object's memory, and last as long as it.
    """

    def __init__(self, capacities: Sequence[int], device: Device, own: Mapping[int, int] | None = None) -> None:
        self.count, self._device, self._owners = len(capacities), device, frozenset(own or ())
        """Of those that partitions use in turn."""
        every = [(capacity, None) for capacity in capacities] + [(capacity, p) for p, capacity in (own or {}).items()]
        self._idle = [
            Slot(torch.empty(0, dtype=torch.uint8), at_once, capacity, owner)
            for capacity, owner in sorted(every, key=lambda pair: pair[0])
        ]

    @property
    def any_free(self) -> bool:
        return bool(self._idle)

    def _free_for(self, p: int, nbytes: int) -> list[Slot]:
        owner = p if p in self._owners else None
        return [slot for slot in self._idle if slot.owner == owner and slot.capacity >= nbytes]

    def has_free(self, p: int, nbytes: int) -> bool:
        return bool(self._free_for(p, nbytes))

    def take(self, p: int, nbytes: int) -> Slot:
        """A buffer of at least `nbytes` for partition `p`. There must be a free one."""
        free = self._free_for(p, nbytes)
        assert free, "more or larger partitions are loaded than the plan has slots for"
        ready = [slot for slot in free if len(slot.buffer) >= nbytes]
        best = min(ready or free, key=lambda slot: slot.capacity)
        self._idle.remove(best)
        if not ready:
            best.free()
            self._drop(best)  # before the larger one comes
            try:
                best.buffer = self._device.empty(nbytes)
            except BaseException:
                self._idle.append(best)  # who began too early asks again when its turn has come
                raise
            made = self._device.mark()  # what computes may not be through with what its memory was before
            best.free = lambda: self._device.after(made)
        return best

    def give(self, slot: Slot, free: Wait) -> None:
        """Back again; behind `free` its bytes are no longer needed."""
        slot.free = free
        self._idle.append(slot)

    def close(self) -> None:
        """Let go of the idle buffers, which nobody uses any more."""
        for slot in self._idle:
            self._drop(slot)

    def _drop(self, slot: Slot) -> None:
        slot.buffer, slot.free = torch.empty(0, dtype=torch.uint8), at_once
