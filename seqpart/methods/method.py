"""A method defines the phases of a run, and the loss that each partition owns. It is never a loop."""

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
    """Bytes of its fixed targets on the device."""

    def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | LossValue:
        """Returns the loss of `output` (rows, *boundary) with `labels` (rows, ...): a scalar mean over rows, or a LossValue."""

    def scores(self, output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns (scores (n, classes, ...), labels (n, ...)), larger is likelier; None if the output has no scores of classes.
        Labels below 0 are ignored."""


class SyntheticLoss(PartitionLoss, Protocol):
    """The loss of an inner partition, against synthetic labels."""

    def ideal(self, labels: torch.Tensor) -> torch.Tensor:
        """Returns the ideal output (rows, *boundary) for `labels`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionTraining:
    """Training settings that may differ from partition to partition."""

    epochs: int
    batch_size: int
    micro_batch: int
    updates: int | None = None
    """Updates of the whole training, if it is not a whole number of epochs."""
    trainable: bool = True
    rows: int = 0
    """Rows per forward pass, if fewer than the micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """The second stage of a run: the true loss, back-propagated through the whole network."""

    epochs: int
    batch_size: int
    micro_batch: int
    frozen: frozenset[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Subnets:
    """Parts of the network that are trained in turn."""

    count: int
    whole: int
    """Number of partitions of the whole network: those of the parts come after them."""
    local_steps: int
    """Updates of each part in a round."""
    rows: int
    """Rows of each part in an epoch."""
    all_rows: bool
    """True if all parts train on the same rows."""
    observed: int
    """Number of the whole network's partitions up to the last with running statistics; 0: none, or they are right already."""
    observed_rows: int
    """Training rows from which running statistics are recomputed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The sizes of a run, which a method turns into phases."""

    train_rows: int
    test_rows: int
    """0: there is no test set."""
    shuffle: bool
    partitions: tuple[PartitionTraining, ...]
    clips: bool = False
    stays: frozenset[int] = frozenset()
    """Partitions of a streamed pass that stay on the device."""
    keeps: frozenset[int] = frozenset()
    """Partitions of a whole-network pass that keep their graphs."""
    offloads: frozenset[int] = frozenset()
    """Those of `keeps` whose graphs are offloaded until backward."""
    one_value: bool = True
    """True if only one value crosses each boundary, whose rows can wait in a file."""
    recovery: Recovery | None = None
    subnets: Subnets | None = None
    synthetic_inputs: bool = False
    """True if later partitions train on the synthetic labels of the one before them instead of its outputs."""
    tests: Interval = AT_THE_END
    """Interval between two passes over the test rows, in the last training; in updates only for an exact method."""
    views: int = 1
    """Number of draws of each row whose outputs are kept for a later partition."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """Everything that a method's loss may depend on."""

    partition: int
    partitions: int
    output_shape: tuple[int, ...]
    """Shape of one row of the partition's output boundary."""
    label_shape: tuple[int, ...]
    """Shape of one row's labels: () if a row has one, (T,) if each of T positions has its own."""
    classes: int
    seed: int
    most: int
    """Most bytes of fixed targets; larger ones are drawn whenever they are needed."""
    device: torch.device
    final_loss: LossFunction
    reduction: Reduction | None = BY_ROWS
    """Reduction of the final loss; None on fake tensors, where nothing can be counted."""
    objective: str
    kappa: float
    prototype_scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    name: str
    exact: bool
    """True if it back-propagates the true loss through the whole network."""
    alone: bool = False
    """True if every partition has a loss of its own, and is trained alone."""
    cuts: bool
    """True if it may cut the chain at all."""
    phases: Callable[[Workload], Phases]
    loss: Callable[[Targets], PartitionLoss | None]
    stays: bool = False
    """True if all partitions are on the device at once."""
    in_pairs: bool = False
    """True if the model defines the partitions, and all but the first and the last are loaded in pairs."""


def test_phases(work: Workload, *, stays: bool = False) -> tuple[Phase, ...]:
    """Returns the passes of the test rows: through one partition after the other, or in one phase through all partitions, if
    all of them stay or boundaries have more than one value; a streamed phase then takes an update's rows at a time."""
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
    """Raises OptionError if a loss reads a weight of the model that is not on the device at that moment."""

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
        if self._seen or isinstance(output, FakeTensor):  # no weights are loaded while a plan is made
            return judged(self._function, self._reduction, output, labels)
        self._seen = True
        with _WeightsAreThere():
            return judged(self._function, self._reduction, output, labels)

    def hold(self, output: torch.Tensor, labels: torch.Tensor, span: Span, micro_batches: int) -> None:
        """Holds an update's outputs, to compare the losses of its micro-batches with that of the whole batch, if only a trial
        shows that they add up. Raises OptionError after the last micro-batch if they do not."""
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
