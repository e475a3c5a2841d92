"""Tensors of a module: lists them, replaces them for a while, and refuses those that share memory.

Every parameter and buffer has a home, and is in memory of its own while it is on the device. Where a plain loop would see a
change of one tensor in another, training here would go on with two that drift apart: such models are refused by name.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from seqpart.device.pages import lies_dense
from seqpart.errors import ModelError
from seqpart.model.inspection import listed
from seqpart.store.layout import ALIGNMENT, Layout, spec_of

_MOST_MARKED = 1 << 26
"""Most elements between the ends of two tensors that are compared one by one."""
_MOST_LENT = 1 << 20
"""Most numbers that are made in place of a weight's: a trial has little memory."""


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers (also those that a state_dict leaves out) by name, each tensor once."""
    return dict(nn.Module.named_parameters(module)) | dict(module.named_buffers())


def layout_of(tensors: Mapping[str, torch.Tensor]) -> Layout:
    return Layout.of((spec_of(name, tensor) for name, tensor in tensors.items()), ALIGNMENT)


def twin_of(parameter: nn.Parameter, values: torch.Tensor, requires_grad: bool = True) -> nn.Parameter:
    """A parameter with other values and the attributes of `parameter`: an optimizer's groups may be made by these."""
    twin: nn.Parameter = torch.Tensor._make_subclass(type(parameter), values, requires_grad)
    vars(twin).update(vars(parameter))
    return twin


def attach(module: nn.Module, views: Mapping[str, torch.Tensor]) -> None:
    """Replaces the module's tensors by `views`. Their memory keeps its owner, who must outlive the attachment."""
    for name, parameter in module.named_parameters():
        if name in views:
            parameter.data = views[name]
            mark_back(parameter)
    buffers = _places(module)
    # `.data` counts its own versions. Views count together, and autograd would take a change of one buffer (a
    # BatchNorm's statistics) for a change of every other that it saved.
    own = {name: views[name].data for name, _ in buffers if name in views}
    # A buffer that two submodules share has one home, under its first name; both get the same tensor.
    home = {id(buffer): name for name, buffer in buffers if name in views}
    for name, buffer in buffers:
        _put_buffer(module, name, own[name] if name in own else own.get(home.get(id(buffer), ""), buffer))


def detach(module: nn.Module, spare: Collection[str] = ()) -> None:
    """Empties the module except for the tensors in `spare`: the others keep their types and own no memory."""
    for name, parameter in module.named_parameters():
        if name in spare:
            continue
        parameter.grad, shape = None, parameter.shape
        parameter.data = torch.empty(0, dtype=parameter.dtype)
        mark_away(parameter, shape)
    empty: dict[int, torch.Tensor] = {}
    for name, buffer in _places(module):
        if name in spare:
            continue
        _put_buffer(module, name, empty.setdefault(id(buffer), away(buffer.dtype)))


def away(dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Returns an empty tensor in place of a buffer whose values are away."""
    return mark_away(torch.empty(0, dtype=dtype, device=device))


def mark_away(tensor: torch.Tensor, shape: torch.Size | None = None) -> torch.Tensor:
    """Marks an empty tensor as one whose values are away, until `attach` or `mark_back`. shape: of these values, if known."""
    vars(tensor)[_IS_AWAY] = shape
    return tensor


def mark_back(tensor: torch.Tensor) -> None:
    vars(tensor).pop(_IS_AWAY, None)


_IS_AWAY = "seqpart_away"


class RefuseAway(TorchFunctionMode):
    """A mode that raises `error()` where code uses a weight or a buffer whose values are away at that moment."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        super().__init__()
        self._error = error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not asks_for_type(func):
            used = (one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor))
            if any(_IS_AWAY in vars(one) and not one.numel() for one in used):
                raise self._error()
        return func(*args, **(kwargs or {}))


class Lend(TorchFunctionMode):
    """A mode in which code that uses a weight whose values are away gets some numbers in its shape, always the same: for trying
    a loss that takes weights of the model."""

    def __init__(self) -> None:
        super().__init__()
        self._lent: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map(self._instead, args), **tree_map(self._instead, kwargs or {}))

    def _instead(self, one: Any) -> Any:
        shape = vars(one).get(_IS_AWAY) if isinstance(one, nn.Parameter) and not one.numel() else None
        if shape is None or shape.numel() > _MOST_LENT:
            return one
        if id(one) not in self._lent:
            numbers = torch.linspace(0.1, 1.0, shape.numel(), device=one.device).to(one.dtype).view(shape)
            self._lent[id(one)] = numbers.requires_grad_(one.requires_grad)
        return self._lent[id(one)]


def asks_for_type(func: Any) -> bool:
    """True for attributes and methods of a tensor that are the same when its values and its shape are away."""
    name = getattr(func, "__name__", "")
    return (func.__self__.__name__ if name == "__get__" else name) in _OF_TYPE


_OF_TYPE = {
    "dtype", "device", "layout", "requires_grad", "is_leaf", "is_meta", "is_cuda", "is_sparse", "is_quantized", "itemsize",
    "is_floating_point", "is_complex", "element_size", "get_device",
}  # fmt: skip


def bring_to_cpu(module: nn.Module) -> None:
    """Moves tensors that the module made on a GPU beside its weights, in attributes and buffers, to the CPU: a cached mask."""
    for part in module.modules():
        for attributes in (vars(part), part._buffers):
            for name, value in attributes.items():
                if isinstance(value, torch.Tensor) and value.is_cuda:
                    attributes[name] = value.cpu()


