"""Fake tensors: shapes and types without memory, and without torch's compiler (see [Note: the compiler]). Also real tensors in
their place, for a module whose shapes depend on values, as those of an expert depend on the tokens that are sent to it."""

import logging
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from seqpart.device.compiler import without_compiler
from seqpart.device.device import Device
from seqpart.device.pages import round_up
from seqpart.errors import ModelError
from seqpart.interrupts import put_off
from seqpart.model.blocks import Block
from seqpart.model.inspection import beside, listed
from seqpart.model.loss_probe import generators, generators_left_alone
from seqpart.model.packs import has_gradients
from seqpart.model.tensors import run_fake, tensors_of, with_tensors


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts live bytes of storages among the results of operations (views and inputs not twice), and flops."""

    def __init__(self, granule: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.flops, self.writes_late = 0, False
        self._granule = granule
        self._known: dict[int, Any] = {}
        self.sizes: dict[int, int] = {}
        """Bytes of every counted storage that is alive."""

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Excludes tensors that are counted elsewhere: weights, the input."""
        for tensor in tensors:
            self._known[id(tensor.untyped_storage())] = weakref.ref(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.flops += flops_of(name, args, result)
        self.writes_late = self.writes_late or name in _WRITE_LATE
        for tensor in tensors_in(result):
            self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key = id(storage)
        known = self._known.get(key)
        if known is not None and known() is storage:
            return
        size = round_up(storage.nbytes(), self._granule)
        self._known[key] = weakref.ref(storage, lambda _: self._died(key, size))
        self.live += size
        self.sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _died(self, key: int, size: int) -> None:
        self.live -= size
        self._known.pop(key, None)
        self.sizes.pop(key, None)

    def restart(self) -> None:
        """Restarts the peak at the bytes alive now."""
        self.peak = self.live


def tensors_in(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


_WRITE_LATE = ("rrelu_with_noise", "rrelu_with_noise_")
"""Kernels that write into a tensor after autograd has saved it."""
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_OF_COPIES = (
    *_PRODUCTS, "convolution", "convolution_backward",
    "t", "transpose", "permute", "view", "_unsafe_view", "reshape", "unsqueeze", "expand", "detach", "alias",
)  # fmt: skip
"""Operations on narrow copies that are narrow on every device: products, and views for them."""


def flops_of(operation: str, arguments: Any, result: Any) -> int:
    """Flops of an operation (an overload packet of `aten`) in a forward pass; 0 for those that move more than they compute."""
    if operation in _PRODUCTS:
        first, second = arguments[-2:]  # (..., m, k) and (..., k, n)
        return 2 * int(first.numel()) * int(second.shape[-1])
    if operation == "convolution":
        x, weight, transposed = arguments[0], arguments[1], arguments[6]
        places = x if transposed else result
        return 2 * int(places.numel()) * int(weight.numel() // weight.shape[0])
    if operation.startswith("_scaled_dot_product_"):
        query, key, value = arguments[:3]  # (..., positions, width)
        return 2 * int(query.numel() // query.shape[-1]) * int(key.shape[-2]) * int(query.shape[-1] + value.shape[-1])
    return 0


_CPU = torch.device("cpu")
_GROUPED_PRODUCT = torch.ops.aten._grouped_mm


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A FakeTensorMode that accepts real tensors too. Signals wait for its end: see `put_off`."""

    def __init__(self) -> None:
        self._around = list[ExitStack]()
        with without_compiler():
            super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Its groups are as large as a tensor's values say; and torch's fake version refuses float32, which the kernel takes.
        if func.overloadpacket is _GROUPED_PRODUCT and args[0].dtype is torch.float32:
            raise DataDependentOutputException(func)
        if func.overloadpacket is torch.ops.aten.embedding and args[1].dtype not in (torch.int64, torch.int32):
            # As real kernels do, and fake ones not yet in torch 2.11.
            raise RuntimeError(f"Expected tensor for argument #1 'indices' to be of type Long or Int; but got {args[1].dtype}")
        return super().__torch_dispatch__(func, types, args, kwargs or {})

    def __enter__(self) -> "FakeMode":
        self._around.append(ExitStack())
        for context in (put_off(), _unchecked(), without_compiler()):
            self._around[-1].enter_context(context)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._around.pop().close()


@contextmanager
def _unchecked() -> Iterator[None]:
    """A context in which fake tensors pass the checks that torch.distributions and gaussian_nll_loss make of values."""
    outermost = "__bool__" not in vars(FakeTensor)
    FakeTensor.__bool__ = _is_true  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        if outermost and "__bool__" in vars(FakeTensor):
            del FakeTensor.__bool__


def _is_true(fake: Any) -> bool:
    """What an `if` of a fake tensor asks: true where torch.distributions looks whether arguments are valid, and false where
    gaussian_nll_loss looks for variances below 0."""
    asks = sys._getframe(1)
    if asks.f_globals.get("__name__", "").startswith("torch.distributions."):
        return True
    return asks.f_code is not F.gaussian_nll_loss.__code__ and torch.Tensor.__bool__(fake)


_NO_DATA = "its data is not allocated yet", "not supported for tensor subclasses"
"""What torch says of an index that is a tuple of tensors, and of `numpy()`."""


def asks_for_values(error: BaseException) -> bool:
    """True if fake tensors failed because they have no values: a shape or a number depends on them, also one that torch reads
    in no operation, as of tensors in a tuple that is an index."""
    known = isinstance(error, DynamicOutputShapeException | DataDependentOutputException)
    return known or any(words in str(error) for words in _NO_DATA)


def real_module(block: Block, device: torch.device) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Returns the module and new tensors for it: it may be the user's own, whose values and gradients must not change."""
    if block.alive is not None:
        module, fakes = block.fake(FakeMode())
        return module, {name: _filled(fake, device) for name, fake in fakes.items()}
    module = block.another()
    return module, {name: _on(tensor, device) for name, tensor in tensors_of(module).items()}


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().to(device), tensor.requires_grad)
    return tensor.to(device)


def _filled(fake: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A real tensor like `fake`, with small numbers, since some kernels skip zeros; whole numbers are indices."""
    if not isinstance(fake, FakeTensor):  # a counter, which has its value
        return fake.to(device, copy=True)
    tensor = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=device).zero_()
    if isinstance(fake, nn.Parameter):
        return nn.Parameter(tensor.normal_(std=0.02) if tensor.is_floating_point() else tensor, fake.requires_grad)
    return tensor.fill_(1.0) if tensor.is_floating_point() else tensor


def run_for_real(module: nn.Module, args: Any, kwargs: Any, known: Mapping[int, torch.Tensor]) -> Any:
    """Runs a module of fake tensors with real ones, and returns fake tensors like its results. Takes memory for its tensors and
    its work while it runs. To be called inside the mode. known: values of fake tensors, by their ids."""
    taken = list[tuple[torch.Tensor, torch.Tensor, int]]()

    def real(fake: torch.Tensor) -> torch.Tensor:
        x = known.get(id(fake))
        if x is None:
            x = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).zero_()
            x = x.normal_() if has_gradients(x.dtype) else x
        x = x.requires_grad_(fake.requires_grad) + 0 if has_gradients(x.dtype) else x
        taken.append((fake, x, x._version))
        return x

    with unset_fake_temporarily(), quiet_random():
        own = tensors_of(module)
        tensors = {name: _filled(tensor, _CPU) for name, tensor in own.items()}
        with with_tensors(module, tensors), listed(module, {id(own[name]): tensor for name, tensor in tensors.items()}):
            found = module(*tree_map_only(FakeTensor, real, args), **tree_map_only(FakeTensor, real, kwargs))
    for fake, x, version in taken:
        if x._version > version:
            fake.detach().zero_()  # as changed in place: its version says so
    same = {id(x): fake for fake, x, _ in taken}

    def fake_of(x: torch.Tensor) -> torch.Tensor:
        if id(x) in same:
            return same[id(x)]
        fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return fake.requires_grad_().clone() if x.requires_grad else fake

    return tree_map_only(torch.Tensor, fake_of, found)


class SameTypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which products of matrices of different types are refused, as real kernels do and fake ones do not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = {str(x.dtype) for x in tensors_in(args)} if func.overloadpacket.__name__ in _PRODUCTS else ()
        if len(found) > 1:
            raise TypeError(f"it multiplies {' and '.join(sorted(found))}, which must be of one type")
        return func(*args, **(kwargs or {}))


def quiet_log() -> AbstractContextManager[object]:
    """A context without torch's log of tracebacks of operations that refuse their input; our errors say it in words."""
    return patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


@contextmanager
def quiet_random(cure: str = "") -> Iterator[None]:
    """A context that restores all random states. Raises ModelError, with the `cure` if given, where a module drew from
    Python's or numpy's generator."""
    before = generators()
    with generators_left_alone(), torch.random.fork_rng(devices=[]):
        yield
        moved = [name for name, old, now in zip(("Python's", "numpy's"), before, generators(), strict=True) if old != now]
        if moved:
            raise ModelError(
                f"it draws random numbers from {moved[0]} generator: recomputing a layer would draw others. "
                + (cure or "Draw them from torch (torch.rand), whose state is kept for each layer and step.")
            )


def cast(autocast: torch.dtype | None) -> AbstractContextManager[object]:
    """The autocast context of the executor's forward pass: narrow copies of weights are freed after it, except those that
    autograd saved. Fake tensors are on the CPU, whatever the device will be."""
    return Device().autocast(autocast)


class Writes(TorchDispatchMode):
    """A mode that notes storages that operations write into. Versions do not show all: not through `.data` or lists, and
    native_batch_norm does not declare that it writes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        written = [given.get(one.name) for one in func._schema.arguments if one.alias_info and one.alias_info.is_write]
        if "batch_norm" in func.overloadpacket.__name__ and given.get("training", given.get("train")):
            written += [given.get("running_mean"), given.get("running_var")]
        self.storages |= {tensor.untyped_storage()._cdata for tensor in tensors_in(written)}
        return func(*args, **(kwargs or {}))


class _AutocastOfGPUs(TorchFunctionMode):
    """A mode that notes whether autocast is on for GPUs, too: a model may turn it off for them by name."""

    def __init__(self, narrow: torch.dtype) -> None:
        super().__init__()
        self._narrow, self.is_on, self._before = narrow, False, (False, torch.float16)

    def __enter__(self) -> "_AutocastOfGPUs":
        self._before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        self._set(enabled=True, dtype=self._narrow)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._set(*self._before)

    def _set(self, enabled: bool, dtype: torch.dtype) -> None:
        torch.set_autocast_enabled("cuda", enabled)
        torch.set_autocast_dtype("cuda", dtype)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.is_on = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is self._narrow
        return func(*args, **(kwargs or {}))


class CastUses(TorchDispatchMode):
    """A mode that finds weights of which autocast's narrow copies alone are used, in products of matrices and convolutions:
    their lower bits change no result. These operations are narrow on every device; others are not."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], narrow: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        wide = {name: x for name, x in tensors.items() if isinstance(x, nn.Parameter) and x.dtype is torch.float32}
        self._weights = {tensor.untyped_storage()._cdata: name for name, tensor in wide.items()}
        self._narrow, self._copies = narrow, dict[int, tuple[Any, str]]()
        self._copied, self._others = set[str](), set[str]()
        self._on_gpus = _AutocastOfGPUs(narrow)

    @property
    def found(self) -> set[str]:
        return self._copied - self._others

    def give_up(self) -> None:
        """Finds none of those that were found so far."""
        self._others |= self._copied

    def __enter__(self) -> "CastUses":
        self._on_gpus.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._on_gpus.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, operation = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        given = () if func.namespace == "prim" else [*tensors_in(args), *tensors_in(list((kwargs or {}).values()))]
        for storage in (tensor.untyped_storage() for tensor in given):  # where a tensor is, `prim` tells
            known, copied = self._copies.get(storage._cdata, (lambda: None, ""))
            if (name := self._weights.get(storage._cdata)) is None:
                self._others |= {copied} if known() is storage and operation not in _OF_COPIES else set()
            elif operation == "_to_copy" and result.dtype is self._narrow and self._on_gpus.is_on:
                self._copies[result.untyped_storage()._cdata] = weakref.ref(result.untyped_storage()), name
                self._copied.add(name)
            else:
                self._others.add(name)
        return result


def changes_of(
    module: nn.Module, tensors: Mapping[str, torch.Tensor], xs: Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], set[str], set[int]]:
    """Runs `module` on `xs` with `tensors` in place of its own. Returns (outputs, names of those of `tensors` that it changes
    in whatever way, storages that it writes into)."""
    changed = set[str]()
    with Writes() as seen:
        ys = run_fake(module, tensors, *xs, changed=changed)
    changed |= {name for name, tensor in tensors.items() if tensor.untyped_storage()._cdata in seen.storages}
    return ys, changed, seen.storages


def refuse_changes_by_mode(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ModelError if `train` or `eval` of a module, with `tensors` in place of its own, changes a parameter, or if each
    call of `train` changes a buffer."""
    if all(type(part).train is nn.Module.train for part in module.modules()):
        return
    before = {name: tensor.untyped_storage() for name, tensor in tensors.items()}  # alive: no other gets its address
    with Writes() as seen, torch.no_grad():
        module.eval()
        module.train()
    with Writes() as again, torch.no_grad():
        module.train()
    for name, storage in before.items():
        place, now = storage._cdata, tensors[name].untyped_storage()._cdata
        learns, moved = isinstance(tensors[name], nn.Parameter), now != place
        if place in again.storages or (learns and (moved or place in seen.storages)):
            raise ModelError(
                f"its train() or eval() changes {'parameter' if learns else 'buffer'} {name}. An optimizer alone changes "
                "weights (layers of LoRA merge theirs: loralib's take merge_weights=False), and train() is called whenever a "
                "partition comes: let it leave values as they are."
            )


def _refuse_changes_of(
    names: Sequence[str], module: nn.Module, tensors: Mapping[str, torch.Tensor], xs: Sequence[torch.Tensor]
) -> None:
    """Raises ModelError if a forward pass in training writes into buffers that the module also holds in attributes or lists."""
    module.train()
    with torch.no_grad():
        _, changed, storages = changes_of(module, tensors, xs)
    if changed.intersection(names) or any(tensor.untyped_storage()._cdata in storages for tensor in beside(module)):
        raise ModelError(
            f"it changes its buffer {names[0]}, which it also holds in an attribute or a list, where old values would stay. "
            "Hold it under one name."
        )


def eval_edits(block: Block, module: nn.Module, tensors: Mapping[str, torch.Tensor], xs: Sequence[torch.Tensor]) -> bool:
    """True if a forward pass in evaluation changes buffers, or if that depends on values, as in torch's fake quantization;
    False if the pass fails. Raises ModelError for changed buffers that are also held in attributes or lists."""
    if block.held_twice:
        _refuse_changes_of(block.held_twice, module, tensors, xs)
    buffers = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, nn.Parameter)}
    if not all(isinstance(tensor, FakeTensor) or not tensor.ndim for tensor in buffers.values()):
        return True
    module.eval()
    try:
        with torch.no_grad():
            _, changed, _ = changes_of(module, tensors, xs)
    except Exception:
        return False
    return not changed.isdisjoint(buffers)
