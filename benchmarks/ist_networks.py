"""The networks and rows of benchmarks/ist_paper.py, what a run of it is, and subnets cut out of a network in plain PyTorch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.objectives.tasks import Rows, divided, whole
from seqpart.data.reader import windows
from seqpart.methods.ist.narrow import index_sets
from seqpart.store.row_file import RowLayout
from seqpart.zoo import datasets

CLASSES = {"emnist": 47, "cifar": 10}
INPUTS = {"emnist": 28 * 28, "cifar": 3 * 16 * 16}
Units = Sequence[torch.Tensor]
"""Of each layer boundary, from the inputs to the classes, the units that a subnet has."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run: arm `full`, `local`, `ensemble`, `ist zero` or `ist keep`."""

    data: str
    layers: int
    """Hidden ones."""
    subnets: int
    arm: str
    lr: float
    seed: int
    tuning: bool = False
    """Judged on the validation rows instead of the test rows."""
    rows: int
    held: int
    epochs: int
    width: int
    batch: int = 64
    local: int = 20
    every: int = 2
    """Epochs from test to test."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """N_0 .. N_t of the paper's section 2.3."""
        return INPUTS[self.data], *[self.width] * self.layers, CLASSES[self.data]

    @property
    def shard(self) -> int:
        """Rows of an epoch that each site sees."""
        return self.rows if self.arm == "full" else self.rows // self.subnets

    @property
    def updates(self) -> int:
        """Of each site, in an epoch."""
        return -(-self.shard // self.batch)


def loaded(data: str, folder: Path, rows: int, held: int) -> tuple[Rows, Rows, Rows]:
    """(training, validation, test) rows of EMNIST47, or of the CIFAR-10 subset with the mean of every 2 x 2 pixels; flat."""
    place = f"idx:{folder / 'EMNIST47' / 'raw'}" if data == "emnist" else f"npz:{folder / 'cifar10-subset' / 'train.npz'}"
    (x, y), (test_x, test_y) = (whole(part) for part in datasets.load(place))
    train, validation = divided(x, y, rows, held)
    _, test = divided(test_x, test_y, 0, held)

    def flat(images: torch.Tensor) -> torch.Tensor:
        return (F.avg_pool2d(images, 2) if data == "cifar" else images).flatten(1).contiguous()

    return (flat(train[0]), train[1]), (flat(validation[0]), validation[1]), (flat(test[0]), test[1])


def blocks(sizes: Sequence[int], seed: int) -> list[nn.Module]:
    """Linear layers with BatchNorm and ReLU behind each but the last: the same weights for every arm of a seed."""
    torch.manual_seed(seed)
    hidden = [
        nn.Sequential(nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU())
        for inputs, outputs in pairwise(sizes[:-1])
    ]
    return [*hidden, nn.Linear(sizes[-2], sizes[-1])]


def order(job: Job, epoch: int) -> torch.Tensor:
    """The rows of that epoch, in the order of seqpart's reader."""
    chunk = RowLayout((job.sizes[0],), torch.float32).chunk_rows
    found = windows(job.rows, chunk, (job.seed, "order", 0, epoch))
    return torch.from_numpy(np.concatenate([window.rows for window in found]))


def units(job: Job, round_: int) -> list[Units]:
    """Of each subnet of that round, one neuron dealt after the other."""
    hidden = [index_sets(job.seed, round_, layer, job.width, job.subnets, 1) for layer in range(job.layers)]
    ends = torch.arange(job.sizes[0]), torch.arange(job.sizes[-1])
    return [
        [ends[0], *(torch.from_numpy(layer[subnet]) for layer in hidden), ends[1]] for subnet in range(job.subnets)
    ]  # fmt: skip


class Subnet(nn.Module):
    """What has those units of `network`. Its last sums stand for those of all subnets, as in seqpart's method ist."""

    def __init__(self, network: nn.Sequential, own: Units, subnets: int) -> None:
        super().__init__()
        self.net, self.subnets = nn.Sequential(*blocks([len(one) for one in own], 0)), subnets
        self.net.load_state_dict({name: _cut(name, tensor, own) for name, tensor in network.state_dict().items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = self.net[-1]
        return F.linear(self.net[:-1](x) * self.subnets, last.weight, last.bias)


def _cut(name: str, tensor: torch.Tensor, own: Units) -> torch.Tensor:
    layer = int(name.split(".")[0])
    if tensor.ndim == 2:
        return tensor[own[layer + 1][:, None], own[layer]]
    return tensor[own[layer + 1]] if tensor.ndim else tensor


def put_back(network: nn.Sequential, subnets: Sequence[Subnet], own: Sequence[Units]) -> None:
    """What each subnet has alone is its own; the biases of the outputs become the subnets' mean."""
    states = [subnet.net.state_dict() for subnet in subnets]
    for name, tensor in network.state_dict().items():
        layer = int(name.split(".")[0])
        if tensor.ndim == 1 and layer == len(network) - 1:
            tensor.copy_(torch.stack([state[name] for state in states]).mean(0))
            continue
        for state, mine in zip(states, own, strict=True):
            if tensor.ndim == 2:
                tensor[mine[layer + 1][:, None], mine[layer]] = state[name]
            elif tensor.ndim:
                tensor[mine[layer + 1]] = state[name]
