"""Running statistics of BatchNorm made anew: the mean over the batches of a pass, in which nothing else is in training."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

Around = Callable[[Iterable[nn.Module]], AbstractContextManager[None]]
"""A context for the forward pass of a block that consists of these modules."""


def as_it_is(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    return nullcontext()


def observes(module: nn.Module) -> bool:
    """Whether it is a BatchNorm with running statistics."""
    return isinstance(module, _BatchNorm) and module.track_running_stats


@contextmanager
def observed(modules: Iterable[nn.Module], *, anew: bool) -> Iterator[None]:
    """Inside, BatchNorms among `modules` take the batch's own mean and deviation, and average them. anew: from here on."""
    norms = [module for module in modules if isinstance(module, _BatchNorm) and module.track_running_stats]
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
