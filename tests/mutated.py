"""The program with one of its waits, events or changes of stream left out: what a check of them must notice."""

import ast
import importlib
import inspect
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CALLS = ("wait", "after", "follow", "mark", "lend", "copying", "free", "finish_state")


@dataclass(frozen=True)
class Site:
    module: str
    owner: str
    """The function or method that has the call, by its qualified name."""
    line: int
    column: int
    text: str

    def __str__(self):
        return f"{self.module.removeprefix('seqpart.')}:{self.owner}: {self.text}"


class _Calls(ast.NodeVisitor):
    """Calls by the names of functions around them; those of nested functions and lambdas are of the outermost one."""

    def __init__(self, module):
        self.module, self.names, self.inside, self.found = module, [], False, []

    def visit_ClassDef(self, node):
        self.names.append(node.name)
        self.generic_visit(node)
        self.names.pop()

    def visit_FunctionDef(self, node):
        if self.inside:
            self.generic_visit(node)
            return
        self.names.append(node.name)
        self.inside = True
        self.generic_visit(node)
        self.inside = False
        self.names.pop()

    def visit_Call(self, node):
        self.generic_visit(node)
        if self.inside and isinstance(node.func, ast.Attribute) and node.func.attr in CALLS and _orders(node):
            self.found.append(Site(self.module, ".".join(self.names), node.lineno, node.col_offset, ast.unparse(node)))


def _orders(node):
    """Not a mark of the store, nor a barrier of threads."""
    return ast.unparse(node.func) not in ("self._store.mark", "ready.wait")


def sites(*modules):
    for name in modules:
        calls = _Calls(name)
        calls.visit(ast.parse(Path(importlib.import_module(name).__file__).read_text()))
        yield from calls.found


class _Without(ast.NodeTransformer):
    def __init__(self, site):
        self.site, self.done = site, False

    def visit_Call(self, node):
        self.generic_visit(node)
        if (node.lineno, node.col_offset, getattr(node.func, "attr", None)) != (self.site.line, self.site.column, self.attr):
            return node
        self.done = True
        text = "__import__('contextlib').nullcontext()" if self.attr == "copying" else "None"
        return ast.copy_location(ast.parse(text, mode="eval").body, node)

    @property
    def attr(self):
        return ast.parse(self.site.text, mode="eval").body.func.attr


@contextmanager
def without(site):
    """Inside, the program does everything but that call."""
    module = importlib.import_module(site.module)
    tree = ast.parse(Path(module.__file__).read_text())
    change = _Without(site)
    tree = ast.fix_missing_locations(change.visit(tree))
    assert change.done, f"{site} is not there"
    code = _code_of(compile(tree, module.__file__, "exec"), site.owner.split("."))
    function = inspect.unwrap(_found(module, site.owner))
    before = function.__code__
    function.__code__ = code
    try:
        yield
    finally:
        function.__code__ = before


def _code_of(code, names):
    for name in names:
        code = next(part for part in code.co_consts if inspect.iscode(part) and part.co_name == name)
    return code


def _found(module, owner):
    found = module
    for name in owner.split("."):
        found = inspect.getattr_static(found, name)
    return found.fget if isinstance(found, property) else found
