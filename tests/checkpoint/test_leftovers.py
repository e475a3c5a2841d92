"""What lies beside a run: killed runs' files go, and nothing that is somebody's, or that nobody can say whose it is."""

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from seqpart.checkpoint.leftovers import SCRATCH_PREFIX, Kind, clear_leftovers, report_leftovers, resumable, unknown
from seqpart.checkpoint.marker import LOCK, MARKER, locked
from seqpart.checkpoint.run_directory import RunDirectory
from seqpart.store.scratch import CHECKPOINT, PREVIOUS
from tests.checkpoint.test_run_directory import fill, kill, save, with_scratch
from tests.command import SMALL, call

OURS = "block-00000.0.safetensors"


def tree(folder):
    """Everything below: bytes of files, where links lead."""
    found = {}
    for root, folders, files in os.walk(folder):
        for path in [Path(root) / name for name in [*folders, *files]]:
            whole = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else None
            found[str(path.relative_to(folder))] = whole
    return found


def killed(path):
    """A run without a checkpoint, which a kill ended."""
    directory = RunDirectory(path)
    fill(directory)
    kill(directory)
    return directory.root


def assert_kept(parent, *words):
    before = tree(parent)
    assert clear_leftovers(parent) == (0, 0)
    assert tree(parent) == before
    told = " ".join(report_leftovers(parent, 0))
    assert all(word in told for word in words), told
    assert tree(parent) == before


def test_homes_of_a_run_that_was_moved_are_kept_and_told(tmp_path):
    """They were deleted as leftovers, and with them the checkpoint of the run in its new place."""
    root, scratch = with_scratch(tmp_path)
    root.rename(tmp_path / "elsewhere")
    assert_kept(scratch.parent, str(scratch), f"its run {root} does not exist", "Remove it if no run needs it")
    (tmp_path / "elsewhere").rename(root)  # mounted again
    assert list(resumable(scratch.parent).values()) == [200]


def test_interrupted_runs_beside_one_are_named(tmp_path, monkeypatch):
    """It said how many there are, and nobody could tell which."""
    sizes = {"b": 100, "a": 100, "large": 300, "c": 100, "d": 100}
    for name, size in sizes.items():
        directory = RunDirectory(tmp_path / "runs" / name)
        fill(directory, size)
        save(directory)
        directory.close("interrupted")
    (told,) = report_leftovers(tmp_path / "runs", 0)
    runs = tmp_path / "runs"
    assert told == (
        f"5 interrupted run(s) beside this one hold 1.4 KB: {runs / 'large'}, {runs / 'a'}, {runs / 'b'} and 2 more. "
        "Resume each with --resume DIR, or from the script that started it, or remove it"
    )
    monkeypatch.chdir(tmp_path)
    (told,) = report_leftovers(Path("runs"), 0)
    assert ": runs/large, runs/a, runs/b and 2 more." in told


def test_homes_whose_run_another_took_the_place_of_are_kept(tmp_path):
    root, scratch = with_scratch(tmp_path)
    root.rename(tmp_path / "elsewhere")
    RunDirectory(root).close("failed")
    assert_kept(scratch.parent, f"its run was moved from {root}, where there is another now")


@pytest.mark.parametrize("marker", ["", "{", "{}", "[1]", '{"made by": "seqpart"}', "[" * 100_000])
def test_homes_of_a_run_with_a_damaged_marker_are_kept(tmp_path, marker):
    root, scratch = with_scratch(tmp_path)
    (root / MARKER).write_text(marker)
    assert_kept(scratch.parent, "cannot be read")
    (scratch / MARKER).write_text(marker)
    assert_kept(scratch.parent, "marker is damaged")


@pytest.mark.parametrize("damaged", [CHECKPOINT, PREVIOUS])
def test_homes_stay_where_one_checkpoint_names_others_and_the_other_cannot_be_read(tmp_path, damaged):
    """The damaged one was left out, although it may be the one that names them."""
    root, scratch = with_scratch(tmp_path)
    directory = RunDirectory(root, resume=True)
    for name in (CHECKPOINT, PREVIOUS):
        save(directory, directory, name=name)
    whole = (root / damaged).read_text()
    (root / damaged).write_text(whole.replace("out", "oux"))  # one letter of a path
    assert clear_leftovers(scratch.parent) == (0, 0)
    (root / damaged).write_text(whole)
    assert clear_leftovers(scratch.parent) == (1, 200)
    directory.close("failed")


