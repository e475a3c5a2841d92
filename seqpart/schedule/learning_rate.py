"""Learning-rate schedules: a factor of the learning rate as a function only of how many updates are done.

So a run that is resumed, or cut differently, makes the same steps.
"""

import math
from collections.abc import Callable

from seqpart.errors import OptionError

RateSchedule = Callable[[int, int], float]
"""(updates done, updates of the whole stage) -> factor of the learning rate."""

NAMES = ("constant", "linear", "cosine")


def rate_schedule(name: str, warmup: int) -> RateSchedule:
    """Returns the schedule `constant`, `linear` or `cosine` (down to zero), after `warmup` updates of linear growth.

    Raises OptionError for another name or a negative warm-up.
    """
    if name not in NAMES:
        raise OptionError(f"--lr-schedule: expected one of {', '.join(NAMES)}; found {name!r}.")
    if warmup < 0:
        raise OptionError(f"--warmup-updates: expected a whole number from 0 up; found {warmup}.")

    def factor(done: int, total: int) -> float:
        if done < warmup:
            return (done + 1) / (warmup + 1)
        share = (done - warmup) / max(1, total - warmup)
        if name == "linear":
            return max(0.0, 1.0 - share)
        if name == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))
        return 1.0

    return factor
