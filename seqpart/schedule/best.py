"""The evaluations of a run: which was the best, and how many came after it."""

import math
import re
from dataclasses import dataclass, field
from typing import Self

import msgspec

from seqpart.callbacks import MetricValue
from seqpart.errors import OptionError
from seqpart.schema import Finite, Whole

EXPECTED = "loss (smaller is better), accuracy (larger is), or a metric of compute_metrics as min:NAME or max:NAME"


@dataclass(frozen=True, slots=True)
class Criterion:
    """The number by which evaluations are compared."""

    name: str = "loss"
    larger: bool = False
    """True if larger is better."""

    def value(self, found: "Evaluated") -> float:
        """Returns an evaluation's number, signed so that smaller is better. Raises OptionError if it has none."""
        value = self.found(found)
        return -value if self.larger else value

    def found(self, found: "Evaluated") -> float:
        """Returns an evaluation's number as it was found. Raises OptionError if it has none."""
        values = {"loss": found.loss, "accuracy": found.accuracy, **found.metrics}
        value = values.get(self.name)
        if value is None or isinstance(value, list):
            known = ", ".join(name for name, one in values.items() if isinstance(one, float))
            raise OptionError(f"--best-by {self.name}: an evaluation found no such number; it found {known}.")
        return value


def criterion_of(text: str | None) -> Criterion:
    """Parses the value of --best-by. Raises OptionError."""
    if text is None or text in ("loss", "accuracy"):
        return Criterion(text or "loss", larger=text == "accuracy")
    match = re.fullmatch(r"(min|max):(.+)", text)
    if match is None:
        raise OptionError(f"--best-by: expected {EXPECTED}; found {text!r}.")
    return Criterion(match[2], larger=match[1] == "max")


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """The results of a pass over the test rows, at the network's end."""

    phase: Whole
    """The number of the phase."""
    update: Whole
    epoch: Finite
    loss: float
    accuracy: float | None
    metrics: dict[str, MetricValue] = field(default_factory=dict)


class LoopState(msgspec.Struct):
    """A checkpoint's entry for the loop: the evaluations, a requested end, and the parameters that are frozen or trained."""

    class Found(msgspec.Struct):
        all: list[Evaluated] = []
        best: Evaluated | None = None

    evaluations: Found = msgspec.field(default_factory=Found)
    ending: tuple[str, Whole | None] = ("", None)
    """Why an end was requested, and the stretch of phases that is to end."""
    frozen: list[str] = []
    """Names of parameters that the user froze during the run, although the plan has room for them."""
    learns: list[str] = []
    """Names of parameters that did not learn when the run began."""
    attributes: dict[str, str | None] = {}
    """{place: value} of plain attributes that the user changed during the run; None: no checkpoint holds it."""


class Evaluations:
    """All evaluations of a run, in order; the best still counts after the run has gone back to before it."""

    def __init__(self, criterion: Criterion) -> None:
        self.all: list[Evaluated] = []
        self.best: Evaluated | None = None
        self.criterion = criterion

    def add(self, found: Evaluated) -> bool:
        """Adds an evaluation. Returns True if none before it was as good."""
        self.all.append(found)
        value = self.criterion.value(found)
        if math.isnan(value) or (self.best is not None and value >= self.criterion.value(self.best)):
            return False
        self.best = found
        return True

    @property
    def values(self) -> list[tuple[int, float]]:
        """(updates before it, the number that is compared, as it was found) of each."""
        return [(one.update, self.criterion.found(one)) for one in self.all]

    @property
    def since(self) -> int:
        """Number of evaluations after the best."""
        return len(self.all) if self.best is None else sum(one.phase > self.best.phase for one in self.all)

    def go_back(self, phase: int) -> None:
        """Forgets the evaluations from `phase` on, as the run goes on with that phase and makes them again."""
        self.all = [one for one in self.all if one.phase < phase]

    @property
    def kept(self) -> LoopState.Found:
        return LoopState.Found(self.all, self.best)

    @classmethod
    def of(cls, criterion: Criterion, kept: LoopState.Found) -> Self:
        made = cls(criterion)
        made.all, made.best = list(kept.all), kept.best
        return made
