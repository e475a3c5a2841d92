"""How long a run trains, when it is tested in between, who hears of it, and when it ends early."""

from seqpart.loop.callbacks import BeginEvent, EpochEvent, EvalEvent, StepEvent

__all__ = ["BeginEvent", "EpochEvent", "EvalEvent", "StepEvent"]
