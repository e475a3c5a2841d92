"""Training that is counted in updates, tested in the midst of epochs, or not at all, through `fit`."""

import json
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from seqpart import Trainer
from seqpart.errors import OptionError
from seqpart.train import main
from seqpart.zoo.models import psnet
from tests.exactly import FULL, How, numbers
from tests.resuming import Arm, Stopping, ended, interrupt, kill
from tests.runtime.test_exact import dropping, fresh, statistics
from tests.runtime.test_same_as_plain import OPTIMIZERS, data, network, plain_modules, row_order
from tests.schedule.test_test_every import Losses

CUT = {"partitions": (0, 2, 4), "momentum": 0.9}
HOWS = [FULL, How(method="checkpointed"), How(), How(slots=2, keeps=0)]


def trained_for(updates, *, batch=32, lr=1e-2, seed=3):
    """The weights of a plain loop, row order shuffled as `fit` does."""
    x, y = data()
    chain = nn.Sequential(*plain_modules(network(), seed)).train()
    step = OPTIMIZERS["adam"](list(chain.parameters()), lr)
    done, epoch = 0, 0
    while done < updates:
        epoch += 1
        rows = row_order(x, True, seed, 0)(epoch)
        for start in range(0, len(rows), batch):
            if done == updates:
                break
            picked = rows[start : start + batch]
            F.cross_entropy(chain(x[picked]), y[picked]).backward()
            step.step()
            step.zero_grad(set_to_none=True)
            done += 1
    return chain.state_dict()


