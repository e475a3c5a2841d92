"""Accuracy of weights in bfloat16, rounded to the nearest and stochastically, beside float32.

    python -m benchmarks.bf16_rounding [--epochs 30] [--seeds 3]

Two networks on sklearn's digits, trained by AdamW with a cosine schedule; products are bfloat16 in all of them.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import quick
from seqpart import Trainer
from seqpart.zoo.datasets import digits

WAYS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bfloat16, nearest": (torch.bfloat16, {}),
    "bfloat16, stochastic": (torch.bfloat16, {"rounding": "stochastic"}),
    "bfloat16, stochastic, moments too": (torch.bfloat16, {"rounding": "stochastic", "moments_dtype": "bf16"}),
}
LR = 1e-4


def mlp() -> nn.Module:
    hidden = [layer for _ in range(3) for layer in (nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU())]
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), *hidden, nn.Linear(128, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(288, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def trained(make: Any, way: str, seed: int, epochs: int, folder: Path) -> tuple[float, float]:
    """Returns (accuracy, loss) on the test rows."""
    dtype, options = WAYS[way]
    torch.manual_seed(seed)
    train, test = digits()
    result = Trainer(
        make().to(dtype), mem_limit="2GB", method="full", dtype="bf16", lr=LR, lr_schedule="cosine", weight_decay=0.01,
        epochs=epochs, batch_size=32, seed=seed, save_every="never", quiet=True, output_dir=folder / f"{way}-{seed}", **options,
    ).fit(train, test)  # fmt: skip
    return 100 * float(result.accuracy or 0), float(result.test_loss or 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    quick.add_to(parser)
    asked = parser.parse_args()
    epochs, seeds = (1, 1) if asked.quick else (asked.epochs, asked.seeds)
    print("| network | weights | accuracy % | test loss |\n|---|---|---|---|")
    for make in (mlp, cnn):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                found = [trained(make, way, seed, epochs, Path(folder)) for seed in range(seeds)]
            said = (f"{statistics.mean(one):.{n}f} ({min(one):.{n}f} to {max(one):.{n}f})" for one, n in zip(
                zip(*found, strict=True), (1, 3), strict=True))  # fmt: skip
            print(f"| {make.__name__} | {way} | {' | '.join(said)} |", flush=True)


if __name__ == "__main__":
    main()
