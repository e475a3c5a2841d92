"""Past bugs of runs that bring one partition after the other, one test and one story each."""

import threading
import time
import weakref
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from torch import nn

from seqpart import Trainer
from seqpart.checkpoint import manifest as manifest
from seqpart.cli.arguments import gathered
from seqpart.cli.job import Job
from seqpart.directory.run_directory import RunDirectory
from seqpart.errors import CorruptFile
from seqpart.execution.slots import Slot, at_once
from seqpart.files.atomic import write_text
from seqpart.files.checksummed import checked_body, with_checksum
from seqpart.files.direct import aligned
from seqpart.memory.device import Device
from seqpart.offload.layout import Layout, TensorSpec
from seqpart.offload.store import Store
from seqpart.offload.tensor_file import TensorFiles
from seqpart.planning import exact as exactplan
from seqpart.schedule.steps import Verb
from tests.exactly import How, numbers
from tests.resuming import Arm, Killed, Stopping, ended, flip, interrupt, kill
from tests.test_bugs import at_home, drop, load


def rows(count=64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 8, generator=generator), torch.arange(count) % 3


def test_running_statistics_of_an_update_that_waits_for_its_norm_are_kept(tmp_path):
    """The visit that ran backward is not the one that updates, and dropped its BatchNorm as if nothing had changed."""
    found = []
    for method, partitions in (("full", 1), ("streamed", 3)):
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(3)), nn.Linear(8, 3)
        )
        Trainer(
            model, mem_limit="2GB", method=method, partitions=partitions, clip_grad_norm=0.1, epochs=1, batch_size=16,
            micro_batch_size=8, quiet=True, output_dir=tmp_path / method,
        ).fit(rows(), rows(9))  # fmt: skip
        found.append(model.state_dict())
    full, streamed = found
    assert full["2.1.num_batches_tracked"] == 8
    for name, tensor in full.items():
        assert torch.equal(streamed[name], tensor), name


def test_a_transfer_that_failed_is_not_told_again_in_the_next_visit(tmp_path):
    """A visit waits for the partition's transfer before it, and that one's error was raised in every visit from then on."""
    partition, store, slot = at_home(tmp_path, nn.Linear(3, 3), (3,))
    path = store.path(partition.blocks[0].home)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CorruptFile):
        load(partition, slot)
    partition.release()
    path.write_bytes(whole)
    load(partition, Slot(slot.buffer, at_once))
    drop(partition)
    store.close()


def test_a_run_that_replaces_another_s_results_leaves_its_options_alone_until_it_is_done(tmp_path):
    """job.json was written over at once: had the new run failed, the old results stood beside the new run's options."""
    for epochs, done in ((1, True), (7, False)):
        directory = RunDirectory(tmp_path, overwrite=True)
        write_text(directory.result("job.json"), with_checksum("job", {"epochs": epochs}))
        assert gathered(["--resume", str(tmp_path)], Job)[0] == f"--epochs={epochs}"
        if done:
            (tmp_path / "model.safetensors").write_text("trained")
            directory.publish()
        directory.close("done" if done else "failed")
    assert checked_body("job", (tmp_path / "job.json").read_text()) == {"epochs": 1}


# --- Runs that go on -------------------------------------------------------------------------------------------------


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


def test_a_partition_that_is_on_its_way_home_and_asked_for_again_is_waited_for_before_a_save(arm, monkeypatch):
    """Nobody waited for it but the I/O threads themselves: with a third one the save found homes still being written."""
    monkeypatch.setattr("seqpart.offload.store.IO_THREADS", 3)
    arm = arm(How(slots=2), epochs=1)
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


def test_a_damaged_home_of_a_live_model_is_told_with_its_cure(tmp_path):
    """The weights could not be given back either, and that second error hid the first."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    options = {"mem_limit": "2GB", "method": "full", "batch_size": 16, "save_every": "1", "output_dir": tmp_path, "quiet": True}
    with pytest.raises(Killed):
        Trainer(model, **options).fit(rows(), rows(9), reporter=Stopping(6, kill))
    (entry,) = [entry for name, entry in manifest.load(tmp_path).homes.items() if name == "block-00001"]
    flip(tmp_path / "homes" / entry["file"])
    with pytest.raises(CorruptFile, match=r"resume=.*checkpoint\.previous\.json"):
        Trainer(model, **options).fit(rows(), rows(9), resume=tmp_path)


@pytest.mark.parametrize("way", ["home", "back"])
def test_a_thread_that_has_moved_a_partition_holds_none_of_it_any_more(way, tmp_path, monkeypatch):
    """A pool's thread forgets a job only after it has said that it is over. On a busy machine the next partition's slot was
    allocated in between, beside the previous one's, and the limit refused it: memory ran out in L1+, in one run of hundreds."""
    real, going_on = Future.set_result, threading.Event()

    def slow_to_forget(future, value):
        real(future, value)
        if threading.current_thread() is not threading.main_thread():
            going_on.wait()

    layout = Layout.of([TensorSpec(name="w", shape=(1 << 18,), dtype=torch.float32)])
    store, flat = Store(tmp_path, Device()), aligned(1 << 20).zero_()
    held = weakref.ref(flat)
    store.put("w", layout, flat)
    monkeypatch.setattr(Future, "set_result", slow_to_forget)
    items = [("w", layout, flat)] if way == "home" else [("w", flat)]
    move = store.begin_put if way == "home" else store.begin_get
    move(items, at_once).wait()
    del flat, items
    gone = held() is None
    going_on.set()
    store.close()
    assert gone
