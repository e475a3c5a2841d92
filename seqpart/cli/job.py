"""A job of the command line, the trainer, data and model for it, and the smallest limit that a refusal names."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import ClassVar

from seqpart.capture.inputs import takes_several
from seqpart.config import DTYPES, MOST, Data, Files, Limits, LrSchedule, Method, Output, Precision
from seqpart.data.classes import count_classes
from seqpart.data.items import with_inputs
from seqpart.data.splits import Split, count_tokens
from seqpart.device.limit import RUNTIME_VARIES, limit_of, refused
from seqpart.errors import BadInput, DoesNotFit, OptionError
from seqpart.fields import PerPartition
from seqpart.intake import rows_of
from seqpart.model.blocks import MOST_BLOCKS
from seqpart.model.in_file import parameters_in_file
from seqpart.model.loss_probe import seed_all
from seqpart.model.named_optimizers import OptimizerName
from seqpart.plan.plan import Plan
from seqpart.profile.machine import existing
from seqpart.report.reporter import Reporter
from seqpart.settings import Settings
from seqpart.store.scratch import has_checkpoint
from seqpart.text import nearest, read_text, short
from seqpart.trainer import Trainer
from seqpart.units import format_limit, format_size, parse_size
from seqpart.zoo import datasets, images, libraries, models
from seqpart.zoo.libraries import called

DIGITS = "the default: scikit-learn's 8 x 8 digits as rows of 64 numbers"
"""Explains the data in errors, for users who did not give --data."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model and its data."""

    heading: ClassVar[str] = Data.heading
    model: str = "mlp"
    """mlp, gpt (for tokens), lenet or psnet (for images), torchvision:NAME, timm:NAME, hf:DIR (a directory with config.json and
    perhaps safetensors), or package.module:function that returns any nn.Module, a list of blocks or one of factories."""
    data: str = "digits"
    """digits, mnist, fashion-mnist, emnist, idx:DIR, npz:FILE (x_train, y_train, x_test, y_test) or its DIR, folder:DIR
    (train/CLASS with val/CLASS or test/CLASS, or CLASS), imagefolder:DIR (the same, read again in every epoch: see
    --augment), text:FILE (predicts its characters), hf-text:FILE (predicts its tokens, see --tokenizer), or
    package.module:function that returns a training and a test set, or two data loaders; the test set may be empty."""
    data_dir: Path | None = None
    """Directory of mnist, fashion-mnist or emnist."""
    download: bool = False
    """Download mnist, fashion-mnist or emnist into --data-dir."""
    image_size: int | None = None
    """Resize the images of folder:DIR or imagefolder:DIR to squares of this many pixels."""
    augment: images.Augmentation | None = None
    """Augmentation of the training images of imagefolder:DIR: imagenet (a random crop, resized to --image-size or 224, and a
    flip), cifar (a shift by up to 4 of 32 pixels, and a flip) or none. Default: imagenet."""
    context: int | None = None
    """Characters per row of text:FILE, or tokens per row of hf-text:FILE. Default: 128."""
    tokenizer: Path | None = None
    """Directory of the tokenizer for hf-text:FILE, with tokenizer.json. Default: that of --model hf:DIR."""
    weights_dtype: Precision | None = None
    """Type of the parameters of --model hf:DIR, in training and in the results: fp32 or bf16. Default: the type in config.json,
    if there are weights."""
    width: int | None = None
    """Width of --model mlp or gpt. Default: 2048 for mlp, 256 for gpt."""
    depth: int | None = None
    """Blocks of --model mlp or gpt. Default: for mlp as many as make the full training state twice the limit, for gpt 4."""
    heads: int | None = None
    """Attention heads of --model gpt. Default: 4."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Files with further options."""

    heading: ClassVar[str] = Files.heading
    config: Path | None = None
    """A TOML file, or a YAML file (.yaml, .yml), with these options as keys; options on the command line win."""
    resume: Path | None = None
    """Resume the run in this directory (or from one of its checkpoint files), with the bits of an uninterrupted run. Its
    options are taken over. Limits, directories and --save-every may differ; so may the learning rate, its schedule, clipping,
    weight decay and epochs, which hold from then on."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Output of the command."""

    heading: ClassVar[str] = Output.heading
    dry_run: bool = False
    """Print the plan and train nothing."""
    plan_out: Path | None = None
    """Save the plan as JSON."""
    print_schedule: bool = False
    """Print the first steps of the schedule."""
    quiet: bool = False
    """Print only errors."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class Job(Shown, Sources, Settings, Model):
    """Train a neural network under a memory limit, one partition at a time.

    Without --model and --data: scikit-learn's real digits and a residual MLP whose full training state is twice the limit.
    """

    heading: ClassVar[str] = Limits.heading
    method: Method = "sil"
    """sil (the default: partitions one after the other, approximate), ist (subnets in turn, approximate), or exact training:
    streamed (one partition at a time), checkpointed (all weights, few activations), full (must fit whole), auto (the fastest of
    the three that fits), psl (one pair of scores of the partially-separable loss at a time; a model that ends in separable
    layers, such as --model psnet)."""
    optimizer: PerPartition[OptimizerName] = "adam"
    lr_schedule: LrSchedule = "constant"
    """constant, linear or cosine (down to zero at the last update)."""
    plan: Path | None = None
    """Use the partitions and the micro-batch size of a plan that --plan-out saved."""


def opened(job: Job, reporter: Reporter, stack: ExitStack, *, alone: bool = False) -> tuple[Job, Trainer, Split, Split]:
    """Returns the job with its model's depth decided, its trainer with the model, and training and test data.

    stack: closes the data's readers. alone: this process does nothing else, so the limit counts from its start.

    Raises OptionError, ModelError or DataError for what cannot be honoured.
    """
    trainer = Trainer(None, **job.values(), quiet=job.quiet)
    stack.enter_context(trainer.device.running())
    if alone:
        trainer.count_from_start()
    given = data_of(job)
    train, test = _rows_for(None, *given, job)
    limit = limit_of(trainer.settings.mem_limit, trainer.device)
    if job.model.partition(":")[0] in libraries.LIBRARIES:
        made = _library_model(job, train, test)
        trainer.model = made.model
        trainer.settings = replace(trainer.settings, weights=made.weights, weights_partial=made.partial)
        return job, trainer, train, test
    trainer.model, depth = model_of(job, limit, train, test, reporter)
    if takes_several(trainer.model) and not train.form:
        train, test = _rows_for(trainer.model, *given, job)
    return replace(job, depth=depth), trainer, train, test


def saved_plan(job: Job) -> Plan | None:
    """Returns the plan of --plan, if that was given. Raises OptionError."""
    path = job.plan
    if path is None:
        return None
    if job.partitions != "auto" or job.micro_batch_size is not None:
        raise OptionError("--plan brings its own cut and micro-batch: leave --partitions and --micro-batch-size out.")
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--plan: cannot read {path}: {getattr(error, 'strerror', error)}.") from None
    return Plan.from_json(text, str(path))


def data_of(job: Job) -> tuple[object, object]:
    """Returns training and test data. Raises OptionError or DataError for what cannot be honoured."""
    library, _, folder = job.model.partition(":")
    tokenizer = job.tokenizer or (Path(folder) if library == "hf" and job.data.startswith("hf-text:") else None)
    if job.tokenizer is not None and not job.data.startswith("hf-text:"):
        raise OptionError(f"--tokenizer goes with --data hf-text:FILE; found --data {job.data}.")
    return datasets.load(
        job.data, data_dir=job.data_dir, download=job.download, image_size=job.image_size, context=job.context,
        augment=job.augment, tokenizer=tokenizer,
    )  # fmt: skip


def _rows_for(model: object, train: object, test: object, job: Job) -> tuple[Split, Split]:
    """Returns the rows of training and test data. model: see `with_inputs`."""
    return rows_of(with_inputs(train, model), with_inputs(test, model), job)[:2]


def model_of(job: Job, limit: int, train: Split, test: Split, reporter: Reporter) -> tuple[object, int | None]:
    """Returns the model, and its depth if that follows from `limit` bytes. Raises OptionError or ModelError."""
    classes = _outputs(job, train, test)
    if job.model.partition(":")[0] in libraries.LIBRARIES:
        return _library_model(replace(job, weights=None), train, test, whole=True).model, None
    _refuse_misplaced(job)
    if job.model in ("lenet", "psnet"):
        try:
            return getattr(models, job.model)(train.shape, classes), None
        except OptionError as error:
            error.add_note(f"found {_found(job, train)}. Give --data mnist, emnist, idx:DIR or folder:DIR.")
            raise
    if job.model not in ("mlp", "gpt"):
        if ":" not in job.model:
            raise OptionError(
                "--model: expected mlp, gpt, lenet, psnet, torchvision:NAME, timm:NAME, hf:DIR or package.module:function; "
                f"found {job.model!r}.{nearest([job.model], ('mlp', 'gpt', 'lenet', 'psnet'))}"
            )
        seed_all(job.seed)
        with _in_file(job):
            return called(job.model, "--model"), None
    _refuse_too_deep(job.depth, "")
    width = (models.GPT_WIDTH if job.model == "gpt" else models.WIDTH) if job.width is None else job.width
    if width < 1 or (job.depth is not None and job.depth < 0):
        raise OptionError(f"--width and --depth: expected whole numbers, from 1 and from 0 up; found {width} and {job.depth}.")
    if width > MOST:
        raise OptionError(f"--width: expected at most {MOST}; found {short(width)}.")
    if job.model == "gpt":
        return _gpt(job, train, test, width, reporter), job.depth
    if train.tokens:
        raise OptionError(f"--model mlp takes quantities, and the rows of --data {job.data} are tokens. Take --model gpt.")
    inputs, depth = prod(train.shape), job.depth
    if depth is None:
        depth = models.depth_for(limit, inputs, classes, width)
        _refuse_too_deep(
            depth, f" Its state would be twice the limit of {format_size(limit)}: give a --depth, or a larger --width."
        )
        reporter.say(
            f"model mlp: width {width}, depth {depth} (--depth {depth}), sized to twice the limit of {format_size(limit)}"
        )
    return models.mlp(inputs, classes, width=width, depth=depth), depth


def _outputs(job: Job, train: Split, test: Split) -> int:
    """Returns the number of outputs that the network needs: one per class, or per number of a label."""
    classes = 0 if job.loss == "bce" else count_classes(train, test)
    return classes or prod(train.labels.shape[1:])


def _library_model(job: Job, train: Split, test: Split, *, whole: bool = False) -> libraries.Made:
    _refuse_misplaced(job)
    library, _, name = job.model.partition(":")
    resumes = job.resume is not None and (not job.resume.is_dir() or has_checkpoint(job.resume))
    asked = libraries.Asked(
        classes=_outputs(job, train, test), shape=train.shape, seed=job.seed, weights=job.weights,
        partial=job.weights_partial or whole, resumes=resumes,
        dtype=DTYPES[job.weights_dtype] if job.weights_dtype is not None else None,
        predicts_tokens=train.tokens and tuple(train.labels.shape[1:]) == train.shape,
    )  # fmt: skip
    with _in_file(job):
        made = libraries.made(library, name, asked)
    _refuse_other_rows(job, train)
    return made


def _in_file(job: Job) -> AbstractContextManager[None]:
    """A context in which models have their weights in a file on the disk: they may be larger than memory."""
    return parameters_in_file(existing(job.offload_dir or job.output_dir or Path("runs")))


def _refuse_other_rows(job: Job, train: Split) -> None:
    """Raises OptionError for rows of another kind than a library's model takes, before its own error, which names no cause."""
    of_images = not job.model.startswith("hf:")
    if (of_images and not train.form and (train.tokens or len(train.shape) < 3)) or (not of_images and job.data == "digits"):
        takes = "images (channels, height, width)" if of_images else "tokens, or images, as its config.json says"
        give = "" if of_images else ", hf-text:FILE, text:FILE"
        raise OptionError(
            f"--model {job.model} takes {takes}; found {_found(job, train)}. Give --data imagefolder:DIR, folder:DIR{give} or "
            "package.module:function."
        )


