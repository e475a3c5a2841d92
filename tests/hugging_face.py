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


OWN = (
    "callbacks",
    "compute_loss_func",
    "optimizers",
    "optimizer_cls_and_kwargs",
    "compute_metrics",
    "eval_dataset",
    "train_dataset",
)


def trained(folder, whose="ours", model=None, **options):
    """A trainer behind its training, and the weights that it left."""
    own = {name: options.pop(name) for name in OWN if name in options}
    if whose == "ours":
        own["method"] = "full"  # the quickest to plan
    model = little_model() if model is None else model
    data = {"train_dataset": little_rows(), "eval_dataset": little_rows(8, 1), **own}
    trainer = TRAINERS[whose](model, arguments(folder / whose, **options), **data)
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


def accuracy(found):
    assert found.predictions.shape == (8, 3) and found.label_ids.shape == (8,)
    return {"right": (found.predictions.argmax(-1) == found.label_ids).mean()}


def by_groups(model):
    """A learning rate of its own for the classifier, and schedules that set momentum too."""
    head = list(model.classifier.parameters())
    rest = [one for one in model.parameters() if all(one is not other for other in head)]
    groups = [{"params": rest}, {"params": head, "lr": 0.05, "weight_decay": 0.1}]
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True)


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=8)
