"""A UNet that says of every pixel what it shows, its skips and all, under a limit.

    python examples/train_unet.py                                # discs and squares that are made here; a minute on a CPU
    python examples/train_unet.py --full --data DIR              # 31 M weights on images of 256 x 256 in DIR/images, DIR/masks

A mask is a PNG of the image's name (cat.jpg, cat.png) whose numbers are classes from 0 up; 255 does not count. Every tenth
image is a test row. Training images are flipped at random, anew in every epoch.
"""

import argparse
import itertools
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from seqpart import Trainer

IGNORED = -100


def convolutions(inputs: int, outputs: int) -> nn.Module:
    def layer(channels: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(*layer(inputs), *layer(outputs))


class UNet(nn.Module):
    """(rows, 3, H, W) to scores (rows, classes, H, W); H and W are multiples of 2 ** depth."""

    def __init__(self, classes: int, width: int, depth: int) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(convolutions(*pair) for pair in itertools.pairwise([3, *widths[:-1]]))
        self.middle = convolutions(widths[-2], widths[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * wide, wide, 2, 2) for wide in widths[-2::-1])
        self.join = nn.ModuleList(convolutions(2 * wide, wide) for wide in widths[-2::-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for down in self.down:
            skips.append(down(x))
            x = nn.functional.max_pool2d(skips[-1], 2)
        x = self.middle(x)
        for up, join, skip in zip(self.up, self.join, reversed(skips), strict=True):
            x = join(torch.cat([skip, up(x)], 1))
        return self.head(x)


class Masked(torch.utils.data.Dataset):
    """Images (3, size, size) from 0 to 1 with masks (size, size) of classes."""

    def __init__(self, images: list[Path], size: int, *, flips: bool) -> None:
        self.images, self.size, self.flips = images, size, flips

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        path = self.images[index]
        image = Image.open(path).convert("RGB").resize((self.size, self.size))
        mask = Image.open(path.parent.parent / "masks" / f"{path.stem}.png").resize(
            (self.size, self.size), Image.Resampling.NEAREST
        )
        x, y = np.array(image, np.float32).transpose(2, 0, 1) / 255, np.array(mask, np.int64)
        y[y == 255] = IGNORED
        if self.flips and random.random() < 0.5:
            x, y = x[..., ::-1].copy(), y[..., ::-1].copy()
        return torch.from_numpy(x), torch.from_numpy(y)


class MeanIoU:
    """Intersection over union of labels and answers, by class; the mean of those that there are."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.reset()

    def reset(self) -> None:
        self.pairs = torch.zeros(self.classes, self.classes)

    def update(self, scores: torch.Tensor, labels: torch.Tensor) -> None:
        counts = labels >= 0
        pair = labels[counts] * self.classes + scores.argmax(1)[counts]
        self.pairs += torch.bincount(pair, minlength=self.classes**2).view_as(self.pairs).cpu()

    def compute(self) -> torch.Tensor:
        both = self.pairs.diagonal()
        union = self.pairs.sum(0) + self.pairs.sum(1) - both
        return (both / union)[union > 0].mean()


def make(folder: Path, rows: int = 200, size: int = 32) -> Path:
    """Noise with a disc (class 1) and a square (class 2) of any colour in each image."""
    draw, grid = np.random.default_rng(0), np.mgrid[:size, :size]
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for row in range(rows):
        image, mask = draw.integers(0, 90, (size, size, 3)), np.zeros((size, size), np.uint8)
        for shape in (1, 2):
            away = np.abs(grid - draw.integers(6, size - 6, (2, 1, 1)))
            inside = (away**2).sum(0) < 36 if shape == 1 else away.max(0) < 5
            image[inside], mask[inside] = draw.integers(140, 256, 3), shape
        Image.fromarray(image.astype(np.uint8)).save(folder / "images" / f"{row}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{row}.png")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="width 64, depth 4, 256 x 256 pixels, 2GB, 50 epochs; needs --data")
    parser.add_argument("--data", type=Path, help="a directory with images/ and masks/; default: one is made")
    parser.add_argument("--classes", type=int, default=3, help="with the background")
    parser.add_argument("--mem-limit", help="default: 500MB, and 2GB with --full")
    parser.add_argument("--epochs", type=int)
    arguments = parser.parse_args()
    if arguments.full and arguments.data is None:
        parser.error("--full needs --data DIR, with images/ and masks/")
    width, depth, size, limit, epochs = (64, 4, 256, "2GB", 50) if arguments.full else (8, 2, 32, "500MB", 8)

    images = sorted(((arguments.data or make(Path("runs/shapes"))) / "images").iterdir())
    rows = [path for number, path in enumerate(images) if number % 10 != 9]
    train, test = Masked(rows, size, flips=True), Masked(images[9::10], size, flips=False)
    torch.manual_seed(0)
    trainer = Trainer(
        UNet(arguments.classes, width, depth), mem_limit=arguments.mem_limit or limit, method="auto", optimizer="adamw",
        lr=2e-3, weight_decay=0.01, lr_schedule="cosine", epochs=arguments.epochs or epochs, batch_size=10,
        workers=2 if arguments.full else 0, output_dir="runs/unet", overwrite=True,
    )  # fmt: skip
    result = trainer.fit(train, test, compute_metrics={"mean IoU": MeanIoU(arguments.classes)})
    print(f"pixels right {result.accuracy:.4f}, mean IoU {result.metrics['mean IoU']:.4f}, weights in {result.weights}")


if __name__ == "__main__":
    main()
