"""A limit that is too small is refused with the smallest that is enough."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpart.errors import DoesNotFit
from seqpart.methods import methods_named
from seqpart.planning.exact import choose_exact
from tests import chains

large = st.builds(
    chains.block, weights=st.integers(1, 60).map(lambda n: n << 20), saved=st.integers(0, 60).map(lambda n: n << 20),
    output=st.integers(1, 30).map(lambda n: n << 20), flops=st.integers(1, 100).map(lambda n: n * 10**9),
)  # fmt: skip


@given(
    st.lists(large, min_size=1, max_size=6), chains.speeds, st.sampled_from(["auto", "streamed", "checkpointed", "full"]),
    st.sampled_from([("device",), ("device", "disk")]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_the_limit_that_a_refusal_names_is_enough_and_three_percent_less_is_not(chain, speeds, method, tiers, heap, given_cut):
    problem = replace(
        chains.problem_of(chain, 1 << 20, micro_batch=8, starts=tuple(range(len(chain))) if given_cut else None, speeds=speeds),
        boundary_tiers=tiers, may_keep_heap=heap, runtime=200 << 20,
    )  # fmt: skip
    methods = methods_named(method)
    with pytest.raises(DoesNotFit) as refused:
        choose_exact(problem, methods)
    smallest = refused.value.smallest
    choose_exact(replace(problem, limit=smallest), methods)
    with pytest.raises(DoesNotFit):
        choose_exact(replace(problem, limit=smallest * 97 // 100), methods)
