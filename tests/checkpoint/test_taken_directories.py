"""What is known of the directory of the results before a plan is made, and what a run leaves there that could not begin. A
directory that was in use, or held a finished run, was refused seconds later, when rows were read and a plan was made; rows of
several shapes left a directory behind with a plan of nothing."""

import fcntl

import pytest
import torch
from torch import nn

from seqpart import Trainer
from seqpart.checkpoint.marker import LOCK
from seqpart.errors import DataError, DirectoryUnusable, OptionError
from tests.command import SMALL, call, files, refused

ROWS = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


class Unread:
    """Nobody reads it."""

    def __len__(self):
        raise AssertionError("the rows were looked at")

    def __getitem__(self, index):
        raise AssertionError("a row was read")


class Uneven:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.zeros(5 if index == 25 else 4), index % 3


def trainer(folder, **options):
    torch.manual_seed(0)
    return Trainer(
        nn.Sequential(nn.Linear(4, 3)), mem_limit="2GB", method="full", batch_size=4, epochs=1, quiet=True,
        output_dir=folder, **options,
    )  # fmt: skip


def test_a_finished_run_is_refused_before_rows_are_read(tmp_path):
    trainer(tmp_path / "out").fit(ROWS)
    with pytest.raises(OptionError, match=r"holds a finished run\. Give another directory, or overwrite"):
        trainer(tmp_path / "out").fit(Unread())
    assert trainer(tmp_path / "out", overwrite=True).fit(ROWS).weights.exists()


def test_files_of_somebody_else_are_refused_before_rows_are_read(tmp_path):
    (tmp_path / "chapter.tex").write_text("years of work")
    with pytest.raises(OptionError, match="holds files that seqpart did not make"):
        trainer(tmp_path).fit(Unread())


@pytest.mark.parametrize("options", [{"overwrite": True}, {}], ids=["anew", "going on"])
def test_a_directory_in_use_is_refused_before_rows_are_read(options, tmp_path):
    trainer(tmp_path / "out").fit(ROWS)
    with open(tmp_path / "out" / LOCK, "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DirectoryUnusable, match=r"is in use by another run\. Wait for it to end, or give another"):
            trainer(tmp_path / "out", **options).fit(Unread(), resume=None if options else tmp_path / "out")


def test_the_command_says_so_before_it_makes_a_plan_and_a_dry_run_plans_all_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trainer(tmp_path / "out").fit(ROWS)
    before = files(tmp_path)
    ran = call(capsys, *SMALL, "--method", "full", "--output-dir", "out")
    assert refused(ran, 2, "--output-dir: out holds a finished run", "--overwrite") and not ran.out
    assert call(capsys, *SMALL, "--method", "full", "--output-dir", "out", "--dry-run").code == 0
    assert files(tmp_path) == before


@pytest.mark.parametrize("there", [False, True])
def test_rows_that_cannot_be_taken_leave_no_directory_and_none_but_what_was_there(there, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "out"
    if there:
        folder.mkdir()
    with pytest.raises(DataError, match="row shapes differ"):
        trainer(folder).fit(Uneven())
    assert folder.exists() == there
    assert trainer(folder).fit(ROWS).weights.exists()
