"""Kills of random ranks at random moments, in runs that torchrun starts again: are the weights those of an uninterrupted run?

    python -m benchmarks.rank_kills --count 30     two ranks, 10 minutes
    python -m benchmarks.rank_kills --quick        one kill, to see that it runs; kept nowhere

A residual MLP on digits, streamed in three partitions, saved after every update. Each run has `--max-restarts`, and a process
beside it that kills one of its ranks once, up to two seconds after the first checkpoint. Results: benchmarks/results
"""

import argparse
import contextlib
import hashlib
import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import children, quick
from benchmarks.record import save

JOB = (
    "--mem-limit 400MB --model mlp --width 64 --depth 4 --method streamed --partitions 3 --batch-size 64 --micro-batch-size 32 "
    "--save-every 1 --seed 7 --epochs"
)
RANKS, PATIENCE = 2, 300.0


def weights_of(folder: Path, epochs: int, chance: random.Random | None = None) -> dict[str, Any]:
    """Runs the job in `folder`, with a kill by `chance`. Returns what came of it."""
    words = [*f"{JOB} {epochs}".split(), "--output-dir", folder]
    line = children.command("seqpart.train", *words, ranks=RANKS)
    line.insert(line.index("--standalone"), "--max-restarts=3")
    said: dict[str, Any] = {}
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        if chance is not None:
            said = kill_one(run, folder, chance)
        said["code"] = run.wait(PATIENCE)
    weights = folder / "model.safetensors"
    return {**said, "weights": hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else ""}


def kill_one(run: "subprocess.Popen[bytes]", folder: Path, chance: random.Random) -> dict[str, Any]:
    while not (folder / "checkpoint.json").exists() and run.poll() is None:
        time.sleep(0.01)
    time.sleep(wait := chance.uniform(0, 2))
    found = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split() if run.poll() is None else []
    ranks = sorted(int(pid) for pid in found if b"seqpart.train" in Path(f"/proc/{pid}/cmdline").read_bytes())
    if not ranks:
        return {"killed": None}
    rank = chance.randrange(len(ranks))
    with contextlib.suppress(ProcessLookupError):
        os.kill(ranks[rank], signal.SIGKILL)
    return {"killed": rank, "after": round(wait, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=30)
    quick.add_to(parser)
    options = parser.parse_args()
    count, epochs, chance = (1, 2, random.Random(0)) if options.quick else (options.count, 12, random.Random(1))
    with tempfile.TemporaryDirectory() as place:
        whole = weights_of(Path(place) / "whole", epochs)
        runs = [weights_of(Path(place) / str(number), epochs, chance) for number in range(count)]
    alike = sum(one["weights"] == whole["weights"] for one in runs)
    killed = [one for one in runs if one["killed"] is not None]
    print(f"{len(runs)} runs, {len(killed)} with a kill: {alike} have the weights of an uninterrupted one")
    if not options.quick:
        print(save("rank_kills", {"whole": whole, "runs": runs, "alike": alike}))


if __name__ == "__main__":
    main()
