"""Accuracy of weights in bfloat16, rounded to the nearest and stochastically, beside float32.

    python -m benchmarks.bf16_rounding --data-dir DIR [--tasks paper,residual,resnet,gpt] [--seeds 3]
    python -m benchmarks.bf16_rounding --quick

Full training of the four networks of docs/objectives.md, with the settings that the study chose there; products are bfloat16 in
all. DIR holds EMNIST47, cifar10-subset and tinyshakespeare.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import quick
from benchmarks.objectives.study import EPOCHS
from benchmarks.objectives.tasks import TASKS, Task, true_loss
from seqpart import Trainer

WAYS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bfloat16, nearest": (torch.bfloat16, {}),
    "bfloat16, stochastic": (torch.bfloat16, {"rounding": "stochastic"}),
    "bfloat16, stochastic, moments too": (torch.bfloat16, {"rounding": "stochastic", "moments_dtype": "bf16"}),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "paper": {"optimizer": "sgd", "lr": 0.1, "lr_schedule": "constant", "shuffle": False},
    "residual": {"lr": 2e-3, "weight_decay": 0.2},
    "resnet": {"lr": 2e-3, "weight_decay": 0.05},
    "gpt": {"lr": 2e-3, "weight_decay": 0.1},
}


def trained(task: Task, way: str, seed: int, epochs: int, folder: Path) -> tuple[float, float]:
    """Returns (accuracy in %, loss) on the test rows."""
    dtype, options = WAYS[way]
    torch.manual_seed(seed)
    model = nn.Sequential(*(make() for make in task.blocks)).to(dtype)
    result = Trainer(
        model, true_loss, **{"lr_schedule": "cosine", **OPTIONS[task.name], **options},
        mem_limit="4GB", method="full", dtype="bf16", epochs=epochs, batch_size=task.batch, seed=seed, save_every="never",
        quiet=True, output_dir=folder / f"{way}-{seed}",
    ).fit(task.train, task.test)  # fmt: skip
    return 100 * float(result.accuracy or 0), float(result.test_loss or 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="required, but for --quick")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    quick.add_to(parser)
    asked = parser.parse_args()
    if asked.data_dir is None and not asked.quick:
        parser.error("--data-dir: the folder of EMNIST47, cifar10-subset and tinyshakespeare is needed.")
    print("| network | weights | accuracy % | test loss |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        data = quick.data(Path(folder)) if asked.quick else asked.data_dir
        for name in ("paper",) if asked.quick else asked.tasks.split(","):
            task, epochs = TASKS[name](data), 1 if asked.quick else EPOCHS[name]
            for way in WAYS:
                seeds = range(1 if asked.quick else asked.seeds)
                found = [trained(task, way, seed, epochs, Path(folder) / name) for seed in seeds]
                said = (
                    f"{statistics.mean(one):.{n}f} ({min(one):.{n}f} to {max(one):.{n}f})"
                    for one, n in zip(zip(*found, strict=True), (1, 3), strict=True)
                )
                print(f"| {name} | {way} | {' | '.join(said)} |", flush=True)


if __name__ == "__main__":
    main()
