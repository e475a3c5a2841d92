"""What method ist divides: the zoo's residual blocks and transformers, convolutional nets; given alive or as factories."""

import re

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from seqpart import Trainer
from seqpart.device.ranks import Ranks
from seqpart.errors import DataError, DoesNotFit, ModelError, OptionError, OutOfMemory
from seqpart.methods.ist.hidden import Hidden, Side
from seqpart.methods.ist.moving import Parting
from seqpart.methods.ist.parts import parted
from seqpart.model.blocks import as_chain
from seqpart.model.tensors import tensors_of
from seqpart.plan.plan import Plan
from seqpart.train import run_command
from seqpart.zoo import models
from tests import command
from tests.methods.test_ist import blocks, data, fitted

machine = pytest.mark.usefixtures("known_machine")


def tokens(rows=24, seed=1):
    chance = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 11, (rows, 6), generator=chance)
    return x, x.roll(-1, 1)


def images(rows=40, seed=1):
    x = torch.randn(rows, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return x, (x.mean((1, 2, 3)) > 0).long()


def gpt():
    return models.gpt(11, 6, width=16, depth=2, heads=4, dropout=0.1)


def convolutional():
    return [
        lambda: nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        lambda: nn.Sequential(nn.Linear(54, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2)), lambda: nn.Linear(64, 2),
    ]  # fmt: skip


def vit():
    timm = pytest.importorskip("timm")
    torch.manual_seed(3)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, in_chans=1, embed_dim=24, depth=2, num_heads=6, num_classes=2
    )


MODELS = {
    "mlp": (lambda: models.mlp(6, 4, width=16, depth=3), data),
    "gpt": (gpt, tokens),
    "conv": (convolutional, images),
    "vit": (vit, images),
}


def run(folder, name, **options):
    model, rows = MODELS[name]
    options = {"mem_limit": "2GB", "method": "ist", "epochs": 2, "batch_size": 8, "lr": 1e-2, "seed": 5, **options}
    return Trainer(model(), None, options.pop("optimizer", "adam"), output_dir=folder, quiet=True, **options).fit(
        rows(), rows(16, 2)
    )


@machine
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.few(1)
def test_one_subnet_of_it_is_full_training_to_the_bit(name, tmp_path):
    expected = run(tmp_path / "full", name, method="full")
    assert run(tmp_path / "ist", name, subnets=1).weights.read_bytes() == expected.weights.read_bytes()


@machine
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.few(1)
def test_subnets_that_learn_nothing_leave_every_weight_as_it_was(name, tmp_path):
    """Cut, loaded, dropped and put back, round after round."""
    found = load_file(run(tmp_path / "ist", name, subnets=3, local_steps=1, optimizer="sgd", lr=0.0).weights)
    before = load_file(run(tmp_path / "full", name, method="full", optimizer="sgd", lr=0.0, epochs=1).weights)
    assert found.keys() == before.keys()
    for tensor, value in before.items():
        if "running" not in tensor and "tracked" not in tensor:
            assert torch.equal(found[tensor], value), tensor


@machine
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.few(1)
def test_it_learns_and_its_plan_has_room_for_one_subnet_at_a_time(name, tmp_path):
    result = run(tmp_path / "ist", name, subnets=2, local_steps=1, epochs=8)
    losses = result.train_losses
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    whole, *subnets = result.plan.partitions
    assert len(subnets) == 2 and whole.first == 0 and whole.state == 0
    assert all(part.weights < whole.weights for part in subnets)
    assert result.proof.violations == 0


def randomized(block):
    for tensor in tensors_of(block).values():
        tensor.data.normal_()
    return block.eval()


def parts_of(block, count):
    """Modules of the parts with what they have of the block's weights, cut here in another way: by masks."""
    chain = parted(as_chain([block]), count=count, group=1, seed=4)
    units, found = chain.parts.units(1), []
    for part in range(count):
        module = chain[1 + part].another().eval()
        for name, tensor in tensors_of(module).items():
            if name.endswith("neurons"):
                tensor.copy_(torch.from_numpy(units[part][0]))
                continue
            value = tensors_of(block)[name].detach()
            for axis, cut in enumerate(chain.parts.cuts[0].get(name, ())):
                if cut is not None:
                    shape = (cut.before, cut.units, cut.after, *value.movedim(axis, 0).shape[1:])
                    kept = torch.zeros(cut.units, dtype=torch.bool)
                    kept[torch.from_numpy(units[part][cut.layer])] = True
                    value = value.movedim(axis, 0).reshape(shape)[:, kept].flatten(0, 2).movedim(0, axis)
            tensor.data.copy_(value)
        found.append(module)
    return found


