"""seqpart: train a neural network that does not fit, one partition at a time, under a memory limit that is kept.

from seqpart import Trainer
Trainer(model, mem_limit="2GB", method="sil").fit(train, test)
"""

from importlib import import_module
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
    from seqpart.model.in_file import parameters_in_file
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
    "parameters_in_file",
    "parameters_on_meta",
]


def __getattr__(name: str) -> Any:
    """Loads names that need torch, which takes 2 s, on first use: help and errors do not need it."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"seqpart.{_PLACES[name]}"), name)
    return found


_PLACES = {
    "Evaluation": "runtime.result", "Padding": "data.padding", "Result": "runtime.result", "Settings": "settings",
    "Trainer": "trainer", "packed": "data.packing", "parameters_in_file": "model.in_file",
    "parameters_on_meta": "model.weight_files",
}  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
