"""benchmarks/gpu/assumptions.py: what it measures of the simulated device is what that simulates, and makes a table of it."""

import dataclasses
import json

import pytest
import torch

from benchmarks import record
from benchmarks.gpu import assumptions, measures
from benchmarks.gpu.measures import Row
from seqpart.device.card import Hardware, load
from seqpart.device.opening import open_device
from seqpart.errors import OptionError

CARD = "rtx4090"


@pytest.fixture
def results(monkeypatch, tmp_path):
    """The folder of results, for this test."""
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    return tmp_path


def test_a_device_that_was_measured_is_simulated_by_the_table_that_was_written(results, capsys):
    path = results / "mine.toml"
    assert assumptions.main(["--device", f"sim:{CARD}", "--quick", "--folder", str(results), "--calibrate", str(path)]) == 0
    found, simulated = load(str(path)), load(CARD)
    assert (found.memory, found.context) == (simulated.memory, simulated.context)
    for name in ("h2d", "d2h", "copy_latency", "launch", "disk_read", "disk_write"):
        assert getattr(found, name) == pytest.approx(getattr(simulated, name), rel=0.1), name
    # A kernel of so small a test takes as long to launch as to run, or half as long.
    for ours, theirs in [
        (found.memory_bandwidth, simulated.memory_bandwidth),
        *((found.flops[dtype], simulated.flops[dtype]) for dtype in simulated.flops),
    ]:
        assert 0.4 * theirs < ours < theirs
    assert set(found.sources) == {field.name for field in dataclasses.fields(Hardware)} - {"name", "sources"}
    assert open_device(f"sim:{path}").total_memory() == simulated.memory
    assert "failed" not in capsys.readouterr().out
    rows = json.loads((results / "gpu-assumptions-sim.json").read_text())["result"]["rows"]
    assert {"granule of the allocator", "both ways at once, together"} <= {row["what"] for row in rows}


def test_a_measure_that_fails_says_so_and_the_others_are_taken(monkeypatch, results, capsys):
    def broken(bench):
        raise RuntimeError("no such luck\nand more")
        yield

    monkeypatch.setattr(assumptions, "MEASURES", (broken, measures.granule))
    assert assumptions.main(["--device", "sim", "--quick"]) == 1
    said = capsys.readouterr().out
    assert "failed: RuntimeError: no such luck\n" in said
    assert "granule of the allocator" in said


def test_what_was_not_measured_is_taken_from_what_is_assumed_or_refused():
    device, row = open_device("sim"), Row(what="", field="h2d", measured=3e9)
    text, missing = assumptions.calibrated(device, [row], load(CARD))
    assert "h2d = 3000000000.0\n" in text
    assert "h2d" not in missing and "flops.float32" in missing
    with pytest.raises(OptionError, match=r"memory, context, flops\.float32, .* could not be measured, and no assume"):
        assumptions.calibrated(device, [row], None)


def test_a_gpu_that_is_not_there_is_refused_in_words(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert assumptions.main([]) == 2
    assert "refused: --device cuda: no usable CUDA GPU was found." in capsys.readouterr().err
    with pytest.raises(SystemExit):
        assumptions.main(["--device", "cpu"])


def test_a_card_is_known_by_its_name(monkeypatch):
    device = open_device("sim")
    monkeypatch.setattr(device, "hardware", None)
    assert assumptions.table_for(device, "") == load("rtx3060-12gb")
    assert assumptions.table_for(device, "h100") == load("h100")
    monkeypatch.setattr(type(device), "name", "NVIDIA H200")
    assert assumptions.table_for(device, "") is None
