"""Metrics as sums over the rows of one pass. They stay on the device, since reading them would make it wait."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec
import torch

from seqpart.callbacks import MetricValue
from seqpart.errors import Diverged, OptionError
from seqpart.schedule.phase import Phase, PhaseKind, Span
from seqpart.schedule.steps import PhaseDone
from seqpart.schema import Finite, Whole

ComputeMetrics = Any
"""A function of (outputs, labels), an object with update, compute and reset, or a dict of such objects by name."""


class Tally(msgspec.Struct, kw_only=True):
    """`Metrics` as stored in a checkpoint."""

    loss: float
    correct: Finite
    judged: Whole
    rows: Whole
    weight: Finite | None = None
    """None: equal to the rows, as in version 0.2.0."""
    parts: dict[str, float] = {}
    """Sums of the losses that the loss is the sum of, by name."""


@dataclass(slots=True)
class Metrics:
    loss: torch.Tensor | float = 0.0
    correct: torch.Tensor | float = 0.0
    judged: torch.Tensor | int = 0
    rows: int = 0
    weight: float = 0
    """Divisor of the sum of losses: rows, or what the loss counted."""
    parts: Mapping[str, torch.Tensor | float] = field(default_factory=dict)
    """Sums of the losses that the loss is the sum of, by name."""
    beside: "Metrics | None" = None
    """Other metrics to which everything is added too."""

    def add(
        self, total: torch.Tensor, rows: int, judged: tuple[torch.Tensor, torch.Tensor] | None,
        *, weight: float, parts: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Adds `total`, the mean loss of `rows` rows times `weight`, and such totals of its parts.

        judged: scores (n, classes, ...), or the likeliest classes (n,), and labels (n, ...), of which those below 0 do not
        count; None without classes.
        """
        self.loss = self.loss + total.double()
        self.rows += rows
        self.weight += weight
        self.parts = {**self.parts, **{name: self.parts.get(name, 0.0) + part for name, part in parts.items()}}
        if judged is not None:
            scores, labels = judged
            best = scores.detach().argmax(1) if scores.ndim > 1 else scores
            self.correct = self.correct + (best == labels).sum()
            self.judged = self.judged + (labels >= 0).sum()
        if self.beside is not None:
            self.beside.add(total, rows, None, weight=weight)

    def include(self, others: "Metrics") -> None:
        """Adds the sums of other rows."""
        for name in ("loss", "correct", "judged", "rows", "weight"):
            setattr(self, name, getattr(self, name) + getattr(others, name))
        self.parts = {**self.parts, **{name: self.parts.get(name, 0.0) + part for name, part in others.parts.items()}}
        if self.beside is not None:
            self.beside.include(others)

    def done(self, phase: Phase, earlier: int, seconds: float, found: Mapping[str, MetricValue]) -> PhaseDone:
        """The report of the pass with these sums. earlier: rows, as in PhaseDone. found: values of the user's metrics."""
        loss = self.mean_loss if self.rows else None
        found = {**{f"loss/{name}": float(part) / (self.weight or 1) for name, part in self.parts.items()}, **found}
        return PhaseDone(
            phase=phase, loss=loss, accuracy=self.accuracy, rows=phase.rows, earlier=earlier, seconds=seconds, metrics=found
        )

    def refuse_divergence(self, where: str) -> None:
        """Raises Diverged if the loss is not finite. Waits for the device."""
        if not math.isfinite(self.mean_loss):
            raise Diverged(f"training diverged: the loss is {self.mean_loss} in {where}.")

    @property
    def mean_loss(self) -> float:
        return float(self.loss) / (self.weight or 1)

    @property
    def accuracy(self) -> float | None:
        return float(self.correct) / float(self.judged) if self.judged else None

    def tally(self) -> Tally:
        return Tally(
            loss=float(self.loss), correct=float(self.correct), judged=int(self.judged), rows=self.rows,
            weight=float(self.weight), parts={name: float(part) for name, part in self.parts.items()},
        )  # fmt: skip

    @classmethod
    def of(cls, found: Tally) -> "Metrics":
        weight = found.rows if found.weight is None else found.weight
        return cls(found.loss, found.correct, found.judged, found.rows, weight, found.parts)


