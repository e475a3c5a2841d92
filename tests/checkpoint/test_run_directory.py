"""Directories that a run owns: nothing is deleted but what a run of ours made, and nobody else's run is disturbed."""

import json
import os
import re
import subprocess

import pytest

from seqpart.checkpoint.leftovers import IGNORE, SCRATCH_PREFIX, clear_leftovers, resumable
from seqpart.checkpoint.marker import MARKER
from seqpart.checkpoint.run_directory import RunDirectory, new_name
from seqpart.errors import CorruptFile, DirectoryUnusable, OptionError, StoreError
from seqpart.files import Folder
from seqpart.store.atomic import with_checksum, write_text
from seqpart.store.scratch import CHECKPOINT, PREVIOUS, clear_scratch


def state(folder):
    return json.loads((folder / MARKER).read_text())["state"]


def fill(directory, size=100):
    for folder, name in ((directory.homes, "block-00000.0"), (directory.rows, "train-00001.0")):
        (folder / f"{name}.safetensors").write_bytes(bytes(size))


def finish(folder, text="first", results=("model.safetensors", "plan.json")):
    """A finished run."""
    directory = RunDirectory(folder)
    for name in results:
        directory.result(name).write_text(text)
    directory.publish()
    directory.close("done")


def kill(directory):
    """What is left when its process dies: everything but the lock."""
    os.close(directory._lock)


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_run_leaves_its_results_and_a_marker(tmp_path):
    directory = RunDirectory(tmp_path / "deep" / "out")
    assert state(directory.root) == "running"
    fill(directory)
    directory.result("model.safetensors").write_text("weights")
    directory.publish()
    directory.close("done")
    assert names(directory.root) == [IGNORE, "model.safetensors", MARKER, "seqpart.lock"]
    assert state(directory.root) == "done"


def test_an_empty_directory_and_one_of_a_failed_run_are_taken(tmp_path):
    (tmp_path / "out").mkdir()
    RunDirectory(tmp_path / "out").close("failed")
    RunDirectory(tmp_path / "out").close("failed")
    assert state(tmp_path / "out") == "failed"


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_of_somebody_else_are_refused_and_not_touched(tmp_path, overwrite):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OptionError, match=r"holds files that seqpart did not make. Give a new or empty directory"):
        RunDirectory(tmp_path, overwrite=overwrite)
    assert names(tmp_path) == ["notes.txt"]


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises((OptionError, DirectoryUnusable)):
        RunDirectory(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("where", ["file/out", "/proc/out"])
def test_a_directory_that_cannot_be_made_is_named_with_the_cure(tmp_path, where):
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryUnusable, match=f"{re.escape(where)}.*that you may write to"):
        RunDirectory(tmp_path / where)


