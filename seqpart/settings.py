"""What a user may set about a run. The docstring under each field is its help on the command line."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

import torch

from seqpart.errors import OptionError
from seqpart.files.text import refuse_unusable, short
from seqpart.methods import methods_named
from seqpart.methods.objectives import DEFAULT_OBJECTIVE, OBJECTIVES, WITH_DIRECTIONS, default_scales
from seqpart.schedule.learning_rate import rate_schedule

T = TypeVar("T", int, float, str)

MOST = 10**9
"""Epochs, or rows of a batch: whoever gives more has mistyped."""
OF_SIL = ("objective", "kappa", "prototype_scale", "sil_inputs", "cache_dtype")
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16}
CACHE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


Numbers = int | float | str | Sequence[int] | Sequence[float]
"""One value, or one for each partition."""


class Options(TypedDict, total=False):
    """Fields of Settings as Python callers give them, but for `optimizer`, which may be a function too."""

    mem_limit: str | int | float
    method: Literal["sil", "streamed", "checkpointed", "full", "auto"]
    device: str
    ram_limit: str | int | float | None
    offload_dir: str | Path | None
    output_dir: str | Path | None
    overwrite: bool
    epochs: Numbers
    batch_size: Numbers
    micro_batch_size: int | None
    lr: Numbers
    weight_decay: float
    momentum: float
    clip_grad_norm: float | None
    lr_schedule: Literal["constant", "linear", "cosine"]
    warmup_updates: int
    dtype: Literal["fp32", "bf16"]
    recovery_epochs: int
    recover: Literal["left", "all"] | None
    recovery_batch_size: int | None
    recovery_lr: float | None
    test_every: int | None
    save_every: str | int
    partitions: int | str | Sequence[int]
    objective: Literal["orthogonal", "prototype", "mse"] | None
    kappa: float | None
    prototype_scale: Numbers | None
    sil_inputs: Literal["cached", "synthetic"] | None
    shuffle: bool | Literal["auto", "yes", "no"]
    cache_dtype: Literal["fp32", "bf16"] | None
    seed: int


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a training run. Where it says "per partition", `5,160` gives each partition its own value."""

    mem_limit: str
    """The promise: memory that the run never passes. 2GB, 1.5GiB, 0.8 (of the device) or auto (what is free now).
    On CPU: the process's own memory, libraries included. On CUDA: the GPU's memory, context included."""
    method: str = "sil"
    """sil (partitions one after the other, approximate), or exact training: streamed (one partition at a time),
    checkpointed (all weights, few activations), full (must fit whole), auto (the fastest of the three that fits)."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda or cuda:N."""
    ram_limit: str | None = None
    """Host memory for homes and boundary rows, beside the limit.
    Default on CPU: none, so everything else is on disk. On CUDA: half of what is free, pinned."""
    offload_dir: Path | None = None
    """Where homes and boundary rows go while the run lasts. Default: in the output directory."""
    output_dir: Path | None = None
    """Where the results go: a new or empty directory. Default: a new one under runs/."""
    overwrite: bool = False
    """Let --output-dir be a finished run of seqpart, and replace its results at the end."""
    epochs: str = "3"
    """Passes over the training rows, per partition."""
    batch_size: str = "64"
    """Rows of one update, per partition."""
    micro_batch_size: int | None = None
    """Rows on the device at once. Default: the plan takes the largest that fits."""
    lr: str = "1e-4"
    """Learning rate, per partition."""
    optimizer: str = "adam"
    """adam, adamw or sgd, per partition."""
    weight_decay: float = 0.0
    """Weight decay of the optimizer."""
    momentum: float = 0.0
    """Momentum, for sgd only."""
    clip_grad_norm: float | None = None
    """Scale gradients so that their norm is at most this: of the whole network; with sil, of each partition."""
    lr_schedule: str = "constant"
    """constant, linear or cosine (down to zero at the last update)."""
    warmup_updates: int = 0
    """Updates of linear growth before the learning rate is reached."""
    dtype: str = "fp32"
    """fp32, or bf16: mixed precision by autocast, weights and optimizer state stay float32."""
    recovery_epochs: int = 0
    """After sil: epochs of exact back-propagation through the whole network, under the same limit."""
    recover: str | None = None
    """What learns in recovery: left (all partitions but the last, as in the paper) or all. Default: left."""
    recovery_batch_size: int | None = None
    """Rows of one update in recovery. Default: the largest --batch-size."""
    recovery_lr: float | None = None
    """Learning rate of all partitions in recovery. Default: each one's own --lr."""
    test_every: int | None = None
    """Test after every so many epochs too (with sil: of the last partition, and of recovery). Default: at the end alone."""
    save_every: str = "10min"
    """How often to save a checkpoint: updates (500), a time (30s, 10min), or never. Ctrl-C saves too, unless never."""
    partitions: str = "auto"
    """auto (the fewest that fit), a number, or the first block of each, such as 0,20,40."""
    objective: str | None = None
    """What an inner partition learns (sil only): orthogonal (cross-entropy to fixed random directions that are orthogonal),
    prototype (the same, as they are drawn) or mse (the paper: mean squared error to kappa * U(0,1)). Default: orthogonal."""
    kappa: float | None = None
    """Size of the paper's synthetic labels, for objective mse. Default: 10."""
    prototype_scale: str | None = None
    """Size of the logits, for objectives prototype and orthogonal: one number, or several for the partitions in turn, the
    last of them for all that follow. Default: 16 for the first, 8 for later ones (4 + ln(classes) where that is more)."""
    sil_inputs: str | None = None
    """What later partitions train on (sil only): cached (outputs of the one before) or synthetic (its synthetic labels, so
    that no partition waits for another: figure 5 of the paper, which calls it impractical). Default: cached."""
    shuffle: str = "auto"
    """Whether to shuffle the training rows in every epoch: yes, no, or auto (no for objective mse, as in the paper)."""
    cache_dtype: str | None = None
    """Type of the cached boundary rows (sil only): fp32 or bf16. Default: fp32."""
    seed: int = 0
    """Of initial weights, row order, dropout and synthetic labels."""

    def __post_init__(self) -> None:
        rate_schedule(self.lr_schedule, self.warmup_updates)
        _ = self.saving
        for field in fields(self):
            if isinstance(path := getattr(self, field.name), Path):
                refuse_unusable(f"--{field.name.replace('_', '-')}", path)
        problems = [text for text in self._problems() if text]
        if problems:
            raise OptionError("; ".join(problems) + ".")

    def _problems(self) -> list[str]:
        method = methods_named(self.method)[-1]
        sil = method.name == "sil"
        kind = self.objective_name
        asked = [(name, getattr(self, name) is not None) for name in OF_SIL]
        return [
            *(
                f"--{name.replace('_', '-')} goes with --method sil only; found --method {self.method}. Leave it out"
                for name, given in asked
                if given and not sil
            ),
            "" if kind in OBJECTIVES else f"--objective: expected one of {', '.join(OBJECTIVES)}; found {kind!r}",
            f"--kappa goes with --objective mse; found --objective {kind}"
            if sil and self.kappa is not None and kind != "mse"
            else "",
            f"--prototype-scale goes with --objective {' or '.join(WITH_DIRECTIONS)}; found --objective {kind}"
            if sil and self.prototype_scale is not None and kind not in WITH_DIRECTIONS
            else "",
            "" if sil or not self.recovery_epochs else f"--recovery-epochs goes with --method sil only; found {self.method}",
            *(
                f"--{name.replace('_', '-')} goes with --recovery-epochs only. Leave it out"
                for name in ("recover", "recovery_batch_size", "recovery_lr")
                if getattr(self, name) is not None and not self.recovery_epochs
            ),
            ""
            if 0 <= self.recovery_epochs <= MOST
            else f"--recovery-epochs: expected 0 or more, and at most {MOST}; found {short(self.recovery_epochs)}",
            _positive("--recovery-batch-size", self.recovery_batch_size),
            _positive("--recovery-lr", self.recovery_lr),
            "" if self.recover in (None, "left", "all") else f"--recover: expected left or all; found {self.recover!r}",
            "" if self.dtype in AUTOCAST else f"--dtype: expected {' or '.join(AUTOCAST)}; found {self.dtype!r}",
            "" if self.shuffle in ("auto", "yes", "no") else f"--shuffle: expected yes, no or auto; found {self.shuffle!r}",
            _positive("--kappa", self.kappa),
            *(_positive("--prototype-scale", scale) for scale in self.prototype_scales),
            _positive("--clip-grad-norm", self.clip_grad_norm),
            _positive("--micro-batch-size", self.micro_batch_size),
            _positive("--test-every", self.test_every),
            ""
            if self.sil_inputs in (None, "cached", "synthetic")
            else f"--sil-inputs: expected cached or synthetic; found {self.sil_inputs!r}",
            ""
            if self.cache_dtype in (None, *CACHE_DTYPES)
            else f"--cache-dtype: expected fp32 or bf16; found {self.cache_dtype!r}",
            ""
            if method.cuts or self.partitions in ("auto", "1")
            else f"--partitions: method {self.method} has one partition; found {self.partitions!r}",
        ]

    @classmethod
    def of(cls, **options: Any) -> "Settings":
        """Settings from Python values: a number, or a list with one value per partition, where the text form is `5,160`.

        Raises OptionError for a name that is not a setting.
        """
        known = {field.name: field for field in fields(cls)}
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise OptionError(f"unknown setting(s): {', '.join(unknown)}. Known: {', '.join(sorted(known))}.")
        if "mem_limit" not in options:
            raise OptionError("mem_limit is missing: give the limit to keep, such as mem_limit='2GB'.")
        return cls(**{name: _typed(name, value, str(known[name].type)) for name, value in options.items()})

    @property
    def objective_name(self) -> str:
        return self.objective or DEFAULT_OBJECTIVE

    @property
    def prototype_scales(self) -> list[float]:
        """Those given: of the first partitions in turn, the last one for all that follow. Empty: the default."""
        return [] if self.prototype_scale is None else listed("--prototype-scale", self.prototype_scale, float)

    def prototype_scale_of(self, partition: int, classes: int) -> float:
        scales = self.prototype_scales or default_scales(classes)
        return scales[min(partition, len(scales) - 1)]

    @property
    def cache_type(self) -> torch.dtype:
        return CACHE_DTYPES[self.cache_dtype or "fp32"]

    @property
    def autocast(self) -> torch.dtype | None:
        return AUTOCAST[self.dtype]

    @property
    def saves(self) -> bool:
        return self.save_every != "never"

    @property
    def saving(self) -> tuple[int | None, float | None]:
        """(updates, seconds) between two checkpoints; the one that does not count is None. Raises OptionError."""
        if not self.saves:
            return None, None
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|)", self.save_every.strip())
        if match is None or not float(match[1]) or (not match[2] and "." in match[1]):
            raise OptionError(
                f"--save-every: expected updates (500), a time (30s, 10min, 2h) or never; found {self.save_every!r}."
            )
        if match[2]:
            return None, float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]]
        return int(match[1]), None

    @property
    def shuffles(self) -> bool:
        if self.shuffle == "auto":
            return self.method != "sil" or self.objective_name != "mse"
        return self.shuffle == "yes"

    def partition_choice(self) -> tuple[int | None, tuple[int, ...] | None]:
        """(number of partitions, first block of each), as far as they were asked for."""
        if self.partitions == "auto":
            return None, None
        numbers = listed("--partitions", self.partitions, int)
        if len(numbers) == 1 and numbers[0] >= 1:
            return numbers[0], None
        if len(numbers) == 1 or numbers[0] != 0 or any(b <= a for a, b in itertools.pairwise(numbers)):
            raise OptionError(
                f"--partitions: expected auto, a number from 1 up, or rising block numbers from 0 such as 0,20,40; "
                f"found {self.partitions!r}."
            )
        return None, tuple(numbers)


