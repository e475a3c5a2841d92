"""The four networks of the study, with rows for training, validation and test."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import pnn_arm
from examples import cifar_resnet
from seqpart.data.splits import as_split
from seqpart.model.losses import token_cross_entropy
from seqpart.zoo import datasets, models, text

Rows = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Task:
    name: str
    blocks: Sequence[Callable[[], nn.Module]]
    starts: dict[int, list[int]]
    """By number of partitions: the first block of each."""
    train: Rows
    validation: Rows
    test: Rows
    classes: int
    batch: int
    tokens: bool = False


def _emnist(folder: Path, count: int | None = None, held: int = 9400) -> tuple[Rows, Rows, Rows]:
    """(`count` of the training rows, `held` others for validation, all test rows)."""
    (x, y), test = (whole(part) for part in datasets.load(f"idx:{folder / 'EMNIST47' / 'raw'}"))
    train, validation = divided(x, y, count, held)
    return train, validation, test


def divided(x: torch.Tensor, y: torch.Tensor, count: int | None, held: int) -> tuple[Rows, Rows]:
    """(`count` of the rows, `held` others), always the same ones."""
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(x)))
    kept, held_out = order[:-held][:count], order[-held:]
    return (x[kept], y[kept]), (x[held_out], y[held_out])


def whole(data: Any) -> Rows:
    """All rows, in memory."""
    split = as_split(data, "rows")
    return torch.cat([rows.to(split.dtype) for rows in split.open()]), split.labels.long()


def paper(folder: Path) -> Task:
    """784-80-60-60-60-47, the paper's."""
    starts = {count: list(pnn_arm.STARTS[count]) for count in (2, 4)}
    return Task("paper", pnn_arm.LAYERS, starts, *_emnist(folder), pnn_arm.CLASSES, pnn_arm.BATCH)


def residual(folder: Path) -> Task:
    """12 residual blocks of width 256 on 30,000 rows."""
    starts = {2: [0, 7], 4: [0, 4, 7, 10], 8: [0, 2, 4, 6, 7, 8, 10, 12]}
    return Task("residual", models.mlp(784, 47, width=256, depth=12), starts, *_emnist(folder, 30000), 47, 128)


def resnet(folder: Path) -> Task:
    """A stem and six basic blocks of 16, 32 and 64 channels, 10,000 rows of CIFAR-10."""
    (x, y), test = (whole(part) for part in datasets.load(f"npz:{folder / 'cifar10-subset' / 'train.npz'}"))
    starts = {2: [0, 4], 4: [0, 2, 4, 6], 8: list(range(8))}
    return Task("resnet", cifar_resnet.resnet(3, 10, 16, 2), starts, *divided(x, y, 10000, 2000), test, 10, 100)


def gpt(folder: Path) -> Task:
    """Four layers of width 64 on 330,000 characters in rows of 64: few enough that full training converges."""
    (x, y), test = (whole(part) for part in text.load(folder / "tinyshakespeare" / "input.txt", 64))
    held = len(x) // 10
    blocks = models.gpt(65, 64, width=64, depth=4, heads=4)
    return Task(
        "gpt", blocks, {2: [0, 3], 4: [0, 2, 3, 4]}, (x[:5200], y[:5200]), (x[-held:], y[-held:]), test, 65, 16, tokens=True
    )


TASKS = {"paper": paper, "residual": residual, "resnet": resnet, "gpt": gpt}


def true_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if labels.is_floating_point():
        return F.cross_entropy(output, labels)
    return token_cross_entropy(output, labels)
