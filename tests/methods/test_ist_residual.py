"""ResIST: residual blocks dealt out whole among subnets; a run of it is a plain loop over shallower networks."""

import copy
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from seqpart.errors import ModelError, OptionError
from seqpart.methods.ist.narrow import index_sets
from seqpart.methods.ist.parts import parted
from seqpart.model.blocks import as_chain
from seqpart.model.tensors import tensors_of
from tests.command import run as command
from tests.methods.test_ist import order
from tests.subnets import BATCH, trained

machine = pytest.mark.usefixtures("known_machine")
SUBNETS, LOCAL, ROWS = 2, 2, 48


class Block(nn.Module):
    """A pre-activation block, as the paper's, of so many channels; strided, it is in no section."""

    def __init__(self, inputs, channels, stride=1):
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(inputs), nn.BatchNorm2d(channels)
        self.wide = nn.Conv2d(inputs, channels, 3, stride, 1, bias=False)
        self.out = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(inputs, channels, 1, stride, bias=False) if stride > 1 or inputs != channels else None

    def residual_branch(self):
        return "out" if self.shortcut is None else None

    def forward(self, x):
        y = torch.relu(self.first(x))
        kept = x if self.shortcut is None else self.shortcut(y)
        return kept + self.out(torch.relu(self.second(self.wide(y))))


def stages(block=Block):
    """3 + 4 + 2 blocks: the section has the second stage's last three."""
    torch.manual_seed(3)
    return [
        nn.Conv2d(1, 4, 3, padding=1), block(4, 4), block(4, 4), block(4, 6, 2), block(6, 6), block(6, 6), block(6, 6),
        block(6, 8, 2), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
    ]  # fmt: skip


SECTION = (4, 5, 6)


class Whole(nn.Module):
    """The same with a forward of its own."""

    def __init__(self):
        super().__init__()
        self.stem, *blocks, self.head = stages()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def images(rows=ROWS, seed=1):
    x = torch.randn(rows, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return x, ((x.mean((1, 2, 3)) > 0).long() + (x[:, 0, 0, 0] > 0))


def fitted(folder, model, **options):
    return trained(folder, model, images(), images(16, 2), **options)


# --- a plain loop ----------------------------------------------------------------------------------------------------------


def run(net, has, x, parts):
    """The network with those blocks of its section alone, each adding `parts` times as much."""
    for number, block in enumerate(net):
        if number not in SECTION:
            x = block(x)
        elif number in has:
            y = torch.relu(block.first(x))
            x = x + block.out(torch.relu(block.second(block.wide(y)))) * parts
    return x


def reference(moments=True, subnets=SUBNETS):
    """What `ist` is to do with `stages()`: subnets of the same blocks, all but the section's averaged."""
    whole, states = nn.ModuleList(stages()), {}
    (x, y), round_, shard = images(), 0, ROWS // subnets
    for epoch in (1, 2):
        rows = order(5, epoch, ROWS)
        for first in range(0, shard, LOCAL * BATCH):
            round_ += 1
            dealt = [{SECTION[which] for which in own} for own in index_sets(5, round_, 0, len(SECTION), subnets, 1)]
            learned = []
            for part, has in enumerate(dealt):
                net = copy.deepcopy(whole)
                own = {n: p for n, p in net.named_parameters() if (b := int(n.split(".")[0])) not in SECTION or b in has}
                optimizer = torch.optim.Adam(own.values(), lr=1e-2, fused=True)
                for name, parameter in own.items():
                    state = states.get(name) if moments else None
                    state = state or {"step": torch.zeros(())} | {k: torch.zeros_like(parameter) for k in MOMENTS}
                    optimizer.state[parameter] = {key: value.clone() for key, value in state.items()}
                mine = rows[part * shard : (part + 1) * shard][first : first + LOCAL * BATCH]
                for at in range(0, len(mine), BATCH):
                    batch = torch.from_numpy(mine[at : at + BATCH])
                    F.cross_entropy(run(net, has, x[batch], subnets), y[batch]).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                learned.append((net.state_dict(), {name: optimizer.state[p] for name, p in own.items()}))
            merge(whole, states, dealt, learned)
    return with_statistics(whole, x[torch.from_numpy(order(5, 0, ROWS))])


MOMENTS = ("exp_avg", "exp_avg_sq")


def merge(whole, states, dealt, learned):
    """A block of the section comes from the one that had it; of what all had the mean."""
    for name, tensor in whole.state_dict().items():
        block = int(name.split(".")[0])
        owners = [p for p, has in enumerate(dealt) if block in has] if block in SECTION else range(len(dealt))
        tensor.copy_(mean([learned[p][0][name] for p in owners]))
        found = [learned[p][1][name] for p in owners if name in learned[p][1]]
        if found:
            states[name] = {key: mean([state[key] for state in found]) for key in found[0]}


def mean(values):
    if not values[0].is_floating_point():
        return values[0]
    return values[0] + sum((value - values[0] for value in values[1:]), torch.zeros(())) / len(values)


def with_statistics(whole, rows):
    norms = [module for module in whole.modules() if isinstance(module, nn.BatchNorm2d)]
    whole.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum, norm.training = None, True
    with torch.no_grad():
        for at in range(0, len(rows), BATCH):
            run(whole, SECTION, rows[at : at + BATCH], 1)
    return whole


@machine
@pytest.mark.parametrize("options", [{}, {"subnet_moments": "zero"}, {"partitions": 3}], ids=str)
@pytest.mark.parametrize("subnets", [2, 3])
@pytest.mark.few(1)
def test_a_run_is_a_plain_loop_over_shallower_networks_parameter_by_parameter(subnets, options, tmp_path):
    found = fitted(
        tmp_path / "ist", stages(), subnets=subnets, local_steps=LOCAL, micro_batch_size=BATCH, **options
    )  # fmt: skip
    expected, weights = reference("subnet_moments" not in options, subnets).state_dict(), load_file(found.weights)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), f"{name} differs by {(weights[name] - tensor).abs().max()}"


