"""The peers that train from a GPU, each in a fresh process, its memory watched by NVML from outside; seqpart beside them.

    python -m benchmarks.peers.on_gpu [--network S] [--limit 2GB]

Without a GPU it refuses. Results: benchmarks/results/peers-gpu.json.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import children, record

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from profiling.watching import Gpu, watched

WARM_UP, UPDATES = 3, 12
ARMS = {
    "fsdp2": ["benchmarks.peers.fsdp2"],
    "torchao": ["benchmarks.peers.gpu_only", "--way", "torchao"],
    "accelerate": ["benchmarks.peers.gpu_only", "--way", "accelerate"],
    "ours": ["benchmarks.peers.ours", "--device", "cuda", "--limit", "LIMIT"],
    "ours, full": ["benchmarks.peers.ours", "--device", "cuda", "--method", "full", "--limit", "0.5"],
}


def run(arm: Sequence[str], data: Path, folder: Path, network: str) -> dict[str, Any]:
    """arm: a module and its options."""
    module, *options = arm
    gpu = Gpu()
    gpu.start()
    place = Path(tempfile.mkdtemp(dir=folder))
    found = watched(
        children.command(module, *options, "--network", network, "--data", data, "--folder", place, "--updates", UPDATES),
        environment=os.environ, folder=place, gpu=gpu,
    )  # fmt: skip
    lines = [line for line in found.errors.splitlines() if line.strip()]
    printed = next((json.loads(line) for line in reversed(lines) if line.startswith('{"')), {})
    peak = max((sample.device for sample in found.samples), default=0)
    if "seconds" not in printed:
        return {"refused": lines[-1] if lines else f"exit code {found.exit_code}", "peak": peak}
    seconds = median(printed["seconds"][WARM_UP:])
    ram = max(sample.ram for sample in found.samples)
    return {"peak": peak, "ram": ram, "seconds": seconds, "losses": printed["losses"][-1:], "source": found.source}


def said(found: dict[str, Any]) -> str:
    return found.get("refused") or f"{found['seconds']:.3f} s per update, peak {found['peak'] / 1e9:.2f} GB"


def without_gpu(instead: str) -> int:
    """Exit code of a benchmark that needs one."""
    print(f"refused: this measures a GPU, and none was found. {instead} is for CPUs.", file=sys.stderr)
    return 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=["S", "L", "T"], default="S")
    parser.add_argument("--limit", default="2GB", help="of seqpart's streamed run")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        return without_gpu("benchmarks.peers.compare")
    result = record.load("peers")
    with tempfile.TemporaryDirectory(dir=".") as folder:
        data = Path(folder) / "rows.pt"
        children.shown("benchmarks.peers.data", options.network, data)
        for name, arm in ARMS.items():
            limited = [options.limit if word == "LIMIT" else word for word in arm]
            found = run(limited, data, Path(folder), options.network)
            result.setdefault(options.network, {})[name] = found
            print(f"{name:12s} {said(found)}", flush=True)
            record.save("peers", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
