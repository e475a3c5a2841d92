"""Losses, noise and row orders of transformers' Trainer that a model does not have itself, in its Trainer and in ours."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="TrainingArguments need it: pip install accelerate")

from transformers.trainer_pt_utils import LengthGroupedSampler  # noqa: E402

from seqpart.errors import DataError, ModelError, OptionError  # noqa: E402
from seqpart.integrations.hf import Trainer  # noqa: E402
from seqpart.integrations.hf_others import under_limit  # noqa: E402
from tests.hugging_face import (  # noqa: E402
    TRAINERS,
    accuracy,
    arguments,
    collate,
    history,
    little_model,
    little_rows,
    same_history,
    same_weights,
    trained,
    uneven,
)

pytestmark = [
    pytest.mark.usefixtures("known_machine"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]


def smoothed_sum(outputs, labels, num_items_in_batch):
    return F.cross_entropy(outputs.logits, labels, reduction="sum", label_smoothing=0.2) / num_items_in_batch


BEST = {"save_strategy": "best", "load_best_model_at_end": True, "learning_rate": 0.1, "num_train_epochs": 3}
OPTIONS = {
    "smoothed labels, adafactor": {
        "label_smoothing_factor": 0.1, "optim": "adafactor", "weight_decay": 0.1, "eval_strategy": "epoch",
        "compute_metrics": accuracy,
    },
    "a function, the best save by a metric": {
        **BEST, "compute_loss_func": smoothed_sum, "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "right",
        "compute_metrics": accuracy,
    },
    "smoothed labels in mixed precision": {"label_smoothing_factor": 0.1, "bf16": True},
    "a function in mixed precision": {"compute_loss_func": smoothed_sum, "bf16": True},
    "the best save by loss": {**BEST, "eval_strategy": "epoch", "metric_for_best_model": "loss"},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.few(3)
def test_options_of_losses_and_saves_leave_the_weights_of_transformers(options, tmp_path):
    options = {"num_train_epochs": 2, **options}
    (theirs, expected), (ours, found) = (trained(tmp_path, whose, **options) for whose in TRAINERS)
    same_weights(found, expected)
    same_history(history(ours), history(theirs))
    assert ours.state.best_global_step == theirs.state.best_global_step
    assert "metric_for_best_model" not in options or ours.state.best_global_step < ours.state.global_step


def answering():
    """A model that marks an answer in a text, and rows of texts."""
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    model = transformers.BertForQuestionAnswering(transformers.BertConfig(**sizes, hidden_dropout_prob=0.0, **_NO_DROPOUT))
    starts, texts = torch.arange(24) % 6, torch.randint(1, 40, (24, 9))
    rows = [{"input_ids": text, "start_positions": at, "end_positions": at + 2} for text, at in zip(texts, starts, strict=True)]
    return model, rows


def forecasting():
    """A model that goes on with a series, and rows of series."""
    sizes = {"d_model": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 24, "num_input_channels": 2}
    lengths = {"context_length": 32, "patch_length": 8, "patch_stride": 8, "prediction_length": 4}
    model = transformers.PatchTSTForPrediction(transformers.PatchTSTConfig(**sizes, **lengths))
    series = torch.randn(24, 36, 2)
    return model, [{"past_values": one[:32], "future_values": one[32:]} for one in series]


_NO_DROPOUT = {"attention_probs_dropout_prob": 0.0}


@pytest.mark.parametrize("make", [answering, forecasting])
def test_a_model_that_finds_its_loss_without_labels_trains_and_is_evaluated(make, tmp_path):
    """What is to be found has other names there: it was refused."""
    torch.manual_seed(3)
    model, rows = make()
    options = {"train_dataset": rows[:16], "eval_dataset": rows[16:], "eval_strategy": "epoch", "num_train_epochs": 2}
    (theirs, expected), (ours, found) = (trained(tmp_path, whose, model=copy.deepcopy(model), **options) for whose in TRAINERS)
    same_weights(found, expected)
    for one, other in zip(history(ours), history(theirs), strict=True):  # which evaluates no loss without the names of labels
        assert "eval_loss" in one or "loss" in one or "train_loss" in one
        assert {name: pytest.approx(one[name], rel=1e-6) for name in other} == other
    with pytest.raises(OptionError, match="takes no `labels` that they could give"):
        ours.predict(rows[16:])


def test_texts_of_several_lengths_are_refused_where_the_loss_is_over_positions(tmp_path):
    """It counted the places that were padded up to the longest text of all."""
    model, rows = answering()
    rows = [{**row, "input_ids": row["input_ids"][: 8 + at % 2]} for at, row in enumerate(rows)]
    data = {"train_dataset": rows, "data_collator": transformers.default_data_collator}
    with pytest.raises(DataError, match="train_dataset: batches differ in length, in input_ids, and the model finds its loss"):
        Trainer(model, arguments(tmp_path, per_device_train_batch_size=1), mem_limit="2GB", **data).train()


def little_language_model():
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=24,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def half_labelled():
    rows = []
    for number, row in enumerate(little_rows()):
        labels = row["input_ids"].clone()
        labels[: number % 5] = -100
        rows.append({"input_ids": row["input_ids"], "attention_mask": row["attention_mask"], "labels": labels})
    return rows


def token_sum(outputs, labels, num_items_in_batch):
    scores, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(scores, labels, reduction="sum") / num_items_in_batch


@pytest.mark.parametrize(
    "own", [{"label_smoothing_factor": 0.1}, {"compute_loss_func": token_sum}], ids=["smoothed", "a function"]
)
@pytest.mark.few(1)
def test_tokens_that_count_are_counted_over_all_micro_batches_of_an_update(own, tmp_path):
    """Rows have 2 to 6 labels, so the mean of a batch is not that of its halves."""
    func = {"compute_loss_func": own["compute_loss_func"]} if "compute_loss_func" in own else {}
    weights = []
    for whose, kind in TRAINERS.items():
        model = little_language_model()
        args = arguments(
            tmp_path / whose, per_device_train_batch_size=2, gradient_accumulation_steps=4, optim="sgd",
            **{name: value for name, value in own.items() if name not in func},
        )  # fmt: skip
        options = {} if whose == "theirs" else {"method": "full", "micro_batch_size": 2}
        kind(model, args, train_dataset=half_labelled(), **func, **options).train()
        weights.append(model.state_dict())
    assert all(torch.allclose(weights[0][name], weights[1][name], rtol=1e-5, atol=1e-7) for name in weights[0])


# --- compute_loss of a subclass -----------------------------------------------------------------------------------------


def weighted(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    """As in transformers' documentation."""
    labels = inputs.pop("labels")
    outputs = model(**inputs)
    loss = F.cross_entropy(outputs.logits, labels, weight=torch.tensor([1.0, 2.0, 3.0]))
    return (loss, outputs) if return_outputs else loss