def _places(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(module.named_buffers(remove_duplicate=False))


def _put_buffer(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module.get_submodule(path)._buffers[leaf] = tensor


def with_tensors(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> AbstractContextManager[object]:
    """A context in which the module's tensors are `tensors`, also for recomputation in backward (`torch.utils.checkpoint`)."""
    return _reparametrize_module(module, dict(tensors), tie_weights=True)


def run_fake(
    module: nn.Module, tensors: Mapping[str, torch.Tensor], *taken: torch.Tensor, changed: set[str] | None = None
) -> tuple[torch.Tensor, ...]:
    """Runs `module` on the inputs `taken`, with `tensors` in place of its own, and returns its outputs. Raises ModelError if it
    changes shapes or types of its buffers, or makes a parameter in the forward pass. changed: receives the names of tensors
    that it writes into or replaces."""
    own, before = tensors_of(module), {name: (t._version, t.dtype, t.untyped_storage()) for name, t in tensors.items()}
    with (
        listed(module, {id(own[name]): tensor for name, tensor in tensors.items() if name in own}),
        with_tensors(module, tensors),
    ):
        output = module(*taken)
        _refuse_other_tensors(module, tensors, known=own)
        if changed is not None:
            now = tensors_of(module)
            for name, tensor in tensors.items():
                version, dtype, storage = before[name]
                # Not a cast, as bitsandbytes makes of a bias: it changes no number.
                replaced = tensor.untyped_storage()._cdata != storage._cdata and tensor.dtype == dtype
                if tensor._version > version or replaced or now.get(name, tensor) is not tensor:
                    changed.add(name)
    if isinstance(output, torch.Tensor):
        return (output,)
    if isinstance(output, tuple) and all(isinstance(part, torch.Tensor) for part in output):
        return output
    raise ModelError(f"it returned a {type(output).__name__}; a boundary must be one tensor.")


def _refuse_other_tensors(module: nn.Module, tensors: Mapping[str, torch.Tensor], known: Collection[str]) -> None:
    now = tensors_of(module)
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        if name not in now and not isinstance(tensor, nn.Parameter) and module.get_submodule(path)._buffers.get(leaf) is None:
            raise ModelError(
                f"its forward pass removes its buffer {name}. Let it keep a tensor there, or hold it in a plain attribute."
            )
    for name, tensor in now.items():
        before = tensors.get(name)
        if before is not None and (tensor.shape, tensor.dtype) != (before.shape, before.dtype):
            raise ModelError(
                f"its forward pass makes {name} a tensor of shape {tuple(tensor.shape)} and type {tensor.dtype}, and it came "
                f"with {tuple(before.shape)} and {before.dtype}: a weight or buffer must keep its shape and type. Make it so "
                "in __init__, or keep the tensor in a plain attribute."
            )
        if isinstance(tensor, nn.Parameter) and name not in known:
            raise ModelError(f"its forward pass makes the parameter {name}, which no optimizer knows. Make it in __init__.")


def refuse_sharing(tensors: Mapping[str, torch.Tensor], attributes: Mapping[str, torch.Tensor] | None = None) -> None:
    """Raises ModelError for distinct tensors that overlap, and for a tensor whose own elements have gaps or overlap.

    tensors: by their names in the model, each once. attributes: tensors in plain attributes, which must not share memory with
    a trainable parameter: they would not change with it.
    """
    there = {name: tensor for name, tensor in tensors.items() if not is_lazy(tensor)}
    gaps = [
        f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}"
        for name, tensor in there.items()
        if (tensor.is_floating_point() or isinstance(tensor, nn.Parameter)) and not lies_dense(tensor)
    ]
    if gaps:
        raise ModelError(
            f"a tensor must lie in memory without gaps and without elements that share a place: {'; '.join(gaps[:3])}. Give it "
            "memory of its own: .contiguous(), or .clone()."
        )
    pairs = [*_overlapping(there.items())]
    for name, tensor in (attributes or {}).items():
        pairs += [
            (name, other)
            for other, parameter in there.items()
            if parameter.requires_grad and tensor is not parameter and _overlap(tensor, parameter)
        ]
    if pairs:
        named = ", ".join(f"{one} and {other}" for one, other in pairs[:3])
        cure = "Let both names be one parameter (b.weight = a.weight), or give each its own (.clone())."
        if any(other.rpartition(".")[2] == f"{one.rpartition('.')[2]}_orig" for one, other in pairs):
            cure = "Use torch.nn.utils.parametrizations.spectral_norm instead of torch.nn.utils.spectral_norm."
        raise ModelError(
            f"tensors that share memory without being one: {named}. A change of one would be seen in the other, and here each "
            f"is stored by itself. {cure}"
        )


def tensors_in_attributes(module: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """Returns the tensors in plain attributes, neither parameters nor buffers, by name."""
    return {
        f"{prefix}.{path}.{name}".replace("..", "."): value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor)
    }


def _overlapping(named: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, str]]:
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in named:
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append((name, tensor))
    for group in by_storage.values():
        for (one, tensor), (other, second) in itertools.combinations(group, 2):
            if _overlap(tensor, second):
                yield one, other


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata or not one.numel() or not other.numel():
        return False
    (first, end), (other_first, other_end) = range_of(one), range_of(other)
    start, stop = min(first, other_first), max(end, other_end)
    if max(first, other_first) >= min(end, other_end):
        return False
    size = one.itemsize
    if (lies_dense(one) and lies_dense(other)) or size != other.itemsize or (stop - start) // size > _MOST_MARKED:
        return True
    marked = torch.zeros((stop - start) // size, dtype=torch.bool)  # as columns of one matrix do not
    marked.as_strided(one.shape, one.stride(), (first - start) // size).fill_(True)
    return bool(marked.as_strided(other.shape, other.stride(), (other_first - start) // size).any())


def range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns (first byte, byte after the last) that the tensor uses of its storage."""
    first = int(tensor.storage_offset()) * tensor.itemsize
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (steps + 1) * tensor.itemsize
