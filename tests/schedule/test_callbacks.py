"""Callbacks and metrics of one's own, through `fit` and `evaluate`."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from seqpart import Trainer
from seqpart.callbacks import EpochEvent, EvalEvent, StepEvent
from seqpart.errors import OptionError
from tests.exactly import FULL, How, numbers
from tests.resuming import Arm, Stopping, ended
from tests.runtime.test_evaluate import alive, judged
from tests.runtime.test_exact import dropping, fresh, statistics
from tests.runtime.test_same_as_plain import data, network

CUT = {"partitions": (0, 2, 4), "momentum": 0.9}
HOWS = [FULL, How(method="checkpointed"), How(slots=2), How("sil")]


class Listening:
    """Keeps every event, and does `then` with each."""

    def __init__(self, then=lambda event: None):
        self.events, self._then = [], then

    def on_step(self, event):
        self.events.append(event)
        self._then(event)

    on_epoch = on_eval = on_step

    def of(self, kind):
        return [event for event in self.events if type(event) is kind]


def fit(tmp_path, callbacks=(), model=None, rows=None, **options):
    options = {"mem_limit": "2GB", "method": "full", "epochs": 2, "batch_size": 32, "lr": 1e-2, "seed": 5, **options}
    metrics = options.pop("compute_metrics", None)
    trainer = Trainer(network() if model is None else model, output_dir=tmp_path / "run", quiet=True, **options)
    return trainer.fit(*(rows or (data(), data(40, 1))), callbacks=callbacks, compute_metrics=metrics)


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.few(1)
def test_a_run_that_is_listened_to_has_the_bits_of_one_that_is_not(how, monkeypatch, tmp_path):
    options = {"recovery_epochs": 1} if how.method == "sil" else {}
    arm = Arm(monkeypatch, tmp_path, how, fresh(statistics), numbers((12,)), epochs=2, clip_grad_norm=0.5, **CUT, **options)
    alone, listening = ended(arm.fit("alone")), Listening()
    trainer = Trainer(
        arm.model(), None, "sgd", quiet=True, output_dir=tmp_path / "heard", method=how.method,
        **{name: value for name, value in arm.options.items() if how.method != "full" or name != "partitions"},
    )  # fmt: skip
    assert ended(trainer.fit(*arm.data, callbacks=[listening])) == alone
    assert {type(event) for event in listening.events} == {StepEvent, EpochEvent, EvalEvent}


def test_events_say_where_training_stands_and_what_it_takes(tmp_path):
    listening = Listening()
    result = fit(tmp_path, [listening], clip_grad_norm=1e9, lr_schedule="linear", eval_every=3)
    steps, epochs, tests = (listening.of(kind) for kind in (StepEvent, EpochEvent, EvalEvent))
    assert [event.update for event in steps] == list(range(1, 9)) and [event.epoch for event in steps][3:5] == [1.0, 1.25]
    assert [event.learning_rate for event in steps] == pytest.approx([1e-2 * (1 - n / 8) for n in range(8)])
    assert [event.rows for event in steps] == [32, 32, 32, 24] * 2
    assert all(0 < event.memory <= event.limit == 2_000_000_000 for event in steps)
    assert all(event.gradient_norm > 0 and event.rows_per_second > 0 for event in steps)
    assert [(event.update, event.epoch) for event in epochs] == [(4, 1.0), (8, 2.0)]
    assert [event.update for event in tests] == [3, 6, 8] and tests[-1].loss == result.test_loss
    assert [event.is_best for event in tests] == [
        all(event.loss < other.loss for other in tests[:n]) for n, event in enumerate(tests)
    ]


@pytest.mark.parametrize("options", [{}, {"method": "streamed", "partitions": 3, "micro_batch_size": 8}], ids=str)
def test_losses_and_gradient_norms_are_those_of_a_plain_loop(options, tmp_path):
    listening = Listening()
    fit(tmp_path, [listening], epochs=1, shuffle=False, optimizer="sgd", clip_grad_norm=1e9, **options)
    chain, (x, y) = alive(), data()
    step = torch.optim.SGD(chain.parameters(), 1e-2)
    for n, event in enumerate(listening.of(StepEvent)):
        loss = F.cross_entropy(chain(x[32 * n : 32 * n + 32]), y[32 * n : 32 * n + 32])
        loss.backward()
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p.grad) for p in chain.parameters()]))
        step.step()
        step.zero_grad()
        assert (event.loss, event.gradient_norm) == pytest.approx((loss.item(), norm.item()), rel=1e-5)


def test_nobody_is_told_a_gradient_norm_that_was_not_needed(tmp_path):
    listening = Listening()
    fit(tmp_path, [listening], epochs=1)
    assert {event.gradient_norm for event in listening.of(StepEvent)} == {None}


def events(folder):
    return (folder / "events.jsonl").read_text().splitlines()


def stop_at(update, kind=StepEvent):
    return Listening(lambda event: event.stop("enough") if type(event) is kind and event.update == update else None)


@pytest.mark.parametrize(
    ("options", "kind", "update"), [({}, StepEvent, 3), ({}, EpochEvent, 4), ({"test_every": 1}, EvalEvent, 4)], ids=str
)
@pytest.mark.few(1)
def test_a_callback_ends_training_and_the_run_is_that_of_so_many_updates(options, kind, update, tmp_path):
    ended_early = fit(tmp_path / "early", [stop_at(update, kind)], **options)
    whole = fit(tmp_path / "whole", epochs=3, max_steps=update)
    assert ended_early.weights.read_bytes() == whole.weights.read_bytes()
    assert (ended_early.test_loss, ended_early.train_losses) == (whole.test_loss, whole.train_losses)
    (said,) = (json.loads(line) for line in events(tmp_path / "early" / "run") if "ended early" in line)
    assert (said["update"], said["why"]) == (update, "enough")


def test_with_sil_each_partition_is_ended_on_its_own(tmp_path):
    seen = []

    def stop(event):
        seen.append((event.partition, event.update))
        if event.update == 2:
            event.stop()

    listening = type("", (), {"on_step": staticmethod(stop)})()
    result = fit(tmp_path, [listening], method="sil", partitions=2, epochs=3)
    assert seen == [(0, 1), (0, 2), (1, 1), (1, 2)] and result.weights.exists()


def test_with_ist_the_round_is_finished_first(tmp_path):
    hidden = [lambda: torch.nn.Sequential(torch.nn.Linear(12, 128), torch.nn.BatchNorm1d(128), torch.nn.ReLU())]
    listening = stop_at(1)
    model = [*hidden, lambda: torch.nn.Linear(128, 5)]
    result = fit(tmp_path, [listening], model, method="ist", subnets=2, local_steps=2, epochs=3)
    updates = [(event.partition, event.update) for event in listening.of(StepEvent)]
    assert [update for _, update in updates] == [1, 2, 1, 2] and len({p for p, _ in updates}) == 2
    assert result.accuracy is not None


def test_an_error_in_a_callback_ends_the_run_which_is_saved_and_goes_on_behind_it(monkeypatch, tmp_path):
    arm = Arm(monkeypatch, tmp_path, How(slots=2), fresh(dropping), numbers((12,)), epochs=2, **CUT)
    whole, _ = arm.whole()

    def fail(event):
        if event.update == 4:
            raise ZeroDivisionError("mine")

    trainer = Trainer(arm.model(), None, "sgd", quiet=True, output_dir=arm.root, method="streamed", **arm.options)
    with pytest.raises(ZeroDivisionError, match="mine") as error:
        trainer.fit(*arm.data, callbacks=[type("", (), {"on_step": staticmethod(fail)})()])
    notes = "\n".join(error.value.__notes__)
    assert "in on_step of a callback" in notes and f'go on with fit(..., resume="{arm.root}")' in notes
    reporter = Stopping()
    assert ended(arm.fit(resume=arm.root, reporter=reporter)) == whole
    assert any("with update 2 of [train 0-2.2]" in text for text in reporter.said)


@pytest.mark.parametrize("place", ["on_step", "on_epoch", "on_eval", "loss"])
@pytest.mark.few(1)
def test_a_stop_iteration_ends_the_run_as_any_error_does(place, monkeypatch, tmp_path):
    """It ended a generator of ours: "RuntimeError: generator raised StopIteration", and no word of where, or what was saved."""
    arm = Arm(monkeypatch, tmp_path, How(slots=2), fresh(dropping), numbers((12,)), epochs=2, **CUT)
    whole, _ = arm.whole()
    begun = []

    def stop(event):
        begun.append(event)
        if place != "loss":
            raise StopIteration("enough")

    def loss(outputs, labels):
        if begun:
            raise StopIteration("enough")
        return torch.nn.functional.cross_entropy(outputs, labels)

    trainer = Trainer(
        arm.model(), loss if place == "loss" else None, "sgd", quiet=True, output_dir=arm.root, method="streamed", **arm.options
    )  # fmt: skip
    name = "on_step" if place == "loss" else place
    with pytest.raises(RuntimeError, match=r"it raised StopIteration\(enough\), which only an iterator may") as error:
        trainer.fit(*arm.data, callbacks=[type("", (), {name: staticmethod(stop)})()])
    notes = "\n".join(error.value.__notes__)
    assert "while running" in notes and f'go on with fit(..., resume="{arm.root}")' in notes
    assert place == "loss" or (f"in {place} of a callback" in notes and "event.stop() ends" in str(error.value))
    if place != "loss":
        assert ended(arm.fit(resume=arm.root)) == whole


def test_what_is_no_callback_is_refused(tmp_path):
    with pytest.raises(
        OptionError, match=r"callbacks: expected objects with on_begin, on_step, on_epoch or on_eval; found dict"
    ):
        fit(tmp_path, [{}])


@pytest.mark.parametrize(("argument", "words"), [
    ({"callbacks": Stopping(None)}, r"callbacks: expected a list of objects; found Stopping\. Give one as \[callback\]"),
    ({"callbacks": None}, "callbacks: expected a list of objects; found NoneType"),
    ({"resume": 5}, "resume: expected a path; found 5"),
])  # fmt: skip
def test_arguments_of_fit_of_another_type_are_refused_before_anything_is_planned(argument, words, tmp_path):
    """They ended in tracebacks, with the model measured and a directory made."""
    trainer = Trainer(alive(), mem_limit="1GB", method="full", quiet=True, output_dir=tmp_path / "run")
    with pytest.raises(OptionError, match=words):
        trainer.fit(data(), **argument)
    assert not (tmp_path / "run").exists()


# --- metrics ---------------------------------------------------------------------------------------------------------


class Confusion:
    """As torchmetrics' are: sums over micro-batches, and a figure of these that is no mean over rows."""

    def __init__(self):
        self.passes, self.counts = 0, None

    def reset(self):
        self.passes, self.counts = self.passes + 1, torch.zeros(5, 5)

    def update(self, outputs, labels):
        assert not outputs.requires_grad and outputs.shape == (len(labels), 5)
        self.counts.index_put_((labels, outputs.argmax(1)), torch.ones(()), accumulate=True)

    def compute(self):
        return self.counts.diagonal() / self.counts.sum(1).clamp(min=1)


