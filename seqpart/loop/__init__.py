"""How long a run trains, when it is tested in between, who hears of it, and when it ends early."""

from seqpart.loop.callbacks import EpochEvent, EvalEvent, StepEvent

__all__ = ["EpochEvent", "EvalEvent", "StepEvent"]
