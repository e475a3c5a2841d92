"""Contrastive learning (InfoNCE) on two views of each row, without labels. The loss compares rows, so batches stay whole."""

import torch
import torch.nn.functional as F
from torch import nn

from seqpart import Trainer


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 32))


def loss(output: torch.Tensor) -> torch.Tensor:
    one, other = F.normalize(output, dim=-1).unbind(1)
    return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))


views = torch.randn(256, 2, 64)


def plain(encoder: nn.Module) -> None:
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    for _ in range(2):
        for rows in views.split(64):
            optimizer.zero_grad()
            loss(encoder(rows)).backward()
            optimizer.step()


def limited(encoder: nn.Module) -> None:
    trainer = Trainer(
        encoder, loss, mem_limit="2GB", method="streamed", epochs=2, batch_size=64, micro_batch_size=64, lr=1e-3, shuffle=False
    )
    trainer.fit(views)


if __name__ == "__main__":
    limited(model())
