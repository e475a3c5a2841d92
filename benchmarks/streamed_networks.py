"""The residual MLPs of the streaming benchmarks, on real digits: S has 1.6 GB of training state, L 6.4 GB."""

import functools
from collections.abc import Callable, Sequence

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


def network(width: int, depth: int = DEPTH) -> list[Callable[[], nn.Module]]:
    """Linear(64, W) + LayerNorm + ReLU, `depth` residual blocks, Linear(W, 10)."""
    first, last = functools.partial(_first, width), functools.partial(nn.Linear, width, CLASSES)
    return [first, *[functools.partial(Residual, width)] * depth, last]


def in_16_bits(blocks: Sequence[Callable[[], nn.Module]]) -> list[Callable[[], nn.Module]]:
    """The blocks with weights in bfloat16; equal ones stay equal."""
    halved = {block: functools.partial(_in_16_bits, block) for block in blocks}
    return [halved[block] for block in blocks]
