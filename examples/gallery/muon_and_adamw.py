"""Muon for hidden matrices and AdamW for the rest, chosen by name."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from seqpart import Trainer


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def optimizers(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    named = list(named_parameters)
    hidden = [p for name, p in named if p.ndim == 2 and name != "4.weight"]
    others = [p for name, p in named if p.ndim != 2 or name == "4.weight"]
    return [torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(others, lr=1e-3, fused=True)]


x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))


def plain(network: nn.Module) -> None:
    muon, adamw = optimizers(network.named_parameters())
    for _ in range(2):
        for rows, labels in zip(x.split(64), y.split(64), strict=True):
            network.zero_grad()
            F.cross_entropy(network(rows), labels).backward()
            muon.step()
            adamw.step()


def limited(network: nn.Module) -> None:
    trainer = Trainer(
        network, F.cross_entropy, optimizers, mem_limit="2GB", method="streamed", epochs=2, batch_size=64, shuffle=False
    )
    trainer.fit((x, y))


if __name__ == "__main__":
    limited(model())
