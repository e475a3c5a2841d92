"""Models of transformers that make their decoder's inputs of labels train on the labels alone, as in a plain loop."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader

from seqpart import Trainer
from seqpart.data.decoder_inputs import with_decoder_inputs
from tests.choice import in_turn

transformers = pytest.importorskip("transformers")

TOKENS, LABELS = torch.randint(1, 50, (12, 9)), torch.randint(1, 50, (12, 6))
LABELS[3, 4:] = -100
LAYERS = {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in {"layers": 1, "attention_heads": 2, "ffn_dim": 32}.items()
}


def t5():
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 50, "dropout_rate": 0.0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(decoder_start_token_id=0, **sizes))


def bart():
    return transformers.BartForConditionalGeneration(transformers.BartConfig(vocab_size=50, d_model=16, dropout=0.0, **LAYERS))


def whisper():
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    sizes = {"vocab_size": 50, "d_model": 16, "num_mel_bins": 8, "max_source_positions": 10, "dropout": 0.0, **ends}
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes, **LAYERS))


MODELS = {"t5": (t5, TOKENS), "bart": (bart, TOKENS), "whisper": (whisper, torch.randn(12, 8, 20))}
FORMS = {
    "pair": lambda name, x: (x, LABELS),
    "dict and labels": lambda name, x: ({name: x}, LABELS),
    "items": lambda name, x: [{name: one, "labels": label.tolist()} for one, label in zip(x, LABELS, strict=True)],
    "loader": lambda name, x: DataLoader(FORMS["items"](name, x), batch_size=4, collate_fn=transformers.default_data_collator),
    "session": None,
}


def plain(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for at in (0, 4, 8):
        optimizer.zero_grad()
        model.train()(x[at : at + 4], labels=LABELS[at : at + 4]).loss.backward()
        optimizer.step()
    return model


@pytest.mark.few(5)
@pytest.mark.parametrize(("kind", "form"), in_turn([*MODELS], [*FORMS]))
def test_they_train_as_in_a_plain_loop(kind, form, tmp_path):
    """They were refused where the data had no decoder_input_ids, which collators without the model do not make."""
    torch.manual_seed(0)
    make, x = MODELS[kind]
    model = make()
    expected = plain(copy.deepcopy(model), x).state_dict()
    options = {"method": "streamed", "batch_size": 4, "micro_batch_size": 4, "quiet": True, "mem_limit": "2GB"}
    name = model.main_input_name
    if form == "session":
        made = Trainer(model, "model", lambda parameters: torch.optim.SGD(parameters, lr=0.1), **options)
        with made.session({name: x[:4], "labels": LABELS[:4]}) as session:
            for at in (0, 4, 8):
                session.step({name: x[at : at + 4], "labels": LABELS[at : at + 4]})
    else:
        options |= {"epochs": 1, "shuffle": False, "output_dir": tmp_path}
        made = Trainer(model, "model", lambda parameters: torch.optim.SGD(parameters, lr=0.1), **options)
        made.fit(FORMS[form](name, x))
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[key]), key


def test_predictions_see_the_labels_before_each_one_as_in_training():
    model = t5()
    expected = model.eval()(TOKENS, labels=LABELS).logits.detach()
    found = Trainer(model.train(), "model", mem_limit="2GB", method="full", batch_size=12, quiet=True).predict((TOKENS, LABELS))
    torch.testing.assert_close(found["logits"], expected)


def test_inputs_that_are_given_and_labels_of_classes_stay_as_they_are():
    sizes = {"vocab_size": 50, "d_model": 16, "num_labels": 3, **LAYERS}
    bart = transformers.BartForSequenceClassification(transformers.BartConfig(**sizes))
    mbart = transformers.MBartForSequenceClassification(transformers.MBartConfig(**sizes))
    for classifier, labels in ((bart, torch.arange(12) % 3), (mbart, torch.arange(12)[:, None] % 3)):
        classes = TOKENS, labels
        assert with_decoder_inputs(classes, classifier) is classes
    for given in ({"input_ids": TOKENS, "decoder_input_ids": TOKENS}, {"input_ids": TOKENS, "decoder_inputs_embeds": TOKENS}):
        rows = {**given, "labels": LABELS}
        assert with_decoder_inputs(rows, t5()) is rows
    sets = with_decoder_inputs({"one": (TOKENS, LABELS)}, t5())
    assert torch.equal(sets["one"][0]["decoder_input_ids"][:, 1:], LABELS.where(LABELS >= 0, 0)[:, :-1])


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_subclasses_and_adapted_models_make_them_too():
    class Own(transformers.WhisperForConditionalGeneration):
        pass

    batch = {"input_features": MODELS["whisper"][1], "labels": LABELS}
    assert "decoder_input_ids" in with_decoder_inputs(batch, Own(whisper().config))
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(t5(), peft.LoraConfig(target_modules=["q", "v"]))
    assert "decoder_input_ids" in with_decoder_inputs({"input_ids": TOKENS, "labels": LABELS}, adapted)
