"""A method defines the phases of a run, and the loss that each partition owns. It is never a loop."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor

from seqpart.config import Config
from seqpart.data.row_packs import RowPack
from seqpart.data.source import Source
from seqpart.data.splits import Split
from seqpart.errors import ModelError, OptionError
from seqpart.model.blocks import Chain
from seqpart.model.losses import LossFunction, LossName, scores_of
from seqpart.model.reductions import BY_ROWS, Held, LossValue, Reduction, loss_value, refuse_parts, takes_classes_first
from seqpart.model.tensors import RefuseAway
from seqpart.schedule.lengths import AT_THE_END, Interval
from seqpart.schedule.phase import Order, Phase, PhaseKind, Span
from seqpart.schedule.phases import Phases


class PartitionLoss(Protocol):
    """The loss that one partition owns."""

    nbytes: int
    """Bytes of its fixed targets on the device."""

    def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | LossValue:
        """Returns the loss of `output` (rows, *boundary) with `labels` (rows, ...): a scalar mean over rows, or a LossValue."""

    def scores(self, output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns (scores (n, classes, ...), labels (n, ...)), larger is likelier, or (likeliest classes (n,), labels (n,));
        None if the output has no scores of classes. Labels below 0 are ignored."""


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
    defers_updates: bool = False
    stays: frozenset[int] = frozenset()
    """Partitions of a streamed pass that stay on the device."""
    keeps: frozenset[int] = frozenset()
    """Partitions of a whole-network pass that keep their graphs."""
    offloads: frozenset[int] = frozenset()
    """Partitions of `keeps` whose graphs are offloaded until backward."""
    host_steps: frozenset[int] = frozenset()
    """Partitions whose optimizer step is computed on the host."""
    rank: int = 0
    ranks: int = 1
    """Number of this process, and of all that share the micro-batches of each update."""
    divides_state: bool = False
    """True if each rank has the optimizer state of some partitions alone, where the schedule lets it."""
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
    config: Config
    """The options of the run, among them the method's own."""


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
        return (whole if stays else replace(whole, batch=first.batch_size, order=Order.PARTITIONS, streams=streams),)
    return tuple(
        Phase(kind=PhaseKind.TEST, partition=p, rows=work.test_rows, batch=part.micro_batch, micro_batch=part.micro_batch)
        for p, part in enumerate(work.partitions)
    )


_LOSS_READS_WEIGHTS = partial(
    OptionError,
    "loss: it reads a weight of the model, which is not on the device while the loss is computed. Give --method full or "
    "checkpointed, which keep all weights there, or let its layer compute what the loss needs of it.",
)