def by_function(outputs, labels):
    return {"error": (outputs.argmax(1) != labels).float().mean(), "rows": len(labels)}


@pytest.mark.parametrize("options", [{}, {"method": "streamed", "partitions": 3}, {"method": "sil", "partitions": 2}], ids=str)
@pytest.mark.few(1)
def test_metrics_are_of_all_test_rows_whatever_micro_batches_they_come_in(options, tmp_path):
    rows, confusion, listening = data(37, 1), Confusion(), Listening()
    result = fit(
        tmp_path, [listening], rows=(data(), rows), compute_metrics={"recall": confusion}, micro_batch_size=8, test_every=1,
        **options,
    )  # fmt: skip
    model = alive()
    model.load_state_dict(result.state_dict())
    outputs = model.eval()(rows[0]).argmax(1)
    expected = [(outputs[rows[1] == label] == label).float().mean().item() for label in range(5)]
    assert result.metrics["recall"] == pytest.approx(expected)
    assert listening.of(EvalEvent)[-1].metrics == result.metrics
    (found,) = (json.loads(line) for line in events(result.weights.parent) if '"event": "result"' in line)
    assert found["metrics"] == result.metrics == json.loads((result.weights.parent / "result.json").read_text())["metrics"]


def test_a_function_is_averaged_by_rows_and_evaluate_takes_metrics_too(tmp_path):
    rows = data(37, 1)
    trainer = Trainer(
        network(), mem_limit="2GB", method="full", seed=5, micro_batch_size=8, quiet=True, output_dir=tmp_path / "a"
    )
    found = trainer.evaluate(rows, compute_metrics=by_function)
    assert found.metrics["error"] == pytest.approx(1 - judged(alive(), rows)[1])
    assert found.metrics["rows"] == pytest.approx((4 * 64 + 25) / 37)
    assert trainer.evaluate(rows).metrics == {}


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (3, "compute_metrics: expected a function of .* found int"),
        ({"a": 3}, "compute_metrics: expected a function of .* found dict"),
        (lambda outputs, labels: 3.0, "compute_metrics: expected a dict of numbers by name; found float"),
        (lambda outputs, labels: {"a": "b"}, "compute_metrics: expected a to be a number; found str"),
        (lambda outputs, labels: {"a": [1, 2]}, "compute_metrics: expected a to be a number; found 2 of them"),
    ],
    ids=["a number", "numbers", "no dict", "a text", "a list"],
)
@pytest.mark.few(2)
def test_what_is_no_metric_is_refused_in_words(metric, words, tmp_path):
    with pytest.raises(OptionError, match=words):
        fit(tmp_path, compute_metrics=metric, epochs=1)
    assert math.isfinite(fit(tmp_path / "good", compute_metrics=by_function, epochs=1).metrics["error"])
