"""Quantized layers of bitsandbytes travel packed and never learn; what is around them has a plain loop's bits."""

import functools
import signal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from seqpart import Trainer
from seqpart.errors import DoesNotFit, ModelError
from seqpart.model import quantized
from seqpart.model.quantized import Quantized, plain_tensors
from seqpart.plan.plan import Plan
from seqpart.schedule.steps import Verb
from tests.checkpoint.test_killed import COMMON, ended, laid_out, whole_run
from tests.choice import only_quick
from tests.exactly import FULL, HOWS, Trained, first_difference, numbers
from tests.methods.test_adapters import BATCH, EPOCHS, Steps

bnb = pytest.importorskip("bitsandbytes", reason="quantized weights need it: pip install bitsandbytes")

pytestmark = pytest.mark.usefixtures("known_machine")

WRITTEN_OTHERWISE = ("weight_format", "quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
"""Of a layer's state_dict: always 0, and text that ends in spaces here."""


def four(rows=64, columns=64, *, bias=True, **options):
    options = {"quant_type": "nf4", "compute_dtype": torch.float32, **options}
    return bnb.nn.Linear4bit(columns, rows, bias=bias, **options)


def eight(rows=64, columns=64, *, bias=True, **options):
    return bnb.nn.Linear8bitLt(columns, rows, bias=bias, **{"has_fp16_weights": False, "threshold": 6.0, **options})


KINDS = {
    "4 bits": four,
    "4 bits, scales as they are": functools.partial(four, compress_statistics=False),
    "4 bits, computed in bfloat16": functools.partial(four, compute_dtype=torch.bfloat16),
    "4 bits, computed as it comes": functools.partial(four, compute_dtype=None),
    "4 bits in storage of 16": functools.partial(four, quant_storage=torch.bfloat16),
    "fp4": functools.partial(four, quant_type="fp4"),
    "8 bits": eight,
}


def network(kind, *, bias=True):
    torch.manual_seed(0)
    between = KINDS[kind](128, 64, bias=bias), nn.ReLU(), nn.Linear(128, 64), KINDS[kind](64, 64, bias=bias)
    model = nn.Sequential(nn.Linear(6, 64), *between, nn.Linear(64, 4)).to("cpu")
    model[1].requires_grad_(False), model[4].requires_grad_(False)
    if bias:
        model[4].bias.requires_grad_(True)
    return model


def rows():
    chance = torch.Generator().manual_seed(1)
    return torch.randn(16, 6, generator=chance), torch.randint(0, 4, (16,), generator=chance)


def fitted(folder, model, **options):
    cuts = {"partitions": 3} if options.setdefault("method", "streamed") == "streamed" else {}
    trainer = Trainer(
        model, mem_limit="2GB", batch_size=BATCH, micro_batch_size=BATCH, epochs=EPOCHS, lr=1e-2, shuffle=False, quiet=True,
        output_dir=folder, **cuts | options,
    )  # fmt: skip
    return trainer.fit(rows(), rows())


def looped(model):
    (x, y), learn = rows(), [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learn, lr=1e-2, weight_decay=0.0, fused=True)
    for start in [*range(0, len(x), BATCH)] * EPOCHS:
        F.cross_entropy(model(x[start : start + BATCH]), y[start : start + BATCH]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def same(one, other):
    """Also where packed bytes are no number, as numbers of 16 bits."""
    return one.dtype is other.dtype and torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def other_bits(found, expected):
    """Names of tensors of a state_dict that differ."""
    assert found.keys() == {name for name in expected if not name.endswith("weight_format")}
    return [name for name in found if not name.endswith(WRITTEN_OTHERWISE) and not same(found[name], expected[name])]


def load_state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("method", ["streamed", "checkpointed", "full", "auto"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(1)
def test_a_network_around_quantized_layers_has_the_bits_of_a_plain_loop(kind, method, tmp_path):
    expected, model = looped(network(kind)).state_dict(), network(kind)
    result = fitted(tmp_path / "run", model, method=method)
    assert not other_bits(load_file(result.weights), expected)
    after = model.state_dict()
    assert after.keys() == expected.keys()
    assert all(same(after[name], expected[name]) for name in expected), "the model itself is as a loop leaves it"
    learn = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    frozen = 128 * 64 + 64 * 64 + 128  # weights, however they are packed, and a bias
    assert (result.plan.parameters, result.plan.frozen) == (learn, frozen)
    bits = "8 bits" if kind == "8 bits" else "4 bits (fp4)" if kind == "fp4" else "4 bits (nf4)"
    assert f"12,288 of the frozen weights in {bits}, in 2 layers" in result.plan.reasons


@pytest.mark.slow
@pytest.mark.parametrize("kind", only_quick(["4 bits", "8 bits"], ["4 bits"]))
def test_wherever_weights_and_graphs_wait_the_bits_are_those_of_full_training(kind, monkeypatch, tmp_path):
    """A graph that is kept finds packed weights again where the next visit of its partition has them."""
    arm = Trained(monkeypatch, tmp_path, functools.partial(network, kind), numbers((6,)), partitions=(0, 1, 3, 4))
    expected = arm.run(FULL)
    for how in HOWS:
        assert first_difference(arm.run(how), expected) is None, how


@settings(max_examples=20)
@given(
    st.sampled_from([name for name in KINDS if "storage" not in name]), st.integers(1, 5), st.integers(1, 5), st.integers(1, 3),
    st.booleans(), st.integers(0, 3), st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_one_layer_gives_and_takes_back_what_the_librarys_own_does(kind, rows, columns, count, bias, dimensions, dtype):
    torch.manual_seed(rows)
    layer = nn.Sequential(KINDS[kind](32 * rows, 32 * columns, bias=bias)).to("cpu")
    if bias:
        layer[0].bias.requires_grad_(dimensions > 0)  # of a single row the library gives it a gradient of another shape
        layer[0].bias.data = layer[0].bias.data.to(dtype)  # else the library makes it that type, when it first runs
    x = torch.randn(*[count, 2, 3][:dimensions], 32 * columns, dtype=dtype)
    weights = torch.randn(*x.shape[:-1], 32 * rows, dtype=dtype)

    def ran(network):
        taken = x.clone().requires_grad_()
        for parameter in network.parameters():
            parameter.grad = None
        given = network(taken)
        (given * weights).sum().backward()
        return given, taken.grad, *(p.grad for p in network.parameters() if p.requires_grad)

    expected = ran(layer)
    with plain_tensors(layer, "cpu") as ours:
        assert ours is layer and layer[0].weight.requires_grad is False
        found = ran(ours)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype and torch.equal(one, other)
    again = ran(layer)
    assert all(torch.equal(one, other) for one, other in zip(again, expected, strict=True)), "it is whole again"


def test_what_is_packed_travels_packed_is_not_written_back_and_has_no_state(tmp_path):
    def wide(kind):
        torch.manual_seed(0)
        middle = [KINDS[kind](1024, 1024, bias=False) if kind else nn.Linear(1024, 1024, bias=False) for _ in range(3)]
        return nn.Sequential(nn.Linear(6, 1024), *(layer.requires_grad_(False) for layer in middle), nn.Linear(1024, 4)).to(
            "cpu"
        )

    ends = 4 * (7 * 1024 + 1025 * 4)
    for kind, most in ((None, 4.0), ("8 bits", 1.01), ("4 bits, scales as they are", 0.57), ("4 bits", 0.52)):
        steps = Steps()
        trainer = Trainer(
            wide(kind), mem_limit="2GB", method="streamed", partitions=(0, 1, 2, 3, 4), batch_size=8, micro_batch_size=8,
            epochs=1, quiet=True, output_dir=tmp_path / str(kind),
        )  # fmt: skip
        result = trainer.fit(rows(), rows(), reporter=steps)
        packed = sum(part.weights for part in result.plan.partitions[1:4])
        assert 0.98 * most < packed / (3 << 20) <= most + 0.01, kind
        assert sum(part.state for part in result.plan.partitions[1:4]) == 0
        drops = [event for event in steps.done if event.step.verb is Verb.DROP and event.step.partition in (1, 2, 3)]
        assert drops and not any(event.bytes_written for event in drops)
        assert result.plan.full_state < packed + 4.2 * ends, "no gradients, and no optimizer state"


# --- killed, shared, refused -----------------------------------------------------------------------------------------------

PROGRAM = """
    import bitsandbytes, torch
    from torch import nn

    def net():
        torch.manual_seed(0)
        def packed(rows, columns):
            layer = bitsandbytes.nn.Linear4bit(columns, rows, quant_type="nf4", compute_dtype=torch.float32)
            return layer.requires_grad_(False)
        return nn.Sequential(
            nn.Linear(12, 64), packed(128, 64), nn.Dropout(0.2), nn.Linear(128, 64), packed(64, 64), nn.Linear(64, 4)
        ).to("cpu")
"""


@pytest.mark.slow
def test_a_limit_in_which_the_base_in_floats_does_not_fit_whole_is_enough_in_4_bits(processes, tmp_path):
    here = laid_out(
        tmp_path,
        """
        import bitsandbytes, torch
        from torch import nn

        def net(packed):
            torch.manual_seed(0)
            layers = [nn.Linear(12, 1536)]
            for _ in range(8):
                layer = nn.Linear(1536, 1536)
                if packed:
                    layer, values = bitsandbytes.nn.Linear4bit(1536, 1536, quant_type="nf4"), layer.state_dict()
                    layer.load_state_dict(values)
                layers += [layer.requires_grad_(False), nn.ReLU()]
            return nn.Sequential(*layers, nn.Linear(1536, 4)).to("cpu")

        def packed(): return net(True)
        def floats(): return net(False)
        """,
    )
    common = ["--data", "npz:rows.npz", "--method", "full", "--epochs", "1", "--batch-size", "8", "--output-dir"]
    peaks = {}
    for name in ("packed", "floats"):
        status, *_ = processes.run(here, ["--model", f"net:{name}", "--mem-limit", "3GB", *common, name])
        assert not status, (here / "said").read_text()
        peaks[name] = Plan.from_json((here / name / "plan.json").read_text(), name).peak
    weights = 8 * 1536 * 1536
    assert peaks["floats"] - peaks["packed"] > 2 * weights
    limit = ["--mem-limit", str((peaks["packed"] + peaks["floats"]) // 2 + (10 << 20))]
    status, *_ = processes.run(here, ["--model", "net:floats", *limit, *common, "a"])
    assert status == DoesNotFit.exit_code
    status, *_ = processes.run(here, ["--model", "net:packed", *limit, *common, "b"])
    assert not status and "violations 0" in (here / "said").read_text()


@pytest.mark.slow
def test_a_killed_run_of_a_quantized_model_goes_on_to_the_bits_of_one_that_nobody_killed(processes, tmp_path):
    here = laid_out(tmp_path, PROGRAM)
    arguments = [*COMMON, "--method", "streamed", "--partitions", "0,2,4", "--optimizer", "adam"]
    whole, counts, _ = whole_run(processes, here, arguments)
    for place in ("update", "save"):
        status, *_ = processes.run(
            here, arguments if place == "update" else ["--resume", "out"], at=(place, counts[place] // 3)
        )
        assert status < 0, (here / "said").read_text()
    status, *_ = processes.run(here, ["--resume", "out"])
    assert not status, (here / "said").read_text()
    assert ended(here) == whole


class Twice(nn.Module):
    """Two layers of one weight, of which the first runs twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 64), nn.Linear(64, 4)
        self.layers = nn.ModuleList([four(bias=False), nn.Linear(64, 64), four(bias=False)]).to("cpu")
        self.layers[2].weight = self.layers[0].weight
        self.layers[2].quant_state = self.layers[0].quant_state

    def forward(self, x):
        x = self.layers[1](torch.relu(self.layers[0](self.first(x))))
        return self.last(self.layers[0](torch.relu(self.layers[2](x))))


def test_a_packed_weight_of_several_layers_has_one_home(tmp_path):
    expected, model = looped(Twice()).state_dict(), Twice()
    result = fitted(tmp_path / "run", model, partitions="auto", method="checkpointed")
    assert not other_bits(load_file(result.weights), expected)
    assert model.layers[2].weight is model.layers[0].weight
    assert result.plan.frozen == 64 * 64


def listened_to():
    layer = four()
    layer.register_forward_hook(lambda *_: None)
    return layer.to("cpu")


def learning():
    layer = four(quant_storage=torch.bfloat16).to("cpu")
    layer.weight.requires_grad_(True)
    return layer


class Own(bnb.nn.Linear4bit):
    pass


def embedding():
    return nn.Sequential(bnb.nn.EmbeddingNF4(8, 64), nn.Flatten()).to("cpu")


def run_before():
    """As the library leaves it where the CPU multiplies numbers of bfloat16."""
    layer = four().to("cpu").eval()
    layer.weight.data, layer.weight.quant_state = bnb.functional._convert_weight_packed_for_cpu(
        layer.weight.data, layer.weight.quant_state
    )
    return layer


REFUSED = {
    "a weight that is not quantized yet": (four, r"1 is a Linear4bit of bitsandbytes [\d.]+, and it is not quantized yet"),
    "bytes that are not quantized yet": (eight, r"1 is a Linear8bitLt .* is not quantized yet\. Move the model once"),
    "a packed weight that is to learn": (learning, r"1 is a Linear4bit .* its packed weight requires a gradient, .* Freeze it"),
    "weights that learn in 16 bits": (lambda: eight(has_fp16_weights=True).to("cpu"), r"trained in 16 bits\. Build it with"),
    "a hook": (listened_to, r"1 is a Linear4bit .* it has hooks, or a forward of its own"),
    "a layer of somebody's own": (lambda: Own(64, 64).to("cpu"), r"1 is a Own .* Linear4bit, LinearNF4, LinearFP4, Linear8bit"),
    "an embedding": (embedding, r"1\.0\.weight is a Params4bit of quantized weights, which has scales"),
    "a weight that was packed for evaluation": (run_before, r"1 is a Linear4bit .* evaluation mode, .* Load it again"),
}
LOOKED_AT = REFUSED.keys() - {"an embedding", "a weight that was packed for evaluation"}
"""Those that a state_dict may be taken of, and is what it was."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_around_is_refused_by_its_name_and_left_as_it_is(name, tmp_path):
    build, said = REFUSED[name]
    model = nn.Sequential(nn.Linear(6, 64), build(), nn.Linear(64, 4))
    before = load_state(model) if name in LOOKED_AT else {}
    for network in (model, list(model)):
        with pytest.raises(ModelError, match=said):
            fitted(tmp_path / "run", network, method="full")
    after = load_state(model) if before else {}
    assert before.keys() == after.keys() and all(same(before[key], after[key]) for key in before)


def test_packed_weights_from_a_file_are_those_of_the_same_quantization_or_refused(tmp_path):
    """Scales of scales have an offset in the text beside a weight: with another one they are other numbers."""
    x, model = rows(), network("4 bits")
    result = fitted(tmp_path / "run", model)
    trainer = Trainer(network("4 bits"), mem_limit="2GB", method="full", batch_size=BATCH, quiet=True, output_dir=tmp_path)
    assert trainer.evaluate(x, weights=result.weights).loss == result.test_loss
    others = network("4 bits")
    with torch.no_grad():
        for number in (1, 4):
            layer = four(*others[number].weight.quant_state.shape)
            layer.weight.data.mul_(3)
            layer.bias.requires_grad_(number == 4)
            others[number] = layer.to("cpu")
    with pytest.raises(ModelError, match=r"model\.safetensors has 1\.\w+ quantized in another way than the model's layer"):
        fitted(tmp_path / "others", others, weights=result.weights)
    floats = {
        name: tensor for name, tensor in load_file(result.weights).items() if not name.startswith(("1.weight", "4.weight"))
    }
    save_file({**floats, "1.weight": torch.zeros(4096, 1, dtype=torch.uint8)}, tmp_path / "partly.safetensors")
    with pytest.raises(ModelError, match=r"partly\.safetensors has 1\.weight quantized in another way"):
        fitted(tmp_path / "partly", network("4 bits"), weights=tmp_path / "partly.safetensors", weights_partial=True)
    save_file(floats, tmp_path / "floats.safetensors")
    fitted(tmp_path / "floats", network("4 bits"), weights=tmp_path / "floats.safetensors", weights_partial=True)


@pytest.mark.parametrize("call", ["_places", "get_parameter"])
def test_ctrl_c_while_layers_are_emptied_or_filled_leaves_them_as_they_were(call, monkeypatch):
    model, owner = network("4 bits"), quantized if call == "_places" else Quantized
    before, real = load_state(model), getattr(owner, call)

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(owner, call, interrupted)
        with plain_tensors(model, "cpu"):
            assert call == "get_parameter" and isinstance(model[1], Quantized)
    after = load_state(model)
    assert isinstance(model[1], bnb.nn.Linear4bit)
    assert before.keys() == after.keys() and all(same(before[name], after[name]) for name in before)


def test_on_a_gpu_8_bits_are_refused():
    model = nn.Sequential(eight()).to("cpu")
    with pytest.raises(ModelError, match=r"0 is a Linear8bitLt .* on cuda the library picks columns by the values in them"):
        plain_tensors(model, "cuda").__enter__()


def test_a_program_without_quantized_layers_does_not_load_their_library(tmp_path, processes):
    """It takes 127 MB."""
    here = laid_out(
        tmp_path,
        """
        import atexit, sys
        from torch import nn
        def net():
            assert "bitsandbytes" not in sys.modules
            return [lambda: nn.Linear(12, 24), lambda: nn.Linear(24, 4)]
        """,
    )
    status, *_ = processes.run(here, [*COMMON, "--method", "full"])
    assert not status, (here / "said").read_text()
