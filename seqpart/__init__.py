"""seqpart: train a neural network that does not fit, one partition at a time, under a memory limit that is kept.

from seqpart import Trainer
Trainer(model, mem_limit="2GB", method="sil").fit(train, test)
"""

import os
import sys
from typing import TYPE_CHECKING, Any

# Read by the libraries when they load, so set before torch. OpenMP's threads that wait spin for microseconds, which small steps
# need, and then sleep: spinning on they would starve the I/O threads. Tensors aligned for huge pages leave holes in a heap that
# is kept (seqpart/device/heap.py).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "0")

if "torch" not in sys.modules:
    try:
        os.getcwd()  # noqa: PTH109 (pathlib is not needed for it)
    except OSError as error:  # the matrix library would end the process while torch loads, in words of its own
        sys.stderr.write(f"seqpart: the working directory cannot be used: {error.strerror}. Go to one that exists.\n")
        sys.exit(6)

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
from seqpart.launch.gpu_tables import release_when_loaded as _release_when_loaded

if "torch" not in sys.modules:
    _release_when_loaded()  # what a process held while torch was loading counts too

if TYPE_CHECKING:
    from seqpart.config import Settings
    from seqpart.data.padding import Padding
    from seqpart.model.empty import parameters_on_meta
    from seqpart.runtime.result import Evaluation, Result
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
    "parameters_on_meta",
]


def __getattr__(name: str) -> Any:
    """What needs torch, 2 s, is loaded when it is first asked for: help and errors do not need it."""
    if name in ("Evaluation", "Padding", "Result", "Settings", "Trainer", "parameters_on_meta"):
        from seqpart import config, trainer
        from seqpart.data import padding
        from seqpart.model import empty
        from seqpart.runtime import result

        globals().update(
            Evaluation=result.Evaluation, Padding=padding.Padding, Result=result.Result, Settings=config.Settings,
            Trainer=trainer.Trainer, parameters_on_meta=empty.parameters_on_meta,
        )  # fmt: skip
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
