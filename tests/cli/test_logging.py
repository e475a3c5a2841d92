"""The library speaks through the logger `seqpart`: handlers of a program's own take it, and with quiet nothing is printed."""

import ast
import logging
import subprocess
import sys
import textwrap

import pytest
from torch import nn

from seqpart.report.terminal import LOGGER, is_heard, printing
from seqpart.train import main
from tests.command import ENVIRONMENT, SECONDS, SMALL
from tests.given import trained
from tests.test_packages import ROOT

COMMANDS = {"train.py", "__main__.py"}
"""Who may print: the command, and `report`, by which it does."""

PROGRAM = """
    import logging, os, sys
    import torch, torch._dynamo
    from torch import nn
    from seqpart import Trainer

    def run(setup, quiet):
        exec(setup)
        x, y = torch.randn(32, 8), torch.arange(32) % 3
        options = dict(mem_limit="2GB", method="full", epochs=1, output_dir="out", overwrite=True)
        Trainer([lambda: nn.Linear(8, 3)], quiet=quiet, **options).fit((x, y), (x, y))

    for name, case in {cases}.items():  # each in a process that has imported already
        if not os.fork():
            for number, kind in (1, "out"), (2, "err"):
                os.dup2(os.open(name + "." + kind, os.O_WRONLY | os.O_CREAT), number)
            run(*case)
            sys.stdout.flush()
            os._exit(0)
        assert os.wait()[1] == 0, name
"""
INFO = 'logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s %(levelname)s %(message)s")'
CASES = {
    "silent": ("", True), "by default": ("logging.basicConfig()", False), "heard": (INFO, False), "heard alone": (INFO, True)
}  # fmt: skip
"""What a program of its own does before it trains, and whether it is quiet."""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What a program of each case prints, and its errors."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM.format(cases=CASES)))
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS,
        check=False,
    )  # fmt: skip
    texts = {name: tuple((folder / f"{name}.{kind}").read_text() for kind in ("out", "err")) for name in CASES}
    assert done.returncode == 0, (done.stderr, texts)
    return texts


def test_quiet_prints_nothing(said):
    assert said["silent"] == ("", "")


def test_what_is_said_is_printed_where_nobody_has_set_logging_up(said):
    out, err = said["by default"]
    assert err == ""
    assert "plan for 27 parameters" in out and out.splitlines()[-1].startswith("proof: limit 2.00 GB")


@pytest.mark.parametrize("case", ["heard", "heard alone"])
def test_a_handler_of_the_programs_own_gets_all_of_it_once(case, said):
    out, err = said[case]
    lines = err.splitlines()
    assert out == ""
    assert sum(line.startswith("seqpart INFO plan for 27 parameters") for line in lines) == 1
    assert sum(line.split()[:2] == ["partition", "blocks"] for line in lines) == 0 and "partition  " in err, "the plan's table"
    assert lines[-1].startswith("seqpart INFO proof: limit 2.00 GB")


def test_the_command_prints_although_the_users_model_sets_logging_up(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [*root.handlers, logging.StreamHandler(sys.stderr)])
    monkeypatch.setattr(root, "level", logging.INFO)
    assert main([*SMALL, "--dry-run", "--method", "full"]) == 0
    said = capsys.readouterr()
    assert "plan for" in said.out and said.err == ""
    assert LOGGER.propagate


def test_warnings_are_of_their_level(caplog, tmp_path):
    with caplog.at_level(logging.INFO, "seqpart"):
        trained(tmp_path, [lambda: nn.Linear(4, 3)], (4,), method="full")
    assert {record.name for record in caplog.records} == {"seqpart"}
    assert any(record.getMessage().startswith("proof: limit") for record in caplog.records)


def test_a_level_that_no_handler_takes_is_not_heard(monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    assert not is_heard(logging.ERROR)
    handler = logging.Handler(logging.WARNING)
    monkeypatch.setattr(LOGGER, "handlers", [*LOGGER.handlers, handler])
    assert is_heard(logging.WARNING) and not is_heard(logging.INFO)
    with printing():
        assert is_heard(logging.WARNING), "it is of this very logger"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_library_prints_nothing(path):
    found = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not found or path.name in COMMANDS or path.parent.name == "report"
