"""The directories of a run, opened: that of its results, and that of its homes and rows."""

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqpart.checkpoint.leftovers import tell_leftovers
from seqpart.checkpoint.resume import ResumePoint
from seqpart.checkpoint.run_directory import RunDirectory, new_name, refuse_taken
from seqpart.checkpoint.scratch_directory import open_scratch
from seqpart.config import Settings
from seqpart.device.device import describe_versions
from seqpart.device.timeline import MEMORY
from seqpart.errors import BadInput, DiskFull, Interrupted, shown
from seqpart.plan.plan import Plan
from seqpart.profile.machine import existing
from seqpart.report.reporter import EVENTS, Reporter
from seqpart.store.atomic import write_text
from seqpart.store.checksummed import with_checksum
from seqpart.store.scratch import JOB, PLAN
from seqpart.units import format_size, now

UNBEGUN = "unbegun"
"""The state of a run whose rows and weights were not all there yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """`scratch` has the homes and rows; it may be `directory` itself."""

    directory: RunDirectory
    scratch: RunDirectory


def open_places(
    plan: Plan, settings: Settings, reporter: Reporter, stack: ExitStack,
    *, resumed: ResumePoint | None, job: dict[str, Any] | None, state: Callable[[], str],
) -> Places:  # fmt: skip
    """`stack` closes them, in the `state` of then. The plan and `job` are written, and the log is begun."""
    manifest = resumed.manifest if resumed is not None else None
    name = new_name(plan.method)
    root = resumed.root if resumed is not None else settings.output_dir or Path("runs") / name
    directory = RunDirectory(root, overwrite=settings.overwrite, resume=manifest is not None)

    def close(kind: type[BaseException] | None, *_: object) -> None:
        ended = "interrupted" if kind is not None and issubclass(kind, Interrupted) else state()
        in_vain = ended == UNBEGUN and kind is not None and issubclass(kind, BadInput)
        directory.close("failed" if ended == UNBEGUN else ended, (PLAN, JOB, EVENTS, MEMORY) if in_vain else ())

    stack.push(close)
    scratch = open_scratch(directory, manifest, settings.offload_dir, name)
    if scratch is not directory:
        stack.push(lambda kind, *_: scratch.vanish(failed=kind is not None))
    if manifest is None:
        refuse_small_disk(plan, scratch.root, written=plan.live_bytes)
    for line in tell_leftovers(scratch.root.parent, directory.cleaned):
        reporter.say(line)
    reporter.open_log(directory.result(EVENTS), add=manifest is not None)
    at = dict(zip(("phase", "updates"), manifest.state["position"], strict=True)) if manifest is not None else None
    reporter.record("start", time=now(), **describe_versions(), settings=settings.to_json(), checkpoint=at)
    write_text(directory.result(PLAN), plan.to_json())
    if job is not None:
        write_text(directory.result(JOB), with_checksum("job", job))
    reporter.say(f"run directory {shown(directory.root)}")
    return Places(directory=directory, scratch=scratch)


def refuse_taken_places(output_dir: Path | None, resume: str | Path | None, *, overwrite: bool) -> None:
    """Before anything is read or planned: raises what `open_places` would, of the directory of the results."""
    if resume is not None:
        refuse_taken(Path(resume) if Path(resume).is_dir() else Path(resume).parent, resume=True)
    elif output_dir is not None:
        refuse_taken(output_dir, overwrite=overwrite)


def refuse_small_disk(plan: Plan, folder: Path, written: int = 0) -> None:
    """Raises DiskFull; `written`: what of the plan's bytes is there already."""
    free = written + shutil.disk_usage(existing(folder)).free
    if free < plan.disk_bytes:
        raise DiskFull(
            f"{folder} has {format_size(free)} free, and the plan needs {format_size(plan.disk_bytes)} for homes, boundary "
            "rows, checkpoints and the result. Free some space, give another place with --offload-dir, or do without "
            "checkpoints (--save-every never)."
        )
