"""Optimizer steps where the weights rest: bits of a plain loop whose optimizer steps on the CPU, and the bytes that cross."""

import time

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from seqpart import Trainer
from seqpart.capture.capture import chain_of
from seqpart.device.opening import open_device
from seqpart.device.simulated import SimulatedDevice
from seqpart.errors import OptionError
from seqpart.model.blocks import as_chain
from seqpart.plan.prediction import predict
from seqpart.plan.problem import parts_of
from seqpart.plan.simulator import Resources
from seqpart.profile.blocks import measure_chain
from seqpart.runtime.host_steps import HostSteps
from seqpart.store.store import Store
from tests import forced

SIM = "sim:rtx3060-12gb"
ROWS, BATCH, EPOCHS = 24, 8, 2
DEPTH, WIDTH = 6, 24


def network(*, normalized=False):
    torch.manual_seed(3)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, *([nn.BatchNorm1d(WIDTH)] if normalized else []), nn.Linear(WIDTH, 4))


def rows():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5)), torch.arange(ROWS) % 4


def options(folder, **others):
    return {
        "mem_limit": "1GB", "method": "streamed", "partitions": 4, "optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.1,
        "batch_size": BATCH, "micro_batch_size": BATCH, "shuffle": False, "epochs": EPOCHS, "quiet": True,
        "output_dir": folder / "run", "optimizer_on": "host", "ram_limit": "50MB", **others,
    }  # fmt: skip


def plain_loop(optimizer, clip=None):
    model, (x, y) = network(), rows()
    optimizer = optimizer(model.parameters())
    for _ in range(EPOCHS):
        for at in range(0, ROWS, BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[at : at + BATCH]), y[at : at + BATCH]).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return model


def alike(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True)


@pytest.mark.few(2)
@pytest.mark.parametrize("device", ["cpu", SIM])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_bits_are_those_of_a_plain_loop_whose_optimizer_steps_on_the_cpu(device, clip, tmp_path):
    model = network()
    result = Trainer(model, device=device, **options(tmp_path, clip_grad_norm=clip)).fit(rows())
    assert result.plan.host_steps == {0, 1, 2, 3}
    assert alike(model, plain_loop(adamw, clip))


def rms(parameters):
    """One that keeps a count beside tensors, and its state in tensors that it makes anew."""
    return torch.optim.Adamax(parameters, lr=1e-2)


@pytest.mark.few(2)
@pytest.mark.parametrize("device", ["cpu", SIM])
@pytest.mark.parametrize("make", [rms, torch.optim.Adagrad, torch.optim.Rprop])
def test_an_optimizer_of_one_s_own_steps_there_too(make, device, tmp_path):
    model = network()
    asked = {name: value for name, value in options(tmp_path).items() if name not in ("optimizer", "lr", "weight_decay")}
    Trainer(model, None, make, device=device, **asked).fit(rows())
    assert alike(model, plain_loop(make))


def by_attribute(parameters):
    slow, fast = ([p for p in parameters if getattr(p, "fast", False) is way] for way in (False, True))
    return torch.optim.SGD([{"params": fast, "lr": 0.5}, {"params": slow, "lr": 0.01}])


def marked():
    model = network()
    for number, parameter in enumerate(model.parameters()):
        parameter.fast = number % 2 == 0
    return model


@pytest.mark.parametrize("optimizer_on", ["host", "auto"])
def test_groups_by_attributes_of_the_parameters_are_those_of_the_model(optimizer_on, tmp_path):
    """All were in the second group once."""
    found, asked = {}, options(tmp_path)
    for place in optimizer_on, "device":
        model = marked()
        own = {key: value for key, value in asked.items() if key not in ("optimizer", "lr", "weight_decay")}
        own |= {"optimizer_on": place, "output_dir": tmp_path / place}
        Trainer(model, None, lambda parameters: by_attribute(list(parameters)), **own).fit(rows())
        found[place] = model
    assert alike(found[optimizer_on], found["device"])


