"""Where a run goes on: at the phase, by the method and in the micro-batches in which it was stopped, with what was home."""

import time
from dataclasses import replace

import pytest
from torch import nn

from seqpart.plan import exact as exactplan
from seqpart.schedule.steps import Verb
from seqpart.store.tensor_file import TensorFiles
from tests.exactly import How, numbers
from tests.resuming import Arm, Killed, Stopping, ended, interrupt, kill


@pytest.fixture
def arm(monkeypatch, tmp_path):
    """`arm(how, options)`: three partitions, the first two alike."""

    def of(how, **options):
        blocks = [lambda: nn.Linear(12, 12), lambda: nn.Linear(12, 12), lambda: nn.Linear(12, 4)]
        return Arm(monkeypatch, tmp_path, how, lambda: blocks, numbers((12,)), **{"partitions": (0, 1, 2), **options})

    return of


def test_a_run_that_ended_behind_its_last_pass_has_only_its_results_to_write(arm):
    """It went on with no phase left, and missed the test loss that no pass gave it."""
    arm = arm(How(), save_every="1")
    whole, steps = arm.whole()
    found, stops = arm.stopped(iter([(len(steps), interrupt), (None, kill)]))
    assert (found, stops) == (whole, 1)


def test_recovery_begins_with_no_state_of_the_stage_before_it_also_in_a_run_that_goes_on(arm):
    """A state that was saved just before the DROP which discards it came back as recovery's first moments."""
    arm = arm(How(method="sil"), recovery_epochs=1, recover="all", optimizer="adam", save_every="1")
    whole, steps = arm.whole()
    drop = next(number for number, step in enumerate(steps) if step.verb is Verb.DROP)
    found, _ = arm.stopped(iter([(drop + 1, kill)]))
    assert found == whole


def test_recovery_goes_on_with_the_micro_batch_that_it_was_planned_with(arm):
    """Only the first stage's was remembered: recovery went on in other pieces, to other bits."""
    batches = {"batch_size": 4, "recovery_batch_size": 8, "micro_batch_size": None}
    arm = arm(How(method="sil"), recovery_epochs=1, save_every="1", **batches)
    whole, steps = arm.whole()
    found, stops = arm.stopped(iter([(len(steps) // 3, kill), (len(steps) // 2, interrupt)]))
    assert (found, stops) == (whole, 2)


@pytest.mark.parametrize("how", [How(slots=2), How(slots=2, weights=1), How(slots=2, stays=0.34, weights=1)], ids=str)
@pytest.mark.few(1)
def test_a_partition_that_is_on_its_way_home_and_asked_for_again_is_waited_for_before_a_save(arm, how, monkeypatch):
    """Nobody waited for it but the I/O threads themselves: with a third one the save found homes still being written. And so it
    did where weights stayed: a visit that needs no slot forgot the state that the last one had sent home."""
    monkeypatch.setattr("seqpart.store.store.IO_THREADS", 3)
    arm = arm(how, epochs=2, test_every=1, momentum=0.9)
    whole, _ = arm.whole()
    write = TensorFiles.write

    def slow(files, path, *arguments, **how):
        time.sleep(0.2 if path.name.startswith("block-00001") else 0)
        return write(files, path, *arguments, **how)

    monkeypatch.setattr(TensorFiles, "write", slow)
    assert arm.stopped(iter(()), save_every="1") == (whole, 0)


def test_a_method_that_was_chosen_stays_chosen_while_the_test_rows_pass(arm, monkeypatch):
    """`auto` took another method, with other phases, and the position was counted in those."""
    arm, fastest = arm(How(), method="auto", save_every="1"), exactplan.fastest_of

    def prefer(name):
        seconds = {name: 0.0}
        monkeypatch.setattr(
            exactplan, "fastest_of", lambda *asked: replace(fastest(*asked), seconds=seconds.get(asked[1].name, 1.0))
        )

    prefer("streamed")
    whole, steps = arm.whole()
    second = next(number for number, step in enumerate(steps) if step.phase == 3)
    with pytest.raises(Killed):
        arm.fit(reporter=Stopping(second, kill))
    prefer("checkpointed")
    result = arm.fit(resume=arm.root)
    assert (ended(result), result.plan.method) == (whole, "streamed")
