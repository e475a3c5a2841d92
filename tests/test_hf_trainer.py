"""What arguments of transformers' Trainer do under the limit: what they do there, or they are refused by name."""

import dataclasses
import functools
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqpart.errors import DataError, OptionError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="TrainingArguments need it: pip install accelerate")

from seqpart.integrations import hf_data  # noqa: E402
from seqpart.integrations.hf import Trainer  # noqa: E402
from seqpart.integrations.hf_arguments import lengths_of  # noqa: E402
from seqpart.integrations.hf_fields import HONOURED, WITHOUT_EFFECT  # noqa: E402
from tests.hugging_face import (  # noqa: E402
    TRAINERS,
    arguments,
    history,
    little_model,
    little_rows,
    same_history,
    same_weights,
    trained,
)

PAGE = (Path(__file__).parent.parent / "docs" / "huggingface.md").read_text()

pytestmark = [
    pytest.mark.usefixtures("known_machine"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft asks for it
]

FIELDS = [field.name for field in dataclasses.fields(transformers.TrainingArguments)]


def with_another(name, folder):
    """Arguments with another value than its default in one field; what it says does not matter."""
    made = arguments(folder)
    default = getattr(transformers.TrainingArguments(output_dir=str(folder)), name)
    object.__setattr__(made, name, not default if isinstance(default, bool) else ["something"])
    return made


def test_every_field_is_honoured_or_without_effect_or_refused():
    assert not HONOURED & set(WITHOUT_EFFECT)
    assert set(FIELDS) >= HONOURED | set(WITHOUT_EFFECT)
    assert all(f"`{name}`" in PAGE for name in HONOURED | set(WITHOUT_EFFECT))
    assert all(reason in PAGE for reason in WITHOUT_EFFECT.values())


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in HONOURED])
def test_a_field_that_is_not_honoured_is_refused_by_name_unless_it_has_no_effect(name, tmp_path):
    made = with_another(name, tmp_path)
    if name in WITHOUT_EFFECT:
        Trainer(little_model(), made)
        return
    with pytest.raises(OptionError, match=rf"TrainingArguments: {name}: not taken here"):
        Trainer(little_model(), made)


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
    },
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_do_what_they_do_in_transformers(options, tmp_path):
    (theirs, expected), (ours, found) = (trained(tmp_path, whose, **options) for whose in TRAINERS)
    same_weights(found, expected)
    if "max_grad_norm" in options:  # the norm of gradients that are not clipped is not computed here
        assert not any("grad_norm" in logs for logs in history(ours))
        theirs.state.log_history = [{name: logs[name] for name in logs if name != "grad_norm"} for logs in history(theirs)]
    same_history(history(ours), history(theirs))
    for name in ("global_step", "max_steps", "epoch", "num_train_epochs"):
        assert getattr(ours.state, name) == pytest.approx(getattr(theirs.state, name))


def by_groups(model):
    """A learning rate of its own for the classifier, and schedules that set momentum too."""
    head = list(model.classifier.parameters())
    rest = [one for one in model.parameters() if all(one is not other for other in head)]
    groups = [{"params": rest}, {"params": head, "lr": 0.05, "weight_decay": 0.1}]
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True)


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=8)


@pytest.mark.parametrize("scheduler", [one_cycle, lambda optimizer: None], ids=["with a scheduler", "without"])
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


def stepped(model):
    optimizer = by_groups(model)
    model(input_ids=torch.ones(1, 2, dtype=torch.int64), labels=torch.ones(1, dtype=torch.int64)).loss.backward()
    optimizer.step()
    return optimizer, None


WRONG = {
    "the optimizer has stepped": stepped,
    "a scheduler belongs to an optimizer": lambda model: (None, one_cycle(by_groups(model))),
    "the scheduler belongs to another optimizer": lambda model: (by_groups(model), one_cycle(by_groups(model))),
    "classifier.weight learns and is in no group": lambda model: (torch.optim.SGD(model.bert.parameters(), 0.1), None),
}


@pytest.mark.parametrize("words", WRONG)
def test_an_optimizer_that_cannot_be_taken_is_refused_in_words(words, tmp_path):
    model = little_model()
    with pytest.raises(OptionError, match=f"optimizers: {words}"):
        Trainer(model, arguments(tmp_path), train_dataset=little_rows(), optimizers=WRONG[words](model))


@settings(max_examples=12)
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
    batches = hf_data.Batches(collator=list, name="", size=size, columns=None, token=0, left=False, sizes={})
    lengths = lengths_of(made, count)
    loader = hf_data.training_loader(items, batches, made, lengths.rows, lengths.batch)
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


