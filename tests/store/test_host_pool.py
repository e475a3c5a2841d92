"""Host memory in a few pieces: ranges never overlap, no byte is lost, the budget is never passed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpart.device.device import Device
from seqpart.device.pages import PAGE, round_up
from seqpart.store.host_pool import Extents, HostPool, piece_sizes, pieces_for


@given(st.integers(0, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 5 * PAGE)), max_size=60))
def test_ranges_never_overlap_and_no_byte_is_lost(pages, moves):
    size = pages * PAGE
    extents = Extents(size)
    taken = []
    for give, number in moves:
        if give and taken:
            extents.give(*taken.pop(number % len(taken)))
        else:
            start = extents.take(number)
            need = round_up(max(number, 1))
            if start is None:
                assert all(length < need for _, length in extents.free), "it refused what had room"
            else:
                taken.append((start, number))
        ranges = sorted([*extents.free, *((start, round_up(max(n, 1))) for start, n in taken)])
        covered = 0
        for start, length in ranges:
            assert start == covered
            covered += length
        assert covered == size
    for start, number in taken:
        extents.give(start, number)
    assert extents.free == ([(0, size)] if size else [])


@given(st.integers(0, 1 << 36), st.booleans())
def test_pieces_never_exceed_the_budget(budget, powers):
    sizes = piece_sizes(budget, powers_of_two=powers)
    assert sum(sizes) <= budget
    assert all(size > 0 and size % PAGE == 0 for size in sizes)
    # What cannot be used is less than the smallest piece.
    assert budget - sum(sizes) < (1 << 20 if powers else PAGE)
    if powers:
        assert all(size & (size - 1) == 0 and size <= 32 << 30 for size in sizes)


class Pinned(Device):
    """As one whose pinned memory comes in powers of two."""

    shares_memory = False


@given(
    st.lists(st.lists(st.integers(1, 600 << 10), min_size=1, max_size=4), max_size=6), st.integers(0, 4 << 20), st.booleans()
)
def test_groups_of_homes_that_fit_find_their_places_in_the_pool(groups, budget, powers):
    """The plan said that homes were in host memory, and pieces of powers of two had no room for them."""
    need = sum(round_up(size) for group in groups for size in group)
    nbytes, fit = pieces_for(need, groups, budget, powers_of_two=powers)
    assert nbytes <= budget
    pool = HostPool(nbytes, Pinned() if powers else Device())
    assert all(pool.take(size) is not None for number in sorted(fit) for size in groups[number])
    if budget >= 2 * need + (1 << 20):
        assert len(fit) == len(groups), "there was host memory enough"


def test_buffers_are_page_aligned_flat_bytes_that_keep_apart():
    host_pool = HostPool(8 * PAGE, Device())
    assert host_pool.size == 8 * PAGE
    buffers = [host_pool.take(n) for n in (1, PAGE, PAGE + 1, 0)]
    for number, flat in enumerate(buffers):
        assert flat.data_ptr() % PAGE == 0
        assert flat.dtype is torch.uint8
        flat.fill_(number)
    assert [len(flat) for flat in buffers] == [PAGE, PAGE, 2 * PAGE, PAGE]
    assert all((flat == number).all() for number, flat in enumerate(buffers))


def test_what_does_not_fit_is_refused_and_fits_after_a_give():
    host_pool = HostPool(2 * PAGE, Device())
    first = host_pool.take(2 * PAGE)
    assert host_pool.take(1) is None
    host_pool.give(first)
    assert host_pool.take(2 * PAGE) is not None


def test_no_budget_holds_nothing():
    host_pool = HostPool(PAGE - 1, Device())
    assert host_pool.size == 0
    assert host_pool.take(1) is None


def test_giving_back_what_was_never_taken_fails():
    with pytest.raises(KeyError):
        HostPool(PAGE, Device()).give(torch.zeros(PAGE, dtype=torch.uint8))
