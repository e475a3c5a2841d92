"""Our Trainer for transformers beside its own: the same weights, rows, logs and calls."""

import functools
import itertools
import math
import signal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from seqpart import Padding
from seqpart.errors import DataError, Interrupted, OptionError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="TrainingArguments need it: pip install accelerate")

from seqpart.integrations import hf_data  # noqa: E402
from seqpart.integrations.hf import Trainer  # noqa: E402
from seqpart.integrations.hf_arguments import lengths_of  # noqa: E402
from tests.hugging_face import (  # noqa: E402
    TRAINERS,
    Listening,
    accuracy,
    arguments,
    by_groups,
    collate,
    history,
    little_model,
    little_rows,
    one_cycle,
    same_history,
    same_weights,
    trained,
    uneven,
)

pytestmark = [
    pytest.mark.usefixtures("known_machine"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft asks for it
]


OPTIONS = {
    "weights that decay, a cosine with a warm-up, half an epoch more": {
        "weight_decay": 0.3, "adam_beta1": 0.8, "adam_epsilon": 1e-6, "lr_scheduler_type": "cosine", "warmup_steps": 0.2,
        "num_train_epochs": 1.5,
    },
    "sgd without clipping, rows in order": {
        "optim": "sgd", "max_grad_norm": 0.0, "train_sampling_strategy": "sequential", "per_device_train_batch_size": 7,
    },
    "an optimizer of one's own, a schedule with options": {
        "optimizer_cls_and_kwargs": (torch.optim.Adagrad, {"lr": 0.1}), "lr_scheduler_type": "cosine_with_restarts",
        "lr_scheduler_kwargs": {"num_cycles": 2}, "max_steps": 5,
    },
    "another seed for the data, no remainder, mixed precision, logged by epochs": {
        "data_seed": 11, "per_device_train_batch_size": 7, "dataloader_drop_last": True, "num_train_epochs": 2, "bf16": True,
        "logging_strategy": "epoch", "optim": "adamw_torch",
    },
    "the best of evaluations by steps": {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True,
        "logging_steps": 2, "logging_first_step": True, "num_train_epochs": 2, "per_device_eval_batch_size": 3,
        "eval_on_start": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.few(2)
def test_options_do_what_they_do_in_transformers(options, tmp_path):
    (theirs, expected), (ours, found) = (trained(tmp_path, whose, **options) for whose in TRAINERS)
    same_weights(found, expected)
    if "max_grad_norm" in options:  # the norm of gradients that are not clipped is not computed here
        assert not any("grad_norm" in logs for logs in history(ours))
        theirs.state.log_history = [{name: logs[name] for name in logs if name != "grad_norm"} for logs in history(theirs)]
    same_history(history(ours), history(theirs))
    for name in ("global_step", "max_steps", "epoch", "num_train_epochs"):
        assert getattr(ours.state, name) == pytest.approx(getattr(theirs.state, name))


@pytest.mark.parametrize("scheduler", [one_cycle, lambda optimizer: None], ids=["with a scheduler", "without"])
@pytest.mark.few(1)
def test_an_optimizer_that_was_made_for_the_model_trains_it(scheduler, tmp_path):
    weights = []
    for whose, kind in TRAINERS.items():
        model = little_model()
        optimizer = by_groups(model)
        trainer = kind(
            model, arguments(tmp_path / whose, num_train_epochs=2), train_dataset=little_rows(),
            optimizers=(optimizer, scheduler(optimizer)), **({} if whose == "theirs" else {"method": "full"}),
        )  # fmt: skip
        trainer.train()
        weights.append((model.state_dict(), [logs.get("learning_rate") for logs in trainer.state.log_history]))
    same_weights(*(one for one, _ in weights))
    assert weights[0][1] == weights[1][1]


@settings(max_examples=6)
@given(
    count=st.integers(1, 40), size=st.integers(1, 9), steps=st.integers(1, 4), seed=st.integers(0, 1 << 31), last=st.booleans(),
    sampling=st.sampled_from(["random", "sequential"]),
)  # fmt: skip
def test_updates_have_the_rows_that_they_have_in_transformers(tmp_path_factory, count, size, steps, seed, last, sampling):
    made = arguments(
        tmp_path_factory.getbasetemp() / "order", per_device_train_batch_size=size, gradient_accumulation_steps=steps,
        seed=seed, dataloader_drop_last=last and count >= size, train_sampling_strategy=sampling,
        dataloader_pin_memory=False, remove_unused_columns=False,
    )  # fmt: skip
    items = [{"labels": number} for number in range(count)]
    theirs = transformers.Trainer(torch.nn.Linear(1, 1), made, train_dataset=items, data_collator=list)
    batches = hf_data.Batches(collator=list, name="", size=size, columns=None, padding=Padding({}))
    lengths = lengths_of(made, count)
    order = hf_data.order_of(items, made, lengths.rows, lengths.batch, None)
    loader = DataLoader(items, lengths.batch, sampler=order, collate_fn=batches)
    expected = theirs.get_train_dataloader()
    assert theirs.set_initial_training_values(made, expected)[-1] == lengths.updates
    for epoch in range(3):
        expected.set_epoch(epoch)
        loader.sampler.set_epoch(epoch + 1)
        assert [items[number] for number in loader.sampler] == [item for batch in expected for item in batch]


def test_a_peft_model_leaves_its_adapter(tmp_path):
    peft = pytest.importorskip("peft", reason="pip install peft")

    def adapted():
        torch.manual_seed(5)
        return peft.get_peft_model(little_model(), peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))

    (_, expected), (ours, found) = (trained(tmp_path, whose, adapted()) for whose in TRAINERS)
    same_weights(found, expected)
    ours.save_model(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    again = peft.PeftModel.from_pretrained(little_model(), tmp_path / "adapter")
    same_weights(dict(again.state_dict()), found)


# --- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("padding", "length"), [(None, 8), (Padding(8), 8), (Padding(10), 10)], ids=str)
@pytest.mark.few(1)
def test_any_collator_is_padded_on_to_the_longest_row_or_to_a_length_that_is_given(padding, length, tmp_path):
    weights = []
    for whose, collator in (("theirs", functools.partial(collate, length=length)), ("ours", collate)):
        model, own = little_model(), {"padding": padding} if whose == "ours" else {}
        trainer = TRAINERS[whose](model, arguments(tmp_path / whose), data_collator=collator, train_dataset=uneven(), **own)
        trainer.train()
        weights.append(model.state_dict())
    same_weights(*weights)


# --- around the training ----------------------------------------------------------------------------------------------


def test_callbacks_are_called_as_in_transformers(tmp_path):
    called = []
    for whose in TRAINERS:
        callback = Listening()
        trained(tmp_path, whose, callbacks=[callback], eval_strategy="epoch", num_train_epochs=2, logging_steps=2)
        called.append(callback.called)
    assert called[0] == called[1]


class Thawing(transformers.TrainerCallback):
    """Trains the classifier in the second of three epochs alone."""

    def on_epoch_begin(self, args, state, control, model=None, **_):
        model.classifier.requires_grad_(state.epoch == 1)


@pytest.mark.parametrize("evaluation", [{}, {"eval_strategy": "epoch"}, {"eval_strategy": "steps", "eval_steps": 3}], ids=str)
def test_what_a_callback_freezes_as_an_epoch_begins_is_frozen_in_its_first_update(evaluation, tmp_path):
    """on_epoch_begin was called after it."""
    asked = {"num_train_epochs": 3, **evaluation}
    (_, expected), (_, found) = (trained(tmp_path, whose, callbacks=[Thawing()], **asked) for whose in TRAINERS)
    same_weights(found, expected)


class Evaluating(transformers.TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **_):
        model.dropout.eval()

    def on_epoch_begin(self, args, state, control, model=None, **_):
        model.base_model.eval()

    def on_step_end(self, args, state, control, model=None, **_):
        model.eval()


def test_modes_that_callbacks_set_are_of_no_matter_as_in_transformers(tmp_path):
    """Its loop calls model.train() before every step, and a change of modes was refused."""
    (_, expected), (_, found) = (trained(tmp_path, whose, callbacks=[Evaluating()], num_train_epochs=2) for whose in TRAINERS)
    same_weights(found, expected)


def stop(state, control):
    control.should_training_stop = state.global_step == 2


def test_a_callback_ends_the_training(tmp_path):
    (theirs, expected), (ours, found) = (
        trained(tmp_path, whose, callbacks=[Listening(step=stop)], num_train_epochs=3) for whose in TRAINERS
    )
    same_weights(found, expected)
    assert ours.state.global_step == theirs.state.global_step == 2


ENDS = {
    "updates that are no whole epochs": {"max_steps": 5, "eval_strategy": "epoch"},
    "half an epoch more": {"num_train_epochs": 1.5},
    "a callback that stops": {"num_train_epochs": 3, "step": stop},
}


@pytest.mark.parametrize("options", ENDS.values(), ids=ENDS)
@pytest.mark.few(1)
def test_an_epoch_that_is_cut_short_ends_as_in_transformers(options, tmp_path):
    """Its losses were not logged, and nobody heard of its end."""
    step, found = {"step": options["step"]} if "step" in options else {}, []
    for whose in TRAINERS:
        callback = Listening(**step)
        asked = {name: value for name, value in options.items() if name != "step"}
        trainer, _ = trained(tmp_path, whose, callbacks=[callback], logging_strategy="epoch", **asked)
        found.append((history(trainer), [event for event in callback.called if "epoch" in str(event)]))
    same_history(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_epochs_are_counted_by_batches_where_an_update_has_several(tmp_path):
    """They were counted by updates, of which the last of an epoch may have fewer batches."""
    options = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 3, "logging_steps": 1, "num_train_epochs": 2}
    histories = [history(trained(tmp_path, whose, **options)[0]) for whose in TRAINERS]
    theirs, ours = ([logs["epoch"] for logs in one] for one in histories)
    assert ours == theirs and any(epoch % 1 for epoch in ours)


def test_a_metric_that_is_no_number_is_never_the_best(tmp_path):
    """NaN was, and as nothing is better, early stopping counted all later evaluations."""
    values = itertools.cycle([math.nan, 0.5, 0.7, 0.6])
    options = {"eval_strategy": "epoch", "num_train_epochs": 4, "metric_for_best_model": "own", "greater_is_better": True}
    for whose in TRAINERS:
        trainer, _ = trained(tmp_path, whose, compute_metrics=lambda _: {"own": next(values)}, **options)
        assert trainer.state.best_metric == 0.7


def test_early_stopping_of_transformers_ends_the_training(tmp_path):
    options = {
        "eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "num_train_epochs": 9,
        "learning_rate": 0.2,
    }  # fmt: skip
    (theirs, expected), (ours, found) = (
        trained(tmp_path, whose, callbacks=[transformers.EarlyStoppingCallback(2)], **options) for whose in TRAINERS
    )
    same_weights(found, expected)
    assert ours.state.global_step == theirs.state.global_step < 27
    assert ours.state.best_metric == pytest.approx(theirs.state.best_metric)
    assert ours.state.best_global_step == theirs.state.best_global_step == ours.result.best_update


def test_an_evaluation_set_is_taken_by_its_name(tmp_path):
    sets, found = {"one": little_rows(8, 1), "other": little_rows(8, 5)}, []
    for whose, kind in TRAINERS.items():
        trainer = kind(little_model(), arguments(tmp_path / whose), train_dataset=little_rows(), eval_dataset=sets)
        found.append([trainer.evaluate(name)["eval_loss"] for name in sets])
    assert found[0] == pytest.approx(found[1]) and found[0][0] != found[0][1]
    with pytest.raises(OptionError, match="expected one, other; found the name 'third'"):
        Trainer(little_model(), arguments(tmp_path), train_dataset=little_rows(), eval_dataset=sets).evaluate("third")


@pytest.mark.parametrize("best", ["eval_other_right", "other_loss", None])
@pytest.mark.few(1)
def test_several_evaluation_sets_are_told_one_by_one(best, tmp_path):
    options = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 0.2,
        "compute_metrics": accuracy,
    }
    if best is not None:
        options |= {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": best}
    found, called = [], []
    for whose in TRAINERS:
        sets = {"one": little_rows(8, 1), "other": little_rows(8, 5)}
        callback = Listening()
        found.append(trained(tmp_path, whose, eval_dataset=sets, callbacks=[callback], **options))
        called.append(callback.called)
    (theirs, expected), (ours, weights) = found
    assert [logs["step"] for logs in history(theirs) if "eval_one_right" in logs] == [2, 4, 6]
    same_history(history(ours), history(theirs))
    same_weights(weights, expected)
    assert called[0] == called[1]
    assert ours.state.best_metric == (None if best is None else pytest.approx(theirs.state.best_metric))
    assert ours.state.best_global_step == theirs.state.best_global_step


class Ends(Exception):
    pass


def fail():
    raise Ends


def end():
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("how", [fail, end])
def test_a_run_that_ended_in_its_midst_goes_on_to_the_same_weights(how, tmp_path):
    """Behind a signal it named a flag of seqpart's command, which refuses the run, and not the words of transformers."""
    length = {"num_train_epochs": 2, "optim": "adamw_torch"}
    options = {"save_strategy": "steps", "save_steps": 2, **length}
    _, expected = trained(tmp_path, "theirs", **length)

    def in_its_midst(state, control):
        if state.global_step == 3:
            how()

    saved = r"is saved in .*Resume with train\(resume_from_checkpoint=True\)$" if how is end else None
    with pytest.raises(Interrupted if how is end else Ends, match=saved) as stopped:
        trained(tmp_path, callbacks=[Listening(step=in_its_midst)], **options)
    directory = tmp_path / "ours" / "seqpart"
    assert how is fail or stopped.value.directory == directory
    model = little_model()
    trainer = Trainer(model, arguments(tmp_path / "ours", **options), train_dataset=little_rows(), method="full")
    assert trainer.train(resume_from_checkpoint=True if how is fail else directory).global_step == 6
    same_weights(dict(model.state_dict()), expected)


def test_a_run_that_goes_on_knows_the_best_evaluation_and_stops_where_it_would_have(tmp_path):
    """It began to count anew, and ended six updates later."""
    values = [0.9, 0.5, 0.6, 0.4, 0.3, 0.2]
    options = {
        "eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 6, "metric_for_best_model": "own",
        "greater_is_better": True, "load_best_model_at_end": True,
    }  # fmt: skip

    def begun(folder, count, *callbacks):
        left = iter(values[count:])
        return Trainer(
            little_model(), arguments(folder, **options), train_dataset=little_rows(), eval_dataset=little_rows(8, 1),
            compute_metrics=lambda _: {"own": next(left)}, callbacks=[transformers.EarlyStoppingCallback(3), *callbacks],
            method="full",
        )  # fmt: skip

    def in_its_midst(state, control):
        if state.global_step == 7:
            fail()

    whole = begun(tmp_path / "whole", 0)
    whole.train()
    with pytest.raises(Ends):
        begun(tmp_path / "cut", 0, Listening(step=in_its_midst)).train()
    resumed = begun(tmp_path / "cut", 2)
    resumed.train(resume_from_checkpoint=True)
    for name in ("global_step", "best_metric", "best_global_step"):
        assert getattr(resumed.state, name) == getattr(whole.state, name)
    assert resumed.state.global_step == 12 and resumed.state.best_metric == 0.9


def test_an_evaluation_that_a_run_goes_on_with_is_logged_at_its_own_step(tmp_path):
    """It had the step of the evaluation before."""
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 3}

    def begun(values):
        left = iter(values)
        return Trainer(
            little_model(), arguments(tmp_path, **options), train_dataset=little_rows(), eval_dataset=little_rows(8, 1),
            compute_metrics=lambda _: {"own": next(left)}, method="full",
        )  # fmt: skip

    with pytest.raises(Exception, match="StopIteration"):
        begun([0.1]).train()
    resumed = begun([0.2, 0.3])
    resumed.train(resume_from_checkpoint=True)
    assert [(logs["step"], logs["eval_own"]) for logs in history(resumed) if "eval_own" in logs] == [(6, 0.2), (9, 0.3)]


def scaled(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs.logits, labels) * 0.1


def doubled(model, inputs, return_outputs=False, num_items_in_batch=None):
    outputs = model(**inputs)
    return (outputs.loss * 2, outputs) if return_outputs else outputs.loss * 2


def another_optimizer(trainer):
    trainer.optimizer = by_groups(trainer.model)
    trainer.lr_scheduler = one_cycle(trainer.optimizer)


def another_head(trainer):
    torch.manual_seed(1)
    trainer.model.classifier = torch.nn.Linear(16, 3)


def reversed_rows(items):
    tokens = torch.stack([item["input_ids"] for item in items])
    return {"input_ids": tokens.flip(1), "labels": torch.tensor([item["label"] for item in items])}


def in_args(**fields):
    def change(trainer):
        for name, value in fields.items():
            setattr(trainer.args, name, value)

    return change


def in_trainer(**attributes):
    def change(trainer):
        for name, value in attributes.items():
            setattr(trainer, name, value)

    return change


CHANGES = {
    "rate, decay, clipping": in_args(learning_rate=1e-3, weight_decay=0.3, max_grad_norm=0.05),
    "epochs": in_args(num_train_epochs=1),
    "max_steps": in_args(max_steps=2),
    "optim": in_args(optim="sgd", lr_scheduler_type="cosine"),
    "evaluations": in_args(eval_strategy="steps", eval_steps=2),
    "evaluations as often as transformers finds": in_args(eval_strategy="steps"),
    "what transformers reads when it is made": in_args(bf16=True, label_smoothing_factor=0.3, neftune_noise_alpha=5.0),
    "fewer rows": in_trainer(train_dataset=little_rows(8)),
    "more rows": in_trainer(train_dataset=little_rows(40)),
    "an optimizer": another_optimizer,
    "a class of optimizers": in_trainer(optimizer_cls_and_kwargs=(torch.optim.Adagrad, {"lr": 0.1})),
    "a function": in_trainer(compute_loss_func=scaled),
    "compute_loss": in_trainer(compute_loss=doubled),
    "a head": another_head,
    "a collator": in_trainer(data_collator=reversed_rows),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.few(5)
def test_what_is_set_after_the_trainer_was_made_holds_as_in_transformers(change, tmp_path):
    """It was ignored, or the rows obeyed it and the updates did not."""
    found = {}
    for whose, kind in TRAINERS.items():
        model = little_model()
        options = {"method": "full"} if whose == "ours" else {}
        rows = {"train_dataset": little_rows(), "eval_dataset": little_rows(8, 1)}
        trainer = kind(model, arguments(tmp_path / whose, num_train_epochs=2), **rows, **options)
        change(trainer)
        trainer.train()
        found[whose] = history(trainer), dict(model.state_dict())
    same_weights(found["ours"][1], found["theirs"][1])
    same_history(found["ours"][0], found["theirs"][0])


def test_a_second_training_has_other_arguments_rows_and_batches_and_a_model_of_model_init_is_made_anew(tmp_path):
    model, second = little_model(), {"num_train_epochs": 2, "learning_rate": 1e-3, "per_device_train_batch_size": 4}
    trainer = Trainer(model, arguments(tmp_path / "one"), train_dataset=little_rows(), method="full")
    trainer.train()
    between = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    in_args(**second)(trainer)
    trainer.train_dataset = little_rows(16)
    trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps == 8

    other = little_model()
    other.load_state_dict(between)
    _, expected = trained(tmp_path, "theirs", other, train_dataset=little_rows(16), **second)
    same_weights(dict(model.state_dict()), expected)
    assert trainer.evaluate(little_rows(8, 1))["eval_loss"] > 0

    found = []
    for whose, kind in TRAINERS.items():
        given = {"model_init": lambda: little_model(), "train_dataset": little_rows()}
        trainer = kind(args=arguments(tmp_path / f"{whose} anew"), **given)
        for _ in range(2):
            trainer.train()
            found.append(dict(trainer.model.state_dict()))
    for weights in found[1:]:
        same_weights(found[0], weights)


def test_what_transformers_has_and_this_trainer_does_not_read_cannot_be_set(tmp_path):
    theirs = transformers.Trainer(little_model(), arguments(tmp_path), train_dataset=little_rows())
    ours = Trainer(little_model(), arguments(tmp_path), train_dataset=little_rows())
    taken = {name for name in vars(ours) if not name.startswith("_")}
    assert taken >= {"args", "train_dataset", "optimizer", "lr_scheduler", "model_init", "compute_loss_func"}
    for name in {name for name in vars(theirs) if not name.startswith("_")} - taken | {"training_step", "create_optimizer"}:
        with pytest.raises(OptionError, match=rf"trainer.{name}: nobody reads it here"):
            setattr(ours, name, None)
    ours.of_mine = 1
    ours.data_collator, ours.processing_class = theirs.data_collator, None
    with pytest.raises(OptionError, match="optimizers: a scheduler belongs to an optimizer"):
        in_trainer(lr_scheduler=one_cycle(by_groups(ours.model)))(ours)
        ours.train()


def test_rows_come_in_the_order_of_a_seed_that_was_set_after_the_trainer_was_made(tmp_path):
    found = []
    for whose, kind in TRAINERS.items():
        model = little_model()
        trainer = kind(model, arguments(tmp_path / whose), train_dataset=little_rows())
        transformers.set_seed(77)
        trainer.train()
        found.append(dict(model.state_dict()))
    same_weights(*found)


def test_rows_without_labels_have_the_same_predictions(tmp_path):
    rows = little_rows(8, 2)
    unlabelled = [{name: value for name, value in row.items() if name != "label"} for row in rows]
    trainer = Trainer(little_model(), arguments(tmp_path), train_dataset=little_rows(), compute_metrics=accuracy)
    found, known = trainer.predict(unlabelled), trainer.predict(rows)
    assert (found.predictions == known.predictions).all() and found.label_ids is None
    assert not [name for name in found.metrics if name.endswith(("loss", "right"))]
    with pytest.raises(DataError, match="test_dataset has no labels, and there is no train_dataset"):
        Trainer(little_model(), arguments(tmp_path)).predict(unlabelled)


def test_evaluations_and_predictions_are_those_of_transformers(tmp_path):
    found = []
    for whose, kind in TRAINERS.items():
        trainer = kind(
            little_model(), arguments(tmp_path / whose), eval_dataset={"one": little_rows(8)},
            compute_metrics=accuracy, preprocess_logits_for_metrics=lambda logits, labels: logits * 2,
        )  # fmt: skip
        found.append(
            (trainer.evaluate(), trainer.predict(little_rows(8, 2)), trainer.evaluate(little_rows(8), metric_key_prefix="x"))
        )
    for one, other in zip(found[1][::2], found[0][::2], strict=True):
        kept = {name: value for name, value in other.items() if "model_preparation" not in name}
        assert one.keys() == kept.keys()
        assert all(one[name] == pytest.approx(kept[name]) for name in kept if name.endswith(("loss", "right")))
    assert (found[1][1].predictions == found[0][1].predictions).all() and (found[1][1].label_ids == found[0][1].label_ids).all()
    assert found[1][1].metrics["test_right"] == found[0][1].metrics["test_right"]