def _found(job: Job, train: Split) -> str:
    """Describes the rows and their source."""
    default = f" ({DIGITS})" if job.data == "digits" else ""
    return f"rows of {'tokens' if train.tokens else 'quantities'} of shape {train.shape}, of --data {job.data}{default}"


def _refuse_misplaced(job: Job) -> None:
    """Raises OptionError for options of other models."""
    if job.heads is not None and job.model != "gpt":
        raise OptionError(f"--heads goes with --model gpt; found --model {job.model}.")
    if job.model not in ("mlp", "gpt") and (job.width is not None or job.depth is not None):
        raise OptionError(f"--width and --depth go with --model mlp or gpt; found --model {job.model}.")
    if job.weights_dtype is not None and not job.model.startswith("hf:"):
        raise OptionError(f"--weights-dtype goes with --model hf:DIR; found --model {job.model}.")


def _refuse_too_deep(depth: int | None, cure: str) -> None:
    most = MOST_BLOCKS - 2  # the first and the last
    if depth is not None and depth > most:
        raise OptionError(
            f"--depth: expected at most {most} blocks, each of which is planned on its own; found {short(depth)}.{cure}"
        )


def _gpt(job: Job, train: Split, test: Split, width: int, reporter: Reporter) -> object:
    labels = tuple(train.labels.shape[1:])
    if not train.tokens or len(train.shape) != 1 or labels != train.shape:
        raise OptionError(
            "--model gpt takes rows of tokens with a label for each, as --data text:FILE and hf-text:FILE give them; found "
            f"{_found(job, train)}, with labels of shape {labels} each. Give one of these, or take another --model."
        )
    heads = models.GPT_HEADS if job.heads is None else job.heads
    if heads < 1 or width % heads:
        raise OptionError(f"--heads: expected a number that divides the width of {width}; found {heads}.")
    depth = models.GPT_DEPTH if job.depth is None else job.depth
    vocabulary = max(count_tokens(train, test), count_classes(train, test))
    reporter.say(f"model gpt: width {width}, depth {depth}, {heads} heads, {vocabulary} different tokens")
    return models.gpt(vocabulary, train.shape[0], width=width, depth=depth, heads=heads)


