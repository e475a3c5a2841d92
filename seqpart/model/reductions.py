"""Finds what a loss divides by, so that the micro-batches of an update add up to the loss of the whole batch.

    ROWS     a mean over rows, or over equally many numbers of each: a micro-batch counts by its rows
    COUNTED  a mean over what counts (labels that are not ignored, weights of classes, a mask): by what it counted
    SUM      a sum: micro-batches are added as they are
    WHOLE    none of these: right only where a batch is not divided

A loss that counts all micro-batches alike would depend on their size, and so on the memory limit. torch's own losses say what
they divide by, and a user's loss may; any other is tried on a small batch, whole and in two parts. A loss that depends on the
outputs (the hardest rows of a batch, a mask of confident ones) may add up there and not in training, so it is checked against
outputs of whole batches now and then (`Held`). Trials are in loss_trials.py.
"""

import enum
import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

from seqpart.errors import OptionError
from seqpart.model import losses
from seqpart.model.inspection import is_plain, settings_of
from seqpart.model.loss_chunks import LossInChunks
from seqpart.model.loss_probe import generators_left_alone
from seqpart.model.losses import LossFunction
from seqpart.model.tensors import tensors_of
from seqpart.schedule.phase import Span

Counts = Callable[[torch.Tensor], Any]
"""A function from labels (rows, ...) to the divisor of a mean over them: a number, or a tensor of one."""


class Kind(enum.Enum):
    ROWS = "a mean over rows"
    COUNTED = "a mean over what counts"
    SUM = "a sum"
    WHOLE = "neither"


@dataclass(frozen=True, slots=True)
class Reduction:
    kind: Kind = Kind.ROWS
    counts: Counts | None = None
    """Counts for COUNTED; None where the loss itself returns (sum, count)."""
    ignored: int | None = None
    """The label that does not count."""
    tried: bool = False
    """True if it was found by a trial, and is to be checked against real outputs."""
    of_tests: "Reduction | None" = None
    """The reduction of passes without gradients, if their labels need another than the training rows'."""
    stated: "tuple[torch.Tensor | None, int, str] | None" = None
    """(class weights, ignored label, reduction) that torch's own loss had when this was found."""

    def now(self, loss: LossFunction) -> "Reduction":
        """Returns the reduction of `loss`, to which the user may have given others since: class weights in later epochs."""
        known = stated_reduction(loss)
        if known is None or known.stated is None:
            return self
        (weight, *others), (old, *before) = known.stated, self.stated or (None,)
        return self if weight is old and others == before else known


BY_ROWS = Reduction()


class LossValue(NamedTuple):
    """The loss of one micro-batch."""

    loss: torch.Tensor
    """A scalar: the mean, or the sum for SUM."""
    weight: float
    """Divisor of the mean."""
    kind: Kind = Kind.ROWS
    parts: Mapping[str, torch.Tensor] = MappingProxyType({})
    """The losses that it is the sum of, by name."""

    @property
    def total(self) -> torch.Tensor:
        """Sum of losses without a graph, in float64, for the mean over a pass: bfloat16 stops to grow after a few hundred."""
        return self._total(self.loss)

    @property
    def totals(self) -> dict[str, torch.Tensor]:
        return {name: self._total(part) for name, part in self.parts.items()}

    def _total(self, loss: torch.Tensor) -> torch.Tensor:
        return loss.detach().double() * self.factor

    @property
    def factor(self) -> float:
        """Factor of the loss in a sum over micro-batches."""
        return 1.0 if self.kind is Kind.SUM else self.weight


