"""Models for examples, tests and the default job, as lists of block factories."""

import functools
from collections.abc import Callable

import torch
from torch import nn

WIDTH = 2048
STATE_PER_PARAMETER = 16
"""Bytes of plain training with Adam in float32: weight, gradient and two moments."""


class ResidualBlock(nn.Module):
    """x + relu(Linear(LayerNorm(x))), (rows, width) in and out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


def input_block(inputs: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.LayerNorm(width), nn.ReLU())


def output_block(width: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))


def mlp(inputs: int, classes: int, *, width: int = WIDTH, depth: int) -> list[Callable[[], nn.Module]]:
    """A deep residual MLP: an input block, `depth` residual blocks, an output block."""
    return [
        functools.partial(input_block, inputs, width),
        *[functools.partial(ResidualBlock, width)] * depth,
        functools.partial(output_block, width, classes),
    ]


def depth_for(limit: int, inputs: int, classes: int, width: int = WIDTH) -> int:
    """The least depth at which the full training state is twice `limit` bytes."""
    ends = inputs * width + 3 * width + 2 * width + width * classes + classes
    block = width * width + 3 * width
    needed = -(-2 * limit // STATE_PER_PARAMETER)
    return max(1, -(-(needed - ends) // block))
