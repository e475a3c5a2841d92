"""Steps on slices have the same bits however many threads share them."""

import threading

import pytest
import torch
from torch import nn

from seqpart.model.optimizers import Adopted, choose, rounding
from seqpart.model.rounding import SLICE
from seqpart.model.slices import share_slices
from tests.model.test_rounding import BF16


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def stepped(choice, dtype):
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(5 * SLICE + 77, generator=generator, dtype=torch.float32).to(dtype))
    optimizer = choice.build([weight], ["weight"] if choice.named else [])
    for update in range(3):
        weight.grad = torch.randn(len(weight), generator=generator, dtype=torch.float32).to(dtype)
        Adopted(choice, optimizer).step(0, 0, update)
    return weight, optimizer.state[weight] if dtype is not BF16 else {}


@pytest.mark.parametrize("name", ["lion", "adamw8bit", "lion8bit", "adamw in bfloat16", "adamw, moments in bfloat16"])
def test_threads_that_share_slices_have_the_bits_of_one(name, threads):
    dtype = torch.float32 if "bfloat16" not in name else BF16
    choice = choose(name.partition(" ")[0].strip(","), lr=1e-3)
    if dtype is BF16:
        choice = rounding(choice, BF16 if "moments" in name else torch.float32)
    threads(1)
    weight, state = stepped(choice, dtype)
    threads(3)
    shared, state_shared = stepped(choice, dtype)
    assert torch.equal(weight, shared)
    for key, value in state.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(state_shared[key])), key


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["lion", "adamw8bit", "adamw in bfloat16"])
def test_torch_s_default_type_changes_nothing(name, dtype, threads):
    """Memory for slices was of that type: an error of sizes."""
    threads(2)
    own = BF16 if "bfloat16" in name else torch.float32
    choice = choose(name.partition(" ")[0], lr=1e-3)
    choice = rounding(choice, torch.float32) if own is BF16 else choice
    expected, _ = stepped(choice, own)
    torch.set_default_dtype(dtype)
    try:
        found, _ = stepped(choice, own)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


def test_threads_are_in_the_modes_of_the_one_that_asks(threads):
    """A step in inference mode was refused in the other threads, and one on gradients of a graph that is kept."""
    threads(2)
    choice = choose("lion", lr=1e-3)
    expected, _ = stepped(choice, torch.float32)
    with torch.inference_mode():
        found, _ = stepped(choice, torch.float32)
    assert torch.equal(found, expected)
    weight = nn.Parameter(torch.ones(3 * SLICE))
    (weight.grad,) = torch.autograd.grad(weight.square().sum(), weight, create_graph=True)
    choice.build([weight]).step()
    assert torch.allclose(weight, torch.tensor(1 - 1e-3))


def test_every_slice_is_worked_on_once_and_the_number_of_threads_stays(threads):
    threads(3)
    seen, makers = [], []

    def work(room, starts):
        seen.extend((start, threading.current_thread()) for start in starts)
        room.add_(1)

    def make(size):
        makers.append(threading.current_thread())
        return torch.zeros(size)

    share_slices(7 * SLICE + 1, SLICE, torch.device("cpu"), make, work)
    assert sorted(start for start, _ in seen) == list(range(0, 7 * SLICE + 1, SLICE))
    assert set(makers) == {threading.main_thread()} and threading.main_thread() not in {thread for _, thread in seen}
    assert torch.get_num_threads() == 3


def test_an_error_in_a_thread_is_raised(threads):
    threads(2)

    def work(room, starts):
        raise MemoryError("no room for this slice")

    with pytest.raises(MemoryError, match="no room for this slice"):
        share_slices(2 * SLICE, SLICE, torch.device("cpu"), torch.empty, work)
    assert torch.get_num_threads() == 2
