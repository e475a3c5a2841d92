"""benchmarks/gpu/overlap.py: how long parts of an update are busy, from a profiler's trace and from the simulated device."""

import json

import pytest
import torch

from benchmarks import record
from benchmarks.gpu import overlap
from benchmarks.gpu.overlap import busy_of, covered

PINNED = "Memcpy HtoD (Pinned -> Device)"


def event(cat, name, began, took):
    return {"cat": cat, "name": name, "ts": began * 1e6, "dur": took * 1e6, "args": {"stream": 7}}


def test_the_length_of_spans_counts_what_they_share_once():
    assert covered([(0, 2), (1, 3), (5, 6), (5.25, 5.5)]) == 4
    assert covered([]) == 0


def test_a_trace_says_how_long_each_part_was_busy():
    found = busy_of(
        [
            {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 99e6},
            {"ph": "M", "name": "process_name"},
            event("kernel", "sgemm", 1, 2),
            event("kernel", "add", 2, 2),
            event("gpu_memset", "Memset (Device)", 4, 0.5),
            event("gpu_memcpy", PINNED, 0, 3),
            event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 3, 0.25),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 4, 2),
            event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 4.5, 0.5),
        ]
    )
    assert (found.wall, found.computing, found.up, found.down) == (6, 4, 3.25, 2)
    assert found.ratio == 1.5
    assert found.copies[PINNED] == 3
    assert found.per_update(2).copies[PINNED] == 1.5
    assert found.per_update(2).ratio == 1.5


def test_copies_are_known_by_rocm_s_names_too():
    found = busy_of([event("gpu_memcpy", "CopyHostToDevice", 0, 1), event("gpu_memcpy", "CopyDeviceToHost", 1, 2)])
    assert (found.computing, found.up, found.down) == (0, 1, 2)


def test_a_trace_without_a_gpu_is_no_measurement():
    with pytest.raises(RuntimeError, match="is CUPTI usable"):
        busy_of([{"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1}])


def test_the_simulated_device_says_it_of_itself(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    words = [
        "--device",
        "sim",
        "--width",
        "128",
        "--depth",
        "4",
        "--partitions",
        "3",
        "--updates",
        "1",
        "--folder",
        str(tmp_path),
    ]
    assert overlap.main(words) == 0
    found = json.loads((tmp_path / "gpu-overlap-sim.json").read_text())["result"]
    assert found["ratio"] >= 1
    assert min(found[part] for part in ("computing", "up", "down")) > 0
    assert (found["partitions"], found["violations"]) == (3, 0)
    assert "wall / longest" in capsys.readouterr().out


def test_without_a_gpu_it_refuses_in_words(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert overlap.main([]) == 2
    assert "refused: --device cuda: no usable CUDA GPU was found." in capsys.readouterr().err
    with pytest.raises(SystemExit):
        overlap.main(["--device", "cpu"])
