"""The model as a chain: what can be cut is taken as it is, what cannot is refused by name."""

import functools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from seqpart import Trainer
from seqpart.device.device import Device
from seqpart.device.pages import aligned
from seqpart.errors import ModelError
from seqpart.model.blocks import as_chain
from seqpart.model.tensors import attach, detach, layout_of, run_fake, tensors_of


def linear():
    return nn.Linear(3, 4)


class WithBuffers(nn.Module):
    """A parameter, a buffer of its own, one that no state_dict has, and both again one level down."""

    def __init__(self, inner=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("table", torch.randn(2), persistent=False)
        if inner:
            self.inner = WithBuffers(inner=False)

    def forward(self, x):
        return x * self.weight + self.count


@pytest.mark.parametrize("wrap", [lambda parts: nn.Sequential(*parts), list, tuple])
def test_a_sequential_or_a_list_of_modules_is_a_chain_in_order(wrap):
    chain = as_chain(wrap([nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4)]))
    assert [str(block) for block in chain] == ["block 0 (Linear)", "block 1 (ReLU)", "block 2 (Linear)"]
    assert [(block.number, block.name, block.home) for block in chain[1:]] == [
        (1, "1", "block-00001"),
        (2, "2", "block-00002"),
    ]
    assert chain[2].state_home != chain[2].home
    assert all(block.alive is not None for block in chain)


def test_named_parts_of_a_sequential_keep_their_names():
    model = nn.Sequential()
    model.add_module("stem", nn.Linear(2, 2))
    model.add_module("head", nn.Linear(2, 2))
    assert [block.name for block in as_chain(model)] == ["stem", "head"]


def test_factories_are_called_only_when_the_block_is_built():
    calls = []

    def made():
        calls.append(1)
        return nn.Linear(2, 2)

    chain = as_chain([made, functools.partial(nn.Linear, 2, 3), nn.ReLU])
    assert calls == []
    assert [block.kind for block in chain] == ["made", "Linear", "ReLU"]
    assert not any(block.alive is not None for block in chain)
    assert isinstance(chain[0].build(Device(), 0), nn.Linear)
    assert calls == [1]


def test_one_factory_makes_equal_structures_and_two_make_none():
    chain = as_chain([linear, linear, lambda: nn.Linear(3, 4)])
    assert chain[0].same_as == chain[1].same_as != chain[2].same_as


def test_initial_weights_are_a_function_of_seed_and_place():
    def weights(number, seed):
        return as_chain([linear] * 3)[number].build(Device(), seed).weight

    assert torch.equal(weights(1, 7), weights(1, 7))
    assert not torch.equal(weights(1, 7), weights(2, 7))
    assert not torch.equal(weights(1, 7), weights(1, 8))


def test_a_living_module_is_itself():
    module = nn.Linear(3, 4)
    (block,) = as_chain([module])
    assert block.build(Device(), 0) is module is block.module


def test_a_block_that_was_not_built_has_no_module():
    with pytest.raises(AssertionError, match=r"block 0 \(linear\) was not built"):
        _ = as_chain([linear])[0].module


class OwnForward(nn.Module):
    def forward(self, x):
        return x


@pytest.mark.parametrize("model", [OwnForward(), "model", 3, None, {"a": nn.ReLU()}])
def test_what_is_no_chain_is_refused_with_the_kinds_that_are(model):
    with pytest.raises(
        ModelError, match=rf"nn\.Module, a list of modules or a list of block factories; found {type(model).__name__}"
    ):
        as_chain(model)


@pytest.mark.parametrize("model", [nn.Sequential(), []])
def test_an_empty_model_is_refused(model):
    with pytest.raises(ModelError, match="has no blocks"):
        as_chain(model)


@pytest.mark.parametrize("wrap", [lambda make: make(), lambda make: make], ids=["alive", "factory"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(4)), "0.weight of a Sequential has no shape before the first rows"),
        (lambda: nn.LazyBatchNorm1d(), "has no shape before the first rows"),
        (lambda: nn.Linear(3, 4, device="meta"), r"weight is on the meta device and has no values; .*bias"),
    ],
    ids=["lazy", "lazy norm", "meta"],
)
def test_tensors_without_shape_or_values_are_refused_by_name(make, words, wrap):
    """They ended in a traceback, deep inside torch."""
    with pytest.raises(ModelError, match=words):
        as_chain([wrap(make)])[0].fake(FakeTensorMode(allow_non_fake_inputs=True))


class Graph(nn.Module):
    """A layer over a graph, whose edges are a buffer."""

    def __init__(self, edges):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("edges", edges)

    def forward(self, x):
        return self.linear(x)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(("make", "words"), [
    (lambda: Graph(torch.eye(4).to_sparse()), r"edges is sparse \(torch.sparse_coo\).* to_dense\(\), or keep it in a plain"),
    (lambda: Graph(torch.eye(4).to_sparse_csr()), r"edges is sparse \(torch.sparse_csr\)"),
    (lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)), "0.weight of a LazyLinear has no shape before the first rows"),
])  # fmt: skip
def test_a_run_refuses_tensors_that_it_cannot_store_in_words(make, words):
    """Errors of torch about strides, and about parameters without shapes."""
    with pytest.raises(ModelError, match=words):
        Trainer(make(), mem_limit="1GB", method="full").plan((torch.randn(8, 3), torch.arange(8) % 2))


def test_all_wrong_entries_are_named_at_once():
    with pytest.raises(ModelError, match="entry 1 is a int; entry 3 is a str"):
        as_chain([nn.ReLU(), 3, linear, "relu"])


