"""Writes docs/gallery.md: what the scripts in examples/gallery train, as a plain loop and under a limit."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "examples" / "gallery"
PAGE = ROOT / "docs" / "gallery.md"
_HEAD = """# Gallery

Written by `tools/write_gallery.py`. Training scripts as people write them. Each has a plain PyTorch loop, `plain`, and the
same training under a limit, `limited`. Models, data and losses are the same code for both, and the trained weights are equal to
the last bit (`tests/pages/test_gallery.py`).

    python examples/gallery/vae.py
"""


def page() -> str:
    """Returns the text of docs/gallery.md."""
    scripts = [(path, ast.parse(path.read_text())) for path in sorted(SCRIPTS.glob("*.py"))]
    rows, sections = ["| script | | plain loop | under a limit |", "|---|---|---|---|"], []
    for path, tree in scripts:
        plain, limited = (_lines(path, tree, name) for name in ("plain", "limited"))
        about = (ast.get_docstring(tree) or "").replace("\n", " ")
        link = f"[{path.name}](../examples/gallery/{path.name})"
        rows.append(f"| {link} | {about} | {len(plain)} lines | {len(limited)} lines |")
        code = "\n".join([*plain, "", "", *limited])
        sections.append(f"## {path.stem.replace('_', ' ').capitalize()}\n\n{about} From {link}:\n\n```py\n{code}\n```\n")
    return "\n".join([_HEAD, *rows, "", *sections])


def _lines(path: Path, tree: ast.Module, name: str) -> list[str]:
    """Returns the lines of one function of a script."""
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return path.read_text().splitlines()[function.lineno - 1 : function.end_lineno]


if __name__ == "__main__":
    PAGE.write_text(page())
