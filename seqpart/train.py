"""The door: `python -m seqpart.train --mem-limit 2GB`, and the console script `seqpart` (train, plan, verify, doctor)."""

import itertools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import tyro

from seqpart.arguments import gathered, kept_options
from seqpart.doctor import doctor
from seqpart.errors import BadInput, Interrupted, OptionError, SeqpartError
from seqpart.job import Job, opened
from seqpart.plan import Plan
from seqpart.preparation import refuse_small_disk
from seqpart.report import Reporter
from seqpart.rundir import write_text
from seqpart.schedule import steps_of, to_text
from seqpart.verify import verified

PROGRAM = "python -m seqpart.train"
INTERRUPTED = 130
SHOWN_STEPS = 40


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return _guarded(
        lambda: _train(tyro.cli(Job, args=gathered(arguments, Job), prog=PROGRAM, config=(tyro.conf.OmitArgPrefixes,))),
        debug="--debug" in arguments,
    )


def console() -> None:
    """The console script: `seqpart train`, `seqpart plan` (a dry run), `seqpart verify`, `seqpart doctor`."""
    command, *arguments = sys.argv[1:] or [""]
    if command == "train":
        sys.exit(main(arguments))
    if command == "plan":
        sys.exit(main([*arguments, "--dry-run"]))
    if command == "verify":
        sys.exit(_guarded(lambda: verified(arguments), debug="--debug" in arguments))
    if command == "doctor":
        sys.exit(_guarded(lambda: doctor(arguments), debug=False))
    asked = command in ("-h", "--help")
    usage = "usage: seqpart {train,plan,verify,doctor} [options]; seqpart train --help shows them"
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
    except Interrupted as interrupt:
        print(f"interrupted: the run is saved. Go on with: {PROGRAM} --resume {interrupt.directory}", file=sys.stderr)
        return INTERRUPTED
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


def _train(job: Job) -> None:
    if job.plan and (job.partitions != "auto" or job.micro_batch_size is not None):
        raise OptionError("--plan brings its own cut and micro-batch: leave --partitions and --micro-batch-size out.")
    if job.resume and (job.plan or job.dry_run or job.plan_out or job.overwrite or job.output_dir):
        raise OptionError("--resume: leave --plan, --plan-out, --dry-run, --overwrite and --output-dir out.")
    if job.quiet and job.print_schedule:
        raise OptionError("--quiet and --print-schedule: leave one of them out.")
    reporter = Reporter(quiet=job.quiet)
    job, trainer, train, test = opened(job, reporter)
    reuse = _saved_plan(job.plan) if job.plan else None
    if job.print_schedule or job.plan_out or job.dry_run:
        prepared = trainer.prepare(train, test, reuse=reuse).planned()
        if job.plan_out:
            write_text(job.plan_out, prepared.plan.to_json())
        if job.dry_run:
            reporter.plan(prepared.plan)
            refuse_small_disk(prepared.plan, trainer.scratch_parent)
        if job.print_schedule:
            steps = itertools.islice(steps_of(prepared.phases), SHOWN_STEPS)
            reporter.say(to_text(steps, prepared.phases) + " ...")
    if not job.dry_run:
        trainer.fit(train, test, reuse=reuse, resume=job.resume, reporter=reporter, job=kept_options(job))


def _saved_plan(path: Path) -> Plan:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--plan: cannot read {path}: {error}.") from None
    return Plan.from_json(text, str(path))


if __name__ == "__main__":
    sys.exit(main())