@pytest.mark.parametrize("silent", ["mlp.3", "mixed"])
@pytest.mark.parametrize("count", [2, 3])
def test_a_transformer_blocks_branches_are_the_means_of_its_parts(silent, count):
    """Heads and neurons of the MLP, each with the other branch giving zeros."""
    block = randomized(models.TransformerBlock(24, 6, 0.0))
    for tensor in block.get_submodule(silent).parameters():
        tensor.data.zero_()
    x = torch.randn(2, 5, 24)
    mean = sum(part(x) for part in parts_of(block, count)) / count
    assert torch.allclose(mean, block(x), rtol=1e-3, atol=1e-3)


def vit_block():
    return pytest.importorskip("timm.models.vision_transformer").Block(24, 6, qkv_bias=True, qk_norm=True, init_values=0.5)


def encoder_block():
    from torchvision.models.vision_transformer import EncoderBlock

    return EncoderBlock(4, 24, 64, 0.0, 0.0)


def encoder_layer():
    return nn.TransformerEncoderLayer(24, 4, 64, activation="gelu", batch_first=True, norm_first=True)


@pytest.mark.parametrize(
    ("make", "silent", "cut"),
    [
        (vit_block, "mlp.fc2", {"attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight"}),
        (vit_block, "attn.proj", {"mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight"}),
        (encoder_layer, "self_attn.out_proj", {"linear1.weight", "linear1.bias", "linear2.weight"}),
        (encoder_block, "self_attention.out_proj", {"mlp.0.weight", "mlp.0.bias", "mlp.3.weight"}),
    ],
    ids=["timm's heads", "timm's neurons", "torch's neurons", "torchvision's neurons"],
)
@pytest.mark.parametrize("count", [2, 4])
def test_the_branches_of_a_transformer_block_of_a_library_are_the_means_of_its_parts(make, silent, cut, count):
    block = randomized(make())
    for tensor in block.get_submodule(silent).parameters():
        tensor.data.zero_()
    x = torch.randn(2, 5, 24)
    assert cut <= parted(as_chain([block]), count=count, group=1, seed=4).parts.cuts[0].keys()
    mean = sum(part(x) for part in parts_of(block, count)) / count
    assert torch.allclose(mean, block(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("count", [2, 3])
def test_the_parts_of_a_residual_block_add_what_the_whole_one_adds(count):
    block, x = randomized(models.ResidualBlock(12)), torch.randn(5, 12)
    added = sum(part(x) - x for part in parts_of(block, count))
    assert torch.allclose(added, block(x) - x, rtol=1e-4, atol=1e-4)


@machine
def test_modules_given_alive_have_learned_and_an_evaluation_judges_them(tmp_path):
    model = nn.Sequential(*blocks())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = Trainer(
        model, mem_limit="2GB", method="ist", subnets=2, local_steps=2, epochs=2, batch_size=8, lr=1e-2,
        output_dir=tmp_path / "run", quiet=True,
    )  # fmt: skip
    result = trainer.fit(data(), data(30, 2))
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in load_file(result.weights).items())
    assert not torch.equal(before["1.weight"], model.state_dict()["1.weight"])
    assert all(parameter.requires_grad for parameter in model.parameters()) and model.training
    assert trainer.evaluate(data(30, 2)).loss == pytest.approx(result.test_loss, rel=1e-5)


class WithForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(blocks())

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@machine
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"subnets": 17}, OptionError, "has a hidden layer of 16 neurons, and each subnet needs one. Give at most 16"),
        ({"subnets": 2, "mem_limit": "550MB"}, DoesNotFit, "smallest limit that fits"),
        ({"subnets": 2, "partitions": (0, 7)}, OptionError, "block 7 does not exist; a subnet has blocks 0..3"),
        ({"subnets": 2, "warmup_updates": 40}, OptionError, "the learning rate would never be reached"),
        ({"subnets": 2, "lr": (0.1, 0.2)}, OptionError, "values for each partition go with --method sil only"),
    ],
    ids=str,
)
def test_what_a_run_cannot_do_is_refused(options, error, text, tmp_path):
    with pytest.raises(error) as found:
        fitted(tmp_path / "run", blocks(), **options)
    assert text in f"{found.value.with_flags}"
    assert not list(tmp_path.iterdir())


