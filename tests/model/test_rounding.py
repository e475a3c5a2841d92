"""Weights in bfloat16 that are rounded stochastically: right on average, and the same bits however a run is cut or resumed."""

import math
import signal
import struct
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from seqpart import Trainer
from seqpart.device.device import keyed_seed
from seqpart.errors import Interrupted, OptionError
from seqpart.model.optimizer_trials import _Made
from seqpart.model.optimizers import choose, describe, rounding
from seqpart.model.rounding import ROOM_TO_ROUND, SLICE, RoundingSteps, round_into
from seqpart.model.scheduler import rate_schedule
from seqpart.model.slices import room_of_slices
from seqpart.verify import verify
from tests.exactly import How, numbers
from tests.resuming import Arm, kill

SEED, EPOCHS, ROWS, BATCH = 3, 2, 48, 16
OPTIONS = {"lr": 1e-3, "weight_decay": 0.1}
BF16 = torch.bfloat16
SIM = "sim:rtx3060-12gb"


def network(*, narrow=True):
    """Its second layer has more numbers than a slice, not a multiple of 16, and its norm is float32."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 901), nn.LayerNorm(901), nn.ReLU(), nn.Linear(901, 10))
    for layer in layers if narrow else ():
        layer.to(torch.float32 if isinstance(layer, nn.LayerNorm) else BF16)
    return layers


def rows():
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 64, generator=numbers), torch.randint(0, 10, (ROWS,), generator=numbers)


def trainer(model, folder, **options):
    own = {} if callable(options.get("optimizer")) else OPTIONS
    given = {"epochs": EPOCHS, "mem_limit": "4GB", "rounding": "stochastic", "method": "streamed", "partitions": 3}
    return Trainer(
        model, output_dir=folder, seed=SEED, batch_size=BATCH, shuffle=False, dtype="bf16", quiet=True,
        **{**given, **own, **options},
    )  # fmt: skip


def muon(parameters):
    hidden, others = ([p for p in parameters if (p.ndim == 2) is matrix] for matrix in (True, False))
    first = torch.optim.Muon(hidden, **OPTIONS, adjust_lr_fn="match_rms_adamw")
    return [first, torch.optim.AdamW(others, **OPTIONS, fused=True)]


PLAIN = {
    "adamw": lambda parameters: [torch.optim.AdamW(parameters, **OPTIONS, fused=True)],
    "sgd": lambda parameters: [torch.optim.SGD(parameters, **OPTIONS, momentum=0.9, fused=True)],
    "muon": muon,
    "function": lambda parameters: [torch.optim.NAdam(parameters, **OPTIONS)],
}


def asked(name):
    if name == "sgd":
        return {"optimizer": name, "momentum": 0.9}
    return {"optimizer": PLAIN[name] if name == "function" else name}


def plain_loop(optimizers, *, clip=None, schedule="constant", moments=torch.float32, ema=None):
    """Optimizers on float32 copies, which get the weights before each step, and give them back rounded."""
    model, (x, y) = network(), rows()
    named = dict(model.named_parameters())
    copies = {name: nn.Parameter(parameter.detach().float()) for name, parameter in named.items()}
    made = optimizers(list(copies.values()))
    factor, update, averages = rate_schedule(schedule, 0), 0, {}
    for _ in range(EPOCHS):
        for at in range(0, ROWS, BATCH):
            model.zero_grad()
            with torch.autocast("cpu", dtype=BF16, cache_enabled=False):
                loss = F.cross_entropy(model(x[at : at + BATCH]), y[at : at + BATCH])
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            for name, copy in copies.items():
                copy.data.copy_(named[name].detach())
                copy.grad = named[name].grad.float()
            for optimizer in made:
                for group in optimizer.param_groups:
                    group["lr"] = OPTIONS["lr"] * factor(update, EPOCHS * ROWS // BATCH)
                optimizer.step()
            for name, copy in copies.items():
                store(named[name].detach(), copy.detach(), SEED, 0, update, name)
                for key, moment in made[0].state[copy].items() if moments is BF16 and named[name].dtype is BF16 else ():
                    if key != "step":
                        narrow = torch.empty_like(moment, dtype=BF16)
                        store(narrow, moment, SEED, 0, update, name, key)
                        moment.copy_(narrow)
                weight = named[name].detach()
                if ema is None or not update:
                    averages[name] = weight.clone()
                else:
                    average = averages[name].float().lerp(weight.float(), 1 - ema)
                    store(averages[name], average, SEED, 0, update, name, "average")
            update += 1
    return model, averages


def store(narrow, values, *key):
    if narrow.dtype is BF16:
        round_into(narrow.view(-1), values.view(-1), *key)
    else:
        narrow.copy_(values)


def assert_same(one, other):
    for (key, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b) and a.dtype is b.dtype, key


# --- the law -----------------------------------------------------------------------------------------------------------


def word(place, key):
    """SplitMix64 in Python's integers."""
    most = (1 << 64) - 1
    bits = (place * 0x9E3779B97F4A7C15 + key) & most
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & most
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & most
    return bits ^ (bits >> 31)


