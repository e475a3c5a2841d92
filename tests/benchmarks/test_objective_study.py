"""benchmarks/objectives: every idea is a loss that trains, and the two that the product has are the product's."""

import argparse
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.objectives import run, study
from benchmarks.objectives.ideas import IDEAS, Idea, Objective
from benchmarks.objectives.tasks import Task
from seqpart.methods.objectives import OBJECTIVES
from tests.methods.test_objectives import SHAPES, case, targets


def objective(idea, shape, label_shape=(), partition=0):
    return Objective(idea, shape, 6, 3, partition, tokens=bool(label_shape), inputs=7)


def rows_read(shape, label_shape, rows=9):
    """What the partition read: any numbers of 7 features."""
    return torch.randn(rows, *label_shape, 7, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", IDEAS)
@pytest.mark.parametrize(("shape", "label_shape"), SHAPES)
def test_an_ideas_loss_falls_when_features_follow_its_gradient(name, shape, label_shape):
    torch.manual_seed(0)
    judge, (output, labels) = objective(IDEAS[name], shape, label_shape), case(shape, label_shape)
    x = rows_read(shape, label_shape)
    optimizer = torch.optim.Adam([output, *judge.parameters()], lr=0.05)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        value = judge(output, labels, x)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    scores = judge.eval().scores(output.detach())
    if scores is not None:
        assert scores.shape == (labels.numel(), 6)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(("shape", "label_shape"), SHAPES)
def test_the_products_objectives_are_what_the_study_calls_by_their_names(name, shape, label_shape):
    idea = IDEAS[name] if name == "mse" else replace(IDEAS[name], grid=2)
    theirs, ours = OBJECTIVES[name](targets(name, shape, label_shape=label_shape)), objective(idea, shape, label_shape)
    output, labels = case(shape, label_shape)
    rows = (theirs._labels if name == "mse" else theirs._directions).kept
    ours.targets = (rows / 10 if name == "mse" else rows * 16).T[None]
    torch.testing.assert_close(ours(output, labels, output), theirs(output, labels))


def options(*words):
    return run.parser().parse_args(["residual", *words, "--data-dir", "DIR"])


def blobs():
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(6, 12, generator=generator)
    y = torch.arange(120) % 6
    x = centres[y] + 0.3 * torch.randn(120, 12, generator=generator)
    layer = [lambda: nn.Sequential(nn.Linear(12, 12), nn.ReLU())] * 3
    return Task("blobs", [*layer, lambda: nn.Linear(12, 6)], {2: [0, 2]}, (x, y), (x, y), (x, y), 6, 20)


@pytest.mark.parametrize("words", [("--way", "full"), ("--recovery", "2"), ("--idea", "mixup"), ("--idea", "overlap")])
def test_a_run_learns_and_counts_its_multiply_accumulates(words, monkeypatch):
    monkeypatch.setitem(run.TASKS, "residual", lambda _: blobs())
    found = run.run(options(*words, "--epochs", "20", "--full-epochs", "20", "--lr", "1e-2"))
    assert found["test"]["accuracy"] > 90
    layers, head = 144, 72
    whole = 3 * (3 * layers + head) * 20
    more = {"--way": 0, "--recovery": 2 * layers + 3 * 2 * (3 * layers + head), "--idea": 2 * layers}[words[0]]
    more += 3 * layers * 20 if "overlap" in words else 0
    assert found["macs"] == pytest.approx((whole + more) / whole, abs=1e-3)


def test_partitions_are_trained_apart_and_later_ones_on_what_earlier_ones_give():
    """Of the same seed, partition 0 has the same weights whatever the later ones do."""
    first, second = {}, {}
    for told, epochs in ((first, "4,1"), (second, "4,6")):
        told["model"] = run.sil(blobs(), options("--epochs", epochs), Idea(), told)
    assert first["local"] == second["local"]
    one, other = first["model"][0].state_dict(), second["model"][0].state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_is_chosen_is_best_on_the_validation_rows_and_the_table_shows_three_seeds():
    found = {"residual": {}}
    for number, words in enumerate(study.candidates("residual", "prototype", {})):
        job = study.Job("residual", 4, "prototype", words, study.TUNING_SEED)
        found["residual"][job.name] = {
            "validation": {"accuracy": 80 + (number == 2), "loss": 1},
            "test": {"accuracy": 99 - number},
        }
    chosen = list(study.candidates("residual", "prototype", {}))[2]
    assert study.best_words("residual", "prototype", found) == chosen
    assert study.best_words("residual", "mse", found) is None
    for seed in study.SEEDS:
        found["residual"][study.Job("residual", 4, "prototype", chosen, seed).name] = {
            "test": {"accuracy": 80 + seed, "loss": 1}, "macs": 1.04,
        }  # fmt: skip
    found["residual"] |= of_first_candidates("residual", ["mse"])["residual"]
    lines = study.markdown(found).splitlines()
    assert lines[-2].startswith("| prototype | 81.0 | - | 81.0 ± 1.0 | - | 1.04 |")
    assert lines[-1].startswith("| mse | 80.0 | - | - | - |  |")  # tuned and no more


def of_first_candidates(task, ways):
    """What would be known if the first candidate of each of `ways` had been tried."""
    jobs = [study.tuning_jobs(task, way, {})[0] for way in ways]
    return {task: {job.name: {"validation": {"accuracy": 80, "loss": 1}} for job in jobs}}


def test_a_change_of_prototype_is_tried_as_is_best_for_prototype_and_fewer_epochs_as_full_training():
    found = of_first_candidates("resnet", (study.FULL, "prototype"))
    best = study.best_words("resnet", "prototype", found)
    assert list(study.candidates("resnet", "orthogonal", found)) == [best]
    assert list(study.candidates("resnet", "mse of LayerNorm", found)) == [best[: best.index("--change")]]
    assert list(study.candidates("resnet", study.LESS, found)) == [study.best_words("resnet", study.FULL, found)]
    assert not list(study.candidates("resnet", "orthogonal", {}))
    found = of_first_candidates("residual", ["prototype"])
    longer = list(study.candidates("residual", study.MIXED, found))
    assert [words[-2:] == ("--weight-decay", "0.2") for words in longer] == [False, True]


def test_every_job_is_one_that_the_program_takes():
    for task in study.PARTITIONS:
        found = of_first_candidates(task, (study.FULL, "prototype"))
        for way in (study.FULL, *IDEAS, *study.BESIDE):
            jobs = study.tuning_jobs(task, way, found)
            assert bool(jobs) == (task in study.ONLY_IN.get(way, study.PARTITIONS))
            for job in jobs:
                parsed = run.parser().parse_args([str(word) for word in job.command("DIR")])
                assert isinstance(parsed, argparse.Namespace) and json.loads(parsed.change or "{}") is not None


def test_an_idea_asked_for_alone_is_tuned_behind_prototype_and_a_way_that_a_network_has_not_is_left_out(monkeypatch):
    done = []

    def carried_out(job, data, found, small):
        done.append((job.way, job.partitions, job.seed))
        found.setdefault(job.task, {})[job.name] = {"validation": {"accuracy": 80, "loss": 1}}

    monkeypatch.setattr(study, "carry_out", carried_out)
    monkeypatch.setattr(study.record, "load", lambda _: {})
    study.study(["gpt"], ["smoothing", study.MIXED], "DIR", 1, finals=True)
    tuned = [("prototype", 4, study.TUNING_SEED)] * 4 + [("smoothing", 4, study.TUNING_SEED)]
    assert done == tuned + [("smoothing", count, seed) for count in (2, 4) for seed in study.SEEDS]
