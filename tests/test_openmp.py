"""How long threads of GNU's OpenMP wait awake."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from seqpart import Trainer
from seqpart.devices.openmp import short_waits

COUNT = """
import ctypes, time, torch, seqpart
from seqpart.devices.openmp import _library, short_waits

x = torch.randn(300, 300)

def processor_seconds():
    # What threads that wait burn, in 40 pauses of 2 ms: all of it where they spin, next to nothing where they sleep.
    spent = 0.0
    for _ in range(40):
        x @ x
        began = time.process_time()
        time.sleep(0.002)
        spent += time.process_time() - began
    return spent

processor_seconds()
if _library() is None or torch.get_num_threads() < 2:
    print("none")
else:
    awake = processor_seconds()
    with short_waits(True):
        asleep = processor_seconds()
    print(awake, asleep, processor_seconds())
"""


def of_a_process(**environment):
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    process = subprocess.run(
        [sys.executable, "-c", COUNT], env={**clean, **environment}, capture_output=True, text=True, timeout=100, check=True
    )
    if process.stdout.strip() == "none":
        pytest.skip("PyTorch computes with one thread, or with another OpenMP than GNU's")
    return [float(word) for word in process.stdout.split()]


def test_threads_that_wait_spin_for_long_outside_and_for_a_moment_inside():
    awake, asleep, again = of_a_process()
    assert asleep < awake / 3
    assert asleep < again / 3


def test_what_the_user_says_of_openmp_stands():
    awake, asleep, again = of_a_process(GOMP_SPINCOUNT="0")
    assert max(awake, asleep, again) < 0.04


def test_two_threads_are_there_inside_and_none_is_left():
    before = len(list(Path("/proc/self/task").iterdir()))
    with short_waits(True):
        inside = len(list(Path("/proc/self/task").iterdir()))
    assert inside - before in (0, 2)  # 0: another OpenMP
    assert not [thread for thread in threading.enumerate() if thread.name == "seqpart-short-waits"]


def test_nothing_is_started_where_nothing_moves():
    before = threading.active_count()
    with short_waits(False):
        assert threading.active_count() == before


@pytest.mark.parametrize(("method", "sleeps"), [("full", False), ("streamed", True)])
def test_threads_of_a_run_sleep_soon_only_where_partitions_come_and_go(method, sleeps, tmp_path):
    seen = set()

    def names(*_):
        seen.update(thread.name for thread in threading.enumerate())

    torch.manual_seed(0)
    model = [torch.nn.Linear(64, 64) for _ in range(4)]
    data = torch.randn(64, 64), torch.randint(0, 64, (64,))
    trainer = Trainer(
        model, mem_limit="2GB", method=method, partitions=1 if method == "full" else 2, epochs=1,
        output_dir=tmp_path / "run", device="cpu", quiet=True,
    )  # fmt: skip
    trainer.fit(data, data, before_update=names)
    assert ("seqpart-short-waits" in seen) is sleeps
