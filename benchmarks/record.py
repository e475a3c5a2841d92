"""Where the benchmarks keep what they found: raw JSON with machine, versions and date."""

import json
import platform
import time
from pathlib import Path

from seqpart.device import describe_versions

FOLDER = Path(__file__).parent / "results"


def save(name: str, result: object) -> Path:
    """Write benchmarks/results/NAME-MACHINE.json and return its path (relative where possible)."""
    machine = "gpu" if describe_versions()["gpu"] != "none" else "cpu"
    path = FOLDER / f"{name}-{machine}.json"
    document = {"benchmark": name, "date": time.strftime("%Y-%m-%d"), **describe_versions(), "cpu": _cpu(), "result": result}
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
