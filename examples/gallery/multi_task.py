"""Two heads: a class and a number for each row, labels in a dict."""

import torch
import torch.nn.functional as F
from torch import nn

from seqpart import Trainer


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.species, self.weight = nn.Linear(128, 10), nn.Linear(128, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.body(x)
        return {"species": self.species(hidden), "weight": self.weight(hidden)}


def loss(output: dict[str, torch.Tensor], labels: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output["species"], labels["species"]) + 0.5 * F.mse_loss(output["weight"], labels["weight"])


model = TwoHeads
x, species, weight = torch.randn(256, 64), torch.randint(0, 10, (256,)), torch.randn(256, 1)


def plain(network: nn.Module) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    for _ in range(2):
        for rows, one, other in zip(x.split(64), species.split(64), weight.split(64), strict=True):
            optimizer.zero_grad()
            loss(network(rows), {"species": one, "weight": other}).backward()
            optimizer.step()


def limited(network: nn.Module) -> None:
    trainer = Trainer(network, loss, mem_limit="2GB", method="streamed", epochs=2, batch_size=64, lr=1e-3, shuffle=False)
    trainer.fit((x, {"species": species, "weight": weight}))


if __name__ == "__main__":
    limited(model())
