"""The command line: its flags are frozen, each says what it does, and nothing happens that was not asked for."""

import ast
import dataclasses
import inspect
import itertools
import json
import re
import shutil
import subprocess
import sys
from datetime import datetime

import pytest
from safetensors.torch import load_file

from seqpart.__main__ import console
from seqpart.plan.plan import Plan
from seqpart.train import Job, main
from tests.command import SMALL, Ran, call, files, refused, run

FLAGS = {
    "--mem-limit", "--method", "--device", "--ram-limit", "--optimizer-on", "--offload-dir", "--output-dir", "--overwrite",
    "--epochs",
    "--batch-size", "--micro-batch-size", "--loss", "--lr", "--optimizer", "--weight-decay", "--no-decay",
    "--label-smoothing", "--mixup", "--cutmix", "--export-every", "--keep-exports",
    "--freeze", "--unfreeze", "--momentum", "--rounding", "--moments-dtype", "--clip-grad-norm",
    "--partitions", "--objective", "--kappa", "--prototype-scale", "--shuffle", "--cache-dtype", "--seed", "--model",
    "--data", "--data-dir", "--download", "--image-size", "--context", "--width", "--depth", "--heads", "--config",
    "--weights", "--weights-partial", "--weights-dtype", "--tile", "--loss-chunks", "--compile", "--tokenizer",
    "--lr-schedule", "--warmup-updates", "--ema", "--dtype", "--recovery-epochs", "--recover", "--recovery-batch-size",
    "--recovery-lr", "--save-every", "--test-every", "--eval-every", "--max-steps", "--early-stopping", "--keep-best",
    "--best-by", "--sil-inputs", "--resume",
    "--subnets", "--local-steps", "--subnet-groups", "--subnet-rows", "--subnet-moments",
    "--dry-run", "--plan-out", "--plan", "--print-schedule", "--trace", "--log", "--quiet", "--debug",
    "--augment", "--cache", "--cached-views", "--workers",
}  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def through_console(monkeypatch, capsys, *arguments):
    """The installed `seqpart ARGUMENTS`."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["seqpart", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit:
        console()
    said = capsys.readouterr()
    return Ran(exit.value.code, said.out, said.err)


# --- Flags and help --------------------------------------------------------------------------------------------------


@pytest.fixture
def help_words(capsys):
    """`--help` without its frame and line breaks."""
    ran = call(capsys, "--help")
    assert ran.code == 0
    return re.sub(r"[\s│|]+", " ", ran.out)


def flag_of(field):
    return "--" + field.name.replace("_", "-")


def test_the_flags_are_these_and_a_new_one_is_a_decision(help_words):
    assert {flag_of(field) for field in dataclasses.fields(Job)} == FLAGS
    assert not [flag for flag in FLAGS if flag not in help_words]


def said_under_the_fields(kind):
    """name -> the text that stands under a field in the source of its class."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(kind)).body)
    return {
        field.target.id: ast.literal_eval(text.value)
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def test_every_flag_has_its_help_under_the_field(help_words):
    owners = [owner for owner in reversed(Job.__mro__) if dataclasses.is_dataclass(owner)]
    said = {name: text for owner in owners for name, text in said_under_the_fields(owner).items()}
    assert set(said) == {field.name for field in dataclasses.fields(Job)}
    missing = [name for name, text in said.items() if " ".join(text.split()) not in help_words]
    assert not missing


def test_the_help_names_the_command_and_the_forms_of_a_limit(help_words):
    assert "python -m seqpart.train" in help_words
    assert "2GB, 1.5GiB, 0.8 (of the device) or auto" in help_words


# --- Files of options ------------------------------------------------------------------------------------------------

TOML = """
mem-limit = "2GB"
width = 64
depth = 2
epochs = [1, 2]
lr = [1e-3, 5e-4]
batch_size = 128
partitions = [0, 2]
clip-grad-norm = 1
shuffle = false
overwrite = true
quiet = false
"""


def test_a_file_of_options_gives_numbers_lists_and_switches(here, capsys):
    (here / "run.toml").write_text(TOML)
    ran = call(capsys, "--config", "run.toml", "--output-dir", "out")
    assert ran.code == 0, ran.err
    settings = json.loads((here / "out" / "events.jsonl").read_text().splitlines()[0])["settings"]
    expected = {
        "epochs": [1, 2], "lr": [0.001, 0.0005], "batch_size": 128, "partitions": [0, 2], "clip_grad_norm": 1.0,
        "shuffle": False, "overwrite": True, "kappa": None, "output_dir": str(here / "out"),
    }  # fmt: skip
    assert {name: settings[name] for name in expected} == expected
    assert "partition 1 train epoch 2" in ran.out
    # `overwrite = true` lets the same command run again.
    assert call(capsys, "--config", "run.toml", "--output-dir", "out").code == 0


def test_the_command_line_wins_over_the_file(here, capsys):
    (here / "run.toml").write_text(TOML + 'dry-run = true\noptimizer = "sgd"\n')
    plan = here / "plan.json"
    asked = ["--epochs", "1", "--lr=1e-3", "--partitions", "1", "--batch-size", "32", "--plan-out", plan]
    ran = call(capsys, "--config=run.toml", *asked)
    assert ran.code == 0, ran.err
    found = json.loads(plan.read_text())
    assert [(part["last"], part["micro_batch"]) for part in found["partitions"]] == [(4, 32)]
    ran = call(capsys, *asked, "--config", "run.toml", "--no-dry-run", "--no-overwrite", "--output-dir", "out")
    assert ran.code == 0, ran.err
    assert refused(
        call(capsys, *asked, "--config", "run.toml", "--no-dry-run", "--no-overwrite", "--output-dir", "out"), 2, "finished run"
    )


# --- Plans -----------------------------------------------------------------------------------------------------------


def test_a_dry_run_prints_the_plan_and_leaves_nothing(here, capsys):
    ran = call(capsys, *SMALL, "--partitions", "2", "--dry-run", "--output-dir", "out", "--offload-dir", "fast")
    assert ran.code == 0, ran.err
    assert "plan for 13,642 parameters under 2.00 GB" in ran.out
    assert "2 partitions: as asked" in ran.out
    assert "epoch" not in ran.out
    assert files(here) == {}
    assert list(here.iterdir()) == []


def test_a_saved_plan_gives_the_same_cut_again(here, capsys):
    asked = ["--width", "64", "--depth", "4", "--mem-limit", "2GB", "--dry-run"]
    assert call(capsys, *asked, "--partitions", "3", "--micro-batch-size", "16", "--plan-out", "a.json").code == 0
    assert call(capsys, *asked, "--plan", "a.json", "--plan-out", "b.json").code == 0
    first, second = (Plan.from_json((here / name).read_text(), name) for name in ("a.json", "b.json"))
    assert len(first.partitions) == 3
    assert (first.starts, first.fingerprint) == (second.starts, second.fingerprint)
    assert [part.micro_batch for part in second.partitions] == [16, 16, 16]
    ran = call(capsys, *asked[:-1], "--epochs", "1", "--plan", "a.json", "--output-dir", "out")
    assert ran.code == 0, ran.err
    assert Plan.from_json((here / "out" / "plan.json").read_text(), "plan.json").starts == first.starts


@pytest.mark.slow
def test_a_saved_plan_gives_the_same_answers_for_every_partition_again(known_machine, here, capsys):
    """It gave the cut alone: which partitions stay and keep their graphs was chosen anew, by other measured speeds."""
    asked = ["--width", "512", "--depth", "20", "--method", "auto", "--batch-size", "64", "--dry-run"]
    refusal = call(capsys, *asked, "--mem-limit", "250MB")
    smallest = re.search(r"smallest limit that fits: ([0-9]+)MB", refusal.err)
    assert refusal.code == 3 and smallest, refusal.err
    asked += ["--mem-limit", f"{int(smallest[1]) + 35}MB"]
    assert call(capsys, *asked, "--plan-out", "a.json").code == 0
    again = call(capsys, *asked, "--plan", "a.json", "--plan-out", "b.json")
    first, second = (Plan.from_json((here / name).read_text(), name) for name in ("a.json", "b.json"))
    answers = [[(part.stays, part.weights_stay, part.graph, part.tier) for part in plan.partitions] for plan in (first, second)]
    assert len(set(answers[0])) > 1, "what is of one partition is not of every one"
    assert all(part.why for part in first.partitions)
    assert all(part.why.startswith("on the device throughout") == part.stays for part in first.partitions)
    assert (second.starts, second.slots, second.method, answers[1]) == (first.starts, first.slots, first.method, answers[0])
    assert re.search(r"partitions? [-0-9, ]+: (weights )?on the device throughout \(.* of transfers\)", again.out)


def test_the_plan_of_a_run_can_be_used_again(here, capsys):
    assert call(capsys, *SMALL, "--epochs", "1", "--partitions", "0,3", "--output-dir", "out").code == 0
    ran = call(capsys, *SMALL, "--dry-run", "--plan", "out/plan.json")
    assert ran.code == 0, ran.err
    assert "2 partition(s): as asked" in ran.out


def test_the_schedule_is_printed_on_request(capsys):
    ran = call(capsys, *SMALL, "--partitions", "2", "--epochs", "1", "--dry-run", "--print-schedule")
    assert ran.code == 0, ran.err
    steps = [line for line in ran.out.splitlines() if line.endswith(" ...")]
    assert len(steps) == 1 or ran.out.rstrip().endswith(" ...")
    assert re.search(r"\bL0\b.*\bB0\.0\b.*\bU0\b", ran.out, re.DOTALL)


def test_quiet_prints_nothing_and_works_all_the_same(here, capsys):
    ran = call(capsys, *SMALL, "--epochs", "1", "--quiet", "--output-dir", "out")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert (here / "out" / "model.safetensors").exists()


# --- What a run leaves, and the console script -----------------------------------------------------------------------


def test_the_real_command_ends_with_the_proof_and_leaves_the_results(here):
    ran = run(here, *SMALL, "--epochs", "1")
    assert ran.code == 0, ran.err
    assert ran.err == ""
    assert ran.out.splitlines()[-1].startswith("proof: limit 2.00 GB, measured peak ")
    (folder,) = (here / "runs").iterdir()
    assert sorted(files(folder)) == [
        "events.jsonl",
        "job.json",
        "memory.jsonl",
        "model.safetensors",
        "plan.json",
        "result.json",
    ]
    assert set(load_file(folder / "model.safetensors")) == {
        "0.1.weight", "0.1.bias", "0.2.weight", "0.2.bias",
        *(f"{block}.{name}" for block in (1, 2) for name in ("norm.weight", "norm.bias", "linear.weight", "linear.bias")),
        "3.0.weight", "3.0.bias", "3.1.weight", "3.1.bias",
    }  # fmt: skip
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert (events[0]["event"], events[-1]["event"]) == ("start", "result")
    result = json.loads((folder / "result.json").read_text())
    assert result["accuracy"] == events[-1]["accuracy"]
    assert result["proof"]["violations"] == 0
    assert result["settings"] == events[0]["settings"]
    kept = {name: result["settings"][name] for name in ("epochs", "lr", "shuffle", "kappa", "mem_limit")}
    assert kept == {"epochs": 1, "lr": 1e-4, "shuffle": "auto", "kappa": None, "mem_limit": "2GB"}
    began, ended = (datetime.fromisoformat(text) for text in (events[0]["time"], result["finished"]))
    assert 0 <= (ended - began).total_seconds() <= result["seconds"] + 1


def test_the_console_script_trains_and_plans(here, monkeypatch, capsys):
    planned = through_console(monkeypatch, capsys, "plan", *SMALL)
    assert planned.code == 0
    assert "plan for" in planned.out
    assert files(here) == {}
    assert through_console(monkeypatch, capsys, "train", *SMALL, "--epochs", "1", "--output-dir", "out").code == 0
    assert (here / "out" / "model.safetensors").exists()
    assert refused(through_console(monkeypatch, capsys, "train", *SMALL, "--output-dir", "out"), 2, "finished run")


def test_the_console_script_says_how_it_is_used(monkeypatch, capsys):
    asked = through_console(monkeypatch, capsys, "--help")
    assert (asked.code, asked.err) == (0, "")
    assert "usage: seqpart {train,plan,verify,report,doctor}" in asked.out
    does = dict(re.findall(r"^  ([a-z]+) +(.+)$", asked.out, re.MULTILINE))
    assert list(does) == ["train", "plan", "verify", "report", "doctor"]
    assert "seqpart COMMAND --help" in asked.out
    for arguments in ([], ["fly"]):
        ran = through_console(monkeypatch, capsys, *arguments)
        assert (ran.code, ran.out) == (2, "")
        assert "usage: seqpart" in ran.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian", "--mem-limit", "2GB"], "unknown command 'trian'. Did you mean train?"),
        (["Verify"], "unknown command 'Verify'. Did you mean verify?"),
        (["fly"], "unknown command 'fly'.\n"),
        (["--mem-limit", "2GB"], "found --mem-limit where a command belongs. Did you mean train?"),
    ],
)
def test_a_command_that_there_is_not_is_named_with_the_nearest(arguments, words, monkeypatch, capsys):
    """The usage was printed, and not one word about what was wrong."""
    ran = through_console(monkeypatch, capsys, *arguments)
    assert ran.code == 2 and ran.err.startswith(words) and "usage: seqpart" in ran.err


