"""Train a network whose full training state does not fit the limit, and see the proof. Runs on a CPU in a minute."""

import torch
from torch import nn

from seqpart import Trainer
from seqpart.zoo.datasets import digits


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


# Factories, not modules: a block is built alone and goes straight to its home on disk.
blocks = [lambda: nn.Linear(64, 2048)] + [lambda: Residual(2048)] * 20 + [lambda: nn.Linear(2048, 10)]
train, test = digits()
result = Trainer(blocks, mem_limit="800MB", method="sil", epochs=2).fit(train, test)
print(f"accuracy {result.accuracy:.3f}, weights in {result.weights}")