def test_a_copy_that_a_user_made_of_homes_is_kept(tmp_path):
    """A backup beside them was cleaned up: the run's checkpoint names the original only."""
    root, scratch = with_scratch(tmp_path)
    shutil.copytree(scratch, scratch.with_name("backup"))
    shutil.copytree(killed(tmp_path / "fast" / "dead"), tmp_path / "fast" / "dead-backup")
    assert clear_leftovers(scratch.parent) == (1, 200)
    assert not (tmp_path / "fast" / "dead" / "homes").exists()
    assert_kept(scratch.parent, "it was copied or moved from")
    assert len(unknown(scratch.parent)) == 2
    assert (root / CHECKPOINT).exists()


def test_links_are_not_followed_wherever_they_lie(tmp_path):
    """`homes -> /somewhere` beside any marker lost somebody's files there."""
    theirs, shared = tmp_path / "theirs", tmp_path / "shared"
    theirs.mkdir()
    for name in (OURS, "train-00001.0.safetensors", "train-00001.0.sums.json", "relay.part", "model.safetensors.part"):
        (theirs / name).write_text("years of work")
    shared.mkdir()
    for where in ("homes", "rows"):  # a folder that is a link
        root = killed(shared / f"by-{where}")
        shutil.rmtree(root / where)
        (root / where).symlink_to(theirs)
    root = killed(shared / "by-file")
    (root / "homes" / "block-00001.0.safetensors").symlink_to(theirs / OURS)
    (root / "model.safetensors.part").symlink_to(theirs / OURS)
    (shared / "by-root").symlink_to(killed(tmp_path / "other"))  # a directory that is a link
    root = killed(shared / "by-marker")
    (root / MARKER).rename(theirs / "marker")
    (root / MARKER).symlink_to(theirs / "marker")
    root = killed(shared / "by-lock")
    (root / LOCK).unlink()
    (root / LOCK).symlink_to(theirs / "a-new-file")
    before, other = tree(theirs), tree(tmp_path / "other")
    clear_leftovers(shared)
    assert (tree(theirs), tree(tmp_path / "other")) == (before, other)
    assert {one.path.name: one.why for one in unknown(shared)} == {
        "by-marker": "its marker cannot be read: Too many levels of symbolic links"
    }
    assert (shared / "by-lock" / "homes" / OURS).exists(), "nobody knows whether it lives"


def test_only_a_directory_with_a_marker_of_ours_is_looked_into(tmp_path):
    """`{}` made a directory ours."""
    for number, marker in enumerate(
        ["{}", '{"run": "/"}', '{"made by": "me", "state": "", "directory": "", "id": ""}', "null"]
    ):
        (tmp_path / f"x{number}" / "homes").mkdir(parents=True)
        (tmp_path / f"x{number}" / MARKER).write_text(marker)
        (tmp_path / f"x{number}" / "homes" / OURS).write_text("mine")
    assert_kept(tmp_path, "is kept: its marker is")


def test_a_marker_that_is_another_name_of_a_file_of_ours_is_not_believed(tmp_path):
    root = killed(tmp_path / "real")
    (tmp_path / "trap" / "homes").mkdir(parents=True)
    (tmp_path / "trap" / "homes" / OURS).write_text("mine")
    os.link(root / MARKER, tmp_path / "trap" / MARKER)
    clear_leftovers(tmp_path)
    assert (tmp_path / "trap" / "homes" / OURS).read_text() == "mine"


