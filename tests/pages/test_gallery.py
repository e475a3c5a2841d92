"""The scripts of the gallery train to the bits of their plain loops, and the page shows them as they are."""

import copy
import runpy

import pytest
import torch

from tools.write_gallery import PAGE, SCRIPTS, page

SLOW = {"segmentation_with_aux", "no_decay", "multi_task", "masked", "contrastive", "lora_then_full", "sequence_to_sequence"}


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.stem in SLOW)) for path in sorted(SCRIPTS.glob("*.py"))],
    ids=lambda path: path.stem,
)
def test_a_script_of_the_gallery_trains_to_the_bits_of_its_plain_loop(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    script = runpy.run_path(str(path))
    plain = script["model"]()
    limited = copy.deepcopy(plain)
    script["plain"](plain)
    script["limited"](limited)
    expected = plain.state_dict()
    assert [name for name, tensor in limited.state_dict().items() if not torch.equal(tensor, expected[name])] == []


def test_the_page_of_the_gallery_is_of_these_scripts():
    assert PAGE.read_text() == page(), "run python -m tools.write_gallery"
