"""Small networks of four kinds, as factories and given alive, and rows for all of them: named on the command line."""

import torch
from torch import nn


class Shaped(nn.Module):
    """Rows of 768 numbers in another shape."""

    def __init__(self, *shape):
        super().__init__()
        self.shape = shape

    def forward(self, x):
        return x.reshape(len(x), *self.shape)


class Recurrent(nn.Module):
    def __init__(self, inputs, width, **more):
        super().__init__()
        self.lstm = nn.LSTM(inputs, width, batch_first=True, **more)

    def forward(self, x):
        return self.lstm(x)[0]


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


def mlp():
    layer = lambda: nn.Sequential(nn.Linear(768, 768), nn.ReLU())  # noqa: E731 (one factory, several blocks)
    return [layer, *[layer] * 6, lambda: nn.Linear(768, 10)]


def conv():
    def first():
        return nn.Sequential(Shaped(3, 16, 16), nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())

    def layer():
        return nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True))

    return [first, *[layer] * 4, lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))]


def lstm():
    first = lambda: nn.Sequential(Shaped(24, 32), Recurrent(32, 256))  # noqa: E731
    return [first, lambda: Recurrent(256, 256), lambda: nn.Sequential(Mean(), nn.Linear(256, 10))]


def transformer():
    first = lambda: nn.Sequential(Shaped(24, 32), nn.Linear(32, 256))  # noqa: E731
    layer = lambda: nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)  # noqa: E731
    return [first, *[layer] * 4, lambda: nn.Sequential(Mean(), nn.Linear(256, 10))]


def alive(factories):
    torch.manual_seed(0)
    return nn.Sequential(*(factory() for factory in factories))


def mlp_alive():
    return alive(mlp())


def conv_alive():
    return alive(conv())


def lstm_alive():
    return alive(lstm())


def deep_lstm():
    first = lambda: nn.Sequential(Shaped(24, 32), Recurrent(32, 128, num_layers=2, bidirectional=True))  # noqa: E731
    return [first, lambda: Recurrent(256, 192), lambda: nn.Sequential(Mean(), nn.Linear(192, 10))]


def transformer_alive():
    return alive(transformer())


def rows():
    x = torch.randn(256, 768, generator=torch.Generator().manual_seed(0))
    return (x, torch.arange(256) % 10), (x[:64], torch.arange(64) % 10)
