"""Bad input by the real command: the exit code, one message that names the cure, no traceback, earlier files intact.

What ends inside a run, or touches files, runs in a process of its own; the long tail of malformed options calls the
same `main` in this one.
"""

import gzip
import json
import re
import shutil
import signal
import struct
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from seqpart.direct import explained
from seqpart.rundir import MARKER
from tests.command import SMALL, Ran, call, command, end, files, refused, run, start

OWN = """
    import mmap, time
    from pathlib import Path
    import torch
    from torch import nn

    def chain(*, middle=None, inputs=64, outputs=10):
        first = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 32))
        return [first, *([middle] if middle else []), nn.Linear(32, outputs)]

    class Meddler(nn.Module):
        # Does its mischief in its third real forward pass; costs are found on fake tensors.
        def __init__(self, mischief):
            super().__init__()
            self.linear, self.mischief, self.calls = nn.Linear(32, 32), mischief, 0

        def forward(self, x):
            if type(x) is torch.Tensor:
                self.calls += 1
                if self.calls == 3:
                    self.mischief()
            return self.linear(x)

    def flip():
        (home,) = Path("out/homes").glob("block-00002.*.safetensors")
        data = bytearray(home.read_bytes())
        data[-1] ^= 1
        home.write_bytes(data)

    def fill():
        try:
            with open("small/filler", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
        except OSError:
            pass

    shared = []

    def take():
        shared.append(mmap.mmap(-1, 900 << 20))
        for at in range(0, 900 << 20, 4096):
            shared[0][at] = 1
        time.sleep(0.1)

    fits = chain
    def damages_home(): return chain(middle=Meddler(flip))
    def fills_disk(): return chain(middle=Meddler(fill))
    def takes_memory(): return chain(middle=Meddler(take))
    def narrow(): return chain(inputs=10)
    def few(): return chain(outputs=5)
    def number(): return 7
    def module(): return nn.Linear(64, 10)
    def empty(): return []
    def no_module(): return [lambda: 3]
    def raises(): raise ValueError("boom")
    def asks(width): return chain()
    value = 3

    def pair(y, x=None):
        x = torch.zeros(len(y), 64) if x is None else x
        return (x, torch.as_tensor(y)), (torch.zeros(2, 64), torch.tensor([0, 1]))

    def one_class(): return pair([3, 3, 3, 3])
    def negative(): return pair([-1, 0, 1, 0])
    def unseen(): return pair([1, 2, 1, 2])
    def sparse(): return pair([0, 1, 0, 10**9])
    def nobody(): return pair([], torch.zeros(0, 64))
    def short(): return pair([0, 1, 0], torch.zeros(4, 64))
    def floats(): return pair([0.0, 1.0, 0.5, 0.5])
    def other_shape(): return (torch.zeros(4, 8), torch.tensor([0, 1, 0, 1])), pair([0, 1])[1]
    def featureless(): return (torch.zeros(4, 0), torch.tensor([0, 1, 0, 1])), (torch.zeros(2, 0), torch.tensor([0, 1]))
    def words(): return ("train", "test")
    def triple(): return 1, 2, 3
"""


def write_own(folder, name="own"):
    (folder / f"{name}.py").write_text(textwrap.dedent(OWN))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("finished")
    ran = run(folder, *SMALL, "--epochs", "1", "--output-dir", "out")
    assert ran.code == 0, ran.err
    return folder / "out"


@pytest.fixture
def place(tmp_path, finished, monkeypatch):
    """Where we stand: a directory with the user's own module and, in `out`, the results of an earlier run."""
    monkeypatch.chdir(tmp_path)
    write_own(tmp_path)
    shutil.copytree(finished, tmp_path / "out")
    assert {"model.safetensors", "events.jsonl", "plan.json", "result.json"} == set(files(tmp_path / "out"))
    return tmp_path


class Overwriting:
    """Runs over the earlier results, which must survive whatever happens."""

    def __init__(self, folder, capsys):
        self.folder, self.before, self.capsys = folder, files(folder / "out"), capsys

    def refused(self, code, *words, arguments, small=SMALL, own_process=True):
        arguments = [*small, "--output-dir", "out", "--overwrite", *arguments]
        ran = run(self.folder, *arguments) if own_process else call(self.capsys, *arguments)
        assert refused(ran, code, *words)
        self.intact()
        return ran

    def intact(self):
        assert files(self.folder / "out") == self.before


