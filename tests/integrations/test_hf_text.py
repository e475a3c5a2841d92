"""A text as tokens of a tokenizer's directory, and data sets of Hugging Face: rows like any others."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqpart import Trainer
from seqpart.data.splits import as_split, write_rows
from seqpart.errors import DataError, OptionError
from seqpart.zoo import tokenized
from tests.command import call

tokenizers = pytest.importorskip("tokenizers", reason="a tokenizer needs the extra hf")

WORDS = "".join(f"Line {number} of a text, in which {'very ' * (number % 7)}little happens.\n" for number in range(400))

pytestmark = pytest.mark.usefixtures("known_machine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level tokenizer of 300 tokens, as save_pretrained leaves it."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([WORDS], tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    made.decoder = tokenizers.decoders.ByteLevel()
    made.enable_truncation(7)  # what a tokenizer was saved with is not for texts
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    return folder


def whole(folder, words):
    own = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    own.no_truncation()
    return own.encode(words, add_special_tokens=False).ids, own


def rows_of(split):
    found = []
    write_rows(as_split(split, "some"), found.append)
    return torch.cat(found)


@settings(max_examples=20)
@given(lines=st.lists(st.text("abc de\u00e9\U0001f600", max_size=30), min_size=5, max_size=60), context=st.integers(1, 9))
def test_rows_are_windows_of_the_tokens_and_labels_the_same_one_token_later(folder, tmp_path_factory, lines, context):
    path = tmp_path_factory.getbasetemp() / "any.txt"
    words = "".join(line + "x\n" for line in lines)
    path.write_bytes(words.encode())
    tokens, _ = whole(folder, words)
    if len(tokens) <= 10 * context:
        with pytest.raises(DataError, match=f"{len(tokens)} tokens are too few for rows of {context}"):
            tokenized.load(path, folder, context)
        return
    cut = len(tokens) * 9 // 10
    for split, own in zip(tokenized.load(path, folder, context), (tokens[:cut], tokens[cut:]), strict=True):
        count = (len(own) - 1) // context
        assert (split.count, split.shape, split.dtype) == (count, (context,), torch.int64)
        assert rows_of(split).flatten().tolist() == own[: count * context]
        assert split.labels.flatten().tolist() == own[1 : count * context + 1]


def test_a_text_of_many_pieces_comes_back_whole(folder, tmp_path):
    path = tmp_path / "long.txt"
    words = WORDS * 12 + "no end to this line" * 10
    path.write_bytes(words.encode())
    tokens = tokenized._tokens(path, tokenized.tokenizer(folder))
    assert len(words) > 3 << 16 and tokens.dtype == torch.int16
    assert whole(folder, words)[1].decode(tokens.tolist()) == words


def test_what_transformers_reads_gives_the_same_tokens(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")).save_pretrained(tmp_path)
    assert tokenized._of_transformers(tmp_path)(WORDS[:500]) == whole(folder, WORDS[:500])[0]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text(WORDS)
    return path


def test_the_command_trains_on_it(folder, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ran = call(
        capsys, "--data", f"hf-text:{text}", "--tokenizer", folder, "--context", 16, "--model", "gpt", "--width", 16,
        "--depth", 1, "--heads", 2, "--method", "full", "--epochs", 1, "--mem-limit", "2GB",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "test accuracy" in ran.out


REFUSED = {
    "needs --tokenizer DIR, a directory with tokenizer.json, or --model hf:DIR": ["--data", "hf-text:{text}"],
    "--tokenizer {text}: no such directory": ["--data", "hf-text:{text}", "--tokenizer", "{text}"],
    "--tokenizer goes with --data hf-text:FILE; found --data digits": ["--tokenizer", "{folder}"],
    "hf-text:nowhere.txt: no such file": ["--data", "hf-text:nowhere.txt", "--tokenizer", "{folder}"],
    "--context goes with --data text:FILE or hf-text:FILE": ["--context", "8"],
    "tokens are too few for rows of 100000": ["--data", "hf-text:{text}", "--tokenizer", "{folder}", "--context", "100000"],
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_missing_is_named(words, folder, text, capsys):
    here = {"text": text, "folder": folder}
    arguments = [argument.format(**here) for argument in REFUSED[words]]
    ran = call(capsys, "--dry-run", "--mem-limit", "2GB", "--method", "full", *arguments)
    assert ran.code == 2 and words.format(**here) in " ".join(ran.err.split())


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(OptionError, match="no tokenizer can be read there"):
        tokenized.tokenizer(tmp_path)


def test_a_missing_library_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(OptionError, match=r'tokenizers is missing: pip install "seqpart\[hf\]"'):
        tokenized.tokenizer(folder)


# --- data sets of Hugging Face ---------------------------------------------------------------------------------------


def table(count=24):
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 11, (count, 6))
    return {"input_ids": ids.tolist(), "attention_mask": np.ones_like(ids).tolist(), "labels": (ids[:, 0] % 3).tolist()}


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_a_data_set_of_hugging_face_is_one_like_any_other(form, tmp_path):
    hugging_face = pytest.importorskip("datasets", reason="pip install datasets")
    made = hugging_face.Dataset.from_dict(table())
    if form is not None:
        made.set_format(form)
    split = as_split(made, "training")
    assert [one.name for one in split.form] == ["input_ids", "attention_mask"]
    assert split.labels.tolist() == table()["labels"]
    expected = table()
    pair = ({name: torch.tensor(expected[name]) for name in ("input_ids", "attention_mask")}, torch.tensor(expected["labels"]))
    assert torch.equal(rows_of(split), rows_of(as_split(pair, "training")))


def test_columns_without_the_rows_form_train_and_label_is_taken_for_labels(tmp_path):
    class Pooled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.last = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 3)

        def forward(self, input_ids, attention_mask):
            return self.last((self.embedding(input_ids) * attention_mask.unsqueeze(-1)).mean(1))

    columns = table()
    columns["label"] = columns.pop("labels")
    items = [{name: column[row] for name, column in columns.items()} for row in range(24)]
    trainer = Trainer(Pooled(), mem_limit="2GB", method="streamed", epochs=1, quiet=True, output_dir=tmp_path)
    assert trainer.fit(items, items).accuracy is not None
