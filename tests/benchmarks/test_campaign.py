"""benchmarks/campaign: what it draws can be drawn again, its faults strike, and its checks notice what is planted."""

import dataclasses
import errno
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import record as records_on_disk
from benchmarks.campaign import __main__ as campaign
from benchmarks.campaign import document, faults, jobs, judging, lies, program, table
from benchmarks.campaign.cases import Record, Worker
from benchmarks.campaign.judging import Figures
from benchmarks.campaign.starting import Ended
from benchmarks.campaign.surroundings import Desk
from seqpart.checkpoint.manifest import CHECKPOINT
from seqpart.checkpoint.marker import MARKER
from seqpart.store.atomic import checked_body, with_checksum
from tools.watch import Watched

MB = 10**6


def test_what_is_drawn_is_a_function_of_the_seed():
    assert [jobs.draw(3, number) for number in range(40)] == [jobs.draw(3, number) for number in range(40)]
    assert [jobs.draw(3, number).options for number in range(40)] != [jobs.draw(4, number).options for number in range(40)]
    drawn = [faults.draw(random.Random(f"3 case {number}")) for number in range(600)]
    assert drawn == [faults.draw(random.Random(f"3 case {number}")) for number in range(600)]
    assert {fault.kind for fault in drawn} == set(faults.KINDS) - {"none"}
    assert {jobs.draw(3, number).kind for number in range(100)} == set(jobs.KINDS)
    assert {trait for number in range(100) for trait in jobs.draw(3, number).traits} == set(jobs.TRAITS)


# --- The library of faults -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return faults.compiled(tmp_path_factory.mktemp("library"))


