"""How long a run trains and how often it is tested, in updates."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from seqpart.errors import OptionError

EXPECTED = "updates (500 or '500 updates') or epochs ('2 epochs')"
_ROUNDING = 1e-9
"""0.1 x 30 is a little more than 3 as a float."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The distance between two evaluations, in epochs or in updates; the other one is None."""

    epochs: int | None = None
    updates: int | None = None


AT_THE_END = Interval()
"""One evaluation, at the end of training."""


def interval_of(every: str | int | None, epochs: int | None, flag: str = "--eval-every", expected: str = EXPECTED) -> Interval:
    """Returns the interval of --eval-every (`every`) or of --test-every (`epochs`). Raises OptionError."""
    if every is None:
        return Interval(epochs=epochs)
    match = re.fullmatch(r"(\d+)\s*(epochs?|updates?|)", str(every).strip())
    if match is None or not int(match[1]):
        raise OptionError(f"{flag}: expected {expected}; found {every!r}.")
    count = int(match[1])
    return Interval(epochs=count) if match[2].startswith("epoch") else Interval(updates=count)


@dataclass(frozen=True, slots=True)
class Length:
    """How long a partition, or the network, trains."""

    epochs: int
    """Number of epochs, the last of which may be a part of one."""
    updates: int
    """Number of updates in all."""
    counted: int | None = None
    """Equals `updates` if the length was not given as whole epochs, else None."""


def length_of(epochs: float, max_steps: int | None, per_epoch: int) -> Length:
    """Returns the length of `epochs`, or of `max_steps` updates. per_epoch: updates of a whole epoch."""
    if max_steps is None and float(epochs).is_integer():
        return Length(int(epochs), int(epochs) * per_epoch)
    updates = max_steps if max_steps is not None else math.ceil(epochs * per_epoch - _ROUNDING)
    return Length(-(-updates // per_epoch), updates, updates)


def whole_where_it_is(epochs: float) -> float:
    """Returns 3.0 as 3, the form that a run prints and its checkpoints compare."""
    return int(epochs) if float(epochs).is_integer() else epochs


def refuse_untested(names: Sequence[str], rows: int) -> None:
    """Raises OptionError if `names`, settings about evaluations, were given and there are no test `rows`."""
    if names and not rows:
        raise OptionError(f"{', '.join(names)}: there is no test set to evaluate on. Give one, or leave this out.")


def refuse_endless_warmup(warmup: int, updates: dict[str, int]) -> None:
    """Raises OptionError if a training would end before its warm-up. updates: number of updates by the training's name."""
    for what, count in updates.items():
        if warmup >= count > 0:
            raise OptionError(
                f"--warmup-updates {warmup}: {what} has {count} updates, so the learning rate would never be reached. "
                "Give fewer."
            )
