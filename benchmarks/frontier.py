"""Seconds per exact update against memory: `--method auto` from the smallest limit to that of plain training.

    python -m benchmarks.frontier                       S at batch 256 and 32, three rounds, about 40 minutes on 2 cores
    python -m benchmarks.frontier S-32 --rounds 1       one of them
    python -m benchmarks.frontier --picture             docs/frontier.png of what was measured

The arms of a round run one after the other, each in a process of its own (benchmarks/streamed_arm.py): plain PyTorch, torch's
checkpoint_sequential at several segment counts, and seqpart under ten limits. Ratios are to the plain loop of the same round.
Results: benchmarks/results/frontier-*.json
"""

import argparse
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import load, save
from benchmarks.streamed_arm import run_arm
from benchmarks.streamed_networks import DEPTH, WIDTHS

LIMITS = {
    "S-256": ("500MB", "620MB", "800MB", "1GB", "1.2GB", "1.4GB", "1.6GB", "1.8GB", "1.9GB", "2.1GB"),
    "S-32": ("480MB", "620MB", "800MB", "1GB", "1.2GB", "1.4GB", "1.6GB", "1.8GB", "1.9GB", "2.1GB"),
    "L-256": ("900MB", "1.2GB", "1.8GB", "2.5GB", "3.2GB", "4GB", "5GB", "6GB", "6.6GB", "7.4GB"),
}
SEGMENTS = (4, 8)
UPDATES = {"S-256": 11, "S-32": 15, "L-256": 7}
FOLDER = Path("runs")
"""Where the homes lie while a run lasts: a real disk."""
PICTURE = Path(__file__).parents[1] / "docs" / "frontier.png"


def measured(part: str, rounds: int) -> dict[str, Any]:
    arms: dict[str, tuple[object, ...]] = {"plain": ("plain",)}
    arms |= {f"checkpoint_sequential, {count} segments": ("plain", "--segments", count) for count in SEGMENTS}
    arms |= {limit: ("streamed", "--method", "auto", "--limit", limit) for limit in LIMITS[part]}
    network, batch = part.split("-")
    common = ["--width", WIDTHS[network], "--depth", DEPTH, "--batch", batch, "--updates", UPDATES[part]]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in arms if number % 2 == 0 else reversed(arms):
            run = run_arm(str(arms[name][0]), *arms[name][1:], *common, folder=FOLDER)
            runs[name].append(run)
            print(f"  {part} round {number + 1}: {name:32} {run['median']:7.3f} s, {run['peak'] / 1e9:.3f} GB", flush=True)
    return {name: _summary(found, runs["plain"]) for name, found in runs.items()}


def _summary(found: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    ratio = median(one["median"] / base["median"] for one, base in zip(found, plain, strict=True))
    seconds, peak = median(one["median"] for one in found), max(one["peak"] for one in found)
    return {"to plain": round(ratio, 3), "seconds": seconds, "peak": peak, "runs": found}


def table(part: str, points: dict[str, Any]) -> str:
    lines = [f"{part}: {'arm':32} {'peak':>9} {'s/update':>9} {'x plain':>8}  plan"]
    for name, point in points.items():
        run = point["runs"][0]
        plan = f"{run['method']}, {run['partitions']} partitions, {len(run['stays'])} stay" if "method" in run else ""
        lines.append(f"  {name:37} {point['peak'] / 1e6:6.0f} MB {point['seconds']:9.3f} {point['to plain']:8.2f}  {plan}")
    return "\n".join(lines)


def picture(result: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(result), 4), layout="constrained")
    for place, (part, points) in enumerate(result.items()):
        axes = figure.add_subplot(1, len(result), place + 1)
        ours = [(p["peak"] / 1e9, p["to plain"]) for name, p in points.items() if name in LIMITS[part]]
        axes.plot(*zip(*ours, strict=True), "o-", color="#1f5f99", label="seqpart --method auto")
        others = [(p["peak"] / 1e9, p["to plain"]) for name, p in points.items() if name.startswith("checkpoint")]
        axes.plot(*zip(*others, strict=True), "s", color="#b3541e", label="checkpoint_sequential")
        axes.plot(points["plain"]["peak"] / 1e9, 1, "D", color="#444444", label="plain PyTorch")
        network, batch = part.split("-")
        axes.set(title=f"{network}, batch {batch}", xlabel="measured peak of the process, GB", ylim=(0, None))
        axes.grid(alpha=0.3)
        if not place:
            axes.set_ylabel("seconds per update, in those of plain PyTorch")
            axes.legend(frameon=False)
    figure.savefig(PICTURE, dpi=130)
    print(f"  {PICTURE.relative_to(Path.cwd()) if PICTURE.is_relative_to(Path.cwd()) else PICTURE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[], help=f"of {', '.join(LIMITS)} (default: S-256 S-32)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--picture", action="store_true", help="only draw what was measured")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - LIMITS.keys():
        parser.error(f"unknown parts {', '.join(unknown)}: expected some of {', '.join(LIMITS)}")
    result = load("frontier")
    FOLDER.mkdir(exist_ok=True)
    for part in [] if arguments.picture else arguments.parts or ["S-256", "S-32"]:
        result[part] = measured(part, arguments.rounds)
        print(table(part, result[part]))
        print(f"  {save('frontier', result)}")
    picture(result)


if __name__ == "__main__":
    main()
