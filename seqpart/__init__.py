"""seqpart: train a neural network that does not fit, one partition at a time, under a memory limit that is kept.

from seqpart import Trainer
Trainer(model, mem_limit="2GB", method="sil").fit(train, test)
"""

import os

# Read by the libraries when they load, so set before torch: a spinning OpenMP thread starves the I/O threads, and
# huge pages win back what prompt return of memory costs (seqpart/device.py, settle).
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

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
