"""Models that take several tensors, by name or in order: rows are kept as bytes, and are taken apart in the first block."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from seqpart import Trainer
from seqpart.capture.inputs import form_of, nbytes_of, packed, unpacked
from seqpart.data.splits import as_split
from seqpart.errors import DataError, ModelError, OptionError
from seqpart.verify.verification import verify

ROWS, POSITIONS, WIDTH, WORDS, CLASSES = 22, 6, 12, 20, 3
TYPES = [torch.float32, torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8, torch.bool, torch.bfloat16]


class Reader(nn.Module):
    """Words under a mask, and quantities that come in at the end."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH + 2, CLASSES)

    def forward(self, ids, mask, quantities):
        hidden = self.embedding(ids) * mask.unsqueeze(-1)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden)) * mask.unsqueeze(-1)
        return self.head(torch.cat([hidden.mean(1), quantities], 1))


def made():
    torch.manual_seed(1)
    return Reader()


def data():
    torch.manual_seed(2)
    x = {
        "ids": torch.randint(WORDS, (ROWS, POSITIONS)), "mask": torch.rand(ROWS, POSITIONS) < 0.7,
        "quantities": torch.randn(ROWS, 2, dtype=torch.float64),
    }  # fmt: skip
    return x, torch.arange(ROWS) % CLASSES


def in_order(x):
    return x["ids"], x["mask"], x["quantities"]


class Items(list):
    """A data set of dicts with their labels, as those of Hugging Face are."""

    def __init__(self, x, y):
        super().__init__({name: part[i] for name, part in x.items()} | {"labels": int(y[i])} for i in range(len(y)))


def trainer(folder, model, **options):
    options = {"mem_limit": "3GB", "method": "streamed", "epochs": 2, "batch_size": 8, "lr": 1e-2, "partitions": 3, **options}
    return Trainer(model, output_dir=folder / "run", quiet=True, shuffle=False, **options)


def plain(x, y):
    model = made()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    x = {name: part.float() if part.is_floating_point() else part for name, part in x.items()}
    for _ in range(2):
        for rows in torch.arange(ROWS).split(8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(**{name: part[rows] for name, part in x.items()}), y[rows]).backward()
            optimizer.step()
    return model


@given(
    st.lists(st.tuples(st.sampled_from(TYPES), st.lists(st.integers(1, 4), max_size=3)), min_size=1, max_size=5), st.booleans()
)
def test_rows_of_bytes_are_the_tensors_that_they_were_made_of(parts, named):
    torch.manual_seed(0)
    tensors = [(20 * torch.rand(5, *shape)).to(dtype) for dtype, shape in parts]
    x = {f"input {n}": tensor for n, tensor in enumerate(tensors)} if named else tuple(tensors)
    form = form_of(x, "the", whole=True)
    rows = packed(x, form, "the")
    assert rows.shape == (5, nbytes_of(form)) and rows.dtype == torch.uint8
    for some in (slice(None), slice(1, 4)):
        args, kwargs = unpacked(rows[some], form)
        assert list(kwargs) == (list(x) if named else [])
        for found, tensor in zip([*args, *kwargs.values()], tensors, strict=True):
            assert torch.equal(found, tensor[some].float() if tensor.is_floating_point() else tensor[some])


@pytest.mark.parametrize("kind", ["dict", "tuple", "items"])
@pytest.mark.few(1)
def test_a_model_of_several_inputs_has_the_bits_of_a_plain_loop(kind, tmp_path):
    x, y = data()
    rows = {"dict": (x, y), "tuple": (in_order(x), y), "items": Items(x, y)}[kind]
    model, expected = made(), plain(x, y)
    run = trainer(tmp_path, model)
    result = run.fit(rows, rows)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert run.evaluate(rows).loss == pytest.approx(result.test_loss, rel=1e-6)


