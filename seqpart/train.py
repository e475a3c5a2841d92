"""The command: `python -m seqpart.train --mem-limit 2GB`."""

import atexit
import gc
import itertools
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack

if __name__ == "__main__":
    from seqpart.interrupts import nothing_begun_yet

    nothing_begun_yet()
    from seqpart.launch.process import prepare_command

    prepare_command()  # before torch is loaded

from seqpart.cli.arguments import gathered, has_flag, kept_options, options_of
from seqpart.cli.commands import doctor, reported, verified
from seqpart.cli.job import DIGITS, Job, opened, saved_plan, smallest_limit_named
from seqpart.data.splits import Split
from seqpart.device.device import Device
from seqpart.device.limit import translate_oom
from seqpart.device.ranks import begun_before, is_of_first_rank, leads, started_by_torchrun
from seqpart.errors import DataError, Interrupted, ModelError, OptionError, SeqpartError, StoreError, shown
from seqpart.interrupts import INTERRUPTED, begun, end_at_once, like_ctrl_c
from seqpart.model.weight_files import MODEL
from seqpart.plan.plan import Plan
from seqpart.report.reporter import Reporter, planning_shown
from seqpart.report.terminal import fitted, lasting_output, printing
from seqpart.runtime.weight_store import refuse_small_disk, refuse_taken_places
from seqpart.schedule.steps import steps_of, to_text
from seqpart.store.atomic import write_text
from seqpart.trainer import Trainer

PROGRAM = "python -m seqpart.train"
_PARSERS = ("tyro", "argparse")
SHOWN_STEPS = 40
PRETRAINED = "pretrained"
"""Directory of the results with what from_pretrained reads."""
ADAPTER = "adapter"
"""Directory of the results with the adapter of a peft model."""
NO_METHOD = "no --method given: sil, which is approximate; --method auto takes the fastest exact method that fits"


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return _guarded(
        lambda: _train(gathered(arguments, Job), alone=argv is None),
        debug="--debug" in arguments,
        prints=not {"-h", "--help", "--dry-run"}.isdisjoint(arguments),
    )


def run_command(command: str, arguments: list[str]) -> int:
    """Runs a command of the console script: train, plan (a dry run), verify, report, doctor. Returns the exit code."""
    if command == "train":
        sys.argv[1:] = arguments
        return main()
    if command == "plan":
        return main([*arguments, "--dry-run"])
    work = {"verify": verified, "doctor": doctor, "report": reported}[command]
    debug = command == "verify" and "--debug" in arguments
    return _guarded(lambda: work(arguments), debug=debug, prints=command == "doctor")


def _guarded(work: Callable[[], None], *, debug: bool, prints: bool) -> int:
    """Run `work`; a user's mistake becomes one message and its exit code.

    prints: what it prints is all that it is for, and must arrive.
    """
    atexit.register(end_at_once)
    begun()
    with lasting_output() as output, like_ctrl_c(), printing():
        code = _ended(work, debug=debug)
        output.flush()
    return StoreError.exit_code if prints and not code and output.lost else code


