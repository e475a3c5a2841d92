"""docs/trust.md, made from a campaign's results."""

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

from benchmarks import record as records_on_disk
from benchmarks.campaign.faults import KINDS
from benchmarks.campaign.jobs import TRAITS

_PLACES = re.compile(r"/tmp/\S*?(?=[\s:,.]?(\s|$))")
DOCUMENT = Path(__file__).parents[2] / "docs" / "trust.md"

HEAD = """\
# What seqpart promises when things go wrong

This page is made by `python -m benchmarks.campaign --table` from the results of one campaign. A campaign draws jobs (model,
data, method, optimizer, type, batch, micro-batch, threads, limit, directories) and faults from a seed, runs them as processes
of the real command, and looks at every one of them from outside. A case can be run again with all that it prints:
`python -m benchmarks.campaign --seed {seed} --only CASE`.

**{cases} cases, {starts} starts of the command: {violated} cases with a violation, {wrong} of them with wrong bits.
{compared} runs that ended were compared bit for bit.**

{machine}; seed {seed}, {jobs} cases at a time, {minutes:.0f} minutes, {date};
seqpart {seqpart}, torch {torch}, Python {python}, {system}.

## Faults

"Struck" counts the cases in which the fault met the run before it ended. A case that went on was stopped by its fault, then
resumed until it was done (some were killed up to twice more on the way), and compared.

"""

PROMISES = """
## What is looked at in every case

- **The limit**: a watcher outside samples `RssAnon` + `RssShmem` of the process tree every 10 ms, from its first moment; the
  peak stays under `--mem-limit` (and `--ram-limit` beside it, where it is given), and the proof that the run prints shows no
  less than the watcher saw (2 MB may come and go between two samples).
- **The prediction**: of runs that nothing stopped within -1 % and +5 % of the peak seen from outside.
- **The named limit**: each job is refused first; then it must end under the limit that the refusal named, or up to 80 MB
  more.
- **The bits**: weights of exact methods equal those of a plain PyTorch loop, bit for bit (with `--dtype bf16` under an
  autocast without its cache of casts, as seqpart's is), and the weights file, losses and accuracy are those of the
  undisturbed run; of `sil` those of the undisturbed run. Where a failed allocation has halved the
  micro-batch, the plain loop halves its own after the same update (`sil` is not compared then).
- **The ending**: an exit code that this fault may lead to, of those in the README; one message and no traceback.
- **Nothing else changed**: around the run lie three other runs that can be resumed (one with its homes under the same
  `--offload-dir`, one that was moved away after its homes had been put there), files of a user under names like ours,
  markers that nobody of ours made, and links that lead to the user's files. Type, mode, size, time and content of all of
  them are compared after every case, nothing new may lie there, and at the end of the campaign the three runs are resumed
  to their bits{lost}.
- **Nothing is left over** in the directory of a finished run.

## How the faults are made

Kills and signals come from outside, at a time that is drawn. Faults of single operations come from a small library
(`benchmarks/campaign/faults.c`) that is compiled with `cc` and loaded before the C library: it counts the operations on
files below the case's own directory and lets the K-th fail, be torn or be slow; it moves the wall clock, and refuses the
K-th large allocation. K is drawn from what the undisturbed run counted. An error of a device (EIO) is made by this library
too, not by a device: {devices}. A `small disk` is a real file system (tmpfs) that is too small for the run, mounted as
its directory, and enlarged before the run goes on. What a user's program does (an optimizer from a function, a callback that
freezes a layer, goes into another directory, leads a link elsewhere, calls `fit` in another thread, or is killed) is done by
`benchmarks/campaign/program.py`, which starts the command with callbacks. A `cgroup` is a real one, v1 or v2, made as root;
its run is given a limit that just fits. A changed value is any of the file's JSON, but for what tells of the past or of the
user's wishes (losses, settings): nothing else contradicts these. One case in eight is a process of its own; the others are
forked from a process that has imported torch already, and their peaks were measured to be 0.06 % higher. How high the memory
stands while torch is imported ({imports:.0f} MB) is seen in the former alone; it is in the proof, and comes before any plan:
where it is the peak of the whole process, the prediction is not compared.

## What no campaign can show

A loss of power (the campaign kills processes; what the disk itself loses is held by `fsync` in the order that
`seqpart/checkpoint/manifest.py` describes), a disk that lies about what it has written, damage in two files at once, and a GPU.
"""