def test_a_finished_run_needs_overwrite(tmp_path):
    finish(tmp_path / "out")
    with pytest.raises(OptionError, match=r"holds a finished run.*overwrite"):
        RunDirectory(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_text() == "first"


def test_earlier_results_stay_until_the_new_ones_are_published(tmp_path):
    finish(tmp_path / "out")
    before = names(tmp_path / "out")
    directory = RunDirectory(tmp_path / "out", overwrite=True)
    for name in ("model.safetensors", "plan.json"):
        directory.result(name).write_text("second")
        assert (directory.root / name).read_text() == "first"
    directory.publish()
    directory.close("done")
    assert names(tmp_path / "out") == before
    assert {(tmp_path / "out" / name).read_text() for name in ("model.safetensors", "plan.json")} == {"second"}


def test_a_run_that_fails_takes_its_own_results_along_and_no_others(tmp_path):
    finish(tmp_path / "out")
    before = names(tmp_path / "out")
    directory = RunDirectory(tmp_path / "out", overwrite=True)
    directory.result("model.safetensors").write_text("second")
    directory.close("failed")
    assert names(tmp_path / "out") == before
    assert (tmp_path / "out" / "model.safetensors").read_text() == "first"


def test_a_directory_in_use_is_refused(tmp_path):
    directory = RunDirectory(tmp_path / "out")
    fill(directory)
    before = names(tmp_path)
    with pytest.raises(DirectoryUnusable, match=r"in use by another run. Wait for it to end, or give another"):
        RunDirectory(tmp_path / "out")
    assert clear_leftovers(tmp_path) == (0, 0)
    assert names(tmp_path) == before
    directory.close("done")


def test_a_run_that_begins_this_very_moment_is_in_use_and_not_somebody_else_s(tmp_path):
    directory = RunDirectory(tmp_path / "out")
    for name in (MARKER, IGNORE):
        (tmp_path / "out" / name).unlink()
    for name in ("homes", "rows"):
        (tmp_path / "out" / name).rmdir()
    with pytest.raises(DirectoryUnusable, match=r"in use by another run"):
        RunDirectory(tmp_path / "out")
    directory.close("failed")


def test_what_a_killed_run_left_is_cleaned_by_the_next_one_in_its_place(tmp_path):
    killed = RunDirectory(tmp_path / "out")
    fill(killed, 100)
    (killed.root / "model.safetensors.part").write_bytes(bytes(10))
    kill(killed)
    directory = RunDirectory(tmp_path / "out")
    assert directory.cleaned == 210
    directory.close("failed")


def test_what_killed_runs_left_is_cleaned_by_the_next_one_beside(tmp_path):
    for name in ("a", "b"):
        killed = RunDirectory(tmp_path / name)
        fill(killed, 100)
        kill(killed)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "homes.safetensors").write_text("mine")
    assert clear_leftovers(tmp_path) == (2, 400)
    assert clear_leftovers(tmp_path) == (0, 0)
    assert (tmp_path / "c" / "homes.safetensors").exists()


def test_a_scratch_directory_of_a_killed_run_goes_altogether(tmp_path):
    killed = RunDirectory(tmp_path / f"{SCRATCH_PREFIX}x")
    fill(killed, 100)
    kill(killed)
    assert clear_leftovers(tmp_path) == (1, 200)
    assert names(tmp_path) == []


def test_a_scratch_directory_goes_when_its_run_ends(tmp_path):
    directory = RunDirectory(tmp_path / f"{SCRATCH_PREFIX}x")
    fill(directory)
    directory.vanish()
    assert names(tmp_path) == []


def test_only_files_of_ours_are_removed_from_scratch(tmp_path):
    directory = RunDirectory(tmp_path / "out")
    fill(directory)
    for folder in (directory.homes, directory.root):
        (folder / "notes.txt").write_text("mine")
    with Folder.at(directory.root) as folder:
        assert clear_scratch(folder) == 200
    assert names(directory.root) == [IGNORE, "homes", "homes/notes.txt", "notes.txt", MARKER, "seqpart.lock"]
    directory.close("failed")


def test_a_failure_to_mark_does_not_hide_why_the_run_failed(tmp_path, monkeypatch):
    failed, done = RunDirectory(tmp_path / "failed"), RunDirectory(tmp_path / "done")

    def full(path, text):
        raise StoreError("the disk is full")

    monkeypatch.setattr("seqpart.checkpoint.marker.write_text", full)
    failed.close("failed")
    with pytest.raises(StoreError, match="the disk is full"):
        done.close("done")


def test_small_files_are_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    write_text(path, "first")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(StoreError, match=r"disk is full: could not write .*plan\.json"):
        write_text(path, "second")
    assert path.read_text() == "first"
    assert names(tmp_path) == ["plan.json"]


def test_no_two_runs_have_one_name():
    made = [new_name("sil") for _ in range(5)]
    assert len(set(made)) == 5
    assert all(re.fullmatch(r"\d{8}-\d{6}-sil-\d+(-\d+)?", name) for name in made)


def save(directory, scratch=None, name=CHECKPOINT):
    """As much of a checkpoint as directories look at."""
    body = {"scratch": str(scratch.root.resolve()) if scratch else "."}
    (directory.root / name).write_text(with_checksum("checkpoint", body))


