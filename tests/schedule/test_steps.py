"""The grammar of a run: rows are covered once and in order, text and steps are the same thing, each rule is held."""

from dataclasses import replace
from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpart.errors import ScheduleError
from seqpart.schedule.phase import Order, Phase, PhaseKind
from seqpart.schedule.phases import rooms_for_gradients
from seqpart.schedule.progress import checked
from seqpart.schedule.steps import Position, Step, Verb, steps_of, to_text
from tests.schedule.parsing import parse

phases_of = st.builds(
    Phase,
    kind=st.sampled_from([kind for kind in PhaseKind if kind not in (PhaseKind.SPLIT, PhaseKind.MERGE, PhaseKind.GATHER)]),
    partition=st.integers(0, 3),
    rows=st.integers(1, 60),
    batch=st.integers(1, 25),
    micro_batch=st.integers(1, 12),
    epoch=st.integers(0, 3),
    stage=st.integers(0, 1),
)
chains_of_phases = st.lists(phases_of, min_size=1, max_size=6).map(lambda phases: sorted(phases, key=lambda phase: phase.stage))


def train(partition=0, epoch=1, rows=4, batch=2, micro_batch=2):
    return Phase(kind=PhaseKind.TRAIN, partition=partition, rows=rows, batch=batch, micro_batch=micro_batch, epoch=epoch)


def forward(kind, partition=0, rows=4):
    return Phase(kind=kind, partition=partition, rows=rows, batch=2, micro_batch=2)


@given(phases_of)
def test_spans_cover_every_row_exactly_once_and_in_order(phase):
    spans = [span for _, span in phase.spans()]
    assert [row for span in spans for row in range(span.start, span.stop)] == list(range(phase.rows))
    assert all(0 < span.stop - span.start <= phase.micro_batch for span in spans)


@given(phases_of)
def test_micro_batches_count_from_zero_without_a_gap_and_span_agrees(phase):
    listed = list(phase.spans())
    assert [m for m, _ in listed] == list(range(len(listed)))
    assert all(phase.span(m) == span for m, span in listed)


@given(phases_of)
def test_each_update_ends_once_and_knows_its_rows(phase):
    update, rows = 0, 0
    for _, span in phase.spans():
        rows += span.stop - span.start
        assert span.update_rows == min(phase.batch, phase.rows - update * phase.batch)
        assert span.ends_update == (rows == span.update_rows)
        if span.ends_update:
            update, rows = update + 1, 0
    assert (update, rows) == (phase.updates, 0)


@given(phases_of, st.integers(0, 70))
def test_spans_from_a_later_update_are_the_tail_of_all_spans(phase, first):
    tail = [(m, span) for m, span in phase.spans() if span.start >= first * phase.batch]
    assert list(phase.spans(first)) == tail


@given(chains_of_phases)
def test_steps_one_partition_at_a_time_keep_every_rule(phases):
    steps = list(checked(steps_of(phases)))
    visits = sum(visits_for(list(run)) for _, run in groupby(phases, key=lambda phase: phase.partition))
    assert [sum(step.verb is verb for step in steps) for verb in (Verb.LOAD, Verb.DROP)] == [visits, visits]


def visits_for(phases):
    """Of one partition through `phases`: it stays, but goes and comes again for state that is not there with it."""
    first, *others = phases
    wanted = [state_of(first), *(state_of(phase) for phase in others if state_of(phase) is not None)]
    return len(list(groupby(wanted)))


def state_of(phase):
    """The stage whose optimizer state a phase works with; None in a forward pass."""
    return phase.stage if phase.kind is PhaseKind.TRAIN else None


@given(chains_of_phases)
def test_state_comes_along_exactly_where_something_is_trained(phases):
    for step in steps_of(phases):
        if step.verb is Verb.LOAD:
            assert step.more == phases[step.phase].trains(step.partition)
        elif step.verb is Verb.DROP:
            assert not step.more


