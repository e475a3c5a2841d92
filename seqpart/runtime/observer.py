"""Hooks of one run: they follow its steps, and can end it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ParamSpec

from seqpart.model.metrics import OwnMetrics
from seqpart.plan.planner import ExecutionPlan
from seqpart.runtime.executor import Executor
from seqpart.runtime.partition import Partition
from seqpart.schedule.steps import Event, Position, Step
from seqpart.store.movers import Watched, unwatched

P = ParamSpec("P")
BeforeUpdate = Callable[[Partition, Step], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An allocation that failed inside the limit; every home is as it was at `at`."""

    step: Step
    text: str
    at: Position
    micro_batch: int
    keeps_heap: bool
    """True if the stage kept its heap: then the run goes on without it, else with a smaller plan or half the micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observer:
    """Hooks that default to doing nothing. Whatever one of them raises ends the run."""

    before_update: BeforeUpdate = lambda _, __: None
    """Called with a partition that has its gradients, before each of its updates."""
    at_rest: Callable[[Executor], bool] = lambda _: True
    """Called where the whole run stands at a position. If it returns False, the stages end there and all homes are saved."""
    callbacks: Sequence[object] = ()
    """Objects with some of on_step, on_epoch and on_eval: see callbacks.py."""
    metrics: OwnMetrics | None = None
    """The user's metrics over passes of the test rows."""
    counts_updates: bool = False
    """True if it needs the metric sums of each update."""
    shaped: Callable[[ExecutionPlan], ExecutionPlan] = lambda prepared: prepared
    """Returns the plan to go on with, from the new plan after a failed allocation."""
    listen: Callable[[Event], None] = lambda _: None
    """Called after each step, and at the beginning and end of each pass."""
    watched: Watched = unwatched
    """Context manager that threads enter while they move homes and read rows."""
    when_diverged: str = ""
    """What to do when a loss is not finite, in the place of what the checkpoints say."""
    failed: Callable[[Failure], None] = lambda _: None
    """Called before the run goes on with another plan after a failed allocation."""

    def beside(self, other: "Observer") -> "Observer":
        """Returns an observer that calls both, this one first; threads use the other's `watched` if it has one."""

        watched = self.watched if other.watched is unwatched else other.watched
        return replace(
            self, before_update=_both(self.before_update, other.before_update), listen=_both(self.listen, other.listen),
            at_rest=lambda executor: all([self.at_rest(executor), other.at_rest(executor)]), watched=watched,
            failed=_both(self.failed, other.failed), callbacks=(*self.callbacks, *other.callbacks),
            counts_updates=self.counts_updates or other.counts_updates,
        )  # fmt: skip


def _both(first: Callable[P, None], second: Callable[P, None]) -> Callable[P, None]:
    def called(*args: P.args, **kwargs: P.kwargs) -> None:
        first(*args, **kwargs)
        second(*args, **kwargs)

    return called