def _ended(work: Callable[[], None], *, debug: bool) -> int:
    try:
        work()
    except SeqpartError as error:
        if is_of_first_rank(error):
            return error.exit_code
        if debug:
            print("".join(traceback.format_exception(error)).replace(str(error), error.with_flags), end="", file=sys.stderr)
        else:
            notes = "".join(f"\n  {note}" for note in error.notes_with_flags)
            print(fitted(f"{type(error).__name__}: {error.with_flags}{notes}", sys.stderr), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        if not is_of_first_rank(interrupt):
            what = str(interrupt) or "the run's scratch files are removed; earlier results are untouched."
            if isinstance(interrupt, Interrupted):
                what = f"the run is saved. Resume with: {PROGRAM} --resume {shlex.quote(shown(interrupt.directory))}"
            print(f"interrupted: {what}", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as error:
        origin = _origin(error)
        if origin is None:  # the command line's parser has said why, or shown the help
            return int(error.code or 0)
        if debug:
            traceback.print_exc()
        print(f"SystemExit: {origin} ended the program with {error.code!r}. Let it return, or raise an error.", file=sys.stderr)
        return SeqpartError.exit_code
    return 0


def _origin(error: SystemExit) -> str | None:
    """The last place of the user's own code that led to it; None where none did."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame in frames]
    outside = [n for n, package in enumerate(packages) if package not in (__package__, "__main__")]
    if not outside or packages[outside[0]] in _PARSERS:
        return None
    frame = next((frames[n] for n in reversed(outside) if packages[n] not in _PARSERS), frames[outside[0]])
    return f"{frame.f_code.co_name} in {frame.f_code.co_filename}, line {frame.f_lineno},"


def _train(arguments: list[str], *, alone: bool) -> None:
    """alone: this process does nothing else."""
    job = options_of(Job, arguments, PROGRAM)
    if job.resume and (job.plan or job.dry_run or job.plan_out or job.overwrite or job.output_dir):
        raise OptionError("--resume: leave --plan, --plan-out, --dry-run, --overwrite and --output-dir out.")
    if job.dry_run and job.trace:
        raise OptionError("--dry-run trains nothing that --trace could show: leave one of them out.")
    if job.quiet and job.print_schedule:
        raise OptionError("--quiet and --print-schedule: leave one of them out.")
    if not job.dry_run and not started_by_torchrun():  # else the others wait for a rank that has ended: `fit` tells them
        refuse_taken_places(job.output_dir, job.resume or begun_before(job.output_dir), overwrite=job.overwrite)
    reuse, reporter = saved_plan(job), Reporter(quiet=job.quiet or not leads(), flags=True)
    if not job.resume and not has_flag(arguments, "--method"):
        reporter.say(NO_METHOD)
    with ExitStack() as stack:
        with translate_oom(Device(), "the data and the model were read"):
            if alone:
                gc.freeze()  # what libraries have made stays: collections need not look at it
            asked, (job, trainer, train, test) = job, opened(job, reporter, stack, alone=alone)
        try:
            with smallest_limit_named(asked, trainer, train, test, reuse):
                _carried_out(job, trainer, train, test, reuse, reporter)
        except (DataError, ModelError) as error:
            if ":" in job.model and not job.resume and not has_flag(arguments, "--data"):
                error.add_note(f"no --data given: digits, {DIGITS}.")
            raise


def _carried_out(job: Job, trainer: Trainer, train: Split, test: Split, reuse: Plan | None, reporter: Reporter) -> None:
    if job.print_schedule or job.plan_out or job.dry_run:
        with planning_shown(reporter), trainer.planned(train, test, reuse=reuse, dry=job.dry_run) as (_, prepared):
            pass
        if job.plan_out and leads():
            write_text(job.plan_out, prepared.plan.to_json())
        if job.dry_run:
            reporter.plan(prepared.plan)
            if trainer.device.hardware is None:  # the machine around a simulated card has a disk of its own
                refuse_small_disk(prepared.plan, trainer.scratch_parent)
        if job.print_schedule:
            steps = itertools.islice(steps_of(prepared.phases), SHOWN_STEPS)
            reporter.say(to_text(steps, prepared.phases) + " ...")
    if not job.dry_run:
        result = trainer.fit(train, test, reuse=reuse, resume=job.resume, reporter=reporter, job=kept_options(job))
        if not leads():
            return
        if job.model.startswith("hf:"):
            folder = result.weights.parent / PRETRAINED
            (folder / MODEL).unlink(missing_ok=True)  # of the run that this one was to overwrite
            result.save_pretrained(folder)
            reporter.say(f"for from_pretrained: {folder}")
        if result.model is not None:
            result.save_adapter(result.weights.parent / ADAPTER)
            reporter.say(f"the adapter alone, for PeftModel.from_pretrained: {result.weights.parent / ADAPTER}")


if __name__ == "__main__":
    sys.exit(main())
