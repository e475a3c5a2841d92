"""What the executor tells of: each step, and the beginning and the end of each pass."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from seqpart.loop.callbacks import MetricValue
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
    seconds: float
    metrics: Mapping[str, MetricValue] = field(default_factory=dict)
    """What the user's own found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseBegun:
    phase: Phase
    number: int


Event = StepDone | PhaseDone | PhaseBegun
