"""Runs that read their rows anew and are killed in the middle of an epoch go on to the bits of one that nobody killed."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.checkpoint.test_killed import ended, to_go_on
from tests.command import ENVIRONMENT, SECONDS

PROGRAM = """
    import random
    import time
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, RandomSampler
    from tests.augmented import Noisy, Streamed, clean, mixed, CLASSES, WIDTH

    def net():
        def end(): return nn.Sequential(nn.BatchNorm1d(12), nn.Dropout(0.2), nn.Linear(12, CLASSES))
        return [lambda: nn.Linear(WIDTH, 12), end]

    def items(): return Noisy(), Noisy(9)
    def batches():
        loader = DataLoader(Noisy(), batch_size=8, shuffle=True, collate_fn=mixed, drop_last=True, num_workers=2)
        return loader, DataLoader(Noisy(9), batch_size=4)
    def drawn(): return DataLoader(Noisy(), batch_size=8, sampler=RandomSampler(Noisy(), replacement=True)), clean(9)
    class Slow(Noisy):
        def __getitem__(self, index):
            time.sleep(0.05)
            return super().__getitem__(index)

    def waiting(): return DataLoader(Slow(), batch_size=8, shuffle=True, num_workers=1), clean(9)
    def stream(): return DataLoader(Streamed(Noisy()), batch_size=8, num_workers=1), clean(9)
"""
COMMON = [
    "--model", "net:net", "--mem-limit", "2GB", "--epochs", "2", "--micro-batch-size", "3", "--lr", "1e-2", "--save-every", "2",
    "--output-dir", "out",
]  # fmt: skip
CASES = {
    "a data set, sil": ("items", ["--method", "sil", "--partitions", "2", "--batch-size", "8", "--cached-views", "2"]),
    "batches, streamed": ("batches", ["--method", "streamed", "--partitions", "2"]),
    "a sampler, full": ("drawn", ["--method", "full"]),
    "a stream, full": ("stream", ["--method", "full"]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.few(1)
def test_a_killed_run_goes_on_in_the_middle_of_an_epoch_with_any_number_of_workers(case, processes, tmp_path):
    data, options = CASES[case]
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "net.py").write_text(textwrap.dedent(PROGRAM))
    arguments = [*COMMON, "--data", f"net:{data}", *options]
    status, *_ = processes.run(tmp_path / "whole", arguments)
    assert not status, (tmp_path / "whole" / "said").read_text()
    here = tmp_path / "killed"
    status, *_ = processes.run(here, arguments, at=("update", 7))
    assert status == -signal.SIGKILL, (here / "said").read_text()
    again = to_go_on(here, arguments)
    assert "--resume" in again
    for more in (["--workers", "0"], ["--workers", "1"]):
        status, *_ = processes.run(here, [*again, *more], at=("update", 3) if more[1] == "0" else None)
        assert status in (0, -signal.SIGKILL), (here / "said").read_text()
        again = to_go_on(here, arguments)
    assert ended(here) == ended(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_whole_process_group_is_answered_by_the_run_and_it_is_saved(how, tmp_path):
    """As `timeout`, a closed terminal and a batch system send it. It ended the workers, and the run, which was waiting
    for their rows, with an error."""
    (tmp_path / "net.py").write_text(textwrap.dedent(PROGRAM))
    more = ["--data", "net:waiting", "--method", "full", "--epochs", "1000"]
    command = [sys.executable, "-m", "seqpart.train", *COMMON[:4], *COMMON[6:], *more]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parents[2])}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    said = next(line for line in process.stdout if "epoch 1 " in line)
    os.killpg(process.pid, how)
    said += process.communicate(timeout=SECONDS)[0]
    assert process.returncode == 130, said
    assert "--resume out" in said
