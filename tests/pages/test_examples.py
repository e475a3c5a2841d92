"""The examples do what they print. Each runs in a process of its own, from its text with smaller numbers."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.given import idx

EXAMPLES = Path(__file__).parents[2] / "examples"
SIL = ["--method", "sil", "--partitions", 2, "--recovery-epochs", 1]


def run(name, folder, *arguments, smaller=(), threads=None):
    text = (EXAMPLES / name).read_text()
    for number, less in smaller:
        assert number in text
        text = text.replace(number, less)
    script = folder / name
    script.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "GOMP_SPINCOUNT": "0"}
    if threads is not None:  # small networks gain nothing from a second one
        environment["OMP_NUM_THREADS"] = str(threads)
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


@pytest.mark.slow
def test_a_resnet_learns_images_from_an_npz_file(tmp_path):
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, 500).astype(np.uint8)
    colours = 60 + 120 * np.eye(3)[:, :, None, None]
    images = np.clip(colours[labels] + random.normal(0, 30, (500, 3, 16, 16)), 0, 255).astype(np.uint8)
    np.savez(tmp_path / "train.npz", images=images, labels=labels)
    # Of 4 channels directions of uniform colours may by chance lie too near for 40 updates (docs/objectives.md, few channels).
    out = run("cifar_resnet.py", tmp_path, "train.npz", "--width", 8, "--depth", 1, "--epochs", 10, *SIL)
    assert "violations 0" in out
    assert float(out.split("\naccuracy ")[1].split(",")[0]) > 0.9


def said(out, what):
    """The number behind the last `what` of the output; the limit was kept."""
    assert "violations 0" in out
    return float(out.rpartition(f"{what} ")[2].split()[0].rstrip(","))


@pytest.mark.slow
def test_a_loop_of_ones_own_learns_digits_and_writes_its_best_weights(tmp_path):
    out = run("own_loop.py", tmp_path, "--epochs", 4, threads=1)
    assert said(out, "best accuracy") > 0.8
    assert load_file(tmp_path / "runs/own-loop.safetensors")["0.weight"].shape == (256, 64)


@pytest.mark.slow
def test_a_unet_finds_shapes_and_learns_nothing_of_pixels_that_do_not_count(tmp_path):
    out = run("train_unet.py", tmp_path, "--epochs", 5, threads=1)
    assert said(out, "mean IoU") > 0.6, "one class everywhere is at most 0.3"
    assert load_file(tmp_path / "runs/unet/model.safetensors")["head.weight"].shape == (3, 8, 1, 1)
    for path in (tmp_path / "runs/shapes/masks").iterdir():
        mask = np.array(Image.open(path))
        mask[mask == 2] = 255
        Image.fromarray(mask).save(path)
    out = run("train_unet.py", tmp_path, "--data", "runs/shapes", "--epochs", 5, threads=1)
    assert said(out, "mean IoU") > 0.55, "background everywhere is at most 0.45"


@pytest.mark.slow
def test_a_vision_transformer_learns_a_folder_and_then_another_one_from_what_it_has_learned(tmp_path):
    pytest.importorskip("timm")
    first = run("finetune_vit_on_folder.py", tmp_path, threads=1)
    assert said(first, "accuracy") > 0.8, "of 3 classes"
    for path in (tmp_path / "runs/stripes").glob("*/checks"):
        shutil.rmtree(path)
    learned = load_file(tmp_path / "runs/vit/model.safetensors")
    more = ["--data", "runs/stripes", "--weights", "runs/vit/model.safetensors", "--output-dir", "runs/more", "--epochs", 4]
    second = run("finetune_vit_on_folder.py", tmp_path, *more, threads=1)
    assert "have another shape there: head.bias is of shape (2,), and of (3,) there, head.weight is" in second
    assert said(second, "accuracy") > 0.9, "of 2 classes"
    assert load_file(tmp_path / "runs/more/model.safetensors")["head.weight"].shape == (2, learned["head.weight"].shape[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_a_llama_learns_sums_whole_and_then_other_ones_by_an_adapter_that_loads_onto_its_base(tmp_path):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    out = run("finetune_llama_from_directory.py", tmp_path, threads=1)
    assert said(out, "test loss") > 5 and said(out, "before,") < 1
    (tmp_path / "others.txt").write_text("".join(f"{n % 20} less {n % 7} is {n % 20 - n % 7}.\n" for n in range(1500)))
    more = ["--lora", "--model", "runs/llama/pretrained", "--data", "others.txt", "--output-dir", "runs/lora"]
    adapted = run("finetune_llama_from_directory.py", tmp_path, *more, threads=1)
    assert said(adapted, "before,") < 4 < said(adapted, "test loss"), "of 287 tokens by chance 5.7"
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "runs/llama/pretrained")
    learned = peft.PeftModel.from_pretrained(base, tmp_path / "runs/lora/adapter").state_dict()
    expected = load_file(tmp_path / "runs/lora/model.safetensors")
    assert expected.keys() == learned.keys() and all(torch.equal(expected[name], learned[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_learns_over_a_base_in_4_bits(tmp_path):
    pytest.importorskip("peft"), pytest.importorskip("bitsandbytes", reason="--nf4 needs it: pip install bitsandbytes")
    out = run("finetune_llama_from_directory.py", tmp_path, "--nf4", "--epochs", 1, threads=1)
    assert "73,728 of the frozen weights in 4 bits (nf4), in 14 layers" in out
    assert said(out, "before,") < said(out, "test loss") - 0.3
    learned = load_file(tmp_path / "runs/llama/adapter/adapter_model.safetensors")
    assert len(learned) == 2 * 14 and all("lora_" in name for name in learned)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["finetune_vit_on_folder.py", "finetune_llama_from_directory.py", "train_unet.py"])
def test_at_full_size_an_example_says_what_it_needs(name, tmp_path, monkeypatch, capsys):
    pytest.importorskip({"f": "transformers", "t": "PIL"}[name[0]])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "--full"])
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert ended.value.code == 2 and "--full needs --" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_processes_of_torchrun_have_the_weights_of_one(tmp_path):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command, environment = [EXAMPLES / "torchrun_two_processes.sh", tmp_path], {**os.environ, "PATH": path}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300, cwd=EXAMPLES.parent
    )
    assert done.returncode == 0 and "byte for byte" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["timm", "transformers"])
def test_an_example_says_in_one_line_what_is_not_installed(name, tmp_path):
    example = {"timm": "finetune_vit_on_folder", "transformers": "finetune_llama_from_directory"}[name]
    code = f"import sys; sys.modules[{name!r}] = None; sys.path.insert(0, {str(EXAMPLES)!r}); import {example}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and f"pip install {name}" in done.stderr


def loss_of_epoch_1(out):
    return float(out.split("epoch 1: loss ")[1].split()[0])
