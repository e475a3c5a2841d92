"""An endless stream of tokens, for a number of updates."""

from collections.abc import Iterator
from itertools import count, islice

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset

from seqpart import Trainer


class Tokens(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in count():
            row = (torch.arange(17) * (number % 7 + 1) + number) % 50
            yield row[:-1], row[1:]


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 50))


def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def plain(network: nn.Module) -> None:
    optimizer, rows = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.0, fused=True), iter(Tokens())
    for _ in range(8):
        x, y = (torch.stack(part) for part in zip(*islice(rows, 16), strict=True))
        optimizer.zero_grad()
        loss(network(x), y).backward()
        optimizer.step()


def limited(network: nn.Module) -> None:
    trainer = Trainer(network, loss, mem_limit="2GB", method="streamed", max_steps=8, batch_size=16, lr=1e-3)
    trainer.fit(Tokens())


if __name__ == "__main__":
    limited(model())
