"""The best evaluation: early stopping, and its weights as the result."""

import itertools
import json
import random

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from seqpart import Trainer
from seqpart.errors import CorruptFile, OptionError
from seqpart.schedule.best import Criterion, Evaluated, Evaluations, LoopState, criterion_of
from seqpart.schema import as_type
from seqpart.store.scratch import CHECKPOINT
from tests.exactly import FULL, How, numbers
from tests.resuming import Arm, Stopping, ended, flip, interrupt, kill
from tests.runtime.test_exact import dropping, fresh
from tests.runtime.test_same_as_plain import network

CUT = {"partitions": (0, 2, 4), "momentum": 0.9}
HOWS = [FULL, How(slots=2), How(stays=0.5), How(weights=1)]


def evaluated(phase, loss):
    return Evaluated(phase=phase, update=phase, epoch=1.0, loss=loss, accuracy=1 - loss)


NUMBERS = st.one_of(st.sampled_from([0.25, 0.5, 0.75]), st.just(float("nan")))


@given(losses=st.lists(NUMBERS, max_size=12), back=st.integers(0, 12), larger=st.booleans())
def test_the_best_is_the_first_of_the_smallest_also_where_the_run_has_gone_back(losses, back, larger):
    criterion = Criterion("accuracy", larger=True) if larger else Criterion()
    whole, again = Evaluations(criterion), Evaluations(criterion)
    for phase, loss in enumerate(losses):
        whole.add(evaluated(phase, loss))
    for phase, loss in enumerate(losses):
        again.add(evaluated(phase, loss))
    again.go_back(back)
    for phase, loss in list(enumerate(losses))[back:]:
        again.add(evaluated(phase, loss))
    numbered = [(loss, phase) for phase, loss in enumerate(losses) if loss == loss]
    assert (whole.best.phase if whole.best else None) == (min(numbered)[1] if numbered else None)
    assert whole.since == (len(losses) - 1 - min(numbered)[1] if numbered else len(losses))
    assert (again.since, again.best) == (whole.since, whole.best)
    found = Evaluations.of(criterion, as_type(LoopState.Found, json.loads(json.dumps(msgspec.to_builtins(whole.kept)))))
    assert found.since == whole.since and str(found.best) == str(whole.best)


def test_what_is_compared_is_read_from_words():
    assert [criterion_of(text) for text in (None, "loss", "accuracy", "max:f1", "min:a b")] == [
        Criterion(), Criterion(), Criterion("accuracy", larger=True), Criterion("f1", larger=True), Criterion("a b"),
    ]  # fmt: skip


class Given:
    """A metric whose values are those that are given, one after the other, whatever the network says."""

    def __init__(self, values):
        self._values, self.passes = list(values), -1

    def reset(self):
        self.passes += 1

    def update(self, outputs, labels):
        pass

    def compute(self):
        return self._values[self.passes]


def fit(arm, name, values=None, *, resume=None, reporter=None, **options):
    """Of the arm, with a metric whose values are given."""
    options = {"method": arm.how.method, **arm.options, **options}
    if arm.how.method == "full":
        options.pop("partitions", None)
    if resume is None:
        options["output_dir"] = arm.folder / name
    trainer = Trainer(arm.model(), None, "sgd", quiet=True, **options)
    metrics = None if values is None else {"given": Given(values)}
    return trainer.fit(*arm.data, resume=resume, reporter=reporter, compute_metrics=metrics)


def arm_of(monkeypatch, folder, how, **options):
    return Arm(monkeypatch, folder, how, fresh(dropping), numbers((12,)), epochs=3, **CUT, **options)


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.few(1)
def test_the_result_is_that_of_the_best_evaluation(how, monkeypatch, tmp_path):
    """Nine updates, an evaluation behind every two and the last: the best is the second, behind update 4."""
    arm = arm_of(monkeypatch, tmp_path, how)
    found = fit(arm, "best", [3, 1, 2, 5, 4], eval_every=2, keep_best=True, best_by="min:given")
    four = fit(arm, "four", [1], max_steps=4)
    assert load_file(found.weights).keys() == load_file(four.weights).keys()
    assert found.weights.read_bytes() == four.weights.read_bytes()
    assert (found.test_loss, found.accuracy, found.metrics) == (four.test_loss, four.accuracy, {"given": 1.0})
    assert found.best_update == 4 and len(found.train_losses) > len(four.train_losses)


@pytest.mark.parametrize(
    ("values", "patience", "updates"), [([3, 1, 2, 5, 4], 2, 8), ([1, 2, 2, 2, 2], 1, 4), ([5, 4, 3, 2, 1], 1, 9)]
)
@pytest.mark.few(2)
def test_training_ends_behind_so_many_evaluations_without_a_better_one(values, patience, updates, monkeypatch, tmp_path):
    arm = arm_of(monkeypatch, tmp_path, FULL)
    reporter = Stopping()
    found = fit(arm, "early", values, eval_every=2, early_stopping=patience, best_by="min:given", reporter=reporter)
    so_many = fit(arm, "so many", [0] * 9, max_steps=updates)
    assert found.weights.read_bytes() == so_many.weights.read_bytes() and found.test_loss == so_many.test_loss
    said = [text for text in reporter.said if "training ends after update" in text]
    assert len(said) == (updates < 9) and all(f"update {updates}: early stopping: {patience}" in text for text in said)


