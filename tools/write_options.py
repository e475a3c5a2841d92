"""Writes the fields of seqpart/options.py, which editors complete and mypy checks in `Trainer(...)`, from seqpart/config.py."""

import ast
from pathlib import Path

CODE = Path(__file__).parents[1] / "seqpart"
TARGET = CODE / "options.py"
BESIDE = ("heading", "loss", "optimizer")
"""No option, and arguments of their own."""


def options() -> str:
    """What the module is to be: as it is, with the fields of all groups in its class."""
    groups = [node for node in ast.parse((CODE / "config.py").read_text()).body if isinstance(node, ast.ClassDef)]
    fields = [field for group in groups for field in group.body if isinstance(field, ast.AnnAssign)]
    lines = {ast.unparse(field.target): f"    {ast.unparse(field.target)}: {_type(field.annotation)}" for field in fields}
    head, mark, _ = TARGET.read_text().partition('be functions too."""\n\n')
    return head + mark + "".join(f"{line}\n" for name, line in lines.items() if name not in BESIDE)


def _type(annotation: ast.expr) -> str:
    """Without what stands beside it in Annotated."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        assert isinstance(annotation.slice, ast.Tuple)
        annotation = annotation.slice.elts[0]
    return ast.unparse(annotation).replace("'", '"')


if __name__ == "__main__":
    TARGET.write_text(options())
