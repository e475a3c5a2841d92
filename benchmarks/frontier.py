"""Seconds per exact update against memory: `--method auto` from the smallest limit to that of plain training.

    python -m benchmarks.frontier                       S at batch 256 and 32, three rounds, about 40 minutes on 2 cores
    python -m benchmarks.frontier S-32 --rounds 1       one of the parts below
    python -m benchmarks.frontier --all                 every part, three rounds: many hours, of which L takes most
    python -m benchmarks.frontier T --limits 1GB,2GB --updates 5 --rounds 1 --try      a look at it, which is not kept
    python -m benchmarks.frontier --quick               a small network under one limit, to see that it runs; not kept
    python -m benchmarks.frontier --picture             docs/frontier.png and the table of what was measured

S-256, S-32, L-256, L-32  residual MLPs, by batch
T                         a GPT of 151 million parameters at batch 8, as in benchmarks/peers
R                         ResNet-50 with BatchNorm on 3 x 64 x 64 at batch 128

The arms of a round run one after the other, each in a process of its own (benchmarks/streamed_arm.py): plain PyTorch, torch's
checkpoint_sequential at several segment counts, and seqpart under ten limits; of S also with weights and moments in bfloat16,
and with adamw8bit. Ratios are to the plain loop of the same round, in float32.
There is no save_on_cpu arm: without a GPU it copies saved tensors within the same memory, which saves none and costs time.
File mappings are no arm here: their pages are counted and limited by a memory cgroup only, so benchmarks/peers measures them.
Results: benchmarks/results/frontier-*.json
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import frontier_report as report
from benchmarks import quick
from benchmarks.peers.networks import BATCHES
from benchmarks.record import load, save
from benchmarks.streamed_arm import WARM_UP, run_arm


@dataclass(frozen=True)
class Part:
    network: str
    """A name of benchmarks/frontier_networks.py."""
    batch: int
    updates: int
    """Of a run, those of warm-up among them."""
    segments: tuple[int, ...]
    """Of checkpoint_sequential; the last of them, as many as there are blocks, checkpoints every block."""
    limits: tuple[str, ...]
    small: tuple[str, ...] = ()
    """Limits at which smaller states are tried too."""
    shape: tuple[object, ...] = ()
    """Of a network without a name."""

    @property
    def title(self) -> str:
        return f"{self.network}, batch {self.batch}"


PARTS = {
    "S-256": Part(
        "S", 256, 11, (4, 8, 26),
        ("375MB", "450MB", "600MB", "800MB", "1GB", "1.2GB", "1.4GB", "1.7GB", "1.9GB", "2.2GB"),
        ("375MB", "450MB", "600MB", "800MB", "1GB", "1.4GB"),
    ),
    "S-32": Part(
        "S", 32, 15, (4, 8, 26),
        ("355MB", "450MB", "600MB", "800MB", "1GB", "1.2GB", "1.4GB", "1.7GB", "1.9GB", "2.1GB"),
        ("355MB", "450MB", "600MB", "800MB", "1GB", "1.4GB"),
    ),
    "L-256": Part(
        "L", 256, 7, (4, 8, 26),
        ("605MB", "900MB", "1.4GB", "2GB", "2.8GB", "3.6GB", "4.5GB", "5.5GB", "6.5GB", "7.4GB"),
    ),
    "L-32": Part(
        "L", 32, 9, (4, 8, 26),
        ("565MB", "900MB", "1.4GB", "2GB", "2.8GB", "3.6GB", "4.5GB", "5.5GB", "6.3GB", "7GB"),
    ),
    "T": Part(
        "T", BATCHES["T"], 7, (2, 4, 7, 14),
        ("575MB", "700MB", "900MB", "1.2GB", "1.5GB", "1.9GB", "2.3GB", "2.8GB", "3.2GB", "3.7GB"),
    ),
    "R": Part(
        "R", 128, 9, (2, 4, 9, 18),
        ("680MB", "740MB", "800MB", "900MB", "1GB", "1.2GB", "1.4GB", "1.6GB", "1.8GB", "2.05GB"),
    ),
}  # fmt: skip
QUICK = {"small": Part("small", 16, WARM_UP + 2, (4,), ("1GB",), ("1GB",), ("--width", 64, "--depth", 2))}
DEFAULT = ("S-256", "S-32")
FOLDER = Path("runs")
"""Where the homes lie while a run lasts: a real disk."""


def arms_of(part: Part, limits: Sequence[str]) -> dict[str, tuple[object, ...]]:
    """What to run, by name."""
    arms: dict[str, tuple[object, ...]] = {"plain": ("plain",)}
    for count in part.segments:
        name = report.EVERY_BLOCK if count == part.segments[-1] else f"checkpoint_sequential, {count} segments"
        arms[name] = ("plain", "--segments", count)
    arms |= {limit: ("streamed", "--method", "auto", "--limit", limit) for limit in limits}
    small = [(limit, states) for states in report.SMALL for limit in part.small if limit in limits]
    return arms | {report.with_states(limit, states): (*arms[limit], "--states", states) for limit, states in small}


def measured(name: str, rounds: int, folder: Path, limits: Sequence[str] = (), updates: int | None = None) -> dict[str, Any]:
    part = (PARTS | QUICK)[name]
    arms = arms_of(part, limits or part.limits)
    common = [*(part.shape or ("--network", part.network)), "--batch", part.batch, "--updates", updates or part.updates]
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for number in range(rounds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            run = _attempt(arms[arm], common, folder)
            runs[arm].append(run)
            said = f"{run['median']:7.3f} s, {run['peak'] / 1e9:.3f} GB" if "failed" not in run else run["failed"]
            print(f"  {name} round {number + 1}: {arm:34} {said}", flush=True)
    return {arm: _summary(found, runs["plain"]) for arm, found in runs.items()}


def _attempt(arm: tuple[object, ...], common: Sequence[object], folder: Path) -> dict[str, Any]:
    """An arm of seqpart that fails is noted and the others go on: its limit may not hold on this machine."""
    try:
        return run_arm(str(arm[0]), *arm[1:], *common, folder=folder)
    except RuntimeError as failure:
        if arm[0] == "plain":
            raise
        return {"failed": str(failure).splitlines()[-1]}


def _summary(found: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    if failed := [one for one in found if "failed" in one]:
        return {**failed[0], "runs": found}
    ratio = median(one["median"] / base["median"] for one, base in zip(found, plain, strict=True))
    seconds, peak = median(one["median"] for one in found), max(one["peak"] for one in found)
    return {"to plain": round(ratio, 3), "seconds": seconds, "peak": peak, "runs": found}


def peers_of(part: Part, known: dict[str, Any]) -> dict[str, Any]:
    """What benchmarks/peers found on the same network, where it took the same batch."""
    found: dict[str, Any] = known.get(part.network, {}) if BATCHES.get(part.network) == part.batch else {}
    return found


def show(result: dict[str, Any], path: Path | None = None) -> None:
    """Tables of all parts in `result`, and their picture at `path`."""
    known = load("peers")
    parts = {
        name: (part.title, result[name], peers_of(part, known)) for name, part in (PARTS | QUICK).items() if name in result
    }
    for name, (_, points, found) in parts.items():
        print(report.table(name, points, found))
    if path and parts:
        report.picture(parts, path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[], help=f"of {', '.join(PARTS)} (default: {' '.join(DEFAULT)})")
    parser.add_argument("--all", action="store_true", help="every part")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limits", default="", help="instead of the part's own: some, with commas between")
    parser.add_argument("--updates", type=int, help=f"of a run, {WARM_UP} of warm-up among them (default: the part's)")
    parser.add_argument("--try", action="store_true", dest="trial", help="keep nothing, and draw nothing")
    parser.add_argument("--picture", action="store_true", help="only show what was measured")
    quick.add_to(parser)
    options = parser.parse_args()
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"unknown parts {', '.join(unknown)}: expected some of {', '.join(PARTS)}")
    if (options.limits or options.updates) and not options.trial:
        parser.error("--limits and --updates need --try: what is kept is measured alike")
    if options.updates is not None and options.updates <= WARM_UP + 1:
        parser.error(f"--updates: expected more than {WARM_UP + 1}")
    return options


def main() -> None:
    options = arguments()
    wanted = list(PARTS) if options.all else options.parts or list(DEFAULT)
    if options.quick:
        quick.need("matplotlib")
        wanted, options.rounds = list(QUICK), 1
    with quick.places(options.quick) as docs:
        folder = docs if options.quick else FOLDER
        folder.mkdir(exist_ok=True)
        result = {} if options.trial else load("frontier")
        for name in [] if options.picture else wanted:
            limits = options.limits.split(",") if options.limits else ()
            result[name] = measured(name, options.rounds, folder, limits, options.updates)
            if not options.trial:
                print(f"  {save('frontier', result)}")
        show(result, None if options.trial else docs / report.PICTURE.name)


if __name__ == "__main__":
    main()
