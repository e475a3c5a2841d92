"""Inspects modules: tells their kinds apart without running them, and restores modes, caches and hooks after they are run."""

import copy
import functools
import gc
import hashlib
import itertools
import re
import sys
import warnings
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodDescriptorType, MethodType
from typing import Any

import torch
from torch import nn

from seqpart.errors import DataError, ModelError, OptionError

_WORDS = 4
"""Most types that a message names."""


@contextmanager
def kept_modes(model: object) -> Iterator[object]:
    """A context in which parts of a model (a module, or a list of them) that came in evaluation mode stay in it, after which
    all have the modes that they came in; its value is the model."""
    parts = [model] if isinstance(model, nn.Module) else model
    roots = [part for part in parts if isinstance(part, nn.Module)] if isinstance(parts, list | tuple) else []
    modes = {part: part.training for root in roots for part in root.modules()}
    evaluating = [root for root in roots if not root.training and not hasattr(type(root), "from_pretrained")]
    mixed = {root for root in evaluating if any(part.training and _obeys(part) for part in root.modules())}
    trains = bool(mixed) or any(root.training for root in roots)
    kept = list(dict.fromkeys(part for root in roots for part in _evaluating(root, trains, mixed=root in mixed)))
    for part in kept:
        part.train = MethodType(_stay, part)  # type: ignore[method-assign]
    try:
        yield model
    finally:
        for part in kept:
            vars(part).pop("train", None)
        for part, mode in modes.items():
            part.training = mode


def _evaluating(module: nn.Module, trains: bool, *, mixed: bool) -> Iterator[nn.Module]:
    """Parts in evaluation inside a model that trains. trains: True if the parent does. mixed: True in a model in evaluation
    that has parts in training: no library left it so."""
    trains = module.training if not mixed and hasattr(type(module), "from_pretrained") else trains
    if trains and not module.training and _obeys(module):
        yield module
    for part in module.children():
        yield from _evaluating(part, trains, mixed=mixed)


def _obeys(module: nn.Module) -> bool:
    """False for a module with its own `train`, which decides for itself."""
    return type(module).train is nn.Module.train and "train" not in vars(module)


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    for part in module.children():
        part.train(mode)
    return module


def stays(module: nn.Module) -> bool:
    own: Any = vars(module).get("train")
    return getattr(own, "__func__", None) is _stay


def modes_of(modules: Iterable[nn.Module]) -> list[str]:
    """Says which parts of the modules stay in evaluation mode: those without children, by type."""
    kept = (part for module in modules for part in module.modules() if stays(part))
    kinds = Counter(type(part).__name__ for part in kept if next(part.children(), None) is None)
    named = [f"{kind} ({count})" for kind, count in kinds.most_common(_WORDS)]
    if len(kinds) > _WORDS:
        named.append(f"and {len(kinds) - _WORDS} more types")
    return [f"in evaluation while the rest trains, as they came: {', '.join(named)}"] if named else []


