"""What callers from Python may set about a run, for editors and type checkers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict

import torch

from seqpart.kinds import LrSchedule, Method, Objective, Precision, TrackerName
from seqpart.model.scheduler import SchedulerFactory


class Options(TypedDict, total=False):
    """Fields of Settings as Python callers give them, but for `optimizer` and `loss`, which may be functions too."""

    mem_limit: str | int | float
    method: Method
    device: str
    ram_limit: str | int | float | None
    offload_dir: str | Path | None
    output_dir: str | Path | None
    overwrite: bool
    weights: str | Path | None
    weights_partial: bool
    epochs: float | Sequence[float]
    max_steps: int | None
    batch_size: int | Sequence[int]
    micro_batch_size: int | None
    lr: float | Sequence[float]
    weight_decay: float
    momentum: float
    clip_grad_norm: float | None
    ema: float | None
    lr_schedule: LrSchedule | SchedulerFactory
    warmup_updates: int
    dtype: Precision | Literal["bfloat16", "float32"] | torch.dtype
    recovery_epochs: int
    recover: Literal["left", "all"] | None
    recovery_batch_size: int | None
    recovery_lr: float | None
    test_every: int | None
    eval_every: str | int | None
    early_stopping: int | None
    keep_best: bool
    best_by: str | None
    save_every: str | int
    partitions: int | Literal["auto"] | Sequence[int]
    tile: str | int
    objective: Objective | None
    kappa: float | None
    prototype_scale: float | Sequence[float] | None
    sil_inputs: Literal["cached", "synthetic"] | None
    subnets: int | None
    local_steps: int | None
    subnet_groups: int | None
    subnet_rows: Literal["shard", "all"] | None
    subnet_moments: Literal["keep", "zero"] | None
    shuffle: bool | Literal["auto"]
    cache_dtype: Precision | Literal["bfloat16", "float32"] | torch.dtype | None
    trace: str | Path | None
    log: TrackerName | Sequence[TrackerName] | None
    cached_views: int | None
    cache: Literal["auto", "rows", "none"]
    workers: int | None
    seed: int
