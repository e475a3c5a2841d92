"""tools/profile_memory.py: every method in a process of its own, the same training, honest verdicts."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpart.errors import OptionError
from tests.command import ENVIRONMENT

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from profiling import answer, figures, question, tables, trace
from profiling.picture import draw
from profiling.watching import Sample, Watched

TOOL = Path(__file__).parents[2] / "tools" / "profile_memory.py"
SMALL = [
    "--width",
    "512",
    "--depth",
    "6",
    "--epochs",
    "2",
    "--batch-size",
    "256",
    "--micro-batch-size",
    "128",
    "--partitions",
    "2",
]
FACTS = {
    "limit": 1000, "device": "cpu", "rows": 100, "parameters": 10, "blocks": 3, "epochs": "2", "batch_size": "8", "read": 50.0,
    "write": 100.0, "to_device": None, "from_device": None, "compute_seconds": 4.0,
    "versions": {"machine": "2 CPUs", "gpu": "none", "torch": "2", "seqpart": "0"},
}  # fmt: skip


def profiled(tmp_path, *arguments):
    """The tool's exit code, what it printed, and its JSON."""
    done = subprocess.run(
        [sys.executable, str(TOOL), "--out", "out", *arguments],
        cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    document = tmp_path / "out" / "profile.json"
    return done.returncode, done.stdout + done.stderr, json.loads(document.read_text()) if document.exists() else None


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    code, said, document = profiled(
        folder, "--mem-limit", "400MB", "--methods", "full,checkpointed,save_on_cpu,streamed,sil", *SMALL
    )
    assert code == 0, said
    return folder / "out", said, document


@pytest.mark.slow
def test_plain_programs_and_the_streamed_method_train_the_same_network_bit_for_bit(found):
    said = {run["method"]: run["said"] for run in found[2]["runs"]}
    losses = {name: (*said[name]["train_losses"], said[name]["test_loss"]) for name in said}
    assert losses["full"] == losses["checkpointed"] == losses["save_on_cpu"] == losses["streamed"] != losses["sil"]


@pytest.mark.slow
def test_who_passes_the_limit_does_not_fit_and_is_shown_with_what_it_asks_for(found):
    rows = {row["method"]: row for row in found[2]["table"]}
    assert rows["streamed"]["fits"] == rows["sil"]["fits"] == "yes"
    assert max(rows["streamed"]["peak"], rows["sil"]["peak"]) <= 400e6 < rows["full"]["peak"]
    assert rows["full"]["fits"].startswith("no: asks for ")


@pytest.mark.slow
def test_a_peak_seen_from_outside_is_the_one_that_was_predicted(found):
    for row in found[2]["table"]:
        if row["predicted"]:
            assert 0.99 * row["peak"] <= row["predicted"] <= 1.05 * row["peak"]


@pytest.mark.slow
def test_memory_over_time_names_the_step_that_was_running(found):
    runs = {run["method"]: run for run in found[2]["runs"]}
    for name, run in runs.items():
        assert run["peak"] == max(used for _, used, _ in run["memory"]), name
    assert {label[0] for _, _, label in runs["streamed"]["memory"] if label} <= set("LFBUD")
    assert any(label for _, _, label in runs["streamed"]["memory"])


@pytest.mark.slow
def test_the_files_that_it_names_are_there_and_say_the_same(found):
    folder, said, document = found
    with open(folder / "profile.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == [row["method"] for row in document["table"]]
    markdown = (folder / "profile.md").read_text()
    assert all(f"| {row['method']} " in markdown and row["method"] in said for row in rows)
    assert (folder / "profile.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(path.name for path in folder.iterdir()) == ["profile.csv", "profile.json", "profile.md", "profile.png"]


@pytest.mark.slow
def test_a_limit_that_nothing_fits_is_told_with_the_smallest_that_would_do(tmp_path):
    code, said, document = profiled(tmp_path, "--mem-limit", "1MB", "--methods", "streamed", *SMALL)
    assert code == 0, said
    assert document["table"][0]["fits"].startswith("no") and "1.0 MB" in said


BOTH = """
from torch import nn

from seqpart.model import SeparableLinear

def net():
    def hidden(inputs, width):
        return lambda: nn.Sequential(nn.Linear(inputs, width), nn.LayerNorm(width), nn.ReLU())
    return [
        hidden(64, 512), hidden(512, 512), lambda: nn.Sequential(nn.Linear(512, 640), nn.ReLU()),
        lambda: nn.Sequential(SeparableLinear(640, 320, 10), nn.ReLU()), lambda: SeparableLinear(320, 10, 10),
    ]
"""
"""A network that can be divided into subnets, and into scores."""
PARTS = ["--model", "both:net", "--loss", "psl", "--epochs", "1", "--lr", "1e-3"]


def compared(folder, *where):
    (folder / "both.py").write_text(BOTH)
    code, said, document = profiled(folder, *where, *PARTS)
    assert code == 0, said
    return document


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Which takes its time for each step: few updates, of one method."""
    where = ("--device", "sim:rtx4090", "--mem-limit", "1GB", "--ram-limit", "1GB", "--batch-size", "256")
    return compared(tmp_path_factory.mktemp("simulated"), *where, "--methods", "streamed")


@pytest.mark.slow
def test_on_a_simulated_device_its_memory_pinned_memory_and_the_disk_are_shown(simulated):
    streamed, *_ = simulated["table"]
    assert 440 << 20 < streamed["peak"] <= streamed["predicted"] <= 10**9
    assert streamed["pinned"] > 0
    assert streamed["disk_written"] is not None


def parts_are_shown(document, *methods):
    """Returns the verbs of each method."""
    table = {row["method"]: row for row in document["table"]}
    assert tuple(table) == methods and all(row["fits"] == "yes" for row in table.values())
    steps = {run["method"]: {step[0] for _, _, step in run["memory"] if step} for run in document["runs"]}
    assert "F" in steps["psl"]
    # psl learns what streamed does but for rounding, ist does not.
    assert table["psl"]["train_loss"] == pytest.approx(table["streamed"]["train_loss"], rel=1e-4)
    assert abs(table["ist"]["train_loss"] / table["streamed"]["train_loss"] - 1) > 0.01
    for row in table.values():
        assert row["predicted"] is None or (0.99 * row["peak"] <= row["predicted"] and row["epoch_seconds"] > 0)
    return steps


@pytest.mark.slow
def test_subnets_and_pairs_of_scores_are_shown_beside_plain_programs(tmp_path):
    subnets = ["--subnets", "2", "--local-steps", "4"]
    document = compared(tmp_path, "--mem-limit", "500MB", "--methods", "streamed,ist,psl", *subnets)
    assert {"S", "M"} & parts_are_shown(document, "streamed", "ist", "psl")["ist"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "full,slow"], "'slow'"),
        (["--methods", "full,full"], "at most once"),
        (["--methods", "streamed:trim"], "'streamed:trim'"),
        (["--repeats", "0"], "--repeats"),
        (["--method", "streamed"], "--method:"),
        (["--output-dir", "x"], "--output-dir:"),
        (["--dry-run"], "--dry-run:"),
        (["--epochs", "1,2"], "--epochs 1,2"),
        (["--device", "sim"], "know no simulated device"),
        (["--methods", "streamed,ist"], "needs --subnets"),
        (["--methods", "streamed,sil", "--subnets", "2"], "go with ist among --methods"),
        (["--methods", "streamed,psl"], "--loss psl"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_words(arguments, words):
    with pytest.raises(OptionError) as refused:
        question.asked(["--mem-limit", "1GB", *arguments], "")
    assert words in refused.value.with_flags


@pytest.mark.slow
def test_a_job_that_cannot_be_trained_ends_before_any_method_is_started(tmp_path):
    code, said, document = profiled(tmp_path, "--mem-limit", "1GB", "--data", "npz:missing.npz")
    assert code == 2 and "missing.npz" in said and "Traceback" not in said and document is None


def test_options_of_sil_reach_sil_alone():
    asked = question.asked(
        ["--mem-limit", "1GB", "--kappa", "3", "--objective", "mse", "--partitions", "3", "--sil-inputs", "cached"], ""
    )
    jobs = {way.name: question.job_of(asked.job, way) for way in asked.ways}
    assert (jobs["sil"].kappa, jobs["sil"].method, jobs["sil"].partitions) == (3.0, "sil", 3)
    assert (jobs["streamed"].kappa, jobs["streamed"].method, jobs["streamed"].partitions) == (None, "streamed", 3)
    assert [jobs[name].sil_inputs for name in ("sil", "streamed", "full")] == ["cached", None, None]
    assert (jobs["full"].kappa, jobs["full"].partitions, jobs["full"].shuffles) == (None, "auto", True)


def test_options_of_ist_reach_ist_alone():
    asked = question.asked(["--mem-limit", "1GB", "--methods", "full,streamed,ist", "--subnets", "3", "--local-steps", "5"], "")
    jobs = {way.name: question.job_of(asked.job, way) for way in asked.ways}
    assert {name: (job.method, job.subnets, job.local_steps) for name, job in jobs.items()} == {
        "full": ("sil", None, None), "streamed": ("streamed", None, None), "ist": ("ist", 3, 5),
    }  # fmt: skip


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=5000))
def test_a_thinned_curve_keeps_its_highest_point_and_its_order(used):
    curve = [(float(at), bytes_, "") for at, bytes_ in enumerate(used)]
    thin = figures._thinned(curve)
    assert max(point[1] for point in thin) == max(used) and len(thin) <= figures.POINTS
    assert [point[0] for point in thin] == sorted(point[0] for point in thin) and set(thin) <= set(curve)


def test_a_step_log_that_the_processs_end_cut_short_is_read_as_far_as_it_goes(tmp_path):
    path = tmp_path / "steps"
    path.write_text("1.0 2.0 train B0.0\n2.0 3.0 train U0\n3.0 3.")
    assert [step.label for step in trace.read(path)] == ["B0.0", "U0"]
    assert trace.read(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
         "50413568 bytes. Error code 12 (Cannot allocate memory).", 50413568),
        ("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.18 GiB", 3 << 29),
        ("something else", None),
    ],
)  # fmt: skip
def test_the_bytes_that_a_failed_allocation_asked_for_are_read_from_its_message(text, nbytes):
    assert answer.requested(text) == nbytes


def run_of(name, status=answer.DONE, *, peak=500, exit_code=0, errors="", **said):
    way = question.way_named(name)
    samples = [Sample(10.0 + at, used, used, 0) for at, used in enumerate([1, peak, 2])]
    found = Watched(exit_code, 3.0, samples, 0, 0, "the kernel", errors)
    steps = [trace.Ran(10.5, 11.5, trace.TRAIN, "B0.0"), trace.Ran(11.5, 12.5, trace.TRAIN, "U0")]
    return figures.of_run(way, found, {"status": status, **said} if status else {}, steps)


def rows(*runs):
    return [figures.Figures(run.way, [run], FACTS) for run in runs]


def test_verdicts_of_all_ends():
    done = run_of("full", training_seconds=16.0)
    refused = run_of("sil", answer.NO_ROOM, asked=1700, message="does not fit")
    memory = run_of("checkpointed", answer.OUT_OF_MEMORY, peak=900, asked=300, message="tried to allocate 300 bytes")
    died = run_of("streamed", "", exit_code=-9, errors="Killed")
    over = run_of("save_on_cpu", peak=1200, training_seconds=20.0)
    found = rows(done, refused, memory, died, over)
    table = tables.rows_of(found)
    assert [row["fits"] for row in table] == [
        "yes", "no: asks for 1.7 KB", "no: asks for 1.2 KB", "died", "no: asks for 1.2 KB",
    ]  # fmt: skip
    assert any("exit code -9: Killed" in note for note in tables.notes_of(found))
    assert [row["epoch_seconds"] for row in table] == [8.0, None, None, None, 10.0]
    assert [row["share_of_bound"] for row in table] == [0.5, None, None, None, 0.4]


def test_the_bound_is_the_busier_of_computation_and_disk():
    # 2 epochs: 400 + 600 bytes an epoch take 400 / 50 + 600 / 100 = 14 s of the disk, and 4 s of computation.
    (row,) = rows(run_of("streamed", training_seconds=56.0, bytes_read=800, bytes_written=1200))
    assert tables.rows_of([row])[0]["share_of_bound"] == pytest.approx(14 / 28)


def test_the_peak_is_the_highest_of_all_runs_and_the_time_their_median():
    several = [run_of("full", peak=peak, training_seconds=took) for peak, took in ((500, 8.0), (700, 20.0), (600, 10.0))]
    row = figures.Figures(several[0].way, several, FACTS)
    assert (row.peak, row.epoch_seconds, row.samples_per_second) == (700, 5.0, 20.0)


def test_a_picture_is_drawn_of_runs_that_never_began_too(tmp_path):
    nothing = figures.of_run(question.way_named("full"), Watched(1, 0.0, [], 0, 0, "", ""), {}, [])
    assert draw(rows(nothing, run_of("sil", training_seconds=1.0, method="sil", partitions=1)), tmp_path / "a.png")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU on this machine")
def test_on_a_gpu_nvml_judges_and_plain_programs_are_held_to_the_limit(tmp_path):
    big = ["--width", "4096", "--depth", "24", "--epochs", "1", "--batch-size", "256"]
    code, said, document = profiled(tmp_path, "--mem-limit", "2GB", "--methods", "full,streamed", *big)
    assert code == 0, said
    table = {row["method"]: row for row in document["table"]}
    assert table["streamed"]["fits"] == "yes" and table["full"]["fits"].startswith("no: asks for ")
    assert "NVML" in document["runs"][0]["source"]
