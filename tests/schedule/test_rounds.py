"""Phases of training in rounds, computed: what a list of them would say, without the list."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from seqpart.schedule.phase import EpochSlice, Phase, PhaseKind
from seqpart.schedule.phases import Phases, Rounds, counted, last_trainings
from seqpart.schedule.progress import Progress, checked
from seqpart.schedule.steps import Position, Verb, steps_of, to_text
from tests.schedule.parsing import parse

SPLIT = Phase(kind=PhaseKind.SPLIT, partition=0, rows=1, batch=1, micro_batch=1)
MERGE = replace(SPLIT, kind=PhaseKind.MERGE)


@st.composite
def stretches(draw):
    rows, batch, epochs = draw(st.integers(1, 12)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    turn = Phase(kind=PhaseKind.TRAIN, partition=1, rows=rows, batch=batch, micro_batch=batch, epochs=epochs)
    tests = [Phase(kind=PhaseKind.TEST, partition=0, rows=5 + n, batch=5, micro_batch=5, ends=0) for n in range(7)]
    return Rounds(
        split=SPLIT, merge=MERGE, local=draw(st.integers(1, 5)), epochs=epochs,
        turns=tuple(
            replace(turn, partition=1 + n, within=EpochSlice(skips=n * rows, rows_of=0)) for n in range(draw(st.integers(1, 3)))
        ),
        following=tuple(tests[: draw(st.integers(1, 7))]), every=draw(st.one_of(st.none(), st.integers(1, 4))),
    )  # fmt: skip


def spelled_out(stretch):
    """What `Rounds` means, one phase after the other."""
    number, (turn, *_) = 0, stretch.turns
    for epoch in range(1, stretch.epochs + 1):
        for done in range(0, turn.updates, stretch.local):
            number += 1
            yield replace(SPLIT, epoch=number)
            for part in stretch.turns:
                first = done * part.batch
                yield replace(
                    part, epoch=epoch,
                    within=EpochSlice(done=done, updates_of_epoch=part.updates, skips=part.within.skips + first, rows_of=0),
                    rows=min(stretch.local * part.batch, part.rows - first),
                )  # fmt: skip
            yield replace(MERGE, epoch=number)
        if stretch.every is not None and epoch % stretch.every == 0 and epoch < stretch.epochs:
            yield from stretch.following
    yield from stretch.following


def alike(phase):
    """What is told apart where phases are counted."""
    return replace(phase, epoch=0, within=replace(phase.within, done=0, skips=0))


@given(stretch=stretches(), data=st.data())
def test_rounds_and_their_slices_are_those_of_the_list(stretch, data):
    phases, found = Phases([stretch]), list(spelled_out(stretch))
    assert list(phases) == found and len(phases) == len(found)
    first, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(found))] * 2)))
    assert list(phases[first:stop]) == found[first:stop]
    told = Counter()
    for phase, times in counted(phases[first:stop]):
        told[alike(phase)] += times
    assert told == Counter(map(alike, found[first:stop]))


@given(stretch=stretches())
def test_a_place_in_words_is_the_place(stretch):
    assert [stretch.index_of(*stretch.stands(index)) for index in range(len(stretch))] == list(range(len(stretch)))


@given(stretch=stretches())
def test_the_last_turn_of_each_part_is_known_and_all_rows_of_an_epoch_are_trained_once(stretch):
    phases = Phases([stretch])
    last = {}
    seen: dict[tuple[int, int], list[int]] = {}
    for number, phase in enumerate(phases):
        if phase.kind is PhaseKind.TRAIN:
            last[0, phase.partition] = number
            rows = seen.setdefault((phase.partition, phase.epoch), [])
            rows += range(phase.within.skips, phase.within.skips + phase.rows)
            assert phase.share_of(phase.updates)[0] <= phase.share_of(0)[1], "the learning rate's schedule ends with the last"
    assert last_trainings(phases) == last
    for (partition, _), rows in seen.items():
        turn = stretch.turns[partition - 1]
        assert rows == list(range(turn.within.skips, turn.within.skips + turn.rows))


@given(stretch=stretches())
def test_their_steps_keep_the_rules_and_positions_stand_before_and_behind_every_cut(stretch):
    phases = Phases([stretch])
    progress, positions = Progress(phases), set()
    for step in checked(steps_of(phases)):
        if progress.finish(step):
            positions.add(progress.position)
    assert {Position(number) for number in range(1, len(phases) + 1)} <= positions
    text = to_text(steps_of(phases), phases)
    assert to_text(parse(text), phases) == text


@given(stretch=stretches(), ranks=st.integers(2, 3))
def test_of_several_processes_each_turn_is_one_s_and_all_else_is_everyone_s(stretch, ranks):
    def works(stretch):
        """The steps that are no transfer, by the kind of their phase; the whole stretch is gone through."""
        phases, found = Phases([stretch]), {True: [], False: []}
        progress = Progress(phases)
        for step in checked(steps_of(phases)):
            progress.finish(step)
            if step.verb not in (Verb.LOAD, Verb.DROP):
                found[phases[step.phase].kind is PhaseKind.TRAIN].append(step)
        assert progress.position == Position(len(phases))
        return found[True], found[False]

    turns, others = works(stretch)
    shares = []
    for rank in range(ranks):
        own = tuple(replace(turn, elsewhere=n % ranks != rank) for n, turn in enumerate(stretch.turns))
        share, rest = works(replace(stretch, turns=own, merge=replace(MERGE, rank=rank, ranks=ranks)))
        assert [step for step in rest if step.verb is not Verb.GATHER] == others
        given = [step for step, after in pairwise(rest) if after.verb is Verb.MERGE]
        assert {step.verb for step in given} == {Verb.GATHER}
        shares += share
    assert Counter(shares) == Counter(turns)
