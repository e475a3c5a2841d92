"""A GAN: two networks that take turns, each with an optimizer of its own, in one session."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from seqpart import Trainer


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Sequential(nn.Linear(16, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64))
        self.d = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.d(x), self.d(self.g(z))


def d_loss(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    real, fake = output
    return bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake))


def g_loss(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return bce(output[1], torch.ones_like(output[1]))


def noise() -> torch.Tensor:
    return torch.randn(64, 16, generator=draws)


model = Both
images, draws = torch.randn(512, 64), torch.Generator()


def plain(both: nn.Module) -> None:
    d, g = both.d, both.g
    d_optimizer = torch.optim.Adam(d.parameters(), lr=2e-4, betas=(0.5, 0.999))
    g_optimizer = torch.optim.Adam(g.parameters(), lr=1e-4, betas=(0.5, 0.999))
    draws.manual_seed(0)
    for x in images.split(64):
        d_optimizer.zero_grad()
        d_loss((d(x), d(g(noise()).detach()))).backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        g_loss((torch.empty(0), d(g(noise())))).backward()
        g_optimizer.step()


def optimizers(named_parameters: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    d, g = ([p for name, p in named_parameters if name.startswith(part)] for part in ("d.", "g."))
    return [torch.optim.Adam(d, lr=2e-4, betas=(0.5, 0.999)), torch.optim.Adam(g, lr=1e-4, betas=(0.5, 0.999))]


def limited(both: nn.Module) -> None:
    losses = {"d": d_loss, "g": g_loss}
    trainer = Trainer(both, losses, optimizers, mem_limit="2GB", method="streamed", batch_size=64, micro_batch_size=64)
    draws.manual_seed(0)
    with trainer.session({"x": images[:64], "z": noise()}, learns={"d": "d.*", "g": "g.*"}) as session:
        draws.manual_seed(0)
        for x in images.split(64):
            session.step("d", {"x": x, "z": noise()})
            session.step("g", {"x": x, "z": noise()})


if __name__ == "__main__":
    limited(model())
