"""Packed rows hold every token once, and a model sees each text as if it were alone."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from seqpart import Trainer, packed
from seqpart.errors import DataError, OptionError

LENGTHS = (5, 9, 2, 16, 1, 7, 7, 3, 11, 4)


def texts(lengths=LENGTHS):
    numbers = torch.Generator().manual_seed(0)
    return [torch.randint(1, 64, (length,), generator=numbers) for length in lengths]


def apart(x, y):
    """{text: its labels}, taken out of packed rows by their positions."""
    found = []
    for ids, positions, labels in zip(x["input_ids"].tolist(), x["position_ids"].tolist(), y.tolist(), strict=True):
        starts = [place for place, position in enumerate(positions) if position == 0]
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            found.append((ids[start:end], labels[start:end]))
    return found


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=30), shifted=st.booleans())
def test_every_text_is_there_once_with_its_labels(lengths, shifted):
    given = [list(range(1 + 100 * number, 1 + 100 * number + length)) for number, length in enumerate(lengths)]
    x, y = packed(given, 12, shifted=shifted)
    found = {ids[0]: (ids, labels) for ids, labels in apart(x, y) if ids[0]}
    assert len(found) == len(given)
    for text in given:
        labels = [*text[1:], -100] if shifted else [-100, *text[1:]]
        assert found[text[0]] == (text, labels)
    padding = [labels for ids, labels in apart(x, y) if not ids[0]]
    assert all(set(labels) == {-100} for labels in padding)
    assert x["input_ids"].count_nonzero() == sum(lengths)
    assert len(y) <= max(1, 2 * sum(lengths) // 12 + 1), "two rows that are half empty would be one"


def test_labels_of_a_prompt_do_not_count():
    x, y = packed([{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}, [5, 6]], 8)
    assert x["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 0, 0]]
    assert x["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 0, 1]]
    assert y.tolist() == [[-100, 3, 4, -100, 6, -100, -100, -100]]


@pytest.mark.parametrize(
    "rows, words",
    [
        ([[1, 2], list(range(9))], "row 1 has 9 tokens, and packed rows have 8"),
        ([[1.5, 2.0]], "row 0: expected tokens, whole numbers"),
        ([[[1, 2]]], r"row 0: .* found tokens of shape \(1, 2\)"),
        ([[1], []], "row 1: expected tokens"),
        ([{"input_ids": [1, 2], "labels": [1]}], "as many labels"),
        ([{"input_ids": [1, 2], "labels": [0.5, 1.7]}], r"labels of shape \(2,\) \(torch.float32\)"),
        ([torch.ones(2, dtype=torch.complex64)], "row 0: expected tokens, whole numbers"),
        ([[True, False]], "row 0: expected tokens, whole numbers"),
        ([{"tokens": [1]}], "expected input_ids; found tokens"),
        ([["a"]], "row 0: expected whole numbers"),
        ([{"input_ids": [1, 2]}, {"input_ids": [1, 0], "attention_mask": [1, 0]}], r"row 1: .* \(attention_mask of zeros\)"),
        ([], "at least one row"),
    ],
)
def test_what_cannot_be_packed_is_refused_with_its_place(rows, words):
    with pytest.raises(DataError, match=words):
        packed(rows, 8)


@pytest.mark.parametrize("options", [{"length": 0}, {"length": 8.0}, {"length": "8"}, {"length": 8, "token": 1.5}], ids=str)
def test_a_length_or_token_that_is_none_is_refused(options):
    with pytest.raises(OptionError, match="expected a length of at least 1 and a token, whole numbers; found"):
        packed([[1]], **options)


def llama(kind="Llama", implementation="sdpa"):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = implementation
    return getattr(transformers, f"{kind}ForCausalLM")(config)


@pytest.mark.parametrize(
    "kind, implementation", [("Llama", "sdpa"), ("Llama", "eager"), ("Qwen3", "sdpa"), ("Mistral", "sdpa")]
)
def test_loss_and_gradients_are_those_of_the_texts_one_by_one(kind, implementation):
    one, other = llama(kind, implementation), llama(kind, implementation)
    x, y = packed(texts(), 16)
    packed_loss = F.cross_entropy(one(**x).logits.flatten(0, 1), y.flatten(), reduction="sum")
    losses = [
        F.cross_entropy(other(input_ids=text[None]).logits[0, :-1], text[1:], reduction="sum")
        for text in texts()
        if len(text) > 1
    ]
    assert torch.allclose(packed_loss, sum(losses), rtol=1e-5)
    packed_loss.backward()
    sum(losses).backward()
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-4, rtol=1e-4), name


@pytest.mark.parametrize("loss", [None, "model"])
def test_streamed_packed_rows_have_the_bits_of_a_plain_loop_without_a_cache(tmp_path, loss):
    model, plain = llama(), llama()
    model.config.use_cache = True  # as configurations have it
    x, y = packed(texts(), 16, shifted=loss is None)
    Trainer(
        model, method="streamed", partitions=3, mem_limit="2GB", batch_size=2, epochs=2, lr=1e-2, shuffle=False, quiet=True,
        loss=loss, output_dir=tmp_path / "run",
    ).fit((x, y))  # fmt: skip
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    for _ in range(2):
        for at in range(0, len(y), 2):
            optimizer.zero_grad()
            rows = {name: tensor[at : at + 2] for name, tensor in x.items()}
            if loss is None:
                F.cross_entropy(plain(**rows).logits.flatten(0, 1), y[at : at + 2].flatten()).backward()
            else:
                plain(**rows, labels=y[at : at + 2]).loss.backward()
            optimizer.step()
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b), name
