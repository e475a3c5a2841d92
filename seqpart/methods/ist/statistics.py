"""Recomputes BatchNorm's running statistics as the mean over a pass's batches, with all else in eval mode; and restores buffers
to their values before passes that are repeated."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from seqpart.model.blocks import Block
from seqpart.model.inspection import stays

Around = Callable[[Iterable[nn.Module]], AbstractContextManager[None]]
"""Returns a context manager for the forward pass of a block with these modules."""


def as_it_is(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    return nullcontext()


def observes(module: nn.Module) -> bool:
    """True for a BatchNorm whose running statistics change in training."""
    return isinstance(module, _BatchNorm) and module.track_running_stats and not stays(module)


@contextmanager
def observed(modules: Iterable[nn.Module], *, anew: bool) -> Iterator[None]:
    """Inside, BatchNorms of `modules` use the batch's own statistics and average them. anew: the average starts here."""
    norms = [module for module in modules if isinstance(module, _BatchNorm) and observes(module)]
    before = [(norm.momentum, norm.training) for norm in norms]
    for norm in norms:
        if anew:
            norm.reset_running_stats()
        norm.momentum, norm.training = None, True
    try:
        yield
    finally:
        for norm, (momentum, training) in zip(norms, before, strict=True):
            norm.momentum, norm.training = momentum, training


_Copy = tuple[Block, str, torch.Tensor]
"""(block, name, value) of a buffer."""


class EarlierBuffers:
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
        """Whether no pass has been made since the update began; and whether one has in this visit, with a graph."""
        self._left: list[torch.Tensor] = []

    def begin_visit(self) -> None:
        """Copies the buffers until the update is made: they stay on the device, so no home has their values."""
        self._at_visit = self._copied()

    def end_visit(self) -> None:
        """Ends a visit without an update: restores the buffers to before it, or before the forward pass that is repeated."""
        if self._trained:  # else, as behind tests, nothing was written, and what they are may be on its way home
            self._put_back(self._at_visit or self._before)
        self.forget()

    def begin_update(self) -> None:
        """Copies the buffers for `undo`."""
        self._at_update, self._is_new, self._trained = self._copied(), True, True

    def remember(self) -> None:
        """Copies the buffers, once, before a forward pass that changes running statistics and may be repeated."""
        begun = self._at_update if self._is_new else []  # the first pass since then: they are what they were
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
