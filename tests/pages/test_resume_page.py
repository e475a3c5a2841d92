"""The script of docs/resume.md, begun, ended by signals and begun again, and what it prints of how to go on."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seqpart.report.reporter import EVENTS
from seqpart.store.scratch import CHECKPOINT, WEIGHTS
from seqpart.train import main
from tests.command import ENVIRONMENT, SECONDS

PAGE = (Path(__file__).parents[2] / "docs" / "resume.md").read_text()
(SCRIPT,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
LONG = SCRIPT.replace("epochs=20", "epochs=150")
UNCAUGHT = LONG.replace("except Interrupted as", "except ZeroDivisionError as")
RUN = Path("runs/mine")


def begin(folder, text):
    return subprocess.Popen(
        [sys.executable, "-c", text], cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def saved(folder):
    """How many checkpoints the log tells of."""
    log = folder / RUN / EVENTS
    return log.read_text().count('{"event": "checkpoint"') if log.exists() else 0


def ended_by(number, folder, text):
    """(code, errors) of the script that got a signal behind its next checkpoint."""
    before, process, until = saved(folder), begin(folder, text), time.monotonic() + SECONDS
    while saved(folder) == before:
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.005)
    process.send_signal(number)
    _, errors = process.communicate(timeout=SECONDS)
    return process.returncode, errors


def finished(folder, text):
    done = begin(folder, text)
    said, errors = done.communicate(timeout=SECONDS)
    assert done.returncode == 0, errors
    return said, (folder / RUN / WEIGHTS).read_bytes()


@pytest.mark.slow
def test_the_script_that_is_ended_again_and_again_ends_with_the_bits_of_one_that_was_left_alone(tmp_path):
    """It ended with advice for the command, which refuses the runs of scripts, and no page said how a script goes on."""
    (tmp_path / "alone").mkdir()
    _, expected = finished(tmp_path / "alone", LONG)
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        code, errors = ended_by(number, tmp_path, LONG)
        if number == signal.SIGKILL:
            assert code == -number
        else:
            assert (code, errors) == (1, 'the run is saved in runs/mine. Resume with fit(..., resume="runs/mine")\n')
    said, found = finished(tmp_path, LONG)
    assert "going on from runs/mine/checkpoint.json" in said
    assert found == expected
    assert not (tmp_path / RUN / CHECKPOINT).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.few(1)
def test_where_nobody_catches_it_the_last_line_says_the_directory_and_the_argument(number, tmp_path, capsys, monkeypatch):
    """The last of twelve frames was ours, and the last line named a flag."""
    code, errors = ended_by(number, tmp_path, UNCAUGHT)
    *frames, last = errors.splitlines()
    assert code == 1 and len([line for line in frames if line.startswith("  File ")]) <= 3
    assert last == 'seqpart.errors.Interrupted: the run is saved in runs/mine. Resume with fit(..., resume="runs/mine")'
    monkeypatch.chdir(tmp_path)
    assert main(["--resume", "runs/mine"]) == 2
    assert 'started from Python. Resume it there: fit(..., resume="runs/mine").' in capsys.readouterr().err
    assert json.loads((RUN / "seqpart-run.json").read_text())["state"] == "interrupted"
