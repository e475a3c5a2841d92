"""Whether a model can be trained at all: a frozen one was trained without a word, or ended in max() of an empty sequence; one
of float64 was told what it multiplies, or to be cut into blocks."""

import copy

import pytest
import torch
from torch import nn

from seqpart import Trainer
from seqpart.errors import BadInput, ModelError, OptionError
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
        with pytest.raises(ModelError, match=rf"nothing learns: .*; found {weights} weights, all with requires_grad=False"):
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
    assert refused(ran, 2, "ModelError: nothing learns: ", "650 weights, all with requires_grad=False")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.few(1)
def test_a_model_of_other_floats_than_its_rows_is_told_what_trains_it(dtype):
    """One of bfloat16 was told to be float32, and nothing of mixed precision."""
    said, cure = str(dtype).removeprefix("torch."), r"give model\.float\(\)"
    mixed = {"dtype": "bf16"}
    if dtype == torch.bfloat16:
        cure = r'give dtype="bf16", which casts rows as it computes, or model\.float\(\)'
    else:
        cure += ', and dtype="bf16"'
    for model in (blocks(), Whole()):
        with pytest.raises(BadInput, match=f"Its weights are {said} and its input is float32, .*: {cure}"):
            trainer(model.to(dtype)).plan((X.double(), Y))
        if dtype == torch.bfloat16:
            assert trainer(model, **mixed).plan((X.double(), Y)).partitions
        assert trainer(model.float(), **mixed).plan((X.double(), Y)).partitions
    assert trainer(Whole()).plan((X.double(), Y)).partitions, "rows of float64 become float32"


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


def test_a_directory_to_go_on_from_that_is_not_there_is_named():
    """It was told to have nothing saved in the directory above it."""
    with pytest.raises(OptionError, match=r"^resume: nowhere does not exist. Give the directory of a run, or one of"):
        trainer(blocks()).fit((X, Y), resume="nowhere")
