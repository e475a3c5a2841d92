"""Every command and snippet of README.md, and of the pages in docs/ that were written by hand: run as printed, run smaller, or
at least parsed. `HOW` says which.

A command that is added or changed there has to be added here.
"""

import importlib.util
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from seqpart.train import main
from tests.choice import only_quick
from tests.command import ENVIRONMENT, SMALL, call, end, refused, start
from tests.pages import test_recipes

ROOT = Path(__file__).parents[2]
MADE = {"trust", "models", "options", "what_fits", "scaling", "pnn", "objectives", "ist", "ist_paper", "psl", "index"}
"""Pages with results, most of them written by a benchmark."""
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").glob("*.md") if page.stem not in MADE)]
TEXT = "\n".join(page.read_text() for page in PAGES)
_CODE = r"```python\n(.*?)```"
SNIPPETS = {
    f"{page.stem}-{number}": text
    for page in PAGES
    for number, text in enumerate(re.findall(_CODE, page.read_text(), re.DOTALL))
    if page.stem != "adapters"  # run by test_adapters, where peft is there
}
PROSE = re.sub(r" \\\n +", " ", re.sub(_CODE, "", TEXT, flags=re.DOTALL))
LESS = {"2048": "32", "* 20": "* 2"}
"""What is made smaller in the snippets that train large networks."""

MAIN_JOB = "python -m seqpart.train --mem-limit 2GB"
EXACT_JOB = f"{MAIN_JOB} --method auto"
SCHEDULE = (
    "python -m seqpart.train --mem-limit 1GB --width 256 --depth 4 --partitions 2 --batch-size 512 --dry-run --print-schedule"
)
OTHER_SCHEDULE = "... --partitions 3 --method streamed --micro-batch-size 256 ..."
VERIFY = "seqpart verify --mem-limit 800MB --steps 3"
PLAN_FOR_A_CARD = "seqpart plan --device sim:rtx3060-12gb --mem-limit 11GB --ram-limit 32GB --method auto"
IST = "python -m seqpart.train --method ist --subnets 4 --local-steps 20 --mem-limit 1GB"
SAVED, RESUMED = (
    "python -m seqpart.train --mem-limit 2GB --method streamed --output-dir runs/mine --save-every 200",
    "python -m seqpart.train --resume runs/mine",
)

AUTO = "--mem-limit 2GB --method auto"
PROFILE = "python tools/profile_memory.py --mem-limit 620MB"

