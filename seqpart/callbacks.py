"""The events that a run passes to callbacks, and how callbacks end it.

A callback is any object with some of `on_begin(event)`, `on_step(event)`, `on_epoch(event)` and `on_eval(event)`. Updates and
epochs count those of the network; with `sil` those of the partition that trains, with `ist` those of the subnetwork.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seqpart.errors import OptionError

MetricValue = float | list[float]
"""A metric's number, or all of its numbers if it has several."""

NAMES = ("on_begin", "on_step", "on_epoch", "on_eval")


class Ending:
    """A request to end the current training; `asked` is its reason in words, or ""."""

    def __init__(self) -> None:
        self.asked = ""

    def ask(self, why: str) -> None:
        """Requests the end. The first reason counts."""
        self.asked = self.asked or why


@dataclass(frozen=True, kw_only=True)
class _Told:
    update: int
    """Number of finished updates."""
    epoch: float
    """Finished epochs: 1.5 in the middle of the second."""
    partition: int
    """The first partition that trains or is tested."""
    loss: float
    """Mean loss over the rows, or over what the loss counted of them."""
    rows: int
    seconds: float
    ending: Ending = field(repr=False, compare=False)

    def stop(self, why: str = "a callback") -> None:
        """Ends the training after this event: the test rows are evaluated once more, unless they just were, and the results
        are written. With `sil` the next partition's training follows; with `ist` the round is finished first."""
        self.ending.ask(why)

    @property
    def rows_per_second(self) -> float:
        return self.rows / max(self.seconds, 1e-9)


@dataclass(frozen=True, kw_only=True)
class BeginEvent:
    """A run begins, and nothing is trained yet. A resumed run has no such event."""

    memory: int
    """Bytes that count against the limit now."""
    limit: int


@dataclass(frozen=True, kw_only=True)
class StepEvent(_Told):
    """An update is done. `loss` is the loss of its rows before the update, `seconds` the time since the previous event."""

    learning_rate: float | None
    """Learning rate of the first parameter group; None if nothing learns, or the optimizer has none."""
    gradient_norm: float | None
    """Norm over the whole network before clipping; None without clip_grad_norm, as it is not computed then."""
    memory: int
    """Bytes that count against the limit now."""
    limit: int


@dataclass(frozen=True, kw_only=True)
class EpochEvent(_Told):
    """An epoch is over. If it had an evaluation within it, `loss`, `rows` and `seconds` count from the last one; if a run was
    resumed within it, `rows` and `seconds` count from there."""

    metrics: Mapping[str, MetricValue]
    """The losses of a dict of them, as `loss/NAME`."""


@dataclass(frozen=True, kw_only=True)
class EvalEvent(_Told):
    """A pass over the test rows is over."""

    accuracy: float | None
    metrics: Mapping[str, MetricValue]
    """Values of compute_metrics, empty for an inner partition of `sil`; and the losses of a dict of them, as `loss/NAME`."""
    is_best: bool
    """True if no evaluation before it was as good, by the loss or by `best_by`."""


Event = BeginEvent | StepEvent | EpochEvent | EvalEvent


def callers(callbacks: Sequence[object]) -> dict[str, list[Callable[[Any], object]]]:
    """Returns the methods to call by name, in the order of `callbacks`. Raises OptionError for an object that has none,
    and for anything but a list."""
    if not isinstance(callbacks, list | tuple):
        raise OptionError(f"callbacks: expected a list of objects; found {type(callbacks).__name__}. Give one as [callback].")
    found: dict[str, list[Callable[[Any], object]]] = {name: [] for name in NAMES}
    for callback in callbacks:
        own = {name: method for name in NAMES if callable(method := getattr(callback, name, None))}
        if not own:
            raise OptionError(
                f"callbacks: expected objects with {', '.join(NAMES[:-1])} or {NAMES[-1]}; found {type(callback).__name__}, "
                "which has none of these methods."
            )
        for name, method in own.items():
            found[name].append(method)
    return found
