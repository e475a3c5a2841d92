"""What a method is: which phases a run goes through, and which loss each partition owns. Never a loop."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from seqpart.losses import LossFunction, scores_of
from seqpart.schedule import Phase, PhaseKind


class PartitionLoss(Protocol):
    """The loss that one partition owns."""

    nbytes: int
    """Memory that its fixed targets take on the device."""

    def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean loss over `output`, (rows, *boundary), with `labels`, (rows, ...); a scalar."""

    def scores(self, output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(scores (n, classes), labels (n,)), larger is likelier; None where the output says nothing of classes."""


class SyntheticLoss(PartitionLoss, Protocol):
    """The loss of an inner partition, against synthetic labels."""

    def ideal(self, labels: torch.Tensor) -> torch.Tensor:
        """The output (rows, *boundary) that it asks for, for `labels`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionTraining:
    """How one partition is trained: the settings that may differ from partition to partition."""

    epochs: int
    batch_size: int
    micro_batch: int
    trainable: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """The second stage of a run: the true loss, back through the whole network."""

    epochs: int
    batch_size: int
    micro_batch: int
    frozen: frozenset[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Ints that a method turns into phases."""

    train_rows: int
    test_rows: int
    shuffle: bool
    partitions: tuple[PartitionTraining, ...]
    clips: bool = False
    keeps_graph_from: int | None = None
    """In a whole-network pass: partitions from this one on keep their graphs."""
    recovery: Recovery | None = None
    synthetic_inputs: bool = False
    """Later partitions train on the synthetic labels of the one before them, and not on its outputs."""
    test_every: int | None = None
    """Epochs of what is trained last, between two passes over the test rows; None: at the end alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """What a method's loss may depend on."""

    partition: int
    partitions: int
    output_shape: tuple[int, ...]
    """Of one row of the partition's output boundary."""
    label_shape: tuple[int, ...]
    """Of one row's labels: () where a row has one, (T,) where each of T positions has its own."""
    classes: int
    seed: int
    most: int
    """Bytes that fixed targets may take; beyond that they are drawn whenever they are needed."""
    device: torch.device
    final_loss: LossFunction
    objective: str
    kappa: float
    prototype_scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    name: str
    exact: bool
    """Whether it is back-propagation through the whole network; otherwise every partition has a loss of its own."""
    cuts: bool
    """Whether it may cut the chain at all."""
    phases: Callable[[Workload], tuple[Phase, ...]]
    loss: Callable[[Targets], PartitionLoss | None]
    stays: bool = False
    """Whether all partitions are on the device at once."""


def test_phases(work: Workload, *, stays: bool = False) -> list[Phase]:
    """The test rows through one partition after the other, or where all of them stay through all at once."""
    if stays and len(work.partitions) > 1:
        rows, micro_batch = work.test_rows, work.partitions[0].micro_batch
        last = len(work.partitions) - 1
        return [Phase(kind=PhaseKind.TEST, partition=0, through=last, rows=rows, batch=micro_batch, micro_batch=micro_batch)]
    return [
        Phase(kind=PhaseKind.TEST, partition=p, rows=work.test_rows, batch=part.micro_batch, micro_batch=part.micro_batch)
        for p, part in enumerate(work.partitions)
    ]


def with_tests(passes: Sequence[Phase], tests: Sequence[Phase], every: int | None) -> Iterator[Phase]:
    """Training passes with the `tests` behind each `every`-th of them, and behind the last."""
    for number, phase in enumerate(passes, 1):
        yield phase
        if every is not None and number % every == 0 and number < len(passes):
            yield from tests
    yield from tests


class TrueLoss:
    """The user's loss at the end of the network."""

    nbytes = 0

    def __init__(self, function: LossFunction) -> None:
        self._function = function

    def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self._function(output, labels)

    def scores(self, output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        return scores_of(output, labels)
