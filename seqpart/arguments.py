"""Options from three places: a config file, the run that is resumed, and the command line, which wins."""

import dataclasses
import itertools
import json
import tomllib
from pathlib import Path
from typing import Any

from seqpart.errors import CorruptFile, OptionError
from seqpart.run import JOB
from seqpart.rundir import latest

_NOT_KEPT = {"config", "resume", "output_dir", "overwrite", "dry_run", "plan", "plan_out", "print_schedule", "quiet", "debug"}
"""Options that a resumed run does not take over."""


def gathered(arguments: list[str], kind: type[Any]) -> list[str]:
    """`arguments` behind those of `--config FILE`, or of the run that `--resume DIR` names. `kind`: the options' dataclass."""
    known = {field.name: field for field in dataclasses.fields(kind) if field.name not in ("config", "resume")}
    config, resume = _given(arguments, "--config"), _given(arguments, "--resume")
    if resume is not None and config is not None:
        raise OptionError("--resume goes on with the run's own options: leave --config out.")
    table, source = {}, ""
    if config is not None:
        table, source = _config(Path(config)), f"--config: {config}"
    elif resume is not None:
        table, source = _kept(Path(resume)), f"--resume: {resume}"
    unknown = sorted(key for key in table if key.replace("-", "_") not in known)
    if unknown:
        raise OptionError(
            f"{source} has unknown option(s) {', '.join(unknown)}. Its keys are the flags of --help without the dashes."
        )
    found = [
        word
        for key, value in table.items()
        for word in _as_arguments(source, key.replace("_", "-"), value, known[key.replace("-", "_")].type is bool)
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


def _config(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise OptionError(f"--config: cannot read {path}: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"--config: {path} is not TOML: {error}.") from None


def _kept(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise OptionError(f"--resume: {path} does not exist. Give the directory of a run, or one of its checkpoint files.")
    job = latest(path if path.is_dir() else path.parent, JOB)
    try:
        found = json.loads(job.read_text())
        if not isinstance(found, dict):
            raise ValueError("it is no table")
        return found
    except OSError as error:
        raise OptionError(f"--resume: {path} is not the directory of a run: cannot read {job}: {error.strerror}.") from None
    except ValueError as error:
        raise CorruptFile(f"--resume: {job} is damaged: {error}. Give the run's options again from Python.") from None


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
