"""A masked autoencoder that computes its own loss, without labels."""

import torch
from torch import nn

from seqpart import Trainer


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.decoder = nn.Linear(128, 64)

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> dict[str, torch.Tensor]:
        decoded = self.decoder(self.encoder(x * kept))
        return {"loss": ((decoded - x).square() * (1 - kept)).mean(), "logits": decoded}


model = Masked
x, kept = torch.rand(256, 64), (torch.rand(256, 64) > 0.5).float()


def plain(autoencoder: nn.Module) -> None:
    optimizer = torch.optim.AdamW(autoencoder.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    for _ in range(2):
        for rows, mask in zip(x.split(64), kept.split(64), strict=True):
            optimizer.zero_grad()
            autoencoder(x=rows, kept=mask)["loss"].backward()
            optimizer.step()


def limited(autoencoder: nn.Module) -> None:
    trainer = Trainer(autoencoder, "model", mem_limit="2GB", method="streamed", epochs=2, batch_size=64, lr=1e-3, shuffle=False)
    trainer.fit({"x": x, "kept": kept})


if __name__ == "__main__":
    limited(model())
