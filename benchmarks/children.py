"""Programs of the benchmarks in processes of their own, on one thread each, so that some run side by side."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def printed(module: str, words: Sequence[str], *, name: str) -> dict[str, Any]:
    """The last line that `python -m module words` printed, as JSON. Raises RuntimeError with `name` and its last error."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", module, *words], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
