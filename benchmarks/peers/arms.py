"""The arms by name: which program runs in which environment, and how. No torch here: the runner must not map its libraries."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Arm:
    module: str
    options: tuple[str, ...] = ()
    environment: str = "torch"
    exact: bool = True
    pages: bool = False
    """Has no size below which it fails; it only becomes slower, so that its allowance of time decides."""
    swap: bool = False
    ours: bool = False
    settings: dict[str, str] = field(default_factory=dict)
    """Environment variables."""


LEAN = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Freed tensors leave the process at once. Less memory for every peer: plain S 2.02 GB instead of 2.24, DeepSpeed 1.17 instead
of 2.97."""

LEAST = 64 << 10
"""Bytes of the smallest library file worth looking at."""

ARMS = {
    "ours": Arm("ours", ours=True),
    "mapped": Arm("mapped", ("--write",), pages=True, settings=LEAN),
    "mapped_ahead": Arm("mapped", ("--write", "--ahead"), pages=True, settings=LEAN),
    "swap": Arm("plain", ("--way", "full"), pages=True, swap=True, settings=LEAN),
    "deepspeed_nvme": Arm("deepspeed_zero3", ("--offload", "nvme"), "deepspeed", settings=LEAN | {"DS_ACCELERATOR": "cpu"}),
    "deepspeed_cpu": Arm("deepspeed_zero3", ("--offload", "cpu"), "deepspeed", settings=LEAN | {"DS_ACCELERATOR": "cpu"}),
    "checkpointed": Arm("plain", ("--way", "checkpointed"), settings=LEAN),
    "full": Arm("plain", ("--way", "full"), settings=LEAN),
    "save_on_cpu": Arm("plain", ("--way", "save_on_cpu"), settings=LEAN),
    "fsdp2": Arm("fsdp2", settings=LEAN),
    "torchao": Arm("gpu_only", ("--way", "torchao"), "gpu"),
    "accelerate": Arm("gpu_only", ("--way", "accelerate"), "gpu"),
}


@dataclass(frozen=True)
class Environments:
    """Where environment.sh put its work. PyTorch's own programs run in the runner's environment where there is no other."""

    folder: Path
    known: dict[Path, list[Path]] = field(default_factory=dict)

    def python(self, arm: Arm) -> Path:
        made = self.folder / arm.environment / "bin" / "python"
        if arm.environment == "deepspeed" or (made.exists() and not arm.ours):
            return made
        return Path(sys.executable)

    def missing(self, arm: Arm) -> str | None:
        """Why an arm cannot be started, in words."""
        if self.python(arm).exists():
            return None
        return f"no environment: sh benchmarks/peers/environment.sh {arm.environment} {self.folder / arm.environment}"

    def variables(self, arm: Arm) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "MALLOC_"))}
        if arm.environment != "deepspeed":
            return kept | arm.settings
        # The operators that environment.sh compiled, and the ninja that it did it with: another one would compile anew, for
        # minutes and within the cgroup.
        path = f"{self.python(arm).parent}{os.pathsep}{kept.get('PATH', '')}"
        extensions = self.folder / "deepspeed" / "extensions"
        return kept | {"PATH": path, "TORCH_EXTENSIONS_DIR": str(extensions)} | arm.settings

    def libraries(self, arm: Arm) -> list[Path]:
        """Files that an import reads; they are taken out of the page cache before a run, see cell.py."""
        root = self.python(arm).parent.parent
        if root not in self.known:
            places = [*(root / "lib").glob("python3*/site-packages"), root / "extensions"]
            paths = (path for place in places for kind in ("*.so", "*.so.*", "*.pyc") for path in place.rglob(kind))
            self.known[root] = [path for path in paths if path.is_file() and path.stat().st_size >= LEAST]
        return self.known[root]
