"""The options of a run in Python, for editors and type checkers. The fields are written by tools/write_options.py."""

import pathlib
from collections.abc import Sequence
from typing import Literal, TypeAlias, TypedDict, TypeVar

import torch

from seqpart.config import LrSchedule, Method, Objective, OptimizerOn, TrackerName
from seqpart.model.scheduler import SchedulerFactory

T = TypeVar("T")
Path: TypeAlias = str | pathlib.Path
PerPartition: TypeAlias = T | Sequence[T]
Positive: TypeAlias = T | None
Precision: TypeAlias = Literal["fp32", "bf16", "float32", "bfloat16"] | torch.dtype


class Options(TypedDict, total=False):
    """Fields of Settings as Python callers give them, but for `optimizer` and `loss`, which may be functions too."""

    mem_limit: str | int | float
    method: Method
    partitions: Literal["auto"] | PerPartition[int]
    tile: str | int
    loss_chunks: Literal["auto"] | int
    compile: bool
    micro_batch_size: Positive[int]
    device: str
    ram_limit: str | int | float | None
    optimizer_on: OptimizerOn
    epochs: PerPartition[float]
    max_steps: Positive[int]
    batch_size: PerPartition[int]
    label_smoothing: float
    mixup: float
    cutmix: float
    dtype: Precision
    shuffle: bool | Literal["auto"]
    seed: int
    lr: PerPartition[float]
    weight_decay: float
    no_decay: str
    momentum: float
    rounding: Literal["nearest", "stochastic"]
    moments_dtype: Precision | None
    clip_grad_norm: Positive[float]
    ema: float | None
    lr_schedule: LrSchedule | SchedulerFactory
    warmup_updates: int
    freeze: PerPartition[str] | None
    unfreeze: str | dict[str, str] | None
    test_every: Positive[int]
    eval_every: str | int | None
    early_stopping: int | None
    keep_best: bool
    best_by: str | None
    weights: Path | None
    weights_partial: bool
    cache: Literal["auto", "rows", "none"]
    workers: int | None
    output_dir: Path | None
    overwrite: bool
    offload_dir: Path | None
    save_every: str | int
    export_every: str | int | None
    keep_exports: Positive[int]
    trace: Path | None
    log: PerPartition[TrackerName] | None
    objective: Objective | None
    kappa: Positive[float]
    prototype_scale: Positive[PerPartition[float]]
    sil_inputs: Literal["cached", "synthetic"] | None
    cache_dtype: Precision | None
    cached_views: Positive[int]
    recovery_epochs: int
    recover: Literal["left", "all"] | None
    recovery_batch_size: Positive[int]
    recovery_lr: Positive[float]
    subnets: Positive[int]
    local_steps: Positive[int]
    subnet_groups: Positive[int]
    subnet_rows: Literal["shard", "all"] | None
    subnet_moments: Literal["keep", "zero"] | None