HOW = {
    MAIN_JOB: "planned; two minutes as printed: tools/watch.py runs it for the table",
    EXACT_JOB: "planned (slow)",
    SCHEDULE: "run as printed",
    OTHER_SCHEDULE: "run, in place of the same options of the command before it",
    IST: "run smaller by test_ist_models",
    VERIFY: "run with a small network (slow)",
    SAVED: "run with a small network, and killed (slow)",
    RESUMED: "run as printed, from where that was killed (slow)",
    "python -m seqpart.train --resume DIR": "run, with its directory, from where that was killed (slow)",
    f"python tools/watch.py -- {MAIN_JOB}": "run around a dry run (slow)",
    "python tools/watch.py -- COMMAND": "run around a dry run (slow)",
    f"{PROFILE} --width 2048 --depth 24 --batch-size 256 --epochs 2": "parsed (slow)",
    f"{PROFILE} --methods full,streamed,sil,ist --subnets 4": "parsed (slow)",
    f"{PROFILE} --methods full,streamed,psl --model psnet --loss psl --data mnist --data-dir DIR": "parsed (slow)",
    "python -m seqpart.train": "run, with options, by everything here",
    "seqpart train": "run by test_command_line",
    "seqpart plan": "run by test_command_line",
    "seqpart verify": "run with a small network above",
    "seqpart verify --sweep 8": "run by test_verify_plans",
    "seqpart doctor": "run by test_command_line",
    "seqpart report": "run by test_page",
    "seqpart report DIR": "run by test_page",
    PLAN_FOR_A_CARD: "run with a small network (slow)",
    f"python -m seqpart.train --model torchvision:resnet50 --data folder:DIR {AUTO}": "run smaller by test_whole_models (slow)",
    f"python -m seqpart.train --model hf:DIR --data text:FILE {AUTO}": "run smaller by test_whole_models (slow)",
    **dict.fromkeys(
        (
            f"torchrun --nproc-per-node=2 -m seqpart.train {AUTO} --output-dir runs/mine",
            "torchrun --nproc-per-node=2 -m seqpart.train ...", "torchrun --max-restarts 3",
            "torchrun --nproc-per-node=2 -m seqpart.train --method ist --subnets 4 --local-steps 20 --mem-limit 1GB",
            "torchrun --nproc-per-node=2 -m seqpart.train --method sil --sil-inputs synthetic --partitions 4 --mem-limit 1GB",
        ),
        "run smaller by test_ranks and test_examples (slow)",
    ),
    "python -m benchmarks.prediction": "there",
    "python -m benchmarks.prediction architectures": "there",
    "python -m benchmarks.campaign": "there",
    **{
        f"python -m benchmarks.{rest}": "parsed (slow)"
        for rest in (
            "partition_speed", "streamed_speed L", "streamed_speed S", "streamed_speed disk", "streamed_speed smallest",
            "peers.compare S", "peers.compare L", "peers.compare T --data-dir DIR", "pnn_paper --data-dir DIR",
            "psl_paper --data-dir DIR", "frontier", "small_jobs epochs", "small_jobs start", "what_fits", "models",
            "full_size --folder DIR", "widest_layer", "bf16_rounding --data-dir DIR", "long_logits", "scaling",
            "scaling --rows 1024", "rank_kills",
            "long_logits --positions 2048 --mem-limit 700MB",
        )
    },
    "pip install -e .": "its extras are looked for",
    'pip install -e ".[hf]"': "its extras are looked for",
    'pip install -e ".[plot]"': "its extras are looked for",
    "pip install tensorboard": "the refusal that says so is tested by test_tracking",
    "pip install wandb": "the refusal that says so is tested by test_tracking",
    'pip install -e ".[yaml]"': "its extras are looked for",
    'pip install -e ".[log]"': "its extras are looked for",
    'pip install -e ".[wandb]"': "its extras are looked for",
    'pip install -e ".[lowbit]"': "its extras are looked for",
    'pip install -e ".[test]"': "its extras are looked for",
    'pip install -e ".[docs]"': "its extras are looked for",
    "mkdocs build --strict": "run by .ci/run",
    'pip install -e ".[check]"': "its extras are looked for",
    "seqpart --help": "run by test_command_line",
    "python -m benchmarks.frontier T": "parsed (slow)",
    "python -m benchmarks.frontier L-256": "parsed (slow)",
    "pytest": "runs this",
    "python examples/gallery/vae.py": "run by test_gallery",
    "pytest -m slow": "run by .ci/run",
    "tools/check": "there",
    **dict.fromkeys(test_recipes.COMMANDS.values(), "run smaller by test_recipes or test_examples (slow)"),
}  # fmt: skip


def printed_commands():
    blocks = re.findall(r"^    (?:\$ )?((?:python|pip|seqpart|torchrun|\.\.\.) .*)$", PROSE, re.MULTILINE)
    ticks = re.findall(r"`((?:python|pip|seqpart|torchrun|tools/check|pytest|mkdocs)(?: [^`\n]*)?)`", PROSE)
    return {command.strip() for line in [*blocks, *ticks] for command in line.split(" && ")} - {"seqpart", "...", "python"}


def test_every_command_of_the_readme_is_tested_in_some_way():
    assert printed_commands() == set(HOW)


def test_the_extras_that_are_installed_are_there():
    extras = {extra for command in HOW for extra in re.findall(r"\.\[(\w+)\]", command)}
    assert extras == set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.stem)
def test_every_file_that_a_page_names_is_there(page):
    text = page.read_text()
    named = [ROOT / name for name in re.findall(r"`((?:examples|benchmarks|docs|tools|tests)/[\w./-]+)`", text)]
    named += [page.parent / link.partition("#")[0] for link in re.findall(r"\]\(((?!http|#)[^)]+)\)", text)]
    assert not [str(name) for name in named if not name.exists()]