@pytest.fixture
def struck(library, tmp_path):
    """Runs a program under a fault; returns its exit code, what it printed, and the ledger."""
    (tmp_path / "under").mkdir()

    def run(line, program):
        environment = {
            **os.environ, "LD_PRELOAD": str(library), "CAMPAIGN_FAULT": f"{line} {tmp_path / 'ledger'} {tmp_path / 'under'}",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-S", "-c", "import os, time\n" + textwrap.dedent(program)], cwd=tmp_path, env=environment,
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        return done.returncode, done.stdout, faults.read_ledger(tmp_path / "ledger")

    return run


WRITES = """
    for name in ("beside", "under/inside"):
        file = os.open(name, os.O_RDWR | os.O_CREAT)
        for k in range(4):
            try:
                os.pwritev(file, [b"x" * 1024], 1024 * k)
            except OSError as error:
                print(name, k, error.errno)
        try:
            os.preadv(file, [bytearray(8)], 0)
        except OSError as error:
            print(name, "read", error.errno)
"""


def test_operations_are_counted_below_their_directory_alone(struck):
    code, said, counts = struck("count 0 0", WRITES)
    assert (code, said) == (0, "")
    assert counts["changes"] == 5, "one file is made, and written to four times"
    assert (counts["writes"], counts["reads"], counts["struck"]) == (4, 1, 0)


def test_the_operation_that_is_meant_fails_and_a_full_disk_stays_full(struck):
    _, said, counts = struck(f"change 3 {errno.EIO}", WRITES)
    assert (said, counts["struck"]) == (f"under/inside 1 {errno.EIO}\n", 1)
    _, said, _ = struck(f"full 4 {errno.ENOSPC}", WRITES)
    assert said == f"under/inside 2 {errno.ENOSPC}\nunder/inside 3 {errno.ENOSPC}\n"
    _, said, _ = struck(f"read 1 {errno.EIO}", WRITES)
    assert said == f"under/inside read {errno.EIO}\n"


def test_a_torn_write_reaches_the_file_in_part_and_ends_the_process(struck, tmp_path):
    code, _, counts = struck("torn 3 500", WRITES)
    assert code == -signal.SIGKILL and counts["struck"]
    assert (tmp_path / "under" / "inside").stat().st_size == 2 * 1024 + 512
    (tmp_path / "under" / "inside").unlink()
    code, _, _ = struck("kill 3 0", WRITES)
    assert code == -signal.SIGKILL
    assert (tmp_path / "under" / "inside").stat().st_size == 1024, "one file made, one write done"


def test_the_clock_jumps_and_the_monotonic_one_does_not(struck):
    _, said, counts = struck("clock 1 86400", "print(time.time(), time.monotonic())")
    wall, steady = map(float, said.split())
    assert 86000 < wall - time.time() < 86500 and abs(steady - time.monotonic()) < 60
    assert counts["struck"]


def test_a_large_allocation_fails_once_and_files_can_be_slow(struck):
    program = """
        for k in range(3):
            try:
                bytearray(1 << 20)
            except MemoryError:
                print("refused")
    """
    _, _, counts = struck("count 0 0", program)
    _, said, _ = struck(f"memory {counts['larges'] - 1} 0", program)
    assert said == "refused\n"
    began = time.monotonic()
    _, _, counts = struck("slow 0 40000", WRITES)
    assert counts["struck"] and time.monotonic() - began > 0.2


# --- What a program of the user's does, and files that lie ------------------------------------------------------------


def test_what_is_done_at_an_update_is_drawn_and_its_kill_comes_later():
    words = [faults.Fault("working directory", at / 10, seed=at).words(7, Path("/elsewhere")) for at in range(10)]
    assert words[9][0] == "chdir=7:/elsewhere" and words[0][0] == "chdir=1:/elsewhere"
    assert {len(found) for found in words} == {1, 2}
    for found in words:
        at, *kill = [int(word.partition("=")[2].partition(":")[0]) for word in found]
        assert all(at <= kill <= 7 for kill in kill)
    assert program.changes_of(["optimizer=halves", "learns=3:1:0", "learns=5:1:1"]) == [(3, 1, False), (5, 1, True)]
    assert program.divided(["kill=1", "--", "--method", "full"]) == (["kill=1"], ["--method", "full"])
    assert program.divided(["--method", "full"]) == ([], ["--method", "full"])


def test_a_lie_is_one_value_with_right_checksums_and_is_put_right(tmp_path):
    (tmp_path / "rows").mkdir()
    sums = tmp_path / "rows" / "train-00000.0.sums.json"
    sums.write_text('["0123456789abcdef"]')
    body = {
        "format": 2, "state": {"position": [0, 3], "settings": {"lr": "1"}, "plan": '{"heap": 1}'},
        "rows": {"train-0": {"sums": sums.name, "digest": "0" * 16}},
    }  # fmt: skip
    (tmp_path / CHECKPOINT).write_text(with_checksum("checkpoint", body))
    (tmp_path / MARKER).write_text('{"pid": 3}')
    files = [tmp_path / CHECKPOINT, tmp_path / MARKER, sums]
    true = [path.read_bytes() for path in files]
    said = set()
    for seed in range(100):
        lie = lies.tell(seed, tmp_path, files)
        assert [path.read_bytes() for path in files] != true
        found = checked_body("checkpoint", (tmp_path / CHECKPOINT).read_text())
        assert not isinstance(found, dict) or found.get("state", body["state"])["settings"] == {"lr": "1"}, "the user's wish"
        said.add((lie.path.name, lie.said.partition(":")[0]))
        lie.put_right()
        assert [path.read_bytes() for path in files] == true
    assert {name for name, _ in said} == {CHECKPOINT, MARKER, sums.name}


# --- The checks ------------------------------------------------------------------------------------------------------


def ended(code=0, *, peak=300 * MB, said="", complained="", hung=False):
    return Ended(Watched(code, peak, 0, 100, 1.0), said, complained, hung)


def kinds(violations):
    return [text.partition(":")[0] for text in violations]


def test_a_peak_over_the_limit_is_a_violation_and_one_under_it_is_none():
    assert not judging.memory(ended(peak=340 * MB), 340 * MB, 0)
    assert kinds(judging.memory(ended(peak=340 * MB + 1), 340 * MB, 0)) == ["limit"]
    assert not judging.memory(ended(peak=350 * MB), 340 * MB, 10 * MB)
    assert kinds(judging.memory(ended(-9, peak=341 * MB), 340 * MB, 0)) == ["limit"], "killed or not"


def test_a_proof_that_saw_less_and_a_prediction_out_of_its_band_are_violations():
    good = Figures(limit=400 * MB, predicted=310 * MB, own_peak=300 * MB, outside_peak=300 * MB, host=0)
    assert not judging.proof(good, whole=True)
    blind = dataclasses.replace(good, own_peak=297 * MB)
    assert kinds(judging.proof(blind, whole=True)) == ["proof"]
    low = dataclasses.replace(good, predicted=280 * MB)
    assert kinds(judging.proof(low, whole=True)) == ["prediction"]
    assert not judging.proof(dataclasses.replace(low, imports=299 * MB), whole=True), "the peak came before any plan"
    for predicted, whole, found in ((296, True, 1), (296, False, 1), (316, True, 1), (316, False, 0)):
        aside = dataclasses.replace(good, predicted=predicted * MB)
        assert kinds(judging.proof(aside, whole=whole)) == ["prediction"] * found
    assert kinds(judging.proof(dataclasses.replace(good, limit=299 * MB), whole=False)) == ["proof"]


def test_a_wrong_ending_a_traceback_and_a_silent_error_are_violations():
    assert not judging.ending(ended(6, complained="CorruptFile: x is damaged"), (0, 6), begun=True)
    assert kinds(judging.ending(ended(1, complained="boom"), (0, 6), begun=True)) == ["ending", "ending"]
    assert kinds(judging.ending(ended(6), (0, 6), begun=True)) == ["message"]
    traced = ended(6, complained="Traceback (most recent call last):\nKeyboardInterrupt")
    assert kinds(judging.ending(traced, (0, 6), begun=True)) == ["message"]
    assert kinds(judging.ending(ended(-9, hung=True), (-9,), begun=True)) == ["ending"]
    assert not judging.ending(ended(-15), (130,), begun=False), "before the program has begun"
    assert judging.ending(ended(-15), (130,), begun=True)


@pytest.mark.parametrize(
    ("inner", "is_one"), [("/lib/site-packages/torch/nn/functional.py", 0), ("/seqpart/plan/dynamic.py", 1)]
)
def test_a_crash_in_a_call_of_ours_is_a_violation_where_one_of_a_library_is_none(inner, is_one):
    said = f'Fatal Python error\n\nCurrent thread 0x1 (most recent call first):\n  File "{inner}", line 1 in f\n'
    assert len(judging.ending(ended(-11, complained=said), (0, -11), begun=True)) == is_one
    assert judging.ending(ended(-11, complained=said), (0,), begun=True)


def test_one_bit_of_one_tensor_is_a_difference(tmp_path):
    tensors = {"a": torch.ones(4), "b": torch.zeros(3)}
    save_file(tensors, tmp_path / "one")
    save_file(tensors, tmp_path / "same")
    save_file({"a": torch.ones(4), "b": torch.tensor([0.0, -0.0, 0.0])}, tmp_path / "other")
    assert judging.same_tensors(tmp_path / "one", tmp_path / "same") is None
    assert judging.same_tensors(tmp_path / "other", tmp_path / "one").startswith("b:"), "minus zero is another bit"
    save_file({"a": torch.ones(4, dtype=torch.bfloat16), "b": torch.tensor(1.0)}, tmp_path / "types")
    assert judging.same_tensors(tmp_path / "types", tmp_path / "types") is None
    save_file({"a": torch.ones(4)}, tmp_path / "fewer")
    assert judging.same_tensors(tmp_path / "fewer", tmp_path / "one")


def test_the_limit_that_a_refusal_names_is_read():
    assert judging.smallest_named("DoesNotFit: ...\n  smallest limit that fits: 347MB (micro-batch 1).") == 347 * MB
    assert judging.smallest_named("DoesNotFit: it does not") is None


def through_a_link(desk):
    """What cleaning that follows links would do."""
    (desk.runs / "lure" / "homes" / "thesis.safetensors").unlink()


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (through_a_link, "precious/thesis.safetensors is gone"),
        (lambda desk: (desk.offload / ".probe-1").write_text("64 MiB"), "precious/thesis.safetensors changed"),
        (lambda desk: (desk.runs / ".probe-report").unlink(), ".probe-report is gone"),
        (lambda desk: (desk.runs / "notes.txt").chmod(0o600), "notes.txt changed"),
        (lambda desk: (desk.offload / "new").touch(), "new is new"),
        (lambda desk: (desk.place / "words.txt").touch(), "words.txt changed"),
    ],
)
def test_whatever_is_changed_around_a_run_is_noticed(harm, named, tmp_path):
    desk = Desk(tmp_path / "desk", None)
    desk.make_folders()
    desk.lay_out_files()
    desk.was = desk.state()
    desk.out.mkdir()
    (desk.out / "model.safetensors").touch()
    homes = desk.offload / "seqpart-1"
    homes.mkdir()
    assert desk.changes() == [], "of a start that was killed the moment it had made it"
    (homes / "seqpart.lock").touch()
    assert desk.changes() == [f"{path.relative_to(desk.root)} is new" for path in (homes, homes / "seqpart.lock")]
    assert desk.changes(finished=False) == []
    harm(desk)
    assert [text for text in desk.changes() if text.endswith(named)]