def loss_value(
    loss: LossFunction, reduction: Reduction | None, output: torch.Tensor, labels: torch.Tensor, span: Span | None = None
) -> LossValue:
    """Computes `loss` of one micro-batch. If nothing in it counts, loss and gradients are zero.

    reduction: None for fake tensors, which can be differentiated but not counted. span: the micro-batch's place in an update
    whose gradients are computed.
    """
    if reduction is not None and reduction.of_tests is not None and not torch.is_grad_enabled():
        reduction = reduction.of_tests
    count = None if reduction is None or reduction.counts is None else finite_count(reduction.counts(labels))
    if isinstance(loss, LossInChunks):
        if reduction is not None and span is not None and torch.is_grad_enabled():
            weight = len(labels) if count is None else count
            loss = functools.partial(loss, part=share_of_update(LossValue(output, weight, reduction.kind), span)[0])
    elif count == 0:  # 0 / 0
        return LossValue(output.flatten()[:0].sum(), 0.0, Kind.COUNTED)
    found: Any = loss(output, labels)
    if reduction is None:
        return LossValue(total_of(found), len(labels))
    if reduction.kind is not Kind.COUNTED:
        return LossValue(one_loss(found), len(labels), reduction.kind, _parts(found))
    if count is not None:
        return LossValue(one_loss(found), count, Kind.COUNTED, _parts(found))
    total, count = pair_of(found)
    parts = {name: part / (count or 1.0) for name, part in _parts(found[0]).items()}
    return LossValue(total / (count or 1.0), count, Kind.COUNTED, parts)


def share_of_update(value: LossValue, span: Span) -> tuple[float, float]:
    """Returns (factor of a micro-batch's loss in its update, the weight it counted if the update is divided by their sum)."""
    part = (span.stop - span.start) / span.update_rows
    if part < 1.0 and value.kind is Kind.COUNTED:
        return value.weight / span.update_rows, value.weight
    if part < 1.0 and value.kind is Kind.WHOLE:
        raise OptionError(
            "memory ran out for a whole batch, and its loss is not the sum of its micro-batches': give a larger --mem-limit, "
            "or a smaller --batch-size with the same --micro-batch-size."
        )
    return 1.0 if value.kind is Kind.SUM else part, 0.0


def total_of(found: Any) -> torch.Tensor:
    """Returns the number to be differentiated of what a loss returned: one, (sum, count), or a dict of several."""
    return one_loss(found[0] if isinstance(found, tuple) else found)


def _parts(value: Any, within: str = "") -> dict[str, torch.Tensor]:
    """Returns the losses in a dict of them, or in dicts in it, by name; an empty dict for one loss."""
    if not isinstance(value, Mapping):
        return {within: value} if within else {}
    found = {name: _parts(part, f"{within}/{name}" if within else str(name)) for name, part in value.items()}
    return {name: part for one in found.values() for name, part in one.items()}


def one_loss(value: Any) -> torch.Tensor:
    if isinstance(value, Mapping) and "loss" in value:
        return one_loss(value["loss"])
    if isinstance(value, Mapping) and value:
        first, *others = [one_loss(part) for part in value.values()]
        return sum(others, start=first)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"it returned {found}; expected one number (reduction='mean' or 'sum'), or (sum, count)")
    return value


def pair_of(value: Any) -> tuple[torch.Tensor, float]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise ValueError("it returned (sum, count) before, and now it does not")
    return one_loss(value[0]), finite_count(value[1])


def finite_count(count: Any) -> float:
    number = float(count.detach() if isinstance(count, torch.Tensor) else count)
    if not 0 <= number < math.inf:
        raise ValueError(f"it counted {number}; expected a finite number, zero or above")
    return number


def takes_classes_first(loss: LossFunction) -> bool:
    """True for torch's own loss, whose scores have their classes in dimension 1."""
    return _of_torch(loss) is not None and losses.plain_of(loss) not in (losses.token_cross_entropy, losses.partially_separable)


def stated_reduction(loss: LossFunction) -> Reduction | None:
    """The reduction that is known without a trial; None for a loss that must be tried."""
    if loss in losses.OF_NUMBERS:
        return Reduction()
    if (known := _of_torch(loss)) is not None:
        weight, ignored, reduction = known
        if reduction == "sum":
            return Reduction(Kind.SUM, ignored=ignored, stated=known)
        return Reduction(Kind.COUNTED, functools.partial(_counted, weight=weight, ignored=ignored), ignored, stated=known)
    counts = getattr(loss, "counts", None)
    return Reduction(Kind.COUNTED, counts) if callable(counts) else None


def is_ours(counts: Counts | None) -> TypeGuard[functools.partial[Any]]:
    return isinstance(counts, functools.partial) and counts.func is _counted


