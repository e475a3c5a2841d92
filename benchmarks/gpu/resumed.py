"""Killed and resumed on a GPU: has a run that was ended by SIGKILL the weights of one that was not?

    python -m benchmarks.gpu.resumed [--kills 3]
    python -m benchmarks.gpu.resumed --device cpu --quick

A residual MLP, streamed under a limit, saved every second update; killed after another checkpoint each time, and resumed until
it ends. Results: benchmarks/results.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import children, record
from benchmarks.gpu import refusing_in_words
from seqpart.device.opening import open_device

_PATIENCE = 120.0


def weights_of(job: Sequence[str], folder: Path, kills: int = 0) -> dict[str, Any]:
    """Runs the job to its end in `folder`, killed so often, each time after another checkpoint."""
    words, killed = [*job, "--output-dir", str(folder)], 0
    for left in range(kills, -1, -1):
        state = folder / "checkpoint.json"
        before = state.stat().st_mtime_ns if state.exists() else 0
        with subprocess.Popen(
            children.command("seqpart.train", *words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as run:
            while left and run.poll() is None and (not state.exists() or state.stat().st_mtime_ns == before):
                time.sleep(0.005)
            if left and run.poll() is None:
                run.kill()
                killed += 1
            said = run.communicate(timeout=_PATIENCE)[0].decode(errors="replace")
        words = ["--resume", str(folder)]
    weights = folder / "model.safetensors"
    if run.returncode or not weights.exists():
        return {"failed": said.strip().splitlines()[-1], "killed": killed}
    return {"weights": hashlib.sha256(weights.read_bytes()).hexdigest(), "killed": killed}


@refusing_in_words
def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a small network, and one kill")
    options = parser.parse_args(words)
    kind = open_device(options.device).kind
    size = "--width 64 --depth 4 --mem-limit 400MB" if options.quick else "--width 1024 --depth 12 --mem-limit 1.5GB"
    size += " --method streamed --batch-size 128 --epochs 2 --save-every 2 --seed 7 --quiet"
    job = [*size.split(), "--device", options.device]
    with tempfile.TemporaryDirectory() as place:
        whole = weights_of(job, Path(place) / "whole")
        broken = weights_of(job, Path(place) / "killed", 1 if options.quick else options.kills)
    equal = "weights" in whole and broken.get("weights") == whole["weights"]
    print(f"{broken['killed']} kill(s): {'the weights of an unbroken run' if equal else f'{broken} and not {whole}'}")
    print(record.save("gpu-resumed", {"whole": whole, "killed": broken, "equal": equal}, kind))
    return int(not equal)


if __name__ == "__main__":
    sys.exit(main())
