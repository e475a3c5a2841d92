"""What docs/loop.md says that its snippets print and leave, and the flags that it names. That they run holds test_readme."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from seqpart.callbacks import EpochEvent, EvalEvent, StepEvent
from seqpart.runtime.result import Evaluation, Result
from seqpart.store.scratch import WEIGHTS
from tests.cli.test_command_line import FLAGS
from tests.command import ENVIRONMENT, SECONDS

PAGE = (Path(__file__).parents[2] / "docs" / "loop.md").read_text()
CALLBACKS, _, LOOP, _, STOPPED = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def printed(folder, snippet):
    """The lines that begin with a number, of a process of its own: its limit is the page's, whatever was tested before."""
    done = subprocess.run(
        [sys.executable, "-c", snippet],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert not done.returncode, done.stderr
    return [line.split() for line in done.stdout.splitlines() if re.match(r"\d+(\.\d+)? ", line)]


@pytest.mark.slow
def test_the_callback_hears_of_every_update(tmp_path):
    assert [words[0] for words in printed(tmp_path, CALLBACKS)] == ["1", "2", "3", "4"]


@pytest.mark.slow
def test_the_loop_trains_and_leaves_its_weights(tmp_path):
    assert len(printed(tmp_path, LOOP)) == 2
    assert all(torch.isfinite(tensor).all() for tensor in load_file(tmp_path / WEIGHTS).values())


@pytest.mark.parametrize("flag", ["--early-stopping", "--keep-best", "--max-steps", "--eval-every", "--epochs"])
def test_flags_of_the_page_are_those_of_the_command(flag):
    assert flag in PAGE and flag in FLAGS


def test_names_of_losses_are_those_of_what_the_page_says_has_them():
    kinds = {kind.__name__: kind for kind in (Result, Evaluation, EvalEvent, StepEvent, EpochEvent)}
    fields, rows = {name: {field.name for field in dataclasses.fields(kind)} for name, kind in kinds.items()}, 0
    kind = []
    for line in re.findall(r"^\| (.*) \|$", PAGE.split("so that each says which:")[1].split("## The best")[0], re.MULTILINE)[
        1:
    ]:
        what, *names = line.split(" | ")
        kind = [word for word in kinds if f"`{word}`" in what] or kind
        for name in re.findall(r"`(\w+)`", " ".join(names)):
            assert all(name in fields[word] for word in kind), (kind, name)
            rows += 1
    assert rows == 14
    judged = {"loss", "accuracy", "metrics"}
    assert judged <= fields["Evaluation"] & fields["EvalEvent"]
