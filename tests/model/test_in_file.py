"""`parameters_in_file`: a model that is initialized, and does not fit into memory."""

import copy
import errno
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model
from torch import nn

from seqpart import Trainer, parameters_in_file
from seqpart.device.usage import read_process
from seqpart.errors import DiskFull, ModelError
from seqpart.model.in_file import is_in_file
from tests import command

HOUSE = Path(__file__).parents[2]
WIDTH = 520
"""Its square in float32 is a little over 1 MiB, from which on parameters lie in the file."""


def network():
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 5))
    model[3].weight = model[0].weight
    return model


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, WIDTH, generator=generator), torch.arange(32) % 5


def in_file(folder):
    with parameters_in_file(folder):
        return network()


def same(one, other):
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == key and torch.equal(value, its) for (name, value), (key, its) in pairs)


def test_a_model_is_initialized_in_the_file_to_the_same_values(tmp_path):
    found = in_file(tmp_path)
    assert same(found, network())
    assert [is_in_file(parameter) for parameter in found.parameters() if parameter.ndim == 2] == [True] * 3 + [False]
    assert found[3].weight is found[0].weight and isinstance(found[0].weight, nn.Parameter)
    assert not list(tmp_path.iterdir()), "the file has no name"
    assert same(copy.deepcopy(found), found)


@pytest.mark.parametrize("method", ["full", "streamed"])
def test_training_has_the_same_bits_and_ends_in_the_file(method, tmp_path):
    def trained(model, name):
        options = {"mem_limit": "2GB", "method": method, "epochs": 2, "batch_size": 8, "quiet": True}
        for _ in range(2):
            result = Trainer(model, None, "adamw", output_dir=tmp_path / name, overwrite=True, **options).fit(data())
        return result

    found, expected = in_file(tmp_path), network()
    result = trained(found, "file")
    trained(expected, "memory")
    assert same(found, expected) and result.plan.live_bytes < 1 << 20
    assert [is_in_file(parameter) for parameter in found.parameters() if parameter.ndim == 2] == [True] * 3 + [False]
    assert found[3].weight is found[0].weight
    assert torch.equal(found.eval()(data()[0]), expected.eval()(data()[0]))


def test_a_run_that_ends_early_leaves_the_model_as_it_was(tmp_path):
    class Ends:
        def on_step(self, event):
            raise KeyError("enough")

    model = in_file(tmp_path)
    with pytest.raises(KeyError):
        Trainer(model, mem_limit="2GB", method="streamed", batch_size=8, quiet=True, output_dir=tmp_path / "run").fit(
            data(), callbacks=[Ends()]
        )
    assert same(model, network())


class Aliased(nn.Module):
    """Initializes the tensor that its parameter was made of, and ties a layer by `.data`."""

    def __init__(self):
        super().__init__()
        made = torch.empty(WIDTH, WIDTH)
        self.weight = nn.Parameter(made)
        nn.init.constant_(made, 3.0)
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other.weight = nn.Parameter(self.one.weight.data)
        nn.init.constant_(self.one.weight, 2.0)

    def forward(self, x):
        return self.other(self.one(x @ self.weight))


def test_a_parameter_does_not_lose_the_tensor_that_it_was_made_of(tmp_path):
    """It was moved away from it: values that came later were lost, and training began with zeros."""
    with parameters_in_file(tmp_path):
        found = Aliased()
    assert torch.equal(found.weight, torch.full((WIDTH, WIDTH), 3.0)) and not is_in_file(found.weight)
    assert torch.equal(found.other.weight, found.one.weight) and found.one.weight[0, 0] == 2
    assert found.other.weight.data_ptr() == found.one.weight.data_ptr()


def test_a_thousand_parameters_need_few_descriptors_and_any_file_format_takes_them(tmp_path):
    before = len([*Path("/proc/self/fd").iterdir()])
    with parameters_in_file(tmp_path):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(60)))
    assert len([*Path("/proc/self/fd").iterdir()]) <= before + 9
    save_model(model, str(tmp_path / "weights.safetensors"))
    assert sum(is_in_file(parameter) for parameter in model.parameters()) == 60


def test_contexts_that_end_in_another_order_leave_modules_as_they_were(tmp_path):
    before, (one, two) = nn.Module.register_parameter, [parameters_in_file(tmp_path) for _ in range(2)]
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert is_in_file(nn.Linear(WIDTH, WIDTH).weight)
    two.__exit__(None, None, None)
    assert nn.Module.register_parameter is before and not is_in_file(nn.Linear(WIDTH, WIDTH).weight)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_parameters_that_are_no_plain_ones_stay_in_memory(tmp_path):
    layer = nn.Module()
    with parameters_in_file(tmp_path):
        layer.weight = nn.Parameter(torch.eye(600).to_sparse_csr(), requires_grad=False)
    assert layer.weight.layout is torch.sparse_csr


def test_large_weights_take_no_memory(tmp_path):
    before = read_process().held
    with parameters_in_file(tmp_path):
        model = nn.Linear(5000, 5000)
    assert read_process().held - before < 20e6 and is_in_file(model.weight)


def test_a_full_disk_is_said_before_a_page_is_written(tmp_path, monkeypatch):
    """A mapping of a file without its blocks ends the process where the disk is full."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFull, match="the disk is full"):
        in_file(tmp_path)


def test_what_a_model_s_own_code_raises_is_left_as_it_is(tmp_path):
    with pytest.raises(FileNotFoundError), parameters_in_file(tmp_path):
        (tmp_path / "missing").read_text()
    with pytest.raises(ModelError), parameters_in_file(tmp_path):
        raise ModelError("no such model")


MODULE = """
import torch
from torch import nn

def model():
    return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(2500, 2500), nn.ReLU())], nn.Linear(2500, 5))

def data():
    return (torch.randn(16, 2500), torch.arange(16) % 5), (torch.randn(4, 2500), torch.arange(4) % 5)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits are those of Linux")
def test_the_command_trains_a_model_of_a_function_that_is_larger_than_its_limit_leaves(tmp_path):
    """200 MB of weights under a limit that leaves 100: they were all in memory when the run began and when it ended, so that it
    was refused."""
    (tmp_path / "mine.py").write_text(MODULE)
    words = "--model mine:model --data mine:data --mem-limit 380MB --method streamed --batch-size 8 --epochs 1 --optimizer sgd"
    done = command.run(tmp_path, *words.split(), "--output-dir", "run", PYTHONPATH=os.pathsep.join([str(HOUSE), "."]))
    assert done.code == 0 and "violations 0" in done.out, done.out + done.err