def test_a_user_s_own_files_beside_homes_stay(tmp_path):
    """Any *.safetensors, *.part and *.sums.json in a folder `homes` went."""
    root = killed(tmp_path / "out")
    mine = [
        root / "homes" / "resnet.safetensors", root / "homes" / "paper.part", root / "rows" / "audit.sums.json",
        root / "best.safetensors", root / "notes.seqpart-newer", tmp_path / ".probe-1",
    ]  # fmt: skip
    for path in mine:
        path.write_text("mine")
        os.utime(path, (0, 0))
    (root / "homes" / "block-00000.7.safetensors").mkdir()
    os.mkfifo(root / "rows" / "train-00000.3.safetensors")
    assert clear_leftovers(tmp_path) == (1, 200)
    assert all(path.read_text() == "mine" for path in mine)
    assert (root / "homes" / "block-00000.7.safetensors").is_dir()
    assert (root / "rows" / "train-00000.3.safetensors").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("what", ["", MARKER])
def test_what_another_user_owns_is_left_alone(tmp_path, what):
    root = killed(tmp_path / "out")
    os.chown(root / what, 12345, 12345)
    before = tree(tmp_path)
    assert clear_leftovers(tmp_path) == (0, 0)
    assert tree(tmp_path) == before


def test_a_marker_that_names_a_run_which_is_none_keeps_the_homes(tmp_path):
    _, scratch = with_scratch(tmp_path, saved=False)
    marker = json.loads((scratch / MARKER).read_text())
    for run in ("/", str(scratch), "", "\0", str(tmp_path / "runs"), "x" * 5000):
        (scratch / MARKER).write_text(json.dumps(marker | {"run": run}))
        assert_kept(scratch.parent, str(scratch))
    (scratch / MARKER).write_text(json.dumps(marker))
    assert clear_leftovers(scratch.parent) == (1, 200)


def test_a_run_that_is_moved_away_while_it_lives_keeps_its_homes(tmp_path):
    """Its checkpoints were looked for in the old place, and were not there: its homes went as it ended."""
    directory = RunDirectory(tmp_path / "runs" / "out")
    scratch = RunDirectory(tmp_path / "fast" / f"{SCRATCH_PREFIX}x", run=directory)
    fill(scratch)
    save(directory, scratch)
    directory.root.rename(tmp_path / "runs" / "moved")
    before = tree(tmp_path / "runs")
    scratch.vanish()
    directory.close("failed")
    assert (scratch.homes / OURS).exists()
    assert tree(tmp_path / "runs") == before
    assert [one.kind for one in unknown(scratch.root.parent)] == [Kind.UNKNOWN]


def test_looking_at_runs_takes_none_of_their_locks(tmp_path):
    """Starting runs held each other's locks while they counted files: 36 of 240 simultaneous resumes were refused."""
    for number in range(6):
        directory = RunDirectory(tmp_path / f"r{number}")
        fill(directory)
        save(directory)
        kill(directory)
    stopped = threading.Event()

    def look():
        while not stopped.is_set():
            assert len(resumable(tmp_path)) <= 6
            clear_leftovers(tmp_path)

    def resume(number):
        for _ in range(40):
            RunDirectory(tmp_path / f"r{number}", resume=True).close("failed")

    with ThreadPoolExecutor(10) as pool:
        looking = [pool.submit(look) for _ in range(4)]
        try:
            for resuming in [pool.submit(resume, number) for number in range(6)]:
                resuming.result()
        finally:
            stopped.set()
        for looked in looking:
            looked.result()


def test_a_lock_that_is_let_go_in_a_moment_is_waited_for(tmp_path):
    directory = RunDirectory(tmp_path / "out")
    threading.Timer(0.1, directory.close, ["failed"]).start()
    os.close(locked(tmp_path / "out"))


def test_a_dry_run_leaves_nothing_as_it_found_nothing(tmp_path, capsys, monkeypatch):
    """It wrote 64 MiB to a file of a name that could be foreseen, under --offload-dir and the run directories."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fast").mkdir()
    killed(tmp_path / "runs" / "dead")
    before = tree(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path, tmp_path / "fast", tmp_path / "runs")}
    for options in ([], ["--offload-dir", "fast"], ["--output-dir", "runs/new"]):
        assert call(capsys, *SMALL, *options, "--dry-run").code == 0
    assert tree(tmp_path) == before
    assert {path: path.stat().st_mtime_ns for path in times} == times
