"""How a run's end is told: by a failing disk, by damage, and by a signal that comes when all is done."""

import contextlib
import errno
import json
import os
import signal

import pytest
import torch
from torch import nn

from seqpart import Trainer
from seqpart.checkpoint.leftovers import SCRATCH_PREFIX
from seqpart.checkpoint.marker import MARKER
from seqpart.checkpoint.run_directory import RunDirectory
from seqpart.errors import CorruptFile, StoreError
from seqpart.report.reporter import Reporter
from tests.checkpoint.test_run_directory import fill, save


@pytest.mark.parametrize("ended", ["done", "failed"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["in the run's directory", "elsewhere"])
def test_a_disk_that_fails_as_homes_are_removed_is_told_where_the_run_has_no_other_error(
    ended, elsewhere, tmp_path, monkeypatch
):
    """A run that was done ended in a traceback, or, with homes elsewhere, without a word."""

    def failing(name, *, dir_fd=None):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    directory = RunDirectory(tmp_path / (f"{SCRATCH_PREFIX}x" if elsewhere else "out"))
    fill(directory)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", failing)
        with pytest.raises(StoreError, match="Input/output error") if ended == "done" else contextlib.nullcontext() as told:
            directory.vanish(failed=ended == "failed") if elsewhere else directory.close(ended)
    assert ended == "failed" or "The run is finished and its results are written" in told.value.__notes__[0]


@pytest.mark.parametrize(
    ("error", "said"), [(RuntimeError("cut off"), "The last checkpoint is intact"), (CorruptFile("x"), "or says that it needs")]
)
def test_an_error_says_how_to_go_on_and_promises_no_checkpoint_that_damage_may_have_met(error, said, tmp_path):
    directory = RunDirectory(tmp_path / "out")
    save(directory)
    with pytest.raises(type(error)) as told, directory.resumable(Reporter(quiet=True).add_note):
        raise error
    assert said in told.value.__notes__[0]
    directory.close("failed")


class Late(Reporter):
    """A signal comes when the proof is told."""

    def proof(self, proof):
        super().proof(proof)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_a_signal_at_the_very_end_finds_a_finished_run(tmp_path):
    """The run was done, its marker said that it had failed, and the message that its files were removed."""
    rows = torch.randn(24, 8), torch.arange(24) % 4
    trainer = Trainer(
        [lambda: nn.Linear(8, 8), lambda: nn.Linear(8, 4)], mem_limit="2GB", method="streamed", partitions=2, epochs=1,
        output_dir=tmp_path / "out", quiet=True,
    )  # fmt: skip
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match=r"the run is finished; its results are in .*out"):
        trainer.fit(rows, rows, reporter=Late(quiet=True))
    assert signal.getsignal(signal.SIGINT) is before
    assert json.loads((tmp_path / "out" / MARKER).read_text())["state"] == "done"
    assert (tmp_path / "out" / "result.json").exists() and not (tmp_path / "out" / "homes").exists()
