"""A little model of transformers, rows for it, and a training by either Trainer."""

import pytest
import torch
import transformers

from seqpart.integrations.hf import Trainer

TRAINERS = {"theirs": transformers.Trainer, "ours": Trainer}


def little_model(**options):
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, num_labels=3,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def little_rows(count=24, first=0):
    tokens = torch.randint(5, 40, (count, 6), generator=torch.Generator().manual_seed(first))
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "label": int(row[0]) % 3} for row in tokens]


def arguments(folder, **options):
    options = {
        "per_device_train_batch_size": 8, "num_train_epochs": 1, "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2,
        "logging_steps": 1, "save_strategy": "no", **options,
    }  # fmt: skip
    return transformers.TrainingArguments(output_dir=str(folder), **options)


OWN = ("callbacks", "optimizers", "optimizer_cls_and_kwargs", "compute_metrics")


def trained(folder, whose="ours", model=None, **options):
    """A trainer behind its training, and the weights that it left."""
    own = {name: options.pop(name) for name in OWN if name in options}
    if whose == "ours":
        own["method"] = "full"  # the quickest to plan
    model = little_model() if model is None else model
    trainer = TRAINERS[whose](
        model, arguments(folder / whose, **options), train_dataset=little_rows(), eval_dataset=little_rows(8, 1), **own
    )
    trainer.train()
    return trainer, dict(model.state_dict())


def same_weights(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


TIMES = ("runtime", "per_second", "flos")


def history(trainer):
    """What was logged, but for what is another in every run."""
    return [
        {name: value for name, value in logs.items() if not any(word in name for word in TIMES)}
        for logs in trainer.state.log_history
    ]


def same_history(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one == {name: pytest.approx(value, rel=1e-6) for name, value in other.items()}
