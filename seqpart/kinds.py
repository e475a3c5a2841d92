"""The words and numbers that settings may be, what is expected where types do not say it, and values for each partition."""

import math
from collections.abc import Sequence
from typing import Literal, TypeVar

import torch

from seqpart.errors import OptionError
from seqpart.schedule import lengths
from seqpart.text import short
from seqpart.values import as_text

T = TypeVar("T", int, float, str)

EPOCHS = 3
MOST = 10**9
"""Epochs, or rows of a batch: whoever gives more has mistyped."""
MOST_WORKERS = 256
OF_SIL = ("objective", "kappa", "prototype_scale", "sil_inputs", "cache_dtype", "cached_views")
OF_IST = ("subnets", "local_steps", "subnet_groups", "subnet_rows", "subnet_moments")
APPROXIMATE = ("sil", "ist")
"""Methods that do not have the bits of plain training."""
DEFAULT_OBJECTIVE = "orthogonal"
WITH_DIRECTIONS = ("orthogonal", "prototype")
"""Objectives that have --prototype-scale, and tell classes apart by directions."""
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16}
CACHE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Method = Literal["auto", "sil", "ist", "streamed", "checkpointed", "full", "psl"]
OptimizerName = Literal["adam", "adamw", "sgd", "adafactor"]
LrSchedule = Literal["constant", "linear", "cosine"]
Objective = Literal["orthogonal", "prototype", "mse"]
Precision = Literal["fp32", "bf16"]
TrackerName = Literal["tensorboard", "wandb"]

NO_METHOD = (
    "--method is missing, and an approximate one is never taken silently. Give one of: auto (the fastest exact one that fits), "
    "streamed (exact, one partition at a time), checkpointed (exact, all weights, few activations), full (exact, must fit "
    "whole), psl (exact, pairs of scores of separable layers), sil (approximate, partitions trained one after the other), ist "
    "(approximate, subnets trained in turn)."
)
EXPECTED = {
    "mem_limit": "a size such as 2GB, 1.5GiB, 0.8 (a share) or auto",
    "ram_limit": "a size such as 2GB, 1.5GiB, 0.8 (a share) or auto",
    "save_every": "updates (500), a time (30s, 10min, 2h) or never",
    "partitions": "auto, a number from 1 up, or rising block numbers from 0 such as 0,20,40",
    "eval_every": lengths.EXPECTED,
    "loss": "cross-entropy, psl, mse or bce, or from Python a function or 'model'",
    "lr_schedule": "constant, linear or cosine, or from Python a function from an optimizer to one of torch's schedulers",
    "shuffle": "True, False or auto",
    "tile": "a size such as 16MB, never or auto",
}
"""Where the types do not say it all."""


def positive(name: str, value: float | None) -> str:
    """What is wrong with a number that has to be above zero; "" where nothing is."""
    return "" if value is None or 0 < value < float("inf") else f"{name}: expected a number above zero; found {value}"


def values_of(setting: T | tuple[T, ...]) -> tuple[T, ...]:
    """Those given: one, or one for each partition."""
    return setting if isinstance(setting, tuple) else (setting,)


def per_partition(name: str, setting: T | tuple[T, ...], count: int) -> tuple[T, ...]:
    """One value for each of `count` partitions. Raises OptionError where the numbers differ."""
    values = values_of(setting)
    if len(values) == 1:
        return values * count
    if len(values) != count:
        text = as_text(values)
        raise OptionError(
            f"{name} {text if len(text) < 60 else '...'} gives {len(values)} values, and the plan has {count} partition(s). "
            f"Give one value, or {count}; or fix the number with --partitions {len(values)}."
        )
    return values


def refuse_outside(name: str, values: Sequence[float], expected: str, least: float = 0.5) -> None:
    """least: what all of them must be above."""
    if not all(value > least for value in values):
        raise OptionError(f"{name}: expected {expected}; found {min(values)}.")
    if max(values) > MOST:
        raise OptionError(f"{name}: expected {expected}, at most {MOST}; found {short(max(values))}.")


def default_scales(classes: int) -> list[float]:
    """Of the first partition and of all that follow: 16, and 4 + ln(classes), at least 8.

    At 16 later ones may learn by heart the training rows that the first one has spread out already; at 4 they learn too
    little where it has not. At 4 + ln(classes) a row that is quite right has a probability of 0.98 among any number of
    classes. A first partition that is weak needs 16 (docs/objectives.md). Labels that are no classes (0 of them) use neither.
    """
    return [16.0, max(8.0, 4.0 + math.log(max(1, classes)))]
