"""Programs of the benchmarks in processes of their own: run to their end, or kept to be asked.

Whoever watches a program, or holds it in a cgroup, starts it, with a `command` from here: see tools/watch.py, peers/cell.py.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

LAST_LINES = 12
"""How many of a failed program's complaint are told."""


def command(module: str, *words: object) -> list[str]:
    return [sys.executable, "-m", module, *map(str, words)]


def one_thread() -> dict[str, str]:
    """The environment of programs that run side by side."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def shown(module: str, *words: object) -> None:
    """To its end; what it prints is seen. Raises CalledProcessError where it fails."""
    subprocess.run(command(module, *words), check=True)


def output(
    module: str, *words: object, name: str | None = None, text: str | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """All that it printed, given `text`. Raises RuntimeError with `name` and the last lines of its complaint."""
    done = subprocess.run(command(module, *words), input=text, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError("\n".join([f"{name or module}:", *done.stderr.strip().splitlines()[-LAST_LINES:]]))
    return done.stdout


def printed(
    module: str, *words: object, name: str | None = None, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Its last line, as JSON."""
    found: dict[str, Any] = json.loads(output(module, *words, name=name, environment=environment).splitlines()[-1])
    return found


def kept(module: str, *words: object, **popen: Any) -> "subprocess.Popen[Any]":
    """It is asked through its input and answers on its output."""
    return subprocess.Popen(command(module, *words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, **popen)