@given(chains_of_phases)
def test_text_parses_back_to_the_same_steps(phases):
    steps = list(steps_of(phases))
    assert parse(to_text(steps, phases)) == steps
    assert [str(step) for step in parse(to_text(steps))] == [str(step) for step in steps]


@given(chains_of_phases, st.data())
def test_a_run_resumed_anywhere_does_exactly_the_steps_that_were_left(phases, data):
    index = data.draw(st.integers(0, len(phases) - 1))
    updates = data.draw(st.integers(0, phases[index].updates - 1))
    works = (Verb.FORWARD, Verb.BACKWARD, Verb.UPDATE)
    whole = [step for step in steps_of(phases) if step.verb in works]
    left = [step for step in steps_of(phases, Position(index, updates)) if step.verb in works]
    assert left == whole[len(whole) - len(left) :]
    done = [step for step in whole[: len(whole) - len(left)] if step.phase == index]
    skipped = [m for m, span in phases[index].spans() if span.start < updates * phases[index].batch]
    assert [step.micro_batch for step in done if step.verb is not Verb.UPDATE] == skipped
    list(checked(steps_of(phases, Position(index, updates))))


@st.composite
def streamed_runs(draw, *, some_stay=False):
    """Epochs of one streamed pass over several partitions, in one stage or two, and test rows through each of them."""
    count = draw(st.integers(2, 6))
    phase = Phase(
        kind=PhaseKind.TRAIN, partition=0, through=count - 1, epoch=1,
        order=Order.PARTITIONS,
        streams=draw(st.frozensets(st.integers(0, count - 1))) if some_stay else frozenset(range(count)),
        rows=draw(st.integers(1, 40)),
        batch=draw(st.integers(1, 25)), micro_batch=draw(st.integers(1, 12)), defers_updates=draw(st.booleans()),
        frozen=draw(st.frozensets(st.integers(0, count - 1))),
        keeps=draw(st.frozensets(st.integers(0, count - 1))),
    )  # fmt: skip
    tests = [forward(PhaseKind.TEST, p) for p in range(count)]
    more = draw(st.sampled_from([[], [replace(phase, epoch=2)], [replace(phase, stage=1)]]))
    return [phase, *draw(st.sampled_from([[], tests])), *more, *tests]


def visits_of(steps):
    """[(LOAD, steps between, DROP)] in the order of their LOADs, of partitions that come one at a time."""
    visits = []
    for step in steps:
        if step.verb is Verb.LOAD:
            visits.append([])
        visits[-1].append(step)
    return [(visit[0], visit[1:-1], visit[-1]) for visit in visits]


@given(streamed_runs())
def test_streamed_steps_keep_every_rule_with_one_partition_at_a_time(phases):
    steps = list(checked(steps_of(phases), at_once=1))
    assert parse(to_text(steps, phases)) == steps


@given(streamed_runs(some_stay=True))
def test_where_some_partitions_stay_one_more_is_loaded_at_a_time(phases):
    stays = {p for phase in phases if phase.breadth_first for p in phase.partitions} - max(
        (phase.streams for phase in phases), key=len
    )
    steps = list(checked(steps_of(phases), at_once=1 + len(stays)))
    for number, phase in enumerate(phases):
        if phase.breadth_first:
            dropped = {step.partition for step in steps if step.verb is Verb.DROP and step.phase == number}
            ends = number + 1 == len(phases) or not phases[number + 1].breadth_first or phases[number + 1].stage != phase.stage
            assert ends or not dropped & stays, "they stay from phase to phase"


@given(streamed_runs(some_stay=True))
def test_gradients_of_no_two_partitions_are_on_the_device_at_once_unless_updates_wait_for_the_norm_of_all(phases):
    for number, phase in enumerate(phases):
        having = set()
        for step in (step for step in steps_of(phases) if step.phase == number):
            if step.verb is Verb.BACKWARD:
                having.add(step.partition)
            elif step.verb is Verb.UPDATE or step.more:
                having.discard(step.partition)
            limit = 1 if not phase.defers_updates else 1 + len([p for p in phase.partitions if p not in phase.streams])
            assert len(having) <= limit


