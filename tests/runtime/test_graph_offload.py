"""Saved tensors that wait elsewhere than on the device: what comes back lies as it lay, each byte moved once."""

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from seqpart.device.device import Device
from seqpart.device.pages import aligned
from seqpart.runtime.graph_offload import GraphOffload, packing
from seqpart.store.graph_ranges import DiskRanges

CAPACITY, MICRO_BATCHES = 1 << 16, 3


def offload_to(folder):
    capacities = dict.fromkeys(range(3), CAPACITY)
    return GraphOffload(dict.fromkeys(range(3), DiskRanges(folder / "graphs.part", capacities, MICRO_BATCHES, Device())))


def gathered(offload, key, tensors):
    offload.begin(key)
    places = [offload.pack(tensor) for tensor in tensors]
    offload.finish()
    return places


@pytest.fixture
def offload(tmp_path):
    found = offload_to(tmp_path)
    yield found
    found.close()
    assert not [*tmp_path.iterdir()], "a file is left"


def views(number):
    """Parts of one storage, as attention makes them, and another type."""
    whole = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(number))
    return [whole, whole[:, 2:4], whole.transpose(0, 2), whole[1, ::2].unsqueeze(0).expand(3, 3, 8), whole > 0]


def test_in_the_order_of_backward_each_tensor_is_as_it_was(offload):
    keys = [(p, m) for p in range(3) for m in range(MICRO_BATCHES)]
    for _ in range(2):
        places = {key: gathered(offload, key, views(10 * key[0] + key[1])) for key in keys}
        for p in (2, 1, 0):
            for m in range(MICRO_BATCHES):
                offload.open((p, m))
                for place, tensor in zip(places[p, m], views(10 * p + m), strict=True):
                    found = offload.unpack(place)
                    assert torch.equal(found, tensor) and found.stride() == tensor.stride() and found.dtype == tensor.dtype
                    assert found.data_ptr() % 64 == tensor.data_ptr() % 64, "kernels round otherwise where it lies otherwise"
                offload.release((p, m))


@settings(max_examples=50, deadline=None)
@given(updates=st.lists(st.tuples(st.frozensets(st.integers(0, 2), min_size=1), st.integers(1, MICRO_BATCHES)), max_size=4))
def test_whichever_partitions_offload_in_whichever_order_of_micro_batches(updates, tmp_path_factory):
    """Breadth first, and depth first, where a micro-batch comes back before the next one goes."""
    offload = offload_to(tmp_path_factory.mktemp("graphs"))
    for partitions, micro_batches in updates:
        for depth_first in (False, True):
            groups = [[m] for m in range(micro_batches)] if depth_first else [list(range(micro_batches))]
            for group in groups:
                kept = {(p, m): torch.randn(50 + p + m) for p in sorted(partitions) for m in group}
                places = {key: gathered(offload, key, [tensor])[0] for key, tensor in kept.items()}
                for key in [(p, m) for p in sorted(partitions, reverse=True) for m in group]:
                    offload.open(key)
                    assert torch.equal(offload.unpack(places[key]), kept[key])
                    offload.release(key)
    offload.close()


def test_a_storage_goes_once_however_many_save_it(offload):
    whole = torch.randn(CAPACITY // 8)
    places = gathered(offload, (0, 0), [whole, whole[3:], whole.view(-1, 2).t(), whole])
    assert [place.offset for place in places] == [0, 3 * 4, 0, 0]


def test_what_was_changed_since_is_another_value(offload):
    whole = torch.zeros(8)
    offload.begin((0, 0))
    first = offload.pack(whole)
    second = offload.pack(whole.add_(1))
    offload.finish()
    offload.open((0, 0))
    assert (offload.unpack(first).sum(), offload.unpack(second).sum()) == (0, 8)


def test_what_has_no_room_stays_where_it_is(offload):
    assert gathered(offload, (0, 0), [torch.zeros(CAPACITY), torch.ones(4)])[0] is None


class ReturnsWhatItSaved(torch.autograd.Function):
    """Computes its gradient in forward, as fused losses do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x.clone())
        return (x * weight).sum()

    @staticmethod
    def backward(ctx, _):
        return None, ctx.saved_tensors[0]


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8))

    def forward(self, x):
        return x + ReturnsWhatItSaved.apply(x.detach()[:4], self.weight)


def test_a_gradient_that_is_a_saved_tensor_is_found_to_lie_where_others_will(offload):
    """Else the next micro-batch's saved tensors would be written over it."""
    module, x, slot = Weighted(), torch.randn(5, 8), aligned(4096)
    offload.begin((0, 0))
    with packing(slot, lambda: slot, [], offload):
        output = module(x)
    offload.finish()
    address = offload.open((0, 0))
    output.sum().backward()
    assert module.weight.grad.untyped_storage().data_ptr() == address


def test_a_graph_that_no_backward_pass_goes_through_is_freed():
    """As that of a recurrent network's last state: `exp` saves its output, which held its node in turn, 4 MB in each update."""
    slot, x = aligned(4096), torch.ones(4, requires_grad=True)
    with packing(slot, lambda: slot, []):
        output = x.exp()
    left = weakref.ref(output)
    del output
    assert left() is None
