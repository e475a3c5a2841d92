"""What docs/loop.md says that its snippets print and leave, and the flags that it names. That they run holds test_readme."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from seqpart.files.scratch import WEIGHTS
from tests.test_command_line import FLAGS

PAGE = (Path(__file__).parent.parent / "docs" / "loop.md").read_text()
CALLBACKS, LOOP = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def printed(snippet):
    """The lines that begin with a number."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(snippet, {})
    return [line.split() for line in out.getvalue().splitlines() if re.match(r"\d+(\.\d+)? ", line)]


def test_the_callback_hears_of_every_update(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [words[0] for words in printed(CALLBACKS)] == ["1", "2", "3", "4"]


def test_the_loop_trains_and_leaves_its_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(printed(LOOP)) == 2
    assert all(torch.isfinite(tensor).all() for tensor in load_file(WEIGHTS).values())


@pytest.mark.parametrize("flag", ["--early-stopping", "--keep-best", "--max-steps", "--eval-every", "--epochs"])
def test_flags_of_the_page_are_those_of_the_command(flag):
    assert flag in PAGE and flag in FLAGS
