"""Parts of a network: who has which neurons, and homes that are cut into theirs and put back."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from seqpart.device.device import Device
from seqpart.device.pages import aligned
from seqpart.errors import ModelError, OptionError
from seqpart.methods.ist import moving
from seqpart.methods.ist.hidden import Hidden, Side
from seqpart.methods.ist.moving import merge, split
from seqpart.methods.ist.narrow import Cut, PartialSum, Placed, index_sets, widths
from seqpart.methods.ist.parts import parted
from seqpart.model.blocks import as_chain
from seqpart.model.tensors import layout_of, tensors_of
from seqpart.store.host_pool import HostPool
from seqpart.store.store import Store
from tests.choice import in_pairs

PARTS = st.integers(1, 5)


@given(units=st.integers(5, 300), parts=PARTS, group=st.sampled_from([1, 4, 64]), round_=st.integers(1, 9))
def test_index_sets_are_disjoint_cover_all_neurons_and_are_as_wide_in_every_round(units, parts, group, round_):
    sets = index_sets(7, round_, 3, units, parts, group)
    assert sorted(np.concatenate(sets)) == list(range(units))
    assert tuple(map(len, sets)) == widths(units, parts, group)
    assert max(map(len, sets)) - min(map(len, sets)) in (0, 1, group)
    assert all((np.diff(own) > 0).all() for own in sets), "ascending, so that homes are read from the first byte to the last"
    again = index_sets(7, round_, 3, units, parts, group)
    assert all(map(np.array_equal, sets, again))


@given(parts=PARTS, groups=st.integers(5, 9))
def test_neurons_of_a_group_stay_together(parts, groups):
    for own in index_sets(1, 1, 0, 64 * groups, parts, 64):
        assert sorted({number // 64 for number in own}) == [first // 64 for first in own[::64]]
        assert len(own) % 64 == 0


def test_rounds_layers_and_seeds_are_drawn_apart():
    first = index_sets(1, 1, 1, 640, 2, 1)[0]
    others = [index_sets(*key, 640, 2, 1)[0] for key in [(2, 1, 1), (1, 2, 1), (1, 1, 2)]]
    assert not any(np.array_equal(first, other) for other in others)


class Residual(nn.Module):
    """A residual block of heads and of neurons that stay where they are."""

    def __init__(self, width=12, heads=6):
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.mixed, self.last = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, width)

    def hidden_layers(self):
        width = self.norm.normalized_shape[0]
        return [
            Hidden(
                units=self.heads, rows=(Side("qkv", 3, width // self.heads),), columns=(Side("mixed", 1, width // self.heads),),
                counts=("heads",), alone=True,
            ),
            Hidden(units=width, rows=(Side("last"),), placed=True),
        ]  # fmt: skip

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(1, (3, self.heads, -1)).unbind(1)
        x = x + self.mixed((q * k.tanh() + v).flatten(1))
        return x + torch.relu(self.last(self.norm(x)))


def chains():
    return {
        "blocks of their own": [
            nn.Linear(5, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 7), nn.LayerNorm(7), nn.Tanh(), nn.Dropout(0.5),
            nn.Linear(7, 3),
        ],
        "in nn.Sequential": [
            nn.Sequential(nn.Linear(5, 64), nn.BatchNorm1d(64), nn.GELU()), nn.Sequential(nn.Linear(64, 128), nn.RMSNorm(128)),
            nn.Sequential(nn.SiLU(), nn.Linear(128, 3, bias=False)),
        ],
        "residual": [nn.Linear(5, 12), Residual(), nn.Linear(12, 3)],
        "a convolution before": [
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 10), nn.BatchNorm1d(10), nn.ReLU(),
            nn.Linear(10, 3),
        ],
        "of bfloat16": [nn.Linear(5, 9).bfloat16(), nn.LayerNorm(9).bfloat16(), nn.Linear(9, 3).bfloat16()],
    }  # fmt: skip


def randomized(module):
    for tensor in tensors_of(module).values():
        tensor.data.copy_(torch.randn(tensor.shape) if tensor.is_floating_point() else torch.tensor(3))
    return module


def put(store, name, tensors):
    layout = layout_of(tensors)
    flat = aligned(layout.nbytes)
    for own, view in layout.views(flat).items():
        view.copy_(tensors[own].detach())
    store.put(name, layout, flat)
    return layout


def got(store, name):
    flat = aligned(store.layout(name).nbytes)
    store.get(name, flat)
    return store.layout(name).views(flat)


def stores(folder):
    return {"disk": Store(folder, Device()), "host": Store(folder, Device(), HostPool(1 << 22, Device()))}


@pytest.mark.parametrize(
    ("name", "count", "piece", "tier"), in_pairs([*chains()], [1, 2, 3], [1 << 20, 4096], ["disk", "host"]), ids=str
)
def test_what_is_split_and_merged_is_what_it_was(name, count, piece, tier, tmp_path, monkeypatch):
    """To the bit, whatever is in memory at a time; each part has what its module needs."""
    monkeypatch.setattr(moving, "WHOLE", piece)
    monkeypatch.setattr(moving, "PART", 4096)
    whole = [randomized(module) for module in chains()[name]]
    chain = parted(as_chain(whole), count=count, group=64, seed=3)
    parts, store = chain.parts, stores(tmp_path)[tier]
    for round_ in (1, 2):
        units = parts.units(round_)
        for number, module in enumerate(whole):
            own = [chain[parts.block_of(part, number)] for part in range(count)]
            layouts = [layout_of(tensors_of(block.another())) for block in own]
            layout = put(store, f"whole-{number}", tensors_of(module))

            def cut_of(tensor, number=number):
                return parts.cuts[number].get(tensor, Cut())

            split(store, f"whole-{number}", [block.home for block in own], layouts, cut_of, units, parts.numbers(number))
            for part, block in enumerate(own):
                for tensor, found in got(store, block.home).items():
                    layer = parts.numbers(number).get(tensor)
                    if layer is not None:
                        assert torch.equal(found, torch.from_numpy(units[part][layer]))
                        continue
                    expected = tensors_of(module)[tensor].detach()
                    rows, columns = cut_of(tensor)
                    expected = expected if rows is None else expected[torch.from_numpy(rows.places(units[part][rows.layer]))]
                    if columns is not None:
                        expected = expected[:, torch.from_numpy(columns.places(units[part][columns.layer]))]
                    assert torch.equal(found, expected)
            put(store, f"whole-{number}", {tensor: torch.full_like(value, 2) if cut_of(tensor) == Cut() else value
                                 for tensor, value in tensors_of(module).items()})  # fmt: skip
            merge(store, f"whole-{number}", layout, [block.home for block in own], cut_of, units)
            for tensor, found in got(store, f"whole-{number}").items():
                assert torch.equal(found, tensors_of(module)[tensor]), tensor
    store.close()


def test_what_parts_have_learned_is_put_where_it_belongs_and_what_all_have_is_averaged(tmp_path):
    whole = [randomized(module) for module in chains()["blocks of their own"]]
    chain = parted(as_chain(whole), count=3, group=1, seed=3)
    parts, store, units = chain.parts, Store(tmp_path, Device()), chain.parts.units(1)
    own = [chain[parts.block_of(part, 3)] for part in range(3)]
    layout = put(store, "whole", tensors_of(whole[3]))
    learned = [tensors_of(randomized(block.another())) for block in own]
    for block, tensors in zip(own, learned, strict=True):
        put(store, block.home, tensors)
    merge(store, "whole", layout, [block.home for block in own], lambda name: parts.cuts[3][name], units)
    expected = {name: tensor.detach().clone() for name, tensor in tensors_of(whole[3]).items()}
    for part, tensors in enumerate(learned):
        columns, rows = (torch.from_numpy(units[part][layer]) for layer in (0, 1))
        expected["weight"][rows[:, None], columns] = tensors["weight"].detach()
        expected["bias"][rows] = tensors["bias"].detach()
    found = got(store, "whole")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    store.close()


def test_the_parts_of_a_sum_are_scaled_and_its_neurons_lie_in_their_places():
    x, linear = torch.randn(4, 6), nn.Linear(6, 5)
    assert torch.equal(PartialSum(linear, 3)(x), linear(3 * x))
    placed = Placed(linear, 8, 5)
    placed.neurons.copy_(torch.tensor([0, 2, 3, 6, 7]))
    y = placed(x)
    assert torch.equal(y[:, placed.neurons], linear(x)) and not y[:, [1, 4, 5]].any()


@pytest.mark.parametrize("name", chains())
def test_a_part_runs_and_has_its_share(name):
    whole = chains()[name]
    chain = parted(as_chain(whole), count=2, group=64, seed=0)
    x = torch.randn(8, 1, 4, 4) if "convolution" in name else torch.randn(8, 5)
    x = x.bfloat16() if "bfloat16" in name else x
    for block in chain[len(whole) : 2 * len(whole)]:
        x = block.another().eval()(x)
    assert x.shape == (8, 3)

    def size(blocks):
        return sum(tensor.numel() for block in blocks for tensor in tensors_of(block.another()).values())

    own = size(chain[len(whole) : 2 * len(whole)])
    assert own < 0.8 * sum(tensor.numel() for module in whole for tensor in tensors_of(module).values())


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        (lambda: [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)], ModelError, "none between block 0 (Linear) and block 2"),
        (lambda: [nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 2)], ModelError, "no hidden layer to divide"),
        (lambda: [nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)], OptionError, "block 0 (Linear) has a hidden layer of 3"),
        (lambda: [nn.Identity()] * 300, OptionError, "are more than 1024"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused_with_its_name(model, error, text):
    with pytest.raises(error) as found:
        parted(as_chain(model()), count=4, group=64, seed=0)
    assert text in found.value.with_flags


def test_blocks_that_share_a_weight_are_refused():
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    with pytest.raises(ModelError, match="must not share a parameter"):
        parted(as_chain([first, nn.LayerNorm(4), last]), count=2, group=64, seed=0)


def test_hooks_of_parameters_which_copies_of_blocks_lack_are_refused():
    norm = nn.LayerNorm(4)
    norm.weight.register_hook(torch.zeros_like)
    with pytest.raises(ModelError, match=r"lack the hooks of block 1 \(LayerNorm\)'s parameters"):
        parted(as_chain([nn.Linear(4, 4), norm, nn.Linear(4, 4)]), count=2, group=64, seed=0)