def beside_the_models_own(self, model, inputs, return_outputs=False, **_):
    """Takes an input too."""
    loss, outputs = type(self).__mro__[1].compute_loss(self, model, inputs, return_outputs=True)
    loss = loss + 0.1 * (outputs.logits.mean(-1) * inputs["attention_mask"].sum(-1)).square().mean()
    return (loss, outputs) if return_outputs else loss


def with_a_column(self, model, inputs, return_outputs=False, **_):
    """Takes a column that the model does not."""
    outputs = model(**{name: value for name, value in inputs.items() if name not in ("share", "labels")})
    loss = (F.cross_entropy(outputs.logits, inputs["labels"], reduction="none") * inputs["share"]).mean()
    return (loss, outputs) if return_outputs else loss


def subclass(base, own):
    return type("Own", (base,), {"compute_loss": own})


def trained_by(kind, folder, rows, ours=(), under=None, **options):
    model = little_model()
    args = arguments(
        folder, num_train_epochs=2, eval_strategy="epoch", per_device_eval_batch_size=8, remove_unused_columns=False, **options
    )
    trainer = kind(
        model,
        args,
        train_dataset=rows,
        eval_dataset=rows[:8],
        compute_metrics=accuracy,
        data_collator=with_labels,
        **dict(ours),
    )
    if under is not None:
        trainer = under_limit(trainer, **under)
        assert trainer.model is model
    trainer.train()
    return trainer, dict(model.state_dict())


def with_labels(items):
    return transformers.default_data_collator(items)


