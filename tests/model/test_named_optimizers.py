"""Optimizers chosen by name train as their libraries' own do in a plain loop, streamed, and in no more memory than planned."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from seqpart import Trainer
from seqpart.errors import Interrupted, OptionError
from seqpart.model.named_optimizers import SLICE, _Nearest, _Rooms, _values
from seqpart.model.optimizers import choose
from seqpart.store.layout import spec_of
from tests.resuming import interrupt

WIDTH = 300
DECAYED = {"lr": 1e-3, "weight_decay": 0.1}


def library(name):
    return pytest.importorskip(name, reason=f"pip install {name}")


def muon(model):
    hidden = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    first = torch.optim.Muon(hidden, **DECAYED, adjust_lr_fn="match_rms_adamw")
    return [first, torch.optim.AdamW(others, **DECAYED, fused=True)]


def schedulefree(model):
    found = library("schedulefree").AdamWScheduleFree(model.parameters(), **DECAYED, foreach=False)
    found.train()
    return [found]


PLAIN = {
    "lion": lambda model: [library("bitsandbytes").optim.Lion(model.parameters(), **DECAYED)],
    "muon": muon,
    "schedulefree": schedulefree,
    "adamw8bit": lambda model: [choose("adamw8bit", **DECAYED).build([*model.parameters()])],
    "lion8bit": lambda model: [choose("lion8bit", **DECAYED).build([*model.parameters()])],
}
BYTES = {"lion": 4, "muon": 4, "schedulefree": 8, "adamw8bit": 2 + 8 / 256, "lion8bit": 1 + 4 / 256}
"""Bytes of state for each number of a large matrix."""


def network():
    """Its second layer has more numbers than three slices, not a multiple of one or of a block's."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 701), nn.LayerNorm(701), nn.ReLU(), nn.Linear(701, 10)
    )


def rows():
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(48, 64, generator=numbers), torch.randint(0, 10, (48,), generator=numbers)


def plain_loop(model, optimizers, epochs=3):
    x, y = rows()
    for _ in range(epochs):
        for at in range(0, 48, 16):
            for optimizer in optimizers:
                optimizer.zero_grad()
            F.cross_entropy(model(x[at : at + 16]), y[at : at + 16]).backward()
            for optimizer in optimizers:
                optimizer.step()


def end_after_four(event):
    if event.update == 4:
        interrupt()


def streamed(model, name, folder, **options):
    return Trainer(
        model, method="streamed", optimizer=name, partitions=3, batch_size=16, shuffle=False, output_dir=folder, quiet=True,
        **{"epochs": 3, "mem_limit": "4GB", **DECAYED, **options},
    )  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_a_streamed_run_has_the_bits_of_a_plain_loop(tmp_path, name):
    plain, model = network(), network()
    optimizers = PLAIN[name](plain)
    plain_loop(plain, optimizers)
    streamed(model, name, tmp_path / "run").fit(rows())
    for (key, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other), key


@pytest.mark.parametrize("name", PLAIN)
def test_a_run_that_is_ended_and_resumed_has_the_bits_of_one_that_is_not(tmp_path, name):
    PLAIN[name](network())
    whole, model = network(), network()
    streamed(whole, name, tmp_path / "whole").fit(rows())
    with pytest.raises(Interrupted):
        streamed(model, name, tmp_path / "run").fit(rows(), callbacks=[SimpleNamespace(on_step=end_after_four)])
    streamed(model, name, tmp_path / "run").fit(rows(), resume=tmp_path / "run")
    for (key, one), other in zip(whole.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other), key


@pytest.mark.parametrize("name", PLAIN)
def test_the_plan_has_room_for_the_state_that_it_keeps(name):
    PLAIN[name](network())
    weight = spec_of("weight", torch.empty(1024, 1024, device="meta"))
    state = choose(name, lr=1e-3).state_layout({"weight": weight})
    assert 0 <= sum(spec.nbytes for spec in state.specs) - BYTES[name] * 1024 * 1024 <= 4096


