"""The real command in a process of its own, and the same code path inside this one, for tests of the command line."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from seqpart.train import main

SMALL = ["--width", "64", "--depth", "2", "--mem-limit", "2GB"]
SECONDS = 120
# Small layers gain nothing from a second thread, and tests that run side by side lose by it.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


def command(arguments):
    return [sys.executable, "-m", "seqpart.train", *map(str, arguments)]


def run(cwd, *arguments, **environment):
    """`python -m seqpart.train ARGUMENTS` in `cwd`, with further variables of its environment."""
    done = subprocess.run(
        command(arguments),
        cwd=cwd,
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def start(cwd, *arguments, until):
    """The command, running, once it has printed `until`."""
    process = subprocess.Popen(
        command(arguments), cwd=cwd, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if until in line:
            return process
    raise AssertionError(f"it ended before it said {until!r}: {process.stderr.read()}")


def end(process, how=signal.SIGTERM):
    process.send_signal(how)
    out, err = process.communicate(timeout=SECONDS)
    return Ran(process.returncode, out, err)


def call(capsys, *arguments):
    """The command's own `main`, here: for the many cases that end before anything is trained."""
    capsys.readouterr()
    before = signal.getsignal(signal.SIGTERM)
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as exit:  # the command line's parser
        code = exit.code
    assert signal.getsignal(signal.SIGTERM) == before
    said = capsys.readouterr()
    return Ran(code, said.out, said.err)


def files(folder):
    """Bytes of every file below `folder` that a user would miss: not the marker, the lock and the ignore file."""
    kept = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root) / name
            if name not in (".gitignore", "seqpart-run.json", "seqpart.lock"):
                kept[str(path.relative_to(folder))] = path.read_bytes()
    return kept


def refused(ran, code, *words):
    """The exit code, one message with these words, and no traceback."""
    assert ran.code == code, ran.err + ran.out
    said = " ".join(ran.err.split())  # the parser's own messages are wrapped
    assert not [word for word in words if word not in said], said
    assert "Traceback" not in ran.err + ran.out
    return True
