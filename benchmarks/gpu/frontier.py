"""Seconds per update against memory on a GPU: plain PyTorch, checkpoint_sequential, and `--method auto` under some limits.

    python -m benchmarks.gpu.frontier [--network L] [--limits 2GB,4GB,8GB] [--seconds 80]

Each arm runs in a fresh process that is watched from outside (NVML), and is kept as soon as it has ended: a call that is cut
short keeps what it has. --seconds starts no further arm after so long. Results: benchmarks/results/gpu-frontier-gpu.json.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import children, record
from benchmarks.peers.networks import DEPTHS, NAMES
from benchmarks.peers.on_gpu import run, said, without_gpu


def arms(network: str, limits: Sequence[str]) -> dict[str, list[str]]:
    """The smallest limit and plain training first: what lies between them is told by the two."""
    plain = ["benchmarks.peers.plain", "--device", "cuda"]
    ours = {
        limit: ["benchmarks.peers.ours", "--device", "cuda", "--method", "auto", "--limit", limit] for limit in limits
    }  # fmt: skip
    segments = max(2, round(DEPTHS[network] ** 0.5))
    sequential = {f"checkpoint_sequential, {segments} segments": [*plain, "--segments", str(segments)]}
    first = dict(list(ours.items())[:1])
    return {**first, "plain": plain, **dict(reversed(list(ours.items())[1:])), **sequential}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NAMES, default="L")
    parser.add_argument("--limits", default="2GB,4GB,8GB")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further arm after so long")
    options = parser.parse_args(words)
    if not torch.cuda.is_available():
        return without_gpu("benchmarks.frontier")
    began, found, left_out = time.monotonic(), dict[str, Any](), list[str]()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        data = Path(folder) / "rows.pt"
        children.shown("benchmarks.peers.data", options.network, data)
        for name, arm in arms(options.network, options.limits.split(",")).items():
            if time.monotonic() - began > options.seconds:
                left_out.append(name)
                continue
            found[name] = run(arm, data, Path(folder), options.network)
            print(f"{options.network} {name:34} {said(found[name])}", flush=True)
            record.save("gpu-frontier", {"network": options.network, "arms": found, "left_out": left_out}, "gpu")
    return int(not all("seconds" in one for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
