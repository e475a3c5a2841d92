"""Hooks of parameters on their gradients, called once an update, for the sum over its micro-batches."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def hooks_put_off(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """A context in which the hooks of these parameters are not called."""
    every = [(p._backward_hooks, p._post_accumulate_grad_hooks) for p in set(parameters)]
    hooks = [(own, dict(own)) for pair in every for own in pair if own]
    for own, _ in hooks:  # handles and autograd refer to this dict
        own.clear()
    try:
        yield
    finally:
        for own, held in hooks:
            own.update(held)


@torch.no_grad()
def call_hooks(parameters: Iterable[nn.Parameter]) -> None:
    """Calls the hooks of these parameters on their gradients, as torch does in one backward pass of the whole batch."""
    for parameter in parameters:
        for hook in [*(parameter._backward_hooks or {}).values()]:
            if parameter.grad is not None and (found := hook(parameter.grad)) is not None:
                parameter.grad = found
        for hook in [*(parameter._post_accumulate_grad_hooks or {}).values()]:
            if parameter.grad is not None:
                hook(parameter)
