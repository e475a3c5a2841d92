"""Models for examples, tests and the default job, as lists of block factories."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from seqpart.errors import OptionError
from seqpart.methods.ist.hidden import Hidden, Side
from seqpart.model import SeparableLinear

WIDTH = 2048
GPT_WIDTH, GPT_DEPTH, GPT_HEADS = 256, 4, 4
STATE_PER_PARAMETER = 16
"""Bytes per parameter of plain training with Adam in float32: weight, gradient and two moments."""


class ResidualBlock(nn.Module):
    """x + relu(Linear(LayerNorm(x))), (rows, width) in and out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def hidden_layers(self) -> list[Hidden]:
        """Returns its neurons, each of which adds to its own element of x: relu maps the zeros of others to zeros."""
        return [Hidden(units=self.linear.out_features, rows=(Side("linear"),), placed=True)]

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
    """Returns the smallest depth at which the full training state is twice `limit` bytes."""
    ends = inputs * width + 3 * width + 2 * width + width * classes + classes
    block = width * width + 3 * width
    needed = -(-2 * limit // STATE_PER_PARAMETER)
    return max(1, -(-(needed - ends) // block))


# A transformer's shapes: R rows, T tokens of a row, W width, H heads, D = W / H.


class TokenEmbedding(nn.Module):
    """Token and position embedding, (R, T) to (R, T, W)."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)  # as GPT-2 does: tied weights are an output's, too

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.dropout(self.token(tokens) + self.position.weight[: tokens.shape[1]])
        return x


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); (R, T, W) in and out. A token sees itself and those before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.mixed = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )  # fmt: skip
        self.dropout = nn.Dropout(dropout)

    def hidden_layers(self) -> list[Hidden]:
        """Returns its heads, and the neurons between the two linear layers of its MLP."""
        size = self.mixed.in_features // self.heads
        heads = Hidden(
            units=self.heads, rows=(Side("qkv", 3, size),), columns=(Side("mixed", 1, size),), counts=("heads",), alone=True
        )
        return [heads, Hidden(units=4 * self.mixed.out_features, rows=(Side("mlp.1"),), columns=(Side("mlp.3"),))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (self._attention, self.mlp):
            x = x + self.dropout(part(x))
        return x

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(2, (3, self.heads, -1))  # (R, T, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # (R, H, T, D) each
        dropout = self.dropout.p if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        mixed: torch.Tensor = self.mixed(seen.transpose(1, 2).flatten(2))
        return mixed


def gpt(
    vocabulary: int, context: int, *, width: int = GPT_WIDTH, depth: int = GPT_DEPTH, heads: int = GPT_HEADS,
    dropout: float = 0.0, tied: bool = False,
) -> list[Callable[[], nn.Module]]:  # fmt: skip
    """A language model: an embedding, `depth` transformer blocks, an output block; (R, T) to (R, T, vocabulary).

    tied: embedding and output share one weight, so these two blocks are built here, and not by factories.
    """
    embedding = functools.partial(TokenEmbedding, vocabulary, context, width, dropout)
    output = functools.partial(output_block, width, vocabulary)
    between = [functools.partial(TransformerBlock, width, heads, dropout)] * depth
    if not tied:
        return [embedding, *between, output]
    first, last = embedding(), output()
    last.get_submodule("1").weight = first.token.weight
    return [first, *between, last]


Factory = Callable[[], nn.Module]
_KERNEL = 5
LEAST_SIDE = 16
"""Smallest image in pixels per side that survives two convolutions and poolings."""


def _convolution(channels: int, kernels: int, *, flat: bool = False) -> nn.Module:
    behind = (nn.ReLU(), nn.AvgPool2d(2), *((nn.Flatten(),) if flat else ()))
    return nn.Sequential(nn.Conv2d(channels, kernels, _KERNEL), *behind)


def _dense(inputs: int, outputs: int, groups: int) -> nn.Module:
    return nn.Sequential(_output(inputs, outputs, groups), nn.ReLU())


def _output(inputs: int, outputs: int, groups: int) -> nn.Module:
    """Returns a linear layer for groups 1, else a separable one."""
    return nn.Linear(inputs, outputs) if groups == 1 else SeparableLinear(inputs, outputs, groups)


def _network(shape: tuple[int, ...], kernels: tuple[int, int], widths: tuple[int, int, int], groups: int) -> list[Factory]:
    channels, first, second = shape[0], *kernels
    left = [((side - _KERNEL + 1) // 2 - _KERNEL + 1) // 2 for side in shape[1:]]
    inputs = second * left[0] * left[1]
    return [
        functools.partial(_convolution, channels, first),
        functools.partial(_convolution, first, second, flat=True),
        functools.partial(_dense, inputs, widths[0], groups),
        functools.partial(_dense, widths[0], widths[1], groups),
        functools.partial(_output, widths[1], widths[2], groups),
    ]


def _refuse_shape(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) != 3 or min(shape[1:]) < LEAST_SIDE:
        raise OptionError(
            f"--model {name} takes images (channels, height, width) of at least {LEAST_SIDE} pixels a side; found rows of "
            f"shape {shape}. Take another --model."
        )


def lenet(shape: tuple[int, ...], classes: int) -> list[Factory]:
    """(rows, *shape) to (rows, classes); shape (channels, height, width). 44,426 weights for MNIST, 104,182 for CIFAR-10."""
    _refuse_shape("lenet", shape)
    return _network(shape, (6, 16), (120, 84, classes) if shape[0] == 1 else (200, 100, classes), 1)


def psnet(shape: tuple[int, ...], classes: int) -> list[Factory]:
    """(rows, *shape) to (rows, classes); shape (channels, height, width). Of 81,750 weights for CIFAR-10 all scores share
    4,560, one depends on 12,279, and two on 19,998; 46,740 weights for MNIST."""
    _refuse_shape("psnet", shape)
    first, width = (40, 24) if shape[0] == 1 else (60, 35)
    return _network(shape, (first, 3 * classes), (width * classes, 15 * classes, classes), classes)
