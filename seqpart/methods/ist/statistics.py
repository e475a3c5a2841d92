"""Recomputes BatchNorm's running statistics as the mean over a pass's batches, with all else in eval mode."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from seqpart.model.inspection import stays

Around = Callable[[Iterable[nn.Module]], AbstractContextManager[object]]
"""Returns a context manager for the forward pass of a block with these modules."""


def observes(module: nn.Module) -> bool:
    """True for a BatchNorm whose running statistics change in training."""
    return isinstance(module, _BatchNorm) and module.track_running_stats and not stays(module)


@contextmanager
def observed(modules: Iterable[nn.Module], *, anew: bool) -> Iterator[None]:
    """A context in which BatchNorms of `modules` use the batch's statistics and average them. anew: the average starts here."""
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
