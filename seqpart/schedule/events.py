"""Events of the executor: each step, and the beginning and the end of each pass."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from seqpart.callbacks import MetricValue
from seqpart.schedule.phase import Phase
from seqpart.schedule.steps import Step


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """One executed step: its disk traffic in bytes, and seconds. A transfer counts where it is started or waited for."""

    step: Step
    bytes_read: int
    bytes_written: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseDone:
    """One pass is over. `loss` is the mean over its rows, `accuracy` is None if the outputs are no scores of classes."""

    phase: Phase
    loss: float | None
    """None if the partition has no loss."""
    accuracy: float | None
    rows: int
    earlier: int = 0
    """Those of `rows` from updates made before, if a run was resumed within the pass."""
    seconds: float
    """Seconds of the pass, without those of earlier rows."""
    metrics: Mapping[str, MetricValue] = field(default_factory=dict)
    """Values of the user's own metrics."""

    @property
    def rows_per_second(self) -> float:
        return (self.rows - self.earlier) / max(self.seconds, 1e-9)


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseBegun:
    phase: Phase
    number: int
    earlier: int = 0
    """Rows of updates made before, as in PhaseDone."""


Event = StepDone | PhaseDone | PhaseBegun