@pytest.mark.slow
def test_a_violation_is_printed_saved_and_the_exit_code(monkeypatch, tmp_path, capsys):
    """The cases are replaced by what they would have found; one of them was violated."""
    monkeypatch.setattr(records_on_disk, "FOLDER", tmp_path)
    monkeypatch.setattr(document, "DOCUMENT", tmp_path / "trust.md")

    class Idle:
        def __init__(self, *_, **__): ...
        def close(self): ...
        def neighbours_go_on(self):
            return []

    def found(worker, seed, number, kinds, over, only):
        if only is not None:
            yield Record(only, number, "kill", [], struck=True, outcome="went on", bits="plain loop")
            return
        yield Record(8 * number, number, "kill", ["--seed", str(seed)], struck=True, outcome="went on", bits="plain loop")
        if number == 1:
            yield Record(9, number, "torn write", [], outcome="went on", violations=["bits: not those of a plain loop"])

    monkeypatch.setattr(campaign, "Worker", Idle)
    monkeypatch.setattr(campaign, "cases_of", found)
    assert campaign.main(["--cases", "1", "--seed", "5", "--jobs", "1"]) == 0
    assert campaign.main(["--cases", "3", "--seed", "5", "--jobs", "1"]) == 1
    assert "VIOLATION bits: not those of a plain loop" in capsys.readouterr().out
    lines = (tmp_path / "campaign-cases.jsonl").read_text().splitlines()
    assert [json.loads(line)["case"] for line in lines] == [0, 8, 9]
    assert campaign.main(["--table"]) == 0
    text = (tmp_path / "trust.md").read_text()
    assert "1 cases with a violation, 1 of them with wrong bits" in text
    assert "case 9, torn write: bits: not those of a plain loop" in text
    assert all(f"| {name} |" in text for name in ("kill", "torn write"))
    assert campaign.main(["--cases", "5", "--seed", "5", "--jobs", "1", "--add"]) == 0
    lines = (tmp_path / "campaign-cases.jsonl").read_text().splitlines()
    assert [json.loads(line)["case"] for line in lines] == [0, 8, 9, 16, 24], "the next jobs of the same seed"
    stumbled = json.dumps(dataclasses.asdict(Record(17, 2, "kill", [], outcome=campaign.CHECK_FAILED, violations=["check: x"])))
    (tmp_path / "campaign-cases.jsonl").write_text("\n".join([*lines, stumbled]) + "\n")
    campaign.main(["--cases", "1", "--seed", "5", "--jobs", "1", "--add"])
    lines = (tmp_path / "campaign-cases.jsonl").read_text().splitlines()
    assert [json.loads(line)["outcome"] for line in lines if json.loads(line)["case"] == 17] == ["went on"], "once more"
    with pytest.raises(SystemExit, match="are those of seed 5, not of 6"):
        campaign.main(["--cases", "9", "--seed", "6", "--add"])
    assert campaign.main(["--table"]) == 0
    text = (tmp_path / "trust.md").read_text()
    assert "0 cases with a violation" in text
    assert "found, mended and run again" in text and "case 9, torn write: bits: not those of a plain loop" in text