def test_every_page_is_in_the_site():
    in_it = set(re.findall(r"- (?:.*: )?(\w+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert in_it == {page.stem for page in (ROOT / "docs").glob("*.md")}


def run_snippet(text, folder):
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", text], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if "print(result.accuracy" in text:
        assert re.search(r"^\d\.\d+ /\S+/runs/\S+/model\.safetensors proof: .* violations 0$", done.stdout, re.MULTILINE)


FIRST = [name for name in SNIPPETS if name.startswith("README")]
"""What a new user runs."""


@pytest.mark.parametrize("name", only_quick(SNIPPETS, FIRST))
def test_a_snippet_runs_with_a_smaller_network(name, tmp_path):
    """One raised NameError: nothing had imported nn, and the data came from nowhere."""
    text = SNIPPETS[name]
    for number, less in LESS.items():
        text = text.replace(number, less)
    run_snippet(text, tmp_path)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(command):
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "seqpart.train"]
    return words[3:]


@pytest.mark.parametrize(
    "command", [MAIN_JOB, *(pytest.param(command, marks=pytest.mark.slow) for command in (EXACT_JOB, SAVED))]
)
def test_a_job_of_the_readme_is_planned(command, here, capsys):
    ran = call(capsys, *options(command), "--dry-run")
    assert ran.code == 0, ran.err
    assert "predicted peak" in ran.out


def schedule_behind(command):
    """What README prints under a command, in the pieces between its dots."""
    line = PROSE.split(command)[1].splitlines()[1].strip()
    return [piece.strip() for piece in line.split("...") if piece.strip()]


@pytest.mark.parametrize("command", [SCHEDULE, OTHER_SCHEDULE])
def test_a_schedule_is_what_the_readme_prints(command, known_machine, here, capsys):
    more = shlex.split(OTHER_SCHEDULE.strip(". ")) if command == OTHER_SCHEDULE else []
    ran = call(capsys, *options(SCHEDULE), *more)
    assert ran.code == 0, ran.err
    pieces = schedule_behind(command)
    assert pieces
    assert not [piece for piece in pieces if piece not in ran.out]


def test_the_benchmarks_that_the_readme_names_are_there():
    modules = {command.split()[2] for command in HOW if command.startswith("python -m benchmarks")}
    assert modules
    assert not [name for name in modules if importlib.util.find_spec(name) is None]
    assert os.access(ROOT / "tools" / "check", os.X_OK)
    assert main.__module__ == "seqpart.train"


# --- What takes longer -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command, how in HOW.items() if how == "parsed (slow)"])
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # another command was of it too
def test_a_benchmark_takes_the_options_that_the_readme_gives(command, monkeypatch, capsys):
    """In this process: starting one takes 3 s, of 22 commands."""
    _, *words = shlex.split(command)
    start, words = (runpy.run_module, words[1:]) if words[0] == "-m" else (runpy.run_path, words)
    monkeypatch.setattr(sys, "argv", [*words, "--no-such-option"])
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend("tools")
    with pytest.raises(SystemExit) as ended:
        start(words[0], run_name="__main__")
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert re.search(r"(nrecognized (arguments|options): |nknown option\(s\): )--no-such-option", said), said


@pytest.mark.slow
def test_a_command_is_watched(tmp_path):
    words = [sys.executable, ROOT / "tools" / "watch.py", "--", sys.executable, "-m", *shlex.split(MAIN_JOB)[2:], "--dry-run"]
    done = subprocess.run(words, cwd=tmp_path, env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "predicted peak" in done.stdout
    assert re.search(r"\d+\.\d [MG]B", done.stdout + done.stderr)


@pytest.mark.slow
def test_verify_proves_what_the_readme_says(tmp_path):
    words = [sys.executable, "-m", "seqpart", *shlex.split(VERIFY)[1:], "--width", "64", "--depth", "4", "--partitions", "2"]
    done = subprocess.run(words, cwd=tmp_path, env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"equals full, bit for bit: \d+ tensors .* a wrong replay was noticed", " ".join(done.stdout.split()))


@pytest.mark.slow
def test_a_killed_run_goes_on_as_the_readme_says(tmp_path, monkeypatch, capsys):
    small = [*SMALL[:4], "--partitions", "2", "--epochs", "20", "--save-every", "20"]
    assert end(start(tmp_path, *options(SAVED), *small, until="epoch 3"), signal.SIGKILL).code == -signal.SIGKILL
    monkeypatch.chdir(tmp_path)
    ran = call(capsys, *options(RESUMED))
    assert ran.code == 0, ran.err
    assert "going on from runs/mine/checkpoint.json" in ran.out
    assert refused(call(capsys, *options(RESUMED)), 2, "is finished")


@pytest.mark.slow
def test_a_plan_for_a_card_that_is_not_there_is_made(here):
    words = [sys.executable, "-m", "seqpart", *shlex.split(PLAN_FOR_A_CARD)[1:], "--width", "2048", "--depth", "4"]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "NVIDIA GeForce RTX 3060" in done.stdout and "predicted peak" in done.stdout
