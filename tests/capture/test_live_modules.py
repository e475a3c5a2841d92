"""Modules given alive: empty while a run lasts, and what they were when it does not end well."""

import copy
import gc
import os
import re
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from seqpart import SeqpartError, Trainer, parameters_on_meta
from seqpart.device.usage import read_process
from seqpart.errors import ModelError, StoreError
from seqpart.model.blocks import Block, as_chain
from seqpart.model.live_modules import LiveModules
from seqpart.model.tensors import tensors_of
from seqpart.units import parse_size
from tests import given

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from watch import watch


class Odd(nn.Module):
    """Tensors that lie as few do, some as no chain takes them: transposed, channels last, in one storage, under two names."""

    def __init__(self):
        super().__init__()
        shared = torch.randn(40)
        self.first, self.second = nn.Parameter(shared[:24].view(4, 6)), nn.Parameter(shared[20:32].view(3, 4).t())
        self.filter = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last), requires_grad=False)
        self.narrow = nn.Parameter(torch.randn(5).to(torch.bfloat16))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("none", torch.empty(0, 3))
        self.inner = nn.BatchNorm1d(3)
        self.inner.running_mean = self.mean = nn.Buffer(torch.randn(3))


def as_found(module):
    return {
        name: (t, t.detach().clone(), t.stride(), t.storage_offset() * bool(t.numel()), t.requires_grad, type(t))
        for name, t in module.state_dict(keep_vars=True).items()
    }


def test_tensors_come_back_with_their_bits_strides_and_names(tmp_path):
    module, others = Odd(), nn.Linear(3, 3)
    module.eval()
    before, given = as_found(module), LiveModules([Block(0, "0", module), Block(1, "1", others)], tmp_path)
    given.take()
    assert not any(tensor.numel() for tensor in [*tensors_of(module).values(), *others.parameters()])
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    given.give_back()
    after = as_found(module)
    for name, (identity, values, *rest) in before.items():
        assert after[name][0] is identity and torch.equal(after[name][1], values), name
        assert after[name][2:] == tuple(rest), name
    assert module.inner.running_mean is module.mean


def test_what_shared_memory_shares_it_again_also_with_what_somebody_else_holds(tmp_path):
    module = Odd()
    held = module.filter.detach()
    given = LiveModules([Block(0, "0", module)], tmp_path)
    given.take()
    assert torch.equal(held, held.clone()) and held.numel() == 48, "other holders are left alone"
    given.give_back()
    with torch.no_grad():
        module.first[3, 5] = 100.0
        module.filter.fill_(3.0)
    assert module.second[3, 0] == 100.0
    assert held.unique().tolist() == [3.0]


@pytest.mark.own_process  # a heap that thousands of tests used may hold so large a piece free, and keep it
def test_the_memory_of_a_module_is_free_while_it_is_away_and_counted(tmp_path):
    module = nn.Linear(4096, 4096)
    given = LiveModules(as_chain([module]), tmp_path)
    gc.collect()
    before = read_process().anon
    given.take()
    assert before - read_process().anon > 60 << 20
    assert given.nbytes("cpu") == (4096 * 4096 + 4096) * 4 and given.nbytes("cuda") == 0
    given.give_back()
    assert read_process().anon > before - (4 << 20)


def test_a_place_that_cannot_be_written_changes_nothing(tmp_path):
    module = nn.Linear(3, 3)
    before = module.weight.detach().clone()
    with pytest.raises(StoreError):
        LiveModules(as_chain([module]), tmp_path / "missing").take()
    assert torch.equal(module.weight, before)


def data(rows=96):
    return torch.randn(rows, 5, 8, generator=torch.Generator().manual_seed(3)), torch.arange(rows) % 3


class Recurrent(nn.Module):
    """nn.LSTM keeps its parameters in a list beside, and that list was what it was measured with."""

    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 32, num_layers=2, batch_first=True), nn.Linear(32, 3)

    def forward(self, x):
        return self.out(self.lstm(x)[0][:, -1])