@machine
@pytest.mark.slow
def test_a_model_with_a_forward_of_its_own_is_trained_as_the_list_of_its_blocks(tmp_path):
    options = {"subnets": 2, "local_steps": LOCAL, "micro_batch_size": BATCH}
    expected = load_file(fitted(tmp_path / "list", stages(), **options).weights)
    model = Whole()
    found = load_file(fitted(tmp_path / "whole", model, **options).weights)
    renamed = {"stem": "0", "head": "8"} | {f"blocks.{number}": str(number + 1) for number in range(7)}
    for name, tensor in found.items():
        path = next(old for old in renamed if name.startswith(f"{old}."))
        assert torch.equal(tensor, expected[renamed[path] + name[len(path) :]]), name
        assert torch.equal(model.state_dict()[name], tensor)
    assert len(found) == len(expected)


# --- models of libraries, and one subnet -----------------------------------------------------------------------------------


def torchvision_net():
    from torchvision.models.resnet import BasicBlock, ResNet

    torch.manual_seed(3)
    net = ResNet(BasicBlock, [1, 1, 3, 1], num_classes=3)
    net.conv1 = nn.Conv2d(1, 64, 3, padding=1, bias=False)
    return net


def timm_net():
    resnet = pytest.importorskip("timm.models.resnet")
    torch.manual_seed(3)
    return resnet.ResNet(
        resnet.Bottleneck, (1, 1, 3, 1), num_classes=3, in_chans=1, channels=(8, 8, 16, 16), block_args={"attn_layer": "se"}
    )


LIBRARIES = {"torchvision": torchvision_net, "timm": timm_net}


@machine
@pytest.mark.parametrize("model", [stages, Whole, pytest.param(timm_net, marks=pytest.mark.slow)])
@pytest.mark.few(1)
def test_one_subnet_is_full_training_to_the_bit(model, tmp_path):
    expected = fitted(tmp_path / "full", model(), method="full")
    found = fitted(tmp_path / "ist", model(), subnets=1, local_steps=LOCAL)
    assert found.weights.read_bytes() == expected.weights.read_bytes()


@machine
@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_subnets_that_learn_nothing_leave_every_weight_as_it_was_and_have_part_of_the_section(name, tmp_path):
    result = fitted(tmp_path / "ist", LIBRARIES[name](), subnets=2, local_steps=1, optimizer="sgd", lr=0.0, epochs=1)
    found, before = load_file(result.weights), LIBRARIES[name]().state_dict()
    assert found.keys() == before.keys()
    for tensor, value in before.items():
        if "running" not in tensor and "tracked" not in tensor:
            assert torch.equal(found[tensor], value), tensor
    whole, *subnets = result.plan.partitions
    assert len(subnets) == 2 and all(part.weights < whole.weights for part in subnets)
    assert "residual blocks" in " ".join(result.plan.reasons) and result.proof.violations == 0


def halves(x, block):
    """What `block` gives, and what it is given, without its last activation, and its copy in one of two parts."""
    section = parted(as_chain([block, copy.deepcopy(block)]), count=2, group=1, seed=0)
    copied = section[2].another().eval()
    for name, tensor in tensors_of(copied).items():
        tensor.data.copy_(tensors_of(block)[name])
    return block.eval()(x), copied(x)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_block_of_a_library_adds_as_much_more_as_there_are_subnets(name):
    """Where nothing is negative ReLU changes nothing: what is added is what it gives, less what it was given. timm begins with
    zeros there."""
    net = LIBRARIES[name]()
    block = net.layer3[1].eval()
    last = block.bn2 if name == "torchvision" else block.bn3
    nn.init.uniform_(last.weight, 0.05, 0.1)
    x = 9 + torch.rand(2, *block.conv1.weight.shape[1:2], 5, 5)
    whole, copied = halves(x, block)
    assert (whole > 0).all() and torch.allclose(copied - x, 2 * (whole - x), atol=1e-4) and not torch.allclose(whole, x)


