"""The options of a run, in groups: each option once, with its type, its default and its help.

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
from seqpart.fields import Also, Note, PerPartition, Positive, as_text, flag_of, note_of, values_of
from seqpart.model.freezing import EXPECTED as PATTERNS
from seqpart.model.freezing import Frozen
from seqpart.model.losses import LossName
from seqpart.model.named_optimizers import OptimizerName
from seqpart.model.scheduler import SchedulerFactory
from seqpart.schedule import lengths
from seqpart.text import short
from seqpart.units import parse_size

Method = Literal["auto", "sil", "ist", "streamed", "checkpointed", "full", "psl"]
LrSchedule = Literal["constant", "linear", "cosine"]
Objective = Literal["orthogonal", "prototype", "mse"]
Precision = Literal["fp32", "bf16"]
OptimizerOn = Literal["auto", "device", "host"]
TrackerName = Literal["tensorboard", "wandb"]

MOST = 10**9
"""Largest number of epochs, or of rows of a batch; more is a typing error."""
WITH_DIRECTIONS = ("orthogonal", "prototype")
"""Objectives with --prototype-scale: classes are directions."""
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
"""Names from the command line or other libraries, and what to use in Python."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The memory that may be used, and how the network is cut for it."""

    heading: ClassVar[str] = "limit-and-method"
    mem_limit: Annotated[str | int | float, SIZE, Also("-m")]
    """Memory that the run must never exceed: 2GB, 1.5GiB, 0.8 (of the device) or auto (what is free now). On CPU it counts the
    process's own memory, libraries included; on CUDA the GPU's memory, context included."""
    method: Method = None  # type: ignore[assignment]
    """Exact training: streamed (one partition at a time), checkpointed (all weights, few activations), full (must fit
    whole), auto (the fastest of the three that fits), psl (one pair of scores of the partially-separable loss at a time; a
    model that ends in separable layers); or approximate: sil (partitions one after the other), ist (subnets in turn). Required:
    None is refused."""
    partitions: Annotated[
        Literal["auto"] | PerPartition[int],
        Note(expected="auto, a number from 1 up, or rising block numbers from 0 such as 0,20,40", metavar="auto|INT[,...]"),
    ] = "auto"
    """Number of partitions: auto (the fewest that fit), a number, or the first block of each, such as 0,20,40."""
    tile: Annotated[str | int, Note(expected="a size such as 16MB, never or auto", metavar="SIZE|never|auto")] = "auto"
    """Split nn.Linear and nn.Embedding layers with a larger weight, and transformers' layers of experts, into tiles of at most
    this size, which are loaded one by one: a size such as 16MB, never, or auto (exact methods, if nothing fits without). Sums
    over tiles round differently: the input gradient of a Linear and of experts, and more than two experts of a token."""
    loss_chunks: Annotated[Literal["auto"] | int, Note(expected="auto or a number from 1 up", metavar="auto|INT")] = "auto"
    """Chunks of positions over which a language model's last linear layer and its cross-entropy are computed, forward and
    backward of each together, so that the logits of a micro-batch never exist whole: a number, or auto (1, and more with exact
    methods if nothing fits so). Sums of other numbers of chunks round differently."""
    compile: bool = False
    """Compile blocks with torch.compile (exact methods, on the CPU): each kind once for every number of rows, while the plan is
    made. The bits are those of a plain loop after `layer.compile(dynamic=False)` for each layer that holds other modules, and
    may differ from those without. The compiler's memory counts: about 600 MB for a moment."""
    micro_batch_size: Positive[int] = None
    """Rows on the device at once. Default: the largest that fits."""
    device: str = "auto"
    """auto (CUDA if there is a GPU), cpu, cuda, cuda:N, sim (a simulated GPU), or sim:CARD (a simulated GPU of that model)."""
    ram_limit: Annotated[str | int | float | None, SIZE] = None
    """Host memory for offloaded weights, optimizer state and activations, in addition to the limit; the rest is on disk.
    Default: none on CPU; on CUDA half of the free memory, pinned."""

    optimizer_on: OptimizerOn = "auto"
    """Where optimizer steps are computed (exact methods): device, to which optimizer state is loaded; host, beside the device's
    work, for partitions whose weights and state are in host memory: gradients go there, weights come back and state stays; or
    auto, the faster. Partitions with running statistics (BatchNorm) step on the device."""

    def partition_choice(self) -> tuple[int | None, tuple[int, ...] | None]:
        """Returns (number of partitions, first block of each); None for what was not given. Raises OptionError."""
        asked = self.partitions
        if asked == "auto":
            return None, None
        if isinstance(asked, int) and asked >= 1:
            return asked, None
        if isinstance(asked, int) or asked[0] != 0 or any(b <= a for a, b in itertools.pairwise(asked)):
            raise _unreadable("partitions", as_text(asked))
        return None, asked

    @property
    def chunks(self) -> int | None:
        """Chunks of the loss; None: auto. Raises OptionError."""
        if self.loss_chunks == "auto":
            return None
        if self.loss_chunks < 1:
            raise _unreadable("loss_chunks", self.loss_chunks)
        return self.loss_chunks

    @property
    def tile_bytes(self) -> int | None:
        """Largest tile in bytes; 0: never; None: auto. Raises OptionError."""
        if self.tile in ("never", "auto"):
            return 0 if self.tile == "never" else None
        try:
            return parse_size(self.tile)
        except OptionError:
            raise _unreadable("tile", self.tile) from None


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Length of the training, batch size, loss and precision."""

    heading: ClassVar[str] = "training"
    epochs: Annotated[PerPartition[float], Note(most=MOST, number="numbers above 0")] = 3
    """Passes over the training rows, per partition. Exact methods take fractions too, such as 0.5."""
    max_steps: Positive[int] = None
    """Number of updates, instead of --epochs (exact methods only)."""
    batch_size: Annotated[PerPartition[int], Note(most=MOST, number="whole numbers from 1 up")] = 64
    """Rows of one update, per partition."""
    loss: Annotated[
        LossName | None, Note(expected="cross-entropy, psl, mse or bce, or from Python a function or 'model'")
    ] = None  # fmt: skip
    """Loss at the end of the network: cross-entropy (classes), psl (classes: the partially-separable loss, the mean over rows
    of the sum of exp(score - the label's score) over all other classes, continued linearly from a difference of 10), mse
    (floats of any shape), or bce (binary labels from 0 to 1, as many as outputs). Default: cross-entropy for classes, mse for
    floats."""
    label_smoothing: float = 0.0
    """Share of each label that is spread evenly over all classes, such as 0.1, in training and tests (cross-entropy only)."""
    mixup: float = 0.0
    """Mix each training row with the one before it in its batch, and their labels (MixUp): the parameter of the Beta
    distribution from which the batch's share is drawn, such as 0.2. Classes only, by exact methods."""
    cutmix: float = 0.0
    """As --mixup, but a box of each image is cut out of the one before it (CutMix). With both, each batch gets one of them."""
    dtype: Precision = "fp32"
    """fp32, or bf16: mixed precision by autocast, with weights and optimizer state in float32. --bf16 is short for it."""
    shuffle: Annotated[bool | Literal["auto"], Note(expected="True, False or auto")] = "auto"
    """Shuffle the training rows in every epoch: yes, no (in Python: True, False), or auto (no for objective mse, as in the
    paper; else yes)."""
    seed: Annotated[int, Note(above=-(2**63) - 1, most=2**64 - 1, number="a whole number of 64 bits")] = 0
    """Seed for initial weights, row order, dropout and synthetic labels."""

    @property
    def autocast(self) -> torch.dtype | None:
        return None if self.dtype == "fp32" else DTYPES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer, its learning rate and what surrounds an update."""

    heading: ClassVar[str] = "training"
    lr: Annotated[PerPartition[float], Also("--learning-rate")] = 1e-4
    """Learning rate, per partition."""
    optimizer: PerPartition[OptimizerName] = "adamw"
    """adamw, adam (the same without --weight-decay) or sgd; adafactor (its state is one row and one column per matrix; --lr is
    relative to the parameter's scale, and torch's default is 0.01); lion; muon (hidden matrices, with AdamW for the rest);
    schedulefree (AdamW; its average is tested at the end); adamw8bit or lion8bit (state of 2 or 1 bytes per number). Per
    partition. schedulefree, and on a GPU lion and those in 8 bits, need pip install 'seqpart[lowbit]'."""
    weight_decay: float = 0.0
    """Weight decay of the optimizer."""
    no_decay: str = ""
    """Parameters without weight decay, separated by commas: bias, norm (other parameters of one dimension), or patterns of
    names such as '*.embed*'."""
    momentum: float = 0.0
    """Momentum (sgd only)."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding of weights that are bfloat16 in an optimizer step: nearest (as torch does: updates under 1/512 of a weight are
    lost), or stochastic (the step is computed in float32, and rounded up or down by chance, so that it is right on average)."""
    moments_dtype: Precision | None = None
    """Type of the optimizer's state for such weights, with --rounding stochastic: fp32, or bf16 (adam, adamw and sgd;
    rounded stochastically too). Default: fp32."""
    clip_grad_norm: Positive[float] = None
    """Clip the gradients' total norm to this: over the whole network; with sil, over each partition."""
    ema: float | None = None
    """Decay, such as 0.999, of an exponential moving average of the weights, which is tested at the end and written to
    average.safetensors. Default: no average."""
    lr_schedule: Annotated[
        LrSchedule | SchedulerFactory,
        Note(expected="constant, linear or cosine, or from Python a function from an optimizer to one of torch's schedulers"),
    ] = "constant"
    """constant, linear or cosine (down to zero at the last update); in Python also a function that takes an optimizer and
    returns a torch scheduler, which steps once per update, and starts again for each partition of sil and for recovery."""
    warmup_updates: int = 0
    """Updates of linear warm-up before the full learning rate."""
    freeze: Annotated[
        PerPartition[str] | None, Note(expected="a pattern of parameter names, or a list of them", metavar="PATTERN[,...]")
    ] = None  # fmt: skip
    """Parameters that do not learn: patterns of their names as in a shell, such as 'backbone.*,embed.*', or in Python a
    list. Default: those with requires_grad=False."""
    unfreeze: Annotated[str | dict[str, str] | None, Note(expected=PATTERNS, metavar="PATTERN=TIME[,...]")] = None
    """Parameters that are frozen at first and learn from a time on (exact methods only): 'backbone.*=epoch 1' (after one
    epoch) or 'embed.*=update 500' (after 500 updates), in Python {"backbone.*": "epoch 1"}. Default: none."""

    @property
    def rounded_moments(self) -> torch.dtype | None:
        """Type of the state where steps are rounded stochastically; None: they are not."""
        return DTYPES[self.moments_dtype or "fp32"] if self.rounding == "stochastic" else None

    @property
    def frozen(self) -> Frozen:
        """What --freeze and --unfreeze say. Raises OptionError."""
        return Frozen.of(self.freeze, self.unfreeze)  # type: ignore[arg-type]  # a text, once it is checked


