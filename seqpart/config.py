"""What a user may set about a run: each option once, with its type, its default and its help, in groups.

The docstring under a field is its help on the command line, and a group's heading is where --help shows it. Flags, keys of
files, arguments of `Trainer`, and what checkpoints say of a run are derived from the fields; so is seqpart/options.py, which
tools/write_options.py writes for editors and type checkers.
"""

import itertools
import math
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_type_hints

import torch

from seqpart.errors import OptionError
from seqpart.fields import (
    Also,
    Note,
    PerPartition,
    Positive,
    as_text,
    flag_of,
    note_of,
    values_of,
)
from seqpart.model.losses import LossName
from seqpart.model.scheduler import SchedulerFactory
from seqpart.schedule import lengths
from seqpart.text import short
from seqpart.units import parse_size

Method = Literal["auto", "sil", "ist", "streamed", "checkpointed", "full", "psl"]
OptimizerName = Literal["adam", "adamw", "sgd", "adafactor"]
LrSchedule = Literal["constant", "linear", "cosine"]
Objective = Literal["orthogonal", "prototype", "mse"]
Precision = Literal["fp32", "bf16"]
TrackerName = Literal["tensorboard", "wandb"]

MOST = 10**9
"""Epochs, or rows of a batch: whoever gives more has mistyped."""
WITH_DIRECTIONS = ("orthogonal", "prototype")
"""Objectives that have --prototype-scale, and tell classes apart by directions."""
SIZE = Note(expected="a size such as 2GB, 1.5GiB, 0.8 (a share) or auto", metavar="SIZE")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NO_LIMIT = "--mem-limit is missing. Give the limit to keep, such as --mem-limit 2GB."
NO_METHOD = (
    "--method is missing, and an approximate one is never taken silently. Give one of: auto (the fastest exact one that fits), "
    "streamed (exact, one partition at a time), checkpointed (exact, all weights, few activations), full (exact, must fit "
    "whole), psl (exact, pairs of scores of separable layers), sil (approximate, partitions trained one after the other), ist "
    "(approximate, subnets trained in turn)."
)
IN_PYTHON = {
    "learning_rate": "lr", "bf16": 'dtype="bf16"', "resume": "fit(..., resume=DIR)", "callbacks": "fit(..., callbacks=[...])",
    "compute_metrics": "fit(..., compute_metrics=...)",
}  # fmt: skip
"""What has another name in Python, or goes elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The memory that may be used, and how the network is cut for it."""

    heading: ClassVar[str] = "limit-and-method"
    mem_limit: Annotated[str | int | float, SIZE, Also("-m")]
    """The promise: memory that the run never passes. 2GB, 1.5GiB, 0.8 (of the device) or auto (what is free now).
    On CPU: the process's own memory, libraries included. On CUDA: the GPU's memory, context included."""
    method: Method = None  # type: ignore[assignment]
    """Exact training: streamed (one partition at a time), checkpointed (all weights, few activations), full (must fit
    whole), auto (the fastest of the three that fits), psl (one pair of scores of the partially-separable loss at a time; a
    model that ends in separable layers); or approximate: sil (partitions one after the other), ist (subnets in turn). Required:
    None is refused."""
    partitions: Annotated[
        Literal["auto"] | PerPartition[int],
        Note(expected="auto, a number from 1 up, or rising block numbers from 0 such as 0,20,40", metavar="auto|INT[,...]"),
    ] = "auto"
    """auto (the fewest that fit), a number, or the first block of each, such as 0,20,40."""
    tile: Annotated[str | int, Note(expected="a size such as 16MB, never or auto", metavar="SIZE|never|auto")] = "auto"
    """Let layers (nn.Linear, nn.Embedding) with a weight of more bytes be tiles of at most that size, which come and go alone:
    a size such as 16MB, never, or auto (exact methods, where nothing fits otherwise). The gradient of a tiled Linear's input is
    added up tile by tile, which rounds otherwise than the whole."""
    micro_batch_size: Positive[int] = None
    """Rows on the device at once. Default: the plan takes the largest that fits."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:N, sim, or sim:CARD: a card that need not be there, simulated."""
    ram_limit: Annotated[str | int | float | None, SIZE] = None
    """Host memory for homes and boundary rows, beside the limit.
    Default on CPU: none, so everything else is on disk. On CUDA: half of what is free, pinned."""

    def partition_choice(self) -> tuple[int | None, tuple[int, ...] | None]:
        """(number of partitions, first block of each), as far as they were asked for. Raises OptionError."""
        asked = self.partitions
        if asked == "auto":
            return None, None
        if isinstance(asked, int) and asked >= 1:
            return asked, None
        if isinstance(asked, int) or asked[0] != 0 or any(b <= a for a, b in itertools.pairwise(asked)):
            raise _unreadable("partitions", as_text(asked))
        return None, asked

    @property
    def tile_bytes(self) -> int | None:
        """0: never; None: auto. Raises OptionError."""
        if self.tile in ("never", "auto"):
            return 0 if self.tile == "never" else None
        try:
            return parse_size(self.tile)
        except OptionError:
            raise _unreadable("tile", self.tile) from None


