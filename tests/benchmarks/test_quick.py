"""Every benchmark that README or a page of docs/ names runs to its end in its quick form, and keeps nothing."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.command import ENVIRONMENT, SECONDS

ROOT = Path(__file__).parents[2]
SAID = {
    "prediction": "1 of 1 within +5 % and -1 %, limit kept by 1",
    "prediction architectures": "1 of 1 within +5 % and -1 %, limit kept by 1",
    "streamed_speed S": "of max(compute, io)",
    "streamed_speed smallest": "L would train at",
    "streamed_speed states": "8bit: ",
    "frontier": "right end: ",
    "small_jobs epochs": "epoch of right: ",
    "small_jobs start": "start of --dry-run",
    "partition_speed": "one SIL epoch, seqpart: ",
    "what_fits": "a small vit",
    "long_logits": "GB of logits in ",
    "bf16_rounding": "| paper | bfloat16, stochastic, moments too | ",
    "widest_layer": '"violations": 0',
    "models": "| yes | ",
    "census page": "equal shufflenet_v2_x0_5",
    "rank_kills": "1 runs, 1 with a kill: 1 have the weights",
    "scaling": "sends 1.0000 x the formula",
    "scaling_simulated": "the network's bytes at 2 to 8",
    "campaign": "2 cases, 0 with violations",
    "peers.compare S": "ours ",
    "full_size": "small gpt2 plain",
    "pnn_paper": "figure10.png",
    "psl_paper": "figure6.png",
    "ist_paper": "flops.png",
    "objectives.study": "| prototype | ",
}
"""Commands, each with what it prints behind its work."""


def kept():
    """What a benchmark might change here: results, pages and pictures."""
    found = [path for folder in ("benchmarks/results", "docs") for path in (ROOT / folder).rglob("*")]
    return {path: path.stat().st_mtime_ns for path in found}


def test_every_benchmark_that_a_page_names_has_a_quick_form():
    text = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    named = set(re.findall(r"python -m benchmarks\.([\w.]*\w)", text))
    assert {command.split()[0] for command in SAID} == named


@pytest.mark.slow
@pytest.mark.parametrize("command", SAID)
def test_a_benchmark_runs_in_its_quick_form_and_keeps_nothing(command, tmp_path):
    before, words = kept(), [sys.executable, "-m", *f"benchmarks.{command} --quick".split()]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=2 * SECONDS, check=False
    )
    if command.startswith("peers") and "no memory cgroup could be made" in done.stderr:
        assert done.returncode == 1 and "Traceback" not in done.stderr
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    assert SAID[command] in done.stdout
    assert kept() == before and not list(tmp_path.iterdir())


ABSENT = {
    "frontier": "matplotlib", "pnn_paper": "ptflops", "psl_paper": "matplotlib", "ist_paper": "matplotlib", "models": "timm",
    "census page": "timm", "full_size": "transformers", "long_logits": "transformers",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("command", ABSENT)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # another test has imported it
def test_a_benchmark_whose_package_is_absent_says_so_in_one_sentence(command, monkeypatch):
    module, *words = command.split()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # this process is not the benchmark's own
    monkeypatch.setitem(sys.modules, ABSENT[command], None)
    monkeypatch.setattr(sys, "argv", [module, *words, "--quick"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{module}", run_name="__main__")
    assert ended.value.code == f"This benchmark needs {ABSENT[command]}: pip install {ABSENT[command]}"


OF_A_GPU = [["bash", f"benchmarks/gpu/{name}.sh"] for name in ("smoke", "contract", "speed")]
_OWN = ("frontier", "overlap", "assumptions", "probe", "verified", "resumed", "llama")
OF_A_GPU += [[sys.executable, "-m", f"benchmarks.gpu.{name}"] for name in _OWN]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("words", OF_A_GPU, ids=["smoke", "contract", "speed", *_OWN])
def test_a_benchmark_of_a_gpu_says_in_one_sentence_that_there_is_none(words):
    environment = {**ENVIRONMENT, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode and done.stderr.count("\n") == 1 and done.stderr.startswith("refused: "), done.stderr
