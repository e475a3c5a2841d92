"""Models and rows to verify training on."""

import torch
from torch import nn

from seqpart.verify.verification import verify
from seqpart.zoo.models import gpt, mlp


def numbers(*shape, rows=22):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(rows, *shape, generator=generator), torch.arange(rows) % 4


def tokens(context=6, rows=22):
    text = torch.randint(0, 11, (rows, context + 1), generator=torch.Generator().manual_seed(5))
    return text[:, :-1], text[:, 1:]


class Normal(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3))

    def forward(self, x):
        return x + self.layers(x)


def normal():
    return nn.Sequential(nn.Linear(8, 8), Normal(), Normal(), nn.Linear(8, 4))


MODELS = {
    "mlp": (lambda: mlp(8, 4, width=16, depth=3), numbers(8)),
    "gpt": (lambda: gpt(11, 6, width=8, depth=2, heads=2), tokens()),
    "batch norm and dropout": (normal, numbers(8)),
}


def check(model, data, **options):
    torch.manual_seed(0)  # of the weights of a model that lives
    return verify(model(), data, **{"mem_limit": "2GB", "batch_size": 8, "micro_batch_size": 4, "lr": 1e-2, **options})