@pytest.mark.parametrize("own", [weighted, beside_the_models_own, with_a_column])
@pytest.mark.parametrize("method", ["full", "streamed"])
@pytest.mark.few(1)
def test_a_compute_loss_of_a_subclass_leaves_the_weights_of_transformers(own, method, tmp_path):
    rows = [{**row, **({"share": number / 9} if own is with_a_column else {})} for number, row in enumerate(little_rows())]
    options = {"method": method, "micro_batch_size": 8, "mem_limit": "2GB"}
    theirs, expected = trained_by(subclass(transformers.Trainer, own), tmp_path / "theirs", rows)
    ours, found = trained_by(subclass(Trainer, own), tmp_path / "ours", rows, options)
    under, also = trained_by(subclass(transformers.Trainer, own), tmp_path / "under", rows, under=options)
    for weights, trainer in ((found, ours), (also, under)):
        same_weights(weights, expected)
        same_history(history(trainer), history(theirs))
    assert "forward" not in vars(ours.model)


def test_a_loss_whose_parts_do_not_add_up_is_refused_where_batches_are_divided(tmp_path):
    with pytest.raises(OptionError, match="the loss of a batch is neither the mean of its parts' by their rows nor their sum"):
        trained_by(subclass(Trainer, weighted), tmp_path, little_rows(), {"method": "full", "micro_batch_size": 4})


def annealed(self, model, inputs, return_outputs=False, **_):
    loss, outputs = type(self).__mro__[1].compute_loss(self, model, inputs, return_outputs=True)
    loss = loss * (1 + self.state.global_step)
    return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("kind", [Trainer, transformers.Trainer])
def test_a_compute_loss_that_reads_what_changes_in_training_is_refused(kind, tmp_path):
    """It was called once, and each step had the loss of step 0."""
    options = {"method": "full", "mem_limit": "2GB"}
    given = {"ours": options} if kind is Trainer else {"under": options}
    with pytest.raises(ModelError, match=r"^compute_loss: it reads state\.global_step"):
        trained_by(subclass(kind, annealed), tmp_path, little_rows(), **given)
    assert transformers.TrainerState().global_step == 0


# --- NEFTune ------------------------------------------------------------------------------------------------------------


def test_neftune_is_the_noise_of_transformers_drawn_by_keys_of_its_own(tmp_path):
    """Its embedding is seeded before each call as ours was, and then all bits are the same."""
    seeds = []

    def note(embedding, taken):
        if embedding.training:
            seeds.append(torch.initial_seed())

    def seed(embedding, taken):
        torch.manual_seed(seeds.pop(0))

    def weights(kind, before):
        model = little_model()
        embedding = model.bert.embeddings.word_embeddings
        hook = embedding.register_forward_pre_hook(before)
        kind(model, arguments(tmp_path, neftune_noise_alpha=5.0, num_train_epochs=2), train_dataset=little_rows()).train()
        hook.remove()
        assert not embedding._forward_hooks
        return dict(model.state_dict())

    found = weights(functools.partial(Trainer, method="full"), note)
    del seeds[:-6]  # of its plan
    same_weights(found, weights(transformers.Trainer, seed))
    assert not torch.equal(trained(tmp_path, "theirs", num_train_epochs=2)[1]["classifier.weight"], found["classifier.weight"])


# --- rows of about the same length ----------------------------------------------------------------------------------------


class Seeded(LengthGroupedSampler):
    """transformers' draws from the generator of the process, whose state depends on all that was drawn before."""

    def set_epoch(self, epoch):
        self.generator = torch.Generator().manual_seed(42 + epoch)


class Grouping(transformers.Trainer):
    def _get_train_sampler(self, train_dataset=None):
        sampler = super()._get_train_sampler(train_dataset)
        assert type(sampler) is LengthGroupedSampler
        sampler.__class__ = Seeded
        return sampler


def test_rows_are_grouped_by_length_as_in_transformers_by_a_generator_of_the_epoch(tmp_path):
    weights, padded = [], functools.partial(collate, length=8)
    for kind in (Grouping, functools.partial(Trainer, method="full")):
        model = little_model()
        args = arguments(
            tmp_path, num_train_epochs=2, train_sampling_strategy="group_by_length", per_device_train_batch_size=4,
        )  # fmt: skip
        kind(model, args, train_dataset=uneven(), data_collator=padded).train()
        weights.append(model.state_dict())
    same_weights(*weights)