@dataclass(frozen=True, kw_only=True)
class Testing:
    """Evaluations: how often, and what depends on them."""

    heading: ClassVar[str] = "training"
    test_every: Positive[int] = None
    """Epochs between evaluations (with sil: of the last partition, and of recovery). Default: evaluate only at the end."""
    eval_every: Annotated[str | int | None, Note(expected=lengths.EXPECTED, metavar="OFTEN")] = None
    """Updates (500) or epochs (2epochs) between evaluations; updates with exact methods only. Default: see --test-every, which
    counts epochs."""
    early_stopping: Annotated[int | None, Note(number="evaluations, 1 or more")] = None
    """Stop after this many evaluations without an improvement (exact methods, with --eval-every)."""
    keep_best: bool = False
    """Return the weights of the best evaluation instead of the last (exact methods, with --eval-every)."""
    best_by: str | None = None
    """Compare evaluations by loss (the default) or accuracy, or in Python by a metric: min:NAME or max:NAME."""

    @property
    def tests(self) -> lengths.Interval:
        """The interval between two passes over the test rows; the default is only at the end. Raises OptionError."""
        return lengths.interval_of(self.eval_every, self.test_every)

    @property
    def between_tests(self) -> list[str]:
        """Given flags that need a test set."""
        return [flag_of(field.name) for field in fields(Testing) if getattr(self, field.name) not in (None, False)]