_ATTEMPTS = 20
"""Limits that are tried, each with a plan. With three partitions, each of which grows by two thirds of a limit, 11 were."""

_STEPS = 4
"""After so many, limits that lead anywhere lack less."""


@contextmanager
def smallest_limit_named(job: Job, trainer: Trainer, train: Split, test: Split, reuse: Plan | None) -> Iterator[None]:
    """Inside, a refusal of `job` names a limit at which its model, rebuilt for that limit, has a plan; or says that there is
    none, and what to give instead.

    job: as it was asked for. trainer: of its model at the limit that was asked for.
    """
    try:
        yield
    except DoesNotFit as error:
        if job.model != "mlp" or job.depth is not None or error.smallest is None or error.with_flags == error.message:
            raise
        refusal = error.with_traceback(None)  # else its frames keep what was measured
        refusal.__context__ = refusal.__cause__ = None
    else:
        return
    raise _with_limit(refusal, job, trainer, train, test, reuse)


def _never_ends(lacks: Sequence[int], limit: int) -> bool:
    """True if larger limits lack ever more bytes. Depths are whole numbers, so a small step says little."""
    if len(lacks) > 1 and lacks[-2] > limit // 4 and lacks[-1] >= 1.5 * lacks[-2]:
        return True
    return len(lacks) > _STEPS and lacks[-1] >= lacks[-1 - _STEPS]