@pytest.fixture
def over(place, capsys):
    return Overwriting(place, capsys)


def write_idx(folder, *, rows=40, labels=None, damage=lambda name, data: data):
    folder.mkdir(exist_ok=True)
    for part, count in (("train", rows), ("t10k", 10)):
        images = np.random.default_rng(0).integers(0, 256, (count, 8, 8), np.uint8)
        y = np.arange(labels if labels is not None and part == "train" else count) % 10
        for name, head, data in (
            (f"{part}-images-idx3-ubyte", struct.pack(">4B3i", 0, 0, 8, 3, count, 8, 8), images.tobytes()),
            (f"{part}-labels-idx1-ubyte", struct.pack(">4Bi", 0, 0, 8, 1, len(y)), y.astype(np.uint8).tobytes()),
        ):
            (folder / name).write_bytes(damage(name, head + data))
    return folder


def write_npz(path, *, rows=40, spoil=None):
    x = np.random.default_rng(0).normal(size=(rows, 64)).astype(np.float32)
    if spoil is not None:
        x[7, 3] = spoil
    np.savez(path, x=x, y=np.arange(rows) % 4)
    return path


# --- Data, in processes of their own ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_named_before_anything_is_trained(over, value):
    write_npz(over.folder / "rows.npz", spoil=value)
    over.refused(
        2, "training data: ", "NaN or infinity", "in row 6", "Clean the data",
        arguments=["--data", "npz:rows.npz"], own_process=value is np.nan,
    )  # fmt: skip


def test_a_truncated_idx_file_is_named(over):
    write_idx(over.folder / "idx", damage=lambda name, data: data[:-100] if name.startswith("train-images") else data)
    over.refused(2, "train-images-idx3-ubyte is damaged: it ends 100 bytes too early", arguments=["--data", "idx:idx"])


def test_a_flipped_bit_in_an_npz_file_is_found(over):
    path = write_npz(over.folder / "rows.npz")
    data = bytearray(path.read_bytes())
    data[2000] ^= 16
    path.write_bytes(data)
    over.refused(2, "rows.npz is damaged", "CRC", "numpy.savez", arguments=["--data", "npz:rows.npz"], own_process=False)


def test_rows_that_do_not_fit_the_model_are_named_without_torch_s_own_traceback(over):
    over.refused(
        2, "block 0 (Sequential) cannot take rows of shape (64,)", "Change the block, or the rows",
        arguments=["--model", "own:narrow"], small=["--mem-limit", "1GB"],
    )  # fmt: skip


def test_a_model_that_is_not_there_is_refused(over):
    over.refused(
        2, "--model nothere.models:net: no module named 'nothere'", arguments=["--model", "nothere.models:net"],
        small=["--mem-limit", "1GB"],
    )  # fmt: skip


def test_an_unknown_option_is_refused(over):
    over.refused(2, "Unrecognized options: --micro-batches", "--help", arguments=["--micro-batches", "3"])


# --- What does not fit -----------------------------------------------------------------------------------------------


def test_a_limit_that_is_too_small_names_the_smallest_and_a_run_at_it_succeeds(over):
    fixed = ["--width", "256", "--depth", "3", "--epochs", "1"]
    ran = over.refused(3, "the limit is 50.0 MB", arguments=["--mem-limit", "50MB"], small=fixed)
    smallest = re.search(r"smallest limit that fits: (\w+)", ran.err)[1]
    again = run(over.folder, *fixed, "--mem-limit", smallest)
    assert again.code == 0, again.err
    assert "violations 0" in again.out


def test_plain_training_that_does_not_fit_is_refused_with_the_cure(over):
    over.refused(
        3, "the whole network", "smallest limit that fits", "--method sil",
        arguments=["--method", "full"], small=["--width", "2048", "--depth", "6", "--mem-limit", "500MB"], own_process=False,
    )  # fmt: skip


