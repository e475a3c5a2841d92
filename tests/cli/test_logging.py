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
    import logging, sys
    import torch
    from torch import nn
    from seqpart import Trainer

    {setup}
    x, y = torch.randn(32, 8), torch.arange(32) % 3
    options = dict(mem_limit="2GB", method="full", epochs=1, output_dir="out")
    Trainer([lambda: nn.Linear(8, 3)], quiet={quiet}, **options).fit((x, y), (x, y))
"""
INFO = 'logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s %(levelname)s %(message)s")'
DEFAULT = "logging.basicConfig()"


def program(folder, *, setup="", quiet=False):
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM.format(setup=setup, quiet=quiet)))
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_quiet_prints_nothing(tmp_path):
    assert program(tmp_path, quiet=True) == ("", "")


def test_what_is_said_is_printed_where_nobody_has_set_logging_up(tmp_path):
    out, err = program(tmp_path, setup=DEFAULT)
    assert err == ""
    assert "plan for 27 parameters" in out and out.splitlines()[-1].startswith("proof: limit 2.00 GB")


@pytest.mark.parametrize("quiet", [True, False])
@pytest.mark.few(1)
def test_a_handler_of_the_programs_own_gets_all_of_it_once(quiet, tmp_path):
    out, err = program(tmp_path, setup=INFO, quiet=quiet)
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
