"""seqpart: train a neural network that does not fit, one partition at a time, under a memory limit that is kept.

from seqpart import Trainer
Trainer(model, mem_limit="2GB", method="sil").fit(train, test)
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Read by the libraries when they load, so set before torch. Threads of GNU's OpenMP that wait spin as PyTorch has it, 3 ms, and
# for microseconds where devices/openmp.py asks for less: by default it would be for less than small kernels take. Other OpenMP
# libraries take `active` for no end. Tensors aligned for huge pages leave holes in a heap that is kept (memory/heap.py).
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys() and any(
    found
    for place in getattr(find_spec("torch"), "submodule_search_locations", None) or ()
    for pattern in ("torch/lib/libgomp*", "torch.libs/libgomp*")
    for found in Path(place).parent.glob(pattern)
):
    os.environ.update(OMP_WAIT_POLICY="active", GOMP_SPINCOUNT="300000")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "0")

if "torch" not in sys.modules:
    try:
        os.getcwd()  # noqa: PTH109 (pathlib is not needed for it)
    except OSError as error:  # the matrix library would end the process while torch loads, in words of its own
        print(f"seqpart: the working directory cannot be used: {error.strerror}. Go to one that exists.", file=sys.stderr)
        sys.exit(6)

from seqpart.errors import (
    BadInput,
    DoesNotFit,
    LimitExceeded,
    OutOfMemory,
    SeqpartError,
    StoreError,
    VerifyMismatch,
)
from seqpart.memory.gpu_tables import release_when_loaded as _release_when_loaded

if "torch" not in sys.modules:
    _release_when_loaded()  # what a process held while torch was loading counts too

if TYPE_CHECKING:
    from seqpart.result import Evaluation, Result
    from seqpart.settings import Settings
    from seqpart.trainer import Trainer

__all__ = [
    "BadInput",
    "DoesNotFit",
    "Evaluation",
    "LimitExceeded",
    "OutOfMemory",
    "Result",
    "SeqpartError",
    "Settings",
    "StoreError",
    "Trainer",
    "VerifyMismatch",
]


def __getattr__(name: str) -> Any:
    """What needs torch, 2 s, is loaded when it is first asked for: help and errors do not need it."""
    if name in ("Evaluation", "Result", "Settings", "Trainer"):
        from seqpart import result, settings, trainer

        globals().update(
            Evaluation=result.Evaluation, Result=result.Result, Settings=settings.Settings, Trainer=trainer.Trainer
        )
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