def holds(labels: torch.Tensor, value: int | None) -> bool:
    """True if `value` is among `labels`. Compares piece by piece: a mask of all may not fit into memory."""
    if value is None or (value < 0 and not labels.dtype.is_signed):
        return False
    return any(bool((piece == value).any()) for piece in torch.split(labels.flatten(), 1 << 20))


def ignored_label(loss: LossFunction | None) -> int | None:
    """The label that does not count: as torch's cross-entropy says; IGNORED for the default loss; None for others."""
    known = None if loss is None else stated_reduction(loss)
    return losses.IGNORED if loss is None else known.ignored if known is not None else None


def _of_torch(loss: Any) -> tuple[torch.Tensor | None, int, str] | None:
    """(class weights, ignored label, reduction) of torch's cross-entropy and NLL losses, and of ours; None for others."""
    if losses.plain_of(loss) in (losses.token_cross_entropy, losses.partially_separable):
        return None, losses.IGNORED, "mean"
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        known = type(loss).forward in losses.OF_MODULES and loss.reduction != "none"
        return (loss.weight, loss.ignore_index, loss.reduction) if known else None
    partial = isinstance(loss, functools.partial)
    function, keywords = (loss.func, loss.keywords) if partial else (loss, {})
    if function not in (F.cross_entropy, F.nll_loss) or (partial and loss.args):
        return None
    reduction = keywords.get("reduction", "mean")
    if reduction == "none" or {"size_average", "reduce"} & set(keywords):
        return None
    return keywords.get("weight"), keywords.get("ignore_index", losses.IGNORED), reduction


def _counted(labels: torch.Tensor, *, weight: torch.Tensor | None, ignored: int, per_row: float = 1.0) -> torch.Tensor | float:
    if labels.is_floating_point():  # probabilities (rows, classes, ...), which all count
        return labels[:, 0].numel() / per_row
    valid = labels != ignored
    count = valid if weight is None else weight.to(labels.device)[labels[valid]]
    return count.sum(dtype=torch.float64) / per_row


_HELD_BYTES = 256 << 10
"""Bytes of the outputs that a loss is checked against, as numbers of 64 bits: no plan has room for more."""