Kind = tuple[object, ...]
ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign, nn.Tanh,
    nn.Sigmoid, nn.LogSigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink,
    nn.Identity,
)  # fmt: skip
"""Elementwise, deterministic layers without tensors."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_NUMBERS = frozenset({"layer_idx", "layer_index", "layer_id", "layer_number", "block_idx", "training"})
"""Settings that differ between layers that are otherwise alike, such as their own number."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The attribute `packed` of a module with quantized weights: the format, the number of weights, and its tensors that hold
    them: these have fewer elements, or others beside them.

    layout_in: name of the tensor that says how they are packed, which must not change; "" where none does.
    """

    how: str
    weights: int
    tensors: tuple[str, ...]
    layout_in: str = ""


def cure_of_types(tensors: Iterable[torch.Tensor], dtype: torch.dtype, autocast: torch.dtype | None) -> str:
    """The cure for a module that fails on floats of type `dtype` since its weights have another type: weights of that type, or
    autocast if it is off. "" where that is not the reason."""
    found = {tensor.dtype for tensor in tensors if isinstance(tensor, nn.Parameter) and tensor.is_floating_point()}
    if not found or not dtype.is_floating_point or dtype in found:
        return ""
    own, other = (str(kind).removeprefix("torch.") for kind in (min(found, key=str), dtype))
    cures = [f"rows of {own} (x.to(torch.{own}))", "model.float()"]
    if own == "float64":  # such rows become float32 where other weights are, or where factories are yet to make them
        cures[0] = "modules that are of float64 throughout"
    if autocast is None and found == {torch.bfloat16}:
        cures.append("--dtype bf16, which casts rows as it computes")
    return f"Its weights are {own} and its input is {other}: give {', or '.join(cures)}."


def cure_of_tokens(error: str, dtype: torch.dtype) -> str:
    """The cure for an embedding that failed with `error` on rows of type `dtype`; "" where it is another failure."""
    if not dtype.is_floating_point or "indices" not in error:
        return ""
    return "An embedding takes tokens: give them as whole numbers of 64 bits (x.long()), which stay whole."


_OTHER_WORDS = {
    "SparseTensorImpl": (
        "it makes sparse tensors (gradients, or weights for one call), which cannot be stored here",
        "Give nn.Embedding or nn.EmbeddingBag sparse=False: the same gradients, with their zeros. Another layer of that kind "
        "cannot be trained here.",
    ),
    "modified by an inplace operation": (
        "an operation in place changes a tensor from which a gradient is computed later",
        "Let it return a new tensor (x * 2 for x.mul_(2)); a plain loop raises the same.",
    ),
    "does not require grad and does not have a grad_fn": (
        "it asks for gradients in its forward pass (torch.autograd.grad), where none are recorded",
        "Let one layer compute it under torch.enable_grad(): evaluation records no gradients.",
    ),
    "register a hook on a tensor that doesn't require gradient": (
        "it puts a hook on a tensor that has no gradient in a pass without a graph, which training makes too",
        "Ask before: if tensor.requires_grad: tensor.register_hook(...).",
    ),
}
"""{part of an error of torch: (what it means, its cure)}."""


def in_other_words(reason: str) -> tuple[str, str]:
    """Returns (the meaning of torch's error `reason`, its cure); `reason` itself and "" for an unknown one."""
    return next((words for part, words in _OTHER_WORDS.items() if part in reason), (reason, ""))


def frozen_in(module: nn.Module, own: Mapping[str, torch.Tensor], trainable: Collection[str]) -> int:
    """Number of frozen weights among `own`, tensors of the module by name."""
    count = {name: t.numel() for name, t in own.items() if isinstance(t, nn.Parameter) and name not in trainable}
    for path, packed in packed_parts(module):
        inside = [f"{path}.{name}".lstrip(".") for name in packed.tensors]
        if inside[0] in own:
            count |= dict.fromkeys(inside, 0) | {inside[0]: packed.weights}
    return sum(count.values())


def nothing_learns(frozen: int) -> ModelError:
    """The error for a model that is to be trained and has no trainable weight. frozen: number of frozen weights."""
    expected = "nothing learns: expected a model with weights that require gradients; found"
    if not frozen:
        return ModelError(f"{expected} one without weights. Give it a layer that has some.")
    return ModelError(
        f"{expected} weights of {frozen:,} numbers, all with requires_grad=False or in --freeze. Call requires_grad_() on what "
        "is to be trained (an adapter of peft is loaded with is_trainable=True)."
    )


def refuse_left_out(model: object) -> None:
    """Raises ModelError for a model (a module, or a list of them) whose own parameters() leaves out some that learn."""
    for part in model if isinstance(model, list | tuple) else [model]:
        if not isinstance(part, nn.Module):
            continue
        given = {id(one) for one in part.parameters()}
        learn = [name for name, one in nn.Module.named_parameters(part) if one.requires_grad and id(one) not in given]
        if learn:
            raise ModelError(
                f"{type(part).__name__} has a parameters() or named_parameters() of its own that leaves out {len(learn)} that "
                f"learn, {', '.join(learn[:3])}{', ...' if len(learn) > 3 else ''}: which are to be trained? Call "
                "requires_grad_(False) on those that are not, or name them in --freeze."
            )


def packed_in(modules: Iterable[nn.Module]) -> list[str]:
    """Says how many layers have quantized weights, by format."""
    found = {id(packed): packed for module in modules for _, packed in packed_parts(module)}
    remarks = []
    for how in dict.fromkeys(packed.how for packed in found.values()):
        alike = [packed.weights for packed in found.values() if packed.how == how]
        remarks.append(f"{sum(alike):,} of the frozen weights in {how}, in {len(alike)} layers")
    return remarks


def packed_parts(module: nn.Module) -> Iterator[tuple[str, Packed]]:
    for path, part in module.named_modules():
        if isinstance(packed := getattr(part, "packed", None), Packed):
            yield path, packed


def structure_of(module: nn.Module, tensors: Mapping[str, torch.Tensor], *, private: bool = True) -> Kind:
    """A key of the module's structure: types, plain settings, names and shapes of tensors, and its attribute `structure`.

    private: also settings whose names begin with an underscore, and which module it is, if it or a part of it has hooks."""
    shapes = tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors.items())
    structure = getattr(module, "structure", None)
    parts = tuple(
        (type(part), stays(part), _settings(part, private), private and is_listened_to(part) and id(part))
        for part in module.modules()
    )
    return parts, shapes, structure if isinstance(structure, tuple) else ()