@dataclass(frozen=True, kw_only=True)
class Loop:
    """How long is trained, on how many rows at once, and to what end."""

    heading: ClassVar[str] = "training"
    epochs: Annotated[PerPartition[float], Note(most=MOST, number="numbers above 0")] = 3
    """Passes over the training rows, per partition. With exact methods also a part of one: 0.5."""
    max_steps: Positive[int] = None
    """Updates to train for, however many epochs these are, in the place of --epochs (exact methods only)."""
    batch_size: Annotated[PerPartition[int], Note(most=MOST, number="whole numbers from 1 up")] = 64
    """Rows of one update, per partition."""
    loss: Annotated[
        LossName | None, Note(expected="cross-entropy, psl, mse or bce, or from Python a function or 'model'")
    ] = None  # fmt: skip
    """What the network's end learns: cross-entropy, psl (for classes: the partially-separable loss, the mean over rows of the
    sum of exp(score - the label's score) over all other classes, from a difference of 10 on its tangent; with the label's own
    class it would be exp(cross-entropy)), mse (for floats of any shape), or bce (yes-or-no labels, from 0 to 1, as many as
    outputs). Default: cross-entropy for classes, mse for floats."""
    dtype: Precision = "fp32"
    """fp32, or bf16: mixed precision by autocast, weights and optimizer state stay float32. The command takes --bf16 too."""
    shuffle: Annotated[bool | Literal["auto"], Note(expected="True, False or auto")] = "auto"
    """Whether to shuffle the training rows in every epoch: yes, no, or auto (no for objective mse, as in the paper)."""
    seed: int = 0
    """Seed of initial weights, row order, dropout and synthetic labels."""

    @property
    def autocast(self) -> torch.dtype | None:
        return None if self.dtype == "fp32" else DTYPES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Who makes the updates, and by how much."""

    heading: ClassVar[str] = "training"
    lr: Annotated[PerPartition[float], Also("--learning-rate")] = 1e-4
    """Learning rate, per partition."""
    optimizer: PerPartition[OptimizerName] = "adamw"
    """adam, adamw, sgd, or adafactor (its state is a row and a column of each matrix; --lr is relative to the size of a
    parameter's numbers, and torch's default is 0.01), per partition. Adam and AdamW are one but for --weight-decay."""
    weight_decay: float = 0.0
    """Weight decay of the optimizer."""
    momentum: float = 0.0
    """Momentum, for sgd only."""
    clip_grad_norm: Positive[float] = None
    """Scale gradients so that their norm is at most this: of the whole network; with sil, of each partition."""
    ema: float | None = None
    """Decay, such as 0.999, of an exponential moving average of the weights, which is kept beside the optimizer's state, tested
    at the end, and written to average.safetensors. Default: none."""
    lr_schedule: Annotated[
        LrSchedule | SchedulerFactory,
        Note(expected="constant, linear or cosine, or from Python a function from an optimizer to one of torch's schedulers"),
    ] = "constant"
    """constant, linear or cosine (down to zero at the last update); from Python also a function from an optimizer to a
    scheduler of torch, which steps once for each update, and begins anew in each partition of sil and in recovery."""
    warmup_updates: int = 0
    """Updates of linear growth before the learning rate is reached."""


@dataclass(frozen=True, kw_only=True)
class Testing:
    """When the test rows are looked at, and what follows from it."""

    heading: ClassVar[str] = "training"
    test_every: Positive[int] = None
    """Test after every so many epochs too (with sil: of the last partition, and of recovery). Default: at the end alone."""
    eval_every: Annotated[str | int | None, Note(expected=lengths.EXPECTED, metavar="OFTEN")] = None
    """Test after every so many updates (500) or epochs (2epochs) too, counted from the first; updates with exact methods only.
    Default: as --test-every says, which counts epochs."""
    early_stopping: Annotated[int | None, Note(number="evaluations, 1 or more")] = None
    """End training behind so many evaluations without a better one (exact methods, with --eval-every)."""
    keep_best: bool = False
    """Let the result be the weights of the best evaluation, and not the last (exact methods, with --eval-every)."""
    best_by: str | None = None
    """What the best evaluation has: the smallest loss (the default), the largest accuracy, or in Python the smallest or largest
    of a metric, as min:NAME or max:NAME."""

    @property
    def tests(self) -> lengths.Interval:
        """Between two passes over the test rows; neither: at the end alone. Raises OptionError."""
        return lengths.interval_of(self.eval_every, self.test_every)

    @property
    def between_tests(self) -> list[str]:
        """Flags that were given and need a test set."""
        return [flag_of(field.name) for field in fields(Testing) if getattr(self, field.name) not in (None, False)]


@dataclass(frozen=True, kw_only=True)
class Data:
    """Weights to begin with, and how training rows are read."""

    heading: ClassVar[str] = "data-and-model"
    weights: Path | None = None
    """Begin with these weights: a safetensors file, or a directory with one, or with several and their index. They go home one
    tensor at a time, so that a model whose parameters are on the meta device never exists whole."""
    weights_partial: bool = False
    """Let --weights lack some of the model's tensors, or have them in other shapes (a head for other classes): they stay as
    initialized. It may have others. Says which."""
    cache: Literal["auto", "rows", "none"] = "auto"
    """Which training rows are kept: auto (those that are seen to stay the same; others, and a DataLoader's, are read anew in
    every epoch), rows (all, as they are when they are read once), none (all are read anew)."""
    workers: Annotated[int | None, Note(above=-1, most=256, number="0 to 256")] = None
    """Processes that read rows which are not kept; each counts against the limit. 0: the run reads them itself. Default: as
    many as the DataLoader asks for, and 0 without one."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """What a run writes, and where."""

    heading: ClassVar[str] = "files-and-checkpoints"
    output_dir: Annotated[Path | None, Also("-o")] = None
    """Where the results go: a new or empty directory. Default: a new one under runs/."""
    overwrite: bool = False
    """Let --output-dir be a finished run of seqpart, and replace its results at the end."""
    offload_dir: Path | None = None
    """Where homes and boundary rows go while the run lasts. Default: in the output directory."""
    save_every: Annotated[
        str | int, Note(expected="updates (500), a time (30s, 10min, 2h) or never", metavar="OFTEN")
    ] = "10min"  # fmt: skip
    """How often to save a checkpoint: updates (500), a time (30s, 10min), or never. Ctrl-C saves too, unless never."""

    @property
    def saves(self) -> bool:
        return self.save_every != "never"

    @property
    def saving(self) -> tuple[int | None, float | None]:
        """(updates, seconds) between two checkpoints; the one that does not count is None. Raises OptionError."""
        if not self.saves:
            return None, None
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|)", str(self.save_every).strip())
        if match is None or not float(match[1]) or (not match[2] and "." in match[1]):
            raise _unreadable("save_every", self.save_every)
        if match[2]:
            return None, float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]]
        return int(match[1]), None


@dataclass(frozen=True, kw_only=True)
class Output:
    """Who is told what the run does."""

    heading: ClassVar[str] = "output"
    trace: Path | None = None
    """Write to this file what runs when: steps by stream, memory and traffic over time. Perfetto (ui.perfetto.dev) opens it."""
    log: PerPartition[TrackerName] | None = None
    """Tell loss, accuracy, learning rate, memory and rows per second to tensorboard, wandb (Weights & Biases), or both."""

    @property
    def trackers(self) -> tuple[TrackerName, ...]:
        return () if self.log is None else tuple(dict.fromkeys(values_of(self.log)))


@dataclass(frozen=True, kw_only=True)
class Sil:
    """Method sil alone."""

    heading: ClassVar[str] = "sil"
    objective: Objective | None = None
    """What an inner partition learns (sil only): orthogonal (cross-entropy to fixed random directions that are orthogonal),
    prototype (the same, as they are drawn) or mse (the paper: mean squared error to random numbers up to kappa). Default:
    orthogonal."""
    kappa: Positive[float] = None
    """Size of the paper's synthetic labels, for objective mse. Default: 10."""
    prototype_scale: Positive[PerPartition[float]] = None
    """Size of the logits, for objectives prototype and orthogonal: one number, or several for the partitions in turn, the
    last of them for all that follow. Default: 16 for the first, 8 for later ones (4 + ln(classes) where that is more)."""
    sil_inputs: Literal["cached", "synthetic"] | None = None
    """What later partitions train on (sil only): cached (outputs of the one before) or synthetic (its synthetic labels, so
    that no partition waits for another: figure 5 of the paper, which calls it impractical). Default: cached."""
    cache_dtype: Precision | None = None
    """Type of the cached boundary rows (sil only): fp32 or bf16. Default: fp32."""
    cached_views: Positive[int] = None
    """Draws of each row that is read anew whose outputs are cached for later partitions, whose epochs take them in turn (sil
    only). Default: 1."""

    @property
    def objective_name(self) -> Objective:
        return self.objective or "orthogonal"

    @property
    def prototype_scales(self) -> tuple[float, ...]:
        """The scales that were given: of the first partitions in turn, the last one for all that follow. Empty: the default."""
        return () if self.prototype_scale is None else values_of(self.prototype_scale)

    def prototype_scale_of(self, partition: int, classes: int) -> float:
        """Size of a partition's logits: by default 16 for the first, and 4 + ln(classes), at least 8, for all that follow.

        At 16 later ones may learn by heart the training rows that the first one has spread out already; at 4 they learn too
        little where it has not. At 4 + ln(classes) a row that is quite right has a probability of 0.98 among any number of
        classes. A first partition that is weak needs 16 (docs/objectives.md). Labels that are no classes (0) use neither.
        """
        scales = self.prototype_scales or (16.0, max(8.0, 4.0 + math.log(max(1, classes))))
        return scales[min(partition, len(scales) - 1)]

    @property
    def views(self) -> int:
        return self.cached_views or 1

    @property
    def cache_type(self) -> torch.dtype:
        return DTYPES[self.cache_dtype or "fp32"]


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Training of the whole network after sil."""

    heading: ClassVar[str] = "sil"
    recovery_epochs: Annotated[int, Note(above=-1, most=MOST, number=f"0 or more, and at most {MOST}")] = 0
    """After sil: epochs of exact back-propagation through the whole network, under the same limit."""
    recover: Literal["left", "all"] | None = None
    """What learns in recovery: left (all partitions but the last, as in the paper) or all. Default: left."""
    recovery_batch_size: Positive[int] = None
    """Rows of one update in recovery. Default: the largest --batch-size."""
    recovery_lr: Positive[float] = None
    """Learning rate of all partitions in recovery. Default: each one's own --lr."""


