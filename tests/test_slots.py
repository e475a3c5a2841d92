"""Slots are few, large enough and never two partitions' at once; who takes one gets the wait for it along."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpart.device import Device
from seqpart.direct import PAGE, round_up
from seqpart.slots import Slots, at_once

sizes = st.integers(0, 20).map(lambda pages: pages * PAGE + 1)
moves = st.lists(st.one_of(sizes, st.none()), max_size=40)
"""A number takes a buffer of so many bytes, None gives one back."""


@given(st.integers(1, 3), moves, st.data())
def test_there_are_never_more_buffers_than_slots_and_each_is_one_partitions(count, moves, data):
    slots, taken = Slots(count, Device()), []
    for nbytes in moves:
        if nbytes is None and taken:
            slots.give(taken.pop(data.draw(st.integers(0, len(taken) - 1))), at_once)
        elif nbytes is not None and slots.has_room:
            slot = slots.take(nbytes)
            assert len(slot.buffer) >= nbytes
            assert all(slot is not other for other in taken)
            taken.append(slot)
        assert slots.has_room == (len(taken) < count)
        assert len(taken) + len(slots._idle) <= count


@given(st.integers(1, 3), st.lists(sizes, min_size=1, max_size=20), st.data())
def test_buffers_never_take_more_than_the_largest_request_in_each_slot(count, requests, data):
    slots, taken = Slots(count, Device()), []
    for nbytes in requests:
        if not slots.has_room:
            slots.give(taken.pop(data.draw(st.integers(0, count - 1))), at_once)
        taken.append(slots.take(nbytes))
        held = sum(len(slot.buffer) for slot in [*taken, *slots._idle])
        assert held <= count * round_up(max(requests))


def test_the_smallest_buffer_that_fits_is_taken_again():
    slots = Slots(3, Device())
    small, middle, large = (slots.take(pages * PAGE) for pages in (1, 2, 3))
    for slot in (large, small, middle):
        slots.give(slot, at_once)
    assert slots.take(PAGE + 1) is middle
    assert slots.take(PAGE + 1) is large
    assert slots.take(1) is small


def test_who_takes_a_buffer_again_gets_the_wait_for_it_along_and_does_not_wait_itself():
    slots, waited = Slots(1, Device()), []
    slot = slots.take(PAGE)
    slots.give(slot, lambda: waited.append("saved"))
    again = slots.take(PAGE)
    assert again is slot and waited == []
    again.free()
    assert waited == ["saved"]


def test_a_buffer_that_is_too_small_is_waited_for_before_the_larger_one_comes():
    order = []

    class Ordered(Device):
        def empty(self, nbytes):
            order.append(nbytes)
            return super().empty(nbytes)

    slots = Slots(2, Ordered())
    first, second = slots.take(2 * PAGE), slots.take(PAGE)
    slots.give(first, lambda: order.append("first is free"))
    slots.give(second, lambda: order.append("second is free"))
    slots.take(3 * PAGE)
    assert order == [2 * PAGE, PAGE, "second is free", 3 * PAGE]  # the smallest goes
    assert slots.take(1) is first


def test_a_new_buffer_needs_no_wait_while_there_is_a_slot_left():
    slots, waited = Slots(2, Device()), []
    slots.give(slots.take(PAGE), lambda: waited.append(1))
    slots.take(2 * PAGE).free()
    assert waited == []


def test_more_than_the_plan_grants_is_our_own_mistake():
    slots = Slots(1, Device())
    slots.take(1)
    with pytest.raises(AssertionError, match="more partitions are loaded than the plan has slots"):
        slots.take(1)
