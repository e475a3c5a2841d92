"""Hold the sizes: files of at most 400 lines, functions of at most 100, in Python under the given folders."""

import ast
import sys
from pathlib import Path

FILE_LINES = 400
FUNCTION_LINES = 100


def problems(path: Path) -> list[str]:
    text = path.read_text()
    lines = text.count("\n")
    found = [f"{path}: {lines} lines, more than {FILE_LINES}"] if lines > FILE_LINES else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines, more than {FUNCTION_LINES}")
    return found


def main() -> int:
    found = [line for folder in sys.argv[1:] for path in sorted(Path(folder).rglob("*.py")) for line in problems(path)]
    print("\n".join(found) or "sizes: all files and functions are within the limits")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
