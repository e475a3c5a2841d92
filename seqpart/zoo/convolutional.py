"""The two networks of the PSL paper (Raynaud, Orban and Bigeon 2023, section 7), as lists of block factories.

    LeNet   conv 6, conv 16, then 120, 84 (of colour images 200, 100) and one score for each class
    PSNet   conv 40 (of colour images 60), conv 3 for each class, then 24 (35), 15 and 1 for each class, in separable layers

Kernels are 5 x 5, each convolution is followed by ReLU and average pooling of 2 x 2, each other layer but the last by ReLU.
"""

import functools
from collections.abc import Callable

from torch import nn

from seqpart.errors import OptionError
from seqpart.model import SeparableLinear

Factory = Callable[[], nn.Module]
_KERNEL = 5
LEAST_SIDE = 16
"""Pixels of an image of which two convolutions and poolings leave something."""


def _convolution(channels: int, kernels: int, *, flat: bool = False) -> nn.Module:
    behind = (nn.ReLU(), nn.AvgPool2d(2), *((nn.Flatten(),) if flat else ()))
    return nn.Sequential(nn.Conv2d(channels, kernels, _KERNEL), *behind)


def _dense(inputs: int, outputs: int, groups: int) -> nn.Module:
    """groups 1: a linear layer; else a separable one."""
    linear = nn.Linear(inputs, outputs) if groups == 1 else SeparableLinear(inputs, outputs, groups)
    return nn.Sequential(linear, nn.ReLU())


def _output(inputs: int, outputs: int, groups: int) -> nn.Module:
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
