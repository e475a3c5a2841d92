"""Actions between a model's layers that cannot be recorded: they would happen while recording, and never again.

Such models are refused by name: a counter in a buffer that is read as a number, a module that keeps something from one step
to the next, a layer that is changed from outside, hooks, gradients that are computed in a forward pass.
"""

import random
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from seqpart.capture.program import tensors_in
from seqpart.model.inspection import OF_TORCH, Remembered, is_plain, remembered
from seqpart.model.tensors import asks_for_type, tensors_of

_HOOK = "a hook on a tensor between layers would be left out"
_GRADIENTS = (
    "it asks for gradients in its forward pass, between layers; do so inside one layer that holds all that is differentiated, "
    "under torch.enable_grad()"
)
_BY_DATA = "it changes a tensor by its .data, which would be left out: do so inside one layer"
_CALLS: Mapping[Any, str] = {
    torch.Tensor.register_hook: _HOOK,
    torch.Tensor.register_post_accumulate_grad_hook: _HOOK,
    **dict.fromkeys((torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad), _GRADIENTS),
}
_DRAWS = (
    torch.bernoulli, torch.multinomial, torch.normal, torch.randint, torch.randn, torch.Tensor.bernoulli,
    torch.Tensor.bernoulli_, torch.Tensor.multinomial, torch.Tensor.normal_, torch.Tensor.random_, torch.Tensor.uniform_,
)  # fmt: skip
"""Draws whose numbers must not be read. `torch.rand` draws the least and the largest number in two runs, which then differ."""
_READS = (
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__bool__,
    torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.__contains__, torch.is_nonzero,
    torch.Tensor.is_nonzero, torch.equal, torch.Tensor.equal, torch.allclose, torch.Tensor.allclose,
)  # fmt: skip
"""Functions that read a tensor's values."""
LARGEST = 1 - 2**-24
_RANDOM = "a random number"


def why_not(function: Any, args: Sequence[Any], names: Mapping[int, str]) -> str:
    """Returns why a call of `function` cannot be recorded, or "". names: those of the model's own tensors, by their ids."""
    if function in _CALLS:
        return _CALLS[function]
    if function == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
        return _BY_DATA
    if function is torch.Tensor.requires_grad_ and args and id(args[0]) in names:
        return f"it changes requires_grad of {names[id(args[0])]} in its forward pass"
    return ""


