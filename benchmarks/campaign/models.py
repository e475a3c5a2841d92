"""Small models and data sets of many kinds, by name: `--model benchmarks.campaign.models:conv_16_3`, `--data ...:images_200`.

A model's name is its kind, width and depth; a data set's its kind and number of training rows.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

CLASSES = 5
FEATURES = 24


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.gelu(self.inner(self.norm(x)))


class LastOutput(nn.Module):
    """A recurrent layer whose output is a tensor."""

    def __init__(self, inner: nn.RNNBase) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(x)[0]
        return output


class MeanOverPositions(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def normed(width: int, depth: int) -> list[Any]:
    """BatchNorm and dropout: running statistics and random numbers that a run must go on with."""

    def middle() -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.2))

    return [lambda: nn.Linear(FEATURES, width), *[middle] * depth, lambda: nn.Linear(width, CLASSES)]


class Typed(nn.Module):
    """A residual layer whose parameters have a type of their own."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self._dtype = nn.Linear(width, width).to(dtype), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x.to(self._dtype)).tanh().to(x.dtype)


class Odd(nn.Module):
    """A scalar and other parameters of odd sizes lie before those of its layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.shift = nn.Parameter(torch.zeros(1, 3))
        self.inner = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x * self.scale)
        y = torch.cat([y[:, :3] + self.shift, y[:, 3:]], 1)
        return x + nn.functional.gelu(y * self.gain)


def odd(width: int, depth: int) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(FEATURES, width), *(Odd(width) for _ in range(depth)), nn.Linear(width, CLASSES))


def mixed(width: int, depth: int) -> nn.Module:
    """Parameters of three types."""
    torch.manual_seed(4)
    kinds = torch.float64, torch.float32, torch.bfloat16
    middle = (Typed(width, kinds[number % 3]) for number in range(depth))
    return nn.Sequential(nn.Linear(FEATURES, width), *middle, nn.Linear(width, CLASSES))


def partly(width: int, depth: int, part: int) -> nn.Module:
    """Most of it does not learn: all but the head (0), the first layer (1) or a layer in the middle (2)."""
    model = alive(width, depth).requires_grad_(False)
    assert isinstance(model, nn.Sequential)
    model[(-1, 0, len(model) // 2)[part]].requires_grad_(True)
    return model


def alive(width: int, depth: int) -> nn.Module:
    """Given as a module that lives already."""
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(FEATURES, width), *(Residual(width) for _ in range(depth)), nn.Linear(width, CLASSES))


def frozen(width: int, depth: int) -> list[Any]:
    """The first half does not learn."""

    def middle(learns: bool) -> nn.Module:
        return Residual(width).requires_grad_(learns)

    blocks = [lambda learns=number >= depth // 2: middle(learns) for number in range(depth)]
    return [lambda: nn.Linear(FEATURES, width), *blocks, lambda: nn.Linear(width, CLASSES)]


def regression(width: int, depth: int) -> list[Any]:
    return [
        lambda: nn.Linear(FEATURES, width), *[lambda: Residual(width)] * depth,
        lambda: nn.Sequential(nn.Linear(width, 1), nn.Flatten(0)),
    ]  # fmt: skip


def conv(width: int, depth: int) -> list[Any]:
    def middle() -> nn.Module:
        return nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())

    head = lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))  # noqa: E731
    return [lambda: nn.Conv2d(1, width, 3, padding=1), *[middle] * depth, head]


def lstm(width: int, depth: int) -> list[Any]:
    middle = lambda: LastOutput(nn.LSTM(width, width, batch_first=True))  # noqa: E731
    head = lambda: nn.Sequential(MeanOverPositions(), nn.Linear(width, CLASSES))  # noqa: E731
    return [lambda: nn.Linear(8, width), *[middle] * depth, head]


def encoder(width: int, depth: int) -> list[Any]:
    middle = lambda: nn.TransformerEncoderLayer(width, 4, 2 * width, 0.1, batch_first=True)  # noqa: E731
    head = lambda: nn.Sequential(MeanOverPositions(), nn.Linear(width, CLASSES))  # noqa: E731
    return [lambda: nn.Linear(8, width), *[middle] * depth, head]


def features(rows: int) -> Any:
    return _labelled(rows, FEATURES)


def images(rows: int) -> Any:
    return _labelled(rows, 1, 8, 8)


def series(rows: int) -> Any:
    return _labelled(rows, 8, 8)


def amounts(rows: int) -> Any:
    train, test = _labelled(rows, FEATURES)
    return tuple((x, x[:, :3].sum(1)) for x, _ in (train, test))


def _labelled(rows: int, *shape: int) -> Any:
    """Classes that can be learnt: each has a mean of its own."""
    generator = torch.Generator().manual_seed(rows)
    count = rows + max(8, rows // 5)
    y = torch.arange(count) % CLASSES
    x = torch.randn(count, *shape, generator=generator) + torch.randn(CLASSES, *shape, generator=generator)[y]
    return (x[:rows], y[:rows]), (x[rows:], y[rows:])


_MODELS = {made.__name__: made for made in (normed, alive, frozen, odd, mixed, partly, regression, conv, lstm, encoder)}
_DATA = {made.__name__: made for made in (features, images, series, amounts)}


def __getattr__(name: str) -> Callable[[], Any]:
    kind, *numbers = name.split("_")
    made: dict[str, Callable[..., Any]] = {**_MODELS, **_DATA}
    if kind not in made or not all(number.isdecimal() for number in numbers) or not numbers:
        raise AttributeError(name)
    return lambda: made[kind](*map(int, numbers))
