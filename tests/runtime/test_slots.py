"""Slots are few, large enough and never two partitions' at once; who takes one gets the wait for it along."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from seqpart.device.device import Device
from seqpart.device.pages import PAGE, round_up
from seqpart.errors import ModelError
from seqpart.runtime.slots import Slots, at_once, bring_back

sizes = st.integers(0, 20).map(lambda pages: pages * PAGE + 1)
moves = st.lists(st.one_of(sizes, st.none()), max_size=40)
"""A number takes a buffer of so many bytes, None gives one back."""


rooms_of_slots = st.lists(sizes, min_size=1, max_size=3)


@given(rooms_of_slots, moves, st.data())
def test_no_slot_outgrows_its_room_and_each_is_one_partitions(rooms, moves, data):
    slots, taken = Slots(rooms, Device()), []
    for nbytes in moves:
        if nbytes is None and taken:
            slots.give(taken.pop(data.draw(st.integers(0, len(taken) - 1))), at_once)
        elif nbytes is not None and slots.has_free(0, nbytes):
            slot = slots.take(0, nbytes)
            assert nbytes <= len(slot.buffer) <= round_up(slot.capacity)
            assert all(slot is not other for other in taken)
            taken.append(slot)
        assert slots.has_free(0, 0) == (len(taken) < len(rooms))
        assert sorted(slot.capacity for slot in [*taken, *slots._idle]) == sorted(rooms)


@given(rooms_of_slots)
def test_the_largest_has_room_wherever_the_smaller_ones_are(rooms):
    slots = Slots(rooms, Device())
    for room in sorted(rooms):
        assert slots.has_free(0, max(rooms))
        slots.take(0, room)
    assert not slots.has_free(0, 0)


def test_the_smallest_buffer_that_fits_is_taken_again():
    slots = Slots([2 * PAGE, PAGE, 3 * PAGE], Device())
    small, middle, large = (slots.take(0, pages * PAGE) for pages in (1, 2, 3))
    for slot in (large, small, middle):
        slots.give(slot, at_once)
    assert slots.take(0, PAGE + 1) is middle
    assert slots.take(0, PAGE + 1) is large
    assert slots.take(0, 1) is small


def test_who_takes_a_buffer_again_gets_the_wait_for_it_along_and_does_not_wait_itself():
    slots, waited = Slots([PAGE], Device()), []
    slot = slots.take(0, PAGE)
    slots.give(slot, lambda: waited.append("saved"))
    again = slots.take(0, PAGE)
    assert again is slot and waited == []
    again.free()
    assert waited == ["saved"]


def test_a_buffer_that_is_too_small_is_waited_for_before_the_larger_one_comes():
    order = []

    class Ordered(Device):
        def empty(self, nbytes):
            order.append(nbytes)
            return super().empty(nbytes)

    slots = Slots([3 * PAGE], Ordered())
    slots.give(slots.take(0, PAGE), lambda: order.append("free"))
    order.clear()
    slots.take(0, 3 * PAGE)
    assert order == ["free", 3 * PAGE]


def test_more_than_the_plan_grants_is_our_own_mistake():
    slots = Slots([PAGE, 2 * PAGE], Device())
    assert not slots.has_free(0, 2 * PAGE + 1)
    slots.take(0, 1)
    slots.take(0, 1)
    with pytest.raises(AssertionError, match="more or larger partitions are loaded than the plan has slots for"):
        slots.take(0, 1)


def test_idle_slots_let_go_of_their_memory_at_the_end():
    slots = Slots([PAGE, PAGE], Device())
    one, other = slots.take(0, PAGE), slots.take(0, PAGE)
    slots.give(one, at_once)
    slots.close()
    assert (len(one.buffer), len(other.buffer)) == (0, PAGE)


class Refusing(Device):
    """Has no memory the first time that it is asked."""

    asked = 0

    def empty(self, nbytes):
        self.asked += 1
        if self.asked == 1:
            raise MemoryError
        return super().empty(nbytes)


def test_a_slot_whose_memory_was_refused_is_there_for_who_asks_again():
    """A prefetch that came too early took the slot with it, and the partition's own LOAD ended in an assertion."""
    slots = Slots([PAGE], Refusing())
    with pytest.raises(MemoryError):
        slots.take(0, PAGE)
    assert len(slots.take(0, PAGE).buffer) == PAGE


def test_a_buffer_that_took_another_size_in_the_first_forward_is_named_with_the_cure():
    """As an observer of torch.ao's quantization: a loss whose graph reaches other layers was blamed."""
    layer = nn.Linear(2, 2)
    layer.register_buffer("scale", torch.ones(2))
    views = {"scale": torch.ones(1)}
    with pytest.raises(ModelError, match=r"scale of a Linear had shape \(1,\) .* \(2,\) now.*call the model on a batch before"):
        bring_back(layer, views)