@given(streamed_runs(some_stay=True))
def test_all_micro_batches_of_a_partition_come_before_the_next_and_the_last_runs_forward_in_its_backward(phases):
    steps = list(steps_of(phases))
    for number, phase in enumerate(phases):
        if not phase.breadth_first:
            continue
        up = range(phase.last if phase.lowest <= phase.last else phase.last + 1)
        down = range(phase.last, phase.lowest - 1, -1)
        expected = []
        for update in range(phase.updates):
            micro_batches = [m for m, _ in phase.spans_of(update)]
            expected += [Step(Verb.FORWARD, p, m, number) for p in up for m in micro_batches]
            expected += [Step(Verb.BACKWARD, p, m, number) for p in down for m in micro_batches]
        assert [step for step in steps if step.phase == number and step.micro_batch is not None] == expected


@given(streamed_runs(some_stay=True))
def test_in_each_update_every_partition_makes_its_step_once_behind_its_own_work(phases):
    for number, phase in enumerate(phases):
        steps = [step for step in steps_of(phases) if step.phase == number and step.verb is not Verb.LOAD]
        updates = [step.partition for step in steps if step.verb is Verb.UPDATE]
        if not phase.breadth_first:
            assert updates == []
            continue
        count = len(phase.partitions)
        assert all(sorted(updates[i : i + count]) == [*phase.partitions] for i in range(0, len(updates), count))
        assert len(updates) == count * phase.updates
        waiting = {p for p in phase.streams if phase.defers_updates and phase.trains(p) and p > phase.lowest}
        for before, step in pairwise(steps):
            stays_for_norm = phase.defers_updates and step.partition not in phase.streams
            if step.verb is Verb.UPDATE and step.partition not in waiting and not stays_for_norm:
                assert before.partition == step.partition and before.micro_batch is not None


@given(streamed_runs())
def test_each_partition_comes_twice_an_update_at_most_and_once_more_for_the_norm_of_all(phases):
    for number, phase in enumerate(phases):
        if phase.breadth_first:
            loads = [step.partition for step in steps_of(phases) if step.phase == number and step.verb is Verb.LOAD]
            for p in phase.partitions:
                waits = phase.defers_updates and phase.trains(p) and p > phase.lowest
                twice = p < phase.last and p >= phase.lowest
                assert loads.count(p) <= phase.updates * (1 + twice + waits)


@given(streamed_runs())
def test_state_comes_where_the_step_is_made_and_gradients_go_home_where_it_is_not(phases):
    for load, work, drop in visits_of(steps_of(phases)):
        makes = [step.phase for step in work if step.verb is Verb.UPDATE]
        trains = any(phases[number].trains(load.partition) for number in makes)
        assert load.more == trains
        assert drop.more == (any(step.verb is Verb.BACKWARD for step in work) and not makes)
        assert not drop.more or drop.partition in rooms_for_gradients([phases[drop.phase]])


@given(streamed_runs(some_stay=True), st.data())
def test_a_streamed_run_resumed_anywhere_does_exactly_the_work_that_was_left(phases, data):
    index = data.draw(st.sampled_from([number for number, phase in enumerate(phases) if phase.breadth_first]))
    position = Position(index, data.draw(st.integers(0, phases[index].updates - 1)))
    whole, left = (
        [step for step in steps if step.verb not in (Verb.LOAD, Verb.DROP)]
        for steps in (list(steps_of(phases)), list(checked(steps_of(phases, position), at_once=6)))
    )
    assert left == whole[len(whole) - len(left) :]
    done = [step for step in whole[: len(whole) - len(left)] if step.phase == index and step.verb is Verb.UPDATE]
    assert len(done) == position.updates * len(phases[index].partitions)


def streamed(count, *, rows):
    """A pass over `count` partitions that all come and go, in updates of two micro-batches."""
    return Phase(
        kind=PhaseKind.TRAIN, partition=0, through=count - 1, rows=rows, batch=4, micro_batch=2, order=Order.PARTITIONS,
        streams=frozenset(range(count)),
    )  # fmt: skip


