"""One run of benchmarks/pnn_paper.py in a process of its own, through the public Trainer: prints one JSON line."""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from seqpart import Trainer
from seqpart.passes import PhaseDone
from seqpart.report import Reporter
from seqpart.schedule import PhaseKind
from seqpart.zoo import datasets

CLASSES, BATCH, LEFT_MACS, RIGHT_MACS = 47, 1410, 67_800, 10_307
"""The paper's, section 3; `macs()` counts them again."""


def left() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 80), nn.ReLU(), nn.Linear(80, 60), nn.ReLU())


def right() -> nn.Module:
    return nn.Sequential(nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, CLASSES))


def macs() -> tuple[int, int]:
    """Of one row forward through the left and through the right, by ptflops; ReLU counted once, as the paper has it."""
    from ptflops import get_model_complexity_info

    def of(model: nn.Module, width: int) -> int:
        found, _ = get_model_complexity_info(
            model, (width,), as_strings=False, print_per_layer_stat=False, backend="pytorch",
            backend_specific_config={"count_functional": False},
        )  # fmt: skip
        return int(found)

    return of(left(), 784), of(right(), 60)


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

    def __init__(self, last: int) -> None:
        super().__init__(quiet=True)
        self._last, self._recovers = last, False
        self.macs = 0
        self.points: list[tuple[int, float]] = []
        self.stages: list[int] = []
        """Where in `points` recovery begins."""

    def listen(self, event: Any) -> None:
        if not isinstance(event, PhaseDone):
            return
        phase = event.phase
        if phase.kind is PhaseKind.TRAIN:
            if phase.stage and not self._recovers:
                self._recovers = True
                self.stages.append(len(self.points))
            whole = phase.through is not None or self._last == 0
            passed = LEFT_MACS + RIGHT_MACS if whole else (LEFT_MACS, RIGHT_MACS)[phase.partition]
            self.macs += passed * phase.rows
        elif phase.kind is PhaseKind.TEST and phase.partition == self._last and event.accuracy is not None:
            self.points.append((self.macs, event.accuracy))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    train, test = rows(arguments.data_dir)
    options: dict[str, Any] = {
        "mem_limit": "2GB", "batch_size": BATCH, "optimizer": "sgd", "momentum": 0.9, "seed": arguments.seed, "shuffle": "no",
        "save_every": "never", "test_every": arguments.test_every,
    }  # fmt: skip
    if arguments.kind == "baseline":
        options |= {"method": "full", "epochs": arguments.epochs, "lr": 0.01}
    else:
        options |= {
            "method": "sil", "partitions": "0,1", "objective": arguments.objective,
            "epochs": f"{arguments.left_epochs},{arguments.right_epochs}", "lr": f"{arguments.left_lr},0.01",
            "recovery_epochs": arguments.recovery,
        }  # fmt: skip
        options |= {"kappa": arguments.kappa} if arguments.objective == "mse" else {}
    curve = Curve(last=0 if arguments.kind == "baseline" else 1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        result = Trainer([left, right], output_dir=Path(folder) / "run", **options).fit(train, test, reporter=curve)
    return {
        "accuracy": result.accuracy, "curve": curve.points, "recovers_at": curve.stages, "seconds": result.seconds,
        "left_loss": result.train_losses[: arguments.left_epochs] if arguments.kind == "pnn" else [],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["baseline", "pnn"])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--left-epochs", type=int, default=5)
    parser.add_argument("--right-epochs", type=int, default=160)
    parser.add_argument("--recovery", type=int, default=0)
    parser.add_argument("--kappa", type=float, default=10.0)
    parser.add_argument("--left-lr", type=float, default=0.01)
    parser.add_argument("--objective", default="mse")
    parser.add_argument("--test-every", type=int)
    torch.set_num_threads(1)  # the layers are too small for two; two runs go side by side instead
    print(json.dumps(run(parser.parse_args())))


if __name__ == "__main__":
    main()
