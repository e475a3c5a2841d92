"""A head that learns first, a backbone that learns later from the top down, and batches mixed with soft labels."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from seqpart import Trainer


def model() -> nn.Module:
    lower, upper = nn.Sequential(nn.Linear(64, 128), nn.ReLU()), nn.Sequential(nn.Linear(128, 128), nn.ReLU())
    return nn.Sequential(lower, upper, nn.Linear(128, 10))


def mixed(items: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixes every row of a batch with the one before it, and their labels."""
    x, y = default_collate(items)
    soft = F.one_hot(y, 10).float()
    return 0.7 * x + 0.3 * x.roll(1, 0), 0.7 * soft + 0.3 * soft.roll(1, 0)


loader = DataLoader(TensorDataset(torch.randn(256, 64), torch.randint(0, 10, (256,))), batch_size=64, collate_fn=mixed)


def plain(network: nn.Module) -> None:
    network[:2].requires_grad_(False)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    for epoch in range(3):
        if epoch:
            network[2 - epoch].requires_grad_(True)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()


def limited(network: nn.Module) -> None:
    trainer = Trainer(
        network, F.cross_entropy, mem_limit="2GB", method="streamed", epochs=3, batch_size=64, lr=1e-3, weight_decay=0.1,
        unfreeze={"1.*": "epoch 1", "0.*": "epoch 2"},
    )  # fmt: skip
    trainer.fit(loader)


if __name__ == "__main__":
    limited(model())
