"""A vision transformer of timm on a folder of images, under a limit.

    python examples/finetune_vit_on_folder.py                                        # stripes that are made here; a minute
    python examples/finetune_vit_on_folder.py --full --data DIR --weights FILE       # ViT-B/16 at 224 x 224 pixels

DIR has train/CLASS and val/CLASS with image files. FILE is what such a model was trained to (timm's model.safetensors); where
its head is for other classes, a new one is trained. Training images are cropped and flipped anew in every epoch.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from seqpart import Trainer

try:
    import timm
except ImportError:
    raise SystemExit("this example takes its model from timm: pip install timm") from None

CLASSES = ("across", "down", "checks")


def make(folder: Path, size: int = 48) -> Path:
    """Three patterns in any two colours, with noise: 60 training images and 15 others of each."""
    draw, (y, x) = np.random.default_rng(0), np.mgrid[:size, :size]
    for part, rows in (("train", 60), ("val", 15)):
        for name in CLASSES:
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            for row in range(rows):
                down, across = ((at + draw.integers(12)) // 6 % 2 for at in (y, x))
                pattern = {"across": down, "down": across, "checks": down ^ across}[name]
                image = draw.integers(0, 200, (2, 3))[pattern] + draw.integers(0, 56, (size, size, 3))
                Image.fromarray(image.astype(np.uint8)).save(folder / part / name / f"{row}.png")
    return folder


def images(folder: Path, size: int) -> tuple[ImageFolder, ImageFolder]:
    """(training, test) rows: (3, size, size) with mean 0 and deviation about 1, and their class."""
    last = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
    crop = v2.Compose([v2.RandomResizedCrop(size, (0.5, 1.0)), v2.RandomHorizontalFlip(), *last])
    middle = v2.Compose([v2.Resize(size * 8 // 7), v2.CenterCrop(size), *last])
    return ImageFolder(folder / "train", crop), ImageFolder(folder / "val", middle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the model at its own size, 2GB, 5 epochs; needs --data")
    parser.add_argument("--data", type=Path, help="a directory with train/CLASS and val/CLASS; default: one is made")
    parser.add_argument("--model", default="vit_base_patch16_224", help="a name of timm's, for --full")
    parser.add_argument("--weights", type=Path, help="a safetensors file to begin with; its head may be another")
    parser.add_argument("--mem-limit", help="default: 600MB, and 2GB with --full")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--output-dir", default="runs/vit")
    arguments = parser.parse_args()
    if arguments.full and arguments.data is None:
        parser.error("--full needs --data DIR, with train/CLASS and val/CLASS")

    train, test = images(arguments.data or make(Path("runs/stripes")), 224 if arguments.full else 32)
    torch.manual_seed(0)
    if arguments.full:
        model = timm.create_model(arguments.model, num_classes=len(train.classes))
    else:
        model = timm.create_model("vit_tiny_patch16_224", num_classes=len(train.classes), img_size=32, patch_size=8, depth=2)
    trainer = Trainer(
        model, mem_limit=arguments.mem_limit or ("2GB" if arguments.full else "600MB"), method="auto",
        weights=arguments.weights, weights_partial=arguments.weights is not None, optimizer="adamw", weight_decay=0.05,
        lr=5e-5 if arguments.full else 1e-3, lr_schedule="cosine", warmup_updates=10, clip_grad_norm=1.0,
        epochs=arguments.epochs or (5 if arguments.full else 10), batch_size=64 if arguments.full else 20,
        workers=2 if arguments.full else 0, output_dir=arguments.output_dir, overwrite=True,
    )  # fmt: skip
    result = trainer.fit(train, test)
    print(f"accuracy {result.accuracy:.4f} of {len(train.classes)} classes, weights in {result.weights}")


if __name__ == "__main__":
    main()
