"""What a run tells callbacks, and how they end it.

A callback is any object with some of `on_begin(event)`, `on_step(event)`, `on_epoch(event)` and `on_eval(event)`. Updates and
epochs are those of what trains: of the network, and with `sil` of one partition after the other, with `ist` of one subnet.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seqpart.errors import OptionError

MetricValue = float | list[float]
"""Of a metric that is no single number, all of its numbers."""

NAMES = ("on_begin", "on_step", "on_epoch", "on_eval")


class Ending:
    """Whether somebody asked for the end of the training that is under way, and who, in words."""

    def __init__(self) -> None:
        self.asked = ""

    def ask(self, why: str) -> None:
        """The first one counts."""
        self.asked = self.asked or why


@dataclass(frozen=True, kw_only=True)
class _Told:
    update: int
    """Updates that are done."""
    epoch: float
    """Epochs that are done, 1.5 in the midst of the second."""
    partition: int
    """The first of those that train or are tested."""
    loss: float
    """Mean over the rows, or over what the loss counted of them."""
    rows: int
    seconds: float
    ending: Ending = field(repr=False, compare=False)

    def stop(self, why: str = "a callback") -> None:
        """End the training behind this event: the test rows are passed over once more, unless they just were, and the results
        written. With `sil` the next partition's training follows; with `ist` the round is finished first."""
        self.ending.ask(why)

    @property
    def rows_per_second(self) -> float:
        return self.rows / max(self.seconds, 1e-9)


@dataclass(frozen=True, kw_only=True)
class BeginEvent:
    """A run begins, and nothing is trained yet. A run that goes on has begun before: it has no such event."""

    memory: int
    """Bytes that count against the limit now."""
    limit: int


@dataclass(frozen=True, kw_only=True)
class StepEvent(_Told):
    """An update is done. `loss` is that of its rows before it, `seconds` those since the event before."""

    learning_rate: float | None
    """Of the first group of parameters; None where nothing learns, or the optimizer has none."""
    gradient_norm: float | None
    """Before clipping, over the whole network; None without clip_grad_norm: nobody else needs it."""
    memory: int
    """Bytes that count against the limit now."""
    limit: int


@dataclass(frozen=True, kw_only=True)
class EpochEvent(_Told):
    """An epoch is over. Where it was tested in its midst, `loss`, `rows` and `seconds` are of what came since; where a run went
    on within it, `rows` and `seconds` are."""


@dataclass(frozen=True, kw_only=True)
class EvalEvent(_Told):
    """A pass over the test rows is over."""

    accuracy: float | None
    metrics: Mapping[str, MetricValue]
    """What compute_metrics found; empty for an inner partition of `sil`."""
    is_best: bool
    """Whether no evaluation before it was as good, by the loss or by `best_by`."""


Event = BeginEvent | StepEvent | EpochEvent | EvalEvent


def callers(callbacks: Sequence[object]) -> dict[str, list[Callable[[Any], object]]]:
    """The methods to call, by name, in the order of `callbacks`. Raises OptionError for an object that has none."""
    found: dict[str, list[Callable[[Any], object]]] = {name: [] for name in NAMES}
    for callback in callbacks:
        own = {name: method for name in NAMES if callable(method := getattr(callback, name, None))}
        if not own:
            raise OptionError(
                f"callbacks: expected objects with {', '.join(NAMES[:-1])} or {NAMES[-1]}; found {type(callback).__name__}, "
                "which has none of them."
            )
        for name, method in own.items():
            found[name].append(method)
    return found
