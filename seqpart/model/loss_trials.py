"""Tries a loss on a small batch, whole and in two parts, to find how the losses of micro-batches add up: see reductions.py."""

import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import mul
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import nn

from seqpart.errors import DataError, OptionError
from seqpart.model import losses
from seqpart.model.loss_probe import cure_of, judging, refuse_borrowed, seed_all
from seqpart.model.losses import LossFunction
from seqpart.model.reductions import (
    BY_ROWS,
    Kind,
    Reduction,
    add_up,
    finite_count,
    gradient_of,
    holds,
    is_ours,
    name_of,
    near,
    one_loss,
    pair_of,
    stated_reduction,
)

_TRIAL_BYTES = 4 << 20
_MOST_TRIAL_BYTES = 64 << 20
_VALUES = 32
"""Most different labels that are tried."""
_FEW_LABELS = 1 << 16
"""Most labels of which all values are found: sorting them takes a copy."""
_LOOKED_AT = 1 << 22
"""Most numbers that are searched for them, in labels as large as images."""

_REMEMBERS = (
    "the same outputs have another loss when it is called again. What it counts or remembers from call to call is in no "
    "checkpoint, and changed by trials. Set such a number between updates: in a callback's on_step, or in a loop of your own."
)

_CURE = (
    "What its mean is divided by must be known, or training would depend on the memory limit: let it return (sum, count), give "
    "it an attribute `counts`, a function from labels to what their mean is divided by, or take one of torch's "
    "own (nn.CrossEntropyLoss(weight=w), or functools.partial(F.cross_entropy, weight=w) in the place of a lambda)."
)


def reduction_of(
    loss: LossFunction, shape: tuple[int, ...], dtype: torch.dtype, labels: torch.Tensor, tested: torch.Tensor, *,
    batch: int | None = None, chosen: bool = False, complete: tuple[bool, bool] = (True, True),
) -> Reduction:  # fmt: skip
    """The reduction of `loss` of outputs (rows, *shape) with these training and test labels.

    batch: rows of the batches that may be divided; None: none is, and then any loss will do. chosen: true if the user gave the
    rows of micro-batches: then a number of the batch may be one of each micro-batch. complete: False if other training labels,
    or test labels, may come than these. Raises OptionError where it cannot be found, DataError where the loss fails.
    """
    known = stated_reduction(loss)
    if known is None or (known.counts is not None and not is_ours(known.counts)):
        if getattr(loss, "from_layers", False) and batch is not None and not chosen:
            raise _of_the_batch(loss, batch)
        found = _tried(loss, known, shape, dtype, labels, batch, chosen)
        return replace(found, tried=False) if chosen and getattr(loss, "of_batch", False) else found
    if is_ours(known.counts) and labels.is_floating_point() and (tested.is_floating_point() or not len(tested)):
        return Reduction(stated=known.stated)  # of probabilities, whatever the weights
    alike = is_ours(known.counts) and known.counts.keywords["weight"] is None
    if not alike or holds(labels, known.ignored):
        return known
    if not complete[0]:  # what counts of a row in units of the first one's: the bits of a mean over rows while all count
        assert is_ours(known.counts)
        return replace(known, counts=functools.partial(known.counts, per_row=float(known.counts(labels[:1]))))
    # The bits of a plain loop, whatever the test rows are.
    others = known if holds(tested, known.ignored) or not complete[1] else None
    return Reduction(ignored=known.ignored, of_tests=others, stated=known.stated)


def _tried(
    loss: LossFunction, known: Reduction | None, shape: tuple[int, ...], dtype: torch.dtype, labels: torch.Tensor,
    batch: int | None, chosen: bool,
) -> Reduction:  # fmt: skip
    try:
        found = tried(loss, known, shape, dtype, labels)
    except (DataError, _CannotBeTried) as error:
        if batch is None:
            return Reduction(Kind.WHOLE)
        if isinstance(error, _CannotBeTried):
            raise OptionError(error.with_flags) from None
        cure = _one_shape(shape, labels) or (
            f"It was tried with a few rows: one that takes whole batches alone goes with --micro-batch-size {batch}."
        )
        raise DataError(f"{error} {cure}") from error
    if found.kind is Kind.WHOLE and batch is not None and getattr(loss, "of_batch", False):
        if not chosen:
            raise _of_the_batch(loss, batch)
        return BY_ROWS
    if found.kind is Kind.WHOLE and batch is not None:
        cure = _one_shape(shape, labels) or (
            f"{_CURE} Or give --micro-batch-size {batch}: a batch that is not divided may have any loss."
        )
        raise OptionError(
            f"loss {name_of(loss)}: the loss of a batch is neither the mean of its parts' by their rows nor their sum, or its "
            "gradient is not (a mask, ignored labels, weights, rows that are compared with each other, a loss divided by its "
            f"own value?). {cure}"
        )
    return found


