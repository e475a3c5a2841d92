"""Keeps torch's compiler, which a run does not use, out of memory.

torch._dynamo and sympy, which computes its shapes, hold 76 MB, a quarter of what a process held before its own work, and take
1.2 s to load. Parts of torch that compile nothing load them all the same. Where a run does need them (a compiled block, or
gradient checkpointing inside one), they are loaded while its plan is made, and the plan counts them.
"""

# [Note: the compiler] These parts of torch load it, where nothing is compiled, for:
#   an optimizer's step       to break the graph that is recorded (there is none)
#   `torch._disable_dynamo`   not to compile one of torch's own functions: of fake tensors, of optimizers
#   fake tensors              its switches, and whether a number may be a symbol (ours never are)
#   a given gradient          whether its size may be a symbol
# So while one of these is at work, stand-ins take the place of modules that are not loaded, with these answers and no others:
# any other access, or a change, loads the real module. Accesses by a block's own code are not answered, except `torch._check`:
# a block makes them in training too, where there is no stand-in, and by then the plan is made. Hence the lists of callers.
# Another version of torch may need more: then a run holds more, and says so.

import functools
import importlib
import operator
import sys
import threading
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

import torch

COMPILER = "torch._dynamo"
_UNCOMPILED = (
    "torch._subclasses.",
    "torch._prims",
    "torch._refs",
    "torch._decomp",
    "torch._meta_registrations",
    "torch.optim.",
    "seqpart.profile.",
    "seqpart.model.",
)
"""Modules whose functions need not be disabled for the compiler, since only we call them."""
_KEPT = "__dynamo_disable"
"""Attribute of a function in which `torch._disable_dynamo` caches its disabled version."""
_kept: list[Any] = []
"""Functions that got this attribute from a stand-in."""
_inside, _counting = 0, threading.Lock()
"""Number of active `without_compiler` contexts, of all threads: an optimizer may step beside a backward pass."""


@contextmanager
def without_compiler() -> Iterator[None]:
    """A context in which the compiler is not loaded for what can be answered without it. See [Note: the compiler]."""
    global _inside
    with _counting:
        _inside += 1
        if _inside == 1 and COMPILER not in sys.modules:
            sys.meta_path.insert(0, _PARTS)
            for stand_in in _STAND_INS:
                stand_in.stand_in()
    try:
        yield
    finally:
        with _counting:
            _inside -= 1
            if not _inside and _PARTS in sys.meta_path:
                _give_way(_STAND_INS)


@contextmanager
def without_symbols() -> Iterator[None]:
    """A context in which `torch._check` (attention calls it for a padding mask) loads no sympy (40 MB) if nothing is a symbol.
    For a block's forward pass; nothing else of that module has a stand-in there, see [Note: the compiler]."""
    if _CHECKED.__name__ in sys.modules:
        yield
        return
    _CHECKED.stand_in()
    try:
        yield
    finally:
        _CHECKED.give_way()


def take_step(optimizer: torch.optim.Optimizer) -> None:
    with without_compiler():
        optimizer.step()


def back_propagate(roots: Any, gradients: Any) -> None:
    with without_compiler():
        torch.autograd.backward(roots, grad_tensors=gradients)


