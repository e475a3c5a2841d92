"""Models that torch.compile has made run as they were written, since compiled code needs all its layers at once; layers may be
compiled here one by one."""

import inspect
import itertools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

SAID = (
    "the model was compiled; here its layers run one by one and as they were written, which may round the last bits otherwise"
)
_CALLED = "_compiled_call_impl"
"""Attribute of a module with what is called instead of its `_call_impl`."""
_MOST_VERSIONS = 1 << 12


def original(model: object) -> object:
    """Returns the module that torch.compile took, or a list with those; anything else as it is."""
    if isinstance(model, list):
        return [original(part) for part in model]
    return original(model._orig_mod) if isinstance(model, nn.Module) and _is_wrapper(model) else model


def is_compiled(model: object) -> bool:
    """True if torch.compile made the model, or any of its modules or their methods."""
    if isinstance(model, list | tuple):
        return any(map(is_compiled, model))
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    wrapped = any(_is_wrapper(module) or getattr(module, _CALLED, None) is not None for module in modules)
    own = (value for module in modules for value in vars(module).values())
    kinds = {type(module) for module in modules}
    methods = (inspect.getattr_static(kind, name, None) for kind in kinds for name in dir(kind))
    return wrapped or any(map(_is_made, itertools.chain(own, methods)))


def as_written(model: object) -> AbstractContextManager[object]:
    """A context in which the model's compiled modules and methods run the code that they were made of."""
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()


@contextmanager
def compiler_at_work(wanted: bool) -> Iterator[None]:
    """A context in which layers may be compiled, all in this process: torch's compile workers would each hold the libraries a
    second time. Loads the compiler if it is wanted."""
    if not wanted:
        yield
        return
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    # One code serves a class in all its kinds, modes and numbers of rows: past torch's limit of 8 it would run as written.
    many = dynamo.patch(recompile_limit=_MOST_VERSIONS, accumulated_recompile_limit=_MOST_VERSIONS)
    with many, inductor.patch(compile_threads=1):
        from torch._inductor import compile_fx  # noqa: F401  # now, and not in the middle of a step

        yield


class Layers:
    """Modules that run compiled inside this context, as after `module.compile(dynamic=False)`. Equal ones share their code,
    whose inputs are the weights: these may come and go."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Compiles those of `modules` that hold other modules: a Linear or a norm alone gains nothing."""
        chosen = [module for module in modules if any(module.children())]
        self._compiled = [(module, torch.compile(module._call_impl, dynamic=False)) for module in chosen]

    def __len__(self) -> int:
        return len(self._compiled)

    def __enter__(self) -> None:
        for module, compiled in self._compiled:
            vars(module)[_CALLED] = compiled

    def __exit__(self, *_: object) -> None:
        for module, _compiled in self._compiled:
            vars(module).pop(_CALLED, None)


def _is_wrapper(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules


def _is_made(attribute: object) -> bool:
    """True for compiled functions, but not for those of torch.compiler.disable, which have an original too."""
    function = getattr(attribute, "__func__", attribute) if isinstance(attribute, staticmethod | classmethod) else attribute
    marks = getattr(function, "__dict__", {})
    return "_torchdynamo_orig_callable" in marks and not marks.get("_torchdynamo_disable", False)
