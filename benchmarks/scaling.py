"""Several processes of torchrun against one that trains as many rows as each of them: seconds of an update, bytes,
peaks; beside the seconds what the plan says, and what benchmarks/scaling_simulated.py does.

    python -m benchmarks.scaling                  1, 2 and 4 processes of one thread, three rounds
    python -m benchmarks.scaling --rows 1024      1 and 2 processes that compute eight times as long for as many gradients
    python -m benchmarks.scaling --deepspeed PYTHON   DeepSpeed's ZeRO-3 beside them
    python -m benchmarks.scaling --quick          a small network in one round, to see that it runs; kept nowhere

A residual MLP of width 2048 and 8 blocks, 128 rows a process, in a plain loop (DistributedDataParallel in several processes),
by PyTorch's FSDP2 (ZeRO-3), and by `full` and `streamed`; PYTHON is that of the peer's environment
(benchmarks/peers/environment.sh deepspeed). The arms of a round run one after the other. Each process has one
thread, so that 2 of them take the 2 cores that one leaves half idle; 4 share them. A ratio is to the same method in one
process, of the same round.
Results: benchmarks/results/scaling-*.json
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import quick
from benchmarks.record import load, save
from benchmarks.streamed_arm import WARM_UP, run_arm

DEEPSPEED = "DeepSpeed"
ARMS: dict[str, tuple[object, ...]] = {
    "plain": ("plain",),
    "FSDP2": ("plain", "--sharded"),
    DEEPSPEED: ("plain", "--deepspeed"),
    "full": ("streamed", "--method", "full", "--limit", "2GB"),
    "streamed": ("streamed", "--method", "streamed", "--limit", "500MB"),
}
FOLDER = Path("runs")
NETWORK: tuple[object, ...] = "--width", 2048, "--depth", 8, "--updates", WARM_UP + 6
ROWS = {128: (1, 2, 4), 1024: (1, 2)}
"""Numbers of processes by the rows of each."""


def measured(
    arms: Collection[str], rounds: int, ranks: tuple[int, ...], network: tuple[object, ...], folder: Path,
    deepspeed: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    folder.mkdir(exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {}
    for number in range(rounds):
        for name, count in itertools.product(arms, ranks):
            python = deepspeed if deepspeed and name == DEEPSPEED else sys.executable
            one = run_arm(*map(str, (*ARMS[name], *network)), folder=folder, ranks=count, threads=1, python=python)
            found.setdefault(f"{name}, {count}", []).append(one)
            said = f"{one['median']:7.3f} s, {one['peak'] / 1e6:.0f} MB"
            print(f"  round {number + 1}: {name:9} {count} process(es) {said}", flush=True)
    return {key: _summary(runs, found[f"{key.partition(',')[0]}, {ranks[0]}"], int(key[-1])) for key, runs in found.items()}


def _named(rows: int, result: dict[str, Any]) -> dict[str, Any]:
    """The result of so many rows a process under names of its own, unless they are the fewest."""
    return result if rows == min(ROWS) else {f"{rows:,} rows, {name}": one for name, one in result.items()}


def _summary(runs: list[dict[str, Any]], alone: list[dict[str, Any]], count: int) -> dict[str, Any]:
    ratio = median(one["median"] / base["median"] for one, base in zip(runs, alone, strict=True))
    summary = {"seconds": median(one["median"] for one in runs), "to one": round(ratio, 3), "runs": runs}
    if runs[0].get("sent"):  # each rank sends a part of its gradients to every other, and its part of the sum
        summary["sent to the formula"] = runs[0]["sent"] / (2 * (count - 1) / count * runs[0]["gradients"])
        summary["peak"], summary["predicted"] = max(peak for one in runs for peak in one["peaks"]), runs[0]["predicted"]
        summary |= {key: median(one[key] for one in runs) for key in ("predicted seconds", "simulated")}
    return summary


def show(result: dict[str, Any]) -> None:
    for name, one in result.items():
        print(f"{name} process(es): {one['seconds']:.3f} s an update, {one['to one']:.2f} x one process", end="")
        if "peak" in one:
            print(f", sends {one['sent to the formula']:.4f} x the formula", end="")
            print(f", peak {one['peak'] / 1e6:.0f} MB of {one['predicted'] / 1e6:.0f} predicted", end="")
            print(f"; {one['predicted seconds']:.3f} s planned, {one['simulated']:.3f} s simulated", end="")
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, choices=ROWS, default=min(ROWS), help="of a process (default: %(default)s)")
    parser.add_argument("--deepspeed", metavar="PYTHON")
    quick.add_to(parser)
    options = parser.parse_args()
    if options.quick:
        network: tuple[object, ...] = "--width", 64, "--depth", 2, "--batch", 16, "--updates", WARM_UP + 2
        with tempfile.TemporaryDirectory() as place:
            show(measured(("FSDP2", "streamed"), 1, (2,), network, Path(place)))
        return
    network = *NETWORK, "--batch", options.rows
    arms = [name for name in ARMS if options.deepspeed or name != DEEPSPEED]
    found = measured(arms, options.rounds, ROWS[options.rows], network, FOLDER, options.deepspeed)
    result = _named(options.rows, found)
    show(result)
    print(save("scaling", load("scaling") | result))


if __name__ == "__main__":
    main()
