"""What the executor tells of: each step, and the beginning and the end of each pass."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from seqpart.callbacks import MetricValue
from seqpart.schedule.phase import Phase
from seqpart.schedule.steps import Step


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """One executed step: its disk traffic in bytes, and seconds. A transfer counts where it is waited for or begun."""

    step: Step
    bytes_read: int
    bytes_written: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseDone:
    """One pass is over. `loss` is the mean over its rows, `accuracy` None where the outputs say nothing of classes."""

    phase: Phase
    loss: float | None
    """None where no loss stands behind the partition."""
    accuracy: float | None
    rows: int
    earlier: int = 0
    """Of these rows: those of updates that were made before, where a run went on within the pass."""
    seconds: float
    """Without those of earlier rows."""
    metrics: Mapping[str, MetricValue] = field(default_factory=dict)
    """What the user's own found."""

    @property
    def rows_per_second(self) -> float:
        return (self.rows - self.earlier) / max(self.seconds, 1e-9)


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseBegun:
    phase: Phase
    number: int
    earlier: int = 0
    """As of PhaseDone."""


Event = StepDone | PhaseDone | PhaseBegun
