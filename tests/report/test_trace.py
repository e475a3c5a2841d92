"""`--trace FILE`: what ran when, as Perfetto reads it; bounded, and of use after a kill; the run is the same without."""

import itertools
import json
import os
import signal
import threading
from contextlib import closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from seqpart.data.reader import Reader, ReaderThread
from seqpart.device.device import Device
from seqpart.errors import OptionError, StoreError
from seqpart.report.trace import Trace
from seqpart.store.row_file import RowLayout
from seqpart.verify import verify
from tests.command import SMALL, call, end, files, refused, start
from tests.data.test_boundary_cache import made, phase_of
from tests.given import classified, trained


def model():
    return [lambda: nn.Linear(8, 64), *(lambda: nn.Linear(64, 64) for _ in range(4)), lambda: nn.Linear(64, 3)]


def events_of(path):
    return json.loads(path.read_text())


def lanes_of(events):
    return {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    options = {"method": "streamed", "partitions": 3, "epochs": 2, "save_every": 2}
    plain = trained(folder / "plain", model(), (8,), **options)
    found = trained(folder / "traced", model(), (8,), trace=folder / "trace.json", **options)
    return plain, found, events_of(folder / "trace.json")


def test_the_trace_has_the_steps_of_each_stream_memory_and_traffic(traced):
    _, found, events = traced
    lanes = lanes_of(events)
    streams = {name.rstrip(" 23456789") for name in lanes.values()}
    assert {"compute", "optimizer", "passes", "prefetch", "write-back"} <= streams
    spans = [event for event in events if event["ph"] == "X"]
    steps = {event["args"]["kind"] for event in spans if "kind" in event.get("args", {})}
    assert steps == {"LOAD", "FORWARD", "BACKWARD", "UPDATE", "DROP"}
    updates = [event for event in spans if lanes[event["tid"]] == "optimizer"]
    assert len(updates) == 2 * 3 * 3  # epochs, updates of an epoch, partitions
    counted = {event["name"] for event in events if event["ph"] == "C"}
    assert {"memory (MB)", "disk to device (MB/s)", "device to disk (MB/s)"} <= counted
    memory = [event["args"]["value"] for event in events if event["name"] == "memory (MB)"]
    assert 0 < max(memory) <= found.proof.peak / 1e6 + 0.001
    passes = [event["name"] for event in spans if lanes[event["tid"]] == "passes"]
    assert "[train 0-2.1]" in passes and "[test 2]" in passes


def test_what_a_stream_does_does_not_overlap(traced):
    _, _, events = traced
    for lane in lanes_of(events):
        spans = sorted((event["ts"], event["dur"]) for event in events if event["ph"] == "X" and event["tid"] == lane)
        assert all(one[0] + one[1] <= other[0] + 1 for one, other in itertools.pairwise(spans))


def test_a_traced_run_has_the_same_bits(traced):
    plain, found, _ = traced
    assert found.test_loss == plain.test_loss and found.train_losses == plain.train_losses
    ours, theirs = found.state_dict(), plain.state_dict()
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert found.proof.violations == 0


def test_rows_that_are_read_from_the_disk_have_a_line(tmp_path):
    rows, _, labels = made(tmp_path, RowLayout((5, 3), torch.float32))
    phase, trace = phase_of(), Trace(tmp_path / "trace.json")
    with closing(ReaderThread()) as thread:
        thread.watched = trace.watched
        reader = Reader(rows, labels, phase, Device(), thread, seed=3)
        for _ in phase.spans():
            reader.done(reader.take())
        reader.close()
    trace.close()
    events = events_of(tmp_path / "trace.json")
    assert set(lanes_of(events).values()) == {"reader"}
    gathered = [event["name"] for event in events if event["name"].startswith("gather")]
    assert {int(name.removeprefix("gather rows of ")) for name in gathered} == {m for m, _ in phase.spans()}
    assert sum(event["name"] == "read rows" for event in events) >= 1


@pytest.mark.slow
def test_what_a_killed_run_leaves_lacks_the_closing_bracket_alone(tmp_path):
    arguments = [*SMALL, "--method", "full", "--epochs", "2000", "--output-dir", "out", "--trace", "trace.json"]
    killed = end(start(tmp_path, *arguments, until="epoch 9 "), signal.SIGKILL)
    assert killed.code == -signal.SIGKILL
    events = json.loads((tmp_path / "trace.json").read_text() + "]")
    assert sum(event["name"].startswith("B0.") for event in events) > 50


def test_a_trace_that_cannot_be_written_is_refused_before_anything_is_planned(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(call(capsys, *SMALL, "--trace", "no/trace.json"), 6, "cannot make no/trace.json")
    assert refused(
        call(capsys, *SMALL, "--trace", "t.json", "--dry-run"), 2, "--dry-run trains nothing that --trace could show"
    )
    assert files(tmp_path) == {}
    with pytest.raises(OptionError, match="verify runs training several times"):
        verify(model(), classified(8, (8,)), mem_limit="2GB", trace="t.json")


@pytest.mark.slow
def test_a_run_that_goes_on_may_be_traced_and_need_not(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [*SMALL, "--method", "full", "--epochs", "3000", "--output-dir", "out", "--trace", "trace.json"]
    assert end(start(tmp_path, *arguments, until="epoch 3 "), signal.SIGTERM).code == 130
    first = (tmp_path / "trace.json").read_bytes()
    assert end(start(tmp_path, "--resume", "out", until="epoch "), signal.SIGTERM).code == 130
    assert (tmp_path / "trace.json").read_bytes() == first, "it was not asked for again"
    again = start(tmp_path, "--resume", "out", "--trace", "second.json", until="epoch ")
    assert end(again, signal.SIGTERM).code == 130
    assert json.loads((tmp_path / "second.json").read_text())


@settings(max_examples=30, deadline=None)
@given(
    most=st.integers(2_000, 60_000),
    spans=st.lists(st.tuples(st.sampled_from(["a", "b\n\"", "é"]), st.text(max_size=40), st.integers(0, 10**9)), max_size=400),
)  # fmt: skip
def test_a_trace_is_bounded_and_always_whole(tmp_path_factory, most, spans):
    path = tmp_path_factory.mktemp("bounded") / "trace.json"
    trace = Trace(path, most=most)
    for stream, what, nbytes in spans:
        with trace.watched(stream, what, link="disk", nbytes=nbytes):
            trace.memory(nbytes)
        trace._flush()
        json.loads(path.read_text() + "]")
    trace.close()
    found = events_of(path)
    assert path.stat().st_size <= most
    kept = sum(event["ph"] == "X" for event in found)
    assert kept == len(spans) or (trace.is_full and kept < len(spans) and found[-1]["name"] == "the trace is full")


def test_threads_that_do_the_same_have_lines_of_their_own(tmp_path):
    trace, both = Trace(tmp_path / "trace.json"), threading.Barrier(2)

    def work():
        with trace.watched("prefetch", "home"):
            both.wait()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.close()
    assert sorted(lanes_of(events_of(tmp_path / "trace.json")).values()) == ["prefetch", "prefetch 2"]


def test_a_disk_that_is_full_ends_the_trace_and_not_the_run(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    trace._file = os.open("/dev/full", os.O_WRONLY)
    for _ in range(3):
        trace.span("compute", "x" * 9000, 0.0, 1.0)
    trace.close()
    assert trace.error == "No space left on device"
    with pytest.raises(StoreError, match="cannot make"):
        Trace(tmp_path / "no" / "trace.json")
