"""Trainers whose classes build on transformers', by themselves and under a limit: the same weights after two epochs."""

import re

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="TrainingArguments need it: pip install accelerate")
tokenizers = pytest.importorskip("tokenizers", reason="a tokenizer needs the extra hf")

from seqpart.errors import DataError, OptionError  # noqa: E402
from seqpart.integrations.hf import Trainer  # noqa: E402
from seqpart.integrations.hf_others import under_limit  # noqa: E402
from tests.hugging_face import arguments, history, little_model, little_rows, same_history, same_weights  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("known_machine"),
    pytest.mark.filterwarnings("ignore"),  # these libraries warn of each other
]
WORDS, MEASURES = 60, ("entropy", "mean_token_accuracy", "num_tokens")
STREAMED = {"mem_limit": "3GB", "method": "streamed"}


@pytest.fixture(scope="module")
def tokenizer():
    names = ["<pad>", "<unk>", "<eos>", "<cls>", "<sep>", "<mask>", *(f"w{number}" for number in range(WORDS))]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>", cls_token="<cls>", sep_token="<sep>",
        mask_token="<mask>",
    )  # fmt: skip


def columns(*names, uneven=False):
    """24 rows of sentences of six words, or of three to six."""
    generator = torch.Generator().manual_seed(1)

    def sentence(number):
        words = torch.randint(0, WORDS, (3 + number % 4 if uneven else 6,), generator=generator)
        return " ".join(f"w{word}" for word in words)

    return {name: [sentence(number + place) for number in range(24)] for place, name in enumerate(names)}


def both(make, folder, **options):
    """A training by each: (trainer, weights) of theirs and ours."""
    theirs, ours = make(folder / "theirs"), make(folder / "ours")
    theirs.train()
    trainer = under_limit(ours, **{**STREAMED, **options})
    trainer.train()
    return (theirs, theirs.model.state_dict()), (trainer, ours.model.state_dict())


def close_weights(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-5)] == []


# --- sentence-transformers ----------------------------------------------------------------------------------------------


@pytest.fixture
def sentences(tokenizer, tmp_path):
    """Makes a SentenceTransformerTrainer."""
    library = pytest.importorskip("sentence_transformers", reason="pip install sentence-transformers")
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    from sentence_transformers import losses, models

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS + 6, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")

    def make(folder, rows, loss, *, one=True, **options):
        layers = [models.Transformer(str(tmp_path / "bert")), models.Pooling(16)]
        model = library.SentenceTransformer(modules=layers, device="cpu")
        own = {name: options.pop(name) for name in ("evaluator",) if name in options}
        args = library.SentenceTransformerTrainingArguments(
            output_dir=str(folder), num_train_epochs=2, per_device_train_batch_size=8, use_cpu=True, disable_tqdm=True,
            learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to="none", eval_strategy="epoch", **options,
        )  # fmt: skip
        data = datasets.Dataset.from_dict(rows)
        data = data if one else datasets.DatasetDict({"one": data, "other": data})
        loss = getattr(losses, loss)(model, *((16, 3) if loss == "SoftmaxLoss" else ()))
        return library.SentenceTransformerTrainer(model, args, train_dataset=data, eval_dataset=data, loss=loss, **own)

    return make


SCORED = {"score": torch.linspace(0, 1, 24).tolist()}
PAIRS, SCORES = ("anchor", "positive"), ("sentence1", "sentence2")


@pytest.mark.parametrize(
    ("loss", "names", "more"),
    [
        ("MultipleNegativesRankingLoss", PAIRS, {}),
        ("MultipleNegativesRankingLoss", (*PAIRS, "negative"), {}),
        ("CosineSimilarityLoss", SCORES, SCORED),
        ("CoSENTLoss", SCORES, SCORED),
        ("TripletLoss", (*PAIRS, "negative"), {}),
    ],
    ids=lambda given: given if isinstance(given, str) else len(given),
)
def test_sentence_transformers_leave_the_same_weights(sentences, loss, names, more, tmp_path):
    rows = {**columns(*names), **more}
    (theirs, expected), (ours, found) = both(lambda folder: sentences(folder, rows, loss), tmp_path, micro_batch_size=8)
    same_weights(found, expected)
    same_history(history(ours), history(theirs))
    ours.save_model(tmp_path / "final")
    again = type(ours.model)(str(tmp_path / "final"), device="cpu")
    assert (again.encode(["w1 w2"]) == theirs.model.encode(["w1 w2"])).all()


