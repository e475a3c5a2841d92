"""The device's few large buffers, which hold one partition after another.

    one slot     the buffer is reused, and allocated anew when a larger partition comes
    two slots    one partition computes while the previous one is saved from the other buffer and the next one is loaded
    three slots  the previous one is saved while the next one is loaded, if each direction has a link of its own
    own slot     for a partition that stays on the device: no other ever uses it

A slot never outgrows its capacity, so a partition may have to wait for a large one although a small one is idle. A buffer
that was given back may still be being saved: whoever takes it also gets the function that waits for that.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from seqpart.device.device import Device
from seqpart.errors import ModelError
from seqpart.store.layout import Layout
from seqpart.store.store import at_once

Wait = Callable[[], object]


@dataclass(slots=True, eq=False)
class Slot:
    """A flat uint8 buffer of at most `capacity` bytes, page-aligned on the CPU; work issued to the current stream after a
    call of `free` finds it unused."""

    buffer: torch.Tensor
    free: Wait
    capacity: int = 0
    owner: int | None = None
    """The only partition that uses it; None: all partitions without a slot of their own use it in turn."""


def divided(buffer: torch.Tensor, groups: Sequence[Sequence[Layout]]) -> list[list[torch.Tensor]]:
    """Divides `buffer` into one region per layout, in order."""
    offset, found = 0, []
    for layouts in groups:
        regions = []
        for layout in layouts:
            regions.append(buffer[offset : offset + layout.padded_nbytes])
            offset += layout.padded_nbytes
        found.append(regions)
    return found


def bring_back(module: nn.Module, views: Mapping[str, torch.Tensor]) -> None:
    """Copies into its view each tensor that the module assigned anew to a name, instead of changing it in place."""
    # Every name, also if a tensor has two; and all values are cloned first, as one may lie in another's view.
    named = [*module.named_parameters(), *module.named_buffers(remove_duplicate=False)]
    moved = list[tuple[torch.Tensor, torch.Tensor]]()
    for name, tensor in ((name, tensor) for name, tensor in named if name in views):
        if tensor.shape != views[name].shape:
            raise ModelError(
                f"{name} of a {type(module).__name__} had shape {tuple(views[name].shape)} when the run was planned, and has "
                f"{tuple(tensor.shape)} now. If its first forward gives it its shape, call the model on a batch before."
            )
        if tensor.data_ptr() != views[name].data_ptr():
            moved.append((views[name], tensor.detach().clone()))
    for view, value in moved:
        view.copy_(value)


class Slots:
    """One buffer of at most that many bytes for each of `capacities`, and one for each partition in `own` (number to bytes).

    This object owns the buffers, which live as long as it does.
    """

    def __init__(self, capacities: Sequence[int], device: Device, own: Mapping[int, int] | None = None) -> None:
        self.count, self._device, self._owners = len(capacities) or len(own or ()), device, frozenset(own or ())
        """count: number of slots that partitions use in turn; of all slots, if each partition has its own."""
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
        """Returns a slot of at least `nbytes` for partition `p`. There must be a free one."""
        free = self._free_for(p, nbytes)
        assert free, "more or larger partitions are loaded than the plan has slots for"
        ready = [slot for slot in free if len(slot.buffer) >= nbytes]
        best = min(ready or free, key=lambda slot: slot.capacity)
        self._idle.remove(best)
        if not ready:
            best.free()
            self._drop(best)  # before the larger one is allocated
            try:
                best.buffer = self._device.empty(nbytes)
            except BaseException:
                self._idle.append(best)  # a prefetch that came too early tries again at its own LOAD
                raise
            made = self._device.mark()  # kernels may still use what its memory was before
            best.free = lambda: self._device.after(made)
        return best

    def give(self, slot: Slot, free: Wait) -> None:
        """Gives a slot back; after a call of `free` its bytes are no longer needed."""
        slot.free = free
        self._idle.append(slot)

    def close(self) -> None:
        """Frees the idle buffers."""
        for slot in self._idle:
            self._drop(slot)

    def _drop(self, slot: Slot) -> None:
        slot.buffer, slot.free = torch.empty(0, dtype=torch.uint8), at_once
