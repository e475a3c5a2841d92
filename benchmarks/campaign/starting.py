"""Start the command, in a process of its own or forked from one that has imported already, and watch it from outside.

As a program it imports once and then forks for each line of its input. A forked run has what the imports hold in its own
figures (RssAnon counts pages that are shared until they are written), and saves the seconds that importing torch takes; how
high the memory stands while torch is imported is seen of processes of their own alone.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import children
from benchmarks.peers.cell import Cgroup

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from watch import Process, Watched, watch, watch_process  # noqa: E402

COMMAND = "seqpart.train"
# One thread, or as many as the job says: runs beside each other, and the same bits as the plain loop.
# No bytecode: nothing outside the run may change.
ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200", "PYTHONFAULTHANDLER": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
}  # fmt: skip
LONGEST = 300.0
"""Seconds after which a run hangs."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """One start. `fault` is a line of faults.c."""

    arguments: list[str]
    place: Path
    """The working directory; what is printed goes into the files `said` and `complained` there."""
    main: str = COMMAND
    threads: int = 1
    group: Cgroup | None = None
    """Of a process of its own: what it is forked from lies outside."""
    fault: str | None = None
    preload: Path | None = None
    at_sample: Callable[["Process", float], object] | None = None


@dataclass(frozen=True)
class Ended:
    watched: Watched
    said: str
    complained: str
    hung: bool

    @property
    def code(self) -> int:
        return self.watched.exit_code


def run_fresh(order: Order) -> Ended:
    """As a user starts it."""
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": str(order.threads)}
    if order.fault is not None:
        environment |= {"LD_PRELOAD": str(order.preload), "CAMPAIGN_FAULT": order.fault}
    with open(order.place / "said", "wb") as said, open(order.place / "complained", "wb") as complained:
        process = subprocess.Popen(
            children.command(order.main, *order.arguments), cwd=order.place, env=environment,
            stdin=subprocess.DEVNULL, stdout=said, stderr=complained,
            preexec_fn=order.group.enter if order.group is not None else None,
        )  # fmt: skip
        return _watched(process, order)


@cache
def imports_peak() -> int:
    """Bytes that importing the command takes at its highest, seen from outside."""
    return watch([sys.executable, "-c", f"import {COMMAND}"], cwd=ROOT, env=ENVIRONMENT).peak


def _watched(process: Process, order: Order) -> Ended:
    hung = False

    def at_sample(seconds: float) -> None:
        nonlocal hung
        if order.at_sample is not None:
            order.at_sample(process, seconds)
        if seconds > LONGEST and not hung:
            hung = True
            os.kill(process.pid, signal.SIGKILL)

    watched = watch_process(process, at_sample=at_sample)
    said, complained = ((order.place / name).read_text(errors="replace") for name in ("said", "complained"))
    return Ended(watched, said, complained, hung)


@dataclass
class Forked:
    """A process that the other one forked; ends when its exit code comes through the pipe."""

    pid: int
    pipe: Any
    returncode: int | None = field(default=None)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self.pipe], [], [], 0)[0]:
            self.returncode = int(self.pipe.readline())
        return self.returncode


class Starter:
    """Forks runs from one process that has imported, with the library of faults loaded and idle."""

    def __init__(self, library: Path) -> None:
        self._server = children.kept(
            "benchmarks.campaign.starting", bufsize=0, cwd=ROOT, env={**ENVIRONMENT, "LD_PRELOAD": str(library)}
        )

    def run(self, order: Order) -> Ended:
        words = {
            "main": order.main, "arguments": order.arguments, "place": str(order.place), "fault": order.fault,
            "threads": order.threads,
        }  # fmt: skip
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(words).encode() + b"\n")
        return _watched(Forked(int(self._server.stdout.readline()), self._server.stdout), order)

    def close(self) -> None:
        self._server.communicate()


def serve() -> None:
    importlib.import_module("seqpart.launch").prepare()  # else forked runs begin with all that torch brings
    importlib.import_module(COMMAND)
    importlib.import_module("torch._dynamo")  # every run brings it, with the first optimizer: half of so short a one
    gc.collect()
    gc.freeze()
    pipe = os.dup(1)
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if not child:
            os.close(pipe)
            become(order)
        os.write(pipe, f"{child}\n".encode())
        os.write(pipe, f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode())
    os._exit(0)  # without the libraries' last words


def become(order: dict[str, Any]) -> None:
    """The command, in this process; as `python -m` ends it, but for the interpreter's own end."""
    os.environ.pop("LD_PRELOAD", None)
    os.chdir(order["place"])
    for number, name, flags in ((0, os.devnull, os.O_RDONLY), (1, "said", os.O_WRONLY), (2, "complained", os.O_WRONLY)):
        opened = os.open(name, flags | (os.O_CREAT | os.O_TRUNC if number else 0), 0o644)
        os.dup2(opened, number)
        os.close(opened)
    importlib.import_module("torch").set_num_threads(order["threads"])
    sys.argv = [order["main"], *order["arguments"]]
    sys.path[0] = order["place"]
    if order["fault"] is not None:
        ctypes.CDLL(None).campaign_arm(order["fault"].encode())
    code = 1
    try:
        code = importlib.import_module(order["main"]).main()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve()
