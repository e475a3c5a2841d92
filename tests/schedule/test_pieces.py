"""Phases of training that is counted in updates, computed: what a list of them would say, without the list."""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from seqpart.schedule.lengths import AT_THE_END, Interval, interval_of, length_of
from seqpart.schedule.phase import EpochSlice, Phase, PhaseKind
from seqpart.schedule.phases import Epochs, Phases, Pieces, counted, last_trainings, training
from seqpart.schedule.progress import Progress, checked
from seqpart.schedule.steps import Position, steps_of

TESTS = [Phase(kind=PhaseKind.TEST, partition=p, rows=3, batch=2, micro_batch=2) for p in range(2)]


@st.composite
def stretches(draw):
    rows, batch = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    return Pieces(
        train=Phase(kind=PhaseKind.TRAIN, partition=0, rows=rows, batch=batch, micro_batch=batch, shuffle=True),
        updates=draw(st.integers(1, 30)), following=tuple(TESTS[: draw(st.integers(0, 2))]),
        every=draw(st.one_of(st.none(), st.integers(1, 9))),
    )  # fmt: skip


def spelled_out(stretch):
    """What `Pieces` means, one phase after the other."""
    train, first = stretch.train, 0
    for update in range(1, stretch.updates + 1):
        tests = stretch.every is not None and update % stretch.every == 0
        if not (tests or update % train.updates == 0 or update == stretch.updates):
            continue
        done = first % train.updates
        yield replace(
            train, epoch=first // train.updates + 1, epochs=stretch.epochs,
            within=EpochSlice(
                done=done, updates_of_epoch=train.updates, updates_of_stage=stretch.updates, skips=done * train.batch
            ),
            rows=min((update - first) * train.batch, train.rows - done * train.batch),
        )  # fmt: skip
        first = update
        if tests or update == stretch.updates:
            yield from stretch.following


def alike(phase):
    """What is told apart where phases are counted."""
    return replace(phase, epoch=0, within=replace(phase.within, done=0, skips=0), rows=0)


@given(stretch=stretches(), data=st.data())
def test_pieces_and_their_slices_are_those_of_the_list(stretch, data):
    phases, found = Phases([stretch]), list(spelled_out(stretch))
    assert list(phases) == found and len(phases) == len(found)
    first, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(found))] * 2)))
    assert list(phases[first:stop]) == found[first:stop]
    told, rows = Counter(), 0
    for phase, times in counted(phases[first:stop]):
        told[alike(phase)] += times
        rows += phase.rows * times
    assert told == Counter(map(alike, found[first:stop])) and rows == sum(phase.rows for phase in found[first:stop])


@given(stretch=stretches())
def test_updates_are_those_of_whole_epochs_and_their_share_of_the_schedule_rises_by_one(stretch):
    """The row order, the draws of dropout and the learning rate go by these."""
    epochs, seen = stretch.train.updates, []
    for phase in Phases([stretch]):
        if phase.kind is PhaseKind.TRAIN:
            seen += [(phase.epoch, phase.within.done + n, *phase.share_of(n)) for n in range(phase.updates)]
    assert seen == [(n // epochs + 1, n % epochs, n, stretch.updates) for n in range(stretch.updates)]


@given(stretch=stretches())
def test_a_place_in_words_is_the_place_and_all_is_over_behind_the_last_piece(stretch):
    found = [stretch.stands(index) for index in range(len(stretch))]
    assert [stretch.index_of(*place) for place in found] == list(range(len(stretch)))
    over = [epochs == stretch.epochs for epochs, _ in found]
    assert over == [False] * (len(stretch) - len(stretch.following)) + [True] * len(stretch.following)


@given(stretch=stretches(), data=st.data())
def test_the_last_piece_is_known_and_an_optimizer_state_is_needed_until_then(stretch, data):
    phases = Phases([stretch])
    trainings = [number for number, phase in enumerate(phases) if phase.kind is PhaseKind.TRAIN]
    assert last_trainings(phases) == {(0, 0): trainings[-1]}
    at = data.draw(st.integers(0, len(phases)))
    assert Progress(phases, Position(at)).needs_state(0, 0) is (at <= trainings[-1])
    list(checked(steps_of(phases, Position(min(at, len(phases) - 1))), 1))  # raises where a rule is broken


@given(stretch=stretches())
def test_what_is_walked_through_stands_for_all_phases(stretch):
    assert sum(times for _, times in stretch.walked()) == len(stretch)


def test_a_billion_epochs_take_no_time():
    train = Phase(kind=PhaseKind.TRAIN, partition=0, rows=10, batch=2, micro_batch=2)
    phases = Phases([Pieces(train=train, updates=5 * 10**9, following=tuple(TESTS), every=3)])
    assert (phases[-3].epoch, phases[-3].within.skips) == (10**9, 6)
    assert sum(phase.rows * times for phase, times in counted(phases) if phase.kind is PhaseKind.TRAIN) == 10**10


def test_whole_epochs_stay_what_they_were():
    train = Phase(kind=PhaseKind.TRAIN, partition=0, rows=10, batch=2, micro_batch=2)
    whole = Epochs(train=replace(train, epochs=2), epochs=2, following=tuple(TESTS), every=1)
    assert training(train, 2, None, tuple(TESTS), Interval(epochs=1)) == whole
    by_updates = training(train, 2, None, tuple(TESTS), Interval(updates=5))
    places = [(phase.kind, phase.epoch, phase.rows) for phase in Phases([by_updates])]
    assert places == [(phase.kind, phase.epoch, phase.rows) for phase in Phases([whole])]


def test_lengths_and_intervals_are_read_from_numbers_and_words():
    assert [length_of(epochs, None, 30).updates for epochs in (0.1, 0.5, 1 / 3, 2, 2.5, 1e-9)] == [3, 15, 10, 60, 75, 1]
    assert length_of(3, 70, 30).epochs == 3 and length_of(2, None, 30).counted is None
    assert [interval_of(every, None) for every in (500, "500", "500 updates", "1epoch", "2 epochs", None)] == [
        *[Interval(updates=500)] * 3, Interval(epochs=1), Interval(epochs=2), AT_THE_END,
    ]  # fmt: skip
