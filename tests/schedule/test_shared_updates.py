"""The micro-batches of an update that several processes share."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from seqpart.schedule.phase import Order, Phase, PhaseKind
from seqpart.schedule.progress import checked
from seqpart.schedule.steps import Verb, steps_of, to_text

SIZES = st.builds(
    lambda rows, batch, micro_batch, ranks: Phase(
        kind=PhaseKind.TRAIN, partition=0, rows=rows, batch=batch, micro_batch=min(micro_batch, batch), ranks=ranks
    ),
    rows=st.integers(1, 60), batch=st.integers(1, 20), micro_batch=st.integers(1, 8), ranks=st.integers(1, 5),
)  # fmt: skip


@given(phase=SIZES)
def test_all_micro_batches_are_computed_once_and_in_order(phase):
    alone = replace(phase, ranks=1)
    for update in range(phase.updates):
        shares = [replace(phase, rank=rank).own_micro_batches(update) for rank in range(phase.ranks)]
        assert [m for share in shares for m in share] == list(alone.own_micro_batches(update))
        assert max(map(len, shares)) == len(shares[0]) > 0
        assert max(map(len, shares)) <= -(-len(alone.own_micro_batches(update)) // phase.ranks)


@given(phase=SIZES)
def test_no_process_has_more_rows_than_a_plan_counts(phase):
    planned = phase.own
    assert planned.updates == phase.updates and planned.ranks == 1
    for update in range(phase.updates):
        most = planned.rows_before(update + 1) - planned.rows_before(update)
        for rank in range(phase.ranks):
            assert sum(span.stop - span.start for _, span in replace(phase, rank=rank).spans_of(update)) <= most


def spelled(order, rank, **more):
    phase = Phase(
        kind=PhaseKind.TRAIN, partition=0, through=1, rows=12, batch=8, micro_batch=4, order=order, rank=rank, ranks=2,
        streams=frozenset({0, 1}) if order is Order.PARTITIONS else frozenset(), **more,
    )  # fmt: skip
    return to_text(checked(steps_of([phase]), at_once=2))


def test_every_process_adds_up_each_partition_s_gradients_before_its_update_also_where_it_had_no_rows():
    assert spelled(Order.PARTITIONS, 0) == (
        "L0 F0.0 D0 L1+ B1.0 R1 U1 D1 L0+ B0.0 R0 U0 F0.2 D0 L1+ B1.2 R1 U1 D1 L0+ B0.2 R0 U0 D0"
    )
    assert spelled(Order.PARTITIONS, 1) == "L0 F0.1 D0 L1+ B1.1 R1 U1 D1 L0+ B0.1 R0 U0 D0 L1+ R1 U1 D1 L0+ R0 U0 D0"
    assert spelled(Order.MICRO_BATCHES, 1) == "L0+ L1+ F0.1 B1.1 B0.1 R1 R0 U1 U0 R1 R0 U1 U0 D0 D1"


def test_every_process_makes_the_same_loads_of_which_one_brings_optimizer_state():
    """A load is an exchange of weights: all take part, in one order, also where a process has no rows."""
    loads = [
        [word for word in spelled(Order.PARTITIONS, rank, divides_state=True).split() if word[0] in "LUD"] for rank in (0, 1)
    ]
    assert loads[0] == loads[1] and {"L0+", "L1+"} <= set(loads[0])
    phase = Phase(kind=PhaseKind.TRAIN, partition=0, through=2, rows=12, batch=8, micro_batch=4, rank=1, ranks=2)
    assert [replace(phase, divides_state=True).owner_of(p) for p in range(3)] == [0, 1, 0]
    assert [phase.owner_of(p) for p in range(3)] == [1, 1, 1], "undivided, each process has its own"


def test_gradients_that_wait_for_their_norm_are_added_up_before_they_go_home():
    words = spelled(Order.PARTITIONS, 1, defers_updates=True).split()
    assert words.index("R1") < words.index("D1+") < words.index("U1")
    assert all(f"{Verb.UPDATE.value}{p}" in words for p in (0, 1))
