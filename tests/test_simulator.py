"""The simulator's short cuts change nothing that it says."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpart.costs.hardware import Speeds
from seqpart.costs.simulator import Resources, Simulator, simulate
from seqpart.methods.exact import whole_network
from seqpart.methods.method import PartitionTraining, Workload
from seqpart.planning.problem import parts_of
from seqpart.schedule.phases import Epochs, Phases
from seqpart.schedule.steps import steps_of
from tests import chains

SPEEDS = Speeds(flops=1e10, optimizer=1e9, read=2e8, write=2e8)


@given(
    chain=st.lists(chains.blocks, min_size=1, max_size=4), micro_batch=st.integers(1, 3), batch=st.integers(1, 40),
    rows=st.integers(1, 80), streamed=st.booleans(), clips=st.booleans(), slots=st.integers(1, 2),
    tier=st.sampled_from(["device", "disk"]), data=st.data(),
)  # fmt: skip
def test_equal_micro_batches_that_are_not_walked_through_change_neither_the_peak_nor_the_time(
    chain, micro_batch, batch, rows, streamed, clips, slots, tier, data
):
    count = len(chain)
    frozen = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 1), label="frozen")
    lowest = min(set(range(count)) - frozen)
    keeps = frozenset(data.draw(st.sets(st.integers(lowest, count - 1)), label="keeps"))
    stays = frozenset(data.draw(st.sets(st.integers(0, count - 1)), label="stays")) if streamed else ()
    training = [
        PartitionTraining(epochs=1, batch_size=batch, micro_batch=min(micro_batch, batch), trainable=p not in frozen)
        for p in range(count)
    ]
    work = Workload(
        train_rows=rows,
        test_rows=0,
        shuffle=False,
        partitions=tuple(training),
        clips=clips,
        stays=frozenset(stays),
        keeps=keeps,
    )
    phases = Phases([Epochs(train=replace(whole_network(work, streamed=streamed), epoch=1), epochs=1, behind=())])
    problem = chains.problem_of(chain, 1 << 40, micro_batch=micro_batch, starts=tuple(range(count)), speeds=SPEEDS)
    costs = [cost for _, _, cost in parts_of(problem, micro_batch, range(count))]
    resources = Resources(
        slots=min(slots, count - len(stays)) if streamed else count, stays=frozenset(stays), boundary_tier=tier,
        label_row=8, borrows=streamed, gradients_room=clips and streamed,
    )  # fmt: skip
    updates = -(-rows // batch)
    _, short, seconds = simulate(phases, costs, SPEEDS, resources)
    steps = list(Simulator(phases, costs, SPEEDS, resources).run(steps_of(phases)))
    assert max(step.peak for step in short) == max(step.peak for step in steps)
    if updates <= 4:  # of more, the steady state stands for those that are left out
        assert sum(step.bytes_read for step in short) == sum(step.bytes_read for step in steps)
        assert seconds == pytest.approx(max(step.ends for step in steps))
