"""A small ResNet on CIFAR images in an npz file, block by block under a limit.

    python examples/cifar_resnet.py train.npz                           # exact, the fastest way that fits
    python examples/cifar_resnet.py train.npz --method sil --partitions 3 --recovery-epochs 2   # one after the other

The file has images (n, 3, 32, 32) as bytes and labels; test.npz beside it is the test set, or every fifth image is. A residual
block is one block of the chain: what passes from block to block is one tensor.
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from seqpart import Trainer
from seqpart.data.classes import count_classes
from seqpart.data.splits import as_split
from seqpart.zoo import datasets

MEAN, DEVIATION = 0.47, 0.25
"""Of CIFAR's pixels, all channels together."""


class Stem(nn.Module):
    """Pixels from 0 to 1, (rows, C, H, W), to (rows, width, H, W)."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.convolution((x - MEAN) / DEVIATION)))


class BasicBlock(nn.Module):
    """relu(shortcut(x) + convolutions(x)), (rows, inputs, H, W) to (rows, outputs, H / stride, W / stride)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.shortcut(x) + self.convolutions(x))


def head(width: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def resnet(channels: int, classes: int, width: int, depth: int) -> list[Callable[[], nn.Module]]:
    """A stem, three stages of `depth` blocks, each half as large and twice as wide as the one before, and a head."""
    blocks: list[Callable[[], nn.Module]] = [functools.partial(Stem, channels, width)]
    inputs = width
    for stage in range(3):
        for number in range(depth):
            outputs = width << stage
            blocks.append(functools.partial(BasicBlock, inputs, outputs, 2 if stage and not number else 1))
            inputs = outputs
    return [*blocks, functools.partial(head, inputs, classes)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--method", default="auto", help="auto, streamed, checkpointed, full or sil")
    parser.add_argument("--mem-limit", default="500MB")
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--depth", type=int, default=2, help="blocks of a stage")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--recovery-epochs", type=int, default=0, help="after sil")
    parser.add_argument("--partitions", type=int, help="default: as few as fit")
    arguments = parser.parse_args()

    train, test = (as_split(part, "rows") for part in datasets.load(f"npz:{arguments.data}"))
    blocks = resnet(train.shape[0], count_classes(train, test), arguments.width, arguments.depth)
    recovery = arguments.recovery_epochs
    result = Trainer(
        blocks, mem_limit=arguments.mem_limit, method=arguments.method, partitions=arguments.partitions or "auto",
        epochs=arguments.epochs, recovery_epochs=recovery, recover="all" if recovery else None, optimizer="adamw", lr=2e-3,
        weight_decay=0.05, lr_schedule="cosine", batch_size=100, output_dir="runs/cifar-resnet", overwrite=True,
    ).fit(train, test)  # fmt: skip
    print(f"accuracy {result.accuracy:.3f}, weights in {result.weights}")


if __name__ == "__main__":
    main()