def test_sentences_of_several_lengths_differ_by_rounding(sentences, tmp_path):
    rows = {**columns(*SCORES, uneven=True), **SCORED}
    (theirs, expected), (ours, found) = both(
        lambda folder: sentences(folder, rows, "CosineSimilarityLoss"), tmp_path, micro_batch_size=4
    )
    close_weights(found, expected)
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-4)


REFUSED_SENTENCES = {
    "SoftmaxLoss has classifier.weight, which learns and is not the model's": {"loss": "SoftmaxLoss"},
    "expected one data set with one loss; found several": {"one": False},
    "an evaluator runs the whole model, which is empty during training": {"evaluator": [lambda *_, **__: {"one": 1.0}]},
    "learning_rate_mapping is not taken": {"learning_rate_mapping": {"0.*": 1e-3}},
}


@pytest.mark.parametrize("words", REFUSED_SENTENCES)
def test_what_sentence_transformers_cannot_have_is_refused(words, sentences, tmp_path):
    options = {"loss": "CosineSimilarityLoss", **REFUSED_SENTENCES[words]}
    trainer = sentences(tmp_path, {**columns(*SCORES), **SCORED}, **options)
    with pytest.raises(OptionError, match=f"under_limit: {re.escape(words)}"):
        under_limit(trainer, **STREAMED)


# --- TRL ------------------------------------------------------------------------------------------------------------------


def test_the_model_learns_the_tokenizer_s_special_tokens(tokenizer, tmp_path):
    """Its configuration kept its own padding token: a classifier looked at another token, and all weights differed."""
    found = []
    for whose, kind in (("theirs", transformers.Trainer), ("ours", Trainer)):
        torch.manual_seed(0)
        shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 2}
        config = transformers.LlamaConfig(vocab_size=len(tokenizer), pad_token_id=7, max_position_embeddings=16, **shape)
        model = transformers.LlamaForSequenceClassification(config)
        texts = [f"w1 w{n}" + " w3" * (n % 3) for n in range(12)]
        rows = [{**tokenizer(text, padding="max_length", max_length=8), "labels": n % 2} for n, text in enumerate(texts)]
        args = arguments(tmp_path / whose, num_train_epochs=1, per_device_train_batch_size=4)
        own = {} if whose == "theirs" else {"method": "full"}
        kind(model, args, train_dataset=rows, processing_class=tokenizer, **own).train()
        found.append((model.config.pad_token_id, dict(model.state_dict())))
    assert found[0][0] == found[1][0] == tokenizer.pad_token_id != 7
    same_weights(found[1][1], found[0][1])


@pytest.fixture
def tuning(tokenizer):
    """Makes an SFTTrainer."""
    trl = pytest.importorskip("trl", reason="pip install trl")
    datasets = pytest.importorskip("datasets", reason="pip install datasets")

    def make(folder, rows, peft_config=None, **options):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=WORDS + 6, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            intermediate_size=24, pad_token_id=0, eos_token_id=2, bos_token_id=None,
        )  # fmt: skip
        args = trl.SFTConfig(
            output_dir=str(folder), num_train_epochs=2, per_device_train_batch_size=8, use_cpu=True, disable_tqdm=True,
            learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to="none", eval_strategy="epoch", bf16=False,
            **options,
        )  # fmt: skip
        data = datasets.Dataset.from_dict(rows)
        return trl.SFTTrainer(
            transformers.LlamaForCausalLM(config), args, train_dataset=data, eval_dataset=data, processing_class=tokenizer,
            peft_config=peft_config,
        )  # fmt: skip

    return make


