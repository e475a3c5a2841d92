"""Bad input by the real command: the exit code, one message that names the cure, no traceback, earlier files intact.

The long tail of malformed options is in test_bad_options.
"""

import json
import re
import shutil
import signal
import subprocess

import numpy as np
import pytest

from seqpart.checkpoint.marker import MARKER
from seqpart.train import main
from tests.command import SMALL, call, end, files, refused, run, start
from tests.given import write_idx, write_npz, write_own


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("finished")
    assert main([*SMALL, "--epochs", "1", "--output-dir", str(folder / "out")]) == 0
    return folder / "out"


@pytest.fixture
def place(tmp_path, finished, monkeypatch):
    """Where we stand: a directory with the user's own module and, in `out`, the results of an earlier run."""
    monkeypatch.chdir(tmp_path)
    write_own(tmp_path)
    shutil.copytree(finished, tmp_path / "out")
    assert {"model.safetensors", "events.jsonl", "memory.jsonl", "plan.json", "job.json", "result.json"} == set(
        files(tmp_path / "out")
    )
    return tmp_path


class Overwriting:
    """Runs over the earlier results, which must survive whatever happens."""

    def __init__(self, folder, capsys):
        self.folder, self.before, self.capsys = folder, files(folder / "out"), capsys

    def refused(self, code, *words, arguments, small=SMALL, own_process=True, saved=False):
        arguments = [*small, "--output-dir", "out", "--overwrite", *arguments]
        ran = run(self.folder, *arguments) if own_process else call(self.capsys, *arguments)
        assert refused(ran, code, *words)
        if saved:
            self.intact_beside_a_checkpoint()
        else:
            self.intact()
        return ran

    def intact(self):
        assert files(self.folder / "out") == self.before

    def intact_beside_a_checkpoint(self):
        now = files(self.folder / "out")
        assert "checkpoint.json" in now
        assert {name: now[name] for name in self.before} == self.before


@pytest.fixture
def over(place, capsys):
    return Overwriting(place, capsys)


# --- Data and models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_named_before_anything_is_trained(over, value):
    write_npz(over.folder / "rows.npz", spoil=value)
    over.refused(
        2, "training data: ", "NaN or infinity", "in row 6", "Clean the data",
        arguments=["--data", "npz:rows.npz"], own_process=False,
    )  # fmt: skip


def test_a_truncated_idx_file_is_named(over):
    write_idx(over.folder / "idx", damage=lambda name, data: data[:-100] if name.startswith("train-images") else data)
    words = "train-images-idx3-ubyte is damaged: it ends 100 bytes too early"
    over.refused(2, words, arguments=["--data", "idx:idx"], own_process=False)


def test_a_flipped_bit_in_an_npz_file_is_found(over):
    path = write_npz(over.folder / "rows.npz")
    data = bytearray(path.read_bytes())
    data[2000] ^= 16
    path.write_bytes(data)
    over.refused(2, "rows.npz is damaged", "CRC", "numpy.savez", arguments=["--data", "npz:rows.npz"], own_process=False)


def test_rows_that_do_not_fit_the_model_are_named_without_torch_s_own_traceback(over):
    over.refused(
        2, "block 0 (Sequential) cannot take rows of shape (64,)", "Change the block, or the rows",
        arguments=["--model", "own:narrow"], small=["--mem-limit", "2GB"], own_process=False,
    )  # fmt: skip


def test_a_model_that_is_not_there_is_refused(over):
    over.refused(
        2, "--model nothere.models:net: no module named 'nothere'", arguments=["--model", "nothere.models:net"],
        small=["--mem-limit", "2GB"], own_process=False,
    )  # fmt: skip


def test_an_unknown_option_is_refused(over):
    over.refused(2, "unknown option(s): --micro-batches.", "--help", arguments=["--micro-batches", "3"], own_process=False)


# --- What does not fit -----------------------------------------------------------------------------------------------


def test_a_limit_that_is_too_small_is_refused_with_the_smallest(over):
    over.refused(
        3, "the limit of 50.0 MB leaves 32.7 MB", "smallest limit that fits: ",
        arguments=["--mem-limit", "50MB"], small=["--width", "256", "--depth", "3", "--epochs", "1"],
        own_process=False,
    )  # fmt: skip