def test_the_published_document_is_made_from_the_published_results():
    found = json.loads(records_on_disk.path_of("campaign").read_text())
    assert document.DOCUMENT.read_text() == document.text_of(found)
    lines = (records_on_disk.FOLDER / "campaign-cases.jsonl").read_text().splitlines()
    published = [Record(**json.loads(line)) for line in lines]
    assert table.counted(published) == found["result"]["faults"]


# --- Real runs -------------------------------------------------------------------------------------------------------


def planted_model():
    """Not the same twice, and it takes what is the user's: called by the run as its model."""
    Path("../around/precious/thesis.safetensors").unlink(missing_ok=True)
    torch.manual_seed(time.time_ns() % 2**31)
    return torch.nn.Sequential(torch.nn.Linear(24, 32), torch.nn.Linear(32, 5))


@pytest.fixture
def worker(library, tmp_path):
    made = Worker(tmp_path / "desk", library)
    yield made
    made.close()


@pytest.mark.slow
def test_a_planted_violation_of_a_real_run_is_found(worker):
    options = (
        "--data", "benchmarks.campaign.models:features_150", "--model", "tests.benchmarks.test_campaign:planted_model",
        "--method", "full", "--batch-size", "50", "--epochs", "1",
    )  # fmt: skip
    job = jobs.Job(number=0, kind="planted", options=options, slack=0, ram=False, offload=False, linked=False, updates=3)
    record = Record(0, 0, "none", [])
    worker.settle(job, record)
    assert {"bits", "around"} <= set(kinds(record.violations)), record
    assert [text for text in record.violations if "thesis.safetensors is gone" in text]


OF_FILES = "kill at a change,torn write,bit flip,full disk,SIGTERM"
OF_PROGRAMS = "working directory,link led elsewhere,second fit,cgroup,changed value,changed plan"


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "kinds"), [("7", OF_FILES), ("139", OF_PROGRAMS)])
def test_a_few_cases_of_a_seed_hold(seed, kinds, tmp_path, monkeypatch):
    """A case is found by its number, with its job's undisturbed run before it."""
    monkeypatch.setattr(records_on_disk, "FOLDER", tmp_path)
    words = ["--seed", seed, "--jobs", "1", "--faults", kinds]
    assert campaign.main(["--cases", "5", *words, "--folder", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "campaign-cases.jsonl").read_text().splitlines()]
    assert len(lines) >= 5 and any(line["struck"] and line["bits"] for line in lines if line["fault"] != "none")
