"""Processes that are killed with SIGKILL, wherever they are, go on to the bits of one that nobody killed."""

import json
import random
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from seqpart.checkpoint.marker import latest
from seqpart.store.scratch import JOB, RESULT, has_checkpoint
from tests.choice import only_quick
from tests.command import ENVIRONMENT, SECONDS, command, end, start

SEED = 20
MODEL = """
    from torch import nn

    def net():
        def middle():
            return nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.GELU(), nn.Dropout(0.2))
        return [lambda: nn.Linear(12, 24), middle, middle, lambda: nn.Linear(24, 4)]
"""
COMMON = [
    "--model", "net:net", "--data", "npz:rows.npz", "--mem-limit", "1GB", "--epochs", "2", "--batch-size", "8",
    "--micro-batch-size", "3", "--lr", "1e-2", "--save-every", "3", "--output-dir", "out",
]  # fmt: skip
SGD, ADAM = ["--optimizer", "sgd", "--momentum", "0.9"], ["--optimizer", "adam", "--lr-schedule", "cosine"]
CUT = ["--partitions", "0,1,2,3"]
STREAMED = ["--method", "streamed", *CUT, *ADAM, "--clip-grad-norm", "0.5"]
MIDST = ["load", "write", "save", "rename", "update"]
CASES = {
    "streamed, clipped": (STREAMED, ["plan"]),
    "sil, in host memory": (["--method", "sil", *CUT, *SGD, "--recovery-epochs", "1", "--ram-limit", "20MB"], ["export"]),
    "checkpointed, elsewhere": (["--method", "checkpointed", *CUT, *ADAM, "--offload-dir", "fast"], [None, "publish"]),
    "full, bf16": (["--method", "full", *SGD, "--dtype", "bf16"], [None, "close"]),
}
"""Options, and where a run is killed after each of MIDST; None: at some time."""


@pytest.fixture
def here(tmp_path):
    return laid_out(tmp_path, MODEL)


def laid_out(folder, model):
    """A folder with a model and rows for it."""
    (folder / "net.py").write_text(textwrap.dedent(model))
    chance = np.random.default_rng(0)
    np.savez(folder / "rows.npz", x=chance.normal(size=(120, 12)).astype(np.float32), y=np.arange(120) % 4)
    return folder


def ended(folder):
    """Every bit that the run in `folder` left."""
    result = json.loads((folder / "out" / RESULT).read_text())
    weights = (folder / "out" / "model.safetensors").read_bytes()
    return weights, [result[name] for name in ("train_losses", "test_loss", "accuracy")]


def whole_run(processes, folder, arguments):
    """What a run leaves that nobody kills; its calls of each place, and its seconds."""
    status, took, counts = processes.run(folder, arguments)
    assert status == 0, (folder / "said").read_text()
    found = ended(folder)
    (folder / "out").rename(folder / "whole")
    return found, counts, took


def to_go_on(folder, arguments):
    """A run that was killed before it had written down its options is given them again."""
    return ["--resume", "out"] if latest(folder / "out", JOB).exists() else arguments


@pytest.mark.parametrize("name", only_quick(CASES, ["streamed, clipped"]))
def test_a_run_killed_again_and_again_ends_with_the_bits_of_one_that_nobody_killed(name, processes, here):
    options, late = CASES[name]
    arguments, chance, history = [*COMMON, *options], random.Random(f"{SEED} {name}"), [f"seed {SEED}"]
    whole, counts, seconds = whole_run(processes, here, arguments)
    midst = sorted(chance.sample(MIDST, len(MIDST)), key=lambda place: not counts[place])  # only going on loads from the disk
    for place in [*midst, *late]:
        call = chance.randint(1, max(1, counts[place] // (len(MIDST) + 1))) if place else 0
        moment = {"at": (place, call)} if place else {"after": chance.uniform(0, seconds / 2)}
        status, *_ = processes.run(here, to_go_on(here, arguments), **moment)
        history.append(f"{moment}: {status}")
        if not place and not status:  # it was twice as fast as the first
            break
        assert status == -signal.SIGKILL, (history, (here / "said").read_text())
    else:
        status, *_ = processes.run(here, to_go_on(here, arguments))
        assert status == 0, (history, (here / "said").read_text())
    assert ended(here) == whole, history


@pytest.mark.slow
def test_another_digit_in_job_json_trains_no_other_job(processes, here):
    """Before the first checkpoint the run went on with the other number, and said nothing."""
    arguments = [*COMMON, *STREAMED]
    whole, _, _ = whole_run(processes, here, arguments)
    job = here / "out" / JOB
    assert processes.run(here, arguments, at=("update", 1))[0] == -signal.SIGKILL
    text = job.read_text()
    job.write_text(text.replace('"epochs": 2', '"epochs": 3'))
    assert job.read_text() != text
    assert processes.run(here, ["--resume", "out"])[0] == 6
    assert "job.json is damaged: its checksum is not the one that was written" in (here / "said").read_text()
    job.unlink()  # of a run, which the message said it was not
    assert processes.run(here, ["--resume", "out"])[0] == 6
    assert "Nothing was saved there yet" in (here / "said").read_text()
    job.write_text(text)
    assert processes.run(here, ["--resume", "out"], at=("update", 30))[0] == -signal.SIGKILL
    assert has_checkpoint(here / "out")
    job.write_text("{}")  # the checkpoint holds it too
    assert processes.run(here, ["--resume", "out"])[0] == 0, (here / "said").read_text()
    assert ended(here) == whole
    job.unlink()
    assert processes.run(here, ["--resume", "out"])[0] == 2
    assert "is finished, and its weights are in" in (here / "said").read_text(), "and not: nothing was saved"


def test_there_are_more_than_twenty_moments_and_streamed_has_two_slots(processes, here):
    assert sum(len(MIDST) + len(late) for _, late in CASES.values()) > 20
    processes.run(here, [*COMMON, *STREAMED, "--dry-run", "--plan-out", "plan.json"])
    assert json.loads((here / "plan.json").read_text())["slots"] == 2


DIES_IN_A_SAVE = """
import itertools, os, signal, sys
from seqpart.train import main
fsync, calls = os.fsync, itertools.count(1)
def dying(handle):
    if next(calls) == 60:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(handle)
os.fsync = dying
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_the_command_itself_killed_as_it_starts_as_it_trains_and_as_it_saves_goes_on(processes, here):
    """Three processes of their own, each with all that starting one takes."""
    arguments, chance = [*COMMON, *STREAMED], random.Random(SEED)
    arguments[arguments.index("--epochs") + 1] = "6"
    whole, _, _ = whole_run(processes, here, arguments)
    with subprocess.Popen(command(arguments), cwd=here, env=ENVIRONMENT, stdout=subprocess.DEVNULL) as process:
        time.sleep(chance.uniform(0, 2))  # all of it takes four
        process.kill()
    process = start(here, *to_go_on(here, arguments), until="train epoch")
    assert end(process, signal.SIGKILL).code == -signal.SIGKILL
    saving = subprocess.run(
        [sys.executable, "-c", DIES_IN_A_SAVE, "--resume", "out"], cwd=here, env=ENVIRONMENT, timeout=SECONDS,
        capture_output=True, check=False,
    )  # fmt: skip
    assert saving.returncode == -signal.SIGKILL
    assert has_checkpoint(here / "out")
    assert processes.run(here, ["--resume", "out"])[0] == 0, (here / "said").read_text()
    assert ended(here) == whole