@machine
def test_a_model_with_a_forward_of_its_own_is_trained_as_the_list_of_its_layers(tmp_path):
    """Whose hidden layers are seen through it: the same neurons are drawn, and the same rows."""
    expected = load_file(fitted(tmp_path / "list", blocks(), subnets=2, local_steps=2).weights)
    found = load_file(fitted(tmp_path / "run", WithForward(), subnets=2, local_steps=2).weights)
    assert {f"layers.{name}" for name in expected} == found.keys()
    assert all(torch.equal(found[f"layers.{name}"], tensor) for name, tensor in expected.items())


@machine
@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("GPT2", "block 0 (Embedding) and block 1 (Embedding)"),
        ("Llama", "block 1 (LlamaRotaryEmbedding) and block 2 (LlamaDecoderLayer)"),
    ],
)
def test_models_of_transformers_whose_positions_pass_over_layers_are_refused_with_the_place(name, places):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 11, "use_cache": False}
    config = getattr(transformers, f"{name}Config")(**sizes, bos_token_id=0, eos_token_id=1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=re.escape(f"skip connection between blocks); between {places} there are more")):
        Trainer(model, mem_limit="2GB", method="ist", subnets=2, quiet=True).plan(tokens(), tokens())


@machine
def test_too_few_rows_are_refused(tmp_path):
    with pytest.raises(DataError, match="3 training rows are fewer than 4 subnets"):
        Trainer(blocks(), mem_limit="2GB", method="ist", subnets=4, quiet=True).plan(data(3), data(3))


@pytest.mark.slow
def test_a_limit_that_a_refusal_names_is_enough_and_no_larger_than_it_must_be(tmp_path):
    """It was 16 MB more: as for blocks that could not be run for real, which those of the whole network never are. In
    processes of their own, whose memory does not depend on the tests before."""
    options = ["--method", "ist", "--subnets", "2", "--width", "256", "--depth", "2", "--epochs", "1", "--overwrite"]
    refusal = command.run(tmp_path, *options, "--mem-limit", "250MB", "--dry-run")
    named = int(re.search(r"smallest limit that fits: (\d+)MB", refusal.err)[1])
    assert command.run(tmp_path, *options, "--mem-limit", f"{named - 8}MB", "--dry-run").code == 3
    done = command.run(tmp_path, *options, "--mem-limit", f"{named}MB")
    assert done.code == 0 and "violations 0" in done.out, done.err


# --- where memory runs out, and elsewhere than on the CPU -----------------------------------------------------------------


class Hungry(nn.Module):
    """Raises what an allocator does when it is given more than `rows` rows."""

    def __init__(self, rows):
        super().__init__()
        self.linear, self.rows = nn.Linear(16, 16), rows

    def forward(self, x):
        if type(x) is torch.Tensor and len(x) > self.rows:  # costs are found on fake tensors
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
        return torch.relu(self.linear(x))


def hungry(rows):
    torch.manual_seed(3)
    return [nn.Linear(6, 16), Hungry(rows), nn.Linear(16, 24), nn.LayerNorm(24), nn.Tanh(), nn.Linear(24, 4)]


@machine
def test_an_allocation_that_fails_in_a_subnet_halves_the_micro_batch_and_nothing_is_lost(tmp_path):
    options = {"subnets": 2, "local_steps": 2}
    expected = fitted(tmp_path / "half", hungry(9), micro_batch_size=4, **options)
    found = fitted(tmp_path / "run", hungry(4), **options)
    assert found.final_micro_batch == 4
    assert found.weights.read_bytes() == expected.weights.read_bytes()


@machine
def test_memory_that_runs_out_as_homes_are_cut_is_said_with_the_step(tmp_path, monkeypatch):
    def refusing(*_):
        raise MemoryError("cannot allocate")

    monkeypatch.setattr(Parting, "split", refusing)
    with pytest.raises(OutOfMemory, match=r"memory ran out in S0, where a smaller micro-batch cannot help"):
        fitted(tmp_path / "run", blocks(), subnets=2)


@machine
def test_on_a_simulated_device_it_has_the_bits_of_the_cpu(tmp_path):
    options = {"subnets": 2, "local_steps": 2, "partitions": 2, "micro_batch_size": 8}
    expected = fitted(tmp_path / "cpu", blocks(), **options)
    found = fitted(tmp_path / "sim", blocks(), device="sim:rtx3060-12gb", **options)
    assert found.weights.read_bytes() == expected.weights.read_bytes()


COMMAND = "--method ist --subnets 4 --local-steps 20 --mem-limit 2GB --width 256 --depth 2 --epochs 1"


