"""Checkpoints: at every moment a whole one is on the disk, a damaged one is named, and the one before it still serves."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpart.checkpoint.manifest import CHECKPOINT, PREVIOUS, load, restore, save
from seqpart.device.pages import PAGE
from seqpart.errors import CorruptFile, DiskFull, OptionError
from seqpart.store import row_file
from tests import saving
from tests.command import SECONDS
from tests.saving import CALLS, fill, go_on, is_whole, opened, resumed

BUDGETS = pytest.mark.parametrize("budget", [0, 3 * PAGE], ids=["disk", "ram"])


def copy_of(root):
    copy = root.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(root, copy)
    return copy


def number_in(root, name=CHECKPOINT, budget=0):
    """The update that a new process goes on from; in a copy, so that the run itself is as it was."""
    copy = copy_of(root)
    with opened(copy, budget) as (store, boundaries):
        return resumed(copy / name, store, boundaries)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(row_file, "CHUNK", saving.CHUNK)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "run"


class Runs:
    """Runs in processes of their own, forked from `server`, which has imported already."""

    def __init__(self, server, root, budget):
        self.server, self.root, self.budget = server, root, budget

    def start(self, call, updates):
        print(self.root, self.budget, call, updates, file=self.server.stdin, flush=True)
        return int(self.server.stdout.readline())

    def ended(self):
        return int(self.server.stdout.readline())


@pytest.fixture(scope="module")
def server():
    made = subprocess.Popen(
        [sys.executable, "-m", "tests.saving"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    yield made
    made.communicate()


@pytest.fixture
def runs(server, tmp_path, request):
    return Runs(server, tmp_path / "run", request.param)


disk_and_ram = pytest.mark.parametrize("runs", [0, 3 * PAGE], ids=["disk", "ram"], indirect=True)


def assert_both_serve(root, at_least, budget):
    """Both checkpoints are whole; the latest is `at_least` or the next update."""
    latest = number_in(root, budget=budget)
    assert latest in (at_least, at_least + 1)
    if (root / PREVIOUS).exists():
        assert number_in(root, PREVIOUS, budget) in (latest - 1, latest)
    return latest


@disk_and_ram
@pytest.mark.few(1)
def test_a_run_that_dies_before_any_change_of_the_disk_can_go_on(runs):
    """Each call that changes the disk, of a run that resumes, updates and saves, is once the last one it came to.

    Each second one with host memory, where the order of calls is no other.
    """
    runs.start(0, 2)
    assert runs.ended() == 0
    last, call, code = 2, 0, 9
    while code == 9:
        call += 2 if runs.budget else 1
        runs.start(call, 1)
        code = runs.ended()
        assert code in (0, 9)
        last = assert_both_serve(runs.root, last, runs.budget)
    assert call > 20, "an update and its save change the disk more often than that"
    assert not list(runs.root.glob("*.part"))


def number_in_file(root):
    """The update that a run has saved last, which may be running; 0: none."""
    path = root / CHECKPOINT
    return json.loads(path.read_text())["checkpoint"]["state"]["number"] if path.exists() else 0


def wait_until(holds):
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, "the run saved nothing more"
        time.sleep(0.001)


@disk_and_ram
@pytest.mark.few(2)
def test_a_run_killed_at_any_time_can_go_on(runs):
    chance, last = random.Random(0), 0
    for saves in (0, 1, 2, 3, 4, 5):
        child = runs.start(0, 10**6)
        wait_until(lambda at_least=last + saves: number_in_file(runs.root) >= at_least)
        time.sleep(chance.uniform(0.0, 0.01))  # somewhere in the next updates and saves
        os.kill(child, signal.SIGKILL)
        assert runs.ended() == -signal.SIGKILL
        if not (runs.root / CHECKPOINT).exists():
            assert last == 0
            continue
        number = number_in(runs.root, budget=runs.budget)
        assert number >= last
        last = number
        if (runs.root / PREVIOUS).exists():
            assert number_in(runs.root, PREVIOUS, runs.budget) in (number - 1, number)
    assert last >= 15, "it went on after each kill"


@BUDGETS
def test_what_is_restored_is_what_was_saved_in_whatever_tier(root, budget):
    go_on(root, budget, 4)
    for other in (0, 2 * PAGE, 1 << 20):
        assert number_in(root, budget=other) == 4
        assert number_in(root, PREVIOUS, other) == 3


def test_a_resumed_run_uses_as_many_files_as_one_that_was_never_interrupted(tmp_path):
    go_on(tmp_path / "once", 0, 12)
    for _ in range(6):
        go_on(tmp_path / "often", 0, 2)
    counts = [len(list((tmp_path / run).rglob("*"))) for run in ("once", "often")]
    assert counts[1] <= counts[0]


def test_nothing_on_the_disk_is_written_again_for_a_save(root):
    with opened(root) as (store, boundaries):
        fill(store, boundaries, 1)
        before = store.traffic.bytes_written
        save(root, root, {}, store, boundaries)
        assert store.traffic.bytes_written == before


def test_rows_that_are_not_all_in_are_left_out(root):
    with opened(root) as (store, boundaries):
        fill(store, boundaries, 1)
        boundaries.create("train", 2, saving.ROWS, 9).append(torch.zeros(3, 3))
        assert list(save(root, root, {}, store, boundaries).rows) == ["train-1"]


def test_rows_of_host_memory_and_of_the_disk_are_persisted_once(tmp_path):
    for budget in (0, 1 << 20):
        with opened(tmp_path, budget) as (store, boundaries):
            fill(store, boundaries, 1)
            first = boundaries.persist()
            path = tmp_path / "rows" / first["train-1"]["file"]
            written = path.stat().st_mtime_ns
            assert boundaries.persist() == first
            assert path.stat().st_mtime_ns == written


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8,
))  # fmt: skip
def test_any_state_of_json_comes_back_as_it_was(tmp_path_factory, state):
    root = tmp_path_factory.getbasetemp() / "state"
    with opened(root) as (store, boundaries):
        save(root, root, {"state": state}, store, boundaries)
        assert load(root).state == {"state": state}


def test_a_run_directory_may_be_moved_and_a_separate_scratch_directory_stays_where_it_is(tmp_path):
    root, scratch = tmp_path / "run", tmp_path / "elsewhere"
    root.mkdir()
    with opened(scratch) as (store, boundaries):
        save(root, root, {}, store, boundaries)
        assert load(root).scratch == root
        save(root, scratch, {}, store, boundaries)
    root.rename(tmp_path / "moved")
    assert load(tmp_path / "moved").scratch == scratch
    assert load(tmp_path / "moved" / PREVIOUS).scratch == tmp_path / "moved"


def test_where_nothing_was_saved_that_is_said(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere" / CHECKPOINT):
        with pytest.raises(OptionError, match="nothing was saved in"):
            load(path)


def flip(path, byte, bit):
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def only_in_the_latest(root, kind):
    """A file that the latest checkpoint names and the one before it does not."""
    latest, previous = load(root), load(root / PREVIOUS)
    files = {
        "manifest": {CHECKPOINT},
        "home": {f"homes/{file}" for file in latest.home_files - previous.home_files},
        "rows": {f"rows/{file}" for file in latest.row_files - previous.row_files if file.endswith(".safetensors")},
        "checksums": {f"rows/{file}" for file in latest.row_files - previous.row_files if file.endswith(".json")},
    }
    return root / min(files[kind])


def assert_refused_and_the_previous_serves(root, path, budget=0):
    with pytest.raises(CorruptFile) as refused:
        number_in(root, budget=budget)
    assert refused.value.exit_code == 6
    copy = root.with_name("copy")
    assert str(copy / path.relative_to(root)) in refused.value.with_flags
    assert f"--resume {copy / PREVIOUS}" in refused.value.with_flags
    assert number_in(root, PREVIOUS, budget) == 3


@BUDGETS
@pytest.mark.parametrize("kind", ["manifest", "home", "rows", "checksums"])
@pytest.mark.few(2)
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_serves(root, kind, budget):
    go_on(root, budget, 4)
    path = only_in_the_latest(root, kind)
    whole, chance = path.read_bytes(), random.Random(kind)
    for _ in range(8):
        flip(path, chance.randrange(len(whole)), chance.randrange(8))
        # The padding of a home's header is covered as well; only the unused end of a row is, too.
        assert_refused_and_the_previous_serves(root, path, budget)
        path.write_bytes(whole)
    for length in (0, 1, 7, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert_refused_and_the_previous_serves(root, path, budget)
    path.write_bytes(whole + b"\0")
    assert_refused_and_the_previous_serves(root, path, budget)
    path.unlink()
    assert_refused_and_the_previous_serves(root, path, budget)
    path.write_bytes(whole)
    assert number_in(root, budget=budget) == 4


def test_a_flipped_bit_anywhere_in_a_manifest_is_seen(root):
    go_on(root, 0, 1)
    path = root / CHECKPOINT
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 5):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(CorruptFile, match=r"checkpoint\.json is damaged"):
            load(root)


@pytest.mark.parametrize("kind", ["manifest", "home", "rows", "checksums"])
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_and_saves_again(root, kind):
    """And the damaged one never takes the place of the one that it went on from."""
    go_on(root, 0, 4)
    flip(only_in_the_latest(root, kind), 20, 2)
    with opened(root) as (store, boundaries):
        assert resumed(root / PREVIOUS, store, boundaries) == 3
        assert load(root).state == {"number": 3}
    for number in (4, 5, 6):
        go_on(root, 0, 1)
        assert number_in(root) == number
        assert number_in(root, PREVIOUS) == number - 1


def test_where_both_are_damaged_the_cure_is_to_start_again(root):
    go_on(root, 0, 2)
    for name in (CHECKPOINT, PREVIOUS):
        flip(root / name, 50, 1)
    with pytest.raises(CorruptFile, match="Start again in a new output_dir"):
        load(root / PREVIOUS)


def test_a_manifest_of_another_version_is_refused_in_words(root, monkeypatch):
    monkeypatch.setattr("seqpart.checkpoint.manifest.FORMAT", 7)
    go_on(root, 0, 1)
    monkeypatch.undo()
    with pytest.raises(OptionError, match="its format is 7 and this one reads 2"):
        load(root)


def test_a_manifest_damaged_while_the_run_lives_does_not_replace_the_one_before(root):
    with opened(root) as (store, boundaries):
        for number in (1, 2):
            fill(store, boundaries, number)
            save(root, root, {"number": number}, store, boundaries)
        flip(root / CHECKPOINT, 40, 3)
        fill(store, boundaries, 3)
        save(root, root, {"number": 3}, store, boundaries)
    assert [number_in(root, name) for name in (CHECKPOINT, PREVIOUS)] == [3, 1]


@BUDGETS
@pytest.mark.parametrize("failing", [*CALLS[:4], "write"])
@pytest.mark.few(5)
def test_a_disk_that_fills_up_during_a_save_leaves_the_checkpoints_that_there_were(root, monkeypatch, budget, failing):
    go_on(root, budget, 2)
    with opened(root, budget) as (store, boundaries):
        last = resumed(root, store, boundaries)
        refusals = 0
        for at in range(1, 50):
            fill(store, boundaries, last + 1)
            with monkeypatch.context() as patched:
                fail_at(patched, failing, at)
                try:
                    save(root, root, {"number": last + 1}, store, boundaries)
                except DiskFull:
                    refusals += 1
                else:
                    break
            assert not list(root.rglob("*.part"))
            assert number_in(root, budget=budget) in (last, last + 1)
            assert number_in(root, PREVIOUS, budget) <= last
            fill(store, boundaries, 99)  # what is written next must not be what a manifest names
            assert number_in(root, budget=budget) in (last, last + 1)
        assert is_whole(store, boundaries, last + 1)
    assert number_in(root, budget=budget) == last + 1
    assert refusals or (failing in ("pwritev", "ftruncate") and not budget), "homes on the disk are written before a save"


def fail_at(patched, name, call):
    """The `call`-th call of os.`name` finds the disk full."""
    calls = iter(range(1, 10**6))
    real = getattr(os, name)

    def filling_up(*arguments, **named):
        if next(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments, **named)

    patched.setattr(os, name, filling_up)


def test_the_file_is_json_that_anybody_can_read(root):
    go_on(root, 0, 1)
    found = json.loads((root / CHECKPOINT).read_text())
    assert found["checkpoint"]["state"] == {"number": 1}
    assert set(found["checkpoint"]["homes"]) == {"block-0", "block-1", "block-1.optimizer"}


def test_a_save_waits_for_nobody_and_says_so(root):
    """A put underway would be in the checkpoint or not, by chance."""
    with opened(root) as (store, boundaries):
        fill(store, boundaries, 1)
        gate = saving.aligned(saving.LAYOUT.nbytes)
        underway = store.begin_put([("block-0", saving.LAYOUT, gate)], lambda: time.sleep(0.2))
        with pytest.raises(AssertionError, match="still being written"):
            save(root, root, {}, store, boundaries)
        underway.wait()
        save(root, root, {}, store, boundaries)


def test_what_is_restored_into_must_be_the_manifest_s_own_scratch_directory(tmp_path):
    go_on(tmp_path / "run", 0, 1)
    with opened(tmp_path / "other") as (store, boundaries), pytest.raises(CorruptFile, match="is missing"):
        restore(load(tmp_path / "run"), store, boundaries)