def test_a_diverging_run_says_so(over):
    over.refused(
        2, "training diverged", "Lower --lr", "while running",
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


def test_a_disk_that_fills_up_in_the_middle_of_a_run_is_said_and_earlier_files_stay(place, small_disk):
    shutil.copytree(place / "out", small_disk / "out")
    before = files(small_disk / "out")
    ran = run(
        place, "--mem-limit", "1GB", "--model", "own:fills_disk", "--output-dir", "small/out", "--overwrite",
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
    ran = call(capsys, "--width", "512", "--depth", "4", "--mem-limit", "1GB", "--offload-dir", "small")
    assert refused(ran, 6, "DiskFull: ", "small", "free, and the plan needs", "--offload-dir")
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_a_read_only_disk_is_named(small_disk, capsys):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert refused(call(capsys, *SMALL, "--output-dir", "small/new"), 6, "small", "Give a directory that you may write to")
    assert refused(call(capsys, *SMALL, "--dry-run", "--plan-out", "small/plan.json"), 6, "small/plan.json")


def test_a_home_that_is_damaged_during_the_run_is_named_and_never_trained_on(over):
    over.refused(
        6, "CorruptFile", "block-00002.0.safetensors", "damaged",
        arguments=["--model", "own:damages_home", "--partitions", "0,2"], small=["--mem-limit", "1GB"],
    )  # fmt: skip


def test_memory_taken_behind_the_limit_ends_the_run(over):
    over.refused(
        4, "LimitExceeded: the limit of 1.00 GB was passed", "Earlier files are intact",
        arguments=["--model", "own:takes_memory"], small=["--mem-limit", "1GB"],
    )  # fmt: skip


def test_a_directory_below_a_file_is_refused(place):
    ran = run(place, *SMALL, "--output-dir", "own.py/out")
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


@pytest.mark.parametrize(("how", "kind"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "kill")])
def test_a_run_that_is_interrupted_removes_its_scratch_and_keeps_earlier_results(over, how, kind):
    process = start(over.folder, *LONG, "--output-dir", "out", "--overwrite", until="train epoch 2")
    assert list((over.folder / "out" / "homes").glob("*.safetensors"))
    assert refused(end(process, how), 130, "interrupted", "scratch files are removed", "earlier results are untouched")
    over.intact()
    assert json.loads((over.folder / "out" / MARKER).read_text())["state"] != "running"


def test_a_directory_in_use_is_refused_and_the_live_run_is_not_disturbed(over):
    process = start(over.folder, *LONG, "--output-dir", "out", "--overwrite", until="train epoch 2")
    try:
        over_live = call(over.capsys, *SMALL, "--output-dir", "out", "--overwrite")
        beside = call(over.capsys, *SMALL, "--epochs", "1", "--output-dir", "beside")
        assert list((over.folder / "out" / "homes").glob("*.safetensors"))
        assert process.poll() is None
    finally:
        assert end(process).code == 130
    assert refused(over_live, 6, "DirectoryUnusable: out is in use by another run", "give another --output-dir")
    assert beside.code == 0
    assert "cleaned up" not in beside.out
    over.intact()


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


# --- The long tail, in this process ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A directory with a file for every kind of damage."""
    folder = tmp_path_factory.mktemp("desk")
    write_own(folder, "desk_own")
    (folder / "desk_broken.py").write_text("def (\n")
    write_idx(folder / "mismatch", labels=39)
    write_idx(folder / "longer", damage=lambda name, data: data + b"x" if name == "train-labels-idx1-ubyte" else data)
    write_idx(folder / "not-idx", damage=lambda name, data: b"JUNK" + data[4:] if name == "t10k-images-idx3-ubyte" else data)
    write_idx(folder / "half-zipped")
    whole = gzip.compress((folder / "half-zipped" / "train-labels-idx1-ubyte").read_bytes())
    (folder / "half-zipped" / "train-labels-idx1-ubyte").unlink()
    (folder / "half-zipped" / "train-labels-idx1-ubyte.gz").write_bytes(whole[:30])
    write_idx(folder / "two")
    (folder / "two" / "other-train-images-idx3-ubyte").write_bytes(b"")
    (folder / "empty").mkdir()
    (folder / "text.npz").write_text("not a zip file")
    np.savez(folder / "names.npz", a=np.zeros(3))
    np.savez(folder / "rows.npz", x=np.zeros((10, 64)), y=np.zeros(9))
    np.savez(folder / "words.npz", x=np.array([["a"] * 4] * 10), y=np.arange(10) % 2)
    np.savez(folder / "objects.npz", x=np.array([[None]] * 10), y=np.arange(10) % 2)
    np.savez(folder / "hot.npz", x=np.zeros((10, 64)), y=np.eye(10))
    (folder / "folder" / "cat").mkdir(parents=True)
    (folder / "notaplan.json").write_text("[1, 2")
    (folder / "half.toml").write_text('lr = "1e-4')
    (folder / "unknown.toml").write_text("learning_rate = 1e-4\n")
    (folder / "word.toml").write_text('depth = "deep"\n')
    (folder / "switch.toml").write_text('overwrite = "yes"\n')
    (folder / "table.toml").write_text("[lr]\nfirst = 1\n")
    (folder / "inner.toml").write_text('config = "half.toml"\n')
    return folder


@pytest.fixture
def here(desk, monkeypatch):
    """Work in the desk; importing the user's module leaves no trace."""
    monkeypatch.chdir(desk)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = files(desk)
    yield desk
    for name in ("desk_own", "desk_broken"):
        sys.modules.pop(name, None)
    assert {name for name in files(desk) if "__pycache__" not in name} == {n for n in before if "__pycache__" not in n}


OPTIONS = {
    "--mem-limit 2XB": "--mem-limit: expected a size such as 2GB, 1.5GiB, 0.8 (a share) or auto; found '2XB'",
    "--mem-limit -1": "--mem-limit: expected a size such as 2GB; found '-1'",
    "--mem-limit 0": "--mem-limit: expected a size above zero; found '0'",
    "--mem-limit nan": "--mem-limit: expected a size; found 'nan'",
    "--mem-limit 1.5": "--mem-limit: a number with a point is a share; up to 1.0; found 1.5",
    "--mem-limit 5000TB": "--mem-limit: 5000000.00 GB were asked for, and the device has; Give less, or auto",
    "--ram-limit 2XB": "--ram-limit: expected a size; found '2XB'",
    "--ram-limit 99TB": "--ram-limit: 99000.00 GB were asked for; of RAM are free",
    "--method adaboost": "--method: expected one of sil, full; found 'adaboost'",
    "--device tpu": "--device: expected auto, cpu, cuda or cuda:N; found 'tpu'",
    "--device cuda:99": "--device cuda:99",
    "--lr nan": "--lr: expected a finite number, zero or above; found nan",
    "--lr -1": "--lr: expected a finite number; found -1.0",
    "--lr inf": "--lr: expected a finite number; found inf",
    "--lr fast": "--lr: expected a number, or numbers with commas; found 'fast'",
    "--lr 1,2": "--lr 1,2 gives 2 values, and the plan has 1 partition(s); --partitions 2",
    "--partitions 2 --lr 1,2,3": "--lr 1,2,3 gives 3 values, and the plan has 2 partition(s)",
    "--epochs 0": "--epochs: expected whole numbers from 1 up; found 0",
    "--epochs 1.5": "--epochs: expected a whole number; found '1.5'",
    "--epochs 1,2": "--epochs 1,2 gives 2 values",
    "--epochs ,": "--epochs: expected a whole number; found ','",
    "--batch-size 0": "--batch-size: expected whole numbers from 1 up; found 0",
    "--batch-size 64,-1 --partitions 2": "--batch-size: expected whole numbers from 1 up; found -1",
    "--micro-batch-size 0": "--micro-batch-size: expected a number above zero; found 0",
    "--micro-batch-size many": "--micro-batch-size; 'many'",
    "--partitions 0": "--partitions: expected auto, a number from 1 up; found '0'",
    "--partitions -2": "--partitions: expected auto; found '-2'",
    "--partitions 99": "--partitions 99: the model has 4 blocks at which a partition can begin",
    "--partitions 5,3": "--partitions: expected; rising block numbers from 0 such as 0,20,40; found '5,3'",
    "--partitions 0,2,2": "rising block numbers; found '0,2,2'",
    "--partitions 0,9": "--partitions: block 9 does not exist; the model has blocks 0..3",
    "--partitions some": "--partitions: expected a whole number; found 'some'",
    "--optimizer adagrad": "--optimizer: expected one of adam, adamw, sgd; found 'adagrad'",
    "--optimizer adam,sgd": "--optimizer adam,sgd gives 2 values",
    "--weight-decay -1": "--weight-decay: expected a finite number, zero or above; found -1.0",
    "--weight-decay nan": "--weight-decay: expected a finite number; found nan",
    "--clip-grad-norm 0": "--clip-grad-norm: expected a number above zero; found 0.0",
    "--clip-grad-norm nan": "--clip-grad-norm: expected a number above zero; found nan",
    "--seed x": "--seed; 'x'",
    "--shuffle maybe": "--shuffle: expected yes, no or auto; found 'maybe'",
    "--cache-dtype fp8": "--cache-dtype: expected fp32 or bf16; found 'fp8'",
    "--objective hinge": "--objective: expected one of prototype, mse; found 'hinge'",
    "--objective mse --kappa 0": "--kappa: expected a number above zero; found 0.0",
    "--width 0": "--width and --depth: expected whole numbers, from 1 and from 0 up; found 0 and 2",
    "--depth -1": "--width and --depth; found 64 and -1",
    # Options that do not go with each other.
    "--kappa 3": "--kappa goes with --objective mse; found --objective prototype",
    "--objective mse --prototype-scale 3": "--prototype-scale goes with --objective prototype; found --objective mse",
    "--method full --objective mse": "--objective goes with --method sil only; found --method full. Leave it out",
    "--method full --cache-dtype bf16": "--cache-dtype goes with --method sil only",
    "--method full --partitions 2": "--partitions: method full has one partition; found '2'",
    "--momentum 0.9": "--momentum goes with --optimizer sgd; adam and adamw keep moments of their own",
    "--model desk_own:fits": "--width and --depth go with --model mlp; found --model desk_own:fits",
    "--image-size 8": "--image-size goes with --data folder:DIR; found --data digits",
    "--data-dir .": "--data-dir and --download go with mnist, fashion-mnist, emnist; found --data digits",
    "--download": "--data-dir and --download go with mnist",
    "--plan notaplan.json --partitions 2": "--plan brings its own cut and micro-batch",
    # Data.
    "--data imagenet": "--data: expected digits, mnist; package.module:function; found 'imagenet'",
    "--data npz:": "--data: expected; found 'npz:'",
    "--data idx:nowhere": "--data idx:nowhere: expected the files in nowhere, and there is no such directory",
    "--data idx:empty": "--data idx:empty: expected a file with train and images in its name; found none",
    "--data idx:two": "--data idx:two: two holds several sets; Give a directory with one of them",
    "--data idx:mismatch": "has 40 images; has 39 labels; the numbers must be equal",
    "--data idx:longer": "train-labels-idx1-ubyte is damaged: it is longer than its header says",
    "--data idx:not-idx": "t10k-images-idx3-ubyte is not an idx file; 4a554e4b",
    "--data idx:half-zipped": "train-labels-idx1-ubyte.gz is damaged",
    "--data npz:nowhere.npz": "--data npz:nowhere.npz: no such file",
    "--data npz:text.npz": "text.npz is damaged or not an npz file",
    "--data npz:names.npz": "names.npz: expected arrays x_train; found a",
    "--data npz:rows.npz": "rows.npz: 10 rows in x and 9 in y; the numbers must be equal",
    "--data npz:words.npz": "words.npz: expected x to be rows of numbers",
    "--data npz:objects.npz": "objects.npz: expected x to be rows of numbers",
    "--data npz:hot.npz": "hot.npz: expected one number for each row in y; found shape (10, 10)",
    "--data folder:nowhere": "--data folder:nowhere: no such directory",
    "--data folder:folder": "--data folder:folder: expected one directory of images per class; cat",
    "--data folder:folder --image-size 0": "--image-size: expected pixels from 1 up; found 0",
    "--data mnist": "--data mnist needs --data-dir",
    "--data mnist --data-dir empty": "--data mnist; MNIST/raw; no such directory. Give --download to fetch it",
    "--data nothere:f": "--data nothere:f: no module named 'nothere'",
    "--data desk_own:words": "training data: expected item 0 to be a pair (tensor, label)",
    "--data desk_own:triple": "--data desk_own:triple: expected a pair (training, test); found tuple",
    "--data desk_own:one_class": "training labels: every row has class 3. Training needs at least two classes",
    "--data desk_own:negative": "training labels: found class -1; expected classes that count from 0",
    "--data desk_own:unseen": "test labels: class 0 does not occur in the training rows",
    "--data desk_own:sparse": "training labels: found class 1000000000 among 3 classes; number them 0 to 2",
    "--data desk_own:nobody": "training data: the set is empty. Give at least one row",
    "--data desk_own:short": "training data: 4 rows of x and 3 labels; the numbers must be equal",
    "--data desk_own:floats": "labels differ: training has torch.float32 and test torch.int64",
    "--data desk_own:other_shape": "training rows have shape (8,) and test rows (64,). Bring both to one shape",
    "--data desk_own:featureless": "training data: rows of shape (0,) hold no numbers",
    # Files of options and plans.
    "--config": "--config",
    "--config nowhere.toml": "--config: cannot read nowhere.toml: No such file or directory",
    "--config half.toml": "--config: half.toml is not TOML",
    "--config unknown.toml": "--config: unknown.toml has unknown option(s) learning_rate; --help",
    "--config inner.toml": "--config: inner.toml has unknown option(s) config",
    "--config word.toml": "--depth; 'deep'",
    "--config switch.toml": "--config: overwrite must be true or false; found 'yes'",
    "--config table.toml": "--config: lr must be a value or a list of values; found a table",
    "--plan nowhere.json": "--plan: cannot read nowhere.json",
    "--plan notaplan.json": "--plan: notaplan.json is not a plan that --plan-out wrote",
}

MODELS = {
    "transformer": "--model: expected mlp or package.module:function; found 'transformer'",
    ":f": "--model: expected package.module:function; found ':f'",
    "..x:f": "--model: expected package.module:function; found '..x:f'",
    "desk_own:": "--model: expected package.module:function; found 'desk_own:'",
    "desk_own:nothing": "--model desk_own:nothing: desk_own has no function 'nothing'. It has",
    "desk_own:value": "desk_own has no function 'value'",
    "desk_broken:f": "--model desk_broken:f: importing desk_broken failed: SyntaxError; --debug",
    "desk_own:raises": "--model desk_own:raises: calling raises() failed: ValueError: boom; --debug",
    "desk_own:asks": "calling asks() failed: TypeError; It must run without arguments",
    "desk_own:number": "a model must be an nn.Sequential; found int",
    "desk_own:module": "a model must be an nn.Sequential; found Linear; give its blocks in order",
    "desk_own:empty": "the model has no blocks: give at least one",
    "desk_own:no_module": "block 0 (<lambda>): the factory returned a int, not an nn.Module",
    "desk_own:few": "the network ends with outputs of shape (5,), and the labels have 10 classes. Let the last block have",
}


def settings_without(arguments):
    """The small settings, less what `arguments` (a config file, perhaps) bring themselves."""
    small = list(SMALL)
    for flag in ("--width", "--depth", "--mem-limit"):
        if flag in arguments or (flag == "--depth" and "word.toml" in arguments):
            del small[small.index(flag) : small.index(flag) + 2]
    return small


@pytest.mark.parametrize("text", OPTIONS)
def test_a_malformed_or_inapplicable_option_is_refused_in_words(text, here, capsys):
    arguments = text.split()
    ran = call(capsys, *settings_without(arguments), "--dry-run", *arguments)
    assert refused(ran, 2, *OPTIONS[text].split("; "))


@pytest.mark.parametrize("model", MODELS)
def test_an_unusable_model_is_refused_in_words(model, here, capsys):
    ran = call(capsys, "--mem-limit", "1GB", "--dry-run", "--model", model)
    assert refused(ran, 2, *MODELS[model].split("; "))


def test_without_a_limit_the_command_says_what_is_missing(capsys):
    assert refused(call(capsys), 2, "Required options", "--mem-limit")


def test_several_mistakes_are_reported_at_once(capsys):
    ran = call(capsys, *SMALL, "--shuffle", "maybe", "--clip-grad-norm", "-1", "--kappa", "3")
    assert refused(ran, 2, "--shuffle: expected", "--clip-grad-norm: expected", "--kappa goes with")


@pytest.fixture
def saved_plan(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert call(capsys, *SMALL, "--partitions", "0,2", "--dry-run", "--plan-out", path).code == 0
    return path


def test_a_plan_for_another_model_is_refused(saved_plan, capsys):
    ran = call(capsys, "--width", "32", "--depth", "2", "--mem-limit", "1GB", "--dry-run", "--plan", saved_plan)
    assert refused(ran, 2, "--plan: that plan is for another model or method", "Make a new one with --plan-out")


@pytest.mark.parametrize(
    "damage",
    [
        lambda plan: plan.update(format=99),
        lambda plan: plan.update(colour="red"),
        lambda plan: plan.update(partitions=[]),
        lambda plan: plan.update(partitions=7),
        lambda plan: plan["partitions"][1].pop("micro_batch"),
        lambda plan: plan["partitions"][1].update(micro_batch="many"),
        lambda plan: plan["partitions"][1].update(micro_batch=0),
        lambda plan: plan["partitions"][1].update(first=0),
        lambda plan: plan["partitions"][1].update(first=99),
        lambda plan: plan["partitions"][0].update(first=1),
        lambda plan: plan["partitions"][0].update(last=1),
        lambda plan: plan.pop("fingerprint"),
    ],
)
def test_a_damaged_plan_is_refused(saved_plan, damage, capsys):
    plan = json.loads(saved_plan.read_text())
    damage(plan)
    saved_plan.write_text(json.dumps(plan))
    ran = call(capsys, *SMALL, "--dry-run", "--plan", saved_plan)
    assert refused(ran, 2, "--plan: ", "is not a plan that --plan-out wrote")


def test_a_saved_plan_that_no_longer_fits_is_refused(saved_plan, capsys):
    ran = call(capsys, "--width", "64", "--depth", "2", "--mem-limit", "20MB", "--dry-run", "--plan", saved_plan)
    assert refused(ran, 3, "smallest limit that fits")


@pytest.mark.parametrize("path", ["nowhere/plan.json", "."])
def test_a_plan_that_cannot_be_written_is_said(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert refused(call(capsys, *SMALL, "--dry-run", "--plan-out", path), 6, "cannot make", "that you may write to")
    assert files(tmp_path) == {}


@pytest.mark.parametrize(
    ("option", "path"),
    [("--output-dir", "file"), ("--output-dir", "/proc/x"), ("--offload-dir", "file/x"), ("--offload-dir", "/proc")],
)
def test_a_directory_that_cannot_be_used_is_named(option, path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    ran = call(capsys, *SMALL, option, path)
    assert refused(ran, 6, "DirectoryUnusable", "Give a directory that you may write to")
    assert {name: data for name, data in files(tmp_path).items() if name == "file"} == {"file": b"mine"}


def test_a_full_disk_is_explained_with_the_place_that_helps(tmp_path):
    assert "--offload-dir" in str(explained(OSError(28, "No space left on device"), tmp_path))


def test_debug_shows_where_it_failed_and_keeps_the_exit_code(here, capsys):
    ran = call(capsys, "--mem-limit", "1GB", "--dry-run", "--model", "desk_own:raises", "--debug")
    assert ran.code == 2
    assert "Traceback" in ran.err
    assert 'raise ValueError("boom")' in ran.err
    assert "calling raises() failed" in ran.err


def test_a_reader_that_goes_away_is_no_traceback(tmp_path):
    process = subprocess.Popen(command(["--help"]), stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", 1)
    process.stderr.close()


def test_the_helpers_of_these_tests_run_the_real_command():
    assert command(["--help"])[1:3] == ["-m", "seqpart.train"]
    assert not refused_or_raises(Ran(0, "", ""))
    assert not refused_or_raises(Ran(2, "", "Traceback"))
    assert refused_or_raises(Ran(2, "", "said"))


def refused_or_raises(ran):
    try:
        return refused(ran, 2)
    except AssertionError:
        return False
