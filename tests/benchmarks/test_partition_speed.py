"""benchmarks.partition_speed runs to its end: its second half had called what the package no longer had."""

import subprocess
import sys

import pytest

from tests.command import ENVIRONMENT, SECONDS


@pytest.mark.slow
def test_the_quick_form_measures_epochs_and_homes(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.partition_speed", "--quick", "--folder", str(tmp_path)],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "one SIL epoch, seqpart:" in done.stdout and "of the program's own probe" in done.stdout
    assert "written to" not in done.stdout and not list(tmp_path.iterdir())
