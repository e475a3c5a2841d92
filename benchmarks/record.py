"""Where the benchmarks keep what they found: raw JSON with machine, versions and date."""

import json
import platform
import threading
import time
from pathlib import Path
from typing import Any

from seqpart.device.device import describe_versions

FOLDER = Path(__file__).parent / "results"
_NOTING = threading.Lock()


def load(name: str) -> dict[str, Any]:
    """What an earlier run on this machine found; nothing where there is none. For benchmarks whose parts run one by one."""
    path = path_of(name)
    found: dict[str, Any] = json.loads(path.read_text())["result"] if path.exists() else {}
    return found


def save(name: str, result: object, machine: str = "") -> Path:
    """Write benchmarks/results/NAME-MACHINE.json and return its path (relative where possible)."""
    path = path_of(name, machine)
    document = {"benchmark": name, "date": time.strftime("%Y-%m-%d"), **describe_versions(), "cpu": _cpu(), "result": result}
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def origin() -> str:
    """Machine, versions and date in a line, for tables."""
    versions = describe_versions()
    named = ", ".join(f"{name} {versions[name]}" for name in ("seqpart", "torch", "python"))
    return f"{time.strftime('%Y-%m-%d')}; {_cpu()}, {versions['machine']}; {named}; {versions['system']}."


def note(name: str, found: dict[str, Any], group: str, named: dict[str, Any]) -> None:
    """Add results to found[group] and save all; for runs that end side by side."""
    with _NOTING:
        found.setdefault(group, {}).update(named)
        save(name, found)


def path_of(name: str, machine: str = "") -> Path:
    """Where the results of the benchmark `name` on this kind of machine lie, or on the one of that name."""
    kind = "gpu" if describe_versions()["gpu"] != "none" else "cpu"
    return FOLDER / f"{name}-{machine or kind}.json"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
