"""A transformer from sequences to sequences, whose collate function pads both sides."""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from seqpart import Trainer

LENGTH, SYMBOLS, WIDTH = 12, 20, 32


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
        self.scores = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, source: torch.Tensor, so_far: torch.Tensor) -> torch.Tensor:
        places = self.places(torch.arange(LENGTH, device=source.device))
        read = self.encoder(self.symbols(source) + places)
        mask = torch.full((LENGTH, LENGTH), -torch.inf, device=source.device).triu(1)
        written = self.decoder(self.symbols(so_far) + places, read, tgt_mask=mask)
        return self.scores(written).transpose(1, 2)


def model() -> nn.Module:
    return Translator()


def padded(pairs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The target is the source backwards; what is padded does not count."""
    rows = range(len(pairs))
    source, so_far = torch.zeros(len(pairs), LENGTH, dtype=torch.int64), torch.zeros(len(pairs), LENGTH, dtype=torch.int64)
    labels = torch.full((len(pairs), LENGTH), -100)
    for row, sequence in zip(rows, pairs, strict=True):
        source[row, : len(sequence)] = sequence
        so_far[row, 1 : len(sequence)] = sequence.flip(0)[:-1]
        labels[row, : len(sequence)] = sequence.flip(0)
    return {"source": source, "so_far": so_far, "labels": labels}


sequences = [torch.randint(1, SYMBOLS, (3 + n % (LENGTH - 2),)) for n in range(128)]
loader = DataLoader(sequences, batch_size=32, collate_fn=padded)
loss = functools.partial(F.cross_entropy, ignore_index=-100)


def plain(network: nn.Module) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss(network(batch["source"], batch["so_far"]), batch["labels"]).backward()
            optimizer.step()


def limited(network: nn.Module) -> None:
    trainer = Trainer(network, loss, mem_limit="2GB", method="streamed", epochs=2, batch_size=32, lr=1e-3)
    trainer.fit(loader)


if __name__ == "__main__":
    limited(model())
