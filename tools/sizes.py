"""The measures of the code's structure, and the one that fails: the lines of the whole.

python tools/sizes.py            what can be read out of the files
python tools/sizes.py --frames   and how deep the calls of a small run go, which takes seconds
"""

import argparse
import ast
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = ROOT / "seqpart"
MOST_LINES = 47_430
"""Of Python in seqpart/; the goal is 25,000."""
SHOWN = 5
"""Of the widest."""
OPTIONS = "config"
"""The module whose classes declare every option."""

PROBE = """
import sys, traceback
from pathlib import Path
import seqpart
from seqpart import Trainer
from seqpart.plan.simulator import Simulator
import torch
from torch import nn
found, code = {}, str(Path(seqpart.__file__).parent)
def ours():
    return sum(frame.filename.startswith(code) for frame in traceback.extract_stack(sys._getframe(2)))
def watched(owner, name, key):
    plain = getattr(owner, name)
    def counting(*args, **kwargs):
        if key not in found or key == "optimizer.step":  # which is tried before the run: the last one counts
            found[key] = ours()
        return plain(*args, **kwargs)
    setattr(owner, name, counting)
watched(torch.optim.SGD, "step", "optimizer.step")
watched(Simulator, "run", "simulator")
x, y = torch.randn(8, 4), torch.randint(2, (8,))
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
options = {"mem_limit": "2GB", "method": "streamed", "optimizer": "sgd", "epochs": 1, "quiet": True}
Trainer(model, output_dir=sys.argv[1], **options).fit((x, y))
print(*(f"{key} {depth}" for key, depth in found.items()), sep="\\n")
"""


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def count_code(path: Path) -> int:
    """Lines that are neither blank nor part of a docstring, a comment or an import."""
    others = set[int]()
    for node in ast.walk(tree(path)):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if text or isinstance(node, ast.Import | ast.ImportFrom):
            others.update(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = enumerate(path.read_text().splitlines(), 1)
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") and n not in others for n, line in lines)


def modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(CODE).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(CODE.rglob("*.py"))
    }


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of ours that a file imports, anywhere in it."""
    for node in ast.walk(tree(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (name.removeprefix("seqpart.") for name in names if name.removeprefix("seqpart.") in known)


def levels(known: dict[str, Path]) -> int:
    """The longest chain of modules that import one another."""
    graph = {name: {other for other in imports(path, known) if other != name} for name, path in known.items()}

    @cache
    def depth(name: str) -> int:
        return 1 + max((depth(other) for other in graph[name] if not name.startswith(f"{other}.")), default=0)

    return max(map(depth, graph))


def widths(known: dict[str, Path]) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Classes by the fields that they declare, and constructors by their arguments; the widest first."""
    fields, arguments = [], []
    for name, path in known.items():
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.ClassDef):
                continue
            fields.append((sum(isinstance(item, ast.AnnAssign) for item in node.body), f"{name}.{node.name}"))
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    count = len(item.args.posonlyargs) + len(item.args.args) + len(item.args.kwonlyargs) - 1
                    arguments.append((count, f"{name}.{node.name}"))
    return sorted(fields, reverse=True), sorted(arguments, reverse=True)


def listed_again(known: dict[str, Path]) -> list[str]:
    """Options that another class of what users meet declares, too. (options.py is written from them.)"""
    front = (OPTIONS, "trainer", "cli")
    declared: dict[str, set[str]] = {}
    for name, path in known.items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef) and name.split(".")[0] in front:
                for item in node.body:
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        declared.setdefault(item.target.id, set()).add(f"{name}.{node.name}")
    declared.pop("heading")  # of each group
    ours = f"{OPTIONS}."
    return [name for name, owners in declared.items() if len(owners) > 1 and any(one.startswith(ours) for one in owners)]


def frames() -> list[str]:
    """Frames of ours from the script to what a run comes down to, of a small run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run([sys.executable, "-c", PROBE, folder], stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
    return [line for line in ran.stdout.splitlines() if line.split(" ")[0] in ("optimizer.step", "simulator")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", action="store_true", help="how deep the calls of a small run go, too")
    asked = parser.parse_args()
    known = modules()
    lines = sum(path.read_text().count("\n") for path in known.values())
    code = sum(count_code(path) for path in known.values())
    fields, arguments = widths(known)
    print(f"lines of seqpart/: {lines} (at most {MOST_LINES}), {code} of them code: no blanks, docstrings, comments, imports")
    print(f"modules: {len(known)}, in {sum(path.name == '__init__.py' for path in known.values()) - 1} packages")
    print(f"longest chain of imports: {levels(known)} modules")
    print(f"modules that trainer.py imports: {len(set(imports(known['trainer'], known)))}")
    print("most fields:", ", ".join(f"{name} {count}" for count, name in fields[:SHOWN]))
    print("most arguments of a constructor:", ", ".join(f"{name} {count}" for count, name in arguments[:SHOWN]))
    print(f"options that are declared more than once: {len(listed_again(known))}")
    if asked.frames:
        print("frames from fit to", ", to ".join(frames()))
    return int(lines > MOST_LINES)


if __name__ == "__main__":
    sys.exit(main())
