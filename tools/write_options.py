"""Writes two files from the options' fields and their help: the fields of seqpart/options.py, which editors complete and mypy
checks in `Trainer(...)`, and the reference docs/options.md."""

import ast
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path

from seqpart.cli.arguments import groups_of, help_of, split_default
from seqpart.cli.commands import VerifyJob
from seqpart.cli.job import Job
from seqpart.config import IN_PYTHON, Config, hints_of
from seqpart.fields import as_text, flags_of, metavar_of

ROOT = Path(__file__).parents[1]
CODE = ROOT / "seqpart"
TARGET = CODE / "options.py"
REFERENCE = ROOT / "docs" / "options.md"
BESIDE = ("heading", "loss", "optimizer")
"""No option, and arguments of their own."""
INTRODUCTION = """# Options

Written by `tools/write_options.py`: the options of the command, and of `Trainer` in Python, where `--batch-size 64` is
`batch_size=64`. `TYPE[,...]` takes one value for all partitions or one for each: `5,160`, in Python `(5, 160)`. A size is 2GB,
1.5GiB, a share such as 0.8, or auto.

    python -m seqpart.train --mem-limit 2GB --method auto"""
IN_TRAINER = ("quiet",)
"""Options of the command that `Trainer` takes beside the settings."""


def options() -> str:
    """Returns the text of seqpart/options.py: the current one, with the fields of all groups in its class."""
    groups = [node for node in ast.parse((CODE / "config.py").read_text()).body if isinstance(node, ast.ClassDef)]
    members = [field for group in groups for field in group.body if isinstance(field, ast.AnnAssign)]
    lines = {ast.unparse(field.target): f"    {ast.unparse(field.target)}: {_type(field.annotation)}" for field in members}
    head, mark, _ = TARGET.read_text().partition('be functions too."""\n\n')
    return head + mark + "".join(f"{line}\n" for name, line in lines.items() if name not in BESIDE)


def reference() -> str:
    """Returns the text of docs/options.md: one table for each group of --help, and one for `seqpart verify`."""
    parts = [INTRODUCTION]
    for heading, names in groups_of(Job).items():
        parts += [f"\n## {heading.replace('-', ' ')}\n", *_table(Job, names)]
    parts += ["\n## seqpart verify\n\nThe options above, except those that write files, and\n"]
    parts += _table(VerifyJob, inspect.get_annotations(VerifyJob))
    return "\n".join(parts) + "\n"


def _table(kind: type[Job], names: Iterable[str]) -> Iterator[str]:
    hints, said = hints_of(kind), help_of(kind)
    defaults = {field.name: field.default for field in fields(kind)}
    in_python = {field.name: field.default for field in fields(Config)}
    yield from ("| option | values | default | |", "|---|---|---|---|")
    for name in names:
        text, _, default = split_default(said[name], defaults[name])
        if defaults[name] is not None:
            default = "required" if defaults[name] is MISSING else as_text(defaults[name])
        if kind is Job and defaults[name] != in_python.get(name, defaults[name]):
            default += f" (in Python: {in_python[name] or 'required'})"
        where = "" if name in (*in_python, *IN_TRAINER) or kind is not Job else " Command only."
        where = f" In Python: `{IN_PYTHON[name]}`." if name in IN_PYTHON else where
        values = "" if hints[name] is bool else f"`{metavar_of(hints[name])}`"
        flags = ", ".join(f"`{flag}`" for flag in flags_of(name, hints[name]))
        cells = flags, values, default.rstrip(".") or "none", text + where
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(annotation: ast.expr) -> str:
    """Without what stands beside it in Annotated."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        assert isinstance(annotation.slice, ast.Tuple)
        annotation = annotation.slice.elts[0]
    return ast.unparse(annotation).replace("'", '"')


if __name__ == "__main__":
    TARGET.write_text(options())
    REFERENCE.write_text(reference())
