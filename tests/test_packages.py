"""Packages import one way only, as the table in docs/design.md says; nothing imports in a circle."""

import ast
import re
from pathlib import Path

import pytest

import seqpart

ROOT = Path(seqpart.__file__).parent
TABLE = ROOT.parent / "docs" / "design.md"


def table():
    """Packages and modules of their own in its order: each imports only what stands below it."""
    section = TABLE.read_text().partition("## The packages\n")[2].partition("\n## ")[0]
    return re.findall(r"^    (\w+)(?:/|\.py) ", section, re.MULTILINE)


PLACE = {name: place for place, name in enumerate(table())}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}


def package_of(module):
    return module.partition(".")[0]


def imports(path):
    """Modules of seqpart that a file imports, anywhere in it; a package's own name for what its __init__ gathers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            package, _, module = name.partition(".")
            if package == "seqpart" and module in MODULES:
                yield module


def test_the_table_names_every_package_and_every_module_of_its_own():
    assert set(PLACE) == {package_of(module) for module in MODULES}


@pytest.mark.parametrize(("module", "path"), MODULES.items(), ids=MODULES)
def test_a_module_imports_from_its_own_package_or_from_below(module, path):
    for other in imports(path):
        assert PLACE[package_of(other)] >= PLACE[package_of(module)], f"{module} imports {other}, which stands above it"


def test_nothing_imports_in_a_circle():
    # A package's __init__ gathers its modules; the modules import each other, not the gathering.
    graph = {
        module: {other for other in imports(path) if other not in (module, package_of(module))}
        for module, path in MODULES.items()
    }
    done, walking = set(), []

    def walk(module):
        assert module not in walking, f"circle: {' > '.join([*walking, module])}"
        if module in done:
            return
        walking.append(module)
        for other in sorted(graph.get(module, ())):
            walk(other)
        walking.pop()
        done.add(module)

    for module in graph:
        walk(module)


@pytest.mark.parametrize("module", ["units", "schedule.steps", "plan.dynamic", "errors", "checkpoint.run_directory"])
def test_modules_that_decide_with_ints_do_not_touch_tensors(module):
    assert "import torch" not in MODULES[module].read_text()
