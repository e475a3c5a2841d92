"""Parts of a model that came in evaluation mode though the model trains stay so, as a BatchNorm that keeps its statistics.

A plain loop that lets a part evaluate after `model.train()` keeps it so. Here `train()` is called at every visit of a block,
so while a run lasts such a part has a `train` of its own that leaves it as it is. Models of libraries that come in evaluation
mode as a whole, which is how `from_pretrained` leaves them, say nothing by it, and train.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from types import MethodType, TracebackType
from typing import Any

from torch import nn

_WORDS = 4
"""Types that are named."""


class KeptModes:
    """A context in which the parts of a model, a module or a list with some, that came so stay so; its value is the model."""

    def __init__(self, model: object) -> None:
        self._model = model
        self._kept: list[nn.Module] = []

    def __enter__(self) -> object:
        parts = [self._model] if isinstance(self._model, nn.Module) else self._model
        roots = [part for part in parts if isinstance(part, nn.Module)] if isinstance(parts, list | tuple) else []
        trains = any(root.training for root in roots)
        self._kept = list(dict.fromkeys(part for root in roots for part in _evaluating(root, trains)))
        for part in self._kept:
            part.train = MethodType(_stay, part)  # type: ignore[method-assign]
        return self._model

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for part in self._kept:
            vars(part).pop("train", None)
        self._kept = []


def _evaluating(module: nn.Module, trains: bool) -> Iterator[nn.Module]:
    """trains: whether what it is a part of does. One with a `train` of its own decides for itself."""
    trains = module.training if hasattr(type(module), "from_pretrained") else trains
    if trains and not module.training and type(module).train is nn.Module.train and "train" not in vars(module):
        yield module
    for part in module.children():
        yield from _evaluating(part, trains)


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    for part in module.children():
        part.train(mode)
    return module


def stays(module: nn.Module) -> bool:
    """Whether it stays in evaluation."""
    own: Any = vars(module).get("train")
    return getattr(own, "__func__", None) is _stay


def said_of(modules: Iterable[nn.Module]) -> list[str]:
    """Which parts of these stay in evaluation, in words: by type, those that have no parts."""
    kept = (part for module in modules for part in module.modules() if stays(part))
    kinds = Counter(type(part).__name__ for part in kept if next(part.children(), None) is None)
    named = [f"{kind} ({count})" for kind, count in kinds.most_common(_WORDS)]
    if len(kinds) > _WORDS:
        named.append(f"and {len(kinds) - _WORDS} more types")
    return [f"in evaluation while the rest trains, as they came: {', '.join(named)}"] if named else []