def uneven(mask=True):
    """Rows of 3 to 8 tokens."""
    rows = []
    for number, row in enumerate(little_rows()):
        ids = row["input_ids"].repeat(2)[: 3 + number % 6].tolist()
        rows.append({"input_ids": ids, "label": row["label"], **({"attention_mask": [1] * len(ids)} if mask else {})})
    return rows


def collate(items, length=0):
    """Of one's own, that knows of no tokenizer."""
    length = max(length, *(len(item["input_ids"]) for item in items))
    found = {
        name: torch.tensor([item[name] + [0] * (length - len(item[name])) for item in items])
        for name in ("input_ids", "attention_mask")
        if name in items[0]
    }
    return {**found, "labels": torch.tensor([item["label"] for item in items])}


def test_any_collator_is_padded_on_to_the_longest_row(tmp_path):
    weights = []
    for whose, collator in (("theirs", functools.partial(collate, length=8)), ("ours", collate)):
        model = little_model()
        trainer = TRAINERS[whose](model, arguments(tmp_path / whose), data_collator=collator, train_dataset=uneven())
        trainer.train()
        weights.append(model.state_dict())
    same_weights(*weights)


REFUSED_ROWS = {
    "have no attention_mask that tells which tokens only fill them": (uneven(mask=False), collate),
    "train_dataset: a batch has no labels behind the collator, only input_ids": (
        [{"input_ids": row["input_ids"]} for row in little_rows()], None,
    ),
    "no column has the name of an argument of the model's forward": ([{"text": "a"}] * 4, None),
    "expected a data set with len\\(\\) and \\[i\\]; found generator": ((row for row in little_rows()), None),
    "expected the collator to return a dict; found list": (little_rows(), list),
    "train_dataset is empty": ([], None),
    "train_dataset is missing": (None, None),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED_ROWS)
def test_rows_that_cannot_be_taken_are_refused_in_words(words, tmp_path):
    rows, collator = REFUSED_ROWS[words]
    with pytest.raises(DataError, match=words):
        Trainer(little_model(), arguments(tmp_path), data_collator=collator, train_dataset=rows).train()


# --- around the training ----------------------------------------------------------------------------------------------


class Listening(transformers.TrainerCallback):
    """What was called, and `then` in a method of that name."""

    def __init__(self, **then):
        self.called, self._then = [], then

    def _call(self, name, state, control):
        self.called.append((name, state.global_step))
        if name in self._then:
            self._then[name](state, control)
        return control

    def on_train_begin(self, args, state, control, **_):
        return self._call("train begins", state, control)

    def on_epoch_begin(self, args, state, control, **_):
        return self._call("epoch begins", state, control)

    def on_step_end(self, args, state, control, **_):
        return self._call("step", state, control)

    def on_evaluate(self, args, state, control, metrics, **_):
        return self._call("evaluation", state, control)

    def on_log(self, args, state, control, logs, **_):
        return self._call("log", state, control)

    def on_epoch_end(self, args, state, control, **_):
        return self._call("epoch ends", state, control)

    def on_train_end(self, args, state, control, **_):
        return self._call("train ends", state, control)


def test_callbacks_are_called_as_in_transformers(tmp_path):
    called = []
    for whose in TRAINERS:
        callback = Listening()
        trained(tmp_path, whose, callbacks=[callback], eval_strategy="epoch", num_train_epochs=2, logging_steps=2)
        called.append(callback.called)
    assert called[0] == called[1]


def stop(state, control):
    control.should_training_stop = state.global_step == 2


def test_a_callback_ends_the_training(tmp_path):
    (theirs, expected), (ours, found) = (
        trained(tmp_path, whose, callbacks=[Listening(step=stop)], num_train_epochs=3) for whose in TRAINERS
    )
    same_weights(found, expected)
    assert ours.state.global_step == theirs.state.global_step == 2


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


def test_a_run_that_ended_in_its_midst_goes_on_to_the_same_weights(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2, "optim": "adamw_torch"}

    def fail(state, control):
        if state.global_step == 3:
            raise ZeroDivisionError

    _, expected = trained(tmp_path / "whole", **options)
    with pytest.raises(ZeroDivisionError):
        trained(tmp_path, callbacks=[Listening(step=fail)], **options)
    model = little_model()
    trainer = Trainer(model, arguments(tmp_path / "ours", **options), train_dataset=little_rows(), method="full")
    assert trainer.train(resume_from_checkpoint=True).global_step == 6
    same_weights(dict(model.state_dict()), expected)


