"""The snippets of docs/loop.md do what the page says."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from seqpart import Trainer
from seqpart.files.scratch import WEIGHTS
from tests.test_own_loop import loader
from tests.test_same_as_plain import data, network

PAGE = (Path(__file__).parent.parent / "docs" / "loop.md").read_text()
CALLBACKS, LOOP = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def named(folder, **options):
    """What the snippets take from before."""
    trainer = Trainer(
        network(), mem_limit="2GB", method="full", batch_size=32, offload_dir=folder / "homes", quiet=True, **options
    )  # fmt: skip
    return {"trainer": trainer, "train": data(), "test": data(40, 1), "loader": loader()}


def test_the_callback_hears_of_every_update(tmp_path, capsys):
    names = named(tmp_path, output_dir=tmp_path / "run", epochs=1)
    exec(CALLBACKS, names)
    assert names["result"].test_loss > 0 and len(capsys.readouterr().out.splitlines()) == 4


def test_the_loop_trains_and_leaves_its_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(LOOP, named(tmp_path))
    assert len(capsys.readouterr().out.splitlines()) == 2
    found = load_file(WEIGHTS)
    assert all(torch.isfinite(tensor).all() for tensor in found.values())


@pytest.mark.parametrize("words", ["--early-stopping", "--keep-best", "--max-steps", "--eval-every", "--epochs"])
def test_flags_of_the_page_are_those_of_the_command(words):
    from tests.test_command_line import FLAGS

    assert words in PAGE and words in FLAGS