@pytest.mark.slow
def test_a_model_of_several_inputs_is_verified(tmp_path):
    found = verify(made(), data(), mem_limit="3GB", batch_size=8, partitions=3, offload_dir=tmp_path / "scratch")
    assert found.tensors > 20


def test_a_run_goes_on_with_the_same_inputs_and_no_others(tmp_path):
    (x, y), seen = data(), []

    class Enough(Exception):
        pass

    def end(*_):
        seen.append(1)
        if len(seen) > 8:
            raise Enough

    with pytest.raises(Enough):
        trainer(tmp_path, made(), save_every=2).fit((x, y), (x, y), before_update=end)
    other = {"ids": x["ids"], "mask": x["mask"].to(torch.int8), "quantities": x["quantities"]}
    with pytest.raises(OptionError, match="trained on other data"):
        trainer(tmp_path, made(), save_every=2).fit((other, y), (other, y), resume=tmp_path / "run")
    model = made()
    trainer(tmp_path, model, save_every=2).fit((x, y), (x, y), resume=tmp_path / "run")
    for name, tensor in plain(x, y).state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_a_row_that_is_a_list_of_numbers_is_one_tensor():
    split = as_split([([np.float64(i), np.float64(1)], i % 2) for i in range(6)], "training")
    assert split.form == () and split.shape == (2,)


# --- what is refused --------------------------------------------------------------------------------------------------


def changed(**parts):
    x, y = data()
    return {**x, **parts}, y


def spoilt():
    quantities = torch.zeros(ROWS, 2)
    quantities[7, 1] = float("nan")
    return changed(quantities=quantities)


def uneven():
    items = Items(*data())
    items[9] = {**items[9], "ids": torch.zeros(POSITIONS + 1, dtype=torch.int64)}
    return items


def lacking():
    items = Items(*data())
    del items[9]["mask"]
    return items


def without_labels():
    items = Items(*data())
    return [{name: part for name, part in item.items() if name != "labels"} for item in items]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (lambda: changed(mask=torch.ones(ROWS - 1, POSITIONS)), f"{ROWS - 1} rows of x and {ROWS} labels"),
        (lambda: changed(mask=torch.ones(ROWS, 0)), "mask has rows of shape"),
        (spoilt, "NaN or infinity in quantities"),
        (uneven, "item 9: row shapes differ: ids has"),
        (lacking, "item 9: expected the inputs ids"),
        (without_labels, "item 0: expected a dict with labels beside the inputs .*; found ids, mask"),
        (lambda: ({}, data()[1]), "a row has no inputs"),
    ],
    ids=["length", "empty", "nan", "shapes", "names", "labels", "none"],
)
def test_inputs_that_do_not_belong_together_are_refused_in_words(rows, words, tmp_path):
    with pytest.raises(DataError, match=words):
        trainer(tmp_path, made()).fit(rows(), data())
    assert not (tmp_path / "run").exists() or not (tmp_path / "run" / "model.safetensors").exists()


def test_test_rows_have_the_inputs_of_training_rows(tmp_path):
    x, y = data()
    with pytest.raises(
        DataError, match=r"training rows have the inputs ids \(6,\) int64, mask \(6,\) bool, .*and test rows ids"
    ):
        trainer(tmp_path, made()).fit((x, y), ({"ids": x["ids"], "mask": x["mask"]}, y))


def test_a_model_that_does_not_take_the_inputs_and_a_list_of_blocks_are_refused(tmp_path):
    (x, y), blocks = data(), [nn.Linear(2, 3), nn.Linear(3, 3)]
    with pytest.raises(DataError, match=r"expected the inputs that .* takes .*; found .* unexpected keyword argument 'others'"):
        trainer(tmp_path, made()).fit(({**x, "others": x["mask"]}, y), ({**x, "others": x["mask"]}, y))
    with pytest.raises(ModelError, match="a list of blocks takes one tensor, and a row has a dict of ids"):
        trainer(tmp_path, blocks).fit((x, y), (x, y))
