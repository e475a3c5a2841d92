"""What the user sees on a terminal of 40, 60, 80 or 120 columns, and in a file: whole numbers, whole lines."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import termios

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import Progress
from torch import nn

from seqpart import Trainer
from seqpart.report import reporter
from seqpart.report.terminal import as_many, bar_line, plan_table, wrapped
from seqpart.units import format_seconds
from tests.command import ENVIRONMENT, SMALL, call, command

ROW = {
    "partition": "12", "blocks": "1000..1022", "weights": "123.45 MB", "gradients": "123.45 MB", "optimizer": "246.90 MB",
    "activations": "1234.5 KB", "boundary row": "8.2 KB", "micro-batch": "100000", "home": "disk", "peak": "1.67 GB",
}  # fmt: skip
LIMITS = "measured peak 1.67 GB of 2.00 GB, 12345 samples; test accuracy 98.05 %, 114.9 s, 3 d 2 h; twice 4.04 GB"


def on_a_terminal(folder, columns, *arguments):
    """(exit code, all that the command wrote to a terminal of that width)."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        command(arguments), cwd=folder, env={**environment, "TERM": "xterm"}, stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    found = b""
    while True:
        try:
            more = os.read(master, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not more:
            break
        found += more
    os.close(master)
    return process.wait(), found.decode()


def lines_of(text):
    """What stood in a line at any moment: without colours, and each state of a line that was written over."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return [line for line in re.split(r"[\r\n]+", plain) if line.strip()]


@pytest.mark.parametrize(
    "columns", [40, pytest.param(60, marks=pytest.mark.slow), 80, pytest.param(120, marks=pytest.mark.slow)]
)
@pytest.mark.few(1)
def test_a_run_fits_the_terminal(columns, tmp_path):
    """At 80 columns the table's cells were cut to `1.…`, and the bar's line had neither its ETA nor its peak."""
    code, text = on_a_terminal(
        tmp_path, columns, *SMALL, "--epochs", "3", "--partitions", "2", "--output-dir", "out", "--print-schedule"
    )
    lines = lines_of(text)
    assert code == 0, text
    assert max(map(len, lines)) <= columns
    assert "…" not in text
    (head,) = [line for line in lines if line.split()[:2] == ["partition", "blocks"]]
    assert head.rstrip().endswith("peak") and ("optimizer" in head) is (columns == 120)
    assert ("left out, for a wider terminal: " in text) is (columns < 120)
    bars = [line for line in lines if " ETA " in line]
    assert bars
    what = r"partition \d [a-z ]+(epoch \d+)?" if columns >= 60 else r"(partition|p)\d? ?[\w ]+"
    assert all(re.match(rf"{what}.* +\d+ %  ETA (\?|\d+ s)", line) for line in bars)
    if columns != 60:  # there it depends on how long the numbers are
        assert any("peak" in line for line in bars) is (columns >= 80)
    # It stood at the last epoch, and at 82 %, until the last partition had the test rows.
    assert re.match(r"(partition |p)1 test", bars[-1])
    said = " ".join(" ".join(lines).split())
    assert re.search(r"proof: limit 2\.00 GB, measured peak [\d.]+ MB .* violations 0", said)
    assert re.search(r"\[train 0\.1\] L0\+ B0\.0 .* \.\.\.", said)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [pytest.param(60, marks=pytest.mark.slow), 80])
def test_a_refusal_fits_the_terminal(columns, tmp_path):
    code, text = on_a_terminal(tmp_path, columns, "--width", "256", "--depth", "3", "--mem-limit", "50MB", "--dry-run")
    lines = lines_of(text)
    assert code == 3
    assert max(map(len, lines)) <= columns
    assert not [line for line in lines if re.match(r"\s*(GB|MB|KB)\b", line)]
    assert re.search(r"smallest limit that fits: \d+MB", " ".join(" ".join(lines).split()))


@pytest.mark.parametrize("columns", ["", "80"])
def test_a_file_gets_lines_of_any_length_and_every_column_that_columns_has_room_for(columns, tmp_path, capsys, monkeypatch):
    """The table was 133 characters wide in a pipe, whatever COLUMNS said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", columns)
    lines = call(capsys, *SMALL, "--dry-run").out.splitlines()
    (head,) = [line for line in lines if line.split()[:2] == ["partition", "blocks"]]
    (left_out,) = [line for line in lines if line.startswith("left out, for a wider terminal")] or [""]
    assert all(name in head + left_out for name in ROW)
    assert bool(left_out) is bool(columns) and (not columns or len(head) <= 80)
    assert [line for line in lines if line.startswith("full training state ") and "predicted peak" in line]


@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize("method", ["streamed", "sil"])
def test_the_bar_counts_the_test_rows_in_every_partition(method, monkeypatch, tmp_path):
    """They were counted in the last partition alone, when all others were done: it stood at the last epoch until then."""
    shown = []
    console = Console(force_terminal=True, width=120, file=io.StringIO())
    monkeypatch.setattr(Progress, "update", lambda self, task, **line: shown.append(line["description"]))
    trainer = Trainer(
        [lambda: nn.Linear(4, 8), lambda: nn.Linear(8, 3)], mem_limit="2GB", method=method, partitions=2, epochs=1,
        batch_size=8, output_dir=tmp_path / "out",
    )  # fmt: skip
    monkeypatch.setattr(reporter, "_SHOWN_EVERY", 0.0)
    rows = torch.randn(16, 4), torch.arange(16) % 3
    trainer.fit(rows, (torch.randn(64, 4), torch.arange(64) % 3), reporter=reporter.Reporter(console=console))
    tests = [int(share) for line in shown for share in re.findall(r"^partitions? [-01]+ test .* (\d+) %", line)]
    assert len(set(tests)) > 3 and tests == sorted(tests) and tests[-1] == 100, shown


@given(width=st.integers(40, 130))
def test_the_table_leaves_out_whole_columns(width):
    table, left_out = plan_table([ROW, ROW], width)
    kept = [column.header for column in table.columns]
    assert [name for name in ROW if name not in left_out] == kept
    assert {"partition", "blocks", "peak"} <= set(kept)
    assert sum(max(len(name), len(ROW[name])) + 3 for name in kept) <= width
    assert plan_table([ROW], None)[1] == ()


@given(width=st.integers(30, 200))
def test_lines_are_broken_between_words_and_never_before_a_unit(width):
    lines = wrapped(LIMITS, width).split("\n")
    assert max(map(len, lines)) <= width
    assert " ".join(" ".join(lines).split()) == LIMITS
    assert not [line for line in lines if re.match(r"\s*(GB|%|s\b|d\b|h\b|samples)", line)]


@given(
    width=st.integers(20, 200), share=st.floats(0, 1), left=st.one_of(st.none(), st.floats(0, 1e12)),
    speed=st.floats(0, 1e9), peak=st.integers(0, 10**13), epoch=st.integers(1, 10**9),
)  # fmt: skip
def test_the_bar_is_one_line_and_says_first_what_matters_most(width, share, left, speed, peak, epoch):
    spellings = (f"partition 0 train epoch {epoch}", f"p0 train {epoch}", f"p0 e{epoch}")
    line = bar_line(spellings, share, left, speed, peak, peak + 1, width=width)
    assert len(line) < width
    if width >= 40:
        assert f" %  ETA {'?' if left is None else format_seconds(left)}" in line and "p0 " in line.replace("artition ", "")
    if width >= 70:
        assert line.startswith(spellings[0])
    if width >= 110:
        assert "peak" in line


def test_a_line_has_as_many_parts_as_fit():
    assert as_many(("loss 1", "  accuracy", "  9 s"), 17) == "loss 1  accuracy"
    assert as_many(("loss 1", "  accuracy", "  9 s"), None) == "loss 1  accuracy  9 s"
    assert as_many(("loss 1", "  accuracy"), 3) == "loss 1"
    assert as_many(("partition 1 loss 1", "  accuracy"), 10, short="p1 loss 1") == "p1 loss 1"
    assert as_many(("partition 1 loss 1", "  accuracy"), None, short="p1 loss 1") == "partition 1 loss 1  accuracy"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (99.4, "99 s"), (99.6, "2 min"), (5999, "100 min"), (6001, "1 h 40 min"), (18_720, "5 h 12 min"),
     (1_733_800, "20 d 1 h")],
)  # fmt: skip
def test_a_time_is_said_in_units_that_people_use(seconds, text):
    assert format_seconds(seconds) == text or (text == "100 min" and format_seconds(seconds) == "1 h 40 min")


@pytest.mark.slow
def test_what_a_plan_waits_for_stands_on_the_terminals_line_and_goes(tmp_path):
    code, text = on_a_terminal(tmp_path, 40, *SMALL, "--dry-run", "--method", "full")
    assert code == 0, text
    assert re.search(r"\r\x1b\[2Kplanning: block \d of \d is ", text)
    assert "\r\x1b[2Kplan for" in text.replace("\x1b[0m", ""), "the line is gone before the plan is printed"
    assert max(map(len, lines_of(text))) <= 40


def test_elsewhere_a_plan_that_takes_long_says_what_it_waits_for(measured_machine, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert "planning:" not in call(capsys, *SMALL, "--dry-run", "--method", "full").out
    monkeypatch.setattr(reporter, "_SAID", 0.0)
    said = call(capsys, *SMALL, "--dry-run", "--method", "full").out
    assert "planning: block 1 of 4 is measured\n" in said
    assert "planning: the speed of the disk and of matrix products is measured\n" in said
    assert "planning:" not in call(capsys, *SMALL, "--dry-run", "--method", "full", "--quiet").out
