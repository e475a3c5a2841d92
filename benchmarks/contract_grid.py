"""Does the limit hold? Models x limits x methods, each in a fresh process that is watched from outside (NVML, or the kernel).

    python -m benchmarks.contract_grid                     on a GPU: ResNet-50, ViT-B/16, GPT-2 XL under 2, 4 and 8 GB
    python -m benchmarks.contract_grid --models mlp --limits 400MB,600MB          on a CPU

A method may refuse: then it says what it asks for. What trains must stay under its limit; one violation is exit code 1.
Saved after every process, so that a run that is cut short keeps what it has; --seconds ends it in time by itself.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from seqpart.units import format_size, parse_size

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from profile_memory import Children
from profiling.figures import Figures
from profiling.question import asked
from profiling.tables import rows_of

MODELS = {
    "resnet50": ["--model", "benchmarks.gpu.models:resnet50", "--data", "benchmarks.gpu.models:images", "--batch-size", "64"],
    "vit_b16": ["--model", "benchmarks.gpu.models:vit_b16", "--data", "benchmarks.gpu.models:images", "--batch-size", "64"],
    "gpt2_xl": ["--model", "benchmarks.gpu.models:gpt2_xl", "--data", "benchmarks.gpu.models:texts", "--batch-size", "4"],
    "mlp": ["--width", "512", "--depth", "6", "--batch-size", "256"],
}
METHODS = "streamed,sil,seqpart:checkpointed,seqpart:full"


def cells(models: list[str], limits: list[str]) -> Iterator[tuple[str, str]]:
    """Small limits first: they are the ones that a contract is for."""
    for limit in limits:
        for model in models:
            yield model, limit


def run(model: str, limit: str, methods: str, facts: dict[str, dict[str, Any]], device: str) -> Iterator[dict[str, Any]]:
    question = asked(
        ["--methods", methods, "--mem-limit", limit, "--epochs", "1", "--device", device, *MODELS[model]], "contract grid"
    )
    with tempfile.TemporaryDirectory(dir=".", prefix=".contract-") as folder:
        children = Children(question, Path(folder))
        if model in facts:
            children.knows(facts[model])
        else:
            facts[model] = children.survey()
        known = {**facts[model], "limit": parse_size(limit, total=None, free=None, name="--limits")}
        for way in question.ways:
            found = Figures(way, [children.run(way, known)], known)
            (row,) = rows_of([found])
            yield {
                "model": model, "limit": known["limit"], **row, "status": found.first.status, "message": found.first.message,
                "violation": bool(found.done and found.peak > known["limit"]), "source": found.first.source,
                "seconds": round(found.first.seconds, 1),
            }  # fmt: skip


def shown(row: dict[str, Any]) -> str:
    verdict = "VIOLATION" if row["violation"] else row["fits"]
    peak = format_size(row["peak"]) if row["peak"] else "-"
    predicted = f", predicted {format_size(row['predicted'])}" if row["predicted"] else ""
    speed = f", {row['epoch_seconds']:.2f} s" if row["epoch_seconds"] else ""
    return f"{row['model']:<9} {format_size(row['limit']):>9}  {row['method']:<21} {verdict:<26} peak {peak}{predicted}{speed}"


def main() -> int:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet50,vit_b16,gpt2_xl" if gpu else "mlp", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--limits", default="2GB,4GB,8GB" if gpu else "400MB,600MB")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further cell after so long")
    options = parser.parse_args()
    began, facts = time.monotonic(), dict[str, dict[str, Any]]()
    found: list[dict[str, Any]] = []
    left_out: list[str] = []
    for model, limit in cells(options.models.split(","), options.limits.split(",")):
        if time.monotonic() - began > options.seconds:
            left_out.append(f"{model} {limit}")
            continue
        for row in run(model, limit, options.methods, facts, "cuda" if gpu else "cpu"):
            print(shown(row), flush=True)
            found.append(row)
            record.save("contract_grid", {"cells": found, "left_out": left_out})
    violations = sum(row["violation"] for row in found)
    died = [f"{row['model']} {row['method']}: {row['message']}" for row in found if row["status"] == "died"]
    path = record.save("contract_grid", {"cells": found, "left_out": left_out, "violations": violations})
    print(f"{len(found)} cells, {violations} violations, left out for want of time: {', '.join(left_out) or 'none'}; {path}")
    print("\n".join(died))
    return bool(violations or died)


if __name__ == "__main__":
    sys.exit(main())
