"""The learning rate is a function of how many updates are done: grown, held or lowered as its name says."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpart.errors import OptionError
from seqpart.model.scheduler import NAMES, rate_schedule

names = st.sampled_from(NAMES)
warmups, totals = st.integers(0, 40), st.integers(1, 120)


@given(names, warmups, totals)
def test_factors_lie_between_zero_and_one_and_the_first_update_learns(name, warmup, total):
    factors = [rate_schedule(name, warmup)(done, total) for done in range(total + 10)]
    assert all(0.0 <= factor <= 1.0 for factor in factors)
    assert all(factor > 0.0 for factor in factors[:total])


@given(names, warmups, totals)
def test_the_warm_up_grows_in_equal_steps_to_the_full_rate(name, warmup, total):
    factor = rate_schedule(name, warmup)
    step = 1 / (warmup + 1)
    for done in range(warmup):
        assert factor(done, total) == pytest.approx((done + 1) * step)
    assert factor(warmup, warmup + total) == 1.0


@given(names, warmups, totals)
def test_behind_the_warm_up_the_rate_never_grows(name, warmup, total):
    factor = rate_schedule(name, warmup)
    for before, after in pairwise(factor(done, total) for done in range(warmup, warmup + total + 10)):
        assert after <= before


@given(warmups, totals)
def test_constant_stays_linear_and_cosine_end_at_zero(warmup, total):
    total += warmup
    assert rate_schedule("constant", warmup)(total, total) == 1.0
    assert rate_schedule("linear", warmup)(total, total) == 0.0
    assert rate_schedule("cosine", warmup)(total, total) == pytest.approx(0.0, abs=1e-12)


@given(warmups, totals, st.data())
def test_each_is_the_formula_of_its_name(warmup, total, data):
    total += warmup
    done = data.draw(st.integers(warmup, total))
    share = (done - warmup) / (total - warmup)
    assert rate_schedule("constant", warmup)(done, total) == 1.0
    assert rate_schedule("linear", warmup)(done, total) == pytest.approx(1 - share)
    assert rate_schedule("cosine", warmup)(done, total) == pytest.approx((1 + math.cos(math.pi * share)) / 2)


def test_half_way_linear_and_cosine_are_half():
    assert [rate_schedule(name, 0)(5, 10) for name in NAMES] == [1.0, 0.5, pytest.approx(0.5)]


@pytest.mark.parametrize("name", NAMES)
def test_a_warm_up_longer_than_the_run_is_cut_off_by_its_end(name):
    factor = rate_schedule(name, 10)
    assert [factor(done, 4) for done in range(4)] == [pytest.approx((done + 1) / 11) for done in range(4)]


@pytest.mark.parametrize("name", ["", "Cosine", "step", "cosine "])
def test_another_name_is_refused_with_the_names_there_are(name):
    with pytest.raises(OptionError, match="lr_schedule: expected one of constant, linear, cosine; found"):
        rate_schedule(name, 0)


def test_a_negative_warm_up_is_refused():
    with pytest.raises(OptionError, match="warmup_updates: expected a whole number from 0 up; found -1"):
        rate_schedule("linear", -1)
