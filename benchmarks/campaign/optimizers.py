"""Optimizers that the command has no name for: each from a learning rate to a function from parameters to an optimizer."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import SGD, Adadelta, Adagrad, Adamax, AdamW, Optimizer, RAdam, RMSprop

Build = Callable[[Iterable[torch.Tensor]], Optimizer]


class Halves(Optimizer):
    """Momentum in bfloat16 for matrices, and in their own type for all others."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        kind = torch.bfloat16 if parameter.dim() > 1 else parameter.dtype
                        state["momentum"] = torch.zeros_like(parameter, dtype=kind)
                    state["momentum"].mul_(0.9).add_(parameter.grad.to(state["momentum"].dtype))
                    parameter.sub_(state["momentum"].to(parameter.dtype), alpha=group["lr"])


class Signs(Optimizer):
    """No learning rate and no state."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {"width": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["width"])


OPTIMIZERS: dict[str, Callable[[float], Build]] = {
    "adadelta": lambda lr: lambda found: Adadelta(found, lr=lr),
    "adagrad": lambda lr: lambda found: Adagrad(found, lr=lr),
    "adamax": lambda lr: lambda found: Adamax(found, lr=lr),
    "amsgrad": lambda lr: lambda found: AdamW(found, lr=lr, amsgrad=True),
    "halves": lambda lr: lambda found: Halves(found, lr),
    "nesterov": lambda lr: lambda found: SGD(found, lr=lr, momentum=0.9, nesterov=True),
    "radam": lambda lr: lambda found: RAdam(found, lr=lr),
    "rmsprop": lambda lr: lambda found: RMSprop(found, lr=lr, momentum=0.5, centered=True),
    "signs": lambda lr: lambda found: Signs(found),
}
RATELESS = "signs"
