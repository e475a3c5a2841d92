"""The methods by name: where they are named, and what a new one may be called."""

import ast
from pathlib import Path

import pytest

import seqpart
from seqpart import Trainer
from seqpart.errors import OptionError
from seqpart.methods import METHODS, register
from seqpart.methods.sil import SilMethod

ROOT = Path(seqpart.__file__).parent
NAMED = {
    "config.py": {"auto", *METHODS},  # for editors and type checkers; and the headings of their options
    "cli/job.py": {"sil"},  # the command's default
    "cli/commands.py": {"streamed", "full"},  # its defaults
    "verify/verification.py": {"streamed", "full"},
    "runtime/result.py": {"streamed"},  # an evaluation trains nothing: the method that needs least
    "plan/plan.py": {"streamed"},  # how recovery is planned
    "model/losses.py": {"psl"},  # a loss of that name
}


def test_no_other_package_asks_for_a_method_by_its_name():
    for path in sorted(ROOT.rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if not name.startswith("methods/"):
            found = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
            assert not found & set(METHODS) - NAMED.get(name, set()), name


def test_a_name_stands_for_one_method():
    for name in ("sil", "auto"):
        with pytest.raises(OptionError, match=f"there is a method {name} already"):
            register(type("Other", (SilMethod,), {"name": name})())


def test_options_of_a_method_are_those_that_a_run_has():
    """A group of another kind made every Settings fail, also for other methods."""
    with pytest.raises(OptionError, match=r"method mine: expected as options groups of seqpart\.config; found"):
        register(type("Mine", (SilMethod,), {"name": "mine", "options": (int,)})())


def test_a_method_that_is_made_of_another_shares_its_options(monkeypatch):
    """They were refused for both: each was told that they go with the other only."""
    monkeypatch.setitem(METHODS, "mine", type("Mine", (SilMethod,), {"name": "mine"})())
    for name in ("sil", "mine"):
        Trainer([], mem_limit="2GB", method=name, objective="mse", kappa=3.0)
    with pytest.raises(OptionError, match='kappa goes with method="sil" or mine only'):
        Trainer([], mem_limit="2GB", method="streamed", kappa=3.0)


def test_options_of_one_method_do_not_go_with_another():
    with pytest.raises(OptionError, match='subnets goes with method="ist" only; found method="sil"'):
        Trainer([], mem_limit="2GB", method="sil", subnets=2)
