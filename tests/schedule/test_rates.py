"""Rows and seconds of a run that goes on in the midst of a pass: those of what was left of it."""

import io
import itertools
import re
import signal
from time import monotonic
from types import SimpleNamespace

import pytest
from rich.console import Console

from seqpart import Trainer
from seqpart.callbacks import EpochEvent
from seqpart.errors import Interrupted
from seqpart.report import reporter
from seqpart.report.reporter import Reporter
from seqpart.runtime import tracking
from seqpart.schedule.steps import PhaseBegun, PhaseDone
from tests.report.test_tracking import heard  # noqa: F401 (a fixture)
from tests.runtime.test_same_as_plain import data, network
from tests.schedule.test_callbacks import Listening, fit

ROWS, LEFT = 120, 56
"""Of an epoch, and of its last two updates."""
WAYS = [{"method": "full"}, {"method": "streamed", "partitions": 2, "micro_batch_size": 8}, {"method": "sil", "partitions": 2}]


def stopped(tmp_path, **options):
    """A run that a signal ended behind its second update."""

    def stop(event):
        if getattr(event, "update", 0) == 2:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted) as saved:
        fit(tmp_path, [Listening(stop)], **options)
    return saved.value.directory


def again(tmp_path, **options):
    options = {"mem_limit": "2GB", "epochs": 2, "batch_size": 32, "lr": 1e-2, "seed": 5, **options}
    return Trainer(network(), output_dir=tmp_path / "run", quiet=True, **options)


def rows_of():
    return data(), data(40, 1)


class Noting(Reporter):
    """Keeps the passes, and what the log would say of them."""

    def __init__(self, console=None):
        super().__init__(quiet=True, console=console)
        self.begun, self.over, self.told = [], [], []

    def listen(self, event):
        super().listen(event)
        for kind, kept in ((PhaseBegun, self.begun), (PhaseDone, self.over)):
            if isinstance(event, kind) and event.phase.kind.value == "train":
                kept.append(event)

    def record(self, kind, **values):
        super().record(kind, **values)
        if kind == "phase" and values["phase"].startswith("[train"):
            self.told.append(values)


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.few(1)
def test_the_speed_of_a_pass_that_goes_on_is_that_of_the_rows_that_were_left(options, tmp_path):
    """All rows of the epoch were counted, over the seconds of the rest: 1,443 samples/s at 560."""
    directory, noting, listening = stopped(tmp_path, **options), Noting(), Listening()
    trainer = again(tmp_path, **options)
    trainer.fit(*rows_of(), resume=directory, reporter=noting, callbacks=[listening])
    first, *others = noting.over
    assert (first.rows, first.earlier) == (ROWS, ROWS - LEFT) and not any(event.earlier for event in others)
    assert noting.begun[0].earlier == ROWS - LEFT
    assert first.rows_per_second == pytest.approx(LEFT / first.seconds)
    assert [told["samples_per_second"] for told in noting.told] == [round(event.rows_per_second, 1) for event in noting.over]
    assert noting.told[0]["rows"] == ROWS
    epochs = listening.of(EpochEvent)
    assert [event.rows for event in epochs] == [LEFT, *[ROWS] * (len(epochs) - 1)]
    assert epochs[0].seconds == first.seconds


def test_the_live_line_of_a_run_that_goes_on_ends_at_100_percent(tmp_path, monkeypatch):
    """It counted the rows that were trained on before as work that was left, and never did."""
    directory, screen, seconds = stopped(tmp_path, method="full"), io.StringIO(), itertools.count()
    monkeypatch.setattr(
        reporter, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds)), monotonic=monotonic)
    )  # shown at every step
    noting = Noting(Console(file=screen, force_terminal=True, width=120))
    again(tmp_path, method="full").fit(*rows_of(), resume=directory, reporter=noting)
    shares = [int(share) for share in re.findall(r"(\d+) %  ETA", screen.getvalue())]
    assert shares[0] < 20 and shares[-1] == 100 and shares == sorted(shares)


def test_trackers_are_told_of_the_updates_since_the_run_went_on(heard, tmp_path, monkeypatch):  # noqa: F811
    """The first loss and rows per second behind a resume were those of the pass so far, over the seconds since."""
    monkeypatch.setattr(tracking, "_SECONDS", 0.0)
    options = {"method": "full", "epochs": 1, "batch_size": 20, "log": "tensorboard"}
    fit(tmp_path / "whole", **options)
    whole = {step: values for step, values in heard.told if "train/loss" in values}
    directory = stopped(tmp_path, **options)
    heard.told.clear()
    again(tmp_path, **options).fit(*rows_of(), resume=directory)
    found = {step: values for step, values in heard.told if "train/loss" in values}
    assert list(whole) == [1, 2, 3, 4, 5] and list(found) == [4, 5], "it counts from the first update on"
    assert [found[step]["train/loss"] for step in found] == [whole[step]["train/loss"] for step in found]
