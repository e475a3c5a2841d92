"""Handwriting in two partitions, each with epochs, learning rate and optimizer of its own; then recovery; beside full training.

    python examples/emnist_partitions.py DIR                    # idx files of EMNIST (or MNIST); some minutes on a CPU
    python examples/emnist_partitions.py DIR --objective mse    # the PNN paper's own objective and epochs

The left partition never sees the true loss: it learns fixed random targets, one for each class. The right one learns from what
the left one gives. Recovery then trains the left one on by exact back-propagation through the right one, which is frozen.
"""

import argparse
import functools
import itertools
import math
from pathlib import Path

from torch import nn

from seqpart import Result, Trainer
from seqpart.data.classes import count_classes
from seqpart.data.splits import as_split
from seqpart.zoo import datasets

WIDTHS = (80, 60, 60, 60)
"""Of the paper's network: 784-80-60 is the left partition, 60-60-60-47 the right one."""


def layer(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU())


def network(inputs: int, classes: int) -> list[object]:
    """One factory per block."""
    sizes = itertools.pairwise((inputs, *WIDTHS))
    return [nn.Flatten, *(functools.partial(layer, *pair) for pair in sizes), functools.partial(nn.Linear, WIDTHS[-1], classes)]


def told(name: str, result: Result) -> None:
    print(f"{name:28s} accuracy {result.accuracy:.4f}  peak {result.proof.peak / 1e6:.0f} MB  {result.seconds:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="directory with the four idx files")
    parser.add_argument("--objective", choices=["orthogonal", "prototype", "mse"], default="orthogonal")
    parser.add_argument("--left-epochs", type=int)
    parser.add_argument("--right-epochs", type=int)
    parser.add_argument("--recovery-epochs", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=40, help="of full training")
    parser.add_argument("--mem-limit", default="500MB")
    arguments = parser.parse_args()

    train, test = (as_split(part, "rows") for part in datasets.load(f"idx:{arguments.data}"))
    blocks = network(math.prod(train.shape), count_classes(train, test))
    left, right = (5, 160) if arguments.objective == "mse" else (20, 80)
    common = {"mem_limit": arguments.mem_limit, "optimizer": "sgd", "momentum": 0.9, "lr": 0.01, "batch_size": 1410,
              "overwrite": True, "quiet": True, "shuffle": False}  # fmt: skip
    partitioned = {
        "method": "sil", "objective": arguments.objective, "partitions": [0, 3],
        "epochs": [arguments.left_epochs or left, arguments.right_epochs or right],
    }  # fmt: skip
    told("partitions", Trainer(blocks, **common, **partitioned, output_dir="runs/emnist-partitions").fit(train, test))
    recovered = Trainer(
        blocks, **common, **partitioned, recovery_epochs=arguments.recovery_epochs, output_dir="runs/emnist-recovered"
    )
    told("partitions and recovery", recovered.fit(train, test))
    full = Trainer(blocks, **common, method="full", epochs=arguments.epochs, output_dir="runs/emnist-full")
    told("full training", full.fit(train, test))


if __name__ == "__main__":
    main()