def digest_of(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> str:
    """Digest of the module's structure, equal in other processes."""
    structure = structure_of(module, tensors, private=False)
    return hashlib.blake2b(_ADDRESS.sub("", _text(structure)).encode(), digest_size=8).hexdigest()


def settings_of(module: nn.Module) -> list[str]:
    """Returns the plain settings of the module and its parts as `name=value`, each once."""
    every = (f"{name}={value}" for part in module.modules() for name, value in _settings(part, private=False))
    return list(dict.fromkeys(_ADDRESS.sub("", one) for one in every))


def _text(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"({','.join(map(_text, value))})"
    return value if isinstance(value, str) else str(getattr(value, "__qualname__", None) or repr(value))


def _settings(module: nn.Module, private: bool) -> tuple[tuple[str, str], ...]:
    own = {name: value for name, value in vars(module).items() if name not in _NUMBERS and (private or name[0] != "_")}
    return tuple((name, repr(value)) for name, value in sorted(own.items()) if _plain(value))


def _plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(_plain(part) for part in _leaves(value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype | FunctionType | BuiltinFunctionType)


def _shallow(value: object) -> object:
    """Returns a shallow copy of a container, in which a module may keep what it made; anything else unchanged."""
    return copy.copy(value) if type(value) in (dict, OrderedDict, list, set, deque) else value


def _put_back(value: Any, content: Any) -> object:
    """Puts the content that `_shallow` kept back into the same container, which handles of hooks refer to."""
    if value is not content:
        value.clear()
        (value.extend if type(value) in (list, deque) else value.update)(content)
    return value


def is_listened_to(module: nn.Module) -> bool:
    """True if the module or a parameter of its own has hooks, or it a forward of its own, which would be lost if another module
    replaced it."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or "forward" in vars(module) or any(map(has_hooks, module._parameters.values()))


def has_hooks(parameter: torch.Tensor | None) -> bool:
    return parameter is not None and bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


@contextmanager
def left_as_they_are(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context after which the modules have the attributes that they had before, and functools' caches of their classes hold
    no tensors of it, nor does it begin with some."""
    before = [(module, {name: (value, _shallow(value)) for name, value in vars(module).items()}) for module in modules]
    caches = {cache for module, _ in before for kind in type(module).__mro__ for cache in _caches_of(kind)}
    _without_tensors(caches)
    try:
        yield
    finally:
        _without_tensors(caches)
        for module, attributes in before:
            vars(module).clear()
            vars(module).update({name: _put_back(*both) for name, both in attributes.items()})


def _without_tensors(caches: Iterable[Any]) -> None:
    for cache in caches:
        if any(isinstance(leaf, torch.Tensor) for leaf in _leaves(gc.get_referents(cache))):
            cache.cache_clear()


_CACHES = weakref.WeakKeyDictionary[type, list[Any]]()


def _caches_of(kind: type) -> list[Any]:
    """Returns functools' caches in a class of modules and in its file, also those that a function there closes over."""
    if kind not in _CACHES:
        known = () if kind.__module__.startswith(("torch.", "builtins")) else (kind, sys.modules.get(kind.__module__, kind))
        found = [one for place in known for one in list(vars(place).values())]
        found = [one.__func__ if isinstance(one, staticmethod | classmethod) else one for one in found]
        closed = [cell for one in found if isinstance(one, FunctionType) for cell in one.__closure__ or ()]
        found += [one for cell in closed for one in gc.get_referents(cell)]
        _CACHES[kind] = [one for one in found if isinstance(one, functools._lru_cache_wrapper)]
    return _CACHES[kind]


@contextmanager
def listed(module: nn.Module, others: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """A context in which lists that submodules keep of their own tensors, as nn.LSTM does, hold `others` (by the id of the
    tensor that each replaces): otherwise they would run with the tensors of an emptied module."""
    changed: list[tuple[dict[str, object], str, object]] = []
    for attributes in map(vars, module.modules()):
        for name, value in attributes.items():
            if type(value) in (list, tuple) and any(id(part) in others for part in value):
                changed.append((attributes, name, value))
    for attributes, name, value in changed:
        attributes[name] = type(value)(others.get(id(part), part) for part in value)  # type: ignore[call-arg, attr-defined]
    try:
        yield
    finally:
        for attributes, name, value in changed:
            attributes[name] = value


OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every nn.Module has."""
Remembered = Mapping[tuple[nn.Module, str], object]
_KNOWN = ("builtins", "collections", "functools", "itertools", "_random", "types", "numpy")
_PICKLED = ("__getstate__", "__reduce__", "__reduce_ex__")
"""Packages in C whose objects are small, and the methods of what pickle keeps."""
_MOST, _DEEP = 1000, 3
"""Most values of an attribute that are compared, and how deep in objects that it holds."""


def remembered(modules: Iterable[nn.Module]) -> Remembered:
    """Snapshot of the modules' plain attributes (numbers, tensors with their versions, containers, the state of other objects),
    of numbers of their classes, and of buffer names."""
    found: dict[tuple[nn.Module, str], object] = {}
    for module in modules:
        for kind in type(module).__mro__[: type(module).__mro__.index(nn.Module)]:
            found |= {(module, name): repr(value) for name, value in vars(kind).items() if isinstance(value, int | float)}
        for name, value in vars(module).items():
            if name not in OF_TORCH and not (name == "_flat_weights" and isinstance(module, nn.RNNBase)):  # its parameters
                found[module, name] = _looks(value)
        found |= {(module, name): True for name, buffer in module._buffers.items() if buffer is not None}
    return found


def held_in(attributes: Iterable[tuple[nn.Module, str]]) -> Remembered:
    """Snapshot of these attributes of modules, of the tensors there without what they hold."""
    values = {(one, name): vars(one).get(name, getattr(type(one), name, None)) for one, name in attributes}
    looks = {at: _looks(value, versions=False) for at, value in {id(value): value for value in values.values()}.items()}
    return {key: looks[id(value)] for key, value in values.items()}


def beside(module: nn.Module) -> list[torch.Tensor]:
    """Returns the tensors that the module holds in plain attributes, and in lists and dicts there."""
    values = [value for part in module.modules() for name, value in vars(part).items() if name not in OF_TORCH]
    return [leaf for leaf in _leaves(values) if isinstance(leaf, torch.Tensor)]


def _leaves(value: object) -> Iterator[object]:
    """Yields what nested containers hold that is no container. Subclasses are entered too, as the FrozenDict of diffusers'
    models, which torch's pytree takes for leaves; a container that holds itself is entered once."""
    ahead, known = [value], set[int]()
    while ahead:
        one = ahead.pop()
        if not isinstance(one, list | tuple | dict | deque):
            yield one
        elif id(one) not in known:
            known.add(id(one))
            ahead += reversed([*iter(dict.values(one) if isinstance(one, dict) else one)])  # whose __len__ may raise


def is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _looks(value: object, deep: int = _DEEP, *, versions: bool = True) -> object:
    if isinstance(value, torch.Tensor):
        return id(value), versions and value._version
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, list | tuple | dict | deque):
        leaves = itertools.islice(_leaves(value), _MOST)
        return type(value), len(value), tuple(_looks(leaf, deep, versions=versions) for leaf in leaves)
    if is_plain(value) or (isinstance(value, FunctionType | BuiltinFunctionType) and not versions):
        return repr(value)
    return type(value), _looks(_state(value), deep - 1, versions=versions) if deep else None


def _state(value: object) -> object:
    """Returns what pickle would keep of an object, such as a dataclass, an iterator or a random generator; None for those that
    it does not take, for modules, and for what it would copy: arrays, and objects of other languages, such as tokenizers."""
    kind = type(value)
    own = [getattr(kind, name) for name in _PICKLED if getattr(kind, name) is not getattr(object, name)]
    foreign = kind.__module__.split(".")[0] not in _KNOWN and any(isinstance(one, MethodDescriptorType) for one in own)
    if foreign or isinstance(value, type | nn.Module | FunctionType | MethodType) or hasattr(value, "__array__"):
        return None
    if isinstance(value, GeneratorType):
        return value.gi_frame and dict(value.gi_frame.f_locals)
    try:
        with warnings.catch_warnings(action="ignore"):  # itertools' objects will not be pickled any more
            reduced = value.__reduce_ex__(4)
    except Exception:
        return None
    return tuple(list(part) if isinstance(part, Iterator) else part for part in reduced[1:]) if type(reduced) is tuple else None


def without_stop(error: Exception, cure: str) -> Exception:
    """Replaces a StopIteration, which would end a generator that it passes, by a RuntimeError."""
    if not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"it raised StopIteration{f'({error})' if str(error) else ''}, which only an iterator may. {cure}.")


def explained_step(error: Exception) -> Exception:
    """Replaces an error of a step whose message does not say what is wrong with the rows or the loss by one that does."""
    error = without_stop(error, "Let the layer, the loss or the metric raise another error")
    if re.search(r"of type _Place|through the graph a second time|size of tensor [ab] \(0\)", str(error)):
        return OptionError(
            "loss: its graph reaches layers of other partitions, as by a tensor that a layer keeps as an attribute: "
            "their values are gone by then. Return it with the output, or train with --method full."
        )
    if re.search(r"support saved tensor hooks|data pointer on an invalid python storage", str(error)):
        return ModelError(
            "a layer uses torch.func (grad, jvp, vjp), whose transforms do not work where weights are loaded in turn. Train "
            "with --method full, or let it call torch.autograd.grad(..., create_graph=True) under torch.enable_grad()."
        )
    if not isinstance(error, IndexError):
        return error
    if re.match(r"Target -?\d+ is out of bounds", str(error)):
        return DataError(
            f"the loss found a label that is no class: {error} The classes of K outputs are 0 to K - 1. Give such labels, or "
            "let the last block have more outputs."
        )
    if "index out of range in self" not in str(error):
        return error
    return DataError(
        "a row has a number that an nn.Embedding of the model has no vector for: a token that is not in its vocabulary, or a "
        "row longer than its positions. Give rows of numbers from 0 to num_embeddings - 1, or a larger embedding."
    )
