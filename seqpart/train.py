"""The door: `python -m seqpart.train --mem-limit 2GB`, and the console script `seqpart` (train, plan, doctor)."""

import dataclasses
import itertools
import os
import signal
import sys
import tomllib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any

import tyro

from seqpart.doctor import doctor
from seqpart.errors import BadInput, OptionError, SeqpartError
from seqpart.ingest import Split, as_split, count_classes, count_tokens
from seqpart.plan import Plan
from seqpart.preparation import limit_of
from seqpart.report import Reporter
from seqpart.rundir import write_text
from seqpart.schedule import one_at_a_time, to_text
from seqpart.settings import Settings
from seqpart.trainer import Trainer
from seqpart.units import format_size
from seqpart.zoo import datasets, models
from seqpart.zoo.loading import called

INTERRUPTED = 130
SHOWN_STEPS = 40


@dataclass(frozen=True, kw_only=True)
class Job(Settings):
    """Train a neural network under a memory limit, one partition at a time.

    Without --model and --data: scikit-learn's real digits and a residual MLP whose full training state is twice the limit.
    """

    model: str = "mlp"
    """mlp, gpt (for tokens), or package.module:function that returns an nn.Sequential, a list of blocks or a list of
    block factories."""
    data: str = "digits"
    """digits, mnist, fashion-mnist, emnist, idx:DIR, npz:FILE, folder:DIR, text:FILE (its characters, to predict the
    next one), or package.module:function that returns a training and a test set."""
    data_dir: Path | None = None
    """Directory of mnist, fashion-mnist or emnist."""
    download: bool = False
    """Fetch mnist, fashion-mnist or emnist into --data-dir."""
    image_size: int | None = None
    """Resize the images of folder:DIR to this many pixels square."""
    context: int | None = None
    """Characters in a row of text:FILE. Default: 128."""
    width: int | None = None
    """Width of --model mlp or gpt. Default: 2048 and 256."""
    depth: int | None = None
    """Residual blocks of --model mlp. Default: as many as make the full training state twice the limit.
    Transformer blocks of --model gpt. Default: 4."""
    heads: int | None = None
    """Attention heads of --model gpt. Default: 4."""
    config: Path | None = None
    """A TOML file with these options as keys; options on the command line win."""
    dry_run: bool = False
    """Print the plan and train nothing."""
    plan_out: Path | None = None
    """Save the plan as JSON."""
    plan: Path | None = None
    """Use the cut and the micro-batch of a plan that --plan-out saved."""
    print_schedule: bool = False
    """Print the first steps of the schedule."""
    quiet: bool = False
    """Print nothing but errors."""
    debug: bool = False
    """Show the traceback of an error."""

    def settings(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Settings)}


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return _guarded(lambda: _train(_parsed(arguments)), debug="--debug" in arguments)


def console() -> None:
    """The console script: `seqpart train`, `seqpart plan` (a dry run), `seqpart doctor`."""
    command, *arguments = sys.argv[1:] or [""]
    if command == "train":
        sys.exit(main(arguments))
    if command == "plan":
        sys.exit(main([*arguments, "--dry-run"]))
    if command == "doctor":
        sys.exit(_guarded(lambda: doctor(arguments), debug=False))
    asked = command in ("-h", "--help")
    usage = "usage: seqpart {train,plan,doctor} [options]; seqpart train --help shows them"
    print(usage, file=sys.stdout if asked else sys.stderr)
    sys.exit(0 if asked else BadInput.exit_code)


