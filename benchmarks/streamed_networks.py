"""The residual MLPs of the streaming benchmarks, on real digits: S has 1.6 GB of training state, L 6.4 GB."""

import functools
from collections.abc import Callable

import torch
from torch import nn

WIDTHS = {"S": 2048, "L": 4096}
DEPTH, CLASSES, BATCH = 24, 10, 256


class Residual(nn.Module):
    """x + relu(Linear(LayerNorm(x))). Not the zoo's: importing seqpart would give the plain loop our allocator's settings."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


def _first(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.LayerNorm(width), nn.ReLU())


def _in_16_bits(block: Callable[[], nn.Module]) -> nn.Module:
    return block().bfloat16()


def network(width: int, depth: int = DEPTH, *, halved: bool = False) -> list[Callable[[], nn.Module]]:
    """Linear(64, W) + LayerNorm + ReLU, `depth` residual blocks, Linear(W, 10). halved: of bfloat16."""
    residual: Callable[[], nn.Module] = functools.partial(Residual, width)
    first, last = functools.partial(_first, width), functools.partial(nn.Linear, width, CLASSES)
    if halved:
        first, residual, last = (functools.partial(_in_16_bits, block) for block in (first, residual, last))
    return [first, *[residual] * depth, last]
