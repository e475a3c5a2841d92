"""What looks at a run: told where it stands, and asked there whether it is to go on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from seqpart.model.metrics import OwnMetrics
from seqpart.plan.planner import ExecutionPlan
from seqpart.runtime.executor import Executor
from seqpart.runtime.partition import Partition
from seqpart.schedule.events import Event
from seqpart.schedule.steps import Position, Step
from seqpart.store.movers import Watched, unwatched

BeforeUpdate = Callable[[Partition, Step], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An allocation that failed inside the limit. Everything is at home, as it was at `at`."""

    step: Step
    text: str
    at: Position
    micro_batch: int
    keeps_heap: bool
    """The run goes on without its heap then, and else with half of the micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observer:
    """What is left out does nothing. Whatever one of them raises ends the run."""

    before_update: BeforeUpdate = lambda _, __: None
    """Sees a partition with its gradients before each of its updates."""
    at_rest: Callable[[Executor], bool] = lambda _: True
    """Everything stands at a position. Returns whether to go on; if not the stages end there, with everything at home."""
    callbacks: Sequence[object] = ()
    """Objects with some of on_step, on_epoch and on_eval: see callbacks.py."""
    metrics: OwnMetrics | None = None
    """The user's, over passes of the test rows."""
    counts_updates: bool = False
    """Whether it asks for the sums of each update."""
    shaped: Callable[[ExecutionPlan], ExecutionPlan] = lambda prepared: prepared
    """Of a plan that is made anew behind a failed allocation, what the run goes on with."""
    listen: Callable[[Event], None] = lambda _: None
    """Told of each step, and of the beginning and end of each pass."""
    watched: Watched = unwatched
    """Threads that move homes and read rows stand in it while they do."""
    failed: Callable[[Failure], None] = lambda _: None
    """Called before the run goes on behind a failed allocation, under another plan."""

    def beside(self, other: "Observer") -> "Observer":
        """Both of them, this one first; threads stand in what the other one gives."""

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
