"""A model like CLIP: two encoders, a learned scale, and a loss of all pairs in a batch, without labels."""

import torch
import torch.nn.functional as F
from torch import nn

from seqpart import Trainer


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
        self.text = nn.Sequential(nn.Embedding(100, 64), nn.Flatten(), nn.Linear(512, 32))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1), self.scale


def loss(output: tuple[torch.Tensor, ...]) -> torch.Tensor:
    image, text, scale = output
    scores, own = scale.exp() * image @ text.T, torch.arange(len(image))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


model = TwoTowers
images, texts = torch.randn(256, 64), torch.randint(0, 100, (256, 8))


def plain(towers: nn.Module) -> None:
    optimizer = torch.optim.AdamW(towers.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    for _ in range(2):
        for image, text in zip(images.split(64), texts.split(64), strict=True):
            optimizer.zero_grad()
            loss(towers(image=image, text=text)).backward()
            optimizer.step()


def limited(towers: nn.Module) -> None:
    trainer = Trainer(
        towers, loss, mem_limit="2GB", method="streamed", epochs=2, batch_size=64, micro_batch_size=64, lr=1e-3, shuffle=False
    )
    trainer.fit({"image": images, "text": texts})


if __name__ == "__main__":
    limited(model())