def rounded(values, *key, first=0):
    found = torch.empty(len(values), dtype=BF16)
    round_into(found, torch.as_tensor(values, dtype=torch.float32), *key, first=first)
    return found


@given(st.lists(st.floats(width=32), min_size=1, max_size=11), st.integers(0, 1 << 40), st.integers(0, 1 << 30))
def test_a_number_becomes_the_upper_of_its_neighbours_if_its_lower_bits_and_those_of_its_place_carry(values, update, first):
    first *= 4
    found = rounded(values, SEED, update, "weight", first=first)
    for number, (value, one) in enumerate(zip(values, found.tolist(), strict=True), first):
        drawn = word(number // 4, keyed_seed(SEED, update, "weight")) >> (16 * (number % 4)) & 0xFFFF
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        upper = (bits & 0xFFFF) + drawn >> 16
        (expected,) = (
            struct.unpack("<f", struct.pack("<I", ((bits >> 16) + upper) << 16)) if math.isfinite(value) else [math.nan]
        )
        assert one == expected or (math.isnan(one) and math.isnan(expected))


@given(st.integers(0, 1 << 20), st.integers(0, 65535), st.booleans())
def test_the_mean_over_many_numbers_is_the_number(update, lower, negative):
    """The number of ups is binomial: within 6 deviations."""
    (value,) = struct.unpack("<f", struct.pack("<I", (0xBF80 if negative else 0x3F80) << 16 | lower))
    ups, share, count = (rounded([value] * 4096, update, "w").abs() > 1).sum().item(), lower / 65536, 4096
    assert abs(ups - count * share) <= 6 * math.sqrt(count * share * (1 - share))


def test_another_seed_update_or_name_draws_other_bits_and_a_part_of_a_parameter_the_same():
    values = torch.rand(4096, generator=torch.Generator().manual_seed(0))
    found = rounded(values, 0, 0, 1, "a.weight")
    for other in ((1, 0, 1, "a.weight"), (0, 1, 1, "a.weight"), (0, 0, 2, "a.weight"), (0, 0, 1, "b.weight")):
        assert 0.2 < (found != rounded(values, *other)).float().mean() < 0.5  # of which a third differs by chance
    assert torch.equal(found[1024:3000], rounded(values[1024:3000], 0, 0, 1, "a.weight", first=1024))


# --- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 2, 3])
@pytest.mark.parametrize("name", PLAIN)
def test_every_cut_has_the_bits_of_a_plain_loop(name, partitions, tmp_path):
    model = network()
    trainer(model, tmp_path / "run", partitions=partitions, **asked(name)).fit(rows())
    assert_same(plain_loop(PLAIN[name])[0], model)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_moments_in_bfloat16_are_rounded_stochastically_too(name, tmp_path):
    model = network()
    trainer(model, tmp_path / "run", moments_dtype="bf16", **asked(name)).fit(rows())
    expected = plain_loop(PLAIN[name], moments=BF16)[0]
    assert_same(expected, model)
    assert not torch.equal(expected[2].weight, plain_loop(PLAIN[name])[0][2].weight)


@pytest.mark.parametrize("method", ["streamed", "full"])
def test_clipping_schedules_and_averages_go_with_it(method, tmp_path):
    model = network()
    options = {"clip_grad_norm": 0.5, "lr_schedule": "cosine", "ema": 0.9, "method": method}
    found = trainer(model, tmp_path / "run", **options, partitions=3 if method == "streamed" else 1).fit(rows())
    expected, averages = plain_loop(PLAIN["adamw"], clip=0.5, schedule="cosine", ema=0.9)
    assert_same(expected, model)
    average = load_file(found.average)
    assert all(torch.equal(average[name], one) for name, one in averages.items() if one.dtype is BF16)


def test_steps_on_the_host_have_the_same_bits(tmp_path):
    model = network()
    options = {"optimizer_on": "host", "ram_limit": "1GB", "device": SIM}
    trainer(model, tmp_path / "run", **options).fit(rows())
    assert_same(plain_loop(PLAIN["adamw"])[0], model)


def end_after_two(event):
    if event.update == 2:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_a_run_that_is_ended_and_resumed_in_another_cut_has_the_bits_of_one_that_is_not(moments, tmp_path):
    whole, model = network(), network()
    trainer(whole, tmp_path / "whole", moments_dtype=moments).fit(rows())
    with pytest.raises(Interrupted):
        trainer(model, tmp_path / "run", moments_dtype=moments).fit(
            rows(), callbacks=[SimpleNamespace(on_step=end_after_two)]
        )  # fmt: skip
    trainer(model, tmp_path / "run", moments_dtype=moments, partitions=2).fit(rows(), resume=tmp_path / "run")
    assert_same(whole, model)


def narrow():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).to(BF16)