@pytest.mark.slow
def test_plain_training_that_does_not_fit_is_refused_with_the_cure(over):
    large = ["--width", "2048", "--depth", "6", "--mem-limit", "500MB"]
    over.refused(
        3, "method full needs", "the limit of 500.0 MB leaves 478.2 MB", "smallest limit that fits", "Or use --method streamed",
        arguments=["--method", "full"], small=large,
    )  # fmt: skip
    assert run(over.folder, *large, "--method", "streamed", "--dry-run").code == 0


def test_a_diverging_run_says_so(over):
    over.refused(
        2, "Diverged: training diverged: the loss is nan in update", "Nothing had been saved", "another --lr",
        arguments=["--lr", "1e6", "--optimizer", "sgd"], own_process=False,
    )  # fmt: skip


# --- Files and disks -------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(place):
    """A file system of 24 MB."""
    folder = place / "small"
    folder.mkdir()
    asked = ["mount", "-t", "tmpfs", "-o", "size=24m", "seqpart-test", str(folder)]
    if shutil.which("mount") is None or subprocess.run(asked, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_disk_that_fills_up_in_the_middle_of_a_run_is_said_and_earlier_files_stay(place, small_disk):
    shutil.copytree(place / "out", small_disk / "out")
    before = files(small_disk / "out")
    ran = run(
        place, "--mem-limit", "2GB", "--model", "own:fills_disk", "--output-dir", "small/out", "--overwrite",
        "--partitions", "0,2",
    )  # fmt: skip
    assert refused(ran, 6, "DiskFull: the disk is full", "--offload-dir", "Earlier files are untouched")
    assert (small_disk / "filler").stat().st_size > 10 << 20
    assert files(small_disk / "out") == before
    assert not (small_disk / "out" / "homes").exists()


def test_a_disk_that_is_small_but_large_enough_is_used(small_disk, capsys):
    ran = call(capsys, *SMALL, "--epochs", "1", "--output-dir", "small/new")
    assert ran.code == 0, ran.err
    assert sorted(path.name for path in small_disk.iterdir()) == ["new"]


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(small_disk, capsys):
    (small_disk / "filler").write_bytes(bytes(23 << 20))
    ran = call(capsys, "--width", "512", "--depth", "4", "--mem-limit", "2GB", "--offload-dir", "small")
    assert refused(ran, 6, "DiskFull: ", "small", "free, and the plan needs", "--offload-dir")
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_a_read_only_disk_is_named(small_disk, capsys):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert refused(call(capsys, *SMALL, "--output-dir", "small/new"), 6, "small", "Give a directory that you may write to")
    assert refused(call(capsys, *SMALL, "--dry-run", "--plan-out", "small/plan.json"), 6, "small/plan.json")


def test_a_home_that_is_damaged_during_the_run_is_named_and_never_trained_on(over):
    over.refused(
        6, "CorruptFile", "block-00002.0.safetensors", "damaged",
        arguments=["--model", "own:damages_home", "--partitions", "0,2"], small=["--mem-limit", "2GB"], saved=True,
        own_process=False,
    )  # fmt: skip


@pytest.mark.slow
def test_memory_taken_behind_the_limit_ends_the_run(over):
    over.refused(
        4, "LimitExceeded: the limit of 1.00 GB was passed", "Earlier files are intact",
        arguments=["--model", "own:takes_memory"], small=["--mem-limit", "1GB"],
    )  # fmt: skip


def test_a_directory_below_a_file_is_refused(place, measured_machine, capsys):
    ran = call(capsys, *SMALL, "--output-dir", "own.py/out")
    assert refused(ran, 6, "DirectoryUnusable", "own.py", "not a directory", "Give a directory that you may write to")


def test_a_directory_with_files_of_somebody_else_is_left_alone(place, capsys):
    (place / "thesis").mkdir()
    (place / "thesis" / "chapter.tex").write_text("years of work")
    ran = call(capsys, *SMALL, "--output-dir", "thesis", "--overwrite")
    assert refused(ran, 2, "--output-dir: thesis holds files that seqpart did not make", "Give a new or empty directory")
    assert [path.name for path in (place / "thesis").iterdir()] == ["chapter.tex"]


def test_a_finished_run_is_not_replaced_without_overwrite(place, capsys):
    before = files(place / "out")
    ran = call(capsys, *SMALL, "--output-dir", "out")
    assert refused(ran, 2, "--output-dir: out holds a finished run", "--overwrite")
    assert files(place / "out") == before


def test_overwrite_replaces_every_result_at_the_end(place, capsys):
    before = files(place / "out")
    ran = call(capsys, *SMALL, "--epochs", "2", "--output-dir", "out", "--overwrite")
    assert ran.code == 0, ran.err
    after = files(place / "out")
    assert set(after) == set(before)
    assert not [name for name in after if after[name] == before[name] and name != "plan.json"]


# --- Two runs, and runs that are ended -------------------------------------------------------------------------------

LONG = [*SMALL, "--epochs", "2000"]


def epochs_told(log):
    """Numbers of the training passes that the log says are over."""
    events = [json.loads(line) for line in log.read_text().splitlines()]
    phases = [re.fullmatch(r"\[train 0\.(\d+)\]", event["phase"]) for event in events if event["event"] == "phase"]
    return [int(match[1]) for match in phases if match]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_interrupted_is_saved_goes_on_and_keeps_earlier_results(over, how):
    process = start(over.folder, *LONG, "--output-dir", "out", "--overwrite", until="train epoch 2")
    resume = "python -m seqpart.train --resume out"
    assert refused(end(process, how), 130, f"interrupted: the run is saved. Resume with: {resume}")
    over.intact_beside_a_checkpoint()
    assert json.loads((over.folder / "out" / MARKER).read_text())["state"] == "interrupted"
    again = call(over.capsys, *SMALL, "--output-dir", "out")
    assert refused(again, 2, "--output-dir: out holds a run that was interrupted", "--resume 'out'", "--overwrite")
    before = epochs_told(over.folder / "out" / "events.jsonl.seqpart-new")
    process = start(over.folder, "--resume", "out", until="train epoch")
    assert refused(end(process, how), 130, "interrupted: the run is saved.")
    after = epochs_told(over.folder / "out" / "events.jsonl.seqpart-new")
    assert after == list(range(1, len(after) + 1))
    assert len(after) > len(before) >= 2
    over.intact_beside_a_checkpoint()


@pytest.mark.slow
def test_a_run_that_never_saves_removes_its_scratch_when_it_is_interrupted(over):
    process = start(
        over.folder, *LONG, "--output-dir", "out", "--overwrite", "--save-every", "never", until="train epoch 2"
    )  # fmt: skip
    assert list((over.folder / "out" / "homes").glob("*.safetensors"))
    assert refused(
        end(process, signal.SIGINT), 130, "interrupted", "scratch files are removed", "earlier results are untouched"
    )
    over.intact()
    assert json.loads((over.folder / "out" / MARKER).read_text())["state"] != "running"


@pytest.mark.slow
def test_a_directory_in_use_is_refused_and_the_live_run_is_not_disturbed(over):
    process = start(over.folder, *LONG, "--output-dir", "out", "--overwrite", until="train epoch 2")
    try:
        over_live = run(over.folder, *SMALL, "--output-dir", "out", "--overwrite")
        beside = run(over.folder, *SMALL, "--epochs", "1", "--output-dir", "beside")
        assert list((over.folder / "out" / "homes").glob("*.safetensors"))
        assert process.poll() is None
    finally:
        assert end(process).code == 130
    assert refused(over_live, 6, "DirectoryUnusable: out is in use by another run", "give another --output-dir")
    assert beside.code == 0
    assert "cleaned up" not in beside.out
    over.intact_beside_a_checkpoint()


@pytest.mark.slow  # test_leftovers and test_killed have more of the kind
def test_what_a_killed_run_left_is_cleaned_by_the_next_and_said(over):
    process = start(
        over.folder, *LONG, "--output-dir", "out", "--overwrite", "--offload-dir", "fast", until="train epoch 2"
    )  # fmt: skip
    assert end(process, signal.SIGKILL).code == -signal.SIGKILL
    (left,) = (over.folder / "fast").iterdir()
    assert list((left / "homes").glob("*.safetensors"))
    ran = call(over.capsys, *SMALL, "--epochs", "1", "--offload-dir", "fast")
    assert ran.code == 0, ran.err
    assert re.search(r"cleaned up [\d.]+ [KM]B that killed runs had left", ran.out)
    assert list((over.folder / "fast").iterdir()) == []
    assert refused(call(over.capsys, *SMALL, "--output-dir", "out"), 2, "holds a finished run")
    # The half-written results of the killed run go with the next run that may touch the directory.
    assert {name: data for name, data in files(over.folder / "out").items() if "seqpart-new" not in name} == over.before
