"""The examples do what they print. Each runs in a process of its own, from its text with smaller numbers."""

import os
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, folder, *arguments, smaller=()):
    text = (EXAMPLES / name).read_text()
    for number, less in smaller:
        assert number in text
        text = text.replace(number, less)
    script = folder / name
    script.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "GOMP_SPINCOUNT": "0"}
    done = subprocess.run(
        [sys.executable, script, *map(str, arguments)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_run_trains_and_the_weights_load_without_seqpart(tmp_path):
    out = run("first_run.py", tmp_path, smaller=[("2048", "32"), ("* 20", "* 2"), ("800MB", "400MB")])
    assert "violations 0" in out
    assert len(load_file(tmp_path / out.split()[-1])) == 2 + 2 * 4 + 2


def test_the_default_jobs_weights_give_the_same_accuracy_with_torch_alone(tmp_path):
    command = [
        "-m",
        "seqpart.train",
        "--mem-limit",
        "400MB",
        "--width",
        "48",
        "--depth",
        "3",
        "--epochs",
        "1",
        "--method",
        "full",
    ]
    done = subprocess.run(
        [sys.executable, *command, "--output-dir", "run"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    alone = run("load_without_seqpart.py", tmp_path, tmp_path / "run" / "model.safetensors")
    assert alone.split("accuracy ")[1].split()[0] in done.stdout


def test_a_language_model_learns_the_same_under_the_limit_and_goes_on_from_its_weights(tmp_path):
    (tmp_path / "text").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(300)))
    arguments = ["text", "--width", 32, "--depth", 2, "--epochs", 1, "--mem-limit", "400MB"]
    first = run("finetune_under_limit.py", tmp_path, *arguments)
    more = run(
        "finetune_under_limit.py", tmp_path, *arguments, "--weights", "runs/finetune/model.safetensors", "--output-dir", "on"
    )
    for out in (first, more):
        assert "all losses and weights equal: True" in out
        assert "violations 0" in out
    assert loss_of_epoch_1(more) < loss_of_epoch_1(first)


def loss_of_epoch_1(out):
    return float(out.split("epoch 1: loss ")[1].split()[0])
