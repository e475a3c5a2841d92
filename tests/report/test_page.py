"""`seqpart report DIR`: one page that needs nothing from elsewhere, of a run that is done, killed, resumed or damaged."""

import fcntl
import json
import math
import shutil
import signal
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from seqpart import Trainer
from seqpart.checkpoint.marker import LOCK, MARKER
from seqpart.cli.commands import PAGE
from seqpart.device.sampler import MEMORY, Timeline
from seqpart.errors import Interrupted, SeqpartError
from seqpart.report.page import Axis, Series, document, figure, thinned, ticks
from seqpart.report.page_data import read_run
from seqpart.train import main, run_command
from seqpart.units import format_size
from tests.command import SMALL, Ran, end, refused, start
from tests.given import trained

VOID = {"meta", "path", "br"}


class Page(HTMLParser):
    """Its words, and what it would fetch. Raises where a tag is not closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.words, self.fetched, self.drawings = [], [], [], 0
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.drawings += tag == "svg"
        self.fetched += [value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.drawings += tag == "svg"

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def report(capsys, *arguments):
    capsys.readouterr()
    code = run_command("report", list(map(str, arguments)))
    said = capsys.readouterr()
    return Ran(code, said.out, said.err)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    options = ["--method", "streamed", "--partitions", "2", "--epochs", "2", "--ema", "0.9"]
    assert main([*SMALL, *options, "--output-dir", str(folder / "out")]) == 0
    return folder / "out"


def test_the_page_of_a_finished_run_shows_plan_memory_losses_time_and_proof(finished, tmp_path, capsys):
    ran = report(capsys, finished, "-o", tmp_path / "page.html")
    assert (ran.code, ran.err) == (0, "") and ran.out.startswith(f"{tmp_path / 'page.html'}: the run is finished")
    text = (tmp_path / "page.html").read_text()
    page, result = Page(text), json.loads((finished / "result.json").read_text())
    assert page.drawings == 3  # memory, loss, accuracy
    assert not page.fetched and "@import" not in text and "url(" not in text and "<script" not in text
    proof = result["proof"]
    for words in (
        f"highest value {format_size(proof['peak'])}", f"limit {format_size(proof['limit'])}", proof["source"],
        f"{result['test_loss']:.4f} test loss", f"{result['average_loss']:.4f} test loss of the average",
        "violations 0", "method streamed", "boundary row", "forward passes", "optimizer steps",
        "outside of steps", "predicted peak",
    ):  # fmt: skip
        assert words in page.text, words
    assert "prefers-color-scheme:dark" in text and 'name="viewport"' in text
    assert "Missing data" not in page.text


def test_without_a_name_the_page_goes_into_the_directory_of_the_run(finished, capsys):
    assert report(capsys, finished).code == 0
    Page((finished / PAGE).read_text())
    (finished / PAGE).unlink()


def test_the_seconds_of_the_steps_are_those_of_the_run(finished):
    found = read_run(finished)
    assert set(found.steps) == {"load", "forward", "backward", "update", "drop"}
    assert 0 < sum(one.seconds for one in found.steps.values()) <= found.seconds
    updates = 2 * -(-1438 // 64)
    assert found.steps["update"].count == 2 * updates
    assert found.steps["drop"].bytes_written > 0


def test_the_memory_over_time_reaches_the_peak_of_the_proof_and_covers_the_run(finished):
    found = read_run(finished)
    (curve,) = found.curves
    peak = found.result.proof.peak  # also of the average's evaluation, a run of its own that comes after
    assert 0.98 * peak <= max(held for _, held in curve.points) <= peak
    assert curve.limit == found.result.proof.limit == 2 * 10**9
    assert [at for at, _ in curve.points] == sorted(at for at, _ in curve.points)
    assert abs(curve.points[-1][0] - found.seconds) < 1.5


def log(*events):
    return [json.dumps({"seconds": float(n), **event}) for n, event in enumerate(events)]


def passed(epoch, loss=1.0):
    return {"event": "phase", "phase": f"[train 0.{epoch}]", "epoch": epoch, "loss": loss, "accuracy": None}


STARTED, SAVED = {"event": "start"}, {"event": "checkpoint"}
LOGS = {
    "killed behind a checkpoint in its second epoch": (
        [passed(1), SAVED | {"phase": 1, "updates": 7}, passed(2, 2.0), passed(3, 2.0)],
        [STARTED | {"checkpoint": {"phase": 1, "updates": 7}}, passed(2), passed(3)],
        [1, 2, 3],
    ),
    "by an older version, which did not say from where it went on": (
        [passed(1), SAVED | {"phase": 1, "updates": 7}, passed(2, 2.0)], [STARTED, passed(2)], [1, 2],
    ),
    "from the checkpoint before the latest": (
        [passed(1), SAVED | {"phase": 1, "updates": 0}, passed(2, 2.0), SAVED | {"phase": 2, "updates": 0}, passed(3, 2.0)],
        [STARTED | {"checkpoint": {"phase": 1, "updates": 0}}, passed(2)], [1, 2],
    ),
    "pieces of one epoch, all of which count": (
        [passed(1), passed(1), SAVED | {"phase": 4, "updates": 1}],
        [STARTED | {"checkpoint": {"phase": 4, "updates": 1}}, passed(1)],
        [1, 1, 1],
    ),
    "damaged": ([passed(1)], [STARTED | {"checkpoint": [3]}, STARTED | {"checkpoint": {"phase": []}}, passed(2)], [1, 2]),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_passes_that_a_killed_run_made_again_are_shown_once(name, finished, tmp_path):
    """The epoch that was under way at the checkpoint, and those behind it, stood there twice."""
    before, after, epochs = LOGS[name]
    shutil.copytree(finished, tmp_path / "out")
    (tmp_path / "out" / "events.jsonl").write_text("\n".join(log(STARTED, *before, *after)) + "\n")
    found = read_run(tmp_path / "out").passes
    assert [one.epoch for one in found] == epochs
    assert all(one.loss == 1.0 for one in found)


def test_the_page_of_an_interrupted_run_of_a_script_says_how_the_script_goes_on(tmp_path, capsys):
    """It advised the command, which refuses such runs."""
    rows = torch.randn(24, 8), torch.arange(24) % 4
    trainer = Trainer([lambda: nn.Linear(8, 4)], mem_limit="2GB", method="full", output_dir=tmp_path / "out", quiet=True)
    with pytest.raises(Interrupted):
        trainer.fit(rows, callbacks=[SimpleNamespace(on_step=lambda event: signal.raise_signal(signal.SIGTERM))])
    assert report(capsys, tmp_path / "out").code == 0
    assert f'Resume with: fit(..., resume="{tmp_path / "out"}")' in Page((tmp_path / "out" / PAGE).read_text()).text


@pytest.mark.slow
def test_a_killed_run_has_a_page_that_says_what_is_missing_and_a_resumed_one_has_both_processes(tmp_path, capsys):
    arguments = [*SMALL, "--method", "full", "--epochs", "2000", "--save-every", "20", "--output-dir", "out"]
    killed = end(start(tmp_path, *arguments, until="epoch 4 "), signal.SIGKILL)
    assert killed.code == -signal.SIGKILL
    ran = report(capsys, tmp_path / "out")
    page = Page((tmp_path / "out" / PAGE).read_text())
    assert ran.code == 0 and "the run is killed" in ran.out
    assert "the proof and the final test: the run is killed. Resume with: python -m seqpart.train --resume" in page.text
    assert "Proof of the limit" not in page.text and page.drawings == 3
    epochs = json.loads((tmp_path / "out" / "plan.json").read_text())  # there, and whole
    assert epochs["method"] == "full"
    again = end(start(tmp_path, "--resume", "out", until="epoch "), signal.SIGTERM)
    assert again.code == 130, again.err
    found = read_run(tmp_path / "out")
    assert (found.processes, found.state, len(found.curves)) == (2, "interrupted", 2)
    first, second = found.curves
    assert first.points[-1][0] <= second.points[0][0] + 0.2
    assert [one.at for one in found.passes] == sorted(one.at for one in found.passes)
    assert [one.epoch for one in found.passes] == list(range(1, len(found.passes) + 1))
    assert "another process went on there" in Page(document(found)).text


def test_a_run_that_is_under_way_has_a_page(tmp_path, capsys):
    seen = []

    class Looks:
        def on_epoch(self, event):
            seen.append(report(capsys, tmp_path / "out"))

    x, y = torch.randn(32, 8), torch.arange(32) % 3
    options = {"mem_limit": "2GB", "method": "full", "epochs": 2, "batch_size": 8, "quiet": True}
    Trainer([lambda: nn.Linear(8, 3)], output_dir=tmp_path / "out", **options).fit((x, y), (x, y), callbacks=[Looks()])
    assert len(seen) == 2 and all(ran.code == 0 and "the run is under way" in ran.out for ran in seen)


def test_a_directory_that_is_none_of_a_run_is_refused_in_words(tmp_path, finished, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert refused(report(capsys, tmp_path / "none"), 2, "is not a directory. Give the directory of a run")
    assert refused(report(capsys, tmp_path / "file"), 2, "is not a directory")
    assert refused(report(capsys, tmp_path / "empty"), 2, "is not the directory of a run: it has no seqpart-run.json")
    assert refused(report(capsys, finished, "-o", tmp_path), 2, "is a directory. Give the name of a file")
    assert refused(report(capsys, finished, "-o", tmp_path / "no" / "page.html"), 2, "is not a directory. Make it")
    assert list((tmp_path / "empty").iterdir()) == []


def test_what_a_directory_is_called_cannot_become_part_of_the_page(finished, tmp_path):
    named = tmp_path / "<b>&\"'"
    shutil.copytree(finished, named)
    text = document(read_run(named))
    Page(text)
    assert "<b>&" not in text and "&lt;b&gt;&amp;" in text


def test_a_run_without_the_files_of_this_version_has_a_page(finished, tmp_path):
    old = shutil.copytree(finished, tmp_path / "old")
    (old / MEMORY).unlink()
    lines = [json.loads(line) for line in (old / "events.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in line.items() if name != "time"} for line in lines if line["event"] != "time"]
    (old / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    page = Page(document(read_run(old)))
    assert "memory over time: memory.jsonl: No such file or directory" in page.text
    assert "seconds by kind of step: the run ended before any were logged, or is of an older version" in page.text
    assert "Proof of the limit" in page.text


def test_a_run_that_is_under_way_has_not_ended(finished, tmp_path, capsys):
    """It was said to have ended before it told where its time went."""
    live = shutil.copytree(finished, tmp_path / "live")
    lines = (live / "events.jsonl").read_text().splitlines(keepends=True)
    (live / "events.jsonl").write_text("".join(line for line in lines if json.loads(line)["event"] in ("start", "plan")))
    (live / "result.json").unlink()
    marker = json.loads((live / MARKER).read_text())
    (live / MARKER).write_text(json.dumps({**marker, "state": "running"}))
    with open(live / LOCK, "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = report(capsys, live).out
    assert "the run is under way\n" in said and "the run is under way and has logged none yet" in said and "ended" not in said
    assert "ended before any were logged" in report(capsys, live).out, "whoever held the lock is gone"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_directory_gives_a_page_or_a_refusal_and_never_another_error(finished, tmp_path_factory, data):
    spoilt = shutil.copytree(finished, tmp_path_factory.mktemp("spoilt") / "out")
    name = data.draw(st.sampled_from(["events.jsonl", MEMORY, "plan.json", "result.json", "job.json", "seqpart-run.json"]))
    held = (spoilt / name).read_bytes()
    at = data.draw(st.integers(0, len(held)))
    other = data.draw(st.sampled_from([b"", b"\x00", b"null", b"{}", b"[1]", b"-1", b'"']))
    (spoilt / name).write_bytes(held[:at] + (other + held[at + len(other) :] if other else b""))
    try:
        text = document(read_run(spoilt))
    except SeqpartError:
        assert name == "seqpart-run.json"
    else:
        Page(text)


def test_a_diverged_run_has_a_page(tmp_path):
    found = trained(tmp_path, [lambda: nn.Linear(4, 3)], (4,), method="full", epochs=2)
    log = found.weights.parent / "events.jsonl"
    log.write_text(log.read_text().replace('"loss": ', '"loss": NaN, "was": '))
    Page(document(read_run(found.weights.parent)))


# --- the file of memory over time, and figures ---------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    looks=st.lists(st.tuples(st.floats(0.001, 900), st.integers(1, 10**12)), min_size=1, max_size=300), late=st.integers(0, 299)
)
def test_memory_over_time_keeps_every_peak(looks, late, tmp_path_factory):
    path, clock = tmp_path_factory.mktemp("timeline") / MEMORY, Clock()
    with clock.instead():
        line = Timeline()
        for number, (wait, held) in enumerate(looks):
            if number == min(late, len(looks) - 1):
                line.leave(path, limit=5, source="test", add=False)
            clock.now += wait
            line.note(held)
        line.close()
    head, *points = (json.loads(text) for text in path.read_text().splitlines())
    assert head["limit"] == 5 and head["source"] == "test"
    assert max(held for _, held in points) == max(held for _, held in looks)
    assert [at for at, _ in points] == sorted(at for at, _ in points)


def test_memory_over_time_grows_with_the_logarithm_of_the_time(tmp_path):
    clock, path = Clock(), tmp_path / MEMORY
    with clock.instead():
        line = Timeline()
        line.leave(path, limit=5, source="test", add=False)
        for _ in range(7 * 24 * 3600):  # a week
            clock.now += 1
            line.note(10**9)
        line.close()
    assert path.stat().st_size < 300_000


class Clock:
    def __init__(self):
        self.now, self.patch = 0.0, pytest.MonkeyPatch()

    def instead(self):
        self.patch.setattr("seqpart.device.sampler.time.monotonic", lambda: self.now)
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.patch.undo()


@given(low=st.floats(-1e12, 1e12), size=st.floats(1e-6, 1e12))
def test_an_axis_has_a_few_round_numbers(low, size):
    high = low + size
    if high - low < 1e-9 * abs(low) or high == low:
        return
    found = ticks(low, high)
    assert 1 <= len(found) <= 9
    assert all(low - 1e-6 * size <= value <= high + 1e-6 * size for value in found)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e12)), min_size=1, max_size=5000))
@settings(max_examples=20, deadline=None)
def test_many_points_become_few_and_the_highest_is_among_them(points):
    found = thinned(points)
    assert len(found) <= 701
    assert max(value for _, value in found) == max(value for _, value in points)
    assert found[-1] == points[-1]


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=8))
def test_a_figure_draws_what_is_finite(values):
    axis = Axis(text=lambda value: f"{value:g}", whole=False)
    finite = [value for value in values if math.isfinite(value) and abs(value) < 1e100]
    points = [(float(n), value) for n, value in enumerate(values) if not math.isfinite(value) or value in finite]
    text = figure("figure", [Series(name="one", look="s1", points=points)], axis, axis)
    Page(text)
    assert "nan" not in text and "inf" not in text