def test_a_parameter_of_two_blocks_has_its_home_in_the_first():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    owner, other = as_chain([first, second])
    assert [(tie.name, tie.owner, tie.owner_name) for tie in other.tied] == [("weight", owner, "weight")]
    assert set(owner.own(tensors_of(first))) == {"weight", "bias"}
    assert set(other.own(tensors_of(second))) == {"bias"}


def test_a_parameter_of_three_blocks_has_its_home_in_the_first():
    first, second, third = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    third.weight = second.weight = first.weight
    owner, *others = as_chain([first, second, third])
    assert [[(tie.name, tie.owner, tie.owner_name) for tie in other.tied] for other in others] == [
        [("weight", owner, "weight")]
    ] * 2


def test_a_module_with_buffers_used_twice_is_refused():
    layer = nn.BatchNorm1d(3)
    with pytest.raises(ModelError, match=r"1\.running_mean is 0\.running_mean"):
        as_chain(nn.Sequential(layer, layer))


def test_a_parameter_tied_inside_one_block_is_no_problem_and_has_one_place():
    inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    inner[1].weight = inner[0].weight
    as_chain([inner])
    tensors = tensors_of(inner)
    assert sorted(tensors) == ["0.bias", "0.weight", "1.bias"]
    flat = aligned(layout_of(tensors).nbytes).zero_()
    attach(inner, layout_of(tensors).views(flat))
    inner[0].weight.data.fill_(2)
    assert inner[1].weight.unique().tolist() == [2]


def test_a_factory_that_returns_no_module_is_named():
    block = as_chain([lambda: 3])[0]
    with pytest.raises(ModelError, match=r"block 0 \(<lambda>\): the factory returned a int, not an nn.Module"):
        block.build(Device(), 0)
    with pytest.raises(ModelError, match="the factory returned a int"):
        block.fake(FakeTensorMode())


def test_a_factory_that_reads_its_own_values_is_refused_with_the_reason():
    def nosy():
        layer = nn.Linear(2, 2)
        assert layer.weight.sum().item() != 3
        return layer

    with pytest.raises(ModelError, match=r"block 0 \(nosy\) cannot be built without memory: .*must not read the values"):
        as_chain([nosy])[0].fake(FakeTensorMode(allow_non_fake_inputs=True))


@pytest.mark.parametrize("source", [WithBuffers, WithBuffers()], ids=["factory", "module"])
def test_fake_tensors_have_the_shapes_and_types_and_no_memory(source):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    _, fakes = as_chain([source])[0].fake(mode)
    real = tensors_of(WithBuffers())
    assert fakes.keys() == real.keys()
    for name, fake in fakes.items():
        assert isinstance(fake, FakeTensor)
        assert (fake.shape, fake.dtype, fake.requires_grad) == (real[name].shape, real[name].dtype, real[name].requires_grad)


def test_faking_a_living_module_leaves_its_values_alone():
    module = WithBuffers()
    before = {name: tensor.detach().clone() for name, tensor in tensors_of(module).items()}
    block, mode = as_chain([module])[0], FakeTensorMode(allow_non_fake_inputs=True)
    _, fakes = block.fake(mode)
    with mode:
        assert [y.shape for y in run_fake(module, fakes, torch.empty(4, 3))] == [(4, 3)]
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(module).items())


def test_an_output_that_is_no_tensor_is_refused():
    with pytest.raises(ModelError, match="it returned a tuple; a boundary must be one tensor"):
        run_fake(nn.LSTM(3, 3), {}, torch.zeros(2, 3))


def test_every_tensor_is_listed_also_those_that_a_state_dict_leaves_out():
    names = {"weight", "count", "table"}
    assert tensors_of(WithBuffers()).keys() == names | {f"inner.{name}" for name in names}


def test_attached_views_are_used_and_changed_in_place():
    module = WithBuffers()
    identities = {name: id(parameter) for name, parameter in module.named_parameters()}
    layout = layout_of(tensors_of(module))
    flat = aligned(layout.nbytes).zero_()
    attach(module, layout.views(flat))
    for name, tensor in tensors_of(module).items():
        assert tensor.data_ptr() == layout.views(flat)[name].data_ptr()
    assert {name: id(parameter) for name, parameter in module.named_parameters()} == identities
    with torch.no_grad():
        module.weight += 2
        module.inner.count += 3
    assert layout.views(flat)["weight"].tolist() == [2, 2, 2]
    assert layout.views(flat)["inner.count"].item() == 3
    assert torch.equal(module(torch.ones(3)), torch.full((3,), 2.0))


def test_an_emptied_module_owns_nothing_and_keeps_names_types_and_flags():
    module = WithBuffers()
    module.weight.requires_grad_(False)
    module.inner(torch.ones(3)).sum().backward()
    before = {name: (tensor.dtype, tensor.requires_grad) for name, tensor in tensors_of(module).items()}
    detach(module)
    assert {name: (tensor.dtype, tensor.requires_grad) for name, tensor in tensors_of(module).items()} == before
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors_of(module).values())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_an_emptied_module_comes_to_life_again_as_often_as_needed():
    module, x = WithBuffers(), torch.randn(3)
    layout = layout_of(tensors_of(module))
    flat = aligned(layout.nbytes)
    for name, view in layout.views(flat).items():
        view.copy_(tensors_of(module)[name].detach())
    expected = module(x)
    for _ in range(3):
        detach(module)
        attach(module, layout.views(flat))
        output = module(x)
        output.sum().backward()
        assert torch.equal(output, expected)
        assert torch.equal(module.weight.grad, x)


def test_one_activation_used_twice_is_two_links_of_the_chain():
    """Sequential.named_children() names a module once, so a ReLU used twice was left out the second time: another network."""
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu)
    assert [(block.name, block.kind) for block in as_chain(model)] == [
        ("0", "Linear"),
        ("1", "ReLU"),
        ("2", "Linear"),
        ("3", "ReLU"),
    ]