class Hungry(nn.Module):
    """Takes no more than 8 rows, as if memory ran out."""

    def __init__(self, error="could not create a primitive"):
        super().__init__()
        self.linear, self.norm, self.error = nn.Linear(8, 8), nn.BatchNorm1d(5), error

    def forward(self, x):
        if type(x) is torch.Tensor and len(x) > 8:
            raise RuntimeError(self.error)
        return self.norm(self.linear(x))


def model():
    torch.manual_seed(1)
    return nn.Sequential(Hungry(), Recurrent())


def trained(model, folder, **options):
    trainer = Trainer(model, mem_limit="2GB", epochs=1, batch_size=32, output_dir=folder, quiet=True, **options)
    return trainer.fit(data(), data(9))


@pytest.mark.parametrize("options", [{"method": "full"}, {"method": "streamed", "partitions": 2}, {"method": "sil"}])
@pytest.mark.few(1)
def test_a_failed_allocation_halves_the_micro_batch_of_a_model_given_alive(options, tmp_path):
    """Its blocks were measured again while they were empty: exit 2, "Change the block". The bits are those of the half."""
    alive = model()
    result = trained(alive, tmp_path / "alive", **options)
    assert result.final_micro_batch == 8
    fewer = trained(model(), tmp_path / "fewer", micro_batch_size=8, **options)
    assert result.weights.read_bytes() == fewer.weights.read_bytes()
    assert all(torch.isfinite(parameter).all() for parameter in alive.parameters())
    assert alive(data()[0][:4]).shape == (4, 3)


def test_a_plan_leaves_a_model_given_alive_as_it_is(tmp_path):
    alive = model()
    before = as_found(alive)
    Trainer(alive, mem_limit="2GB", method="sil", output_dir=tmp_path / "run").plan(data(), data(9))
    after = as_found(alive)
    assert all(torch.equal(before[name][1], after[name][1]) and before[name][0] is after[name][0] for name in before)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("call", ["dup", "preadv"])
def test_ctrl_c_while_a_model_is_emptied_or_filled_leaves_it_as_it_was(call, monkeypatch, tmp_path):
    """It ended the filling, and the model kept shapes alone."""
    alive, real = model(), getattr(os, call)
    before = as_found(alive)

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    given = LiveModules(as_chain([alive]), tmp_path)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, call, interrupted)
        try:
            given.take()
        finally:
            given.give_back()
    after = as_found(alive)
    assert all(torch.equal(before[name][1], after[name][1]) for name in before)


def test_a_run_that_is_refused_leaves_a_model_given_alive_as_it_is(tmp_path):
    alive = model()
    before = as_found(alive)
    with pytest.raises(SeqpartError):
        Trainer(alive, mem_limit="100MB", method="sil", output_dir=tmp_path / "run", quiet=True).fit(data(), data(9))
    assert all(torch.equal(before[name][1], found[1]) for name, found in as_found(alive).items())


DEEP = """
import copy
from torch import nn

def blocks():
    layers = [lambda: nn.Sequential(nn.Linear(1024, 1024), nn.ReLU())] * 12
    return [lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 1024)), *layers, lambda: nn.Linear(1024, 10)]

def alive():  # a copy, whose weights are not in the file that the command builds models in
    return copy.deepcopy(nn.Sequential(*(block() for block in blocks())))
"""