@machine
def test_the_command_shows_one_subnet_at_a_time_and_its_schedule(capsys, tmp_path):
    said = command.call(capsys, *COMMAND.split(), "--dry-run", "--print-schedule", "--micro-batch-size", "32").out
    assert "4 subnet(s), hidden layers divided among them: 2 of 4 groups of 64 neurons; blocks 0, 3 whole in each" in said
    assert "[split 0.1] S0 [train 1.1] L1+ B1.0 B1.1 U1" in said
    assert "method ist" in said and not list(tmp_path.iterdir())


@machine
def test_the_command_trains_and_is_refused_by_verify(capsys, tmp_path):
    assert command.call(capsys, *COMMAND.split(), "--output-dir", str(tmp_path / "run")).code == 0
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert run_command("verify", COMMAND.split()) == 2
    assert "--method ist is approximate: its bits are not those of full training" in capsys.readouterr().err


class Documented(nn.Module):
    """As docs/ist.md has it."""

    def __init__(self, width, inner):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

    def hidden_layers(self):
        return [Hidden(units=self.up.out_features, rows=(Side("up"),), columns=(Side("down"),))]


def test_a_block_that_says_what_it_hides_is_the_mean_of_its_parts():
    block, x = randomized(Documented(6, 15)), torch.randn(5, 6)
    mean = sum(part(x) for part in parts_of(block, 3)) / 3
    assert torch.allclose(mean, block(x), rtol=1e-4, atol=1e-4)


def test_hidden_layers_that_do_not_fit_are_refused_with_the_block():
    class Wrong(Documented):
        def hidden_layers(self):
            return [Hidden(units=7, rows=(Side("up"),))]

    with pytest.raises(ModelError, match="block 0 says that up has 1 x 7 x 1 of a hidden layer's units; it has 15"):
        parted(as_chain([Wrong(6, 15)]), count=2, group=1, seed=0)


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        (None, "must return a list of Hidden; found a NoneType"),
        ([{"units": 15}], "must return Hidden with rows of Side; found {'units': 15}"),
        ([Hidden(units=15, rows=())], "must return Hidden with rows of Side"),
        ([Hidden(units=15, rows=("up",))], "must return Hidden with rows of Side"),
        ([Hidden(units=15, rows=(Side("nope"),))], "names 'nope', which is none of its modules"),
        ([Hidden(units=6, rows=(Side("norm"),), placed=True)], "has 'norm' in columns or placed; it is a LayerNorm"),
        ([Hidden(units=15, rows=(Side("up"),), counts=("heads",))], "counts 'heads', which is no attribute with a number"),
        ([Hidden(units=15, rows=(Side("up"),))] * 2, "layer up of block 0 twice"),
    ],
)
def test_mistakes_in_hidden_layers_are_said_in_words(declared, words):
    class Wrong(Documented):
        def hidden_layers(self):
            return declared

    with pytest.raises(ModelError, match=words):
        parted(as_chain([Wrong(6, 15)]), count=2, group=1, seed=0)


def test_a_layer_with_hooks_is_not_divided():
    """Its narrow copies had none: subnets learned by other outputs than the network was tested with."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    model[3].register_forward_hook(lambda _, __, output: 0 * output)
    with pytest.raises(ModelError, match="layer Linear of block 3, which has hooks"):
        parted(as_chain(model), count=2, group=1, seed=0)


class Rank(Ranks):
    """One of several processes, while a plan is made."""

    def __init__(self, number, count):
        self.number, self.count = number, count


@machine
def test_the_first_process_s_plan_has_room_for_the_subnets_of_the_others(monkeypatch):
    """Of four groups of neurons the first of three subnets has two, the others have one each."""
    monkeypatch.setattr("seqpart.device.device.Device.keeps_heap", False)  # which several processes do not have
    plans: list[Plan] = []
    for place in ((0, 2), (0, 2), (1, 2)):  # what is first planned in a process takes more
        monkeypatch.setattr("seqpart.runtime.setup.ranks_of", lambda _, place=place: Rank(*place))
        options = {"method": "ist", "subnets": 3, "subnet_groups": 640, "partitions": 2, "optimizer": "adam"}
        trainer = Trainer(models.mlp(6, 4, width=2560, depth=3), mem_limit="2GB", quiet=True, **options)
        plans.append(trainer.plan(data(), reuse=plans[0] if plans else None))
    _, first, second = ([part.peak - plan.runtime for part in plan.partitions] for plan in plans)
    varies = 16 << 20  # of what kernels keep
    assert max(second) < max(first) and all(mine > peak - varies for mine, peak in zip(first, second, strict=True))