@pytest.mark.parametrize("how", [FULL, How(slots=2)], ids=str)
@pytest.mark.few(1)
def test_a_run_that_is_stopped_anywhere_decides_as_one_that_was_not(how, monkeypatch, tmp_path):
    """By the loss, which the row order and dropout decide: with this rate it rises again after a few updates."""
    options = {"eval_every": 1, "early_stopping": 3, "keep_best": True, "lr": 0.7, "save_every": 1}
    arm = arm_of(monkeypatch, tmp_path, how)
    whole = fit(arm, "whole", **options)
    assert whole.best_update is not None and whole.best_update < 8, "there is something to decide"
    chance, resume, stops = random.Random(2), None, 0
    for stops in itertools.count():
        how_, at = chance.choice([interrupt, kill]), chance.randrange(1, 6)
        try:
            found = fit(arm, "stopped", resume=resume, reporter=Stopping(at if stops < 6 else None, how_), **options)
            break
        except BaseException as error:
            assert type(error).__name__ in ("Interrupted", "Killed")
            resume = arm.folder / "stopped"
    assert stops >= 3 and ended(found) == ended(whole) and found.best_update == whole.best_update


def test_weights_of_the_best_that_are_damaged_are_named_when_the_run_goes_on(monkeypatch, tmp_path):
    arm = arm_of(monkeypatch, tmp_path, FULL, save_every=1)
    options = {"eval_every": 1, "keep_best": True, "best_by": "min:given"}
    with pytest.raises(KeyboardInterrupt):
        fit(arm, "stopped", [1, *range(2, 20)], reporter=Stopping(21, interrupt), **options)
    root = arm.folder / "stopped"
    files = sorted((root / "homes").glob("*.safetensors"))
    named = (root / CHECKPOINT).read_text()
    kept = [path for path in files if path.name in named]
    assert len(kept) > len({path.name.split(".")[0] for path in kept}), "two versions of some"
    flip(kept[0], byte=-3)
    with pytest.raises(CorruptFile, match=kept[0].name):
        fit(arm, "stopped", [1, *range(2, 20)], resume=root, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"early_stopping": 2}, "early_stopping needs evaluations to compare: give eval_every"),
        ({"keep_best": True}, "keep_best needs evaluations to compare: give eval_every"),
        ({"early_stopping": 0, "eval_every": 1}, "early_stopping: expected evaluations, 1 or more; found 0"),
        ({"method": "sil", "keep_best": True, "test_every": 1}, 'keep_best goes with exact methods; found method="sil"'),
        ({"best_by": "f1", "eval_every": 1}, "best_by: expected loss .*; found 'f1'"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(options, words):
    with pytest.raises(OptionError, match=words):
        Trainer(network(), **{"mem_limit": "2GB", "method": "full", **options}, quiet=True)


def test_a_metric_that_is_not_there_is_named(monkeypatch, tmp_path):
    arm = arm_of(monkeypatch, tmp_path, FULL)
    with pytest.raises(OptionError, match=r"best_by f2|best_by=.?f2.*found no such number; it found loss, accuracy, given"):
        fit(arm, "f2", [1] * 9, eval_every=1, best_by="max:f2")


def test_nothing_of_the_best_is_left_but_the_result(monkeypatch, tmp_path):
    arm = arm_of(monkeypatch, tmp_path, FULL)
    found = fit(arm, "best", [1, *range(2, 20)], eval_every=1, keep_best=True, best_by="min:given")
    assert not [path for path in found.weights.parent.rglob("*.safetensors") if path != found.weights]


def test_the_best_evaluation_is_kept_also_where_a_callback_ends_the_run_behind_it(tmp_path):
    """The checkpoint named it as the best, and its weights were not remembered: the run gave others in its name."""
    torch.manual_seed(3)
    train, test = (torch.randn(16, 4), torch.arange(16) % 2), (torch.randn(16, 4), torch.arange(16) % 2)

    class Fails:
        def __init__(self, at):
            self.left = at

        def on_eval(self, event):
            self.left -= event.is_best
            if not self.left:
                raise RuntimeError("it was the best so far")

    def fitted(place, callbacks, resume=None):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
        options = {"method": "full", "epochs": 12, "batch_size": 8, "lr": 0.03, "eval_every": "1 epoch", "keep_best": True}
        trainer = Trainer(model, mem_limit="2GB", output_dir=tmp_path / place, save_every=1, quiet=True, **options)
        result = trainer.fit(train, test, callbacks=callbacks, resume=resume)
        return result.best_update, {name: tensor.numpy().tobytes() for name, tensor in result.state_dict().items()}

    whole = fitted("whole", [])
    assert 0 < whole[0] < 24, "the best is neither the first nor the last"
    with pytest.raises(RuntimeError, match="the best so far"):
        fitted("run", [Fails(whole[0] // 2)])
    assert fitted("run", [], resume=tmp_path / "run") == whole
