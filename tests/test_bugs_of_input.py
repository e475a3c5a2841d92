"""One test for each bug that there was in what users meet first, with its story. Append only."""

import gzip
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch import nn

from seqpart import Trainer
from seqpart.costs.blocks import measure_chain
from seqpart.data.splits import as_split, count_classes, write_rows
from seqpart.directory.run_directory import RunDirectory, new_name
from seqpart.errors import DataError, OptionError, OutOfMemory
from seqpart.files.direct import PAGE, DirectFile, probe_disk
from seqpart.interrupts import Interrupts
from seqpart.model.blocks import as_chain
from seqpart.settings import Settings
from seqpart.zoo.datasets import load


def test_a_signal_while_a_lock_is_taken_does_not_hang_the_run():
    """KeyboardInterrupt between taking the reader's lock and noting it left the lock taken: the clean-up waited forever."""
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)  # anywhere in a step
        reached = True
        interrupts.check()
    assert reached


def test_a_test_folder_that_lacks_a_class_keeps_the_numbers_of_training(tmp_path):
    """Each image folder numbered its own classes: with `cat` missing in test, every dog was judged as a cat."""
    for path in ("train/cat/a", "train/dog/a", "test/dog/a"):
        (tmp_path / path).parent.mkdir(parents=True)
        Image.new("RGB", (2, 2)).save((tmp_path / path).with_suffix(".png"))
    train, test = (as_split(part, "some") for part in load(f"folder:{tmp_path}"))
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 1], [1])


def test_labels_that_a_target_transform_changes_are_taken_from_the_items():
    """`targets` was believed although the data set transforms them: the network learned the untransformed classes."""

    class Even(torch.utils.data.Dataset):
        targets = (3, 4)

        def target_transform(self, label):
            return label % 2

        def __len__(self):
            return 2

        def __getitem__(self, index):
            return torch.zeros(1), self.target_transform(self.targets[index])

    assert as_split(Even(), "training").labels.tolist() == [1, 0]


def test_a_float64_that_float32_cannot_hold_is_not_finite():
    """Rows were checked before they became float32: 1e300 passed, was stored as infinity, and the loss was NaN."""
    split = as_split((torch.full((2, 1), 1e300, dtype=torch.float64), torch.tensor([0, 1])), "training")
    with pytest.raises(DataError, match="in row 0"):
        write_rows(split, lambda rows: None)


def test_a_label_in_the_millions_is_refused_before_anything_is_sized_by_it():
    """Two classes numbered 0 and 1,000,000 made a million outputs, and gigabytes of fixed targets outside the plan."""
    split = as_split((torch.zeros(2, 1), torch.tensor([0, 1_000_000])), "training")
    with pytest.raises(DataError, match="number them 0 to 1"):
        count_classes(split, split)


def test_no_partitions_is_not_one_partition():
    """`--partitions 0` was read as the list of first blocks `0`, and trained one partition."""
    with pytest.raises(OptionError, match="found '0'"):
        Settings.of(mem_limit="2GB", method="sil", partitions=0).partition_choice()


def test_a_path_may_be_given_as_text():
    """`Trainer(..., output_dir="out")` failed with an AttributeError deep in the run."""
    assert Settings.of(mem_limit="2GB", method="sil", output_dir="out").output_dir == Path("out")


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


def test_two_runs_of_one_second_have_two_directories():
    """The name was made of time, method and process: a second short `fit` found the first one's finished run."""
    assert new_name("sil") != new_name("sil")


def test_a_disk_with_less_room_than_the_probe_wants_is_probed_with_less(tmp_path, monkeypatch):
    """The 64 MiB speed probe filled a small disk and refused a run that needed 1 MB."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=3 * PAGE))
    written = []
    real = DirectFile.write_from
    monkeypatch.setattr(
        DirectFile, "write_from", lambda self, memory, at: (written.append(len(memory)), real(self, memory, at))
    )
    probe_disk(tmp_path)
    assert sum(written) == PAGE


def test_rows_that_do_not_fit_show_no_traceback_of_torch_s_own(caplog):
    """torch logged the traceback of the refused operation to stderr, above our one message."""
    with pytest.raises(DataError, match="cannot take rows of shape"), caplog.at_level("ERROR"):
        measure_chain(as_chain([nn.Linear(3, 3)]), (4,), 2)
    assert not caplog.records


def test_a_zipped_file_with_a_flipped_bit_is_named(tmp_path):
    """gzip raises zlib.error, which is no OSError: a damaged .gz ended in a traceback."""
    for kind in ("images-idx3", "labels-idx1"):
        whole = bytearray(gzip.compress(bytes(range(10)) * 500))
        whole[11] ^= 255
        (tmp_path / f"train-{kind}-ubyte.gz").write_bytes(whole)
    with pytest.raises(DataError, match=r"ubyte\.gz is damaged: .* Fetch it again"):
        load(f"idx:{tmp_path}")


def test_memory_that_runs_out_before_the_loop_is_said_in_words(tmp_path):
    """A block whose factory takes more than the limit for a moment ended the run in a traceback and exit code 1."""

    def greedy():
        torch.empty(8 << 30, dtype=torch.uint8).fill_(1)
        return nn.Linear(4, 2)

    data = torch.zeros(4, 4), torch.tensor([0, 1, 0, 1])
    with pytest.raises(OutOfMemory, match=r"ran out while the blocks were built, inside the limit of 2\.00 GB.*mem_limit"):
        Trainer([greedy], mem_limit="2GB", method="sil", device="cpu", output_dir=tmp_path / "out", quiet=True).fit(data, data)
    assert not list(tmp_path.rglob("*.safetensors"))