def with_scratch(tmp_path, *, saved=True):
    """A run and its scratch directory elsewhere, which a killed run left."""
    directory = RunDirectory(tmp_path / "runs" / "out")
    scratch = RunDirectory(tmp_path / "fast" / f"{SCRATCH_PREFIX}x", run=directory)
    fill(scratch)
    if saved:
        save(directory, scratch)
    kill(scratch)
    kill(directory)
    return directory.root, scratch.root


@pytest.mark.parametrize("name", [CHECKPOINT, PREVIOUS])
def test_a_killed_run_with_a_checkpoint_is_left_alone_and_counted(tmp_path, name):
    killed = RunDirectory(tmp_path / "out")
    fill(killed)
    save(killed, name=name)
    kill(killed)
    before = names(tmp_path)
    assert clear_leftovers(tmp_path) == (0, 0)
    assert list(resumable(tmp_path).values()) == [200]
    assert names(tmp_path) == before


def test_a_live_run_is_not_counted_as_resumable(tmp_path):
    directory = RunDirectory(tmp_path / "out")
    fill(directory)
    save(directory)
    assert resumable(tmp_path) == {}
    kill(directory)


def test_an_interrupted_run_is_not_begun_anew_by_mistake(tmp_path):
    killed = RunDirectory(tmp_path / "out")
    fill(killed)
    save(killed)
    before = names(tmp_path)
    with pytest.raises(DirectoryUnusable, match="in use by another run"):  # it lives: resuming is no cure
        RunDirectory(tmp_path / "out")
    kill(killed)
    with pytest.raises(OptionError, match=r'interrupted. Resume it with fit\(..., resume=".*/out"\), or start again with over'):
        RunDirectory(tmp_path / "out")
    assert names(tmp_path) == before
    RunDirectory(tmp_path / "out", resume=True).close("failed")  # the refused one has let go of the lock


def test_an_interrupted_run_is_overwritten_when_that_is_asked_for(tmp_path):
    killed = RunDirectory(tmp_path / "out")
    fill(killed)
    for name in (CHECKPOINT, PREVIOUS):
        save(killed, name=name)
    kill(killed)
    directory = RunDirectory(tmp_path / "out", overwrite=True)
    assert directory.cleaned == 200
    assert names(directory.root) == [IGNORE, "homes", "rows", MARKER, "seqpart.lock"]
    directory.close("failed")


def test_a_resumed_run_finds_everything_and_holds_the_lock(tmp_path):
    finish(tmp_path / "out")
    killed = RunDirectory(tmp_path / "out", overwrite=True)
    fill(killed)
    save(killed)
    killed.result("events.jsonl").write_text("so far")
    kill(killed)
    before = names(tmp_path)
    directory = RunDirectory(tmp_path / "out", resume=True)
    assert (names(tmp_path), directory.cleaned, state(directory.root)) == (before, 0, "running")
    assert directory.result("events.jsonl").read_text() == "so far"
    with pytest.raises(DirectoryUnusable, match="in use by another run"):
        RunDirectory(tmp_path / "out", resume=True)
    directory.close("failed")


def test_a_run_killed_as_it_began_left_nobody_else_s_files(tmp_path):
    (tmp_path / f"{MARKER}.seqpart-01234567.part").write_text("{")
    (tmp_path / "seqpart.lock").write_text("")
    RunDirectory(tmp_path).close("failed")
    assert names(tmp_path) == [MARKER, "seqpart.lock"]