def refuse_other_labels(
    loss: LossFunction, reduction: Reduction, shape: tuple[int, ...], dtype: torch.dtype, labels: torch.Tensor
) -> None:
    """Raises OptionError for labels with which a trial finds that parts of a batch add up otherwise than `reduction` says."""
    try:
        known = reduction if reduction.counts is not None else None
        found = tried(loss, known, shape, dtype, labels, wanted=reduction.kind)
    except (DataError, OptionError):  # what it says of itself was confirmed before
        return
    if found.kind is not reduction.kind:
        raise OptionError(
            f"loss {name_of(loss)}: the loss of this batch is not that of its micro-batches added up, as it was with the "
            f"example's labels (a mask, or ignored labels, which those had not?). {_CURE}"
        )


def _of_the_batch(loss: LossFunction, batch: int) -> OptionError:
    return OptionError(
        f"loss {name_of(loss)}: it takes a number of the whole batch (a balance of experts, a deviation, scores of all pairs "
        "of rows?), which is neither the mean of its parts' by their rows nor their sum. So training would depend on the "
        "micro-batch, and a plan chooses it by the limit. "
        f"Give --micro-batch-size {batch}, so that no batch is divided; or a smaller one: the number is then computed for each "
        "micro-batch and averaged by rows, as where gradients are accumulated."
    )


def _one_shape(shape: tuple[int, ...], labels: torch.Tensor) -> str:
    """The cure where outputs and labels of a row differ by dimensions of 1, so that torch compares each with all; else ""."""
    positions = tuple(labels.shape[1:])
    if positions == shape or losses.without_ones(positions) != losses.without_ones(shape):
        return ""
    return (
        f"A row has outputs of shape {shape} and labels of shape {positions}: torch compares each with those of all "
        f"rows. Give labels of the same shape: labels.view{(-1, *shape)}."
    )


def tried(
    loss: LossFunction, reduction: Reduction | None, shape: tuple[int, ...], dtype: torch.dtype, labels: torch.Tensor,
    wanted: Kind = Kind.ROWS,
) -> Reduction:  # fmt: skip
    """Finds by a trial how parts of a batch add up to the whole: outputs (rows, *shape) are random, labels occur in the data.

    reduction: what the loss says of itself, to be confirmed. wanted: what is found where several fit. Raises OptionError where
    that is wrong, and where nothing can be tried; DataError where the loss fails.
    """
    own = copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss
    trial = _Trial(own, reduction, shape, dtype if dtype == torch.float64 else torch.float32, labels)
    quiet = warnings.catch_warnings(action="ignore")  # of torch's losses: shapes that differ
    with torch.random.fork_rng(devices=[]), judging(name_of(loss), shape, "", values=True), quiet:
        torch.manual_seed(0)
        return trial.result(wanted)


class _CannotBeTried(OptionError):
    """Raised for a loss that cannot be tried; not an error where no batch is divided."""


class _Tried(NamedTuple):
    """The loss of some rows, the weight that it counted, or None, and its gradient by their outputs."""

    loss: float
    counted: float | None
    gradient: torch.Tensor


