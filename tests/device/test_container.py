"""SIGTERM as a container gets it: its command is process 1, for which the kernel drops signals that nobody handles."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from seqpart.store.scratch import has_checkpoint
from tests.command import ENVIRONMENT, SECONDS, command

INSIDE = ["unshare", "--pid", "--fork", "--mount-proc"]


def can_be_made():
    return subprocess.run([*INSIDE, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_sigterm_saves_the_run_of_a_containers_first_process(tmp_path):
    if not can_be_made():
        pytest.skip("a namespace of processes cannot be made here: it takes root")
    options = ["--method", "full", "--width", "64", "--depth", "2", "--mem-limit", "1GB", "--epochs", "5000"]
    process = subprocess.Popen(
        [*INSIDE, *command([*options, "--output-dir", "out"])], cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert any("train epoch 2" in line for line in process.stdout)
    (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(first), signal.SIGTERM)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, err
    assert "--resume out" in out + err and has_checkpoint(tmp_path / "out")
