"""Running statistics of BatchNorm made anew: the mean over the batches of a pass, in which nothing else is in training. And
buffers as they were before passes that will be done again."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from seqpart.model.blocks import Block
from seqpart.model.inspection import stays

Around = Callable[[Iterable[nn.Module]], AbstractContextManager[None]]
"""A context for the forward pass of a block that consists of these modules."""


def as_it_is(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    return nullcontext()


def observes(module: nn.Module) -> bool:
    """Whether it is a BatchNorm with running statistics that are to change."""
    return isinstance(module, _BatchNorm) and module.track_running_stats and not stays(module)


@contextmanager
def observed(modules: Iterable[nn.Module], *, anew: bool) -> Iterator[None]:
    """Inside, BatchNorms among `modules` take the batch's own mean and deviation, and average them. anew: from here on."""
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
    """Buffers of a partition's blocks as they were when an update began, and before a forward pass that will be done again;
    and as a visit left them whose update belongs to a later one. The copies are its own memory."""

    def __init__(self, changing: Mapping[Block, Sequence[str]], attach: Callable[[], None]) -> None:
        """changing: names of buffers that passes may change. attach: gives the modules the buffers that they had, where they
        put new tensors in the place of these."""
        self._changing, self._attach = changing, attach
        self._at_update: list[_Copy] = []
        self._before: list[_Copy] = []
        self._at_visit: list[_Copy] = []
        self._is_new = self._trained = False
        """Whether no pass has been made since the update began; and whether one has in this visit, with a graph."""
        self._left: list[torch.Tensor] = []

    def begin_visit(self) -> None:
        """Their memory is all that has them, as that of weights that stay: keep what they are until the update is made."""
        self._at_visit = self._copied()

    def end_visit(self) -> None:
        """Without an update: let them be what they were before it, or before the forward pass that will be done again."""
        if self._trained:  # else, as behind tests, nothing was written, and what they are may be on its way home
            self._put_back(self._at_visit or self._before)
        self.forget()

    def begin_update(self) -> None:
        """Keep them as they are now, for `undo`."""
        self._at_update, self._is_new, self._trained = self._copied(), True, True

    def remember(self) -> None:
        """A forward pass changes running statistics, and it may have to be done again: keep what they are, once."""
        begun = self._at_update if self._is_new else []  # the first pass since then: they are what they were
        self._before, self._is_new = self._before or self._at_visit or begun or self._copied(), False
        self._trained = True

    def restore(self) -> None:
        """Let running statistics be what they were before the forward pass that will be done again."""
        self._put_back(self._before)
        self._before = []

    def undo(self) -> None:
        """Let them be what they were when the update began, and forget what the visit left."""
        self._left = []
        self._put_back(self._at_update or self._at_visit or self._before)
        self.forget()

    def forget(self) -> None:
        """The update is over, or the visit."""
        self._at_update, self._at_visit, self._before, self._trained = [], [], [], False

    def leave(self) -> None:
        """Keep them as this visit made them, for the next one."""
        self._left = [value for _, _, value in self._copied()]

    def come_back(self) -> None:
        """As the last visit left them."""
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
