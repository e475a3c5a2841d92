"""A run keeps its place while the program changes its working directory, or where a link leads. It looked for its checkpoint in
the new directory, found none, and removed the homes that the checkpoint named: all that was trained was lost."""

import os

import pytest
import torch
from torch import nn

from seqpart import Trainer

ROWS = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3


class At:
    """Does something behind an update."""

    def __init__(self, update, do):
        self.update, self.do = update, do

    def on_step(self, event):
        if event.update == self.update:
            self.do()


class Ended(Exception):
    pass


def end():
    raise Ended


def trainer(method, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)], nn.Linear(8, 3))
    cut = {"partitions": 2} if method in ("streamed", "sil") else {}
    return Trainer(
        model, mem_limit="4GB", method=method, batch_size=8, micro_batch_size=8, epochs=2, save_every=2, quiet=True,
        **cut, **options,
    )  # fmt: skip


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The working directory is one, and another waits."""
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "elsewhere"


@pytest.mark.parametrize(
    ("method", "place"),
    [("full", {}), ("sil", {"output_dir": "mine"}), ("streamed", {"output_dir": "mine", "offload_dir": "homes"})],
)
@pytest.mark.few(1)
def test_a_callback_that_changes_the_working_directory_changes_nothing(tmp_path, elsewhere, method, place):
    found = trainer(method, **place).fit(ROWS, ROWS, callbacks=[At(3, lambda: os.chdir(elsewhere))])
    expected = trainer(method, output_dir=tmp_path / "expected").fit(ROWS, ROWS)
    assert found.weights.is_relative_to(tmp_path / "here") and found.weights.read_bytes() == expected.weights.read_bytes()
    assert not list(elsewhere.iterdir())
    assert not list((tmp_path / "here").rglob("block-*")), "homes are left"


@pytest.mark.parametrize("method", ["full", "streamed"])
@pytest.mark.few(1)
def test_a_run_that_ends_in_another_working_directory_keeps_its_checkpoint_and_goes_on(tmp_path, elsewhere, method):
    stops = [At(5, lambda: os.chdir(elsewhere)), At(6, end)]
    with pytest.raises(Ended):
        trainer(method, output_dir="mine").fit(ROWS, ROWS, callbacks=stops)
    found = trainer(method).fit(ROWS, ROWS, resume=tmp_path / "here" / "mine")
    expected = trainer(method, output_dir=tmp_path / "expected").fit(ROWS, ROWS)
    assert found.weights.read_bytes() == expected.weights.read_bytes()


def test_a_run_that_goes_on_from_a_relative_place_keeps_it_too(tmp_path, elsewhere):
    with pytest.raises(Ended):
        trainer("streamed", output_dir="mine").fit(ROWS, ROWS, callbacks=[At(6, end)])
    found = trainer("streamed").fit(ROWS, ROWS, resume="mine", callbacks=[At(7, lambda: os.chdir(elsewhere))])
    expected = trainer("streamed", output_dir=tmp_path / "expected").fit(ROWS, ROWS)
    assert found.weights.read_bytes() == expected.weights.read_bytes()


def test_a_run_keeps_its_place_when_a_link_above_it_leads_elsewhere(tmp_path, elsewhere):
    link = tmp_path / "disk"
    link.symlink_to(tmp_path / "here")

    def lead_elsewhere():
        link.unlink()
        link.symlink_to(elsewhere)

    with pytest.raises(Ended):
        trainer("streamed", output_dir=link / "mine").fit(ROWS, ROWS, callbacks=[At(5, lead_elsewhere), At(6, end)])
    found = trainer("streamed").fit(ROWS, ROWS, resume=tmp_path / "here" / "mine")
    expected = trainer("streamed", output_dir=tmp_path / "expected").fit(ROWS, ROWS)
    assert found.weights.read_bytes() == expected.weights.read_bytes()


def test_sessions_and_evaluations_clean_up_where_they_began(tmp_path, elsewhere):
    made = Trainer(nn.Linear(8, 3), mem_limit="4GB", method="full", batch_size=8, quiet=True)
    with made.session((ROWS[0][:8], ROWS[1][:8])) as session:
        session.step((ROWS[0][:8], ROWS[1][:8]))
        os.chdir(elsewhere)
        session.step((ROWS[0][:8], ROWS[1][:8]))
    assert not list(elsewhere.iterdir()) and not list((tmp_path / "here").rglob("session-*"))


def test_no_working_directory_at_all_is_no_error(tmp_path, elsewhere):
    def leave():
        os.chdir(elsewhere)
        elsewhere.rmdir()

    assert trainer("streamed", output_dir="mine").fit(ROWS, ROWS, callbacks=[At(3, leave)]).accuracy is not None
