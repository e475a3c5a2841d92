"""Rows for each kind of model: few, since an update or two shows the peak."""

import torch

CLASSES, WORDS, TOKENS = 10, 2000, 64
Rows = tuple[torch.Tensor, torch.Tensor]


def _split(x: torch.Tensor, y: torch.Tensor, test: int = 32) -> tuple[Rows, Rows]:
    return (x, y), (x[:test], y[:test])


def _images(side: int, count: int) -> tuple[Rows, Rows]:
    return _split(torch.randn(count, 3, side, side), torch.arange(count) % CLASSES)


def images64() -> tuple[Rows, Rows]:
    return _images(64, 64)


def series() -> tuple[Rows, Rows]:
    return _split(torch.randn(64, TOKENS // 2, 64), torch.arange(64) % CLASSES)


def waves() -> tuple[Rows, Rows]:
    return _split(torch.randn(64, 16, 512), torch.arange(64) % CLASSES)


def cubes() -> tuple[Rows, Rows]:
    return _split(torch.randn(32, 1, 24, 24, 24), torch.arange(32) % CLASSES, 16)


def vectors() -> tuple[Rows, Rows]:
    return _split(torch.randn(128, 64), torch.arange(128) % CLASSES)


def sentences() -> tuple[Rows, Rows]:
    return _split(torch.randint(0, WORDS, (64, TOKENS)), torch.arange(64) % CLASSES)


def texts() -> tuple[Rows, Rows]:
    text = torch.randint(0, WORDS, (32, TOKENS + 1))
    return _split(text[:, :-1].contiguous(), text[:, 1:].contiguous())
