"""The simulator's short cuts change nothing that it says."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpart.methods.exact import whole_network
from seqpart.methods.method import PartitionTraining, Workload
from seqpart.plan.problem import parts_of
from seqpart.plan.simulator import Clock, Disk, Resources, Simulator, simulate
from seqpart.profile.machine import Speeds
from seqpart.schedule.phases import Epochs, Phases, rooms_for_gradients
from seqpart.schedule.steps import Step, Verb, steps_of
from tests import chains
from tests.exactly import tiers

SPEEDS = Speeds(flops=1e10, optimizer=1e9, read=2e8, write=2e8)


@given(
    chain=st.lists(chains.blocks, min_size=1, max_size=4), micro_batch=st.integers(1, 3), batch=st.integers(1, 40),
    rows=st.integers(1, 80), streamed=st.booleans(), defers_updates=st.booleans(), slots=st.integers(1, 2),
    tier=st.sampled_from(["device", "disk", "mixed"]), data=st.data(),
)  # fmt: skip
def test_equal_micro_batches_that_are_not_walked_through_change_neither_the_peak_nor_the_time(
    chain, micro_batch, batch, rows, streamed, defers_updates, slots, tier, data
):
    count = len(chain)
    frozen = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 1), label="frozen")
    lowest = min(set(range(count)) - frozen)
    keeps = frozenset(data.draw(st.sets(st.integers(lowest, count - 1)), label="keeps"))
    stays = frozenset(data.draw(st.sets(st.integers(0, count - 1)), label="stays")) if streamed else frozenset()
    weights = frozenset(data.draw(st.sets(st.integers(0, count - 1)), label="weights")) - stays if streamed else frozenset()
    training = [
        PartitionTraining(epochs=1, batch_size=batch, micro_batch=min(micro_batch, batch), trainable=p not in frozen)
        for p in range(count)
    ]
    work = Workload(
        train_rows=rows,
        test_rows=0,
        shuffle=False,
        partitions=tuple(training),
        defers_updates=defers_updates,
        stays=stays,
        keeps=keeps,
    )
    phases = Phases([Epochs(train=replace(whole_network(work, streamed=streamed), epoch=1), epochs=1, following=())])
    problem = chains.problem_of(chain, 1 << 40, micro_batch=micro_batch, starts=tuple(range(count)), speeds=SPEEDS)
    costs = [cost for _, _, cost in parts_of(problem, micro_batch, range(count))]
    resources = Resources(
        slots=min(slots, count - len(stays)) if streamed else count, stays=stays, weights_stay=weights,
        tiers=tiers(tier, count),
        label_row=8, borrows=streamed, gradients_room=rooms_for_gradients(phases),
    )  # fmt: skip
    updates = -(-rows // batch)
    _, short, seconds = simulate(phases, costs, SPEEDS, resources)
    steps = list(Simulator(phases, costs, SPEEDS, resources).run(steps_of(phases)))
    assert max(step.peak for step in short) == max(step.peak for step in steps)
    if updates <= 4:  # of more, the steady state stands for those that are left out
        assert sum(step.bytes_read for step in short) == sum(step.bytes_read for step in steps)
        assert seconds == pytest.approx(max(step.ends for step in steps))


def loaded(at_host, *, more):
    """What a load takes of 8 MB of weights and twice that of optimizer state, which is at home."""
    chain = [chains.block(8 << 20, 0, 4096, 1) for _ in range(2)]
    problem = chains.problem_of(chain, 1 << 40, micro_batch=8, starts=(0, 1), speeds=LINKED)
    costs = [cost for _, _, cost in parts_of(problem, 8, (0, 1))]
    training = [PartitionTraining(epochs=2, batch_size=8, micro_batch=8, trainable=True) for _ in costs]
    work = Workload(train_rows=16, test_rows=0, shuffle=False, partitions=tuple(training), defers_updates=False)
    phases = Phases([Epochs(train=replace(whole_network(work, streamed=True), epoch=1), epochs=2, following=())])
    simulator = Simulator(phases, costs, LINKED, Resources(at_host=frozenset({0, 1} if at_host else ())))
    steps = [step for step in simulator.run(steps_of(phases)) if step.step.verb is Verb.LOAD and step.step.more is more]
    return steps[-1]


LINKED = Speeds(flops=1e10, optimizer=1e9, read=1e8, write=1e8, up=1e10, down=1e10)


def test_homes_in_host_memory_come_by_the_link_and_others_from_the_disk():
    """All were priced as if they were on the disk."""
    disk, host = loaded(False, more=False), loaded(True, more=False)
    assert (disk.bytes_read, host.bytes_read) == (8 << 20, 0)
    assert disk.seconds == pytest.approx((8 << 20) / 1e8)
    assert host.seconds == pytest.approx((8 << 20) / 1e10)


def test_backward_does_not_wait_for_optimizer_state_and_the_update_does():
    clock = Clock(1, frozenset())
    assert clock.take(Step(Verb.LOAD, 0, more=True), 3.0, 0.0, 0.0, 1, first=1 / 3) == 3.0
    assert clock.take(Step(Verb.BACKWARD, 0, 0), 0.5, 0.0, 0.0, 1) == 1.5
    assert clock.take(Step(Verb.UPDATE, 0), 0.25, 0.0, 0.0, 1) == 3.25


def test_reads_and_writes_share_the_disk_and_links_go_both_ways_at_once():
    """The disk was priced as if it did both side by side."""
    for at_host, ends in (frozenset(), 4.0), (frozenset({0, 1}), 3.0):
        clock = Clock(2, frozenset(), at_host=at_host)
        clock.take(Step(Verb.LOAD, 0), 1.0, 0.0, 0.0, 1)
        clock.take(Step(Verb.FORWARD, 0, 0), 0.5, 0.0, 0.0, 1)  # from 1.0 to 1.5
        clock.take(Step(Verb.DROP, 0), 1.0, 0.0, 0.0, 1)  # from 1.5
        assert clock.take(Step(Verb.LOAD, 1), 2.0, 0.0, 0.0, 1) == ends  # from 1.0, and a second later


@given(asked=st.lists(st.tuples(st.floats(0, 10), st.floats(0, 3)), max_size=12))
def test_the_disk_never_does_two_things_at_a_time_and_never_rests_while_somebody_waits(asked):
    disk, ends = Disk(), []
    for begins, seconds in asked:
        ends.append(disk.serve(begins, seconds))
        assert ends[-1] >= begins + seconds - 1e-9
    if asked:
        first, work = min(begins for begins, _ in asked), sum(seconds for _, seconds in asked)
        assert max(ends) <= max(begins for begins, _ in asked) + work + 1e-9
        assert max(ends) >= first + max((seconds for _, seconds in asked), default=0) - 1e-9
    for begins, _ in asked:  # all that may begin there goes on without a gap
        later = sum(seconds for other, seconds in asked if other >= begins)
        assert max(ends) >= begins + later - 1e-9
