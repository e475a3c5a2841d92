"""What one exact update with one partition at a time costs, against a plain loop that has all the memory it wants.

    python -m benchmarks.streamed_speed                     all parts, about an hour on 2 cores
    python -m benchmarks.streamed_speed S disk --rounds 1   some of them
    python -m benchmarks.streamed_speed S depth --quick     small networks, to see that they run; not kept

S, L      the two residual MLPs: per update, streamed from disk / plain loop / the computation alone / the disk alone
disk      S at batch 32, where the disk is the larger term
smallest  the least limit at which S and L train at all, as the refusal names it, and a run a little above it
depth     time per update and peak of 4 to 64 partitions of one block each, at one limit
states    S with Adam's state and weights in bfloat16 against float32 at batch 32, where the disk is the longer, and with
          adamw8bit at 600 MB against the plain loop at batch 256

Every arm runs in a process of its own (benchmarks/streamed_arm.py), the arms of a round one after the other; reported are
medians over all updates of all rounds, and ratios of arms of the same round. Results: benchmarks/results/streamed_speed-*.json
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import quick
from benchmarks.record import load, save
from benchmarks.streamed_arm import run_arm
from benchmarks.streamed_networks import BATCH, DEPTH, WIDTHS

PARTS = ("S", "L", "disk", "smallest", "depth", "states")
ARMS = ("plain", "streamed", "compute", "io")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    widths: Mapping[str, int] = field(default_factory=lambda: WIDTHS)
    depth: int = DEPTH
    batch: int = BATCH
    limits: Mapping[str, str] = field(default_factory=lambda: {"S": "620MB", "L": "1.2GB", "disk": "620MB"})
    updates: Mapping[str, int] = field(default_factory=lambda: {"S": 13, "L": 8, "disk": 13})
    small: Mapping[str, str] = field(default_factory=lambda: {"S": "440MB", "L": "700MB"})
    """A little above the least limit."""
    tight: str = "600MB"
    depths: Sequence[int] = (4, 8, 16, 32, 64)
    depth_width: int = 1024
    depth_limit: str = "420MB"


QUICK = Sizes(
    widths={"S": 64, "L": 3072}, depth=2, batch=16, limits=dict.fromkeys(("S", "L", "disk"), "1GB"),
    updates=dict.fromkeys(("S", "L", "disk"), 5), small={"L": "700MB"}, tight="1GB",
    depths=(4,), depth_width=64, depth_limit="1GB",
)  # fmt: skip


def arm(name: str, *options: object) -> dict[str, Any]:
    return run_arm(name, *options, folder=FOLDER)


FOLDER = Path()


def speed(part: str, rounds: int, sizes: Sizes) -> dict[str, Any]:
    network, batch = ("S", 32) if part == "disk" else (part, sizes.batch)
    options = [
        "--width", sizes.widths[network], "--depth", sizes.depth, "--batch", batch, "--updates", sizes.updates[part],
        "--limit", sizes.limits[part],
    ]  # fmt: skip
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ARMS}
    for number in range(rounds):
        for name in ARMS if number % 2 == 0 else reversed(ARMS):  # what comes first finds a quieter disk, or not
            runs[name].append(arm(name, *options))
            print(f"  {part} round {number + 1}: {name:9s}{runs[name][-1]['median']:7.3f} s per update", flush=True)
    return {"limit": sizes.limits[part], "batch": batch, "runs": runs, **ratios(runs)}


def ratios(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of all updates; ratios within each round, then their median."""
    medians = [{name: found[number]["median"] for name, found in runs.items()} for number in range(len(runs["plain"]))]
    return {
        "seconds": {name: median(second for run in found for second in run["seconds"]) for name, found in runs.items()},
        "to_bound": median(one["streamed"] / max(one["compute"], one["io"]) for one in medians),
        "to_plain": median(one["streamed"] / one["plain"] for one in medians),
        "peak": max(run["peak"] for run in runs["streamed"]),
        "plain_peak": max(run["peak"] for run in runs["plain"]),
        "violations": sum(run["violations"] for run in runs["streamed"]),
    }