@pytest.mark.slow
def test_the_peak_of_a_library_s_network_is_predicted_and_the_limit_kept(tmp_path):
    chance = np.random.default_rng(0)
    x, y = chance.normal(size=(160, 3, 32, 32)).astype(np.float32), np.arange(160) % 10
    np.savez(tmp_path / "rows.npz", x_train=x, y_train=y, x_test=x[:40], y_test=y[:40])
    words = ["--model", "torchvision:resnet50", "--data", "npz:rows.npz", "--mem-limit", "800MB", "--batch-size", "16"]
    ran = command(tmp_path, *words, "--method", "ist", "--subnets", "5", "--epochs", "1", "--output-dir", "run")
    assert ran.code == 0 and "residual blocks 12..16 dealt out among them, 5 in all" in ran.out, ran.err
    proof = json.loads((tmp_path / "run" / "result.json").read_text())["proof"]
    assert -0.01 <= proof["predicted"] / proof["peak"] - 1 <= 0.05 and proof["violations"] == 0


# --- what is refused -------------------------------------------------------------------------------------------------------


class Skipping(Whole):
    """A skip over a block, as in a UNet."""

    def forward(self, x):
        first = self.stem(x)
        x = self.blocks[1](self.blocks[0](first)) + first
        for block in self.blocks[2:]:
            x = block(x)
        return self.head(x)


class Claiming(Block):
    def residual_branch(self):
        return "convolution"


class Shrinking(Block):
    """It says that it adds to its input, and does so at every second place."""

    def forward(self, x):
        return super().forward(x)[:, :, ::2, ::2]


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.two(torch.relu(self.norm(self.one(x.flatten(1)))))


def shrinking():
    return [nn.Conv2d(1, 4, 3, padding=1), Shrinking(4, 4), Shrinking(4, 4), stages()[-1][:2], nn.Linear(4, 3)]


def listened():
    net = stages()
    net[5].out.register_forward_hook(lambda *_: None)
    return net


@machine
@pytest.mark.parametrize(
    ("model", "subnets", "error", "text"),
    [
        (stages, 4, OptionError, r"block 4 \(Block\) to block 6 \(Block\), has 3, and each subnet needs one. Give at most 3"),
        (Skipping, 2, ModelError, r"between block 2 \(Block\) and block 3 \(Block\) there are more"),
        (Functional, 2, ModelError, r"let it be modules \(nn.ReLU and not F.relu\)"),
        (listened, 2, ModelError, r"method ist deals out block 5 \(Block\), which has hooks"),
        (lambda: stages(Claiming), 2, ModelError, r"residual_branch\(\) must return .* found 'convolution'"),
        (
            shrinking,
            2,
            ModelError,
            r"block 1 \(Shrinking\) declares .* adds to its input, but a row has the shape \(4, 8, 8\) .* and \(4, 4, 4\)",
        ),
    ],
    ids=["too many subnets", "a skip", "functions", "hooks", "no such branch", "another shape"],
)
def test_what_cannot_be_dealt_out_is_refused_with_the_block(model, subnets, error, text, tmp_path):
    with pytest.raises(error, match=text):
        fitted(tmp_path / "run", model(), subnets=subnets)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("round_", [1, 2, 7])
def test_every_block_of_the_section_belongs_to_one_subnet_and_keeps_its_order(count, round_):
    parts = parted(as_chain(stages()), count=count, group=1, seed=4).parts
    held = {block: parts.holders(block, round_) for block in SECTION}
    assert all(len(holders) == 1 for holders in held.values())
    for part in range(count):
        places = [holders[part] for holders in held.values() if part in holders]
        assert places == sorted(places) and len(places) == parts.section.depth(part, count)
    assert all(len(parts.holders(block, round_)) == count for block in range(9) if block not in SECTION)


def test_the_deal_is_another_in_each_round_and_the_same_for_one_seed():
    section = parted(as_chain(stages()), count=3, group=1, seed=4).parts.section
    rounds = [section.dealt(4, round_, 3) for round_ in range(1, 9)]
    assert len({tuple(sorted(dealt.items())) for dealt in rounds}) > 2
    assert rounds == [section.dealt(4, round_, 3) for round_ in range(1, 9)]
    assert np.unique([part for dealt in rounds for part, _ in dealt.values()]).tolist() == [0, 1, 2]
