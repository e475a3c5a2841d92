"""The commands of docs/recipes.md: each as printed until it looks for its files, and each run with less of everything."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.command import ENVIRONMENT, call, refused

ROOT = Path(__file__).parents[2]
PAGE = re.sub(r" \\\n +", " ", (ROOT / "docs/recipes.md").read_text())
COMMANDS = dict(re.findall(r"^## (.*)\n\n    (python .*)$", PAGE, re.MULTILINE))
"""By the title above each."""
OF_SEQPART = [title for title, command in COMMANDS.items() if command.startswith("python -m seqpart.train ")]
LESS = {
    "A vision transformer on a folder of images": {
        "vit_base_": "vit_tiny_", "--epochs 5": "--epochs 1", "--batch-size 64": "--batch-size 8",
        "--warmup-updates 100": "--warmup-updates 1",
    },
    "Llama, the whole model, from its directory": {
        "--context 512": "--context 16", "--warmup-updates 20": "--warmup-updates 5", "--lr 2e-5": "--lr 3e-3",
    },
    "A wide MLP, partition by partition": {
        "--width 8192": "--width 64", "--depth 12": "--depth 3 --partitions 3", "--lr 1e-4": "--lr 1e-3",
    },
}  # fmt: skip


def words(title, less=(), **files):
    """The options of a command, with what stands for files."""
    command = COMMANDS[title]
    for text, smaller in dict(less).items():
        assert text in command, text
        command = command.replace(text, smaller)
    for name, path in files.items():
        command = re.sub(rf"\b{name}\b", str(path), command)
    return shlex.split(command)[3:]


def test_every_recipe_has_its_command_and_those_of_seqpart_are_all_run_here():
    assert len(COMMANDS) == len(re.findall(r"^## ", PAGE, re.MULTILINE))
    assert set(LESS) == set(OF_SEQPART)


@pytest.mark.parametrize("title", OF_SEQPART)
def test_the_options_of_a_recipe_are_taken_as_printed(title, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if not re.search(r"\b(DIR|FILE)\b", COMMANDS[title]):
        ran = call(capsys, *words(title, LESS[title]), "--dry-run")
        assert ran.code == 0 and "predicted peak" in ran.out, ran.err
        return
    assert refused(call(capsys, *words(title)), 2, ": no such ")


# --- What takes longer -----------------------------------------------------------------------------------------------


def trained(title, folder, **files):
    command = [sys.executable, "-m", "seqpart.train", *words(title, LESS[title], **files), "--output-dir", "run"]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "violations 0" in done.stdout
    return done.stdout


@pytest.mark.slow
def test_the_vision_transformer_begins_with_its_weights_and_a_new_head(tmp_path):
    timm = pytest.importorskip("timm")
    save_file(timm.create_model("vit_tiny_patch16_224").state_dict(), tmp_path / "vit.safetensors")
    for part, rows in (("train", 12), ("val", 4)):
        for shade, name in ((40, "dark"), (200, "light")):
            (tmp_path / "images" / part / name).mkdir(parents=True)
            for row in range(rows):
                Image.new("RGB", (40, 30), (shade + row,) * 3).save(tmp_path / "images" / part / name / f"{row}.png")
    out = trained("A vision transformer on a folder of images", tmp_path, FILE="vit.safetensors", DIR="images")
    assert "another shape there: head.bias is of shape (2,), and of (1000,) there, head.weight is" in out
    assert load_file(tmp_path / "run/model.safetensors")["head.weight"].shape == (2, 192)


@pytest.mark.slow
def test_the_llama_learns_and_is_read_by_from_pretrained(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(ROOT / "examples")
    from finetune_llama_from_directory import make

    folder, text = make(tmp_path / "made")
    out = trained("Llama, the whole model, from its directory", tmp_path, DIR=folder, FILE=text)
    assert float(out.rpartition("test loss ")[2].split(";")[0]) < 4, "of 5.7 before"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/pretrained")
    expected = load_file(tmp_path / "run/model.safetensors")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert (tmp_path / "run/pretrained/tokenizer.json").is_file()


@pytest.mark.slow
def test_the_wide_mlp_learns_partition_by_partition(tmp_path):
    out = trained("A wide MLP, partition by partition", tmp_path)
    assert float(out.rpartition("test accuracy ")[2].split()[0]) > 50, "percent, of ten classes"


@pytest.mark.slow
@pytest.mark.parametrize("title", [title for title in COMMANDS if title not in OF_SEQPART])
def test_the_options_of_an_example_are_taken_as_printed(title):
    command = [sys.executable, *shlex.split(COMMANDS[title])[1:], "--no-such-option"]
    done = subprocess.run(
        command, cwd=ROOT, env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "unrecognized arguments: --no-such-option\n" in done.stderr