def test_groups_by_which_objects_parameters_are_keep_the_steps_on_the_device(tmp_path):
    model = network()
    chosen = {id(parameter) for parameter in model[0].parameters()}

    def by_identity(parameters):
        groups = [[p for p in parameters if (id(p) in chosen) is way] for way in (False, True)]
        return torch.optim.SGD([{"params": groups[0], "lr": 0.5}, {"params": groups[1], "lr": 0.01}])

    asked = {key: value for key, value in options(tmp_path).items() if key not in ("optimizer", "lr", "weight_decay")}
    with pytest.raises(OptionError, match="tells parameters apart by which objects they are"):
        Trainer(model, None, lambda parameters: by_identity(list(parameters)), **asked).fit(rows())
    plan = Trainer(model, None, lambda parameters: by_identity(list(parameters)), **{**asked, "optimizer_on": "auto"}).plan(
        rows()
    )
    assert not plan.host_steps


def test_a_block_that_stops_learning_beside_one_that_goes_on_is_left_out(tmp_path):
    """Its state had no memory, and was looked at: an error of shapes."""
    found = {}
    for place in "host", "device":
        model = network()

        class Freeze:
            def on_step(self, event, model=model):
                if event.update == 2:
                    model[2].requires_grad_(False)

        asked = options(tmp_path / place, optimizer_on=place)
        Trainer(model, **asked).fit(rows(), callbacks=[Freeze()])
        found[place] = model
    assert alike(found["host"], found["device"])


@pytest.mark.slow
def test_a_plan_with_weights_that_stay_is_used_again_with_their_steps_on_the_device(tmp_path):
    def asked(folder, place):
        own = options(tmp_path / folder, optimizer_on=place, method="auto", mem_limit="450MB", ram_limit="1GB")
        return {**own, "partitions": "auto", "device": SIM}

    def large():
        torch.manual_seed(3)
        return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.Tanh())), nn.Linear(512, 4))

    data = torch.randn(ROWS, 512), torch.arange(ROWS) % 4
    plan = Trainer(large(), **asked("plan", "device")).plan(data)
    assert plan.weights_stay
    again = Trainer(large(), **asked("again", "host")).fit(data, reuse=plan).plan
    assert not again.host_steps & again.weights_stay


def test_the_moving_average_is_kept_there_too(tmp_path):
    for place in "host", "device":
        Trainer(network(), device=SIM, **options(tmp_path / place, ema=0.9, optimizer_on=place)).fit(rows())
    files = sorted(file.name for file in (tmp_path / "device" / "run").glob("*.safetensors"))
    assert len(files) == 2
    for name in files:
        found, expected = (load_file(tmp_path / place / "run" / name) for place in ("host", "device"))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_a_partition_with_running_statistics_steps_on_the_device(tmp_path):
    result = Trainer(network(normalized=True), device=SIM, **options(tmp_path)).fit(rows())
    assert 0 < len(result.plan.host_steps) < 4
    assert any("they have running statistics" in reason for reason in result.plan.reasons)


@pytest.mark.few(1)
@pytest.mark.parametrize("there", ["host", "device"])
def test_a_run_goes_on_with_its_steps_in_another_place_to_the_same_bits(there, tmp_path):
    whole, stopped, again = network(), network(), network()
    Trainer(whole, **options(tmp_path / "whole")).fit(rows())
    other = {"host": "device", "device": "host"}[there]

    class Stop:
        def on_step(self, event):
            if event.update == 4:
                raise ZeroDivisionError

    first = options(tmp_path / "cut", optimizer_on=there)
    with pytest.raises(ZeroDivisionError):
        Trainer(stopped, **first).fit(rows(), callbacks=[Stop()])
    Trainer(again, **{**first, "optimizer_on": other}).fit(rows(), resume=tmp_path / "cut" / "run")
    assert alike(again, whole)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stays", [False, True])
