"""Hooks of one run: they follow its steps, and can end it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from seqpart.model.metrics import OwnMetrics
from seqpart.plan.planner import ExecutionPlan
from seqpart.runtime.executor import Executor
from seqpart.runtime.partition import Partition
from seqpart.schedule.steps import Event, Position, Step
from seqpart.store.movers import Watched, unwatched

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
    failed: Callable[[Failure], None] = lambda _: None
    """Called before the run goes on with another plan after a failed allocation."""

    def beside(self, other: "Observer") -> "Observer":
        """Returns an observer that calls both, this one first; threads use the other's `watched` if it has one."""

        def before_update(partition: Partition, step: Step) -> None:
            self.before_update(partition, step)
            other.before_update(partition, step)

        def at_rest(executor: Executor) -> bool:
            goes_on = self.at_rest(executor)
            return other.at_rest(executor) and goes_on

        def listen(event: Event) -> None:
            self.listen(event)
            other.listen(event)

        def failed(failure: Failure) -> None:
            self.failed(failure)
            other.failed(failure)

        watched = self.watched if other.watched is unwatched else other.watched
        return replace(
            self, before_update=before_update, at_rest=at_rest, listen=listen, watched=watched, failed=failed,
            callbacks=(*self.callbacks, *other.callbacks), counts_updates=self.counts_updates or other.counts_updates,
        )  # fmt: skip
