"""Bytes predicted on fake tensors are the bytes of a real run of the same block."""

import functools
import logging
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from seqpart.device.pages import round_up
from seqpart.errors import DataError, ModelError
from seqpart.model.blocks import as_chain
from seqpart.model.packs import Value
from seqpart.model.tensors import layout_of, tensors_of
from seqpart.profile.blocks import _watch_inference, _watch_training, measure_chain, measure_loss
from seqpart.profile.fake_mode import LiveBytes
from seqpart.store.layout import ALIGNMENT
from seqpart.zoo import models

BATCH = 6


class Residual(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.second(F.relu(self.first(self.norm(x))))


BLOCKS = {
    "linear": (lambda: nn.Linear(24, 10), (24,)),
    "linear without a bias": (lambda: nn.Linear(24, 10, bias=False), (24,)),
    "activation": (nn.ReLU, (24,)),
    "in place": (lambda: nn.Sequential(nn.Linear(24, 24), nn.ReLU(inplace=True)), (24,)),
    "view": (nn.Flatten, (3, 8)),
    "nothing": (nn.Identity, (24,)),
    "residual": (Residual, (24,)),
    "dropout": (lambda: nn.Sequential(nn.Linear(24, 24), nn.Dropout(0.3), nn.GELU()), (24,)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)), (3, 8, 8)),
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), (3, 8, 8)),
    "attention": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (7, 16)),
}
blocks = pytest.mark.parametrize(("factory", "shape"), BLOCKS.values(), ids=BLOCKS)


def cost_of(source, shape, batch=BATCH, **options):
    (cost,) = measure_chain(as_chain([source]), shape, batch, **options)
    return cost


def real_of(factory, shape, *, granule=1, dtype=torch.float32, autocast=None):
    """The same watching on real tensors with real memory."""
    module = factory().train()
    shape, block = (BATCH, *shape), as_chain([factory])[0]
    nbytes = round_up(torch.Size(shape).numel() * dtype.itemsize, granule)
    taken = [Value(0, shape, dtype, nbytes, BATCH, dtype.is_floating_point, -1, (0,))]
    training = _watch_training(block, module, tensors_of(module), taken, granule, autocast)
    return training, _watch_inference(module, tensors_of(module), taken, granule, autocast)


MEASURED = (
    "forward_peak", "saved", "saved_alone", "saved_sizes", "backward_peak", "accumulate_peak", "input", "output",
    "output_shape", "output_dtype",
)  # fmt: skip


def assert_as_real(factory, shape, **options):
    cost, (real, (inference, flops)) = cost_of(factory, shape, **options), real_of(factory, shape, **options)
    for name in MEASURED:
        found, expected = getattr(cost, name), getattr(real, name)
        assert (
            (sorted(found), len(found)) == (sorted(expected), len(expected)) if name == "saved_sizes" else found == expected
        ), name
    assert (cost.inference_peak, cost.flops) == (inference, flops)


@blocks
@pytest.mark.parametrize("granule", [1, 512])
def test_costs_on_fake_tensors_equal_the_bytes_of_a_real_run(factory, shape, granule):
    assert_as_real(factory, shape, granule=granule)


