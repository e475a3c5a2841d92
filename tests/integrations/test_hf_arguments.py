"""Each field of TrainingArguments, and each argument of transformers' Trainer, is taken or refused by name."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from seqpart.errors import DataError, ModelError, OptionError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="TrainingArguments need it: pip install accelerate")

from seqpart.integrations.hf import Trainer  # noqa: E402
from seqpart.integrations.hf_arguments import HONOURED, WITHOUT_EFFECT  # noqa: E402
from tests.hugging_face import (  # noqa: E402
    Listening,
    accuracy,
    arguments,
    by_groups,
    collate,
    little_model,
    little_rows,
    one_cycle,
    trained,
    uneven,
)

PAGE = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()

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
    newer = {"activation_checkpointing", "activation_checkpointing_kwargs"}  # than transformers 5.17
    assert set(FIELDS) | newer >= HONOURED | set(WITHOUT_EFFECT)
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


REFUSED_ROWS = {
    "have no attention_mask that tells which tokens only fill them": (uneven(mask=False), collate),
    "train_dataset: the collator returned a batch without labels, only input_ids": (
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


class Saving(transformers.TrainerCallback):
    def on_save(self, args, state, control, **_):
        """Nobody calls it."""


REFUSED = {
    "callbacks: Saving has on_save, which nobody calls here": ({"callbacks": [Saving]}, {}),
    "model: give a model, or model_init": ({"model_init": little_model}, {}),
    "dataloader_drop_last: 24 rows make no whole batch of 25": (
        {}, {"dataloader_drop_last": True, "per_device_train_batch_size": 25},
    ),
    "batch_size: TrainingArguments say it. Leave it out": ({"batch_size": 4}, {}),
    "unknown setting": ({"limit": "2GB"}, {}),
    "data_collator: expected a function": ({"data_collator": 3}, {}),
    "eval_dataset is missing. Give one, or eval_strategy='no'": ({}, {"eval_strategy": "epoch"}),
    "optim: expected one of adamw_torch, adamw_torch_fused": ({}, {"optim": "lion_32bit"}),
    "lr_scheduler_type: expected another one than reduce_lr_on_plateau": (
        {}, {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
    ),
    "train_sampling_strategy: expected one of random, sequential, group_by_length; found batch_rebalance": (
        {}, {"train_sampling_strategy": "batch_rebalance"},
    ),
    "save_strategy best keeps the weights of the best evaluation for the end of the training. Give load_best_model_at_end": (
        {}, {"save_strategy": "best", "metric_for_best_model": "loss"},
    ),
    "report_to: expected one of tensorboard, wandb; found mlflow": ({}, {"report_to": ["mlflow"]}),
    "label_names: expected": ({}, {"label_names": ["start_positions", "end_positions"]}),
    "fp16_full_eval, run_name: not taken here. Leave them out": ({}, {"fp16_full_eval": True, "run_name": "one"}),
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
    with pytest.raises(OptionError, match="Own: training_step: nobody calls it here"):

        class Own(Trainer):
            def training_step(self, model, inputs, num_items_in_batch=None):
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
    assert not hasattr(Trainer, "training_step")
    with pytest.raises(AttributeError, match=r"has no hyperparameter_search: docs/huggingface.md"):
        Trainer.__new__(Trainer).hyperparameter_search()


def test_a_model_without_a_loss_of_its_own_is_refused(tmp_path):
    with pytest.raises(ModelError, match="the forward of BertModel takes no `labels`"):
        Trainer(little_model().bert, arguments(tmp_path), train_dataset=little_rows(), mem_limit="2GB").train()


@pytest.mark.parametrize("what", ["evaluate", "save_model", "train"])
@pytest.mark.few(1)
def test_a_callback_cannot_use_the_model_while_it_is_empty(what, tmp_path):
    callback = Listening(step=lambda state, control: getattr(trainer, what)())
    trainer = Trainer(
        little_model(), arguments(tmp_path), train_dataset=little_rows(), eval_dataset=little_rows(8), callbacks=[callback],
        method="full",
    )  # fmt: skip
    with pytest.raises(OptionError, match=f"{what}: the model is empty during training"):
        trainer.train()