@pytest.mark.parametrize(
    ("options", "updates"),
    [
        ({"max_steps": 1}, 1), ({"max_steps": 6}, 6), ({"max_steps": 8}, 8), ({"epochs": 0.5}, 2), ({"epochs": 1.75}, 7),
        ({"epochs": 2, "eval_every": 3}, 8), ({"max_steps": 7, "eval_every": "1 epoch"}, 7),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("method", ["full", "streamed"])
@pytest.mark.few(2)
def test_so_many_updates_are_those_of_a_plain_loop(options, updates, method, tmp_path):
    """120 rows in batches of 32: four updates an epoch, the last of 24 rows."""
    trainer = Trainer(
        network(), method=method, mem_limit="2GB", lr=1e-2, batch_size=32, micro_batch_size=32, seed=3, quiet=True,
        output_dir=tmp_path / "run", **({"partitions": 3} if method == "streamed" else {}), **options,
    )  # fmt: skip
    found = load_file(trainer.fit(data(), data(40, 1)).weights)
    expected = trained_for(updates)
    assert [torch.equal(one, other) for one, other in zip(found.values(), expected.values(), strict=True)] == [True] * len(
        found
    )


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.few(1)
def test_evaluations_in_the_midst_of_epochs_change_no_bit(how, monkeypatch, tmp_path):
    arm = Arm(monkeypatch, tmp_path, how, fresh(statistics), numbers((12,)), epochs=3, lr_schedule="cosine", **CUT)
    weights, _, *test = ended(arm.fit("alone"))
    tests = Losses()
    found = ended(arm.fit("between", eval_every=2, reporter=tests))
    assert (found[0], *found[2:]) == (weights, *test)
    assert tests.losses[-1] == found[2] and len(tests.losses) == 5, "after updates 2, 4, 6, 8 and 9"


@pytest.mark.parametrize("how", [FULL, How(slots=2), How("sil")], ids=str)
@pytest.mark.few(1)
def test_without_a_test_set_training_has_the_same_bits_and_the_result_says_so(how, monkeypatch, tmp_path):
    rows = numbers((12,))
    recovery = {"recovery_epochs": 1} if how.method == "sil" else {}
    tested = Arm(monkeypatch, tmp_path, how, fresh(statistics), rows, **CUT, **recovery)
    weights, losses, *_ = ended(tested.fit("tested"))
    alone, reporter = Arm(monkeypatch, tmp_path, how, fresh(statistics), rows[:1], **CUT, **recovery), Stopping()
    result = alone.fit("untested", reporter=reporter)
    assert ended(result) == (weights, losses, None, None)
    assert any("not tested: there is no test set" in text for text in reporter.said)
    found = json.loads((result.weights.parent / "result.json").read_text())
    assert (found["test_loss"], found["accuracy"]) == (None, None)


def test_other_methods_do_without_a_test_set_too(tmp_path):
    hidden = [lambda: nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())] * 2
    x, y = torch.randn(40, 1, 28, 28), torch.arange(40) % 3
    for method, model, rows, options in (
        ("ist", [*hidden, lambda: nn.Linear(64, 5)], (torch.randn(120, 64), data()[1]), {"subnets": 2}),
        ("psl", psnet((1, 28, 28), 3), (x, y), {}),
    ):
        folder = tmp_path / method
        trainer = Trainer(model, method=method, mem_limit="2GB", epochs=1, quiet=True, output_dir=folder, **options)
        result = trainer.fit(rows)
        assert result.test_loss is None and result.weights.exists() and len(result.train_losses) > 0


@pytest.mark.parametrize("options", [{"max_steps": 7, "epochs": 3, "eval_every": 2}, {"epochs": 2.5}], ids=str)
@pytest.mark.parametrize("how", [FULL, How(slots=2)], ids=str)
@pytest.mark.few(1)
def test_a_run_that_is_stopped_anywhere_ends_with_the_bits_of_one_that_was_not(how, options, monkeypatch, tmp_path):
    arm = Arm(monkeypatch, tmp_path, how, fresh(dropping), numbers((12,)), save_every=1, lr_schedule="linear", **CUT)
    whole, steps = arm.whole(**options)
    chance = random.Random(4)
    events = ((chance.randrange(1, 1 + len(steps) // 2), chance.choice([interrupt, kill])) for _ in range(4))
    found, stops = arm.stopped(events, **options)
    assert found == whole and stops >= 2


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ({"max_steps": 7, "epochs": 3}, {"max_steps": 9, "epochs": 3}, "max_steps was 7, not 9"),
        ({"epochs": 2.5}, {"epochs": 3}, r"epochs was 2\.5, not 3"),
        ({"epochs": 2}, {"epochs": 2, "eval_every": 2}, "eval_every was None, not 2"),
    ],
    ids=str,
)
@pytest.mark.few(1)
def test_where_updates_are_counted_their_number_stays(before, now, words, monkeypatch, tmp_path):
    arm = Arm(monkeypatch, tmp_path, FULL, fresh(dropping), numbers((12,)), save_every=1, **CUT)
    with pytest.raises(KeyboardInterrupt):
        arm.fit(reporter=Stopping(6, interrupt), **before)
    with pytest.raises(OptionError, match=words):
        arm.fit(resume=arm.root, **now)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_steps": 0}, "max_steps: expected a number above zero; found 0"),
        ({"max_steps": 5, "epochs": 2}, "max_steps is given instead of epochs: leave one out"),
        ({"epochs": 0.0}, r"epochs: expected numbers above 0; found 0"),
        ({"epochs": float("nan")}, "epochs: expected numbers above 0; found nan"),
        (
            {"eval_every": "often"},
            r"eval_every: expected updates \(500 or '500 updates'\) or epochs \('2 epochs'\); found 'often'",
        ),
        ({"eval_every": 0}, "eval_every: expected updates"),
        ({"eval_every": 5, "test_every": 1}, "eval_every and test_every both say how often to evaluate"),
        ({"method": "sil", "max_steps": 5}, "max_steps goes with exact methods; method sil"),
        ({"method": "ist", "subnets": 2, "epochs": 1.5}, r"epochs: method ist trains its parts for whole epochs; found 1\.5"),
        ({"method": "sil", "eval_every": 5}, "eval_every: method sil is tested between epochs"),
        ({"max_steps": 5, "warmup_updates": 5}, "warmup_updates 5|warmup_updates=5: the run has 5 updates"),
        ({"eval_every": 5}, "eval_every: there is no test set to evaluate on"),
        ({"test_every": 1}, "test_every: there is no test set to evaluate on"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_in_words(options, words):
    with pytest.raises(OptionError, match=words):
        Trainer(network(), **{"mem_limit": "2GB", "method": "full", **options}, quiet=True).plan(data())


def test_the_command_takes_all_of_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    x, y = (tensor.numpy() for tensor in data())
    np.savez("rows.npz", x_train=x, y_train=y)
    np.savez("both.npz", x_train=x, y_train=y, x_test=x[:40], y_test=y[:40])
    common = ["--mem-limit", "2GB", "--method", "full", "--width", "16", "--depth", "1", "--output-dir"]
    assert main([*common, "one", "--data", "npz:rows.npz", "--epochs", "0.5"]) == 0
    assert "not tested: there is no test set" in capsys.readouterr().out
    assert main([*common, "two", "--data", "npz:both.npz", "--max-steps", "3", "--eval-every", "2updates"]) == 0
    said = capsys.readouterr().out
    assert said.count("partition 0 test") == 2 and "epoch 1.5" in said
    assert main([*common, "three", "--data", "npz:rows.npz", "--eval-every", "2"]) == 2
