"""The four networks of the study, with rows for training, validation and test."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from seqpart.ingest import as_split
from seqpart.zoo import datasets, models, text

Rows = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Task:
    name: str
    blocks: list[Callable[[], nn.Module]]
    starts: dict[int, list[int]]
    """By number of partitions: the first block of each."""
    train: Rows
    validation: Rows
    test: Rows
    classes: int
    batch: int
    tokens: bool = False


def _emnist(folder: Path, count: int, held: int) -> tuple[Rows, Rows, Rows]:
    train, test = (as_split(part, "rows") for part in datasets.load(f"idx:{folder / 'EMNIST47' / 'raw'}"))
    x, y = _whole(train)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(x)))
    kept, held_out = order[:count], order[len(x) - held :]
    return (x[kept], y[kept]), (x[held_out], y[held_out]), _whole(test)


def _whole(split) -> Rows:
    return torch.cat([rows.to(split.dtype) for rows in split.open()]), split.labels


def paper(folder: Path) -> Task:
    """784-80-60-60-60-47, the paper's."""
    sizes = [784, 80, 60, 60, 60]
    blocks = [functools.partial(_layer, a, b) for a, b in itertools.pairwise(sizes)]
    train, validation, test = _emnist(folder, 1 << 30, 9400)
    train = (train[0][:-9400], train[1][:-9400])
    return Task(
        "paper",
        [*blocks, functools.partial(nn.Linear, 60, 47)],
        {2: [0, 2], 4: [0, 1, 2, 3]},
        train,
        validation,
        test,
        47,
        1410,
    )


def _layer(a: int, b: int) -> nn.Module:
    return nn.Sequential(*([nn.Flatten()] if a == 784 else []), nn.Linear(a, b), nn.ReLU())


def residual(folder: Path) -> Task:
    """12 residual blocks of width 256 on 30,000 rows."""
    train, validation, test = _emnist(folder, 30000, 9400)
    starts = {2: [0, 7], 4: [0, 4, 7, 10], 8: [0, 2, 4, 6, 7, 8, 10, 12]}
    return Task("residual", models.mlp(784, 47, width=256, depth=12), starts, train, validation, test, 47, 128)


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.two, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.short = None
        if stride != 1 or inputs != outputs:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        short = x if self.short is None else self.short(x)
        return torch.relu(self.norm2(self.two(torch.relu(self.norm(self.one(x))))) + short)


def resnet(folder: Path, width: int = 24) -> Task:
    """A stem and six basic blocks, 10,000 rows of CIFAR-10."""
    rows = {}
    for part in ("train", "test"):
        with np.load(folder / "cifar10-subset" / f"{part}.npz") as file:
            x, y = (torch.from_numpy(file[key]) for key in file.files[:2])
        x = x.permute(0, 3, 1, 2) if x.shape[-1] == 3 else x
        x = (x.float() / 255 - 0.47) / 0.25
        rows[part] = (x.reshape(-1, 3, 32, 32).contiguous(), y.long())
    x, y = rows["train"]
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(x)))
    stem = functools.partial(_stem, width)
    sizes = [(width, width, 1)] * 2 + [
        (width, 2 * width, 2),
        (2 * width, 2 * width, 1),
        (2 * width, 4 * width, 2),
        (4 * width,) * 2 + (1,),
    ]
    blocks = [stem, *[functools.partial(BasicBlock, *size) for size in sizes], functools.partial(_pooled, 4 * width)]
    kept, held = order[:10000], order[-2000:]
    starts = {2: [0, 4], 4: [0, 2, 4, 6], 8: list(range(8))}
    return Task("resnet", blocks, starts, (x[kept], y[kept]), (x[held], y[held]), rows["test"], 10, 100)


def _stem(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())


def _pooled(width: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def gpt(folder: Path) -> Task:
    """Four layers of width 128 on characters, context 128."""
    train, test = text.load(folder / "tinyshakespeare" / "input.txt", 128)
    x, y = _whole(train)
    held = len(x) // 10
    blocks = models.gpt(65, 128, width=128, depth=4, heads=4)
    starts = {2: [0, 3], 4: [0, 2, 3, 4]}
    kept, held_out, tested = (x[:-held], y[:-held].long()), (x[-held:], y[-held:].long()), _whole(test)
    return Task("gpt", blocks, starts, kept, held_out, (tested[0], tested[1].long()), 65, 32, tokens=True)


TASKS = {"paper": paper, "residual": residual, "resnet": resnet, "gpt": gpt}


def true_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if labels.is_floating_point():
        return F.cross_entropy(output, labels)
    return F.cross_entropy(output.flatten(0, -2), labels.flatten())
