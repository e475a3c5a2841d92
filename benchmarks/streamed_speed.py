"""What one exact update with one partition at a time costs, against a plain loop that has all the memory it wants.

    python -m benchmarks.streamed_speed                     all parts, about an hour on 2 cores
    python -m benchmarks.streamed_speed S disk --rounds 1   some of them

S, L      the two residual MLPs: per update, streamed from disk / plain loop / the computation alone / the disk alone
disk      S at batch 32, where the disk is the larger term
smallest  the least limit at which S and L train at all, as the refusal names it, and a run a little above it
depth     time per update and peak of 4 to 64 partitions of one block each, at one limit

Every arm runs in a process of its own (benchmarks/streamed_arm.py), the arms of a round one after the other; reported are
medians over all updates of all rounds, and ratios of arms of the same round. Results: benchmarks/results/streamed_speed-*.json
"""

import argparse
import re
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import load, save
from benchmarks.streamed_arm import run_arm
from benchmarks.streamed_networks import BATCH, DEPTH, WIDTHS

PARTS = ("S", "L", "disk", "smallest", "depth")
LIMITS = {"S": "620MB", "L": "1.2GB", "disk": "620MB"}
SMALL = {"S": "440MB", "L": "700MB"}
ARMS = ("plain", "streamed", "compute", "io")
UPDATES = {"S": 13, "L": 8, "disk": 13}
DEPTHS, DEPTH_WIDTH, DEPTH_LIMIT = (4, 8, 16, 32, 64), 1024, "420MB"


def arm(name: str, *options: object) -> dict[str, Any]:
    return run_arm(name, *options, folder=FOLDER)


FOLDER = Path()


def speed(part: str, rounds: int) -> dict[str, Any]:
    network, batch = ("S", 32) if part == "disk" else (part, BATCH)
    options = [
        "--width",
        WIDTHS[network],
        "--depth",
        DEPTH,
        "--batch",
        batch,
        "--updates",
        UPDATES[part],
        "--limit",
        LIMITS[part],
    ]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ARMS}
    for number in range(rounds):
        for name in ARMS if number % 2 == 0 else reversed(ARMS):  # what comes first finds a quieter disk, or not
            runs[name].append(arm(name, *options))
            print(f"  {part} round {number + 1}: {name:9s}{runs[name][-1]['median']:7.3f} s per update", flush=True)
    return {"limit": LIMITS[part], "batch": batch, "runs": runs, **ratios(runs)}


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


def smallest(_: str, rounds: int) -> dict[str, Any]:
    """The limit that a refusal names as the least, and a run a little above it, in fewer and larger micro-batches."""
    found = {}
    for network, width in WIDTHS.items():
        options = ["--width", width, "--depth", DEPTH, "--updates", 5, "--any-micro-batch"]
        try:
            arm("streamed", *options, "--limit", "310MB")
            raise RuntimeError("310 MB should not be enough")
        except RuntimeError as refusal:
            named = re.search(r"smallest limit that fits: ([0-9.]+ ?[KMG]?B)", str(refusal))
            if named is None:
                raise
        limit = SMALL[network]
        run = found[network] = {"least": named[1], "limit": limit, **arm("streamed", *options, "--limit", limit)}
        print(
            f"  {network} would train at {named[1]}; at {limit}: peak {run['peak'] / 1e6:.0f} MB, {run['median']:.2f} s per "
            f"update at micro-batch {run['micro_batch']}"
        )
    return found


def depth(_: str, rounds: int) -> dict[str, Any]:
    """One block to a partition: what grows with depth, and what does not."""
    found = {}
    for blocks in DEPTHS:
        options = [
            "--width",
            DEPTH_WIDTH,
            "--depth",
            blocks - 2,
            "--updates",
            10,
            "--partitions",
            blocks,
            "--limit",
            DEPTH_LIMIT,
        ]
        runs = [arm("streamed", *options) for _ in range(rounds)]
        seconds = median(second for run in runs for second in run["seconds"])
        peak = max(run["peak"] for run in runs)
        found[str(blocks)] = {"seconds": seconds, "per_partition": seconds / blocks, "peak": peak, "runs": runs}
        each = 1e3 * seconds / blocks
        print(f"  {blocks:2d} partitions: {seconds:.3f} s per update, {each:.1f} ms each, peak {peak / 1e6:.0f} MB")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS, help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(), help="where the homes lie: a real disk")
    arguments = parser.parse_args()
    global FOLDER
    FOLDER = arguments.folder
    work = {"S": speed, "L": speed, "disk": speed, "smallest": smallest, "depth": depth}
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"unknown parts {', '.join(unknown)}: expected some of {', '.join(PARTS)}")
    result = load("streamed_speed")
    for part in arguments.parts:
        print(part)
        result[part] = work[part](part, arguments.rounds)
        if "to_bound" in result[part]:
            one = result[part]
            print(
                f"  {part}: {one['to_bound']:.2f} of max(compute, io), {one['to_plain']:.2f} of plain; "
                f"peak {one['peak'] / 1e6:.0f} MB, plain {one['plain_peak'] / 1e6:.0f} MB; violations {one['violations']}"
            )
        print(f"  {save('streamed_speed', result)}")


if __name__ == "__main__":
    main()
