"""One run of benchmarks/pnn_paper.py in a process of its own, through the public Trainer: prints one JSON line.

baseline: full training; pnn: in partitions; weights: figure 1's small network, again and again."""

import argparse
import functools
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from seqpart import Trainer
from seqpart.data.splits import as_split
from seqpart.report.reporter import Reporter
from seqpart.schedule.phase import PhaseKind
from seqpart.schedule.steps import PhaseDone
from seqpart.zoo import datasets

CLASSES, BATCH = 47, 1410
WIDTHS = (784, 80, 60, 60, 60, CLASSES)
"""The paper's network, section 3: 784-80-60 is the left partition, 60-60-60-47 the right one."""
STARTS = {1: (0,), 2: (0, 2), 3: (0, 2, 3), 4: (0, 1, 2, 3)}
"""By number of partitions, the first layer of each."""
MACS = (62_880, 4_920, 3_720, 3_720, 2_867)
"""Of one row forward through each layer, as ptflops counts them (`macs`); the paper has 67,800 left and 10,307 right."""


def layer(inputs: int, outputs: int) -> nn.Module:
    linear = nn.Linear(inputs, outputs)
    if outputs == CLASSES:
        return linear
    return nn.Sequential(*([nn.Flatten()] if inputs == WIDTHS[0] else []), linear, nn.ReLU())


LAYERS = [functools.partial(layer, *widths) for widths in itertools.pairwise(WIDTHS)]


def macs() -> tuple[int, ...]:
    """MACS counted again by ptflops; ReLU counted once, as the paper has it."""
    from ptflops import get_model_complexity_info

    def of(model: nn.Module, width: int) -> int:
        found, _ = get_model_complexity_info(
            model, (width,), as_strings=False, print_per_layer_stat=False, backend="pytorch",
            backend_specific_config={"count_functional": False},
        )  # fmt: skip
        return int(found)

    return tuple(of(made(), width) for made, width in zip(LAYERS, WIDTHS, strict=False))


def macs_of(partitions: int) -> list[int]:
    """Of one row forward through each partition."""
    starts = STARTS[partitions]
    return [sum(MACS[first:last]) for first, last in zip(starts, (*starts[1:], len(MACS)), strict=True)]


def rows(folder: Path) -> tuple[Any, Any]:
    """Files of the idx kind under `folder`, or torchvision's EMNIST (balanced)."""
    if list(folder.glob("*idx3-ubyte*")):
        return datasets.load(f"idx:{folder}")
    if list(folder.glob("raw/*idx3-ubyte*")) and not (folder / "EMNIST").exists():
        return datasets.load(f"idx:{folder / 'raw'}")
    return datasets.load("emnist", data_dir=folder)


class Curve(Reporter):
    """Accuracy over the test rows behind every epoch, against the multiply-accumulates of the training before it.

    MACs are those of the forward passes over the training rows, as in the paper's figures.
    """

    def __init__(self, macs: list[int]) -> None:
        super().__init__(quiet=True)
        self._macs = macs
        self.macs = 0
        self.points: list[tuple[int, float]] = []
        self.stages: list[int] = []
        """Where in `points` recovery begins."""

    def listen(self, event: Any) -> None:
        if not isinstance(event, PhaseDone):
            return
        phase = event.phase
        if phase.kind is PhaseKind.TRAIN:
            if phase.stage and not self.stages:
                self.stages.append(len(self.points))
            self.macs += sum(self._macs[p] for p in phase.partitions) * phase.rows
        elif phase.kind is PhaseKind.TEST and phase.partition == len(self._macs) - 1 and event.accuracy is not None:
            self.points.append((self.macs, event.accuracy))


def trained_weights(folder: Path, seeds: range) -> dict[str, Any]:
    """Figure 1: (least, greatest) weight of the middle layer of 784-100-50-10 after 15 epochs of MNIST, for each seed.

    A plain loop: the figure is about initial weights, and not about partitions.
    """
    train = as_split(datasets.load("mnist", data_dir=folder)[0], "training")
    x, y = torch.cat([rows.flatten(1) for rows in train.open()]).to(torch.float32), train.labels
    extremes, right = [], 0
    for seed in seeds:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for _ in range(15):
            for rows in torch.randperm(len(x)).split(256):
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
        with torch.no_grad():
            right += int((model(x).argmax(1) == y).sum())
        weights = model[2].weight.detach()
        extremes.append((float(weights.min()), float(weights.max())))
    return {"extremes": extremes, "accuracy": right / len(x) / len(seeds)}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.kind == "weights":
        return trained_weights(arguments.data_dir, range(arguments.seed, arguments.seed + arguments.times))
    train, test = rows(arguments.data_dir)
    options: dict[str, Any] = {
        "mem_limit": "2GB", "batch_size": BATCH, "optimizer": "sgd", "momentum": 0.9, "seed": arguments.seed, "shuffle": False,
        "save_every": "never", "test_every": arguments.test_every,
    }  # fmt: skip
    if arguments.kind == "baseline":
        options |= {"method": "full", "epochs": arguments.epochs, "lr": 0.01}
    else:
        inner = arguments.partitions - 1
        options |= {
            "method": "sil", "partitions": list(STARTS[arguments.partitions]), "objective": arguments.objective,
            "epochs": [*[arguments.left_epochs] * inner, arguments.right_epochs],
            "lr": [*[arguments.left_lr] * inner, arguments.right_lr], "recovery_epochs": arguments.recovery,
            "sil_inputs": arguments.inputs,
        }  # fmt: skip
        options |= {"kappa": arguments.kappa} if arguments.objective == "mse" else {"prototype_scale": 16.0}
    curve = Curve(macs_of(1 if arguments.kind == "baseline" else arguments.partitions))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        result = Trainer(LAYERS, output_dir=Path(folder) / "run", **options).fit(train, test, reporter=curve)
    return {
        "accuracy": result.accuracy, "curve": curve.points, "recovers_at": curve.stages, "seconds": result.seconds,
        "left_loss": result.train_losses[: arguments.left_epochs] if arguments.kind == "pnn" else [],
    }  # fmt: skip


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["baseline", "pnn", "weights"])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times", type=int, default=10, help="of weights: so many seeds from --seed on")
    parser.add_argument("--partitions", type=int, choices=sorted(STARTS)[1:], default=2)
    parser.add_argument("--inputs", choices=["cached", "synthetic"], default="cached", help="synthetic: figure 5")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--left-epochs", type=int, default=5)
    parser.add_argument("--right-epochs", type=int, default=160)
    parser.add_argument("--recovery", type=int, default=0)
    parser.add_argument("--kappa", type=float, default=10.0)
    parser.add_argument("--left-lr", type=float, default=0.01)
    parser.add_argument("--right-lr", type=float, default=0.01)
    parser.add_argument("--objective", default="mse")
    parser.add_argument("--test-every", type=int)
    return parser


def main() -> None:
    torch.set_num_threads(1)  # the layers are too small for two; two runs go side by side instead
    print(json.dumps(run(parser().parse_args())))


if __name__ == "__main__":
    main()