@pytest.mark.parametrize("how", [How(), How(method="full"), How(slots=2, keeps=0)], ids=str)
@pytest.mark.few(1)
def test_a_run_that_is_killed_anywhere_goes_on_to_the_same_bits(how, monkeypatch, tmp_path):
    options = {"optimizer": "adamw", "epochs": 3, "ema": 0.9, "partitions": (0, 2), "rounding": "stochastic", "dtype": "bf16"}
    arm = Arm(monkeypatch, tmp_path, how, narrow, (numbers((6,))[0], None), **options)
    whole, steps = arm.whole()
    found, stops = arm.stopped(iter([(len(steps) // 3, kill), (len(steps) // 4, kill)]), save_every="1")
    assert stops == 2 and found == whole


def test_a_proof_repeats_the_rounding():
    proof = verify(
        narrow(), numbers((6,))[0], mem_limit="4GB", rounding="stochastic", dtype="bf16", batch_size=8, steps=2,
    )  # fmt: skip
    assert "a plain loop has the same bits" in str(proof)


def test_updates_that_are_lost_to_the_nearest_are_not_lost_to_chance(tmp_path):
    """Adam's updates of 1e-5 are a hundredth of what would move a weight of 1/2."""
    moved = {}
    for how in ("nearest", "stochastic"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 1))
        for weight in model.parameters():
            weight.data.uniform_(0.5, 0.9)
        before = model.to(BF16)[0].weight.detach().float()
        x = torch.rand(ROWS, 64, generator=torch.Generator().manual_seed(1))
        trainer(model, tmp_path / how, epochs=10, lr=1e-5, weight_decay=0.0, partitions=1, rounding=how).fit(
            (x, torch.zeros(ROWS, 1))
        )  # fmt: skip
        moved[how] = model[0].weight.detach().float() - before
    assert not moved["nearest"].any()
    assert float(moved["stochastic"].mean()) == pytest.approx(-30 * 1e-5, rel=0.1)


# --- the plan ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments, nbytes", [("fp32", 8), ("bf16", 4)])
def test_the_plan_has_two_bytes_for_a_weight_and_eight_or_four_for_its_moments(moments, nbytes, tmp_path):
    numbers = sum(parameter.numel() for parameter in network()[2].parameters())
    plan = trainer(network(), tmp_path / "run", moments_dtype=moments, partitions=(0, 2, 3)).plan(rows())
    large = plan.partitions[1]
    assert 0 <= large.weights - 2 * numbers < 1024 and 0 <= large.state - nbytes * numbers < 1024


@pytest.mark.parametrize("moments", [torch.float32, BF16])
def test_a_step_takes_the_memory_that_the_plan_has_for_it(moments):
    choice, weight = rounding(choose("adamw", lr=1e-3), moments), nn.Parameter(torch.rand(3 * SLICE + 5).to(BF16))
    optimizer = choice.build([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with _Made(1) as made:
        optimizer.step()
    room = room_of_slices(ROOM_TO_ROUND, 1 << 30, SLICE)
    assert room / 4 < made.most <= choice.step_room(*[weight.nbytes] * 3) <= choice.step_room(*[1 << 30] * 3) == room
    whole = rounding(describe("", lambda parameters: torch.optim.NAdam(parameters, foreach=False)), torch.float32)
    assert whole.step_room(*[1 << 30] * 3) > 4 << 30


def test_a_parameter_that_does_not_lie_row_by_row_is_rounded_by_its_place_in_memory():
    flat = nn.Parameter(torch.randn(64, 80, 8, 8, generator=torch.Generator().manual_seed(0)).to(BF16))
    lying = nn.Parameter(flat.detach().clone().permute(0, 3, 1, 2))
    optimizers = [RoundingSteps(torch.optim.AdamW([one], fused=True), {id(one): "w"}, torch.float32) for one in (flat, lying)]
    place = lying.data_ptr()
    for step in range(2):
        flat.grad = torch.randn(flat.shape, generator=torch.Generator().manual_seed(step)).to(BF16)
        lying.grad = flat.grad.permute(0, 3, 1, 2).contiguous()
        for optimizer in optimizers:
            optimizer.at(0, 0, step)
            optimizer.step()
    assert torch.equal(flat.permute(0, 3, 1, 2), lying) and lying.data_ptr() == place
    state = optimizers[1].optimizers[0].state[lying]
    assert state["exp_avg"].stride() == lying.stride() and state["step"] == 2


# --- what is refused ---------------------------------------------------------------------------------------------------


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["done"] = group.get("done", 0) + 1
        super().step()


REFUSED = {
    "no weights in bfloat16": (False, {}, 'rounding="stochastic" is for weights in bfloat16; found float32. Convert'),
    "an optimizer that counts": (
        True, {"optimizer": lambda parameters: Counting(parameters, lr=0.1)}, "counts updates in its groups",
    ),
    "moments of others": (
        True, {"optimizer": "adafactor", "moments_dtype": "bf16"}, 'goes with optimizer="adam", adamw or sgd; found ada',
    ),
    "moments alone": (True, {"rounding": "nearest", "moments_dtype": "bf16"}, 'goes with rounding="stochastic"'),
    "tiles": (True, {"tile": "100kB"}, "draws by weights' names, and tile divides them"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_with_it_is_refused(case, tmp_path):
    narrow, options, said = REFUSED[case]
    with pytest.raises(OptionError, match=said):
        trainer(network(narrow=narrow), tmp_path / "run", **options).plan(rows())