@blocks
def test_weights_gradients_and_layout_are_those_of_the_real_module(factory, shape):
    cost, module = cost_of(factory, shape), factory()
    assert cost.layout == layout_of(tensors_of(module))
    assert cost.weights == cost.layout.nbytes >= sum(tensor.nbytes for tensor in tensors_of(module).values())
    assert set(cost.trainable) == {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert cost.gradients == sum(parameter.nbytes for parameter in module.parameters())


def test_a_linear_layer_costs_what_paper_and_pencil_say():
    cost = cost_of(lambda: nn.Linear(24, 10), (24,))
    x, y, weight, bias = BATCH * 24 * 4, BATCH * 10 * 4, 240 * 4, 10 * 4
    assert (cost.input, cost.takes[0].row, cost.output, cost.output_shape) == (x, 24 * 4, y, (10,))
    assert (cost.weights, cost.gradients) == (round_up(weight, ALIGNMENT) + bias, weight + bias)
    assert (cost.forward_peak, cost.saved, cost.saved_alone, cost.inference_peak) == (y, y, 0, y)
    assert cost.backward_peak == weight + bias + x, "its gradients and the input's"
    assert cost.flops == 2 * BATCH * 24 * 10


def test_every_size_is_rounded_to_the_allocator_s_granule():
    cost = cost_of(lambda: nn.Linear(24, 10), (24,), granule=512)
    assert (cost.input, cost.output) == (1024, 512)
    assert cost.gradients == 1024 + 512
    assert cost.takes[0].row == 24 * 4, "a row at home is not in the allocator"


def test_a_frozen_layer_has_no_gradients_of_its_own():
    layer = nn.Linear(24, 10)
    layer.weight.requires_grad_(False)
    cost = cost_of(layer, (24,))
    assert cost.trainable == ("bias",)
    assert cost.gradients == layer.bias.nbytes


def test_nothing_of_the_measured_block_is_allocated():
    """A layer of 400 GB is measured at once."""
    cost = cost_of(lambda: nn.Linear(10**5, 10**6), (10**5,), batch=64)
    assert cost.weights == 4 * (10**11 + 10**6)


def test_measuring_leaves_the_block_and_the_random_state_alone():
    module = nn.Sequential(nn.BatchNorm1d(5), nn.Dropout(0.5))
    before = {name: tensor.detach().clone() for name, tensor in tensors_of(module).items()}
    state = torch.get_rng_state()
    cost_of(module, (5,))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(module).items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_chain_is_measured_with_each_output_as_the_next_input():
    chain = as_chain([lambda: nn.Conv2d(3, 4, 3), nn.Flatten, lambda: nn.Linear(4 * 36, 10)])
    costs = measure_chain(chain, (3, 8, 8), BATCH)
    assert [cost.output_shape for cost in costs] == [(4, 6, 6), (144,), (10,)]
    assert all(left.output == right.input for left, right in pairwise(costs))


def test_blocks_of_one_factory_and_shape_are_measured_once():
    calls = []

    def factory():
        calls.append(1)
        return nn.Linear(4, 4)

    first, second, _ = measure_chain(as_chain([factory, factory, lambda: nn.Linear(4, 2)]), (4,), BATCH)
    assert replace(first, takes=(), gives=()) == replace(second, takes=(), gives=())
    assert len(calls) == 1


def test_rows_that_do_not_suit_the_first_block_are_the_data_s_fault():
    with pytest.raises(DataError, match=r"block 0 \(Linear\) cannot take rows of shape \(5,\)"):
        measure_chain(as_chain([nn.Linear(4, 3)]), (5,), BATCH)


def test_blocks_that_do_not_suit_each_other_are_the_model_s_fault():
    with pytest.raises(ModelError, match=r"block 1 \(Linear\) cannot take rows of shape \(3,\)"):
        measure_chain(as_chain([nn.Linear(4, 3), nn.Linear(4, 3)]), (4,), BATCH)


def test_a_refused_operation_is_not_logged_besides(caplog):
    with caplog.at_level(logging.DEBUG), pytest.raises(DataError):
        measure_chain(as_chain([nn.Linear(4, 3)]), (5,), BATCH)
    assert not [record for record in caplog.records if not record.name.startswith("seqpart.")]


# --- Types of rows and boundaries, and autocast ----------------------------------------------------------------------

# torch's shape functions take a normalization's statistics for bf16 where the kernels keep them in float32.
MIXED = [name for name in BLOCKS if name != "batch norm"]


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_costs_under_autocast_equal_the_bytes_of_a_real_run_under_it(name, narrow):
    factory, shape = BLOCKS[name]
    assert_as_real(factory, shape, autocast=narrow)


def test_under_autocast_a_weight_that_is_used_twice_is_cast_twice():
    """The costs had torch's cache of casts, and the run has none."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x):
            return self.layer(self.layer(x)).float()

    (cost,) = measure_chain(as_chain([Twice()]), (64,), 4, autocast=torch.bfloat16)
    assert cost.saved >= 2 * (64 * 64 * 2)


def test_autocast_s_narrow_copies_of_weights_are_counted_for_as_long_as_they_live():
    cost = cost_of(lambda: nn.Linear(24, 10), (24,), autocast=torch.bfloat16)
    x, y, weight, bias = BATCH * 24 * 2, BATCH * 10 * 2, 240 * 2, 10 * 2
    assert (cost.output, cost.output_dtype) == (y, torch.bfloat16)
    assert cost.forward_peak == cost.inference_peak == x + weight + bias + y
    assert cost.saved_alone == x + weight, "the copy of the bias goes when the forward pass is over"
    assert cost.gradients == 4 * 250, "weights and gradients stay float32"


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.few(2)
def test_a_transformer_costs_on_fake_tensors_what_it_costs(autocast, dropout):
    embedding, block, output = models.gpt(65, 16, width=32, depth=1, heads=4, dropout=dropout)
    assert_as_real(embedding, (16,), dtype=torch.int64, autocast=autocast)
    assert_as_real(block, (16, 32), autocast=autocast)
    assert_as_real(output, (16, 32), autocast=autocast)


def test_a_chain_on_tokens_is_measured_with_each_output_s_type_as_the_next_input_s():
    chain = as_chain(models.gpt(65, 16, width=32, depth=2, heads=4))
    costs = measure_chain(chain, (16,), BATCH, dtype=torch.int64, autocast=torch.bfloat16)
    assert [cost.takes[0].dtype for cost in costs] == [torch.int64] + [torch.float32] * 3
    assert costs[-1].output_dtype == torch.bfloat16
    assert (costs[0].takes[0].row, costs[0].output_shape, costs[-1].output_shape) == (16 * 8, (16, 32), (16, 65))
    assert all((left.output, left.output_dtype) == (right.input, right.takes[0].dtype) for left, right in pairwise(costs))


def test_a_block_is_measured_again_for_input_of_another_type():
    layer = functools.partial(nn.Linear, 24, 24)
    first, second = measure_chain(as_chain([layer, layer]), (24,), BATCH, autocast=torch.bfloat16)
    assert (first.input, second.input) == (BATCH * 24 * 4, BATCH * 24 * 2)
    assert second.saved < first.saved, "its input is narrow already"


def test_a_float64_model_costs_twice_what_a_float32_model_costs():
    wide = cost_of(Residual().double(), (24,), dtype=torch.float64)
    plain = cost_of(Residual, (24,))
    assert 0 <= 2 * plain.weights - wide.weights < 2 * 64 * len(plain.layout.specs), "but for what lies between tensors"
    for name in ("gradients", "forward_peak", "saved", "backward_peak", "inference_peak", "input", "output"):
        assert getattr(wide, name) == 2 * getattr(plain, name), name
    assert wide.output_dtype == torch.float64


@pytest.mark.parametrize("bias", [True, False])
def test_rows_of_another_type_than_the_weights_are_refused_where_fake_products_would_take_them(bias):
    layer = nn.Linear(4, 4, bias=bias)
    words = r"cannot take rows of shape \(4,\) and type torch\.float64: it multiplies torch\.float32 and torch\.float64"
    with pytest.raises(DataError, match=rf"block 0 \(Linear\) {words}"):
        measure_chain(as_chain([layer]), (4,), BATCH, dtype=torch.float64)
    with pytest.raises(ModelError, match=rf"block 1 \(Linear\) {words}"):
        measure_chain(as_chain([Types(torch.float64), layer]), (4,), BATCH)


def test_quantities_for_an_embedding_are_refused_with_the_cure():
    with pytest.raises(DataError, match=r"cannot take .* An embedding takes tokens: give them as whole numbers of 64 bits"):
        measure_chain(as_chain(models.gpt(65, 16, width=32, depth=1, heads=4)), (16,), BATCH)


def test_tokens_for_a_block_that_takes_none_are_refused_with_the_cure():
    with pytest.raises(
        DataError, match=r"block 0 \(Linear\) cannot take .* tokens, for an embedding: give quantities as floats"
    ):
        measure_chain(as_chain([nn.Linear(4, 3)]), (4,), BATCH, dtype=torch.int64)


class Types(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_an_output_that_carries_no_real_gradient_is_refused(dtype):
    with pytest.raises(ModelError, match=rf"block 0 \(Types\): it returns {dtype}; a boundary is floats"):
        measure_chain(as_chain([Types(dtype)]), (4,), BATCH)


def test_an_output_of_another_float_type_is_the_next_block_s_input():
    first, second = measure_chain(as_chain([Types(torch.bfloat16), nn.ReLU()]), (4,), BATCH)
    assert (first.takes[0].dtype, first.output_dtype) == (torch.float32, torch.bfloat16)
    assert (second.input, second.output_dtype) == (BATCH * 4 * 2, torch.bfloat16)


class Moves(nn.Module):
    def forward(self, x):
        return x.sum(0)


class Pair(nn.Module):
    def forward(self, x):
        return x, x


def test_an_output_that_loses_the_batch_is_refused():
    with pytest.raises(ModelError, match=r"block 0 \(Moves\): it turned 6 rows into shape \(4,\); dimension 0 must stay"):
        measure_chain(as_chain([Moves]), (4,), BATCH)


def test_an_output_of_two_tensors_is_refused():
    with pytest.raises(ModelError, match=r"block 0 \(Pair\): it returned a tuple; a boundary must be one tensor"):
        measure_chain(as_chain([Pair()]), (4,), BATCH)


def test_live_bytes_counts_births_and_deaths_exactly():
    with LiveBytes() as live:
        a = torch.zeros(100)
        b = a + 1
        assert (live.live, live.peak) == (800, 800)
        del a
        assert (live.live, live.peak) == (400, 800)
        c = b.view(10, 10)[2:].t()
        assert live.live == 400, "a view owns nothing"
        del b
        assert live.live == 400, "and keeps its base alive"
        del c
        assert (live.live, live.peak) == (0, 800)
        pair = torch.zeros(4, 25).split(1)
        assert live.live == 400
        del pair
        assert live.live == 0


def test_live_bytes_leaves_out_what_is_somebody_else_s():
    weight = torch.zeros(50)
    with LiveBytes() as live:
        live.ignore([weight])
        weight.add_(1)
        view = weight[10:]
        assert live.live == 0
        copy = view.clone()
        assert live.live == 160
    del copy


def test_live_bytes_rounds_each_storage_to_the_granule():
    with LiveBytes(granule=512) as live:
        kept = [torch.zeros(1), torch.zeros(129)]
        assert live.live == 512 + 1024
        kept.clear()
        assert live.live == 0


def test_the_peak_is_watched_from_what_is_alive_now():
    with LiveBytes() as live:
        torch.zeros(1000)
        kept = torch.zeros(10)
        assert live.peak == 4000
        live.restart()
        torch.zeros(20)
        assert live.peak == 40 + 80
        del kept


def test_saved_bytes_are_what_autograd_says_it_saved():
    """Another look: autograd's own hooks see every tensor that is saved."""
    module, x = Residual(), torch.randn(BATCH, 24, requires_grad=True)
    storages = {}
    weights = {tensor.untyped_storage().data_ptr() for tensor in [x, *module.parameters()]}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(x)
    saved = sum(nbytes for pointer, nbytes in storages.items() if pointer not in weights)
    cost = cost_of(Residual, (24,))
    assert (cost.saved_alone, cost.saved) == (saved, saved + y.nbytes)


def test_flops_are_those_of_one_forward_pass():
    module = Residual()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(torch.zeros(BATCH, 24))
    assert cost_of(Residual, (24,)).flops == counter.get_total_flops() > 0


@pytest.mark.parametrize("batch", [1, 8])
def test_a_loss_costs_what_it_keeps_and_what_it_gives_back(batch):
    assert measure_loss(lambda y: y.sum(), (10,), batch) >= 4 * 10 * batch
    targets = torch.zeros(batch, dtype=torch.long)

    def entropy(y):
        return F.cross_entropy(y, targets)

    y = torch.zeros(batch, 10, requires_grad=True)
    with LiveBytes() as live:
        live.ignore([y])
        entropy(y).backward()
    assert measure_loss(entropy, (10,), batch) == live.peak


def test_a_loss_is_judged_on_outputs_of_the_type_that_the_last_block_returns():
    plain, wide, narrow = (
        measure_loss(lambda y: y.sum(), (10,), 8, dtype=kind) for kind in (torch.float32, torch.float64, torch.bfloat16)
    )
    assert wide == 2 * plain == 4 * narrow
    assert measure_loss(lambda y: y.float().sum(), (10,), 8, dtype=torch.bfloat16) > narrow, "a copy in float32"


def test_a_loss_does_not_count_the_output_that_it_judges():
    """The output was born under the counter, so each prediction held it twice: once with the block, once with the loss."""
    loss, its_gradient, gradient_of_the_output = 4, 4, 2 * 1000 * 4
    assert measure_loss(lambda y: y.sum(), (1000,), 2) == loss + its_gradient + gradient_of_the_output


def test_rows_that_do_not_fit_show_no_traceback_of_torch_s_own(caplog):
    """torch logged the traceback of the refused operation to stderr, above our one message."""
    with pytest.raises(DataError, match="cannot take rows of shape"), caplog.at_level("ERROR"):
        measure_chain(as_chain([nn.Linear(3, 3)]), (4,), 2)
    assert not caplog.records
