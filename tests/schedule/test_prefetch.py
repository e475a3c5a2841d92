"""Looking ahead changes nothing: the steps come in their order, and the next LOAD is the one that a full list shows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import seqpart.schedule.steps as lookahead
from seqpart.schedule.steps import Lookahead, Step, Verb
from tests.schedule.parsing import parse

steps_of = st.lists(st.builds(Step, st.sampled_from([Verb.LOAD, Verb.UPDATE, Verb.DROP]), st.integers(0, 3)), max_size=30)
sets = st.sets(st.integers(0, 3))


def first_load(steps, begun):
    """Each partition in `begun` stands for its first LOAD in `steps`, wherever that is."""
    begun = set(begun)
    for step in steps:
        if step.verb is Verb.LOAD:
            if step.partition not in begun:
                return step
            begun.remove(step.partition)
    return None


@given(steps_of, st.lists(sets, min_size=31, max_size=31))
def test_peeks_do_not_change_the_order_and_see_what_a_full_list_shows(steps, asked):
    ahead = Lookahead(iter(steps))
    assert ahead.next_load(asked[0]) == first_load(steps, asked[0])
    done = []
    for step, begun in zip(ahead, asked[1:], strict=False):
        done.append(step)
        assert ahead.next_load(begun) == first_load(steps[len(done) :], begun)
    assert done == steps


@given(steps_of)
def test_without_a_peek_no_step_is_taken_early(steps):
    source = iter(steps)
    for number, _ in enumerate(Lookahead(source), start=1):
        assert source.__length_hint__() == len(steps) - number


def test_a_peek_looks_no_farther_than_it_must():
    source = iter(parse("L0 B0.0 U0 L1 B1.0 U1 L2"))
    ahead = Lookahead(source)
    assert str(ahead.next_load(set())) == "L0"
    assert str(ahead.next_load({0})) == "L1"
    assert [str(step) for step in source] == ["B1.0", "U1", "L2"]


def test_the_next_visit_of_a_partition_that_is_on_its_way_is_a_load_again():
    ahead = Lookahead(parse("L1 F1.0 D1 L1+ B1.0 U1 D1"))
    assert str(ahead.next_load({1})) == "L1+"


@pytest.mark.parametrize(("farthest", "found"), [(3, None), (4, "L1")])
def test_a_load_that_is_too_far_away_is_not_looked_for(farthest, found, monkeypatch):
    monkeypatch.setattr(lookahead, "FARTHEST", farthest)
    ahead = Lookahead(parse("B0.0 B0.1 U0 L1 U1"))
    step = ahead.next_load(set())
    assert (step and str(step)) == found
    assert [str(step) for step in ahead] == ["B0.0", "B0.1", "U0", "L1", "U1"]