def _guarded(work: Callable[[], None], *, debug: bool) -> int:
    """Run `work`; a user's mistake becomes one message and its exit code."""
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        work()
    except SeqpartError as error:
        if debug:
            traceback.print_exc()
        else:
            notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", []))
            print(f"{type(error).__name__}: {error}{notes}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted: the run's scratch files are removed; earlier results are untouched.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Nobody reads on (`| head`): no mistake, but the interpreter's last flush would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SeqpartError.exit_code
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _terminated(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parsed(arguments: list[str]) -> Job:
    arguments = [*_from_config(arguments), *arguments]
    return tyro.cli(Job, args=arguments, prog="python -m seqpart.train", config=(tyro.conf.OmitArgPrefixes,))


def _from_config(arguments: list[str]) -> list[str]:
    """The options of `--config FILE` as arguments; those of the command line stand behind them and win."""
    paths = [b for a, b in itertools.pairwise(arguments) if a == "--config"] + [
        a.partition("=")[2] for a in arguments if a.startswith("--config=")
    ]
    if not paths:
        return []
    path = Path(paths[-1])
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise OptionError(f"--config: cannot read {path}: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"--config: {path} is not TOML: {error}.") from None
    known = {field.name: field for field in dataclasses.fields(Job) if field.name != "config"}
    unknown = sorted(key for key in table if key.replace("-", "_") not in known)
    if unknown:
        raise OptionError(
            f"--config: {path} has unknown option(s) {', '.join(unknown)}. Its keys are the flags of --help without the dashes."
        )
    return [
        word
        for key, value in table.items()
        for word in _as_arguments(key.replace("_", "-"), value, known[key.replace("-", "_")].type is bool)
    ]


def _as_arguments(name: str, value: Any, switch: bool) -> list[str]:
    if switch:
        if not isinstance(value, bool):
            raise OptionError(f"--config: {name} must be true or false; found {value!r}.")
        return [f"--{name}"] if value else []
    if isinstance(value, dict):
        raise OptionError(f"--config: {name} must be a value or a list of values; found a table.")
    if isinstance(value, bool):
        value = "yes" if value else "no"
    return [f"--{name}={','.join(map(str, value)) if isinstance(value, list) else value}"]


def _train(job: Job) -> None:
    if job.plan and (job.partitions != "auto" or job.micro_batch_size is not None):
        raise OptionError("--plan brings its own cut and micro-batch: leave --partitions and --micro-batch-size out.")
    reporter = Reporter(quiet=job.quiet)
    train, test = datasets.load(
        job.data, data_dir=job.data_dir, download=job.download, image_size=job.image_size, context=job.context
    )
    trainer = Trainer(None, **job.settings(), quiet=job.quiet)
    train, test = as_split(train, "training"), as_split(test, "test")
    trainer.model = _model(job, trainer, train, test, reporter)
    reuse = _saved_plan(job.plan) if job.plan else None
    if job.print_schedule or job.plan_out or job.dry_run:
        prepared = trainer.prepare(train, test, reuse=reuse).planned()
        if job.plan_out:
            write_text(job.plan_out, prepared.plan.to_json())
        if job.dry_run:
            reporter.plan(prepared.plan)
        if job.print_schedule:
            steps = itertools.islice(one_at_a_time(prepared.phases), SHOWN_STEPS)
            reporter.say(to_text(steps, prepared.phases) + " ...")
    if not job.dry_run:
        trainer.fit(train, test, reuse=reuse, reporter=reporter)


def _model(job: Job, trainer: Trainer, train: Split, test: Split, reporter: Reporter) -> object:
    classes = count_classes(train, test)
    if job.heads is not None and job.model != "gpt":
        raise OptionError(f"--heads goes with --model gpt; found --model {job.model}.")
    if job.model not in ("mlp", "gpt"):
        if job.width is not None or job.depth is not None:
            raise OptionError(f"--width and --depth go with --model mlp or gpt; found --model {job.model}.")
        if ":" not in job.model:
            raise OptionError(f"--model: expected mlp, gpt or package.module:function; found {job.model!r}.")
        return called(job.model, "--model")
    width = (models.GPT_WIDTH if job.model == "gpt" else models.WIDTH) if job.width is None else job.width
    if width < 1 or (job.depth is not None and job.depth < 0):
        raise OptionError(f"--width and --depth: expected whole numbers, from 1 and from 0 up; found {width} and {job.depth}.")
    if job.model == "gpt":
        return _gpt(job, train, test, width, reporter)
    if train.tokens:
        raise OptionError(f"--model mlp takes quantities, and the rows of --data {job.data} are tokens. Take --model gpt.")
    inputs, depth = prod(train.shape), job.depth
    if depth is None:
        limit = limit_of(job, trainer.device)
        depth = models.depth_for(limit, inputs, max(classes, 1), width)
        reporter.say(
            f"model mlp: width {width}, depth {depth} (--depth {depth}), sized to twice the limit of {format_size(limit)}"
        )
    return models.mlp(inputs, max(classes, 1), width=width, depth=depth)


def _gpt(job: Job, train: Split, test: Split, width: int, reporter: Reporter) -> object:
    labels = tuple(train.labels.shape[1:])
    if not train.tokens or len(train.shape) != 1 or labels != train.shape:
        kind = "tokens" if train.tokens else "quantities"
        raise OptionError(
            "--model gpt takes rows of tokens with a label for each, as --data text:FILE gives them; "
            f"found rows of {kind} of shape {train.shape} with labels of shape {labels} each. Take another --model."
        )
    heads = models.GPT_HEADS if job.heads is None else job.heads
    if heads < 1 or width % heads:
        raise OptionError(f"--heads: expected a number that divides the width of {width}; found {heads}.")
    depth = models.GPT_DEPTH if job.depth is None else job.depth
    vocabulary = max(count_tokens(train, test), count_classes(train, test))
    reporter.say(f"model gpt: width {width}, depth {depth}, {heads} heads, {vocabulary} different tokens")
    return models.gpt(vocabulary, train.shape[0], width=width, depth=depth, heads=heads)


def _saved_plan(path: Path) -> Plan:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--plan: cannot read {path}: {error}.") from None
    return Plan.from_json(text, str(path))


if __name__ == "__main__":
    sys.exit(main())