@dataclass(frozen=True, kw_only=True)
class Data:
    """Weights to begin with, and how training rows are read."""

    heading: ClassVar[str] = "data-and-model"
    weights: Path | None = None
    """Initial weights: a safetensors file, or a directory with one, or with several and their index. They are loaded one tensor
    at a time, so a model whose parameters are on the meta device is never in memory as a whole."""
    weights_partial: bool = False
    """Accept --weights without some of the model's tensors, or with them in other shapes (a head for other classes): these stay
    as initialized, and the run names them. Further tensors in the file are ignored."""
    cache: Literal["auto", "rows", "none"] = "auto"
    """Training rows to cache: auto (rows that are the same when read twice; others, and a DataLoader's, are read again in every
    epoch), rows (all, read once), none (all are read again)."""
    workers: Annotated[int | None, Note(above=-1, most=256, number="0 to 256")] = None
    """Worker processes that read rows which are not cached; each counts against the limit. 0: the run reads them itself.
    Default: the DataLoader's num_workers, and 0 without one."""


EVALUATION: Literal["evaluation"] = "evaluation"
"""Value of `export_every`: after each evaluation."""
ON_CALL = "on call"
"""Value of `save_every` in a session that has an output directory: it saves a checkpoint when it is told to."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """The directories of a run, and its checkpoints."""

    heading: ClassVar[str] = "files-and-checkpoints"
    output_dir: Annotated[Path | None, Also("-o")] = None
    """Directory for the results, new or empty. Default: a new one under runs/."""
    overwrite: bool = False
    """Accept a finished run of seqpart as --output-dir, and replace its results at the end."""
    offload_dir: Path | None = None
    """Directory for offloaded weights, optimizer state and activations during the run. Default: in the output directory."""
    save_every: Annotated[
        str | int, Note(expected="updates (500), a time (30s, 10min, 2h) or never", metavar="OFTEN")
    ] = "10min"  # fmt: skip
    """Interval between checkpoints: updates (500), a time (30s, 10min), or never. Ctrl-C saves too, unless never."""

    export_every: Annotated[
        str | int | None, Note(expected="updates (500), epochs (1epoch) or evaluation", metavar="OFTEN")
    ] = None  # fmt: skip
    """Export the weights to exports/ in the output directory after so many updates (500) or epochs (1epoch), or after each
    evaluation (evaluation); exact methods only. Default: the weights are written at the end alone."""
    keep_exports: Positive[int] = None
    """Exports to keep: the newest, or with --export-every evaluation the best by --best-by. Default: all."""

    @property
    def exporting(self) -> lengths.Interval | Literal["evaluation"] | None:
        """When weights are exported. Raises OptionError."""
        if self.export_every is None or self.export_every == EVALUATION:
            return None if self.export_every is None else EVALUATION
        return lengths.interval_of(self.export_every, None, "--export-every", f"{lengths.EXPECTED}, or evaluation")

    @property
    def saves(self) -> bool:
        """True if the run saves checkpoints by itself."""
        return self.save_every not in ("never", ON_CALL)

    @property
    def saving(self) -> tuple[int | None, float | None]:
        """(updates, seconds) between two checkpoints; one of them is None. Raises OptionError."""
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
    """Traces and trackers."""

    heading: ClassVar[str] = "output"
    trace: Path | None = None
    """Write a trace to this file: steps by stream, memory and traffic over time. Open it at ui.perfetto.dev."""
    log: PerPartition[TrackerName] | None = None
    """Log loss, accuracy, learning rate, memory and rows per second to tensorboard, wandb (Weights & Biases), or both."""

    @property
    def trackers(self) -> tuple[TrackerName, ...]:
        return () if self.log is None else tuple(dict.fromkeys(values_of(self.log)))


@dataclass(frozen=True, kw_only=True)
class Sil:
    """Options of method sil only."""

    heading: ClassVar[str] = "sil"
    objective: Objective | None = None
    """Objective of inner partitions (sil only): orthogonal (cross-entropy to fixed random orthogonal directions), prototype
    (the same with directions that are not orthogonal) or mse (the paper's: mean squared error to random numbers up to kappa).
    Default: orthogonal."""
    kappa: Positive[float] = None
    """Size of the paper's synthetic labels, for objective mse. Default: 10."""
    prototype_scale: Positive[PerPartition[float]] = None
    """Scale of the logits, for objectives prototype and orthogonal: one number, or one per partition, the last for all that
    follow. Default: 16 for the first, 8 for later ones (4 + ln(classes) if that is more)."""
    sil_inputs: Literal["cached", "synthetic"] | None = None
    """Inputs of later partitions in training (sil only): cached (outputs of the one before) or synthetic (its synthetic labels,
    so that no partition waits for another: figure 5 of the paper, which calls it impractical). Default: cached."""
    cache_dtype: Precision | None = None
    """Type of the cached boundary rows (sil only): fp32 or bf16. Default: fp32."""
    cached_views: Positive[int] = None
    """Number of random draws of each row whose outputs are cached for later partitions, which use them in turn, epoch by epoch
    (sil only, for rows that are not cached). Default: 1."""

    @property
    def objective_name(self) -> Objective:
        return self.objective or "orthogonal"

    @property
    def prototype_scales(self) -> tuple[float, ...]:
        """The given scales by partition, the last one for all that follow. Empty: the default."""
        return () if self.prototype_scale is None else values_of(self.prototype_scale)

    def prototype_scale_of(self, partition: int, classes: int) -> float:
        """Returns the scale of a partition's logits: 16 for the first by default, and max(8, 4 + ln(classes)) for all others.

        At 16 later ones may overfit the training rows that the first one has separated already; at 4 they learn too little if
        it has not. At 4 + ln(classes) a perfect row has a probability of 0.98 among any number of classes. A weak first
        partition needs 16 (docs/objectives.md). Labels that are not classes (0) use neither.
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
    """Partitions that are trained in recovery: left (all but the last, as in the paper) or all. Default: left."""
    recovery_batch_size: Positive[int] = None
    """Rows of one update in recovery. Default: the largest --batch-size."""
    recovery_lr: Positive[float] = None
    """Learning rate of all partitions in recovery. Default: each one's own --lr."""


@dataclass(frozen=True, kw_only=True)
class Ist:
    """Options of method ist only."""

    heading: ClassVar[str] = "ist"
    subnets: Positive[int] = None
    """Number of subnets that hidden layers are divided among, differently in every round (ist only, required)."""
    local_steps: Positive[int] = None
    """Updates of each subnet per round (ist only); the last round of an epoch may have fewer. Default: 20."""
    subnet_groups: Positive[int] = None
    """Neurons per group that is assigned as a whole (ist only), in layers whose width is a multiple of it with a group for each
    subnet; other layers are divided neuron by neuron, as the paper does and 1 does for all. Default: 64."""
    subnet_rows: Literal["shard", "all"] | None = None
    """Training rows of a subnet per epoch (ist only): shard (its own share) or all. Default: shard."""
    subnet_moments: Literal["keep", "zero"] | None = None
    """Optimizer moments at the start of a round (ist only): keep (taken from the whole network's, and put back) or zero.
    Default: keep, which makes one subnet bit-equal to the whole network."""


@dataclass(frozen=True, kw_only=True)
class Config(Ist, Recovery, Sil, Output, Files, Data, Testing, Optimizer, Loop, Limits):
    """The options of all groups, of which Limits come first; `seqpart.settings.Settings` are those that have been checked.

    Where it says "per partition", a tuple gives each partition its own value: (5, 160) in Python, `5,160` on the command line.
    """

    def values(self) -> dict[str, Any]:
        """Returns every option by its name; of a job of the command only those of its run."""
        return {field.name: getattr(self, field.name) for field in fields(Config)}

    def texts(self) -> dict[str, str]:
        """Returns every option as the command line formats it, for checkpoints."""
        return {name: as_text(value) for name, value in self.values().items()}

    def to_json(self) -> dict[str, Any]:
        """Returns every option as a JSON value: a number, a list of several values, a path as text, a function by its name."""
        found = self.values()
        return {name: as_text(value) if isinstance(value, Path) or callable(value) else value for name, value in found.items()}

    def placed(self) -> Self:
        """Returns the settings with absolute paths, so that a later change of the working directory does not matter."""
        paths: dict[str, Any] = {name: path.absolute() for name, path in self.values().items() if isinstance(path, Path)}
        return replace(self, **paths)


GROUPS: tuple[Any, ...] = tuple(reversed(Config.__bases__))
"""The groups of the options, in the order of this file."""


def given_of(group: type[Any], config: Config) -> list[str]:
    """Returns the options of a group that differ from their defaults."""
    return [field.name for field in fields(group) if getattr(config, field.name) != field.default]


def hints_of(kind: type[Any]) -> dict[str, Any]:
    """Returns the types of its fields, each with its Note."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}


def _unreadable(name: str, found: object) -> OptionError:
    return OptionError(f"{flag_of(name)}: expected {note_of(hints_of(Config)[name]).expected}; found {short(found)}.")
