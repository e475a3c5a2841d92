"""The phases of a run, computed from its stretches: what a list of them would say, without the list."""

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.schedule.phases import Epochs, Phases, counted
from seqpart.schedule.progress import Progress
from seqpart.schedule.steps import Position, steps_of

TRAIN, CACHE, TEST = (
    Phase(kind=kind, partition=0, rows=3, batch=2, micro_batch=1) for kind in (PhaseKind.TRAIN, PhaseKind.CACHE, PhaseKind.TEST)
)


@st.composite
def stretches(draw):
    stage, p = draw(st.integers(0, 1)), draw(st.integers(0, 2))
    made = [replace(phase, partition=p, stage=stage) for phase in (TRAIN, CACHE, TEST)]
    return Epochs(
        train=made[0], epochs=draw(st.integers(0, 9)), following=tuple(made[draw(st.integers(1, 3)) :]),
        every=draw(st.one_of(st.none(), st.integers(1, 11))),
    )  # fmt: skip


def spelled_out(stretch):
    """What `Epochs` means, one phase after the other."""
    for epoch in range(1, stretch.epochs + 1):
        yield replace(stretch.train, epoch=epoch)
        if stretch.every is not None and epoch % stretch.every == 0 and epoch < stretch.epochs:
            yield from stretch.following
    yield from stretch.following


@given(parts=st.lists(stretches(), max_size=4), data=st.data())
def test_phases_and_their_slices_are_those_of_the_list(parts, data):
    phases, found = Phases(parts), [phase for part in parts for phase in spelled_out(part)]
    assert list(phases) == found and len(phases) == len(found)
    first, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(found))] * 2)))
    assert list(phases[first:stop]) == found[first:stop]
    assert list(phases[first:][: stop - first]) == found[first:stop]
    times: dict = {}
    for phase in found[first:stop]:
        times[replace(phase, epoch=0)] = times.get(replace(phase, epoch=0), 0) + 1
    told: dict = {}
    for phase, number in counted(phases[first:stop]):
        told[replace(phase, epoch=0)] = told.get(replace(phase, epoch=0), 0) + number
    assert told == times


@given(parts=st.lists(stretches(), max_size=4), updates=st.integers(0, 2), data=st.data())
def test_an_optimizer_state_is_needed_again_as_a_walk_through_the_list_would_find(parts, updates, data):
    phases, found = Phases(parts), [phase for part in parts for phase in spelled_out(part)]
    at, p, stage = data.draw(st.integers(0, len(found))), data.draw(st.integers(0, 2)), data.draw(st.integers(0, 1))
    again = any(
        phase.stage == stage and phase.trains(p) and (updates if number == at else 0) < phase.updates
        for number, phase in enumerate(found)
        if number >= at
    )
    for known in (phases, found):
        assert Progress(known, Position(at, updates)).needs_state(p, stage) is again


def test_a_billion_epochs_take_no_time():
    phases = Phases([Epochs(train=TRAIN, epochs=10**9, following=(CACHE, TEST), every=1)])
    assert len(phases) == 3 * 10**9
    assert phases[-3].epoch == 10**9
    assert dict(counted(phases[10:])) == {replace(TRAIN, epoch=5): 10**9 - 4, CACHE: 10**9 - 3, TEST: 10**9 - 3}
    assert len(list(itertools.islice(steps_of(phases, Position(3 * 10**9 - 2)), 9))) == 8  # L0 F0.0 F0.1 F0.2 F0.0 F0.1 F0.2 D0