def accuracy(found):
    assert found.predictions.shape == (8, 3) and found.label_ids.shape == (8,)
    return {"right": (found.predictions.argmax(-1) == found.label_ids).mean()}


def test_evaluations_and_predictions_are_those_of_transformers(tmp_path):
    found = []
    for whose, kind in TRAINERS.items():
        trainer = kind(
            little_model(), arguments(tmp_path / whose), eval_dataset={"one": little_rows(8), "two": little_rows(8, 1)},
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


# --- what is refused --------------------------------------------------------------------------------------------------


class Saving(transformers.TrainerCallback):
    def on_save(self, args, state, control, **_):
        """Nobody calls it."""


REFUSED = {
    "compute_loss_func: give the loss to seqpart.Trainer(model, loss)": ({"compute_loss_func": lambda output, labels: 0}, {}),
    "callbacks: Saving has on_save, which nobody calls here": ({"callbacks": [Saving]}, {}),
    "model: give a model, or model_init": ({"model_init": little_model}, {}),
    "batch_size: TrainingArguments say it. Leave it out": ({"batch_size": 4}, {}),
    "unknown setting": ({"limit": "2GB"}, {}),
    "data_collator: expected a function": ({"data_collator": 3}, {}),
    "eval_dataset is missing. Give one, or eval_strategy='no'": ({}, {"eval_strategy": "epoch"}),
    "optim: expected one of adamw_torch, adamw_torch_fused": ({}, {"optim": "adafactor"}),
    "lr_scheduler_type: expected another one than reduce_lr_on_plateau": (
        {}, {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
    ),
    "train_sampling_strategy: expected one of random, sequential": ({}, {"train_sampling_strategy": "group_by_length"}),
    "save_strategy: expected one of no, steps, epoch; found best": (
        {}, {"save_strategy": "best", "metric_for_best_model": "loss"},
    ),
    "report_to: expected one of tensorboard, wandb; found mlflow": ({}, {"report_to": ["mlflow"]}),
    "label_names: expected": ({}, {"label_names": ["start_positions", "end_positions"]}),
    "label_smoothing_factor, fp16_full_eval: not taken here. Leave them out": (
        {}, {"fp16_full_eval": True, "label_smoothing_factor": 0.1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_honoured_is_refused_in_words(words, tmp_path):
    given, options = REFUSED[words]
    with pytest.raises(OptionError, match=re.escape(words)):
        Trainer(little_model(), arguments(tmp_path, **options), train_dataset=little_rows(), **given)


def test_a_field_of_a_subclass_is_refused_unless_it_is_at_its_default(tmp_path):
    @dataclasses.dataclass
    class Own(transformers.TrainingArguments):
        extra: int = 1

    Trainer(little_model(), Own(output_dir=str(tmp_path)))
    with pytest.raises(OptionError, match="TrainingArguments: extra: not taken here"):
        Trainer(little_model(), Own(output_dir=str(tmp_path), extra=2))


def test_a_subclass_with_a_method_that_nobody_calls_is_refused():
    with pytest.raises(OptionError, match="Weighted: compute_loss: nobody calls it here"):

        class Weighted(Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, **_):
                return 0

    class Saying(Trainer):
        def evaluate(self, *args, **options):
            return super().evaluate(*args, **options)


@pytest.mark.parametrize("wish", ["should_save", "should_evaluate", "should_epoch_stop"])
def test_a_wish_of_a_callback_that_is_not_taken_ends_the_run_in_words(wish, tmp_path):
    with pytest.raises(OptionError, match=f"control.{wish} was set in on_train_begin"):
        trained(tmp_path, callbacks=[Listening(**{"train begins": lambda state, control: setattr(control, wish, True)})])


BEST = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "f1"}


def test_a_metric_that_no_evaluation_finds_is_named(tmp_path):
    with pytest.raises(OptionError, match=r"metric_for_best_model: compute_metrics found no f1; it found right\."):
        trained(tmp_path, compute_metrics=accuracy, **BEST)
    with pytest.raises(OptionError, match="metric_for_best_model f1: compute_metrics is missing"):
        trained(tmp_path, **BEST)


def test_what_it_does_not_have_is_told_and_is_not_there():
    assert not hasattr(Trainer, "compute_loss")
    with pytest.raises(AttributeError, match=r"has no hyperparameter_search: docs/huggingface.md"):
        Trainer.__new__(Trainer).hyperparameter_search()
