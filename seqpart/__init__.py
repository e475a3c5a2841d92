"""seqpart: train a neural network that does not fit, one partition at a time, under a memory limit that is kept.

from seqpart import Trainer
Trainer(model, mem_limit="2GB", method="sil").fit(train, test)
"""

from typing import TYPE_CHECKING, Any

from seqpart.errors import (
    BadInput,
    DoesNotFit,
    Interrupted,
    LimitExceeded,
    OutOfMemory,
    SeqpartError,
    StoreError,
    VerifyMismatch,
)

if TYPE_CHECKING:
    from seqpart.data.packing import packed
    from seqpart.data.padding import Padding
    from seqpart.model.weight_files import parameters_on_meta
    from seqpart.runtime.result import Evaluation, Result
    from seqpart.settings import Settings
    from seqpart.trainer import Trainer

__all__ = [
    "BadInput",
    "DoesNotFit",
    "Evaluation",
    "Interrupted",
    "LimitExceeded",
    "OutOfMemory",
    "Padding",
    "Result",
    "SeqpartError",
    "Settings",
    "StoreError",
    "Trainer",
    "VerifyMismatch",
    "packed",
    "parameters_on_meta",
]


def __getattr__(name: str) -> Any:
    """Loads names that need torch, which takes 2 s, on first use: help and errors do not need it."""
    if name in ("Evaluation", "Padding", "Result", "Settings", "Trainer", "packed", "parameters_on_meta"):
        from seqpart import settings, trainer
        from seqpart.data import packing, padding
        from seqpart.model import weight_files
        from seqpart.runtime import result

        globals().update(
            Evaluation=result.Evaluation, Padding=padding.Padding, Result=result.Result, Settings=settings.Settings,
            Trainer=trainer.Trainer, packed=packing.packed, parameters_on_meta=weight_files.parameters_on_meta,
        )  # fmt: skip
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