def _with_limit(first: DoesNotFit, job: Job, trainer: Trainer, train: Split, test: Split, reuse: Plan | None) -> DoesNotFit:
    """Returns `first` with the least limit that was found for the same command, or with what to give where there is none.

    Searches upwards: each refusal names a limit for its own depth, in which no deeper model fits.
    """
    silent = Reporter(quiet=True)

    def made(limit: int) -> tuple[object, int | None]:
        return model_of(job, limit, train, test, silent)

    def smallest_at(limit: int) -> int | None:
        """`limit`, where the model for it fits; else what its refusal names. None: it cannot be had."""
        try:
            trainer.model, _ = made(limit)
            # Another process may have a larger runtime.
            trainer.settings = replace(trainer.settings, mem_limit=limit - RUNTIME_VARIES)
            trainer.plan(train, test, reuse=reuse)
        except BadInput:  # more than the device has, deeper than may be, another model than a saved plan is for
            return None
        except DoesNotFit as again:
            return None if again.smallest is None else max(again.smallest, limit + 1)
        return limit

    before = limit_of(trainer.settings.mem_limit, trainer.device)
    depth, smallest, lacks = made(before)[1], first.smallest, list[int]()
    for _ in range(_ATTEMPTS):
        if smallest is None:
            break
        limit = parse_size(format_limit(smallest))
        lacks.append(limit - before)
        if _never_ends(lacks, limit):
            break
        before, smallest = limit, smallest_at(limit)
        if smallest is not None and smallest <= limit:
            grown = made(limit)[1]
            grows = "" if grown == depth else f"\n  The model grows with the limit: that is for --depth {grown}."
            return refused(first.message + grows, limit, first.rows)
    return DoesNotFit(
        f"{first.message}\n  no limit fits: the model grows with it, to a state of twice as much. Give --depth {depth}, as "
        f"it is, or less: for that {format_limit(first.smallest or 0)} are enough."
    )
