"""New results take the place of earlier ones together: whoever starts after a kill finds the old ones, or makes all new."""

import contextlib
import os
import stat
from itertools import count
from pathlib import Path

import pytest

from seqpart.checkpoint.leftovers import clear_leftovers
from seqpart.checkpoint.run_directory import RunDirectory, finish_what_was_published
from seqpart.cli.arguments import gathered
from seqpart.cli.job import Job
from seqpart.errors import CorruptFile, DiskFull, OptionError, StoreError
from seqpart.files import is_device, made
from seqpart.store.atomic import checked_body, with_checksum, write_text
from seqpart.store.scratch import PUBLISHING
from tests.checkpoint.test_run_directory import finish, kill, names

RESULTS = ("model.safetensors", "plan.json", "events.jsonl", "result.json")


class Killed(BaseException):
    """Nothing runs behind it, not even what closes the directory."""


def published(tmp_path, monkeypatch, *, dies_at, how=Killed):
    """A second run's results over a first one's; it ends before its `dies_at`-th change of a name. Whether it did."""
    finish(tmp_path / "out", "first", RESULTS)
    directory, numbers = RunDirectory(tmp_path / "out", overwrite=True), count(1)
    for name in RESULTS:
        directory.result(name).write_text("second")

    def dying(real):
        def once(*arguments, **named):
            if next(numbers) == dies_at:
                raise how
            return real(*arguments, **named)

        return once

    with monkeypatch.context() as patched:
        for name in ("replace", "unlink"):
            patched.setattr(os, name, dying(getattr(os, name)))
        try:
            directory.publish()
        except Killed:
            kill(directory)
            return directory.root, True
        except DiskFull:
            directory.close("failed")
            return directory.root, True
    directory.close("done")
    return directory.root, False


def begin_anew(root):
    RunDirectory(root, overwrite=True).close("failed")


def begin_by_mistake(root):
    with pytest.raises(OptionError, match="holds a finished run"):
        RunDirectory(root)


def begin_beside(root):
    clear_leftovers(root.parent)


@pytest.mark.parametrize("start", [begin_anew, begin_by_mistake, begin_beside, finish_what_was_published])
def test_a_kill_among_the_renames_is_finished_by_the_next_start(tmp_path, monkeypatch, start):
    """4 of 34 moments to be killed in left the old weights beside the new result.json for good."""
    found, dies_at, died = [], 0, True
    while died:
        dies_at += 1
        root, died = published(tmp_path / str(dies_at), monkeypatch, dies_at=dies_at)
        start(root)
        texts = {(root / name).read_text() for name in RESULTS}
        assert len(texts) == 1, (dies_at, texts)
        assert not (root / PUBLISHING).exists()
        begin_anew(root)
        assert texts == {(root / name).read_text() for name in RESULTS}
        assert set(names(root)) - set(RESULTS) == {".gitignore", "seqpart-run.json", "seqpart.lock"}
        found += texts
    assert found == ["first", *["second"] * (dies_at - 1)]
    assert dies_at > len(RESULTS)


def test_new_results_that_the_disk_keeps_from_their_places_are_kept_for_the_next_start(tmp_path, monkeypatch):
    root, died = published(tmp_path, monkeypatch, dies_at=3, how=OSError(28, "No space left on device"))
    assert died and (root / PUBLISHING).exists()
    begin_by_mistake(root)
    assert {(root / name).read_text() for name in RESULTS} == {"second"}


@pytest.mark.parametrize("text", ["", "[]", '{"results": ["../../etc"]}', "[" * 100_000])
def test_a_damaged_list_of_results_is_named_and_nothing_is_moved_or_removed(tmp_path, monkeypatch, text):
    root, _ = published(tmp_path, monkeypatch, dies_at=3)
    (root / PUBLISHING).write_text(text)
    before = names(root)
    for start in (begin_anew, finish_what_was_published):
        with pytest.raises(CorruptFile, match=r"seqpart-publishing\.json is damaged.*then remove it"):
            start(root)
    begin_beside(root)
    assert names(root) == before


def test_a_list_that_is_a_link_is_not_read(tmp_path, monkeypatch):
    root, _ = published(tmp_path, monkeypatch, dies_at=3)
    (root / PUBLISHING).rename(tmp_path / "list")
    (root / PUBLISHING).symlink_to(tmp_path / "list")
    with pytest.raises(CorruptFile, match="is damaged"):
        begin_anew(root)


def test_a_failing_run_over_an_earlier_one_keeps_its_log_and_plan(tmp_path):
    """--overwrite truncated the earlier run's events and plan at the start; a run that failed then left a mixture."""
    directory = RunDirectory(tmp_path / "out")
    for name in ("model.safetensors", "events.jsonl"):
        directory.result(name).write_text("first")
    directory.close("done")
    again = RunDirectory(tmp_path / "out", overwrite=True)
    again.result("events.jsonl").write_text("second")
    again.close("failed")
    assert (tmp_path / "out" / "events.jsonl").read_text() == "first"


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


@pytest.mark.parametrize("number", [3, 7], ids=["null", "full"])
def test_a_device_keeps_its_name_whatever_is_written_there(number, tmp_path):
    """As root `--plan-out /dev/null` put a file in the place of the device, for everybody."""
    device = tmp_path / "device"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, number))
    except PermissionError:
        pytest.skip("only root makes devices")
    with contextlib.nullcontext() if number == 3 else pytest.raises(StoreError, match="disk is full"):
        write_text(device, "a plan")
    os.close(made(device))
    assert stat.S_ISCHR(device.lstat().st_mode) and [path.name for path in tmp_path.iterdir()] == ["device"]


def test_a_link_is_a_device_only_where_the_system_keeps_them(tmp_path):
    (tmp_path / "stdout").symlink_to("/dev/stdout")
    assert is_device(Path("/dev/stdout")) and is_device(Path("/dev/null"))
    assert not is_device(tmp_path / "stdout") and not is_device(tmp_path / "missing")
