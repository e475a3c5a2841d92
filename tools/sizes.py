"""Hold the size of the whole: lines of Python in seqpart/, and functions of at most 100 lines everywhere.

There is no cap for a file: one that was cut because it met its cap goes on next door with the same idea.
"""

import ast
import sys
from pathlib import Path

WHOLE = ("seqpart", 40_000)
"""Lines at most; docs/design.md wants 25,000."""
FUNCTION_LINES = 100


def long_functions(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines, more than {FUNCTION_LINES}")
    return found


def main() -> int:
    folder, most = WHOLE
    modules = sorted(Path(folder).rglob("*.py"))
    lines = sum(path.read_text().count("\n") for path in modules)
    found = [line for folder in sys.argv[1:] for path in sorted(Path(folder).rglob("*.py")) for line in long_functions(path)]
    if lines > most:
        found.append(f"{folder}: {lines} lines, more than {most}")
    print("\n".join([*found, f"sizes: {lines} lines in {len(modules)} modules of {folder}"]))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