def test_doctor_tells_what_the_machine_offers_and_leaves_nothing(here, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    ran = through_console(monkeypatch, capsys, "doctor", "--device", "cpu")
    assert ran.code == 0, ran.err
    for words in ("device", "limit is measured by", "runtime", "tier disk", "disk probe", "GB/s", "torch", "safetensors"):
        assert words in ran.out
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--device", "tpu"], 2, "--device: expected auto, cpu, cuda or cuda:N, sim or sim:CARD; found 'tpu'"),
        (["--offload-dir", "nowhere"], 2, "--offload-dir: expected a directory; nowhere is none"),
        (["--offload-dir", "/proc"], 6, "Give a directory that you may write to"),
        (["--colour"], 2, "unrecognized arguments: --colour"),
    ],
)
def test_doctor_refuses_what_it_cannot_examine(arguments, code, words, here, monkeypatch, capsys):
    assert refused(through_console(monkeypatch, capsys, "doctor", *arguments), code, words)


CODES = {
    0: ["--dry-run"],
    2: ["--epochs", "0", "--dry-run"],
    3: ["--method", "full", "--width", "4096", "--depth", "8", "--dry-run"],
    6: ["--output-dir", "/proc/x"],
}


@pytest.mark.parametrize("code", CODES)
def test_exit_codes_are_as_documented(code, here, capsys):
    """4 (the limit was passed) and 130 (interrupted) take a run: they are in test_bad_input."""
    assert call(capsys, *SMALL, *CODES[code]).code == code


