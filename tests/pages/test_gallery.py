"""The scripts of the gallery train to the bits of their plain loops, and the page shows them as they are."""

import copy
import runpy

import pytest
import torch

from tests.choice import only_quick
from tools.write_gallery import PAGE, SCRIPTS, page

QUICK = {"distillation", "endless_stream", "gradual_unfreezing", "self_distillation"}


@pytest.mark.parametrize("name", only_quick(sorted(path.stem for path in SCRIPTS.glob("*.py")), QUICK))
def test_a_script_of_the_gallery_trains_to_the_bits_of_its_plain_loop(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    script = runpy.run_path(str(SCRIPTS / f"{name}.py"))
    plain = script["model"]()
    limited = copy.deepcopy(plain)
    script["plain"](plain)
    script["limited"](limited)
    expected = plain.state_dict()
    assert [name for name, tensor in limited.state_dict().items() if not torch.equal(tensor, expected[name])] == []


def test_the_page_of_the_gallery_is_of_these_scripts():
    assert PAGE.read_text() == page(), "run python -m tools.write_gallery"
