"""Runs that are stopped again and again and go on, here or as processes, and what a run that was left alone ends with.

As a program it imports once and then forks for each line of its input: the command, which may be killed where the line says, or
one test, in a process that no other test has used.
"""

import builtins
import contextlib
import gc
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

if __name__ == "__main__":
    if os.fork():  # the server is nobody's child: the memory of the tests' own children counts in their measurements
        os._exit(0)
    from seqpart.launch import prepare

    prepare()  # before torch is loaded

import pytest

from seqpart import Trainer
from seqpart.checkpoint.run_directory import RunDirectory
from seqpart.errors import Interrupted
from seqpart.methods.ist.moving import Parting
from seqpart.plan.planner import Planner
from seqpart.report.reporter import Reporter
from seqpart.runtime import weight_store
from seqpart.runtime.partition import Partition
from seqpart.schedule.steps import StepDone
from seqpart.store.direct import DirectFile
from seqpart.train import main
from tests import machine
from tests.command import ENVIRONMENT
from tests.exactly import Trained


class Killed(BaseException):
    """Ends a run as a kill would: nothing more is saved."""


def interrupt():
    signal.raise_signal(signal.SIGINT)


def kill():
    raise Killed


class Stopping(Reporter):
    """Calls `how` after the run's `at`-th step; keeps the steps and what was said."""

    def __init__(self, at=None, how=interrupt):
        super().__init__(quiet=True)
        self._at, self._how = at, how
        self.steps, self.said = [], []

    def listen(self, event):
        super().listen(event)
        if isinstance(event, StepDone):
            self.steps.append(event.step)
            if len(self.steps) == self._at:
                self._how()

    def say(self, text, level=logging.INFO):
        self.said.append(text)


class Arm(Trained):
    """Runs of one model on one data set, forced onto one way of training. known: what `whole` found, for further arms."""

    def __init__(self, monkeypatch, folder, how, model, data, *, known=None, **options):
        super().__init__(monkeypatch, folder, model, data, **options)
        self.folder, self.how, self.data = folder, how, data
        self._known = {} if known is None else known
        self.root = folder / "stopped"
        self._force(how)

    def fit(self, name="stopped", *, reporter=None, resume=None, **options):
        options = {"method": self.how.method, **self.options, **options}
        if self.how.boundary_tier in ("host", "mixed"):
            options["ram_limit"] = "50MB"
        if self.how.method == "full":
            options.pop("partitions", None)
        if resume is None:
            options["output_dir"] = self.folder / name
        trainer = Trainer(self.model(), None, options.pop("optimizer", "sgd"), quiet=True, **options)
        return trainer.fit(*self.data, resume=resume, reporter=reporter)

    def whole(self, **options):
        """What a run that nobody stops ends with, and its steps: found once for the same options, wherever its files lie."""
        asked = {name: value for name, value in {**self.options, **options}.items() if not isinstance(value, Path)}
        key = self.how, *sorted((name, str(value)) for name, value in asked.items())
        if key not in self._known:
            reporter = Stopping()
            self._known[key] = ended(self.fit("whole", reporter=reporter, overwrite=True, **options)), reporter.steps
        return self._known[key]

    def stopped(self, events, name="stopped", **options):
        """What a run ends with that is stopped by each of `events`, (steps, how), and goes on. Returns it and the stops."""
        result, stops, resume = None, -1, None
        while result is None:
            stops += 1
            with contextlib.suppress(Interrupted, Killed):
                result = self.fit(name, resume=resume, reporter=Stopping(*next(events, ())), **options)
            resume = self.folder / name
        return ended(result), stops


def ended(result):
    """Every bit that a run leaves."""
    return result.weights.read_bytes(), result.train_losses, result.test_loss, result.accuracy


def flip(path, byte=-1, bit=0):
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


# --- Processes -------------------------------------------------------------------------------------------------------

PLACES = {
    "plan": (Planner, "prepare"),
    "load": (DirectFile, "read_into"),
    "write": (os, "pwritev"),
    "save": (os, "fsync"),
    "rename": (os, "replace"),
    "update": (Partition, "update"),
    "split": (Parting, "split"),
    "merge": (Parting, "merge"),
    "export": (weight_store, "export_weights"),
    "publish": (RunDirectory, "publish"),
    "close": (RunDirectory, "close"),
}
"""Calls that a process may die in front of."""


ALONE = ["-n", "0", "-p", "no:cacheprovider", "-m", "", "-W", "ignore:Module already:pytest.PytestAssertRewriteWarning"]


class Processes:
    """Forks the command, or a test, from one process that has imported already."""

    def __init__(self):
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.resuming"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=Path(__file__).parent.parent, env=ENVIRONMENT,
        )  # fmt: skip

    def run(self, folder, arguments, *, after=None, at=None):
        """Run the command, killed `after` seconds or at `at`, (place, call). What it prints goes into the file `said`.

        Returns (exit status, seconds, calls of each place unless it was killed).
        """
        return self._order(folder=str(folder), arguments=list(map(str, arguments)), after=after, at=at)

    def test(self, folder, name):
        """Runs the test `name`. Returns the exit status, and what pytest prints, by way of the file `said` in `folder`."""
        status, *_ = self._order(folder=str(folder), test=name, after=None)
        return status, (folder / "said").read_text()

    def _order(self, **order):
        print(json.dumps(order), file=self._server.stdin, flush=True)
        return tuple(json.loads(self._server.stdout.readline()))

    def close(self):
        self._server.communicate()


def serve():
    conftest = importlib.import_module("tests.conftest")  # and torch._dynamo, which torch would bring: half of so short a run
    gc.collect()
    gc.freeze()  # as in conftest
    for line in sys.stdin:
        order = json.loads(line)
        counts = Path(order["folder"]) / "counts"
        counts.unlink(missing_ok=True)
        began, child = time.monotonic(), os.fork()
        if not child:
            say_into(Path(order["folder"]) / "said")
            if "test" in order:
                os.environ[conftest.OWN] = "1"
                os._exit(pytest.main([*ALONE, order["test"]]))
            become(order, counts)
        while order["after"] is not None and not has_ended(child):
            if time.monotonic() - began > order["after"]:
                os.kill(child, signal.SIGKILL)
                break
            time.sleep(0.001)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        took = time.monotonic() - began
        print(json.dumps([status, took, json.loads(counts.read_text()) if counts.exists() else None]), flush=True)


def has_ended(child):
    """Without reaping it: until then its number is nobody else's."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def say_into(path):
    said = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)


def become(order, counts):
    """The command, in this process."""
    os.chdir(order["folder"])
    sys.path.insert(0, "")
    machine.known_speeds(builtins)
    called = dict.fromkeys(PLACES, 0)
    for place in PLACES:
        die_at(place, order["at"][1] if order["at"] and order["at"][0] == place else 0, called)
    code = main(order["arguments"])
    sys.stdout.flush()
    counts.write_text(json.dumps(called))
    os._exit(code)


def die_at(place, call, called):
    """End this process at its `call`-th call of `place` (0: never)."""
    owner, name = PLACES[place]
    real, numbers = getattr(owner, name), count(1)

    def dying(*arguments, **named):
        called[place] = next(numbers)
        if called[place] == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)

    setattr(owner, name, dying)


if __name__ == "__main__":
    serve()