def test_the_state_of_small_parameters_is_not_in_8_bits():
    state = choose("adamw8bit", lr=1e-3).state_layout({"bias": spec_of("bias", torch.empty(4095, device="meta"))})
    assert {spec.name: spec.dtype for spec in state.specs if "state" in spec.name} == {
        "bias.state1": torch.float32, "bias.state2": torch.float32,
    }  # fmt: skip


def test_a_step_takes_memory_for_a_slice_and_not_for_the_parameter():
    for name in ("lion", "adamw8bit", "lion8bit"):
        choice = choose(name, lr=1e-3)
        assert 2 * 4 * SLICE <= choice.step_room(*[1 << 30] * 3) <= 4 * 8 * 4 * SLICE
        assert choice.step_room(*[400] * 3) <= 16 * 400


@pytest.mark.parametrize("name", ["adamw8bit", "lion8bit"])
def test_numbers_without_a_gradient_stay_where_they_are_in_8_bits(name):
    """bitsandbytes 0.50 moves them on the CPU: by 5 in these steps with Lion."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 256))
    before, optimizer = weight.detach().clone(), choose(name, lr=1e-2).build([weight])
    for _ in range(500):
        weight.grad = torch.randn(64, 256)
        weight.grad[:, ::2] = 0
        optimizer.step()
    assert torch.equal(weight[:, ::2], before[:, ::2]) and not torch.equal(weight, before)


@pytest.mark.parametrize("name, kind", [("adamw8bit", "AdamW8bit"), ("lion8bit", "Lion8bit")])
def test_a_state_in_8_bits_is_the_nearest_that_there_is_and_steps_are_nearly_the_library_s(name, kind):
    weight, theirs = (nn.Parameter(torch.randn(3, 1500, generator=torch.Generator().manual_seed(0))) for _ in range(2))
    gradient = torch.randn(3, 1500, generator=torch.Generator().manual_seed(1))
    optimizers = (
        choose(name, lr=1e-2).build([weight]),
        getattr(library("bitsandbytes").optim, kind)([theirs], lr=1e-2, weight_decay=0),
    )
    before = weight.detach().clone()
    for optimizer, parameter in zip(optimizers, (weight, theirs), strict=True):
        parameter.grad = gradient.clone()
        optimizer.step()
    assert torch.allclose(weight, theirs, atol=1e-6)
    state = optimizers[0].state[weight]
    rows = F.pad((0.01 if "lion" in name else 0.1) * gradient.flatten(), (0, 4608 - 4500)).view(-1, 256)
    assert torch.allclose(state["absmax1"], rows.abs().amax(1))
    nearest = (rows / state["absmax1"][:, None])[..., None].sub(state["qmap1"]).abs().amin(-1)
    found = state["qmap1"][F.pad(state["state1"].flatten(), (0, 108), value=127).long()].view(-1, 256)
    assert torch.allclose((found - rows / state["absmax1"][:, None]).abs(), nearest, atol=1e-6)
    for step in range(20):
        for optimizer, parameter in zip(optimizers, (weight, theirs), strict=True):
            parameter.grad = gradient + 0.1 * step
            optimizer.step()
    assert (weight - theirs).abs().mean() < 0.05 * (weight - before).abs().mean()


@pytest.mark.parametrize("name", ["lion", "adamw8bit", "lion8bit"])
def test_a_parameter_that_does_not_lie_row_by_row_stays_in_its_memory(name):
    plain, own = (nn.Parameter(torch.randn(64, 32, 8, 8, generator=torch.Generator().manual_seed(0))) for _ in range(2))
    ours = nn.Parameter(own.detach().to(memory_format=torch.channels_last))
    assert not ours.is_contiguous()
    place, optimizers = ours.data_ptr(), [PLAIN[name](nn.ParameterList([plain]))[0], choose(name, **DECAYED).build([ours])]
    for step in range(3):
        plain.grad = torch.randn(plain.shape, generator=torch.Generator().manual_seed(step))
        ours.grad = plain.grad.to(memory_format=torch.channels_last)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(plain, ours) and ours.data_ptr() == place


def test_parameters_may_begin_to_learn_during_a_run_in_8_bits(tmp_path):
    plain, model = network(), network()
    (optimizer,) = PLAIN["adamw8bit"](plain)
    x, y = rows()
    for update in range(9):
        plain[0].requires_grad_(update >= 3)
        optimizer.zero_grad()
        at = 16 * (update % 3)
        F.cross_entropy(plain(x[at : at + 16]), y[at : at + 16]).backward()
        optimizer.step()
    streamed(model, "adamw8bit", tmp_path / "run", unfreeze={"0.*": "epoch 1"}).fit((x, y))
    for (key, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other), key


def test_schedule_free_weights_are_tested_by_their_average(tmp_path):
    plain, model = network(), network()
    (optimizer,) = schedulefree(plain)
    plain_loop(plain, [optimizer])
    result = streamed(model, "schedulefree", tmp_path / "run").fit(rows(), rows())
    trained = {key: value.clone() for key, value in plain.state_dict().items()}
    optimizer.eval()
    averaged, (x, y) = load_file(result.average), rows()
    for key, value in plain.state_dict().items():
        assert torch.equal(averaged[key], value), key
        assert torch.equal(load_file(result.weights)[key], trained[key]), key
    assert float(result.average_accuracy) == float((plain(x).argmax(1) == y).float().mean())
    assert result.average_loss == pytest.approx(float(F.cross_entropy(plain(x).detach(), y)), rel=1e-5)


def test_a_library_that_is_not_installed_is_named_with_its_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    with pytest.raises(OptionError, match=r"is not installed: pip install 'seqpart\[lowbit\]'"):
        choose.__wrapped__("schedulefree", lr=1e-3)


@pytest.mark.parametrize("signed", [True, False])
def test_the_values_of_8_bits_are_the_library_s(signed):
    theirs = library("bitsandbytes").functional.create_dynamic_map(signed=signed)
    assert torch.allclose(torch.tensor(_values(signed=signed)), theirs, rtol=2e-7, atol=0)


@given(numbers=st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=50), signed=st.booleans())
def test_the_nearest_value_is_found(numbers, signed):
    table = _values(signed=signed)
    values = torch.tensor(table)
    given = torch.tensor(numbers) if signed else torch.tensor(numbers).abs()
    assert torch.equal(
        _Nearest(table)(given, _Rooms(len(given))), torch.bucketize(given, (values[1:] + values[:-1]) / 2).to(torch.uint8)
    )


@pytest.mark.parametrize("name", ["muon", "adamw8bit"])
def test_one_that_needs_whole_weights_refuses_what_divides_them(name, tmp_path):
    with pytest.raises(OptionError, match=f'optimizer="{name}" needs each weight as a whole, and tile divides it'):
        streamed(network(), name, tmp_path / "run", tile="100kB").fit(rows())


class Modal(torch.optim.SGD):
    def eval(self):
        """Puts averages into the parameters, in libraries."""


def test_a_plan_says_that_an_optimizer_of_ones_own_is_never_put_into_evaluation(tmp_path):
    """The library's own tests have other weights, and nothing said so."""
    for build, said in ((lambda p: Modal(p, lr=0.1), 1), (lambda p: torch.optim.SGD(p, lr=0.1), 0)):
        plan = Trainer(network(), None, build, mem_limit="2GB", method="full", batch_size=8).plan(rows())
        assert sum("its train() and eval() are not called" in reason for reason in plan.reasons) == said


def test_an_average_of_schedule_free_weights_is_not_averaged_again(tmp_path):
    with pytest.raises(OptionError, match="averages the weights itself"):
        streamed(network(), "schedulefree", tmp_path / "run", ema=0.9)
