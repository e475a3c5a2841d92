"""Snapshots of a partition's buffers, so that a repeated forward pass or an undone update leaves them as they were."""

from collections.abc import Callable, Mapping, Sequence

import torch
import xxhash

from seqpart.device.pages import bytes_of
from seqpart.device.ranks import Ranks
from seqpart.model.blocks import Block

_Copy = tuple[Block, str, torch.Tensor]
"""(block, name, value) of a buffer."""


def _digest(buffer: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(bytes_of(buffer.view(-1).view(torch.uint8)))


class BufferSnapshots:
    """Copies of a partition's buffers: at the start of an update, before a forward pass that is repeated, and at the end of a
    visit whose update comes in a later one."""

    def __init__(self, changing: Mapping[Block, Sequence[str]], attach: Callable[[], None]) -> None:
        """changing: names of buffers that passes may change. attach: puts the modules' original buffers back if they assigned
        new tensors."""
        self._changing, self._attach = changing, attach
        self._at_update: list[_Copy] = []
        self._before: list[_Copy] = []
        self._at_visit: list[_Copy] = []
        self._is_new = self._trained = False
        """True if no pass was made since the update began; true if one with a graph was made in this visit."""
        self._left: list[torch.Tensor] = []
        self._shared: dict[int, int] = {}
        """Digest of each buffer that other ranks were given, by its place."""

    def share(self, ranks: Ranks) -> None:
        """Gives the other ranks the buffers of the first, where passes in any of them have changed theirs."""
        own = [block.module.get_buffer(name) for block, name in self._own()]
        host = [buffer.detach().cpu().contiguous() for buffer in own]
        changed = [place for place, one in enumerate(host) if self._shared.get(place) != _digest(one)]
        for place in sorted({place for places in ranks.gather(changed) for place in places}) if own else ():
            ranks.send(host[place])
            own[place].copy_(host[place])
            self._shared[place] = _digest(host[place])

    def begin_visit(self) -> None:
        """Copies the buffers until the update is made: they stay on the device, so no home has their values."""
        self._at_visit = self._copied()

    def end_visit(self) -> None:
        """Ends a visit without an update: restores the buffers to before it, or before the forward pass that is repeated."""
        if self._trained:  # else, as after tests, nothing was written, and the values may still be being saved
            self._put_back(self._at_visit or self._before)
        self.forget()

    def begin_update(self) -> None:
        """Copies the buffers for `undo`."""
        self._at_update, self._is_new, self._trained = self._copied(), True, True

    def remember(self) -> None:
        """Copies the buffers, once, before a forward pass that changes running statistics and may be repeated."""
        begun = self._at_update if self._is_new else []  # the first pass since then: the values are the same
        self._before, self._is_new = self._before or self._at_visit or begun or self._copied(), False
        self._trained = True

    def restore(self) -> None:
        """Restores the buffers to before the forward pass that is repeated."""
        self._put_back(self._before)
        self._before = []

    def undo(self) -> None:
        """Restores the buffers to the start of the update, and discards what `leave` kept."""
        self._left = []
        self._put_back(self._at_update or self._at_visit or self._before)
        self.forget()

    def forget(self) -> None:
        """Discards the copies of this update or visit."""
        self._at_update, self._at_visit, self._before, self._trained = [], [], [], False

    def leave(self) -> None:
        """Copies the buffers at the end of this visit, for the next one."""
        self._left = [value for _, _, value in self._copied()]

    def come_back(self) -> None:
        """Restores the buffers to the end of the last visit."""
        for (block, name), value in zip(self._own(), self._left, strict=False):
            block.module.get_buffer(name).copy_(value)
        self._left = []

    def release(self) -> None:
        self._left = []
        self.forget()

    def _own(self) -> list[tuple[Block, str]]:
        return [(block, name) for block, names in self._changing.items() for name in names]

    def _copied(self) -> list[_Copy]:
        return [(block, name, block.module.get_buffer(name).clone()) for block, name in self._own()]

    def _put_back(self, copied: list[_Copy]) -> None:
        if copied:
            self._attach()
        for block, name, before in copied:
            block.module.get_buffer(name).copy_(before)
