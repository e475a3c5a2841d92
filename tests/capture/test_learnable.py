"""Whether a model can be trained at all: a frozen one was trained without a word, or ended in max() of an empty sequence; one
of float64 was told what it multiplies, or to be cut into blocks."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from seqpart import Trainer
from seqpart.errors import BadInput, ModelError, OptionError
from tests.choice import in_turn
from tests.command import call, refused

X, Y = torch.randn(24, 16, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv1d(1, 2, 3, padding=1), nn.Linear(32, 3)

    def forward(self, x):
        return self.head(self.conv(x.unsqueeze(1)).flatten(1))


def blocks():
    return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def trainer(model, **options):
    return Trainer(model, mem_limit="2GB", batch_size=8, quiet=True, **{"method": "auto", **options})


@pytest.mark.parametrize("options", [{"method": "full"}, {}, {"method": "sil", "partitions": 2}], ids=str)
def test_a_model_in_which_nothing_learns_is_refused(options):
    for model in (blocks(), Whole()):
        weights = sum(tensor.numel() for tensor in model.parameters())
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(
            ModelError, match=rf"nothing learns: .*; found weights of {weights} numbers, all with requires_grad=False"
        ):
            trainer(model.requires_grad_(False), **options).fit((X, Y))
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_loop_of_ones_own_hears_it_too_and_a_model_without_weights_is_told_so():
    with pytest.raises(ModelError, match="nothing learns"), trainer(blocks().requires_grad_(False)).session((X[:8], Y[:8])):
        pass
    with pytest.raises(ModelError, match=r"nothing learns: .* found one without weights"):
        trainer(nn.Sequential(nn.ReLU())).plan((X, Y))


def test_a_frozen_model_is_evaluated_and_one_layer_that_learns_is_enough():
    model = blocks().requires_grad_(False)
    assert trainer(model).evaluate((X, Y)).loss > 0
    model[2].requires_grad_()
    assert trainer(model).plan((X, Y)).partitions


def test_the_command_refuses_it_too(tmp_path, monkeypatch, capsys):
    (tmp_path / "still.py").write_text(
        "from torch import nn\n\ndef made():\n    return nn.Sequential(nn.Linear(64, 10)).requires_grad_(False)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    ran = call(capsys, "--model", "still:made", "--mem-limit", "2GB", "--method", "auto")
    assert refused(ran, 2, "ModelError: nothing learns: ", "weights of 650 numbers, all with requires_grad=False")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.few(1)
def test_a_model_of_other_floats_than_its_rows_is_told_what_trains_it(dtype):
    """One of bfloat16 was told to be float32, and nothing of mixed precision."""
    said, mixed = str(dtype).removeprefix("torch."), {"dtype": "bf16"}
    cure = rf"give rows of {said} \(x\.to\({dtype}\)\), or model\.float\(\)"
    if dtype == torch.bfloat16:
        cure += ', or dtype="bf16", which casts rows as it computes'
    for model in (blocks(), Whole()):
        with pytest.raises(BadInput, match=f"Its weights are {said} and its input is float32: {cure}"):
            trainer(model.to(dtype)).plan((X.double(), Y))
        if dtype == torch.bfloat16:
            assert trainer(model, **mixed).plan((X.double(), Y)).partitions
        assert trainer(model.float(), **mixed).plan((X.double(), Y)).partitions
    assert trainer(Whole()).plan((X.double(), Y)).partitions, "rows of float64 become float32"


class Two(nn.Module):
    """Takes two inputs of its own type."""

    def __init__(self, dtype):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8, dtype=dtype), nn.Linear(3, 8, dtype=dtype)
        self.last = nn.Linear(8, 5, dtype=torch.float32 if dtype.is_complex else dtype)

    def forward(self, left, right):
        found = torch.tanh(self.first(left) + self.second(right))
        return self.last(found.abs() if found.is_complex() else found)


class One(Two):
    """Takes both in one tensor."""

    def forward(self, both):
        return super().forward(both[:, :4], both[:, 4:])


TYPES = [torch.float64, torch.bfloat16, torch.float16, torch.complex64]


@pytest.mark.parametrize(("given", "dtype"), in_turn(["pair", "items", "loader", "dict", "dicts"], TYPES), ids=str)
def test_rows_come_in_the_type_that_the_model_takes(given, dtype, tmp_path):
    """All floats became float32 but those of float64 in one tensor, and complex rows were refused."""
    torch.manual_seed(0)
    several, both = given.startswith("dict"), torch.randn(32, 7, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    both = both.to(dtype)
    model = (Two if several else One)(dtype)
    expected, named = copy.deepcopy(model), {"left": both[:, :4].contiguous(), "right": both[:, 4:].contiguous()}
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, fused=not dtype.is_complex)
    y = torch.arange(32) % 5
    for _ in range(2):
        for at in range(0, 32, 8):
            rows = slice(at, at + 8)
            output = expected(**{name: part[rows] for name, part in named.items()}) if several else expected(both[rows])
            nn.functional.cross_entropy(output, y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
    items = list(zip(both, y, strict=True))
    data = {
        "pair": (both, y), "items": items, "loader": DataLoader(items, batch_size=8), "dict": (named, y),
        "dicts": [{**{name: part[i] for name, part in named.items()}, "labels": y[i]} for i in range(32)],
    }[given]  # fmt: skip
    options = {"batch_size": 8, "micro_batch_size": 8, "epochs": 2, "lr": 0.1, "optimizer": "sgd"}
    if given != "loader":
        options["shuffle"] = False
    used = Trainer(model, mem_limit="2GB", method="streamed", quiet=True, output_dir=tmp_path / "run", **options)
    used.fit(data)
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("method", ["full", "streamed"])
def test_a_model_of_float64_takes_rows_of_float64(method, tmp_path):
    """It was told to give model.float(): rows had become float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(X.shape[1], 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    expected, rows = copy.deepcopy(model), X.double() + 1e-9
    optimizer = torch.optim.Adam(expected.parameters(), lr=1e-2, fused=True)
    for x, y in zip(rows.split(8), Y.split(8), strict=True):
        nn.functional.cross_entropy(expected(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    options = {"batch_size": 8, "micro_batch_size": 8, "epochs": 1, "lr": 1e-2, "shuffle": False, "optimizer": "adam"}
    used = Trainer(model, mem_limit="2GB", method=method, quiet=True, output_dir=tmp_path / "run", **options)
    found = used.fit((rows, Y), (rows, Y))
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert used.evaluate((rows, Y)).loss == found.test_loss
    assert found.test_loss == pytest.approx(nn.functional.cross_entropy(expected(rows), Y).item(), rel=1e-12)


@pytest.mark.parametrize("model_type", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("given", ["pair", "loader", "kept loader", "named tests", "test loader"])
@pytest.mark.few(4)
def test_labels_of_another_type_than_their_rows_come_in_the_models_from_every_kind_of_data(given, model_type, tmp_path):
    """Behind a loader float64 labels of a float64 model were rounded, and of a float32 model refused."""
    torch.manual_seed(0)
    model, x, y = (
        nn.Sequential(nn.Linear(7, 8), nn.Linear(8, 2)).to(model_type),
        torch.randn(32, 7),
        torch.randn(32, 2).double(),
    )
    x, y = (x, y) if model_type == torch.float64 else (x.double(), y.float())
    expected, right = copy.deepcopy(model), (x.to(model_type), y.to(model_type))
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for rows, labels in zip(*(part.split(8) for part in right), strict=True):
        nn.functional.mse_loss(expected(rows), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    loader = DataLoader(list(zip(x, y, strict=True)), batch_size=8)
    train = loader if "loader" in given else (x, y)
    test = {"named tests": {"a": (x, y), "b": (x.double(), y.double())}, "test loader": loader}.get(given, (x, y))
    options = {"cache": "rows"} if given == "kept loader" else {}
    if train is not loader:
        options["shuffle"] = False
    used = Trainer(
        model, nn.functional.mse_loss, mem_limit="2GB", method="streamed", batch_size=8, micro_batch_size=8, epochs=1, lr=0.1,
        optimizer="sgd", quiet=True, output_dir=tmp_path / "run", **options,
    )  # fmt: skip
    found = used.fit(train, test)
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        assert found.test_loss == pytest.approx(nn.functional.mse_loss(expected(right[0]), right[1]).item(), rel=1e-6)


def test_several_inputs_and_labels_of_other_types_come_in_one_by_one_and_without_test_rows(tmp_path):
    """A number beside a tensor that changes its type, in one row, and labels of no test rows ended in torch's own errors."""

    class Aged(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x, age):
            return self.linear(x) * age[:, None]

    def loss(output, labels):
        return ((output[:, 0] - labels["a"]) ** 2 + labels["b"]).mean()

    x = {"x": torch.randn(257, 4).double(), "age": torch.arange(257)}
    y = {"a": torch.randn(257).double(), "b": torch.randn(257)}
    items = [({name: part[i] for name, part in x.items()}, {name: part[i] for name, part in y.items()}) for i in range(5)]
    used = Trainer(Aged(), loss, mem_limit="2GB", method="full", batch_size=1, quiet=True, max_steps=3)
    assert used.fit(items).train_losses[0] > 0
    used = Trainer(Aged(), loss, mem_limit="2GB", method="full", batch_size=64, epochs=1, quiet=True)
    assert used.fit((x, y)).train_losses[0] > 0


def test_a_directory_to_go_on_from_that_is_not_there_is_named():
    """It was told to have nothing saved in the directory above it."""
    with pytest.raises(OptionError, match=r"^resume: nowhere does not exist. Give the directory of a run, or one of"):
        trainer(blocks()).fit((X, Y), resume="nowhere")