def smallest(_: str, rounds: int, sizes: Sizes) -> dict[str, Any]:
    """The limit that a refusal names as the least, and a run a little above it, in fewer and larger micro-batches."""
    found = {}
    for network, limit in sizes.small.items():
        shape = ["--width", sizes.widths[network], "--depth", sizes.depth, "--batch", sizes.batch]
        options = [*shape, "--updates", 5, "--any-micro-batch"]
        try:
            arm("streamed", *options, "--limit", "310MB")
            raise RuntimeError("310 MB should not be enough")
        except RuntimeError as refusal:
            named = re.search(r"smallest limit that fits: ([0-9.]+ ?[KMG]?B)", str(refusal))
            if named is None:
                raise
        run = found[network] = {"least": named[1], "limit": limit, **arm("streamed", *options, "--limit", limit)}
        print(
            f"  {network} would train at {named[1]}; at {limit}: peak {run['peak'] / 1e6:.0f} MB, {run['median']:.2f} s per "
            f"update at micro-batch {run['micro_batch']}"
        )
    return found


def depth(_: str, rounds: int, sizes: Sizes) -> dict[str, Any]:
    """One block to a partition: what grows with depth, and what does not."""
    found = {}
    for blocks in sizes.depths:
        options = [
            "--width", sizes.depth_width, "--depth", blocks - 2, "--batch", sizes.batch, "--updates", 10,
            "--partitions", blocks, "--limit", sizes.depth_limit,
        ]  # fmt: skip
        runs = [arm("streamed", *options) for _ in range(rounds)]
        seconds = median(second for run in runs for second in run["seconds"])
        peak = max(run["peak"] for run in runs)
        found[str(blocks)] = {"seconds": seconds, "per_partition": seconds / blocks, "peak": peak, "runs": runs}
        each = 1e3 * seconds / blocks
        print(f"  {blocks:2d} partitions: {seconds:.3f} s per update, {each:.1f} ms each, peak {peak / 1e6:.0f} MB")
    return found


def states(_: str, rounds: int, sizes: Sizes) -> dict[str, Any]:
    """Smaller states: arms of a round one after the other, the median ratio of rounds."""
    shape = ["--width", sizes.widths["S"], "--depth", sizes.depth, "--updates", sizes.updates["disk"]]
    small, large = ["--batch", min(32, sizes.batch)], ["--batch", sizes.batch, "--method", "auto"]
    of_disk, tight = ["--limit", sizes.limits["disk"]], ["--limit", sizes.tight]
    arms: dict[str, list[Any]] = {
        "fp32 at batch 32": ["streamed", *small, *of_disk],
        "bf16 at batch 32": ["streamed", *small, *of_disk, "--states", "bf16"],
        "plain": ["plain", *large],
        "fp32": ["streamed", *large, *tight],
        "8bit": ["streamed", *large, *tight, "--states", "8bit"],
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, (kind, *options) in arms.items():
            runs[name].append(arm(kind, *shape, *options))
            print(
                f"  {name:17s}{runs[name][-1]['median']:7.3f} s per update, peak {runs[name][-1]['peak'] / 1e6:.0f} MB",
                flush=True,
            )
    found = {}
    for name, other in ("bf16 at batch 32", "fp32 at batch 32"), ("8bit", "plain"), ("fp32", "plain"):
        found[name] = median(one["median"] / two["median"] for one, two in zip(runs[name], runs[other], strict=True))
        print(f"  {name}: {found[name]:.2f} x {other}")
    return {"ratios": found, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS, help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(), help="where the homes lie: a real disk")
    quick.add_to(parser)
    arguments = parser.parse_args()
    global FOLDER
    FOLDER = arguments.folder
    rounds, sizes = (1, QUICK) if arguments.quick else (arguments.rounds, Sizes())
    work = {"S": speed, "L": speed, "disk": speed, "smallest": smallest, "depth": depth, "states": states}
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"unknown parts {', '.join(unknown)}: expected some of {', '.join(PARTS)}")
    with quick.places(arguments.quick):
        result = load("streamed_speed")
        for part in arguments.parts:
            print(part)
            one = result[part] = work[part](part, rounds, sizes)
            if "to_bound" in one:
                print(
                    f"  {part}: {one['to_bound']:.2f} of max(compute, io), {one['to_plain']:.2f} of plain; "
                    f"peak {one['peak'] / 1e6:.0f} MB, plain {one['plain_peak'] / 1e6:.0f} MB; violations {one['violations']}"
                )
            print(f"  {save('streamed_speed', result)}")


if __name__ == "__main__":
    main()
