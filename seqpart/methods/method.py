"""What a method is: which phases a run goes through, and which loss each partition owns. Never a loop."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from seqpart.schedule import Phase

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(output (rows, ...), labels (rows,)) -> mean loss over the rows, a scalar."""


class PartitionLoss(Protocol):
    """The loss that one partition owns."""

    nbytes: int
    """Memory that its fixed targets take on the device."""

    def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean loss over the rows of `output`, (rows, *boundary), with `labels`, (rows,); a scalar."""

    def scores(self, output: torch.Tensor) -> torch.Tensor | None:
        """(rows, classes), larger is likelier; None where the output says nothing of classes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionTraining:
    """How one partition is trained: the settings that may differ from partition to partition."""

    epochs: int
    batch_size: int
    micro_batch: int
    trainable: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Ints that a method turns into phases."""

    train_rows: int
    test_rows: int
    shuffle: bool
    partitions: tuple[PartitionTraining, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """What a method's loss may depend on."""

    partition: int
    partitions: int
    output_shape: tuple[int, ...]
    """Of one row of the partition's output boundary."""
    classes: int
    seed: int
    device: torch.device
    final_loss: LossFunction
    objective: str
    kappa: float
    prototype_scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    name: str
    exact: bool
    cuts: bool
    """Whether it may cut the chain at all."""
    phases: Callable[[Workload], tuple[Phase, ...]]
    loss: Callable[[Targets], PartitionLoss]


class TrueLoss:
    """The user's loss at the end of the network."""

    nbytes = 0

    def __init__(self, function: LossFunction) -> None:
        self._function = function

    def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self._function(output, labels)

    def scores(self, output: torch.Tensor) -> torch.Tensor | None:
        return output if output.ndim == 2 else None
