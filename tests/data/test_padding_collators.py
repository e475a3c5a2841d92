"""transformers' collators in a DataLoader, whose batches are padded on: the bits of a plain loop that pads to that length."""

import pytest
import torch
from torch.utils.data import DataLoader

from seqpart import Padding, Trainer

transformers = pytest.importorskip("transformers", reason="collators need the extra hf")
tokenizers = pytest.importorskip("tokenizers", reason="a tokenizer needs the extra hf")
from tests.hugging_face import little_model  # noqa: E402

ROWS, BATCH, LONGEST, LONG = 12, 4, 7, 10
WORDS = "abcdefghijklmnopqrst"


def tokenizer():
    """Pads from the left, with 1."""
    known = {"[UNK]": 0, "[PAD]": 1} | {word: 2 + number for number, word in enumerate(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", padding_side="left")


def rows(labels=True):
    """Of 2 to 7 tokens, as `datasets` gives them."""
    texts = [" ".join(WORDS[number % 9 :][: 2 + number % 6]) for number in range(ROWS)]
    return [{**tokenizer()(text), **({"label": number % 3} if labels else {})} for number, text in enumerate(texts)]


def little_llama():
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, use_cache=False,
        max_position_embeddings=16, pad_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def classifying(length=None):
    how = {"padding": "max_length", "max_length": length} if length else {}
    return transformers.DataCollatorWithPadding(tokenizer(), **how)


def modelling(length=None):
    """To a length by a batch that has a row of it."""
    collate = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    if not length:
        return collate
    longest = {"input_ids": [2] * length, "attention_mask": [1] * length}
    return lambda items: {name: part[:-1] for name, part in collate([*items, longest]).items()}


KINDS = {"classes": (little_model, classifying, True), "language": (little_llama, modelling, False)}


@pytest.mark.parametrize(("padding", "length"), [(Padding(LONG), LONG), (Padding("longest"), LONGEST)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(1)
def test_a_model_of_transformers_trains_on_what_its_collator_pads(kind, padding, length, tmp_path):
    made, collate, labels = KINDS[kind]
    items = rows(labels)
    trainer = Trainer(
        made(), "model", "sgd", mem_limit="2GB", method="full", lr=0.1, epochs=1, quiet=True, output_dir=tmp_path / "run",
        padding=padding,
    )  # fmt: skip
    found = trainer.fit(DataLoader(items, batch_size=BATCH, collate_fn=collate())).state_dict()
    model = made().train()
    step = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for batch in DataLoader(items, batch_size=BATCH, collate_fn=collate(length)):
        assert batch["input_ids"].shape[1] == length
        model(**batch).loss.backward()
        step.step()
        step.zero_grad(set_to_none=True)
    expected = model.state_dict()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