FOUND = Path(__file__).with_name("found.md")
"""What use from outside found, by kind."""
_BY_SECTOR = "the kernel's `dm-flakey` and `dm-error` fail by time and by sector, which no seed repeats"
_NONE = "the machine's kernel has no device mapper, and a FUSE file system was not written for it"


def write(name: str) -> Path:
    """Raises SystemExit where there are no results."""
    path = records_on_disk.path_of(name)
    if not path.exists():
        raise SystemExit(f"no results at {path}: run `python -m benchmarks.campaign --minutes 70` first.")
    found = json.loads(path.read_text())
    DOCUMENT.write_text(text_of(found))
    return DOCUMENT


def text_of(found: dict[str, Any]) -> str:
    result = found["result"]
    rows = result["faults"]
    total = {key: sum(row[key] for row in rows.values()) for key in ("starts", "cases violated")}
    head = HEAD.format(
        seed=result["seed"], jobs=result["jobs"], minutes=result["seconds"] / 60, date=found["date"], cases=result["cases"],
        starts=total["starts"], violated=total["cases violated"], compared=sum(row["bits"] for row in rows.values()),
        wrong=sum(row["violations"].get("bits", 0) for row in rows.values()), seqpart=found["seqpart"], torch=found["torch"],
        python=found["python"], system=found["system"], machine=f"{found['machine']}, {found['cpu']}",
    )  # fmt: skip
    lines = ["| fault | what it is | promise | cases | struck | how they ended | violated |", "|---|---|---|---|---|---|---|"]
    for name, row in rows.items():
        kind = KINDS[name]
        ends = ", ".join(f"{outcome} {count}" for outcome, count in row["outcomes"].items())
        cells = [name, kind.what, kind.promise, row["cases"], row["struck"], ends, row["cases violated"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += _traits(result.get("traits", {}))
    lost = "" if not result["lost"] else f" ({len(result['lost'])} did not: {'; '.join(result['lost'])})"
    devices = _BY_SECTOR if result["device_mapper"] else _NONE
    return (
        head
        + "\n".join(lines)
        + "\n"
        + _violations(result)
        + _mended(result)
        + "\n"
        + FOUND.read_text()
        + PROMISES.format(lost=lost, devices=devices, imports=result["imports"] / 1e6)
    )


def _traits(rows: dict[str, dict[str, int]]) -> list[str]:
    """Of what is unusual about jobs."""
    if not rows:
        return []
    lines = ["", "### Unusual jobs", "", "| what | in words | cases | compared | violated |", "|---|---|---|---|---|"]
    return lines + [f"| {trait} | {TRAITS[trait]} | {' | '.join(map(str, row.values()))} |" for trait, row in rows.items()]


def _violations(result: dict[str, Any]) -> str:
    if not result["violated"]:
        return ""
    lines = [f"- case {case['case']}, {case['fault']}: {'; '.join(case['violations'])}" for case in result["violated"]]
    return "\n### Violations\n\n" + "\n".join(lines) + "\n"


def _mended(result: dict[str, Any]) -> str:
    if not result["mended"]:
        return ""
    lines = [
        f"- case {case['case']}, {case['fault']}: {_PLACES.sub('...', case['violation'].splitlines()[0])}"
        for case in result["mended"]
    ]
    return (
        "\n### What was found, mended and run again\n\nIn earlier sittings of this campaign these cases were violated, by the "
        "program or by a check that was wrong itself.\nEach was run again when its cause had been mended, and counts above as "
        "it ended then.\n\n" + "\n".join(lines) + "\n"
    )


def has_device_mapper() -> bool:
    """Whether a target that fails could be had at all."""
    try:
        os.close(os.open("/dev/mapper/control", os.O_RDWR))
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.EACCES, errno.EPERM)
    return True
