"""Linear layers of a part, in place of the whole network's."""

import torch
import torch.nn.functional as F
from torch import nn


class PartialSum(nn.Module):
    """A linear layer over the units of one of `parts` parts: x (..., its units) -> (..., out).

    Its sum stands for that of all parts, so that the whole network's is their mean: ResIST's 1 / S of a residual, applied in
    the part instead, so that the whole network is the user's own, unchanged.
    """

    def __init__(self, linear: nn.Linear, parts: int) -> None:
        super().__init__()
        self.weight, self.bias, self.parts = linear.weight, linear.bias, parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x * self.parts, self.weight, self.bias)


class Placed(nn.Module):
    """A linear layer that has some of `width` neurons, and gives zeros for the others: x (..., in) -> (..., width)."""

    neurons: torch.Tensor

    def __init__(self, linear: nn.Linear, width: int, units: int) -> None:
        super().__init__()
        self.weight, self.bias, self.width = linear.weight, linear.bias, width
        self.register_buffer("neurons", torch.zeros(units, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y.new_zeros((*y.shape[:-1], self.width)).index_copy(-1, self.neurons, y)