def same_but_for_measures(ours, theirs):
    """TRL logs measures of tokens too; its loss of an evaluation is a mean over batches, with few tokens or many."""
    for one, other in zip(history(ours), history(theirs), strict=True):
        kept = {name: value for name, value in other.items() if not name.endswith(MEASURES)}
        assert one == {name: pytest.approx(value, rel=1e-2 if name == "eval_loss" else 1e-4) for name, value in kept.items()}


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["text"], {}),
        (["prompt", "completion"], {}),
        (["text"], {"packing": True, "packing_strategy": "wrapped", "max_length": 8}),
    ],
    ids=["texts", "completions", "packed"],
)
def test_fine_tuning_of_trl_differs_by_the_rounding_of_its_loss(tuning, names, options, tmp_path):
    """Which is computed from the last layer's weight, in chunks of tokens."""
    rows = columns(*names, uneven=True)
    (theirs, expected), (ours, found) = both(lambda folder: tuning(folder, rows, **options), tmp_path)
    close_weights(found, expected)
    same_but_for_measures(ours, theirs)


def test_smoothed_labels_of_trl_leave_the_same_weights(tuning, tmp_path):
    rows = columns("text")
    (_, expected), (_, found) = both(lambda folder: tuning(folder, rows, label_smoothing_factor=0.1), tmp_path)
    same_weights(found, expected)


def test_an_adapter_of_trl_is_trained(tuning, tmp_path):
    peft = pytest.importorskip("peft", reason="pip install peft")
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    rows = columns("text")
    (_, expected), (ours, found) = both(lambda folder: tuning(folder, rows, adapter), tmp_path)
    close_weights(found, expected)
    ours.save_model(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss_type": "dft"}, "loss_type dft"),
        ({"packing": True}, "padding_free"),
        ({"padding_free": True, "max_length": None}, "padding_free"),
    ],
    ids=["dft", "packed", "without padding"],
)
def test_what_fine_tuning_of_trl_cannot_have_is_refused(options, words, tuning, tmp_path):
    with pytest.raises(OptionError, match=f"under_limit: .*{words}"):
        under_limit(tuning(tmp_path, columns("text"), **options), **STREAMED)


# --- classes of one's own -------------------------------------------------------------------------------------------------


def test_a_trainer_of_transformers_itself_leaves_the_same_weights_and_stays_usable(tmp_path):
    def make(folder):
        args = arguments(folder, num_train_epochs=2, eval_strategy="epoch")
        stop = [transformers.EarlyStoppingCallback(9)]
        args.metric_for_best_model, args.load_best_model_at_end, args.greater_is_better = "loss", True, False
        args.save_strategy = "epoch"
        return transformers.Trainer(
            little_model(), args, train_dataset=little_rows(), eval_dataset=little_rows(8, 1), callbacks=stop
        )

    (theirs, expected), (ours, found) = both(make, tmp_path)
    same_weights(found, expected)
    same_history(history(ours), history(theirs))
    other = arguments(tmp_path / "other")  # transformers' own reset the state of others
    assert other.num_train_epochs == 1


class Loading(transformers.Trainer):
    """Its rows come from a plain DataLoader, which accelerate has not prepared."""

    options: dict

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, collate_fn=self.data_collator, **self.options)


def loading(folder, options, **more):
    trainer = Loading(little_model(), arguments(folder, num_train_epochs=2, **more), train_dataset=little_rows(22))
    trainer.options = options
    return trainer


