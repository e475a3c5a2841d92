"""The PSL paper's figures: runs through the public Trainer, and what is drawn, summed up and said of its claims."""

import json

import numpy as np
import pytest

from benchmarks import children, psl_arm, psl_figures, psl_paper
from tests.given import idx


def test_every_run_of_the_figures_is_one_that_the_arm_takes():
    for small, count in ((False, 16), (True, 4)):
        wanted = psl_paper.wanted(small)
        asked = [vars(psl_arm.parser().parse_args([*words, "--data-dir", "DIR"])) for words in wanted.values()]
        assert len({(run["data"], run["network"], run["loss"], run["batch"]) for run in asked}) == len(wanted) == count
    assert {run["seeds"] for run in asked} == {2}


def mnist(folder, rows):
    """Digits of ten classes, each a picture of its own with noise, as torchvision keeps them."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    random = np.random.default_rng(0)
    pictures, labels = random.integers(0, 255, (10, 28, 28)), np.arange(rows) % 10
    for split in ("train", "t10k"):
        images = np.clip(pictures[labels] + random.normal(0, 30, (rows, 28, 28)), 0, 255).astype(np.uint8)
        for kind, data in (("images-idx3", images), ("labels-idx1", labels.astype(np.uint8))):
            (raw / f"{split}-{kind}-ubyte").write_bytes(idx(data))


@pytest.mark.parametrize("loss", ["nll", "psl"])
@pytest.mark.slow
def test_a_run_tells_accuracy_and_loss_by_epoch_and_learns(loss, tmp_path):
    mnist(tmp_path, 100)
    words = ["mnist", "lenet", loss, "--batch", "20", "--epochs", "12", "--seeds", "2", "--lr", "3e-3", "--rows", "80"]
    places = ["--data-dir", str(tmp_path), "--folder", str(tmp_path)]
    told = children.printed("benchmarks.psl_arm", *words, *places, environment=children.one_thread())
    assert list(told) == ["seed 0", "seed 1"]
    for run in told.values():
        assert len(run["curve"]) == len(run["losses"]) == 12
        assert run["curve"][-1] > 0.5 and run["losses"][-1] < run["losses"][0]
    assert told["seed 0"]["losses"] != told["seed 1"]["losses"]


def record():
    """What a run of everything leaves, in small: of PSL all seeds begin 10 points lower and end 1 point lower."""
    runs = {}
    for data in psl_figures.TITLES:
        for batch in psl_paper.BATCHES:
            for network, end in (("lenet", 0.5), ("psnet", 0.6)):
                for loss, (first, last) in (("nll", (0.4, end)), ("psl", (0.3, end - 0.01))):
                    runs[f"{data} batch {batch} {network} {loss}"] = {
                        f"seed {seed}": {"curve": [first + 0.01 * seed, 0.35, last + 0.01 * seed]} for seed in range(3)
                    }
    return runs


def test_the_claims_are_judged_by_the_differences_over_seeds():
    found = {(claim, where): text for claim, where, text in psl_figures.claims(record())}
    assert found["PSL starts slower than NLL", "LeNet, MNIST, batch 20"].startswith("yes (-10.00 ± 0.00 points")
    assert found["and ends close to it (within 2 points)", "PSNet, CIFAR-10, batch 100"] == "yes (-1.00 ± 0.00 points)"
    assert found["PSNet beats LeNet, with fewer weights", "PSL, CIFAR-10, batch 20"] == "yes (+10.00 ± 0.00 points)"
    assert sum(claim.startswith("PSNet beats") for claim, _ in found) == 4


def test_a_difference_within_two_standard_errors_is_none():
    assert psl_figures.signed(*psl_figures.difference(np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.0, 2.0]))) == "alike"
    assert psl_figures.signed(*psl_figures.difference(np.array([4.0, 5.0, 6.0]), np.array([2.0, 2.0, 2.0]))) == "more"


def test_tables_and_pictures_are_made_of_what_was_found(tmp_path):
    runs = json.loads(json.dumps(record()))
    text = psl_figures.markdown(runs)
    assert "| LeNet, PSL | 31.0 ± 1.0 % | 50.0 ± 1.0 % | 35.0 % |" in text
    drawn = psl_figures.draw(runs, tmp_path)
    assert [path.stem for path in drawn] == ["figure6", "figure7"]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in drawn)