def test_a_directory_that_is_gone_cannot_be_resumed(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    with pytest.raises(CorruptFile, match=r"scratch is missing: the checkpoint in .*run needs it"):
        RunDirectory(tmp_path / "scratch", resume=True, run=directory)
    assert not (tmp_path / "scratch").exists()


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("how", ["done", "interrupted", "failed"])
def test_what_a_checkpoint_needs_stays_unless_the_run_is_done(tmp_path, how, saved):
    stays = saved and how != "done"
    directory = RunDirectory(tmp_path / "out")
    fill(directory)
    if saved:
        save(directory)
    directory.close(how)
    assert state(directory.root) == how
    assert list(resumable(tmp_path).values()) == ([200] if stays else [])
    assert ((directory.root / CHECKPOINT).exists(), (directory.root / "homes").exists()) == (stays, stays)


@pytest.mark.parametrize("how", ["done", "interrupted"])
@pytest.mark.parametrize("first", ["scratch", "run"])
def test_a_scratch_directory_goes_with_its_run_in_whatever_order_they_close(tmp_path, how, first):
    directory = RunDirectory(tmp_path / "runs" / "out")
    scratch = RunDirectory(tmp_path / "fast" / f"{SCRATCH_PREFIX}x", run=directory)
    fill(scratch)
    save(directory, scratch)
    closing = [scratch.vanish, lambda: directory.close(how)]
    for close in closing if first == "scratch" else reversed(closing):
        close()
    assert scratch.root.exists() == (how == "interrupted")
    assert list(resumable(tmp_path / "fast").values()) == ([200] if how == "interrupted" else [])


def test_a_scratch_directory_is_left_alone_as_long_as_its_run_s_checkpoint_names_it(tmp_path):
    root, scratch = with_scratch(tmp_path)
    assert clear_leftovers(scratch.parent) == (0, 0)
    assert list(resumable(scratch.parent).values()) == [200]
    (root / CHECKPOINT).write_text("not to be read")  # it may name it still
    assert clear_leftovers(scratch.parent) == (0, 0)
    (root / CHECKPOINT).unlink()
    assert clear_leftovers(scratch.parent) == (1, 200)
    assert not scratch.exists()


def test_a_scratch_directory_that_its_run_no_longer_names_goes(tmp_path):
    root, scratch = with_scratch(tmp_path)
    directory = RunDirectory(root, resume=True)
    save(directory, RunDirectory(tmp_path / "fast" / f"{SCRATCH_PREFIX}y", run=directory))
    assert clear_leftovers(scratch.parent) == (1, 200)
    assert not scratch.exists()


def test_overwriting_a_run_removes_its_scratch_directory_elsewhere(tmp_path):
    root, scratch = with_scratch(tmp_path)
    RunDirectory(root, overwrite=True).close("failed")
    assert not scratch.exists()


def test_overwriting_a_run_removes_no_directory_that_is_not_its_own(tmp_path):
    """A checkpoint may have been copied, or name a directory that another run has taken since."""
    root, scratch = with_scratch(tmp_path)
    (tmp_path / "runs" / "copy").mkdir()
    for name in (CHECKPOINT, MARKER):
        (tmp_path / "runs" / "copy" / name).write_text((root / name).read_text())
    RunDirectory(tmp_path / "runs" / "copy", overwrite=True).close("failed")
    assert list(resumable(scratch.parent).values()) == [200]


def test_a_run_and_its_scratch_directory_side_by_side_are_one_resumable_run(tmp_path):
    directory = RunDirectory(tmp_path / "out")
    scratch = RunDirectory(tmp_path / f"{SCRATCH_PREFIX}x", run=directory)
    fill(scratch)
    save(directory, scratch)
    kill(scratch)
    kill(directory)
    assert list(resumable(tmp_path).values()) == [200]
    assert clear_leftovers(tmp_path) == (0, 0)


def test_two_runs_of_one_second_have_two_directories():
    """The name was made of time, method and process: a second short `fit` found the first one's finished run."""
    assert new_name("sil") != new_name("sil")


def test_a_run_inside_a_repository_leaves_nothing_to_commit(tmp_path):
    """A run's relative --output-dir once put its directory into the project, and a commit of all there took it along."""
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    finish(tmp_path / "out")
    assert subprocess.run([*git, "status", "--short"], check=True, capture_output=True, text=True).stdout == ""


def test_a_directory_that_held_a_run_already_gets_no_ignore_file(tmp_path):
    finish(tmp_path / "out")
    (tmp_path / "out" / IGNORE).unlink()  # the user wants its results committed
    RunDirectory(tmp_path / "out", overwrite=True).close("failed")
    assert IGNORE not in names(tmp_path / "out")
