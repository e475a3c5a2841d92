"""What a run leaves."""

from dataclasses import dataclass
from pathlib import Path

from seqpart.memory.sampler import Proof
from seqpart.planning.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a run left. `accuracy` is None for a regression."""

    weights: Path
    """A safetensors file with the model's own parameter names."""
    test_loss: float
    accuracy: float | None
    train_losses: tuple[float, ...]
    """Mean loss of every training pass, in order."""
    proof: Proof
    plan: Plan
    seconds: float
    final_micro_batch: int
