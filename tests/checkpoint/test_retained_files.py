"""What is current, what was marked and what a checkpoint names read back as they were, whatever happens in between."""

import errno
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from seqpart.device.device import Device
from seqpart.device.pages import PAGE, aligned
from seqpart.errors import DiskFull
from seqpart.store.host_pool import HostPool
from seqpart.store.layout import Layout, TensorSpec
from seqpart.store.store import RetainedFiles, Store


def test_a_kept_file_stays_until_it_is_let_go(tmp_path):
    kept = RetainedFiles(tmp_path)
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name)
    kept.keep({"a", "b"})
    for name in ("a", "c"):
        kept.remove(name)
    assert ("a" in kept, "c" in kept) == (True, False)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
    kept.keep({"b"})
    assert {path.name for path in tmp_path.iterdir()} == {"b"}
    kept.keep(())
    assert {path.name for path in tmp_path.iterdir()} == {"b"}, "nobody asked for its removal"


def test_what_a_killed_run_left_goes_and_what_is_kept_or_used_stays(tmp_path):
    kept = RetainedFiles(tmp_path)
    for name in ("used.rows", "kept.rows", "left.rows", "notes.txt"):
        (tmp_path / name).write_text(name)
    kept.keep({"kept.rows"})
    kept.sweep(re.compile(r"\w+\.rows"), ["used.rows"])
    assert {path.name for path in tmp_path.iterdir()} == {"used.rows", "kept.rows", "notes.txt"}
    kept.keep(())
    assert {path.name for path in tmp_path.iterdir()} == {"used.rows", "notes.txt"}


def flat_of(value):
    """A home whose contents, and size, are `value`."""
    layout = Layout.of([TensorSpec(name="w", shape=(1 + 97 * (value % 5),), dtype=torch.int64)])
    flat = aligned(layout.nbytes)
    layout.views(flat)["w"].fill_(value)
    return layout, flat


def contents(store, names):
    """The values of the homes that are there."""
    found = {}
    for name in names:
        if name in store:
            layout = store.layout(name)
            flat = aligned(layout.nbytes)
            store.get(name, flat)
            values = layout.views(flat)["w"].unique().tolist()
            assert len(values) == 1 and flat_of(values[0])[0] == layout
            found[name] = values[0]
    return found


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


NAMES = ("block-00000", "block-00001.optimizer", "block-00002")
names = st.sampled_from(NAMES)


class Homes(RuleBasedStateMachine):
    """The model: what is current, what was at the mark, and what the two latest checkpoints hold."""

    budget = 0

    @initialize()
    def begin(self):
        self.folder = Path(tempfile.mkdtemp(prefix="seqpart-test-"))
        self.value = 0
        self.now, self.marked, self.can_roll_back = {}, {}, self.budget == 0
        self.saved = []
        self.store = self.opened(self.folder)

    def opened(self, folder, budget=None):
        budget = self.budget if budget is None else budget
        return Store(folder, Device(), HostPool(budget, Device()) if budget else None)

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)

    def new_value(self):
        self.value += 1
        return self.value

    def note(self, name):
        if name in self.store and self.store.tier(name) != "disk":
            self.can_roll_back = False

    @rule(name=names)
    def put(self, name):
        value = self.new_value()
        self.store.put(name, *flat_of(value))
        self.note(name)
        self.now[name] = value

    @rule(name=names)
    def put_across_the_mark(self, name):
        """A put that began before the mark belongs to it."""
        value = self.new_value()
        marked = []
        transfer = self.store.begin_put([(name, *flat_of(value))], lambda: marked.append(0))
        self.mark()
        transfer.wait()
        self.now[name] = self.marked[name] = value

    @precondition(lambda self: self.budget == 0)
    @rule(name=names)
    def fail_to_put(self, name):
        real, os.pwritev = os.pwritev, full
        try:
            with pytest.raises(DiskFull):
                self.store.put(name, *flat_of(self.new_value()))
        finally:
            os.pwritev = real
        # One that was discarded since the mark has come back by the attempt; the run is over then anyway.
        self.store.discard(name)
        self.now.pop(name, None)

    @rule(name=names)
    def discard(self, name):
        self.note(name)
        self.store.discard(name)
        self.now.pop(name, None)

    @rule()
    def mark(self):
        self.store.mark()
        self.marked, self.can_roll_back = dict(self.now), True

    @rule()
    def roll_back(self):
        assert self.store.can_roll_back or not self.can_roll_back
        if self.store.rollback():
            self.now = dict(self.marked)
        else:
            assert not self.can_roll_back

    @rule()
    def save(self):
        described = self.store.persist()
        self.saved = [(described, dict(self.now)), *self.saved[:1]]
        self.keep()

    def keep(self):
        self.store.keep(entry["file"] for described, _ in self.saved for entry in described.values())

    @precondition(lambda self: self.saved)
    @rule(which=st.integers(0, 1), budget=st.sampled_from([0, PAGE, 1 << 20]))
    def look_from_another_process(self, which, budget):
        described, expected = self.saved[which % len(self.saved)]
        copy = Path(tempfile.mkdtemp(prefix="seqpart-test-"))
        shutil.copytree(self.folder, copy, dirs_exist_ok=True)
        other = self.opened(copy, budget)
        other.adopt(described)
        other.verify()
        assert contents(other, NAMES) == expected
        assert {path.name for path in copy.iterdir()} == {entry["file"] for entry in described.values()}
        other.close()
        shutil.rmtree(copy)

    @precondition(lambda self: self.saved)
    @rule(which=st.integers(0, 1))
    def go_on_in_another_process(self, which):
        described, expected = self.saved[which % len(self.saved)]
        self.store.close()
        self.store = self.opened(self.folder)
        self.keep()
        self.store.adopt(described)
        self.now, self.marked = dict(expected), dict(expected)
        self.can_roll_back = True

    @invariant()
    def homes_are_what_was_put_last(self):
        if hasattr(self, "store"):
            assert contents(self.store, NAMES) == self.now

    @invariant()
    def files_are_few(self):
        """Current, marked, in two checkpoints, and one to write to."""
        if hasattr(self, "store"):
            files = [path.name for path in self.folder.iterdir()]
            assert all(sum(file.startswith(f"{name}.") for file in files) <= 5 for name in NAMES), files


