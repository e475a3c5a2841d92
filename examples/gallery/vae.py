"""A variational autoencoder: a tuple of outputs, and a dict of losses."""

import torch
import torch.nn.functional as F
from torch import nn

from seqpart import Trainer


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
        self.decoder = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mean, variance = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + noise * (variance / 2).exp()), mean, variance


def loss(output: tuple[torch.Tensor, ...], x: torch.Tensor) -> dict[str, torch.Tensor]:
    decoded, mean, variance = output
    return {
        "reconstruction": F.mse_loss(decoded, x),
        "divergence": -0.5 * (1 + variance - mean.square() - variance.exp()).sum(1).mean(),
    }


model = Vae
x, noise = torch.rand(256, 64), torch.randn(256, 16)


def plain(vae: nn.Module) -> None:
    optimizer = torch.optim.Adam(vae.parameters(), lr=1e-3, fused=True)
    for _ in range(2):
        for rows, drawn in zip(x.split(64), noise.split(64), strict=True):
            optimizer.zero_grad()
            sum(loss(vae(rows, drawn), rows).values()).backward()
            optimizer.step()


def limited(vae: nn.Module) -> None:
    trainer = Trainer(vae, loss, "adam", mem_limit="2GB", method="streamed", epochs=2, batch_size=64, lr=1e-3, shuffle=False)
    trainer.fit((x, noise, x))


if __name__ == "__main__":
    limited(model())
