"""benchmarks/gpu.sh: every part runs whatever became of the others, and one page says how each ended."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_page, record

HOUSE = Path(__file__).parents[2]
PYTHON = f"""#!/usr/bin/env bash
case "$*" in
    *gpu_page*) exec {sys.executable} "$@" ;;
    *gpu_sanitized*) echo "no such thing" >&2; exit 3 ;;
    *"pytest"*) kill -9 $$ ;;
    *calibrate*) echo "name = 1" >"${{@: -1}}"; echo measured ;;
    *) echo "ran $2" ;;
esac
"""


def test_a_part_that_fails_keeps_no_other_from_running(tmp_path):
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text(PYTHON)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    out.mkdir()
    environment = {**os.environ, "PYTHON": str(python), "OUT": str(out), "CARD": ""}
    done = subprocess.run(
        ["bash", "benchmarks/gpu.sh"], cwd=HOUSE, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr
    page = (out / "page.txt").read_text()
    assert done.stdout.endswith(page)
    ended = {line.split()[0]: line[22:31].strip() for line in page.splitlines()[1:-1]}
    assert ended == {
        **dict.fromkeys(("assumptions", "verify", "overlap", "frontier", "grid", "peers"), "ok"),
        "sanitizer": "failed 3", "tests": "timed out",
    }  # fmt: skip
    assert "no such thing" in page
    assert page.endswith("2 parts did not end well\n")
    assert "ran benchmarks.gpu.overlap" in (out / "log.txt").read_text()
    assert (out / "gpu-calibrated.toml").exists()


def test_its_parts_take_less_than_nine_minutes_together():
    text = (HOUSE / "benchmarks" / "gpu.sh").read_text()
    seconds = [int(line.split()[2]) + 5 for line in text.splitlines() if line.startswith("part ")]
    assert len(seconds) == 8
    assert sum(seconds) < 9 * 60


ROW = {"what": "copies up", "unit": "B/s", "assumed": 25e9, "measured": 12.5e9, "note": ""}
RESULTS = {
    "gpu-assumptions-cuda": {
        "device": "a GPU",
        "rows": [
            ROW, {**ROW, "measured": 24e9}, {**ROW, "what": "granule", "unit": "B", "assumed": 512, "measured": 1e6},
            {**ROW, "what": "disk", "measured": None, "note": "failed: OSError: full"},
        ],
    },
    "gpu-overlap-cuda": {
        "wall": 1.1, "computing": 1.0, "up": 0.5, "down": 0.4, "ratio": 1.1, "predicted": 1.05, "peak": 2e9,
        "predicted peak": 2.02e9, "violations": 0,
    },
    "contract_grid-gpu": {
        "cells": [{"peak": 100, "predicted": 103, "violation": False}, {"peak": None, "predicted": None, "violation": False}],
        "left_out": ["gpt2_xl 8GB"],
    },
    "gpu-frontier-gpu": {"network": "L", "arms": {"plain": {"seconds": 0.5, "peak": 8e9}, "2GB": {"refused": "no room"}}},
    "peers-gpu": {"S": {"fsdp2": {"seconds": 1.0, "peak": 3e9}}},
}  # fmt: skip
SAID = [
    "copies up: 0.50 of what is assumed", "granule: 1.0 MB, assumed 0.0", "could not be measured: disk",
    "wall / longest 1.10", "peak 2.000 GB, predicted 2.020 (+1.0%), violations 0", "2 cells, 0 violations, left out 1",
    "off by +3.0% to +3.0% in 1 cells", "L plain: 0.500 s, 8.00 GB", "L 2GB: no room", "S fsdp2: 1.000 s, 3.00 GB",
]  # fmt: skip


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A call's folder, whose parts ended well and left their results."""
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    (tmp_path / "begun").touch()
    (tmp_path / "parts.tsv").write_text("".join(f"{part}\t7\t0\n" for part in gpu_page.FIGURES))
    for name, result in RESULTS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"result": result}))
    return tmp_path


def test_the_page_has_the_main_figures_of_every_part(folder, capsys):
    assert gpu_page.main([str(folder)]) == 0
    said = capsys.readouterr().out
    for text in SAID:
        assert text in said
    assert said.count("of what is assumed") == 1


def test_results_of_an_earlier_call_are_not_this_one_s(folder, capsys):
    for path in folder.glob("*.json"):
        os.utime(path, (0, 0))
    (folder / "overlap.log").write_text("refused: no GPU\n\n")
    assert gpu_page.main([str(folder)]) == 0
    said = capsys.readouterr().out
    assert "refused: no GPU" in said and "no output" in said
    assert not any(text in said for text in SAID)


def test_a_result_of_another_form_spoils_no_page(folder, capsys):
    (folder / "gpu-overlap-cuda.json").write_text('{"result": {}}')
    assert gpu_page.main([str(folder)]) == 0
    said = capsys.readouterr().out
    assert "gpu-overlap-cuda.json is not what was expected: KeyError" in said
    assert "S fsdp2" in said
