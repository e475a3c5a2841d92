"""The examples do what they print. Each runs in a process of its own, from its text with smaller numbers."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.given import idx

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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_handwriting_is_learned_in_partitions_with_settings_of_their_own_and_recovered(tmp_path):
    random = np.random.default_rng(0)
    shades = random.integers(0, 255, (3, 8, 8))
    for split, rows in (("train", 600), ("t10k", 90)):
        labels = random.integers(0, 3, rows)
        images = np.clip(shades[labels] + random.normal(0, 20, (rows, 8, 8)), 0, 255).astype(np.uint8)
        (tmp_path / f"{split}-images-idx3-ubyte").write_bytes(idx(images))
        (tmp_path / f"{split}-labels-idx1-ubyte").write_bytes(idx(labels.astype(np.uint8)))
    out = run(
        "emnist_partitions.py", tmp_path, ".", "--left-epochs", 8, "--right-epochs", 30, "--epochs", 30, "--recovery-epochs", 4,
        smaller=[('"batch_size": 1410', '"batch_size": 50')],
    )  # fmt: skip
    accuracies = {line[:28].strip(): float(line.split("accuracy ")[1].split()[0]) for line in out.splitlines()}
    assert set(accuracies) == {"partitions", "partitions and recovery", "full training"}
    assert min(accuracies.values()) > 0.9


@pytest.mark.parametrize(
    "options",
    [(), pytest.param(("--method", "sil", "--partitions", 2, "--recovery-epochs", 1), marks=pytest.mark.slow)],
    ids=["exact", "sil"],
)
def test_a_resnet_learns_images_from_an_npz_file(options, tmp_path):
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, 500).astype(np.uint8)
    colours = 60 + 120 * np.eye(3)[:, :, None, None]
    images = np.clip(colours[labels] + random.normal(0, 30, (500, 3, 16, 16)), 0, 255).astype(np.uint8)
    np.savez(tmp_path / "train.npz", images=images, labels=labels)
    # Of 4 channels directions of uniform colours may by chance lie too near for 40 updates (docs/objectives.md, In doubt).
    out = run("cifar_resnet.py", tmp_path, "train.npz", "--width", 8, "--depth", 1, "--epochs", 10, *options)
    assert "violations 0" in out
    assert float(out.split("\naccuracy ")[1].split(",")[0]) > 0.9


def loss_of_epoch_1(out):
    return float(out.split("epoch 1: loss ")[1].split()[0])
