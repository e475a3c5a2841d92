"""DeepLab with its auxiliary head, as torchvision gives it: a dict of outputs."""

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

from seqpart import Trainer


def model() -> nn.Module:
    network = deeplabv3_mobilenet_v3_large(weights_backbone=None, num_classes=5, aux_loss=True)
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # drawn from generators of their own, so a plain loop has others
    return network


def loss(output: dict[str, torch.Tensor], masks: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output["out"], masks) + 0.5 * F.cross_entropy(output["aux"], masks)


x, y = torch.randn(8, 3, 64, 64), torch.randint(0, 5, (8, 64, 64))


def plain(network: nn.Module) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    for images, masks in zip(x.split(4), y.split(4), strict=True):
        optimizer.zero_grad()
        loss(network(images), masks).backward()
        optimizer.step()


def limited(network: nn.Module) -> None:
    trainer = Trainer(
        network, loss, mem_limit="2GB", method="streamed", epochs=1, batch_size=4, micro_batch_size=4, lr=1e-3, shuffle=False
    )
    trainer.fit((x, y))


if __name__ == "__main__":
    limited(model())