class OwnMetrics:
    """The user's metrics over one pass over the test rows, which come micro-batch by micro-batch.

    An object with `update(outputs, labels)`, `compute()` and `reset()`, as those of torchmetrics, is used as it is; so is each
    in a dict of these. A function is called for each micro-batch, and its values are averaged by rows: for a metric that is
    not a mean over rows, such as F1, give an object.
    """

    def __init__(self, asked: ComputeMetrics) -> None:
        self._objects = _objects_of(asked)
        self._function: Any = asked
        self.without_loss = getattr(asked, "without_loss", False)
        """True if no loss is asked for: there may be no labels that it takes."""
        self._sums: dict[str, float] = {}
        self._rows = 0

    def begin(self, device: torch.device) -> None:
        """Begins a pass: resets objects, and moves those that can be moved to the device of the outputs."""
        for metric in self._objects.values():
            if callable(move := getattr(metric, "to", None)):
                move(device)
        self.reset()

    def reset(self) -> None:
        """Forgets a pass, and what objects keep of it."""
        self._sums, self._rows = {}, 0
        for metric in self._objects.values():
            metric.reset()

    def add(self, outputs: Any, labels: torch.Tensor, dims: Callable[[], Sequence[int | None]]) -> None:
        """Adds a micro-batch: what the network returned, labels (rows, ...). dims: returns the rows' in tensors."""
        if self.without_loss:
            self._function.update(outputs, labels, dims)
        elif self._objects:
            for metric in self._objects.values():
                metric.update(outputs, labels)
        else:
            self._rows += len(labels)
            for name, value in _values("", self._function(outputs, labels)).items():
                if isinstance(value, list):
                    raise OptionError(f"compute_metrics: expected {name} to be a number; found {len(value)} of them.")
                self._sums[name] = self._sums.get(name, 0.0) + value * len(labels)

    def values(self) -> dict[str, MetricValue]:
        """Values of the metrics over the pass, by name."""
        if not self._objects:
            return {name: total / self._rows for name, total in self._sums.items()}
        return {key: value for name, metric in self._objects.items() for key, value in _values(name, metric.compute()).items()}


def own_metrics(asked: ComputeMetrics) -> OwnMetrics | None:
    """The user's metrics, or None. Raises OptionError for anything that is no metric."""
    return OwnMetrics(asked) if asked is not None else None


def _objects_of(asked: ComputeMetrics) -> dict[str, Any]:
    """Metric objects by name; empty if it is a function."""
    objects = asked if isinstance(asked, dict) else {type(asked).__name__: asked}
    if objects and all(hasattr(one, name) for one in objects.values() for name in ("update", "compute", "reset")):
        return objects
    if isinstance(asked, dict) or not callable(asked):
        raise OptionError(
            "compute_metrics: expected a function of (outputs, labels) that returns a dict, an object with update, compute and "
            f"reset, or a dict of such objects; found {type(asked).__name__}."
        )
    return {}


def _values(name: str, found: Any) -> dict[str, MetricValue]:
    """Converts a metric's result to numbers by name. Raises OptionError for anything that is no number."""
    if isinstance(found, Mapping):
        return {key: value for part, one in found.items() for key, value in _values(str(part), one).items()}
    if not name:
        raise OptionError(f"compute_metrics: expected a dict of numbers by name; found {type(found).__name__}.")
    try:
        tensor = torch.as_tensor(found, dtype=torch.float64)
        return {name: float(tensor) if tensor.numel() == 1 else tensor.flatten().tolist()}
    except (TypeError, ValueError, RuntimeError):
        raise OptionError(f"compute_metrics: expected {name} to be a number; found {type(found).__name__}.") from None