def test_kept_graphs_change_no_step():
    phase = streamed(4, rows=8)
    steps = list(steps_of([phase]))
    for p in range(4):
        kept = replace(phase, keeps=frozenset({p}))
        assert list(steps_of([kept])) == steps
        assert [kept.keeps_graph(q) for q in range(4)] == [q == p < 3 for q in range(4)]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "L0 F0.0 F0.1 D0 L1 F1.0 F1.1 D1 L2+ B2.0 B2.1 U2 D2 L1+ B1.0 B1.1 U1 D1 L0+ B0.0 B0.1 U0 D0"),
        (
            {"defers_updates": True},
            "L0 F0.0 F0.1 D0 L1 F1.0 F1.1 D1 L2 B2.0 B2.1 D2+ L1 B1.0 B1.1 D1+ L0+ B0.0 B0.1 U0 D0 L1+ U1 D1 L2+ U2 D2",
        ),
        ({"frozen": {0}}, "L0 F0.0 F0.1 U0 D0 L1 F1.0 F1.1 D1 L2+ B2.0 B2.1 U2 D2 L1+ B1.0 B1.1 U1 D1"),
        ({"frozen": {2}}, "L0 F0.0 F0.1 D0 L1 F1.0 F1.1 D1 L2 B2.0 B2.1 U2 D2 L1+ B1.0 B1.1 U1 D1 L0+ B0.0 B0.1 U0 D0"),
        ({"streams": {0, 1}}, "L0 F0.0 F0.1 D0 L1 F1.0 F1.1 D1 L2+ B2.0 B2.1 U2 L1+ B1.0 B1.1 U1 D1 L0+ B0.0 B0.1 U0 D2 D0"),
        ({"streams": {1}}, "L0+ F0.0 F0.1 L1 F1.0 F1.1 D1 L2+ B2.0 B2.1 U2 L1+ B1.0 B1.1 U1 D1 B0.0 B0.1 U0 D0 D2"),
        (
            {"streams": {1, 2}, "defers_updates": True, "frozen": {0}},
            "L0 F0.0 F0.1 U0 L1 F1.0 F1.1 D1 L2 B2.0 B2.1 D2+ L1+ B1.0 B1.1 U1 D1 L2+ U2 D2 D0",
        ),
        ({"streams": set()}, "L0+ F0.0 F0.1 L1+ F1.0 F1.1 L2+ B2.0 B2.1 U2 B1.0 B1.1 U1 B0.0 B0.1 U0 D0 D1 D2"),
        (
            {"streams": {1}, "defers_updates": True},
            "L0+ F0.0 F0.1 L1 F1.0 F1.1 D1 L2+ B2.0 B2.1 L1 B1.0 B1.1 D1+ B0.0 B0.1 U0 L1+ U1 D1 U2 D0 D2",
        ),
        ({"frozen": {0, 1, 2}}, "L0 F0.0 F0.1 U0 D0 L1 F1.0 F1.1 U1 D1 L2 F2.0 F2.1 U2 D2"),
    ],
)
def test_one_streamed_update_step_by_step(changes, text):
    phase = streamed(3, rows=4)
    assert to_text(steps_of([replace(phase, **changes)])) == text


def test_a_schedule_prints_as_the_documents_show_it():
    phases = [train(), forward(PhaseKind.CACHE), forward(PhaseKind.TEST), train(1)]
    assert to_text(steps_of(phases), phases) == (
        "[train 0.1] L0+ B0.0 U0 B0.1 U0 [cache 0] F0.0 F0.1 [test 0] F0.0 F0.1 D0 [train 1.1] L1+ B1.0 U1 B1.1 U1 D1"
    )