class _StandIn(ModuleType):
    __path__: MutableSequence[str] = []  # noqa: RUF012 (it stays empty)

    def __init__(self, name: str, answers: dict[str, object]) -> None:
        super().__init__(name)
        vars(self).update(answers)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{self.__name__} is not loaded, and has no {name}")
        return getattr(self.real(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.real(), name, value)

    def real(self) -> ModuleType:
        _give_way(_OF_SYMBOLS if self in _OF_SYMBOLS else _STAND_INS)
        return importlib.import_module(self.__name__)

    def stand_in(self) -> None:
        package, _, own = self.__name__.rpartition(".")
        if self.__name__ not in sys.modules:
            sys.modules[self.__name__] = self
            if package in sys.modules:
                vars(sys.modules[package])[own] = self

    def give_way(self) -> None:
        package, _, own = self.__name__.rpartition(".")
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        if package in sys.modules and vars(sys.modules[package]).get(own) is self:
            del vars(sys.modules[package])[own]


def _give_way(stand_ins: Sequence[_StandIn]) -> None:
    for stand_in in stand_ins:
        stand_in.give_way()
    if stand_ins is _STAND_INS:
        if _PARTS in sys.meta_path:
            sys.meta_path.remove(_PARTS)
        while _kept:
            vars(_kept.pop()).pop(_KEPT, None)


class _Parts(Loader):
    """Finds the real modules inside the compiler's package, since its stand-in has none."""

    def __init__(self, module: ModuleType | None = None) -> None:
        self._module = module
        self._spec = module.__spec__ if module is not None else None

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if not name.startswith(f"{COMPILER}."):
            return None
        package = _COMPILER.real()
        if name in sys.modules:  # loaded with the package
            return spec_from_loader(name, _Parts(sys.modules[name]))
        return PathFinder.find_spec(name, package.__path__)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


_PARTS: Any = _Parts()


def _disable(function: Any, *arguments: Any, **options: Any) -> Any:
    if function is None or not function.__module__.startswith(_UNCOMPILED):
        return _COMPILER.real().disable(function, *arguments, **options)
    _kept.append(function)
    return function


def _graph_break(*arguments: Any, **options: Any) -> None:
    if sys._getframe(1).f_globals["__name__"] != "torch.optim.optimizer":
        _COMPILER.real().graph_break(*arguments, **options)


def _of_number(name: str, answer: Callable[[Any], Any]) -> Callable[..., Any]:
    """A function that applies `answer` to a number, and the real function to a symbol, even if a caller kept a reference."""

    def answered(value: Any, *more: Any, **options: Any) -> Any:
        if isinstance(value, int | float):
            return answer(value)
        return getattr(_OF_SYMBOLS[0].real(), name)(value, *more, **options)

    return answered


def _joined(join: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *values: functools.reduce(join, values)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Sequence):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


class _Unsaid:
    """Placeholder for classes that are imported, but never used without symbolic shapes."""

    def __init__(self, *_: object) -> None: ...


_SOURCES = ("ConstantSource", "AttrSource", "EphemeralSource", "CallMethodItemSource", "FloatTensorSource", "RandomValueSource")
_AS_IT_IS = (
    "guard_or_true", "guard_or_false", "guard_size_oblivious", "guarding_hint_or_throw", "guard_scalar", "guard_int",
    "guard_bool", "statically_known_true", "expect_true", "optimization_hint", "size_hint",
)  # fmt: skip
_OF_NUMBERS = {
    **{name: _of_number(name, lambda value: value) for name in _AS_IT_IS},
    **{name: _of_number(name, lambda _: False) for name in ("is_symbolic", "is_nested_int")},
    **dict.fromkeys(("free_unbacked_symbols", "_iterate_exprs", "_iterate_nodes"), lambda _: set()),
    "has_free_unbacked_symbols": lambda _: False,
    **{name: _of_number(name, lambda _: True) for name in ("has_guarding_hint", "has_hint")},
    "compute_unbacked_bindings": lambda *_, **__: None,
    "sym_and": _joined(operator.and_), "sym_or": _joined(operator.or_), "sym_eq": _equal,
    "DimDynamic": _Unsaid, "GuardOnDataDependentSymNode": type("GuardOnDataDependentSymNode", (RuntimeError,), {}),
}  # fmt: skip
"""Answers about symbols where there are none."""
_CONFIG = _StandIn(
    f"{COMPILER}.config",
    {"fake_tensor_cache_enabled": True, "fake_tensor_cache_crosscheck_enabled": False, "_custom_ops_profile": None},
)
_COMPILER = _StandIn(COMPILER, {"config": _CONFIG, "disable": _disable, "graph_break": _graph_break})
_SOURCE = _StandIn(f"{COMPILER}.source", dict.fromkeys(_SOURCES, _Unsaid))
_SYMBOLS = "torch.fx.experimental.symbolic_shapes"
_CHECKED = _StandIn(_SYMBOLS, {"expect_true": _OF_NUMBERS["expect_true"]})
_OF_SYMBOLS = (
    _StandIn(_SYMBOLS, _OF_NUMBERS),
    _StandIn("torch.utils._sympy.functions", {"Max": max}),
    _StandIn("sympy", dict.fromkeys(("Basic", "Symbol", "Eq"), _Unsaid)),
    _CHECKED,  # after the other of that name, which stands in first where all do
)
_STAND_INS = (_COMPILER, _CONFIG, _SOURCE, *_OF_SYMBOLS)
