"""Models that torch.compile has made: they run as they were written, since compiled code needs all its layers at once."""

import inspect
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

SAID = (
    "the model was compiled; here its layers run one by one and as they were written, which may round the last bits otherwise"
)


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
    wrapped = any(_is_wrapper(module) or getattr(module, "_compiled_call_impl", None) is not None for module in modules)
    own = (value for module in modules for value in vars(module).values())
    methods = (method for kind in {type(module) for module in modules} for method in _methods_of(kind))
    return wrapped or any(map(_is_made, itertools.chain(own, methods)))


def as_written(model: object) -> AbstractContextManager[object]:
    """A context in which the model's compiled modules and methods run the code that they were made of."""
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()


def _is_wrapper(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules


def _methods_of(kind: type) -> Iterator[object]:
    return (inspect.getattr_static(kind, name, None) for name in dir(kind))


def _is_made(attribute: object) -> bool:
    """True for compiled functions, but not for those of torch.compiler.disable, which have an original too."""
    function = getattr(attribute, "__func__", attribute) if isinstance(attribute, staticmethod | classmethod) else attribute
    marks = getattr(function, "__dict__", {})
    return "_torchdynamo_orig_callable" in marks and not marks.get("_torchdynamo_disable", False)
