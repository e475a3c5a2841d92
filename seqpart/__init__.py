"""seqpart: train a neural network that does not fit, one partition at a time, under a memory limit that is kept.

from seqpart import Trainer
Trainer(model, mem_limit="2GB", method="sil").fit(train, test)
"""

import os
import sys

# Read by the libraries when they load, so set before torch: a spinning OpenMP thread starves the I/O threads, and
# huge pages win back what prompt return of memory costs (seqpart/device.py, settle).
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

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
from seqpart.settings import Settings
from seqpart.trainer import Result, Trainer

__all__ = [
    "BadInput",
    "DoesNotFit",
    "LimitExceeded",
    "OutOfMemory",
    "Result",
    "SeqpartError",
    "Settings",
    "StoreError",
    "Trainer",
    "VerifyMismatch",
]