class Held:
    """Outputs and labels of an update, to check that the losses of its micro-batches add up to that of all: as many rows of
    each as there is room for."""

    def __init__(self, micro_batches: int) -> None:
        self._micro_batches, self._parts = micro_batches, list[tuple[torch.Tensor, torch.Tensor]]()

    def add(self, output: torch.Tensor, labels: torch.Tensor) -> None:
        rows = _HELD_BYTES // (8 * max(1, output[:1].numel()))
        own = max(1, rows // self._micro_batches)
        if len(self._parts) < rows:
            self._parts.append((output.detach()[:own].clone(), labels[:own].clone()))

    def adds_up(self, loss: LossFunction, reduction: Reduction) -> bool:
        """True if `loss` adds up as `reduction` says. Leaves generators of random numbers unchanged.

        True also where it cannot be checked: for a module with buffers, for a loss that refuses numbers of 64 bits, and for one
        that takes a number of each micro-batch.
        """
        if (
            len(self._parts) < 2
            or getattr(loss, "from_layers", False)
            or (isinstance(loss, nn.Module) and any(True for _ in loss.buffers()))
        ):
            return True
        outputs, labels = ([torch.cat(parts), *parts] for parts in zip(*self._parts, strict=True))
        devices = [outputs[0].device] if outputs[0].is_cuda else []
        with torch.random.fork_rng(devices=devices), generators_left_alone(), warnings.catch_warnings(action="ignore"):
            try:
                with torch.autocast(outputs[0].device.type, enabled=False), torch.enable_grad():
                    outputs = [output.double().requires_grad_() for output in outputs]
                    found = [loss_value(loss, reduction, one.clone(), own) for one, own in zip(outputs, labels, strict=True)]
                    gradients = [one.factor * gradient_of(one.loss, output) for one, output in zip(found, outputs, strict=True)]
            except Exception:
                return True
        totals, (weight, *weights) = [float(one.total) for one in found], [one.weight for one in found]
        folded: Any = getattr(loss, "folded", None)
        if folded is not None:
            gradients = [folded(gradients[0]), folded(torch.cat(gradients[1:]))]
        alike = add_up(totals, gradients, _ROUNDING * len(labels[0])) and near(weight, sum(weights), weight)
        return alike or not math.isfinite(totals[0])


_ROUNDING = 1e-6
"""Tolerance per row for a loss that computes in 32 bits whatever it is given."""


def refuse_parts(loss: LossFunction, batch: int) -> NoReturn:
    """Raises OptionError for a loss whose micro-batches do not add up to a batch of `batch` rows."""
    raise OptionError(
        f"loss {name_of(loss)}: on outputs of this network the loss of a batch is not that of its micro-batches added up, as "
        "it was on a few random ones: does it choose rows by their outputs (the hardest, those above a threshold)? Training "
        f"would depend on the micro-batch, and so on the limit. Give --micro-batch-size {batch}: a batch that is not divided "
        "may have any loss. Or, where it divides by what it chose, let it return (sum, count)."
    )


def near(one: float, other: float, scale: float) -> bool:
    return abs(one - other) <= 1e-4 * scale


def add_up(losses: Sequence[float], gradients: Sequence[torch.Tensor], rounding: float = 0.0) -> bool:
    """True if loss and gradient of a whole, the first, are the sums of its parts'. A loss that divides by its own value adds
    up, and its gradient does not. rounding: a further tolerance."""
    (loss, *parts), (gradient, *others) = losses, gradients
    scale = abs(loss) + sum(map(abs, parts))
    return near_all(gradient, torch.cat(others), rounding) and abs(loss - sum(parts)) <= 1e-4 * scale + rounding


def near_all(one: torch.Tensor, other: torch.Tensor, rounding: float = 0.0) -> bool:
    """True if two gradients are near, by the largest of their numbers, or cannot be compared. 16 bits are rounded more."""
    largest = torch.maximum(one.abs().max(), other.abs().max()) if one.numel() else torch.zeros(())
    if not largest.isfinite():
        return True
    narrow = any(torch.equal(part, part.to(dtype).to(part.dtype)) for part in (one, other) for dtype in _NARROW)
    near_enough = (2e-2 if narrow else 1e-4 + rounding) * largest + _NOISE
    return not one.numel() or bool((one - other).abs().max() <= near_enough)


_NARROW = torch.bfloat16, torch.float16
_NOISE = 1e-6
"""Numbers of a gradient below which they may be rounding alone."""


def gradient_of(loss: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of a loss by its output; zeros where it has none, NaN where it cannot be computed."""
    try:
        found = torch.autograd.grad(loss, output, allow_unused=True)[0] if loss.requires_grad else None
    except RuntimeError:  # which training will say
        return torch.full_like(output, torch.nan)
    return torch.zeros_like(output) if found is None else found.detach()


def name_of(loss: object) -> str:
    """Returns what messages call a loss."""
    return str(getattr(loss, "called", getattr(loss, "__qualname__", type(loss).__qualname__)))


def name_with_settings(loss: object) -> str:
    """Identifies a loss, as far as that can be seen: one of torch's modules with its settings and tensors (another may change
    its own in every call), a partial with its arguments."""
    name = getattr(loss, "__qualname__", type(loss).__qualname__)
    if isinstance(loss, functools.partial):
        given = [name_with_settings(loss.func), *map(_shown, loss.args)]
        given += [f"{own}={_shown(value)}" for own, value in loss.keywords.items()]
    elif isinstance(loss, nn.Module) and type(loss).__module__.startswith("torch."):
        given = [*settings_of(loss), *(f"{own}={_shown(tensor)}" for own, tensor in tensors_of(loss).items())]
    else:
        return name
    return f"{name}({', '.join(given)})"


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.tolist()) if value.numel() < _SHOWN else f"{tuple(value.shape)}"
    return repr(value) if is_plain(value) else type(value).__name__


_SHOWN = 1000
"""Fewest numbers of a tensor that is known by its shape alone."""
