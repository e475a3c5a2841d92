"""No weight decay for norms and biases."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from seqpart import Trainer


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def optimizer_of(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    named = list(named_parameters)
    decayed, others = [p for _, p in named if p.ndim > 1], [p for _, p in named if p.ndim <= 1]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], weight_decay=0.1, fused=True)


x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))


def plain(network: nn.Module) -> None:
    optimizer = optimizer_of(network.named_parameters())
    for _ in range(2):
        for rows, labels in zip(x.split(64), y.split(64), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(network(rows), labels).backward()
            optimizer.step()


def limited(network: nn.Module) -> None:
    trainer = Trainer(
        network, F.cross_entropy, optimizer_of, mem_limit="2GB", method="streamed", epochs=2, batch_size=64, shuffle=False
    )
    trainer.fit((x, y))


if __name__ == "__main__":
    limited(model())
