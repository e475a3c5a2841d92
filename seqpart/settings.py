"""What a user may set about a run. The docstring under each field is its help on the command line."""

import itertools
import re
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self, get_type_hints

import torch

from seqpart.errors import OptionError
from seqpart.kinds import (
    APPROXIMATE,
    AUTOCAST,
    CACHE_DTYPES,
    DEFAULT_OBJECTIVE,
    EPOCHS,
    EXPECTED,
    MOST,
    MOST_WORKERS,
    NO_METHOD,
    OF_IST,
    OF_SIL,
    WITH_DIRECTIONS,
    LrSchedule,
    Method,
    Objective,
    OptimizerName,
    Precision,
    TrackerName,
    default_scales,
    positive,
    refuse_outside,
    values_of,
)
from seqpart.model.losses import LossName
from seqpart.model.scheduler import SchedulerFactory, problems
from seqpart.schedule import lengths, refusals
from seqpart.schedule.learning_rate import rate_schedule
from seqpart.text import refuse_unusable, short
from seqpart.units import parse_size
from seqpart.values import IN_PYTHON, NO_LIMIT, as_text, checked_value, flag_of, joined, said_of


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a training run. Where it says "per partition", a tuple gives each partition its own value: (5, 160) in
    Python, `5,160` on the command line.

    Raises OptionError for values of another type, out of range, or that contradict each other, and where `method` is missing.
    """

    mem_limit: str | int | float
    """The promise: memory that the run never passes. 2GB, 1.5GiB, 0.8 (of the device) or auto (what is free now).
    On CPU: the process's own memory, libraries included. On CUDA: the GPU's memory, context included."""
    method: Method = None  # type: ignore[assignment]
    """Exact training: streamed (one partition at a time), checkpointed (all weights, few activations), full (must fit
    whole), auto (the fastest of the three that fits), psl (one pair of scores of the partially-separable loss at a time; a
    model that ends in separable layers); or approximate: sil (partitions one after the other), ist (subnets in turn). Required:
    None is refused."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:N, sim, or sim:CARD: a card that need not be there, simulated."""
    ram_limit: str | int | float | None = None
    """Host memory for homes and boundary rows, beside the limit.
    Default on CPU: none, so everything else is on disk. On CUDA: half of what is free, pinned."""
    offload_dir: Path | None = None
    """Where homes and boundary rows go while the run lasts. Default: in the output directory."""
    output_dir: Path | None = None
    """Where the results go: a new or empty directory. Default: a new one under runs/."""
    overwrite: bool = False
    """Let --output-dir be a finished run of seqpart, and replace its results at the end."""
    weights: Path | None = None
    """Begin with these weights: a safetensors file, or a directory with one, or with several and their index. They go home one
    tensor at a time, so that a model whose parameters are on the meta device never exists whole."""
    weights_partial: bool = False
    """Let --weights lack some of the model's tensors, or have them in other shapes (a head for other classes): they stay as
    initialized. It may have others. Says which."""
    epochs: float | tuple[float, ...] = EPOCHS
    """Passes over the training rows, per partition. With exact methods also a part of one: 0.5."""
    max_steps: int | None = None
    """Updates to train for, however many epochs these are, in the place of --epochs (exact methods only)."""
    batch_size: int | tuple[int, ...] = 64
    """Rows of one update, per partition."""
    micro_batch_size: int | None = None
    """Rows on the device at once. Default: the plan takes the largest that fits."""
    lr: float | tuple[float, ...] = 1e-4
    """Learning rate, per partition."""
    loss: LossName | None = None
    """What the network's end learns: cross-entropy, psl (for classes: the partially-separable loss, the mean over rows of the
    sum of exp(score - the label's score) over all other classes, from a difference of 10 on its tangent; with the label's own
    class it would be exp(cross-entropy)), mse (for floats of any shape), or bce (yes-or-no labels, from 0 to 1, as many as
    outputs). Default: cross-entropy for classes, mse for floats."""
    optimizer: OptimizerName | tuple[OptimizerName, ...] = "adamw"
    """adam, adamw, sgd, or adafactor (its state is a row and a column of each matrix; --lr is relative to the size of a
    parameter's numbers, and torch's default is 0.01), per partition. Adam and AdamW are one but for --weight-decay."""
    weight_decay: float = 0.0
    """Weight decay of the optimizer."""
    momentum: float = 0.0
    """Momentum, for sgd only."""
    clip_grad_norm: float | None = None
    """Scale gradients so that their norm is at most this: of the whole network; with sil, of each partition."""
    ema: float | None = None
    """Decay, such as 0.999, of an exponential moving average of the weights, which is kept beside the optimizer's state, tested
    at the end, and written to average.safetensors. Default: none."""
    lr_schedule: LrSchedule | SchedulerFactory = "constant"
    """constant, linear or cosine (down to zero at the last update); from Python also a function from an optimizer to a
    scheduler of torch, which steps once for each update, and begins anew in each partition of sil and in recovery."""
    warmup_updates: int = 0
    """Updates of linear growth before the learning rate is reached."""
    dtype: Precision = "fp32"
    """fp32, or bf16: mixed precision by autocast, weights and optimizer state stay float32. The command takes --bf16 too."""
    recovery_epochs: int = 0
    """After sil: epochs of exact back-propagation through the whole network, under the same limit."""
    recover: Literal["left", "all"] | None = None
    """What learns in recovery: left (all partitions but the last, as in the paper) or all. Default: left."""
    recovery_batch_size: int | None = None
    """Rows of one update in recovery. Default: the largest --batch-size."""
    recovery_lr: float | None = None
    """Learning rate of all partitions in recovery. Default: each one's own --lr."""
    test_every: int | None = None
    """Test after every so many epochs too (with sil: of the last partition, and of recovery). Default: at the end alone."""
    eval_every: str | int | None = None
    """Test after every so many updates (500) or epochs (2epochs) too, counted from the first; updates with exact methods only.
    Default: as --test-every says, which counts epochs."""
    early_stopping: int | None = None
    """End training behind so many evaluations without a better one (exact methods, with --eval-every)."""
    keep_best: bool = False
    """Let the result be the weights of the best evaluation, and not the last (exact methods, with --eval-every)."""
    best_by: str | None = None
    """What the best evaluation has: the smallest loss (the default), the largest accuracy, or in Python the smallest or largest
    of a metric, as min:NAME or max:NAME."""
    save_every: str | int = "10min"
    """How often to save a checkpoint: updates (500), a time (30s, 10min), or never. Ctrl-C saves too, unless never."""
    partitions: int | Literal["auto"] | tuple[int, ...] = "auto"
    """auto (the fewest that fit), a number, or the first block of each, such as 0,20,40."""
    tile: str | int = "auto"
    """Let layers (nn.Linear, nn.Embedding) with a weight of more bytes be tiles of at most that size, which come and go alone:
    a size such as 16MB, never, or auto (exact methods, where nothing fits otherwise). The gradient of a tiled Linear's input is
    added up tile by tile, which rounds otherwise than the whole."""
    objective: Objective | None = None
    """What an inner partition learns (sil only): orthogonal (cross-entropy to fixed random directions that are orthogonal),
    prototype (the same, as they are drawn) or mse (the paper: mean squared error to random numbers up to kappa). Default:
    orthogonal."""
    kappa: float | None = None
    """Size of the paper's synthetic labels, for objective mse. Default: 10."""
    prototype_scale: float | tuple[float, ...] | None = None
    """Size of the logits, for objectives prototype and orthogonal: one number, or several for the partitions in turn, the
    last of them for all that follow. Default: 16 for the first, 8 for later ones (4 + ln(classes) where that is more)."""
    sil_inputs: Literal["cached", "synthetic"] | None = None
    """What later partitions train on (sil only): cached (outputs of the one before) or synthetic (its synthetic labels, so
    that no partition waits for another: figure 5 of the paper, which calls it impractical). Default: cached."""
    subnets: int | None = None
    """Parts that the neurons of hidden layers are divided among, anew in every round (ist only, and required there)."""
    local_steps: int | None = None
    """Updates of each subnet in a round (ist only); the last round of an epoch has those that are left. Default: 20."""
    subnet_groups: int | None = None
    """Neurons that stay together when they are divided (ist only), where a layer's width is a multiple of it and enough for all
    subnets; elsewhere one by one, as 1 does everywhere (the paper's way). Default: 64."""
    subnet_rows: Literal["shard", "all"] | None = None
    """Training rows of a subnet in an epoch (ist only): shard (its own share of them) or all. Default: shard."""
    subnet_moments: Literal["keep", "zero"] | None = None
    """The optimizer's moments when a round begins (ist only): keep (cut out of the whole network's, and put back) or zero.
    Default: keep, so that one subnet is the whole network to the bit."""
    shuffle: bool | Literal["auto"] = "auto"
    """Whether to shuffle the training rows in every epoch: yes, no, or auto (no for objective mse, as in the paper)."""
    cache_dtype: Precision | None = None
    """Type of the cached boundary rows (sil only): fp32 or bf16. Default: fp32."""
    trace: Path | None = None
    """Write to this file what runs when: steps by stream, memory and traffic over time. Perfetto (ui.perfetto.dev) opens it."""
    log: TrackerName | tuple[TrackerName, ...] | None = None
    """Tell loss, accuracy, learning rate, memory and rows per second to tensorboard, wandb (Weights & Biases), or both."""
    cached_views: int | None = None
    """Draws of each row that is read anew whose outputs are cached for later partitions, whose epochs take them in turn (sil
    only). Default: 1."""
    cache: Literal["auto", "rows", "none"] = "auto"
    """Which training rows are kept: auto (those that are seen to stay the same; others, and a DataLoader's, are read anew in
    every epoch), rows (all, as they are when they are read once), none (all are read anew)."""
    workers: int | None = None
    """Processes that read rows which are not kept; each counts against the limit. 0: the run reads them itself. Default: as
    many as the DataLoader asks for, and 0 without one."""
    seed: int = 0
    """Of initial weights, row order, dropout and synthetic labels."""

    def __post_init__(self) -> None:
        misfits = self._take_types()
        if isinstance(self.lr_schedule, str):
            rate_schedule(self.lr_schedule, self.warmup_updates)
        _ = self.saving, self.partition_choice(), self.tile_bytes, self.tests
        epochs = tuple(map(lengths.whole_where_it_is, values_of(self.epochs)))
        object.__setattr__(self, "epochs", epochs if isinstance(self.epochs, tuple) else epochs[0])
        refuse_outside("--epochs", epochs, "numbers above 0", least=0.0)
        refuse_outside("--batch-size", values_of(self.batch_size), "whole numbers from 1 up")
        for field in fields(self):
            if isinstance(path := getattr(self, field.name), Path):
                refuse_unusable(flag_of(field.name), path)
        problems = [*misfits, *(text for text in self._problems() if text)]
        if problems:
            raise OptionError(joined(problems))

    def _take_types(self) -> list[str]:
        """Take every value as its field's type has it; those of another type are told, and their defaults taken, so that
        all that is wrong is said at once. Raises OptionError where the method is missing."""
        if self.method is None:
            raise OptionError(NO_METHOD)
        problems = []
        for field in fields(Settings):
            try:
                expected = EXPECTED.get(field.name, "")
                value = checked_value(field.name, getattr(self, field.name), _types()[field.name], expected=expected)
            except OptionError as error:
                problems.append(error.with_flags)
                value = "sil" if field.name == "method" else field.default
            object.__setattr__(self, field.name, value)
        return problems

    def _problems(self) -> list[str]:
        sil, in_pairs = self.method == "sil", self.method == "psl"
        kind = self.objective_name
        owners = {**dict.fromkeys(OF_SIL, "sil"), **dict.fromkeys(OF_IST, "ist")}
        return [
            "--weights-partial goes with --weights. Leave it out" if self.weights_partial and self.weights is None else "",
            *(
                f"{flag_of(name)} goes with --method {owner} only; found --method {self.method}. Leave it out"
                for name, owner in owners.items()
                if getattr(self, name) is not None and self.method != owner
            ),
            "--method ist needs --subnets: how many parts the network is divided into" if self.lacks_subnets else "",
            "--tile goes with exact methods; method ist divides large layers itself"
            if self.method == "ist" and self.tile_bytes
            else "",
            *(positive(flag_of(name), getattr(self, name)) for name in OF_IST[:3]),
            f"--kappa goes with --objective mse; found --objective {kind}"
            if sil and self.kappa is not None and kind != "mse"
            else "",
            f"--prototype-scale goes with --objective {' or '.join(WITH_DIRECTIONS)}; found --objective {kind}"
            if sil and self.prototype_scale is not None and kind not in WITH_DIRECTIONS
            else "",
            "" if sil or not self.recovery_epochs else f"--recovery-epochs goes with --method sil only; found {self.method}",
            *(
                f"{flag_of(name)} goes with --recovery-epochs only. Leave it out"
                for name in ("recover", "recovery_batch_size", "recovery_lr")
                if getattr(self, name) is not None and not self.recovery_epochs
            ),
            ""
            if 0 <= self.recovery_epochs <= MOST
            else f"--recovery-epochs: expected 0 or more, and at most {MOST}; found {short(self.recovery_epochs)}",
            positive("--recovery-batch-size", self.recovery_batch_size),
            positive("--recovery-lr", self.recovery_lr),
            *problems(self.lr_schedule, self.warmup_updates, self.ema, self.method, recovers=bool(self.recovery_epochs)),
            positive("--kappa", self.kappa),
            positive("--cached-views", self.cached_views),
            "--cached-views goes with --sil-inputs cached. Leave one of the two out"
            if self.views > 1 and self.sil_inputs == "synthetic"
            else "",
            *(positive("--prototype-scale", scale) for scale in self.prototype_scales),
            positive("--clip-grad-norm", self.clip_grad_norm),
            positive("--micro-batch-size", self.micro_batch_size),
            positive("--test-every", self.test_every),
            *refusals.problems(self, exact=self.method not in APPROXIMATE, default_epochs=EPOCHS),
            ""
            if self.workers is None or 0 <= self.workers <= MOST_WORKERS
            else f"--workers: expected 0 to {MOST_WORKERS}; found {short(self.workers)}",
            *(
                f"{flag_of(name)} does not go with --method psl, whose gradients and partitions are those of pairs of scores. "
                "Leave it out"
                for name in ("clip_grad_norm", "partitions", "tile")
                if in_pairs and getattr(self, name) not in (None, "auto", "never")
            ),
            f"--optimizer adafactor looks at a weight as a whole, and {self.divides_weights} divides it. Take another"
            if self.divides_weights and "adafactor" in values_of(self.optimizer)
            else "",
            f"--method psl trains by --loss psl; found --loss {self.loss}. Leave it out"
            if in_pairs and self.loss not in (None, "psl")
            else "",
            ""
            if self.method != "full" or self.partitions in ("auto", 1)
            else f"--partitions: method {self.method} has one partition; found {as_text(self.partitions)!r}",
        ]

    @classmethod
    def of(cls, **options: Any) -> "Settings":
        """Settings from options by name. Raises OptionError for a name that is not a setting, and where no limit is given."""
        names = {field.name for field in fields(cls)}
        if unknown := sorted(set(options) - names):
            known = sorted({*names, "quiet"})  # which Trainer takes beside them
            said = said_of(unknown, known, IN_PYTHON)
            raise OptionError(f"unknown setting(s): {said}" + ("" if said.endswith("?") else f" Known: {', '.join(known)}."))
        if "mem_limit" not in options:
            raise OptionError(NO_LIMIT)
        return cls(**options)

    def texts(self) -> dict[str, str]:
        """Every setting as the command line would have it: what checkpoints say."""
        return {field.name: as_text(getattr(self, field.name)) for field in fields(Settings)}

    def to_json(self) -> dict[str, Any]:
        """Every setting as JSON has it: numbers as numbers, several values as a list, a path as text, a function by name."""
        found = {field.name: getattr(self, field.name) for field in fields(Settings)}
        return {name: as_text(value) if isinstance(value, Path) or callable(value) else value for name, value in found.items()}

    @property
    def trackers(self) -> tuple[TrackerName, ...]:
        asked = self.log if isinstance(self.log, tuple) else (self.log,)
        return tuple(dict.fromkeys(name for name in asked if name is not None))

    @property
    def loss_name(self) -> LossName | None:
        return "psl" if self.method == "psl" and self.loss is None else self.loss

    @property
    def lacks_subnets(self) -> bool:
        return self.method == "ist" and self.subnets is None

    @property
    def objective_name(self) -> str:
        return self.objective or DEFAULT_OBJECTIVE

    @property
    def prototype_scales(self) -> tuple[float, ...]:
        """Those given: of the first partitions in turn, the last one for all that follow. Empty: the default."""
        return () if self.prototype_scale is None else values_of(self.prototype_scale)

    def prototype_scale_of(self, partition: int, classes: int) -> float:
        scales = self.prototype_scales or default_scales(classes)
        return scales[min(partition, len(scales) - 1)]

    @property
    def views(self) -> int:
        return self.cached_views or 1

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
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|)", str(self.save_every).strip())
        if match is None or not float(match[1]) or (not match[2] and "." in match[1]):
            raise OptionError(f"--save-every: expected {EXPECTED['save_every']}; found {self.save_every!r}.")
        if match[2]:
            return None, float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]]
        return int(match[1]), None

    @property
    def tests(self) -> lengths.Interval:
        """Between two passes over the test rows; neither: at the end alone. Raises OptionError."""
        return lengths.interval_of(self.eval_every, self.test_every)

    @property
    def between_tests(self) -> list[str]:
        """Flags that were given and need a test set."""
        names = "test_every", "eval_every", "early_stopping", "best_by", "keep_best"
        return [flag_of(name) for name in names if getattr(self, name) not in (None, False)]

    @property
    def tile_bytes(self) -> int | None:
        """0: never; None: auto. Raises OptionError."""
        if self.tile in ("never", "auto"):
            return 0 if self.tile == "never" else None
        try:
            return parse_size(self.tile)
        except OptionError:
            raise OptionError(f"--tile: expected {EXPECTED['tile']}; found {short(self.tile)}.") from None

    @property
    def divides_weights(self) -> str:
        """What cuts weights into pieces that are updated one by one; "" where nothing is known to."""
        return f"method {self.method}" if self.method in ("psl", "ist") else "--tile" if self.tile_bytes else ""

    @property
    def shuffles(self) -> bool:
        if self.shuffle == "auto":
            return self.method != "sil" or self.objective_name != "mse"
        return self.shuffle

    def placed(self) -> Self:
        """With every path absolute: what the program's working directory is later does not matter."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        paths: dict[str, Any] = {name: path.absolute() for name, path in values.items() if isinstance(path, Path)}
        return replace(self, **paths)

    def partition_choice(self) -> tuple[int | None, tuple[int, ...] | None]:
        """(number of partitions, first block of each), as far as they were asked for. Raises OptionError."""
        asked = self.partitions
        if asked == "auto":
            return None, None
        if isinstance(asked, int) and asked >= 1:
            return asked, None
        if isinstance(asked, int) or asked[0] != 0 or any(b <= a for a, b in itertools.pairwise(asked)):
            raise OptionError(f"--partitions: expected {EXPECTED['partitions']}; found {as_text(asked)!r}.")
        return None, asked


@cache
def _types() -> dict[str, Any]:
    return get_type_hints(Settings)