class HomesInBothTiers(Homes):
    budget = PAGE


Homes.TestCase.settings = HomesInBothTiers.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None
)  # fmt: skip
test_homes_on_the_disk = Homes.TestCase
test_homes_in_both_tiers = HomesInBothTiers.TestCase


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path, Device())
    yield made
    made.close()


def files_of(store, updates, *, save_every=None):
    """Most files that one home has had."""
    most, saved = 0, []
    for update in range(updates):
        store.put("a", *flat_of(update))
        store.mark()
        if save_every and update % save_every == 0:
            saved = [store.persist()["a"]["file"], *saved[:1]]
            store.keep(saved)
        most = max(most, len(list(store.folder.iterdir())))
    return most


def test_without_checkpoints_a_home_has_two_files_and_with_them_four(store):
    assert files_of(store, 12) == 2
    assert files_of(store, 20, save_every=1) <= 3
    assert files_of(store, 40, save_every=5) == 4


def test_a_home_written_often_between_two_marks_has_three_files(store):
    for update in range(9):
        store.put("a", *flat_of(update))
        if update == 2:
            store.mark()
    assert len(list(store.folder.iterdir())) == 3
    assert store.rollback()
    assert contents(store, ["a"]) == {"a": 2}


def test_a_home_of_host_memory_cannot_go_back(tmp_path):
    store = Store(tmp_path, Device(), HostPool(1 << 20, Device()))
    store.put("a", *flat_of(1))
    store.mark()
    assert store.can_roll_back
    store.put("a", *flat_of(2))
    assert not store.can_roll_back
    assert not store.rollback()
    assert contents(store, ["a"]) == {"a": 2}
    store.close()


def test_a_home_of_host_memory_is_written_to_the_disk_only_when_it_changed(tmp_path):
    store = Store(tmp_path, Device(), HostPool(1 << 20, Device()))
    for value in (1, 1, 2):
        if value != contents(store, ["a"]).get("a"):
            store.put("a", *flat_of(value))
        described = store.persist()
        store.keep([described["a"]["file"]])
    assert store.traffic.bytes_written == sum(flat_of(value)[0].nbytes for value in (1, 2))
    assert (store.tier("a"), store.path("a")) == ("ram", None)
    store.close()


def test_every_file_is_synced_once(store, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(str(Path(f"/proc/self/fd/{handle}").readlink())))
    store.put("a", *flat_of(1))
    store.put("b", *flat_of(2))
    store.persist()
    assert sorted(synced) == sorted([str(store.folder), str(store.path("a")), str(store.path("b"))])
    synced.clear()
    store.put("b", *flat_of(3))
    store.persist()
    assert sorted(synced) == sorted([str(store.folder), str(store.path("b"))])
