"""The census of the libraries' models: one of them, and what is told of all."""

import json
import subprocess
import sys

import pytest

from benchmarks import census, record
from tests.command import ENVIRONMENT, SECONDS


@pytest.mark.slow
def test_a_model_of_a_library_is_made_small_and_has_the_bits_of_a_plain_loop():
    # From a process that has computed nothing yet: a fork of this one would wait for threads that it does not have.
    program = "import json; from benchmarks import census; print(json.dumps(census.in_process('transformers', 'gpt2', 90)))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["outcome"], found["model"], found["partitions"]) == ("equal", "GPT2LMHeadModel", 3), found


def test_the_last_outcome_of_a_model_counts(tmp_path, monkeypatch):
    lines = [("resnet", {"outcome": "error", "why": "KeyError"}), ("vgg", {"outcome": "skipped", "why": "longer than 60 s"}),
             ("resnet", {"outcome": "equal", "model": "resnet10t"})]  # fmt: skip
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    (tmp_path / census.KNOWN).write_text("".join(json.dumps({"library": "timm", "name": n, **one}) + "\n" for n, one in lines))
    said = census.section()
    assert "| timm | 2 | 1 | 0 | 0 | 0 | 0 | 1 |" in said
    assert "KeyError" not in said
    assert "| longer than 60 s | 1: vgg |" in said
