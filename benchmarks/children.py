"""Programs of the benchmarks in processes of their own: run to their end, or kept to be asked.

Whoever watches a program, or holds it in a cgroup, starts it, with a `command` from here: see tools/watch.py, peers/cell.py.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

LAST_LINES = 40
"""How many of a failed program's complaint are told: torchrun's own summary takes 20."""


def command(module: str, *words: object, ranks: int = 1, python: str = sys.executable) -> list[str]:
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [python, *several, "-m", module, *map(str, words)]


def one_thread() -> dict[str, str]:
    """The environment of programs that run side by side."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def shown(module: str, *words: object) -> None:
    """To its end; what it prints is seen. Raises CalledProcessError where it fails."""
    subprocess.run(command(module, *words), check=True)


def output(
    module: str, *words: object, name: str | None = None, text: str | None = None,
    environment: Mapping[str, str] | None = None, ranks: int = 1, python: str = sys.executable,
) -> str:  # fmt: skip
    """All that it printed, given `text`. Raises RuntimeError with `name` and the last lines of its complaint."""
    done = subprocess.run(
        command(module, *words, ranks=ranks, python=python),
        input=text,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RuntimeError("\n".join([f"{name or module}:", *done.stderr.strip().splitlines()[-LAST_LINES:]]))
    return done.stdout


def printed(
    module: str, *words: object, name: str | None = None, environment: Mapping[str, str] | None = None, ranks: int = 1,
    python: str = sys.executable,
) -> dict[str, Any]:  # fmt: skip
    """Its last line, as JSON; that of the first of several ranks."""
    said = output(module, *words, name=name, environment=environment, ranks=ranks, python=python)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def kept(module: str, *words: object, **popen: Any) -> "subprocess.Popen[Any]":
    """It is asked through its input and answers on its output."""
    return subprocess.Popen(command(module, *words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, **popen)


class InTurn:
    """`python -m module words`, which waits for a word before each piece of work and answers with a line of JSON behind it."""

    def __init__(self, module: str, words: Sequence[str], environment: dict[str, str]) -> None:
        self._process = kept(module, *words, text=True, env=environment)

    def turn(self) -> Any:
        """What it answers to the next word. Raises RuntimeError where it has ended."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with {self._process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        """Words enough for it to come to its end."""
        self._process.communicate("go\n" * 4, timeout=300)


def wait() -> None:
    """In such a program: for the next word."""
    sys.stdin.readline()


def answer(found: object) -> None:
    print(json.dumps(found), flush=True)


def own_settings() -> dict[str, str]:
    """This process's environment with PyTorch's own settings, whatever it was started with."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "THP_"))}
