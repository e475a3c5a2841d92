"""A training loop of your own under the limit: each batch is made here, each update by the plan.

    python examples/own_loop.py             # handwritten digits, some seconds on a CPU; nothing is fetched
    python examples/own_loop.py --full      # the same with 404 MB of weights (with gradients and Adam 1.6 GB) under 1.2 GB

The loop shifts each image by a pixel, tests after every epoch, keeps the weights of the best one, and ends when
three epochs brought nothing. The bits are those of `loss.backward(); optimizer.step()` in plain PyTorch.
"""

import argparse
import random

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from seqpart import Trainer

PATIENCE = 3


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


def digits() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """scikit-learn's: images (rows, 64) from 0 to 1, and what they show. Every fifth row is a test row."""
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    test = torch.arange(len(labels)) % 5 == 4
    return (images[~test].float() / 16, labels[~test]), (images[test].float() / 16, labels[test])


def shifted(images: torch.Tensor) -> torch.Tensor:
    """(rows, 64), each by a pixel or none in each direction."""
    moved = [image.roll(random.choices((-1, 0, 1), k=2), (0, 1)) for image in images.view(-1, 8, 8)]
    return torch.stack(moved).view(-1, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="width 2048, depth 24, limit 1.2GB")
    parser.add_argument("--mem-limit", help="default: 600MB, and 1.2GB with --full")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--weights", default="runs/own-loop.safetensors", help="where those of the best epoch go")
    arguments = parser.parse_args()
    width, depth, rate, limit = (2048, 24, 1e-4, "1.2GB") if arguments.full else (256, 2, 1e-3, "600MB")

    random.seed(0)
    torch.manual_seed(0)
    train, test = digits()
    loader = DataLoader(TensorDataset(*train), batch_size=64, shuffle=True)
    blocks = [lambda: nn.Linear(64, width), *[lambda: Residual(width)] * depth, lambda: nn.Linear(width, 10)]
    trainer = Trainer(blocks, mem_limit=arguments.mem_limit or limit, method="auto", batch_size=64, lr=rate)

    best, behind = float("inf"), 0
    with trainer.session(train) as session:
        for epoch in range(1, arguments.epochs + 1):
            losses = [session.step((shifted(images), labels)) for images, labels in loader]
            found = session.evaluate(test)
            print(
                f"epoch {epoch:2}: loss {sum(losses) / len(losses):.4f}, test {found.loss:.4f}, accuracy {found.accuracy:.4f}"
            )
            best, behind = (found.loss, 0) if found.loss < best else (best, behind + 1)
            if not behind:
                accuracy, weights = found.accuracy, session.export(arguments.weights)
            if behind == PATIENCE:
                break
    print(f"best accuracy {accuracy:.4f}, weights in {weights}")


if __name__ == "__main__":
    main()
