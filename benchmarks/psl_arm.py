"""Runs of benchmarks/psl_paper.py in one process, one for each seed, through the public Trainer: prints one JSON line."""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from seqpart import Trainer
from seqpart.data.splits import Split, as_split, first_rows
from seqpart.report.reporter import Reporter
from seqpart.schedule.phase import PhaseKind
from seqpart.schedule.steps import PhaseDone
from seqpart.zoo import datasets
from seqpart.zoo.models import lenet, psnet

NETWORKS = {"lenet": lenet, "psnet": psnet}
LOSSES = {"nll": "cross-entropy", "psl": "psl"}
CIFAR = "cifar10-subset"
CLASSES = 10


def rows(data: str, folder: Path, train: int, test: int) -> tuple[Split, Split]:
    """The first rows of torchvision's MNIST in `folder`, or of folder/cifar10-subset/{train,test}.npz."""
    name, place = ("mnist", folder) if data == "mnist" else (f"npz:{folder / CIFAR / 'train.npz'}", None)
    training, tested = datasets.load(name, data_dir=place)
    return first_rows(as_split(training, "training"), train), first_rows(as_split(tested, "test"), test)


class Curve(Reporter):
    """Accuracy over the test rows behind every epoch."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.accuracies: list[float] = []

    def listen(self, event: Any) -> None:
        if isinstance(event, PhaseDone) and event.phase.kind is PhaseKind.TEST:
            assert event.accuracy is not None
            self.accuracies.append(event.accuracy)


def trained(arguments: argparse.Namespace, train: Split, test: Split, seed: int) -> dict[str, Any]:
    """One run: test accuracies and training losses by epoch."""
    curve, began = Curve(), time.perf_counter()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        trainer = Trainer(
            NETWORKS[arguments.network](train.shape, CLASSES), LOSSES[arguments.loss], "adam", mem_limit="2GB", method="full",
            lr=arguments.lr, batch_size=arguments.batch, epochs=arguments.epochs, seed=seed, test_every=1, save_every="never",
            output_dir=Path(folder) / "run", quiet=True,
        )  # fmt: skip
        result = trainer.fit(train, test, reporter=curve)
    return {"curve": curve.accuracies, "losses": list(result.train_losses), "seconds": time.perf_counter() - began}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", choices=["mnist", "cifar"])
    parser.add_argument("network", choices=sorted(NETWORKS))
    parser.add_argument("loss", choices=sorted(LOSSES))
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--test-rows", type=int, default=10_000)
    return parser


def main() -> None:
    torch.set_num_threads(1)  # the layers are too small for two
    arguments = parser().parse_args()
    train, test = rows(arguments.data, arguments.data_dir, arguments.rows, arguments.test_rows)
    print(json.dumps({f"seed {seed}": trained(arguments, train, test, seed) for seed in range(arguments.seeds)}))


if __name__ == "__main__":
    main()