def test_nothing_is_loaded_for_no_phases():
    assert list(steps_of([])) == []


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("F0.0", "F0.0: partition 0 is not loaded"),
        ("L0 L0", "L0: partition 0 is loaded already"),
        ("L0 L1", r"L1: 1 partition\(s\) are loaded, and the plan has room for no more"),
        ("L0 U0", "U0: no forward or backward came before this update"),
        ("L0 B0.0 U0 U0", "U0: no forward or backward came before this update"),
        ("L0 F0.0 U0 U0", "U0: no forward or backward came before this update"),
        ("L0 F0.0 D0 L0 U0", "U0: no forward or backward came before this update"),
        ("L0 B0.0 D0+ L0 U0 D0", "U0: no forward or backward|U0: partition 0 left its gradients at home"),
        ("L0 B0.0 D0", "D0: partition 0 holds gradients that no update has used"),
        ("L0 F0.0 D0+", r"D0\+: partition 0 has no gradients to take home"),
        ("L0 B0.0 U0 D0+", r"D0\+: partition 0 has no gradients to take home"),
        ("L0 B0.0 D0+", r"ends with gradients of partitions \[0\] unused"),
        ("L0 B0.0 D0+ L0+ D0", "D0: partition 0 holds gradients that no update has used"),
        ("D0", "D0: partition 0 is not loaded"),
        ("L0 D0 F0.0", "F0.0: partition 0 is not loaded"),
        ("L0", r"ends with partitions \[0\] loaded"),
    ],
)
def test_each_rule_is_held_and_the_step_is_named(text, rule):
    with pytest.raises(ScheduleError, match=rule):
        list(checked(parse(text)))


@pytest.mark.parametrize("step", [Step(Verb.LOAD, 0, 1), Step(Verb.FORWARD, 0), Step(Verb.UPDATE, 0, 0)])
def test_a_micro_batch_goes_with_forward_and_backward_only(step):
    with pytest.raises(ScheduleError, match="a micro-batch goes with F and B"):
        list(checked([step]))


@pytest.mark.parametrize("verb", [Verb.FORWARD, Verb.BACKWARD, Verb.UPDATE])
def test_a_plus_goes_with_load_and_drop_only(verb):
    step = Step(verb, 0, None if verb is Verb.UPDATE else 0, more=True)
    with pytest.raises(ScheduleError, match=r"\+ goes with L and D, and only with them"):
        list(checked([step]))


def test_gradients_may_wait_at_home_for_an_update_in_a_later_visit():
    text = "L0 B0.0 D0+ L1+ B1.0 U1 D1 L0+ U0 D0"
    assert list(checked(parse(text))) == parse(text)


def test_slots_are_what_the_plan_grants():
    text = "L0 L1 B0.0 B1.0 U0 U1 D0 D1"
    assert list(checked(parse(text), at_once=2)) == parse(text)


def test_checking_passes_steps_on_lazily_until_the_one_that_breaks_a_rule():
    steps = checked(parse("L0 F0.0 F1.0"))
    assert [str(next(steps)), str(next(steps))] == ["L0", "F0.0"]
    with pytest.raises(ScheduleError, match=r"F1\.0"):
        next(steps)


@pytest.mark.parametrize(
    "text", ["X0", "L", "L0 b0.0", "F0.", "F0.1.2", "L0x", "[train] L0", "L-1", "load 0", "L0D0", "[lunch 0] L0"]
)
def test_a_word_that_is_no_step_is_refused(text):
    with pytest.raises(ScheduleError, match="expected a step such as L0"):
        parse(text)


@pytest.mark.parametrize("text", ["L0.1", "F0", "B3", "U0.0"])
def test_a_step_with_a_wrong_suffix_is_refused(text):
    with pytest.raises(ScheduleError, match="a micro-batch goes with F and B"):
        parse(text)


@pytest.mark.parametrize("text", ["F0.0+", "B0.1+", "U0+"])
def test_a_step_with_a_wrong_plus_is_refused(text):
    with pytest.raises(ScheduleError, match=r"\+ goes with L and D"):
        parse(text)


def test_a_word_in_brackets_is_not_taken_for_a_phase():
    """Any word from [ to ] counted as a phase, and steps without a space between them as two."""
    for text in ("[lunch] L0", "[train] L0", "L0D0"):
        with pytest.raises(ScheduleError, match="expected a step"):
            parse(text)