class _Trial:
    def __init__(
        self, loss: Any, reduction: Reduction | None, shape: tuple[int, ...], dtype: torch.dtype, labels: torch.Tensor
    ) -> None:
        self._loss, self._known, self._dtype = loss, reduction, dtype
        self._packed, self._example = getattr(loss, "takes_bytes", False), getattr(loss, "example", torch.clone)
        self._shape, self._labels, self._rows = shape, labels, (2, 4)
        nbytes = math.prod(shape) * dtype.itemsize
        positions = () if self._packed else labels.shape[1:]
        if (
            6 * nbytes > _TRIAL_BYTES
            and positions
            and shape[: len(positions)] == tuple(positions)
            and len(shape) > len(positions)
        ):
            keep = max(1, _TRIAL_BYTES * positions[0] // (6 * nbytes))
            self._shape, self._labels = (keep, *shape[1:]), labels[:, :keep]
        elif 6 * nbytes > _TRIAL_BYTES:
            self._rows = (1, 1)
        self._too_large = sum(self._rows) * math.prod(self._shape) * dtype.itemsize > _MOST_TRIAL_BYTES

    def result(self, wanted: Kind) -> Reduction:
        if self._too_large:
            if self._known is None:
                raise _CannotBeTried(f"loss {name_of(self._loss)}: its outputs are too large for a trial. {_CURE}")
            return self._known
        change = self._outputs()
        if self._differs(0, 0):
            raise OptionError(f"loss {name_of(self._loss)}: {_REMEMBERS}")
        kinds, pairs = set(Kind) - {Kind.WHOLE}, False
        for labels, like in self._cases():
            output = change(like(torch.randn(len(labels), *self._shape, dtype=self._dtype)))
            at = self._rows[0]
            tries = [self._try(output[a:b], labels[a:b]) for a, b in ((0, None), (0, at), (at, None))]
            if like is not torch.positive and not math.isfinite(tries[0].loss):
                continue
            pairs = pairs or tries[0].counted is not None
            kinds &= self._fitting(tries, at / len(labels))
        if not kinds and self._differs(0, 1):
            if self._known is None:
                raise _CannotBeTried(f"loss {name_of(self._loss)}: it draws random numbers, so it cannot be tried. {_CURE}")
            return self._known
        if self._known is not None and Kind.COUNTED not in kinds:
            raise OptionError(
                f"loss {name_of(self._loss)}: `counts` says what its mean is divided by, and on a small batch it did not add "
                "up: the losses of two parts, weighted by their counts, are not the loss of the whole."
            )
        if self._known is not None:
            return replace(self._known, tried=True)
        if pairs and Kind.COUNTED not in kinds:
            raise OptionError(
                f"loss {name_of(self._loss)}: it returned (sum, count), and one of them is not the sum of its parts'."
            )
        order = (wanted, Kind.ROWS, Kind.COUNTED, Kind.SUM)
        first = next((kind for kind in order if kind in kinds and (kind is Kind.COUNTED) == pairs), Kind.WHOLE)
        return Reduction(first, tried=first is not Kind.WHOLE)

    def _cases(self) -> Iterator[tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]]:
        """(labels, change of the random outputs). The first labels are also tried with confident, uninformative and sorted
        outputs, for a loss that depends on how sure a network is, or on its best and worst rows."""
        for number, labels in enumerate(self._batches()):
            yield labels, torch.positive
            if not number:
                yield labels, lambda output: 10 * output
                yield labels, lambda output: output / 100
                yield labels, lambda output: output.sort(0).values

    def _fitting(self, tries: list["_Tried"], share: float) -> set[Kind]:
        """Kinds by which the parts add up to the whole, the first of `tries`. share: the first part's share of the rows."""
        counts = [one.counted for one in tries if one.counted is not None]
        factors = {Kind.ROWS: [1.0, share, 1 - share], Kind.SUM: [1.0] * 3}
        if len(counts) == 3 and near(counts[0], counts[1] + counts[2], counts[0]):
            # A loss that returns (sum, count) has given the sum already.
            factors[Kind.COUNTED] = [1.0] * 3 if self._known is None else counts
        values, gradients = [one.loss for one in tries], [one.gradient for one in tries]
        return {kind for kind, by in factors.items() if add_up([*map(mul, values, by)], [*map(mul, gradients, by)])}

    def _try(self, output: torch.Tensor, labels: torch.Tensor) -> "_Tried":
        """Tries the loss once; a mean over nothing is 0."""
        count, output = None, output.detach().requires_grad_()
        if self._known is not None and self._known.counts is not None:
            count = finite_count(self._known.counts(labels))
            if not count:
                return _Tried(0.0, count, torch.zeros_like(output))
        found = self._loss(self._example(output), labels.clone())  # it may write into them
        refuse_borrowed(name_of(self._loss), found)
        if isinstance(found, tuple):
            found, count = pair_of(found)
        loss = one_loss(found)
        return _Tried(float(loss.detach()), count, gradient_of(loss, output))

    def _differs(self, *seeds: int) -> bool:
        """True if the loss of the same outputs differs between these seeds."""
        output, labels = self._outputs()(torch.randn(sum(self._rows), *self._shape, dtype=self._dtype)), next(self._batches())
        one, other = [(seed_all(seed), self._try(output, labels).loss)[1] for seed in seeds]
        return abs(one - other) > 1e-6 * abs(one)

    def _outputs(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The change of random numbers with which this loss is finite: none (scores), probabilities, or their logarithms."""
        output, labels, problem = torch.randn(sum(self._rows), *self._shape, dtype=self._dtype), next(self._batches()), ""
        for change in (torch.positive, torch.sigmoid, functools.partial(F.log_softmax, dim=-1)):
            try:
                if math.isfinite(self._try(change(output), labels).loss):
                    return change
            except OptionError:
                raise
            except Exception as error:
                problem = problem or str(error)
        if problem:
            raise DataError(f"the loss does not take outputs of shape {self._shape}: {problem.rstrip('.')}.{cure_of(problem)}")
        raise _CannotBeTried(f"loss {name_of(self._loss)}: it is not finite for random outputs, so it cannot be tried. {_CURE}")

    def _batches(self) -> Iterator[torch.Tensor]:
        """Labels of small batches: real rows, and for each label that occurs some rows of that label, then real ones."""
        labels, (few, more) = self._labels, self._rows
        places = torch.linspace(0, len(labels) - 1, few + more, dtype=torch.float64).long()
        if self._packed:  # no number among their bytes is a label
            yield from (labels[torch.cat([row[None], places[1:]])] for row in _ends(self._loss, labels))
            yield from (labels[(places + shift) % len(labels)] for shift in range(_VALUES))
            return
        real = labels[places].to(losses.label_dtype(labels))
        yield real
        most = max(few + more, min(4096, _LOOKED_AT * len(labels) // max(1, labels.numel())))
        some = labels[torch.linspace(0, len(labels) - 1, min(len(labels), most), dtype=torch.float64).long()]
        values, counts = torch.unique(some, return_counts=True)
        ends = torch.stack(torch.aminmax(labels))
        for value in torch.cat([ends, values[counts.argsort(descending=True)]])[:_VALUES]:
            yield torch.cat([torch.full_like(real[:few], value.item()), real[few:]])


@dataclass(frozen=True, slots=True)
class LabelValues:
    """Values among labels: all of them if they are few whole numbers, else the lowest and the highest."""

    values: frozenset[float]
    are_all: bool

    @classmethod
    def of(cls, labels: torch.Tensor) -> Self:
        labels = comparable(labels)
        if labels.numel() <= _FEW_LABELS and not labels.is_floating_point():
            return cls(frozenset(map(float, torch.unique(labels))), True)
        return cls(frozenset(map(float, torch.aminmax(labels))), False)

    def holds(self, other: Self) -> bool:
        """True if none of the other's values is new."""
        if self.are_all and other.are_all:
            return other.values <= self.values
        return not self.are_all and min(self.values) <= min(other.values) and max(other.values) <= max(self.values)

    def with_others(self, other: Self) -> Self:
        values = self.values | other.values
        few = self.are_all and other.are_all and len(values) <= _VALUES
        return type(self)(values if few else frozenset({min(values), max(values)}), few)


def comparable(labels: torch.Tensor) -> torch.Tensor:
    """Returns labels in a type that has a lowest and a highest."""
    return torch.view_as_real(labels) if labels.is_complex() else labels.byte() if labels.dtype == torch.bool else labels


def _ends(loss: Any, labels: torch.Tensor) -> Iterator[torch.Tensor]:
    """Numbers of rows with the lowest, and the highest, of each of the labels of a row, a tensor of one number each."""
    flat = ([comparable(part).reshape(len(some), -1) for part in loss.parts(some)] for some in torch.split(labels, 1024))
    pieces = [[(part.amin(1), part.amax(1)) for part in parts] for parts in flat]
    for one in zip(*pieces, strict=True):
        lowest, highest = map(torch.cat, zip(*one, strict=True))
        yield lowest.argmin()
        yield highest.argmax()