class Turning(Sampler):
    """Rows from the last to the first, and the other way round in later epochs, where somebody says which it is."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(22) if self.epoch else reversed(range(22)))

    def __len__(self):
        return 22


@pytest.mark.parametrize("sampler", [None, Turning(), [*range(20), 3, 3]], ids=["in order", "turning", "rows twice"])
@pytest.mark.parametrize("drops", [False, True], ids=["all", "drop_last"])
def test_a_plain_loader_gives_its_rows_as_it_does_to_transformers(sampler, drops, tmp_path):
    """It has no set_epoch, which was called: AttributeError. transformers calls it where there is one."""
    options = {"batch_size": 8, "sampler": sampler, "drop_last": drops}
    (theirs, expected), (ours, found) = both(lambda at: loading(at, options, dataloader_drop_last=drops), tmp_path)
    same_weights(found, expected)
    same_history(history(ours), history(theirs))


REFUSED_LOADERS = {
    "expected 22 rows in batches of 8, .* gives 22 rows or more, in batches of 6": {"batch_size": 6},
    "gives 16 rows or more, in batches of 8": {"batch_size": 8, "drop_last": True},
    "gives 32 rows or more, in batches of 8": {"batch_size": 8, "sampler": [*range(22), *range(22)]},
    "gives 7 rows or more, in batches of 7": {"batch_size": 8, "sampler": range(7)},
    "the loader has batch_size=None, and its items are no rows": {"batch_size": None},
    "random numbers that go on from epoch to epoch": {"batch_size": 8, "shuffle": True},
    "random numbers that go on from epoch": {"batch_size": 8, "shuffle": True, "generator": torch.Generator()},
}


@pytest.mark.parametrize("words", REFUSED_LOADERS)
def test_a_plain_loader_that_the_arguments_contradict_or_that_draws_is_refused(words, tmp_path):
    """More rows than the data set has were cut off in silence."""
    with pytest.raises(DataError, match=f"train_dataset: .*{words}"):
        under_limit(loading(tmp_path, REFUSED_LOADERS[words]), **STREAMED).train()


def test_what_is_set_on_a_trainer_under_a_limit_holds(tmp_path):
    """Its loader of rows was that of the first arguments."""

    def made(folder, rows, **options):
        return transformers.Trainer(little_model(), arguments(folder, **options), train_dataset=rows)

    def collated(items):
        tokens = torch.stack([item["input_ids"] for item in items])
        return {"input_ids": tokens.flip(1), "labels": torch.tensor([item["label"] for item in items])}

    theirs = made(tmp_path / "theirs", little_rows(16), per_device_train_batch_size=4, learning_rate=1e-3)
    theirs.data_collator = collated
    theirs.train()
    ours = under_limit(made(tmp_path / "ours", little_rows()), method="full", mem_limit="3GB")
    ours.args.per_device_train_batch_size, ours.args.learning_rate = 4, 1e-3
    ours.train_dataset, ours.data_collator = little_rows(16), collated
    ours.train()
    assert ours.state.global_step == 4
    same_weights(ours.model.state_dict(), theirs.model.state_dict())
    ours.model = little_model()
    with pytest.raises(OptionError, match="under_limit: the model is another one now"):
        ours.train()


def test_rows_of_transformers_own_that_are_grouped_by_length_are_taken_in_another_order(tmp_path):
    """Theirs is drawn from the process's random numbers; docs/huggingface.md lists the difference."""
    args = arguments(tmp_path, train_sampling_strategy="group_by_length")
    trainer = transformers.Trainer(little_model(), args, train_dataset=little_rows())
    assert under_limit(trainer, **STREAMED).train().global_step == 3


class Stepping(transformers.Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs, num_items_in_batch)


def test_a_class_with_a_method_that_nobody_calls_and_what_is_no_trainer_are_refused(tmp_path):
    trainer = Stepping(little_model(), arguments(tmp_path), train_dataset=little_rows())
    with pytest.raises(OptionError, match="under_limit: Stepping has training_step of its own, which nobody calls here"):
        under_limit(trainer, **STREAMED)
    with pytest.raises(OptionError, match="expected an instance of transformers' Trainer; found BertForSequenceClassification"):
        under_limit(trainer.model, **STREAMED)


def test_a_trainer_that_was_made_before_another_one_of_ours_can_still_train(tmp_path):
    """Ours compared arguments with new ones, which reset accelerate's state."""
    first = transformers.Trainer(little_model(), arguments(tmp_path / "first", max_steps=1), train_dataset=little_rows())
    second = transformers.Trainer(little_model(), first.args, train_dataset=little_rows())
    under_limit(second, **STREAMED)
    assert first.train().global_step == 1
