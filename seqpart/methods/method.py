"""What a method is: which phases a run goes through, and which loss each partition owns. Never a loop."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from seqpart.errors import OptionError
from seqpart.model.losses import LossFunction, scores_of
from seqpart.model.reductions import (
    BY_ROWS,
    Held,
    LossValue,
    Reduction,
    judged,
    refuse_parts,
    takes_classes_first,
)
from seqpart.schedule.lengths import AT_THE_END, Interval
from seqpart.schedule.phase import Phase, PhaseKind, Span
from seqpart.schedule.phases import Phases


class PartitionLoss(Protocol):
    """The loss that one partition owns."""

    nbytes: int
    """Memory that its fixed targets take on the device."""

    def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | LossValue:
        """Loss of `output`, (rows, *boundary), with `labels`, (rows, ...): the mean over the rows, a scalar, or a verdict."""

    def scores(self, output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(scores (n, classes, ...), labels (n, ...)), larger is likelier; None where the output says nothing of classes. A
        label below 0 counts for nothing."""


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
    updates: int | None = None
    """Of the whole training, where it is not `epochs` whole ones."""
    trainable: bool = True
    rows: int = 0
    """Of a micro-batch those that pass at once, where it is not all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """The second stage of a run: the true loss, back through the whole network."""

    epochs: int
    batch_size: int
    micro_batch: int
    frozen: frozenset[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Subnets:
    """Parts of the network that are trained in turn."""

    count: int
    whole: int
    """Partitions of the whole network: those of the parts come behind them."""
    local_steps: int
    """Updates of each in a round."""
    rows: int
    """Of each in an epoch."""
    all_rows: bool
    """Whether these are the same."""
    observed: int
    """The whole network's partitions up to the last that has running statistics; 0: none has, or they are right already."""
    observed_rows: int
    """Training rows from which these are made anew."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Ints that a method turns into phases."""

    train_rows: int
    test_rows: int
    """0: there is no test set."""
    shuffle: bool
    partitions: tuple[PartitionTraining, ...]
    clips: bool = False
    stays: frozenset[int] = frozenset()
    """In a streamed pass: partitions that stay on the device all the same."""
    keeps: frozenset[int] = frozenset()
    """In a whole-network pass: partitions that keep their graphs."""
    offloads: frozenset[int] = frozenset()
    """Those of them whose graphs do not wait on the device."""
    one_value: bool = True
    """Whether partitions hand each other one value, whose rows can wait in a file."""
    recovery: Recovery | None = None
    subnets: Subnets | None = None
    synthetic_inputs: bool = False
    """Later partitions train on the synthetic labels of the one before them, and not on its outputs."""
    tests: Interval = AT_THE_END
    """Of what is trained last, between two passes over the test rows. Updates are those of an exact method."""
    views: int = 1
    """Draws of each row whose outputs are kept for a later partition."""


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
    reduction: Reduction | None = BY_ROWS
    """Of the final loss; None on fake tensors, of which nothing can be counted."""
    objective: str
    kappa: float
    prototype_scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    name: str
    exact: bool
    """Whether it is back-propagation through the whole network."""
    alone: bool = False
    """Whether every partition has a loss of its own, and is trained alone."""
    cuts: bool
    """Whether it may cut the chain at all."""
    phases: Callable[[Workload], Phases]
    loss: Callable[[Targets], PartitionLoss | None]
    stays: bool = False
    """Whether all partitions are on the device at once."""
    in_pairs: bool = False
    """Whether partitions are given by the model, and all but the first and the last meet in pairs."""


def test_phases(work: Workload, *, stays: bool = False) -> tuple[Phase, ...]:
    """The test rows through one partition after the other; where all of them stay, or hand each other more than rows in a
    file hold, through all of them at once, as many rows at a time as an update has."""
    last, first = len(work.partitions) - 1, work.partitions[0]
    if not work.test_rows:
        return ()
    if last and (stays or not work.one_value):
        whole = Phase(
            kind=PhaseKind.TEST, partition=0, through=last, rows=work.test_rows, batch=first.micro_batch,
            micro_batch=first.micro_batch,
        )  # fmt: skip
        streams = frozenset(range(last + 1)) - work.stays
        return (whole if stays else replace(whole, batch=first.batch_size, breadth_first=True, streams=streams),)
    return tuple(
        Phase(kind=PhaseKind.TEST, partition=p, rows=work.test_rows, batch=part.micro_batch, micro_batch=part.micro_batch)
        for p, part in enumerate(work.partitions)
    )


class _WeightsAreThere(TorchFunctionMode):
    """Raises OptionError where a loss reads a weight of the model that is not on the device while it judges."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(one, nn.Parameter) and not one.numel() for one in tree_leaves((args, kwargs))):
            raise OptionError(
                "loss: it reads a weight of the model, which is not on the device while the last partition judges. Give "
                "--method full or checkpointed, where all weights are, or let their layers compute what it makes of them."
            )
        return func(*args, **(kwargs or {}))


class TrueLoss:
    """The user's loss at the end of the network."""

    nbytes = 0

    def __init__(self, function: LossFunction, reduction: Reduction | None) -> None:
        self._function, self._reduction, self._seen = function, reduction, False
        self._held: Held | None = None

    def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> LossValue:
        if self._seen or isinstance(output, FakeTensor):  # nothing is there while a plan is made
            return judged(self._function, self._reduction, output, labels)
        self._seen = True
        with _WeightsAreThere():
            return judged(self._function, self._reduction, output, labels)

    def hold(self, output: torch.Tensor, labels: torch.Tensor, span: Span, micro_batches: int) -> None:
        """Of an update whose micro-batches' losses are compared with that of the whole, where only a trial says that they add
        up. Raises OptionError behind the last one where they do not."""
        if self._reduction is None or not self._reduction.tried:
            return
        if self._held is None:
            self._held = Held(micro_batches)
        self._held.add(output, labels)
        if span.ends_update:
            held, self._held = self._held, None
            if not held.adds_up(self._function, self._reduction):
                refuse_parts(self._function, span.update_rows)

    def scores(self, output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        if (scores := getattr(self._function, "scores", None)) is not None:
            found: tuple[torch.Tensor, torch.Tensor] | None = scores(output, labels)
            return found
        ignored = self._reduction.ignored if self._reduction is not None else None
        ours = labels if ignored is None or ignored < 0 else labels.where(labels != ignored, -1)
        return scores_of(output, ours, first=takes_classes_first(self._function))
