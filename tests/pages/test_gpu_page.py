"""benchmarks/gpu/*.sh: every part runs whatever became of the others, and one page says how each ended."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.gpu import page

HOUSE = Path(__file__).parents[2]
PYTHON = f"""#!/usr/bin/env bash
case "$*" in
    *"pip install"*) exit ${{PIP:-0}} ;;
    *gpu.page*) exec {sys.executable} "$@" ;;
    *gpu.sanitized*) echo "no such thing" >&2; exit 3 ;;
    *"pytest"*) echo "FAILED tests/a.py::test_b - wrong"; echo "1 failed"; kill -9 $$ ;;
    *--trace*) echo "{{}}" >"${{@: -1}}"; echo "ran $2" ;;
    *calibrate*) echo "name = 1" >"${{@: -1}}"; echo measured ;;
    *) echo "ran $2" ;;
esac
"""
PARTS = {
    "smoke": ({"probe": "ok", "verify": "ok", "doctor": "ok", "tests": "timed out", "sanitizer": "failed 3"}, 150),
    "contract": ({"assumptions": "ok", "verified": "ok", "resumed": "ok", "grid": "ok", "tests": "timed out"}, 300),
    "speed": ({"llama": "ok", "overlap": "ok", "llama-3B": "ok", "frontier": "ok", "peers": "ok"}, 420),
}


@pytest.fixture
def run(tmp_path):
    """Runs a script with a Python that answers at once."""
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text(PYTHON)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    out.mkdir()

    def run(name, *words, **more):
        environment = {**os.environ, "PYTHON": str(python), "OUT": str(out), "CARD": "", **more}
        return subprocess.run(
            ["bash", f"benchmarks/gpu/{name}.sh", *words], cwd=HOUSE, env=environment, capture_output=True, text=True,
            timeout=60, check=False,
        ), out  # fmt: skip

    return run


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_fails_keeps_no_other_from_running(run, name):
    parts, _ = PARTS[name]
    done, out = run(name)
    assert done.returncode == int(set(parts.values()) != {"ok"}), done.stderr
    text = (out / "page.txt").read_text()
    assert done.stdout.endswith(text)
    lines = [line for line in text.splitlines()[1:-1] if not line.startswith(" ")]
    assert {line.split()[0]: line[22:31].strip() for line in lines} == parts
    assert ("FAILED tests/a.py::test_b - wrong" in text) is ("tests" in parts)
    assert ("no such thing" in text) is ("sanitizer" in parts)
    failed = sum(ended != "ok" for ended in parts.values())
    assert text.endswith(f"{failed} parts did not end well\n")
    assert "ran " in (out / "log.txt").read_text()
    assert (out / "gpu-calibrated.toml").exists() is (name == "contract")
    assert (out / "trace.json").exists() is (name == "speed")
    assert len(list(out.iterdir())) <= 8


@pytest.mark.parametrize("name", PARTS)
def test_a_call_takes_no_longer_than_it_says(name):
    """Its parts may ask for more together: each gets what is left of the call."""
    text = (HOUSE / "benchmarks" / "gpu" / f"{name}.sh").read_text()
    parts, limit = PARTS[name]
    assert f" limit={limit}\n" in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("part ")] == list(parts)


def test_parts_for_which_no_time_is_left_are_left_out(run, tmp_path):
    late = HOUSE / "benchmarks" / "gpu" / "smoke.sh"
    script = tmp_path / "late.sh"
    script.write_text(late.read_text().replace("limit=150", "limit=10").replace('"$(dirname "$0")', f'"{late.parent}'))
    environment = {**os.environ, "PYTHON": str(tmp_path / "python"), "CARD": ""}
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stdout.count("left out") == 5 and "5 parts did not end well" in done.stdout


def test_wheels_that_cannot_be_installed_end_the_call(run, tmp_path):
    """The parts after it failed one by one for want of a package, with a GPU held all the while."""
    (tmp_path / "wheels").mkdir()
    done, _ = run("smoke", str(tmp_path / "wheels"), PIP="1")
    assert done.returncode == 3 and done.stderr.startswith("refused: benchmarks/gpu/smoke.sh could not install the wheels")
    assert run("smoke", str(tmp_path / "wheels"))[0].returncode == 1


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
    "gpu-probe-cuda": {"rows": [{**ROW, "what": "a look", "unit": "s", "assumed": None, "measured": 2e-3}]},
    "gpu-verified-cuda": {"ViT": {"equal": 9, "partitions": 2, "seconds": 1.0}, "LoRA": {"left out": "no bitsandbytes"}},
    "gpu-resumed-cuda": {"killed": {"killed": 3}, "equal": True},
    "gpu-llama-cuda": {"size": "1.1B", "arms": {"8GB": {"tokens": 1e4, "peak": 8e9, "ram": 1e10}}, "left_out": ["plain"]},
    "gpu-llama-3B-cuda": {"size": "3B", "arms": {"16GB": {"refused": "no", "peak": 0, "ram": 0}}, "left_out": []},
    "peers-gpu": {"S": {"fsdp2": {"seconds": 1.0, "peak": 3e9}}},
}  # fmt: skip
SAID = [
    "copies up: 0.50 of what is assumed", "granule: 1.0 MB, assumed 0.0", "could not be measured: disk",
    "wall / longest 1.10", "peak 2.000 GB, predicted 2.020 (+1.0%), violations 0", "2 cells, 0 violations, left out 1",
    "off by +3.0% to +3.0% in 1 cells", "a look 2000 us", "ViT: 9 comparisons equal", "LoRA: left out: no bitsandbytes",
    "3 kill(s), then the weights", "1.1B 8GB: 10,000 tokens/s", "left out: plain", "3B 16GB: no (",
    "L plain: 0.500 s, 8.00 GB", "L 2GB: no room", "S fsdp2: 1.000 s, 3.00 GB",
]  # fmt: skip


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A call's folder, whose parts ended well and left their results."""
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    (tmp_path / "begun").touch()
    (tmp_path / "parts.tsv").write_text("".join(f"{part}\t7\t0\n" for part in page.FIGURES))
    for name, result in RESULTS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"result": result}))
    return tmp_path


def test_the_page_has_the_main_figures_of_every_part(folder, capsys):
    assert page.main([str(folder)]) == 0
    said = capsys.readouterr().out
    for text in SAID:
        assert text in said
    assert said.count("of what is assumed") == 1
    assert len(said) < 10_000


def test_results_of_an_earlier_call_are_not_this_one_s(folder, capsys):
    for path in folder.glob("*.json"):
        os.utime(path, (0, 0))
    (folder / "overlap.log").write_text("refused: no GPU\n\n")
    assert page.main([str(folder)]) == 0
    said = capsys.readouterr().out
    assert "refused: no GPU" in said and "no output" in said
    assert not any(text in said for text in SAID)


def test_a_result_of_another_form_spoils_no_page(folder, capsys):
    (folder / "gpu-overlap-cuda.json").write_text('{"result": {}}')
    assert page.main([str(folder)]) == 0
    said = capsys.readouterr().out
    assert "gpu-overlap-cuda.json is not what was expected: KeyError" in said
    assert "S fsdp2" in said