def _typed(name: str, value: Any, kind: str) -> Any:
    """`value` as the field's type, from what a Python caller would naturally give. Raises OptionError for another."""
    if value is None and "None" in kind:
        return None
    if "str" in kind:
        return _as_text(value)
    if "Path" in kind and isinstance(value, str | Path):
        return Path(value)
    if "bool" in kind and isinstance(value, bool):
        return value
    if "int" in kind and isinstance(value, int) and not isinstance(value, bool):
        return value
    if "float" in kind and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    wanted = next(word for part, word in _WANTED.items() if part in kind)
    raise OptionError(f"{name}: expected {wanted}; found {value!r}.")


_WANTED = {"Path": "a path", "bool": "True or False", "int": "a whole number", "float": "a number"}


def _as_text(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(str(part) for part in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _positive(name: str, value: float | None) -> str:
    return "" if value is None or 0 < value < float("inf") else f"{name}: expected a number above zero; found {value}"


def listed(name: str, text: str, kind: Callable[[str], T]) -> list[T]:
    """The values of `5,160`. Raises OptionError, naming the option."""
    try:
        return [kind(part.strip()) for part in text.split(",")]
    except ValueError:
        number = "whole number" if kind is int else "number"
        raise OptionError(f"{name}: expected a {number}, or {number}s with commas; found {short(text)}.") from None


def per_partition(name: str, text: str, kind: Callable[[str], T], count: int) -> list[T]:
    """One value for each of `count` partitions. Raises OptionError where the numbers differ."""
    values = listed(name, text, kind)
    if len(values) == 1:
        return values * count
    if len(values) != count:
        raise OptionError(
            f"{name} {text if len(text) < 60 else '...'} gives {len(values)} values, and the plan has {count} partition(s). "
            f"Give one value, or {count}; or fix the number with --partitions {len(values)}."
        )
    return values


def at_least_one(name: str, values: Sequence[int]) -> None:
    if min(values) < 1:
        raise OptionError(f"{name}: expected whole numbers from 1 up; found {min(values)}.")
    if max(values) > MOST:
        raise OptionError(f"{name}: expected whole numbers up to {MOST}; found {short(max(values))}.")