class ReadNumbers:
    """Tracks numbers that the model's code reads while it runs: they must be the same at every step."""

    def __init__(self, names: Mapping[int, str]) -> None:
        """names: those of the model's own tensors, by their ids."""
        self._names = names
        self._of: dict[int, frozenset[str]] = {}
        """Names of the buffers that a tensor with values is made of, by the tensor's id."""
        self._alive: list[torch.Tensor] = []
        self._data: set[int] = set()
        """Ids of aliases of tensors that `.data` has returned."""
        self._read: set[str] = set()
        self._written: set[str] = set()

    def why_not(
        self, function: Any, given: Sequence[torch.Tensor], changed: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> str:
        """Returns why the model cannot be recorded after this call, which took, changed and made these tensors, or ""."""
        if function == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            self._alive += made
            self._data.update(map(id, made))
        if any(id(tensor) in self._data for tensor in changed):
            return _BY_DATA
        self._written |= {self._names[id(tensor)] for tensor in changed if id(tensor) in self._names}
        real = [tensor for tensor in given if not isinstance(tensor, FakeTensor) or tensor.constant is not None]
        if len(real) < len(given):  # then what it makes has no values
            return ""
        names = frozenset(name for tensor in real for name in self._of.get(id(tensor), ()))
        names |= {self._names[id(tensor)] for tensor in real if id(tensor) in self._names}
        names |= {_RANDOM} if function in _DRAWS else set()
        if function in _READS:
            self._read |= names
        elif names:
            self._alive += made
            self._of.update(dict.fromkeys(map(id, made), names))
        if _RANDOM in self._read:
            return "it draws a random number and looks at it: every step would repeat what the first one did"
        both = sorted(self._read & self._written)
        if both:
            return f"it changes its buffer {both[0]} and reads it as a number (item(), an if): do both inside one layer"
        return ""


@contextmanager
def extremes(*, largest: bool) -> Iterator[None]:
    """A context in which Python's and numpy's uniform random numbers are the least or the largest: an action with a probability
    between 0 and 1 then happens in only one of two such runs."""

    def least(*sizes: Any) -> Any:
        return np.full(sizes[0] if len(sizes) == 1 else sizes, LARGEST * largest) if sizes else LARGEST * largest

    def between(low: float = 0.0, high: float = 1.0, size: Any = None) -> Any:
        found = low + (high - low) * LARGEST * largest
        return found if size is None else np.full(size, found)

    with ExitStack() as stack:
        for module, name in ((random, "random"), (np.random, "rand"), (np.random, "random")):
            stack.enter_context(patch.object(module, name, least))
        for module in (random, np.random):
            stack.enter_context(patch.object(module, "uniform", between))
        yield


class HiddenPath(RuntimeError):
    """A tensor goes from one layer's call to another beside what they return and take, or a layer uses another's weight."""


class HiddenPaths:
    """Watches functions inside layers' calls: what one call computes and another uses, it must return, and the other take. What
    goes by an attribute would be lost where the calls are in two blocks, or where one is repeated; and weights of a layer are
    away while another partition computes."""

    def __init__(self, names: Mapping[int, str]) -> None:
        """names: those of the model's own tensors, by their ids."""
        self._names = names
        self._of: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """The call that computed a tensor of its inputs, or of parameters, by the tensor's id."""
        self._taken: dict[int, torch.Tensor] = {}
        self._own = frozenset[int]()
        """Ids of the running layer's parameters and buffers."""
        self._layers: list[str] = []
        """Paths of the layers called so far, the last of which is running; a call is its place in this list."""
        self._within, self._why = False, ""
        """True inside a call; why its layer must be in one block with another."""

    @contextmanager
    def call(self, path: str, layer: nn.Module, taken: Iterable[torch.Tensor]) -> Iterator[None]:
        """A context for a call of a layer that takes these tensors. Raises HiddenPath where it uses others."""
        self._taken, self._own = {id(tensor): tensor for tensor in taken}, frozenset(map(id, tensors_of(layer).values()))
        self._layers.append(path)
        self._within, self._why = True, ""
        try:
            yield
        finally:
            self._within = False
        if self._why:
            raise HiddenPath(self._why)

    def run(self, function: Any, args: Any, kwargs: Any, between: Container[int]) -> Any:
        """Runs a function inside a layer's call, or another function's. between: ids of tensors outside of all layers."""
        if not self._within:
            return function(*args, **kwargs)
        given = tensors_in((args, kwargs))
        versions = [tensor._version for tensor in given]
        found = function(*args, **kwargs)
        follows, call = function in _DRAWS, len(self._layers) - 1
        for tensor in given:
            of = self._of.get(id(tensor))
            maker = of[1] if of is not None and of[0]() is tensor else None
            named, own = self._names.get(id(tensor)), id(tensor) in self._own or id(tensor) in self._taken or maker == call
            if named is not None:
                if not own and not asks_for_type(function):
                    self._why = f"it uses {named}, which is another layer's"
            elif not own and (maker is not None or id(tensor) in between):
                source = f"a call of {self._layers[maker]}" if maker is not None else "the model"
                self._why = f"it uses a tensor that {source} computed, and that it does not get from its caller"
            follows = follows or id(tensor) in self._taken or maker is not None or isinstance(tensor, nn.Parameter)
        if follows and getattr(function, "__name__", "") not in _BY_SHAPE:
            made = tensors_in(found) + [tensor for tensor, old in zip(given, versions, strict=True) if tensor._version != old]
            self._of.update((id(tensor), (weakref.ref(tensor), call)) for tensor in made)
        return found


_BY_SHAPE = frozenset(
    {"new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "empty_like", "full_like", "ones_like", "zeros_like"}
)
"""Functions that take a tensor for its shape, type or device alone: what they make may be kept for all rows."""


class Layers:
    """Watches the layers while the model runs: changes made to them from outside would be lost."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self._known = {part: _looks(part) for block in blocks for part in block.modules()}

    def why_not(self, block: nn.Module) -> str:
        """Returns why a block cannot be recorded, or ""."""
        for path, part in block.named_modules():
            now = _looks(part)
            known = self._known.get(part, {})  # {} for example for a parametrization that exists only for this call
            if changed := [name for name in known | now if known.get(name) != now.get(name)]:
                name = f"{path}.{changed[0]}".lstrip(".")
                return f"it changes {name} of this layer from outside, which would be left out"
        return ""

    def called(self, block: nn.Module) -> None:
        """Accepts the changes that a block made to itself; its parts may belong to other blocks too."""
        self._known.update({part: _looks(part) for part in block.modules()})


def _looks(part: nn.Module) -> dict[str, object]:
    """Returns a module's settings, and the ids of its tensors."""
    own = {name: value for name, value in vars(part).items() if name == "training" or name not in OF_TORCH}
    tensors = part._parameters | part._buffers | {n: value for n, value in own.items() if isinstance(value, torch.Tensor)}
    return {n: repr(value) for n, value in own.items() if is_plain(value)} | {n: id(tensor) for n, tensor in tensors.items()}


def refuse_memory(
    before: Remembered, modules: Sequence[nn.Module], again: Callable[[], object], failed: Callable[[nn.Module, str], Exception]
) -> None:
    """Raises what `failed` returns if the model keeps something that its next step would use.

    before: the state before the model ran. again: runs it once more.
    """
    now = remembered(modules)
    changed = [key for key, value in now.items() if key not in before or before[key] != value]
    for module, name in changed:
        tensor = getattr(module, name)
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            why = "which has gradients that would be lost: return it too, as a part of the output"
            raise failed(module, f"it keeps {name} beside what it returns, {why}")
    if not changed:
        return
    alive = [getattr(module, name) for module, name in changed]  # so that no identity is used again
    again()
    later = remembered(modules)
    del alive
    for module, name in changed:
        if later.get((module, name)) != now[module, name]:
            why = "which would keep its first value: do so inside one layer, in a buffer"
            raise failed(module, f"it keeps {name} from one step for the next, {why}")
