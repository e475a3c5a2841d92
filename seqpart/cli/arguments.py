"""Options from three places: a config file, the run that is resumed, and the command line, which wins."""

import dataclasses
import inspect
import itertools
import shutil
from pathlib import Path
from typing import Any, TypeVar

import tyro

import seqpart.checkpoint.manifest as manifests
from seqpart.checkpoint.marker import MARKER
from seqpart.checkpoint.publication import latest
from seqpart.checkpoint.resume import as_state, refuse_finished
from seqpart.cli.config_file import read_config
from seqpart.cli.form import filled, form_of
from seqpart.cli.spelling import flags_of, one_spelling, spelled_out
from seqpart.errors import CorruptFile, OptionError, in_arguments, resuming
from seqpart.files import opened
from seqpart.report.terminal import wrapped
from seqpart.schema import as_type
from seqpart.store.checksummed import checked_body
from seqpart.store.scratch import JOB, has_checkpoint
from seqpart.text import refuse_unusable, short
from seqpart.values import NO_LIMIT, said_of

T = TypeVar("T")

_NOT_KEPT = {
    "config", "resume", "output_dir", "overwrite", "dry_run", "plan", "plan_out", "print_schedule", "trace", "quiet", "debug",
}  # fmt: skip
"""Options that a resumed run does not take over."""
Option = bool | int | float | str | None
"""As JSON has it."""


def options_of(kind: type[T], arguments: list[str], program: str) -> T:
    """`gathered` arguments as a `kind`. Raises OptionError for what cannot be used; leaves with 2 for unknown options."""
    asks_for_help = bool({"-h", "--help"} & set(arguments))
    if not asks_for_help:
        _refuse_unparsable(kind, arguments)
    form = form_of(kind, with_help=asks_for_help)
    about = wrapped(inspect.getdoc(kind) or "", shutil.get_terminal_size().columns)
    flags = (tyro.conf.OmitArgPrefixes,)
    return filled(kind, tyro.cli(form, args=arguments, prog=program, description=about, config=flags))


def _refuse_unparsable(kind: type[Any], arguments: list[str]) -> None:
    """Raises OptionError for unknown flags, for required ones that are missing, and for words that belong to no flag: the
    parser draws a box around those."""
    fields = dataclasses.fields(kind)
    required = {flag for field in fields if field.default is dataclasses.MISSING for flag in flags_of(field.name)}
    switches = {flag for field in fields if field.type is bool for flag in flags_of(field.name)}
    known = [flag for field in fields for flag in flags_of(field.name)]
    given = {(flag := word.partition("=")[0]): flag.replace("_", "-") for word in arguments if word.startswith("-")}
    unknown = [flag for flag, word in given.items() if flag[:2] == "--" != flag and word.replace("--no-", "--", 1) not in known]
    if unknown:
        raise OptionError(f"unknown option(s): {said_of(unknown, known)} --help shows all.")
    takes_next = ""
    for word in [*arguments, "--"]:
        flag = word.replace("_", "-")
        if takes_next and word[:2] == "--":
            raise OptionError(f"{takes_next}: expected a value behind it; found none. --help shows what it takes.")
        if not takes_next and not word.startswith("-"):
            raise OptionError(f"found {short(word)}, which belongs to no option. Give --NAME VALUE; --help shows all.")
        takes_next = flag if not takes_next and flag in known and flag not in switches else ""
    if required.isdisjoint(given.values()) and not any(word[:2] in required for word in given):  # -m2GB
        raise OptionError(NO_LIMIT)


def has_flag(arguments: list[str], flag: str) -> bool:
    """Whether `gathered` arguments say something of it."""
    return any(word.partition("=")[0] == flag for word in arguments)


def gathered(arguments: list[str], kind: type[Any]) -> list[str]:
    """`arguments` behind those of `--config FILE`, or of the run that `--resume DIR` names. `kind`: the options' dataclass."""
    known = {field.name: field for field in dataclasses.fields(kind) if field.name not in ("config", "resume")}
    config, resume = _given(arguments, "--config"), _given(arguments, "--resume")
    if resume is not None and config is not None:
        raise OptionError("--resume goes on with the run's own options: leave --config out.")
    table, source = {}, ""
    if config is not None:
        table, source = read_config(Path(config)), f"--config: {config}"
    elif resume is not None:
        table, source = _kept(Path(resume)), f"--resume: {resume}"
    arguments, table = spelled_out(arguments), one_spelling(table, source)
    unknown = sorted(key for key in table if key not in known)
    if unknown:
        raise OptionError(
            f"{source} has unknown option(s) {said_of(unknown, known)} Its keys are the flags of --help without the dashes."
        )
    found = [
        word
        for key, value in table.items()
        for word in _as_arguments(source, key.replace("_", "-"), value, known[key].type is bool)
    ]
    return [*found, *arguments]


def kept_options(job: Any) -> dict[str, Any]:
    """What `--resume` needs to know of a job's options, as JSON."""
    return {
        field.name: str(value) if isinstance(value, Path) else value
        for field in dataclasses.fields(job)
        if field.name not in _NOT_KEPT and (value := getattr(job, field.name)) != field.default
    }


def _given(arguments: list[str], flag: str) -> str | None:
    found = [b for a, b in itertools.pairwise(arguments) if a == flag]
    found += [word.partition("=")[2] for word in arguments if word.startswith(f"{flag}=")]
    return found[-1] if found else None


def _kept(path: Path) -> dict[str, Any]:
    """The job of the run in `path`: as its checkpoint says, or its job.json where there is none yet.

    Raises CorruptFile where that is damaged: a digit that is another would train another job.
    """
    refuse_unusable("--resume", path)
    if not path.exists():
        raise OptionError(f"--resume: {path} does not exist. Give the directory of a run, or one of its checkpoint files.")
    if not path.is_dir() or has_checkpoint(path):
        job, found = path, as_state(manifests.load(path)).job
        if found is None:
            raise OptionError(
                f"--resume: the run in {path} was started from Python. Go on with it there: {in_arguments(resuming(path))}."
            )
    else:
        job = latest(path, JOB)
        try:
            with open(opened(job), "rb") as file:
                found = checked_body("job", file.read().decode())
        except (OSError, ValueError) as error:
            refuse_finished(path)
            why = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else f"is damaged: {error}"
            if isinstance(error, OSError) and not (path / MARKER).is_file():
                raise OptionError(f"--resume: {path} is not the directory of a run: {job} {why}.") from None
            raise CorruptFile(
                f"--resume: {job} {why}. It was not used. Nothing was saved there yet: give the run's options again, with "
                f"--output-dir {path} instead of --resume.", job,
            ) from None  # fmt: skip
    try:
        options = as_type(dict[str, Option | list[Option]], found)
        if others := _NOT_KEPT.intersection(options):
            raise ValueError(f"{min(others)} is none of them")
    except ValueError as error:
        raise CorruptFile(f"--resume: {job} names no options that a run keeps ({error}). It was not used.", job) from None
    return options


def _as_arguments(source: str, name: str, value: Any, switch: bool) -> list[str]:
    if switch:
        if not isinstance(value, bool):
            raise OptionError(f"{source}: {name} must be true or false; found {value!r}.")
        return [f"--{name}"] if value else []
    if isinstance(value, dict):
        raise OptionError(f"{source}: {name} must be a value or a list of values; found a table.")
    if isinstance(value, bool):
        value = "yes" if value else "no"
    return [f"--{name}={','.join(map(str, value)) if isinstance(value, list) else value}"]