class TrueLoss:
    """The user's loss at the end of the network."""

    nbytes = 0

    def __init__(self, function: LossFunction, reduction: Reduction | None) -> None:
        self._function, self._reduction, self._seen = function, reduction, False
        self._held: Held | None = None

    def __call__(self, output: torch.Tensor, labels: torch.Tensor, span: Span | None = None) -> LossValue:
        """span: the micro-batch's place in its update."""
        self._reduction = self._reduction and self._reduction.now(self._function)
        if self._seen or isinstance(output, FakeTensor):  # no weights are loaded while a plan is made
            return loss_value(self._function, self._reduction, output, labels, span)
        self._seen = True
        with RefuseAway(_LOSS_READS_WEIGHTS):
            return loss_value(self._function, self._reduction, output, labels, span)

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

    @property
    def takes_all(self) -> bool:
        """True if the loss is one of several tensors, joined in one."""
        return hasattr(self._function, "returned")

    def returned(self, output: torch.Tensor) -> Any:
        """Returns what the model returned, or the logits if it computes its loss, from the output (rows, ...) of the chain."""
        own: Any = self._function
        if self.takes_all:
            return own.returned(output)
        return own.scored(output) if hasattr(own, "scored") else output

    def row_dims(self, output: torch.Tensor) -> list[int | None]:
        """Returns the dimension of the rows of each tensor that `returned` returns, in order; None where it has none."""
        own: Any = self._function
        return own.row_dims(output) if self.takes_all else [0]

    def scores(self, output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        if (scores := getattr(self._function, "scores", None)) is not None:
            found: tuple[torch.Tensor, torch.Tensor] | None = scores(output, labels)
            return found
        ignored = self._reduction.ignored if self._reduction is not None else None
        ours = labels if ignored is None or ignored < 0 else labels.where(labels != ignored, -1)
        return scores_of(output, ours, first=takes_classes_first(self._function))


class Method(ABC):
    """A way of training: its phases, the loss of each partition, and what it refuses.

    A method of your own is a subclass, made known by `seqpart.methods.register`; all that it leaves open is done as in exact
    training.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = True
    """True if it back-propagates the true loss through the whole network."""
    alone: ClassVar[bool] = False
    """True if every partition has a loss of its own, and is trained alone."""
    cuts: ClassVar[bool] = True
    """True if it may cut the chain at all."""
    stays: ClassVar[bool] = False
    """True if all partitions are on the device at once."""
    in_pairs: ClassVar[bool] = False
    """True if the model defines the partitions, and all but the first and the last are loaded in pairs."""
    has_subnets: ClassVar[bool] = False
    """True if it trains subnets that are cut out of the network."""
    divides_weights: ClassVar[bool] = False
    """True if it cuts weights into pieces that are updated one by one."""
    options: ClassVar[tuple[type[Any], ...]] = ()
    """Groups of options that go with this method only."""
    fixed: ClassVar[frozenset[str]] = frozenset()
    """Options that a resumed run of other methods may change."""
    loss_name: ClassVar[LossName | None] = None
    """The loss, where none is given."""
    unverified: ClassVar[str] = ""
    """Why its bits cannot be compared with those of full training, in words; "" if they can."""

    @abstractmethod
    def phases(self, work: Workload) -> Phases:
        """Returns the phases of a run of these sizes."""

    def loss(self, targets: Targets) -> PartitionLoss | None:
        """Returns the loss that a partition owns: here the true one for the last, and None for the others."""
        return TrueLoss(targets.final_loss, targets.reduction) if targets.partition == targets.partitions - 1 else None

    def contradictions(self, config: Config) -> Iterator[str]:
        """Yields what does not go together among its options, in words."""
        yield from ()

    def trains_independently(self, config: Config) -> bool:
        """True if each of several processes trains subnets or partitions of its own, on whole batches."""
        return self.has_subnets

    def shuffles(self, config: Config) -> bool:
        """True if rows come in another order in each epoch unless the options say otherwise."""
        return True

    def refuse_source(self, source: Source) -> None:
        """Raises OptionError for rows read anew that it cannot train on."""
        if not self.exact and source.rows != source.count:
            raise OptionError(
                f"--method {self.name} needs all {source.count} rows in every epoch, and the loader gives {source.rows} (by "
                "its sampler, or drop_last). Give a loader without, or another method."
            )

    def refuse_model(self, chain: Chain, classes: int, splits: Sequence[Split], loss: LossFunction | None) -> None:
        """Raises ModelError or DataError for a model or rows that it cannot train. loss: the user's."""
        if self.alone and any(block.tied for block in chain):
            raise ModelError(
                f"method {self.name} trains each partition alone, so blocks must not share a parameter. Use --method auto."
            )

    def why_no_cut_after(self, config: Config, pack: RowPack, shape: tuple[int, ...], label_shape: tuple[int, ...]) -> str:
        """Why no partition that is trained alone may end with outputs of this shape, in words; "" if one may."""
        return pack.why_not

    def rows_per_pass(
        self, loss: LossFunction, splits: Sequence[Split], *, batch: int, epochs: int, key: tuple[int | str, ...] | None
    ) -> Callable[[int], int]:
        """Returns the function from a micro-batch to its most rows per forward pass.

        key: seeds the row order, without partition and epoch; None: rows are not shuffled.
        """
        return lambda micro_batch: micro_batch

    def library_bytes(self, rows: int) -> int:
        """Returns bytes that kernels keep for the numbers of rows, up to `rows`, of its forward passes."""
        return 0

    def idle_options(self, config: Config, partitions: int) -> list[str]:
        """Returns which of its options have no effect on so many partitions, in words."""
        return []
