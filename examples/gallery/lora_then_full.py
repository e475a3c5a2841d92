"""Adapters of low rank that learn first, and all weights after them."""

import torch
import torch.nn.functional as F
from torch import nn

from seqpart import Trainer


class Adapted(nn.Module):
    """A linear layer with an adapter beside it."""

    def __init__(self, width: int, rank: int = 4) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(width, width), nn.Linear(width, rank, bias=False), nn.Linear(rank, width)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def model() -> nn.Module:
    return nn.Sequential(Adapted(64), nn.ReLU(), Adapted(64), nn.ReLU(), nn.Linear(64, 10))


x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))


def plain(network: nn.Module) -> None:
    bases = [layer.base for layer in network if isinstance(layer, Adapted)]
    for base in bases:
        base.requires_grad_(False)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    for update, (rows, labels) in enumerate([*zip(x.split(64), y.split(64), strict=True)] * 3):
        if update == 6:
            for base in bases:
                base.requires_grad_(True)
        optimizer.zero_grad()
        F.cross_entropy(network(rows), labels).backward()
        optimizer.step()


def limited(network: nn.Module) -> None:
    trainer = Trainer(
        network, F.cross_entropy, mem_limit="2GB", method="streamed", epochs=3, batch_size=64, lr=1e-3, shuffle=False,
        unfreeze={"*.base.*": "update 6"},
    )  # fmt: skip
    trainer.fit((x, y))


if __name__ == "__main__":
    limited(model())
