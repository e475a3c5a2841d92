"""What is asked: a job of seqpart's, the ways to train it that are compared, and which of its options each way takes."""

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqpart.cli.arguments import gathered, has_flag, options_of
from seqpart.cli.job import Job
from seqpart.config import Ist, Recovery, Sil
from seqpart.errors import OptionError
from seqpart.fields import as_text, flag_of
from seqpart.methods import methods_named

PLAIN = ("full", "checkpointed", "save_on_cpu")
OURS = ("streamed", "sil", "ist", "auto", "psl", "seqpart:checkpointed", "seqpart:full")
TRIM = ":trim"
DEFAULT = "full,checkpointed,save_on_cpu,streamed,sil"

_OWN = ("method", "resume", "output_dir", "overwrite", "dry_run", "plan", "plan_out", "print_schedule", "quiet", "debug")
"""Options of a single run, which mean nothing here."""
_OF_IST = [field.name for field in dataclasses.fields(Ist)]
_SIL_ONLY = [field.name for group in (Sil, Recovery) for field in dataclasses.fields(group)]
_PER_PARTITION = ("epochs", "batch_size", "lr", "optimizer")


@dataclass(frozen=True)
class Way:
    """One way to train the job."""

    name: str
    method: str
    plain: bool
    """A PyTorch program of its own, without seqpart's executor."""
    trim: bool = False
    """Started with glibc set to give freed tensors back at once."""


@dataclass(frozen=True)
class Question:
    job: Job
    arguments: tuple[str, ...]
    """The job's own options, as given: every child reads them again."""
    ways: tuple[Way, ...]
    repeats: int
    out: Path


def asked(words: list[str], description: str) -> Question:
    """The command line. Raises OptionError for what cannot be honoured."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--methods", default=DEFAULT, help=f"of {', '.join(PLAIN)} (plain PyTorch programs; with {TRIM} behind the name glibc "
        f"gives freed memory back at once), {', '.join(OURS)}. Default: {DEFAULT}",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=1, help="runs of each, in turn; times are medians. Default: 1")
    parser.add_argument("--out", type=Path, default=Path("profile"), help="folder of the results. Default: profile")
    known, rest = parser.parse_known_args(words)
    if known.repeats < 1:
        raise OptionError(f"--repeats: expected a whole number from 1 up; found {known.repeats}.")
    ways = tuple(way_named(name.strip()) for name in known.methods.split(","))
    if len({way.name for way in ways}) < len(ways):
        raise OptionError(f"--methods {known.methods}: each at most once.")
    job = parsed(rest)
    _refuse(job, ways)
    return Question(job, tuple(rest), ways, known.repeats, known.out)


def parsed(arguments: list[str]) -> Job:
    """The options of `python -m seqpart.train`, --config included. Those of one method alone say that it is among the ways."""
    words = gathered(arguments, Job)
    if any(has_flag(words, flag_of(name)) for name in _OF_IST) and not has_flag(words, "--method"):
        words = [*words, "--method=ist"]
    return options_of(Job, words, "profile_memory.py ...")


def way_named(name: str) -> Way:
    if name in OURS:
        return Way(name, name.removeprefix("seqpart:"), plain=False)
    method = name.removesuffix(TRIM)
    if method in PLAIN:
        return Way(name, method, plain=True, trim=name != method)
    raise OptionError(f"--methods: expected some of {', '.join((*PLAIN, *OURS))}; found {name!r}.")


def _refuse(job: Job, ways: tuple[Way, ...]) -> None:
    plain = [way.name for way in ways if way.plain]
    if job.device.startswith("sim") and plain:
        raise OptionError(
            f"--device {job.device} and --methods {','.join(plain)}: these are plain PyTorch programs, which know no simulated "
            f"device. Give --methods some of {', '.join(OURS)}."
        )
    defaults = {field.name: field.default for field in dataclasses.fields(Job)}
    given = [flag_of(name) for name in _OWN if getattr(job, name) != defaults[name]]
    if job.method == "ist":  # its options say so
        given.remove("--method")
    if (job.method == "ist") != any(way.method == "ist" for way in ways):
        raise OptionError("--subnets and the other options of ist go with ist among --methods, which needs --subnets.")
    if job.loss != "psl" and any(way.method == "psl" for way in ways):
        raise OptionError("--methods psl: it trains by --loss psl. Give it, so that all methods learn the same.")
    if given:
        raise OptionError(f"{', '.join(given)}: goes with a single run. Leave it out (--methods says which ones are compared).")
    several = [name for name in _PER_PARTITION if isinstance(getattr(job, name), tuple)]
    if several and any(way.name != "sil" for way in ways):
        raise OptionError(
            f"{flag_of(several[0])} {as_text(getattr(job, several[0]))}: values for each partition go with sil alone, and the "
            "methods are compared on the same updates. Give one value."
        )


def job_of(job: Job, way: Way) -> Job:
    """The job with the options that this way takes. Checkpoints are off unless asked for: a plain program makes none."""
    defaults = {field.name: field.default for field in dataclasses.fields(Job)}
    changed: dict[str, Any] = {"method": defaults["method"] if way.plain else way.method}
    if way.method != "ist":
        changed |= dict.fromkeys(_OF_IST)
    if way.method != "sil":
        changed |= {name: defaults[name] for name in _SIL_ONLY}
    if way.plain or not any(method.cuts for method in methods_named(way.method)):
        changed["partitions"] = "auto"
    if job.save_every == defaults["save_every"]:
        changed["save_every"] = "never"
    return dataclasses.replace(job, **changed)