@dataclass(slots=True)
class MetricSinks:
    """Receivers of losses and outputs beside the sums of the pass."""

    partitions: int
    update: Metrics | None = None
    """Sums over the current update, if they are needed."""
    own: OwnMetrics | None = None
    sets: Sequence[tuple[str, int]] = ()
    """(name, rows) of each of several test sets, which follow one another."""
    _of_sets: dict[str, Metrics] = field(default_factory=dict)
    _own_of_sets: dict[str, MetricValue] = field(default_factory=dict)
    """The user's metrics of the sets that are over."""
    _set: str = ""
    """The set that the user's metrics are of now."""

    def _is_test(self, phase: Phase) -> bool:
        """True for a pass over test rows that reaches the network's end."""
        return phase.kind is PhaseKind.TEST and not phase.hands_on(self.partitions)

    def without_loss(self, phase: Phase) -> bool:
        """True for a pass whose outputs alone are asked for."""
        return self.own is not None and self.own.without_loss and self._is_test(phase)

    def begin(self, phase: Phase, sums: Metrics, device: torch.device) -> None:
        sums.beside = self.update if phase.kind is PhaseKind.TRAIN else None
        self._of_sets, self._own_of_sets, self._set = {}, {}, ""
        if self.own is not None and self._is_test(phase):
            self.own.begin(device)

    def pieces(self, phase: Phase, span: Span) -> list[tuple[str, slice]] | None:
        """Returns (name, rows in the micro-batch) of each test set that has some of its rows; None unless there are several."""
        if not self.sets or not self._is_test(phase):
            return None
        found, first = [], 0
        for name, rows in self.sets:
            start, stop = max(first, span.start), min(first + rows, span.stop)
            if start < stop:
                found.append((name, slice(start - span.start, stop - span.start)))
            first += rows
        return found

    def of_set(self, name: str) -> Metrics:
        return self._of_sets.setdefault(name, Metrics())

    def collect(
        self, phase: Phase, outputs: torch.Tensor, labels: torch.Tensor, returned: Callable[[torch.Tensor], Any],
        dims: Callable[[], Sequence[int | None]], name: str = "",
    ) -> None:  # fmt: skip
        """Adds rows to the user's metrics. returned: makes of the outputs what the model returned. dims: see `OwnMetrics.add`.
        name: their test set."""
        if self.own is None or not self._is_test(phase):
            return
        if name != self._set:
            self._end_set()
            self._set = name
            self.own.begin(outputs.device)
        self.own.add(returned(outputs.detach()), labels, dims)

    def _end_set(self) -> None:
        if self._set and self.own is not None:
            self._own_of_sets |= {f"{self._set}/{name}": value for name, value in self.own.values().items()}

    def found(self, phase: Phase) -> dict[str, MetricValue]:
        """Returns the metrics of a pass that is over: the user's, and those of each of several test sets."""
        if not self._is_test(phase):
            return {}
        if not self.sets:
            return self.own.values() if self.own is not None else {}
        self._end_set()
        found = dict[str, MetricValue]()
        for name, sums in self._of_sets.items():
            done = sums.done(phase, 0, 0.0, {})
            values = {"loss": done.loss, "accuracy": done.accuracy, **done.metrics}
            found |= {f"{name}/{key}": value for key, value in values.items() if value is not None}
        return found | self._own_of_sets

    def latest(self) -> Metrics:
        """Returns the sums since the last call, and resets them."""
        assert self.update is not None
        found = Metrics(self.update.loss, 0.0, 0, self.update.rows, self.update.weight)
        self.forget()
        return found

    def forget(self) -> None:
        """Discards the sums of the current update."""
        if self.update is not None:
            self.update.loss, self.update.rows, self.update.weight = 0.0, 0, 0
