"""Models of torchvision, timm and transformers are cut at their layers and do in blocks what they do whole."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.library_models import FURTHER, OTHERS, THEIRS

TAKE_LONGER = [
    "mobilenet_v3_small", "convnext_atto", "llama, tied", "vit", "t5 encoder", "shards of bfloat16", "without its head", "gpt2",
    "encoder and decoder", "marks in rows",
]  # fmt: skip
QUICK = [name for name in [*THEIRS, *OTHERS] if name not in TAKE_LONGER]
MISSING = [name for name in ("timm", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed, see seqpart[hf]: {', '.join(MISSING)}")


def looked_at(names):
    done = subprocess.run(
        [sys.executable, "-m", "tests.library_models", *names], capture_output=True, text=True, check=False, timeout=900,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found():
    return looked_at(QUICK)


@pytest.fixture(scope="module")
def found_further():
    return looked_at([*TAKE_LONGER, *FURTHER])


@pytest.mark.parametrize("name", QUICK)
def test_a_model_of_a_library_does_in_blocks_what_it_does_whole(name, found):
    assert found[name] == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TAKE_LONGER, *FURTHER])
def test_further_models_do_in_blocks_what_they_do_whole(name, found_further):
    assert found_further[name] == ""