@dataclass(frozen=True, kw_only=True)
class Ist:
    """Method ist alone."""

    heading: ClassVar[str] = "ist"
    subnets: Positive[int] = None
    """Parts that the neurons of hidden layers are divided among, anew in every round (ist only, and required there)."""
    local_steps: Positive[int] = None
    """Updates of each subnet in a round (ist only); the last round of an epoch has those that are left. Default: 20."""
    subnet_groups: Positive[int] = None
    """Neurons that stay together when they are divided (ist only), where a layer's width is a multiple of it and enough for all
    subnets; elsewhere one by one, as 1 does everywhere (the paper's way). Default: 64."""
    subnet_rows: Literal["shard", "all"] | None = None
    """Training rows of a subnet in an epoch (ist only): shard (its own share of them) or all. Default: shard."""
    subnet_moments: Literal["keep", "zero"] | None = None
    """The optimizer's moments when a round begins (ist only): keep (cut out of the whole network's, and put back) or zero.
    Default: keep, so that one subnet is the whole network to the bit."""


@dataclass(frozen=True, kw_only=True)
class Config(Ist, Recovery, Sil, Output, Files, Data, Testing, Optimizer, Loop, Limits):
    """The options of all groups, of which Limits come first; `seqpart.settings.Settings` are those that have been checked.

    Where it says "per partition", a tuple gives each partition its own value: (5, 160) in Python, `5,160` on the command line.
    """

    def values(self) -> dict[str, Any]:
        """Every option by its name; of a job of the command those of its run alone."""
        return {field.name: getattr(self, field.name) for field in fields(Config)}

    def texts(self) -> dict[str, str]:
        """Every option as the command line would have it: what checkpoints say."""
        return {name: as_text(value) for name, value in self.values().items()}

    def to_json(self) -> dict[str, Any]:
        """Every option as JSON has it: numbers as numbers, several values as a list, a path as text, a function by name."""
        found = self.values()
        return {name: as_text(value) if isinstance(value, Path) or callable(value) else value for name, value in found.items()}

    def placed(self) -> Self:
        """With every path absolute: what the program's working directory is later does not matter."""
        paths: dict[str, Any] = {name: path.absolute() for name, path in self.values().items() if isinstance(path, Path)}
        return replace(self, **paths)


GROUPS: tuple[Any, ...] = tuple(reversed(Config.__bases__))
"""The groups of the options, as they stand above."""


def given_of(group: type[Any], config: Config) -> list[str]:
    """The options of a group that have a value."""
    return [field.name for field in fields(group) if getattr(config, field.name) != field.default]


def hints_of(kind: type[Any]) -> dict[str, Any]:
    """The types of its fields, each with its Note."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}


def _unreadable(name: str, found: object) -> OptionError:
    return OptionError(f"{flag_of(name)}: expected {note_of(hints_of(Config)[name]).expected}; found {short(found)}.")