class Commanded:
    """`seqpart train` in a folder with a model of 51 MB, of which one partition needs a tenth; watched from outside."""

    def __init__(self, folder, *arguments):
        (folder / "deep.py").write_text(DEEP)
        options = ["--epochs", "1", "--method", "streamed", "--optimizer", "sgd", "--batch-size", "64", "--output-dir", "run"]
        command = [sys.executable, "-m", "seqpart.train", *options, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        with open(folder / "out", "w+") as out:
            self.watched = watch(command, stdout=out, stderr=out, cwd=folder, env=environment)
        self.code, self.said = self.watched.exit_code, (folder / "out").read_text()


@pytest.mark.slow
def test_the_weights_of_a_model_given_alive_are_in_the_plan_and_refusal_and_run_agree(tmp_path):
    """They were in no plan: a limit that a refusal had named was refused by the run, which blamed the imported libraries."""
    alive, factories = ["--model", "deep:alive"], ["--model", "deep:blocks"]
    refused = Commanded(tmp_path, *alive, "--mem-limit", "200MB")
    assert refused.code == 3, refused.said
    assert all(words in refused.said for words in ("the model was given alive", "parameters_in_file", "give factories"))
    named = re.search(r"smallest limit that fits: (\w+)", refused.said)[1]
    less = f"{parse_size(named) - 45_000_000}"  # 34 are for blocks that could not be run under the limit
    assert Commanded(tmp_path, *alive, "--mem-limit", less, "--dry-run").code == 3
    assert Commanded(tmp_path, *factories, "--mem-limit", less, "--dry-run").code == 0
    done = Commanded(tmp_path, *alive, "--mem-limit", named)
    assert done.code == 0, done.said
    assert done.watched.peak <= parse_size(named)
    peak, predicted = (parse_size(re.search(rf"proof:.* {word} (\S+ MB)", done.said)[1]) for word in ("peak", "predicted"))
    assert peak == pytest.approx(done.watched.peak, rel=0.01)
    assert 0.99 * peak <= predicted <= 1.05 * peak


class Table(nn.Module):
    """Makes its table when it is first called, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.linear, self.table, self.cache = nn.Linear(12, 12), None, {}

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(12).float()
        scale = self.cache.setdefault(x.shape[1], torch.full((12,), 0.1))
        return self.linear(x) * self.table * scale


def test_a_module_given_alive_does_not_keep_the_fake_tensors_it_was_measured_with(tmp_path):
    """They stayed in its attributes, and the first real step ended in a DataDependentOutputException."""
    model = [Table(), nn.Linear(12, 4)]
    given.trained(tmp_path, model, (12,), method="streamed", optimizer="sgd", batch_size=8)
    assert type(model[0].table) is torch.Tensor and type(model[0].cache[12]) is torch.Tensor


def test_a_model_given_in_eval_mode_comes_back_in_eval_mode(tmp_path):
    """Measuring had set it to training mode before anybody noted how it came."""
    model = nn.Sequential(nn.Linear(12, 12), nn.Sequential(nn.BatchNorm1d(12), nn.Dropout()), nn.Linear(12, 4))
    model.eval()
    model[1][1].train()
    given.trained(tmp_path, model, (12,), method="streamed", optimizer="sgd", batch_size=8)
    assert [part.training for part in model.modules()] == [False, False, False, False, True, False]


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("scale", scale)
        self.also = scale

    def forward(self, x):
        return self.linear(x) * self.scale


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "layers"])
def test_a_tensor_that_a_buffer_and_its_owner_share_keeps_its_values(whole, tmp_path):
    """It was empty for good behind `fit`: the next model that was made with it failed, and a loss with it was refused."""
    scale = torch.tensor([1.0, 2.0, 3.0])
    rows = torch.randn(16, 4), torch.arange(16) % 3
    for _ in range(2):
        made = Scaled(scale) if whole else nn.Sequential(Scaled(scale))
        Trainer(
            made, nn.CrossEntropyLoss(weight=scale), mem_limit="2GB", method="full", batch_size=8, quiet=True, overwrite=True,
            output_dir=tmp_path / "run",
        ).fit(rows)  # fmt: skip
        part = made if whole else made[0]
        assert part.scale is scale and part.also is scale and scale.tolist() == [1.0, 2.0, 3.0]


def test_a_buffer_that_learns_is_the_tensor_that_it_was(tmp_path):
    norm = nn.BatchNorm1d(4)
    mean = norm.running_mean
    Trainer(
        nn.Sequential(norm, nn.Linear(4, 3)),
        mem_limit="2GB",
        method="full",
        batch_size=8,
        quiet=True,
        output_dir=tmp_path / "run",
    ).fit((torch.randn(16, 4) + 5, torch.arange(16) % 3))
    assert norm.running_mean is mean and bool((mean > 0.5).all())


# --- parameters stay the objects that they are ---------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.second.bias = self.first.bias
        self.scale = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)) * self.scale)))


def stacked():
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    layers[2].bias = layers[0].bias
    return nn.Sequential(*layers)


def by_identity(model):
    """Half of the parameters by `id`, and one by an attribute, as scripts make groups."""
    decayed = {id(parameter) for parameter in list(model.parameters())[::2]}
    next(model.parameters())._slow = True

    def build(parameters):
        groups = {(d, s): [] for d in (0.0, 0.1) for s in (0.1, 0.01)}
        for one in parameters:
            groups[0.1 if id(one) in decayed else 0.0, 0.01 if getattr(one, "_slow", False) else 0.1].append(one)
        return torch.optim.SGD([{"params": own, "weight_decay": d, "lr": s} for (d, s), own in groups.items()])

    return build


@pytest.mark.parametrize(("make", "on_meta"), [(Tied, True), (stacked, False), (stacked, True), (Tied, False)])
@pytest.mark.parametrize("method", ["streamed", "full"])
@pytest.mark.few(1)
def test_groups_by_identity_and_attributes_are_those_of_a_plain_loop_however_the_model_came(make, on_meta, method, tmp_path):
    """On the meta device others took the places of the parameters while a run lasted: each was in the wrong group."""
    torch.manual_seed(4)
    plain = make()
    save_file({name: value.clone() for name, value in plain.state_dict().items()}, tmp_path / "came.safetensors")
    x, y = torch.randn(32, 6), torch.arange(32) % 3
    with parameters_on_meta() if on_meta else nullcontext():
        model = make()
    options = {"weights": tmp_path / "came.safetensors"}
    build, names = by_identity(model), {id(parameter): name for name, parameter in model.named_parameters()}
    held = list(model.parameters())
    trainer = Trainer(
        model, None, build, mem_limit="2GB", method=method, epochs=1, batch_size=8, shuffle=False, quiet=True,
        output_dir=tmp_path / "run", **options,
    )  # fmt: skip
    found = trainer.fit((x, y)).state_dict()
    assert {id(parameter): name for name, parameter in model.named_parameters()} == names
    assert [parameter.is_meta for parameter in held] == [on_meta] * len(held) and held[0]._slow
    optimizer = by_identity(plain)(list(plain.parameters()))
    for start in range(0, 32, 8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x[start : start + 8]), y[start : start + 8]).backward()
        optimizer.step()
    assert [name for name, value in plain.state_dict().items() if not torch.equal(found[name], value)] == []


def test_a_hook_on_a_parameter_without_values_is_refused_and_on_one_with_values_called(tmp_path):
    save_file({name: value.clone() for name, value in Tied().state_dict().items()}, tmp_path / "came.safetensors")
    rows, called = (torch.randn(32, 6), torch.arange(32) % 3), []

    def trained(model):
        model.last.weight.register_hook(called.append)
        options = {
            "mem_limit": "2GB",
            "method": "streamed",
            "epochs": 1,
            "batch_size": 8,
            "weights": tmp_path / "came.safetensors",
        }
        return Trainer(model, output_dir=tmp_path / "run", quiet=True, **options).fit(rows)

    with parameters_on_meta():
        model = Tied()
    with pytest.raises(
        ModelError, match=r"the parameter weight of a Linear is on the meta device and has a hook.*parameters_on_meta"
    ):
        trained(model)
    assert not called and trained(Tied()) and len(called) >= 4


def test_tiles_have_the_attributes_of_the_weight_that_they_are_of(tmp_path):
    model, seen = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 3)), set()
    model[0].weight.mark = "large"

    def build(parameters):
        seen.update((getattr(one, "mark", ""), tuple(one.shape)) for one in parameters)
        return torch.optim.SGD(parameters, lr=0.1)

    options = {"mem_limit": "2GB", "method": "streamed", "epochs": 1, "batch_size": 8, "tile": "16kB"}
    Trainer(model, None, build, output_dir=tmp_path / "run", quiet=True, **options).fit(
        (torch.randn(16, 64), torch.arange(16) % 3)
    )
    assert sorted(shape for mark, shape in seen if mark) == [(32, 64)]


def test_a_model_that_was_built_in_inference_mode_is_refused_before_it_is_planned():
    """It was planned, and ended in a traceback of torch's in the first backward."""
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    with pytest.raises(ModelError, match=r"weight of a Linear was made inside torch\.inference_mode\(\), and cannot learn"):
        Trainer(model, mem_limit="2GB", method="full").plan((torch.randn(16, 6), torch.arange(16) % 3))


@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload"])
@pytest.mark.few(1)
def test_hooks_of_accelerate_are_named_and_the_cure_trains(way, tmp_path):
    """Weights on the meta device were refused with a cure that led to an error of torch's own."""
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(2)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), (torch.randn(16, 6), torch.arange(16) % 3)
    save_file({name: value.clone() for name, value in model.state_dict().items()}, tmp_path / "came.safetensors")
    options = {"mem_limit": "2GB", "method": "streamed", "epochs": 1, "batch_size": 8, "quiet": True, "overwrite": True}
    expected = Trainer(model, output_dir=tmp_path / "run", **options).fit(x).state_dict()
    model.load_state_dict(load_file(tmp_path / "came.safetensors"))
    model = getattr(accelerate, way)(model, *[tmp_path / "disk"] * (way == "disk_offload"), execution_device="cpu")
    for weights in (None, tmp_path / "came.safetensors"):
        words = r"hooks of accelerate.*on a Sequential and \d+ more.*remove_hook_from_module"
        with pytest.raises(ModelError, match=words) as told:
            Trainer(model, output_dir=tmp_path / "run", weights=weights, **options).fit(x)
    cure = re.search(r"accelerate\.hooks\.remove_hook_from_module\(.*?\)", str(told.value))[0]
    exec(f"import accelerate.hooks; {cure}", {"model": model})
    found = Trainer(model, output_dir=tmp_path / "run", **options).fit(x).state_dict()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("method", ["full", "streamed"])