def test_main_reads_the_process_s_own_arguments(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", *SMALL, "--dry-run", "--quiet"])
    assert main() == 0
    assert capsys.readouterr() == ("", "")


def test_auto_takes_a_method_that_cuts_as_it_is_told(here, capsys):
    """It took `full` and dropped --partitions without a word."""
    ran = call(capsys, *SMALL, "--method", "auto", "--partitions", "3", "--dry-run")
    assert ran.code == 0 and "3 partitions as asked" in ran.out and "method full" not in ran.out


def test_a_dry_run_refuses_a_disk_that_is_too_small(here, capsys, monkeypatch):
    """It printed a plan with exit code 0, and the run refused it."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1000, 900, 100))
    ran = call(capsys, *SMALL, "--method", "streamed", "--dry-run")
    assert ran.code == 6 and "100 B free" in ran.err


def test_the_package_runs_as_the_console_script_does(tmp_path):
    done = subprocess.run([sys.executable, "-m", "seqpart", "--help"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: seqpart {train,plan,verify,report,doctor}")


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_the_help_has_no_blank_line_between_options(columns, capsys, monkeypatch):
    """There was one where a text ended with its line: as below --subnet-rows at 80 columns."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert not [line for line in call(capsys, "--help").out.splitlines() if re.fullmatch(r"[│|]\s+[│|]", line)]


def test_the_help_says_a_default_once_and_types_in_one_word(help_words):
    """It said `Default: 10. (default: None)`, and `{None}|STR` for a text that may be left out."""
    assert "None" not in help_words
    assert "--kappa FLOAT Size of the paper's synthetic labels, for objective mse. Default: 10. --" in help_words
    assert "--output-dir PATH" in help_words


def test_a_model_of_ones_own_has_the_initial_weights_of_the_seed(tmp_path, monkeypatch, capsys):
    """Two runs of one seed had different weights, as had a run that was killed before its first checkpoint and began anew."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drawn.py").write_text(
        "import random\nimport numpy as np\nimport torch\ndef net():\n"
        "    layer = torch.nn.Linear(64, 10)\n    layer.bias.data += random.random() + np.random.rand()\n    return layer\n"
    )
    found = []
    for number, seed in enumerate([5, 5, 6]):
        words = ["--mem-limit", "2GB", "--model", "drawn:net", "--data", "digits", "--method", "full", "--max-steps", "1"]
        ran = call(capsys, *words, "--seed", str(seed), "--output-dir", str(number), "--quiet")
        assert ran.code == 0, ran.err
        found.append((tmp_path / str(number) / "model.safetensors").read_bytes())
    assert found[0] == found[1] != found[2]