def test_over_the_link_go_weights_twice_and_gradients_once_and_never_state(stays, dtype, tmp_path, monkeypatch):
    """8 bytes a parameter to the device, or 4 where weights stay there, and 4 back, in each update; in bf16 half as many to the
    device."""
    crossed = []
    plain = SimulatedDevice.copy

    def copy(self, source, target):
        crossed.append((self.is_host(source), source.nbytes))
        plain(self, source, target)

    def only(problem, method, micro_batch):
        parts = parts_of(problem, micro_batch, problem.starts)
        resources = Resources(slots=1, stays=frozenset(range(4)) if stays else frozenset())
        return predict(problem, method, micro_batch, parts, resources)

    def moved(epochs):
        crossed.clear()
        asked = options(tmp_path / str(epochs), epochs=epochs, partitions=(0, 3, 6, 9), dtype=dtype)
        plan = Trainer(wide(), device=SIM, **asked).fit((torch.randn(ROWS, 128), torch.arange(ROWS) % 4)).plan
        return plan, [sum(size for up, size in crossed if up is way) for way in (True, False)]

    forced.plans(monkeypatch, only)
    monkeypatch.setattr(SimulatedDevice, "copy", copy)
    (plan, more), (_, less) = moved(2), moved(1)
    up, down = ((a - b) / (ROWS // BATCH) for a, b in zip(more, less, strict=True))
    weights = [part.weights for part in plan.partitions]
    loads = sum(weights) if stays else 2 * sum(weights) - weights[-1]  # the last runs forward and backward in one visit
    assert up == pytest.approx(loads / (2 if dtype == "bf16" else 1), rel=0.06)  # and rows
    assert down == pytest.approx(sum(part.gradients for part in plan.partitions), rel=0.01)


WIDER = 64


class Scaled(nn.Module):
    """A product, a norm that autocast leaves in float32, an embedding, and weights that are used in two ways, or in tests."""

    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(WIDER), nn.Linear(WIDER, WIDER), nn.Linear(WIDER, WIDER)
        self.third, self.conv = nn.Linear(WIDER, WIDER), nn.Conv1d(1, WIDER, WIDER + 1, padding=WIDER // 2)
        self.rows = nn.Embedding(4, WIDER)

    def forward(self, x):
        x = self.norm(x) + self.rows(x[:, 0].detach().gt(0).long())
        x = torch.tanh(self.conv(self.first(x)[:, None]).mean(1))
        x = self.second(x) + self.second.weight.mean()
        return x + (self.third(x) if self.training else self.third(x) * self.third.weight.sum())


def deep():
    torch.manual_seed(3)
    return nn.Sequential(Scaled(), nn.Tanh(), Scaled(), nn.Tanh(), Scaled(), nn.Linear(WIDER, 4))


def test_weights_that_autocast_alone_uses_are_the_narrow_ones():
    costs = measure_chain(as_chain([deep]), (WIDER,), BATCH, autocast=torch.bfloat16, narrows=True)
    names = {f"{block}.{name}.weight" for block in (0, 2, 4) for name in ("first", "conv")}
    assert {spec.name for spec in costs[0].narrow.specs} == names
    assert not measure_chain(as_chain([deep]), (WIDER,), BATCH, narrows=True)[0].narrow.specs


def test_a_weight_that_others_use_too_does_not_come_in_16_bits(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.middle, self.head = nn.Embedding(WIDER, WIDER), deep()[:3], nn.Linear(WIDER, WIDER, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.middle(self.embed(x).mean(1)))

    chain = chain_of(Tied(), (5,), torch.int64)
    costs = measure_chain(chain, (5,), BATCH, dtype=torch.int64, autocast=torch.bfloat16, narrows=True)
    found = [spec.name for cost in costs for spec in cost.narrow.specs]
    assert found and not any("embed" in name or "head" in name for name in found)


class _ByWeight(torch.autograd.Function):
    """x times the weight, whose gradient is computed from the weight in float32."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient.float() @ weight, gradient.float().T @ x.float()


class ByFunction(nn.Linear):
    def forward(self, x):
        return _ByWeight.apply(x, self.weight)


class WithHook(nn.Linear):
    def __init__(self, *shape):
        super().__init__(*shape)
        self.weight.register_hook(lambda gradient: gradient + 0.01 * self.weight.detach())


class ByRows(nn.Linear):
    def forward(self, x):
        with torch.autocast(x.device.type, enabled=len(x) >= BATCH):
            return super().forward(x)


class WideOnGPUs(nn.Linear):
    def forward(self, x):
        with torch.autocast("cuda", enabled=False):
            return super().forward(x)


@pytest.mark.parametrize("layer", [ByFunction, WithHook, ByRows, WideOnGPUs])
def test_weights_that_something_else_reads_do_not_come_in_16_bits(layer):
    """Backward of a Function, a hook, a forward pass of fewer rows, and what turns off autocast for GPUs by name."""
    model = nn.Sequential(layer(WIDER, WIDER), nn.Tanh(), nn.Linear(WIDER, WIDER))
    costs = measure_chain(chain_of(model, (WIDER,), torch.float32), (WIDER,), BATCH, autocast=torch.bfloat16, narrows=True)
    found = [(block.name, spec.name) for block, cost in zip(chain_of(model, (WIDER,), torch.float32), costs, strict=True)
             for spec in cost.narrow.specs]  # fmt: skip
    assert len(found) == 1 and "0" not in found[0][0], found


@pytest.mark.few(3)
@pytest.mark.parametrize("device", ["cpu", SIM])
@pytest.mark.parametrize("way", [{}, {"partitions": 3}, {"method": "full", "partitions": "auto"}, {"clip_grad_norm": 0.1}])
def test_weights_that_come_in_16_bits_give_the_bits_of_a_plain_loop(device, way, tmp_path, monkeypatch):
    came = []
    whole = Store._get_narrow
    monkeypatch.setattr(Store, "_get_narrow", lambda store, name, flat: whole(store, name, flat) or came.append(
        store._homes[name].narrow is not None))  # fmt: skip
    model, x, y = deep(), torch.randn(ROWS, WIDER, generator=torch.Generator().manual_seed(5)), rows()[1]
    result = Trainer(model, device=device, **options(tmp_path, dtype="bf16", **way)).fit((x, y), (x, y))
    plain = deep()
    optimizer = adamw(plain.parameters())
    for _ in range(EPOCHS):
        for at in range(0, ROWS, BATCH):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                loss = nn.functional.cross_entropy(plain(x[at : at + BATCH]), y[at : at + BATCH])
            loss.backward()
            if clip := way.get("clip_grad_norm"):
                nn.utils.clip_grad_norm_(plain.parameters(), clip)
            optimizer.step()
    assert alike(model, plain)
    assert any(came) == (device == SIM)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = nn.functional.cross_entropy(plain.eval()(x), y).item()
    assert result.test_loss == pytest.approx(expected, rel=1e-6)


def wide():
    return nn.Sequential(*(nn.Linear(128, 128) for _ in range(11)), nn.Linear(128, 4))


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["sil", "ist", "psl"])
def test_methods_that_are_not_exact_refuse_it(method, tmp_path):
    with pytest.raises(OptionError, match="optimizer_on host goes with method"):
        Trainer(network(), mem_limit="1GB", method=method, optimizer_on="host")


def test_without_host_memory_it_is_refused(tmp_path):
    asked = {**options(tmp_path), "ram_limit": None}
    with pytest.raises(OptionError, match=r"optimizer_on host: .* Give ram_limit"):
        Trainer(network(), device="cpu", **asked).fit(rows())


def test_a_room_is_taken_again_once_the_step_that_reads_it_is_over():
    device = open_device(SIM)
    host, read = HostSteps(device, [device.host(64)]), []
    gradient = device.upload(torch.ones(16))

    def brought(partition):
        return host.bring(partition, [gradient], lambda room: [room[:64].view(torch.float32)])

    (place,) = brought(0)
    host.begin(lambda: time.sleep(0.2) or read.append(place.sum().item()))
    brought(1)
    assert read == [16]
    host.close()