@pytest.mark.few(1)
def test_a_trained_model_is_saved_by_torch_and_by_safetensors_like_any_other(method, tmp_path):
    """All tensors of a block once came back in one piece of memory: torch.save refused a BatchNorm's floats beside its count,
    and safetensors every layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), nn.Flatten(), nn.Linear(64, 4))
    model = model.to(memory_format=torch.channels_last)
    data = torch.randn(16, 3, 6, 6), torch.randint(0, 4, (16,))
    Trainer(model, mem_limit="2GB", method=method, epochs=1, quiet=True, output_dir=tmp_path / "run").fit(data)
    expected = load_file(tmp_path / "run" / "model.safetensors")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    save_model(model, str(tmp_path / "model.safetensors"))
    for found in (torch.load(tmp_path / "model.pt"), load_file(tmp_path / "model.safetensors")):
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert model[0][0].weight.is_contiguous(memory_format=torch.channels_last)
    tensors = model.state_dict().values()
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("method", ["full", "streamed"])
def test_gradients_of_an_earlier_backward_are_gone_as_behind_zero_grad(method, tmp_path):
    """A loss that reads the weights ended with torch's words for a gradient of another size."""
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(16, 8), torch.arange(16) % 3
    expected = copy.deepcopy(model)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, fused=True)

    def loss(output, labels, own=model):
        read = sum(one.abs().sum() for one in own.parameters()) if method == "full" else 0
        return nn.functional.cross_entropy(output, labels) + 0.01 * read

    for at in (0, 8):
        loss(expected(x[at : at + 8]), y[at : at + 8], expected).backward()
        optimizer.step()
        optimizer.zero_grad()
    options = {"batch_size": 8, "micro_batch_size": 8, "epochs": 1, "lr": 0.1, "shuffle": False, "quiet": True}
    Trainer(model, loss, "sgd", mem_limit="2GB", method=method, output_dir=tmp_path / "run", **options).fit((x, y))
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected.parameters(), strict=True))
