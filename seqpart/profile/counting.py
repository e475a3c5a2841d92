"""What operations compute, and the bytes that are alive between them, counted while they run.

Not torch.utils.flop_counter, which loads Triton: 6 MB and 0.2 s.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from seqpart.device.pages import round_up


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages alive among the results of operations; views and inputs are not counted twice. And what
    the operations compute."""

    def __init__(self, granule: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.flops, self.writes_late = 0, False
        self._granule = granule
        self._known: dict[int, Any] = {}
        self.sizes: dict[int, int] = {}
        """Bytes of every counted storage that is alive."""

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are somebody else's: weights, the input."""
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

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Restart the peak at what is alive now."""
        self.peak = self.live
        yield


def tensors_in(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for part in result:
            yield from tensors_in(part)


_WRITE_LATE = ("rrelu_with_noise", "rrelu_with_noise_")
"""Kernels that write into a tensor behind the moment at which autograd saves it."""
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def flops_of(operation: str, arguments: Any, result: Any) -> int:
    """Of one operation of a forward pass (an overload packet of `aten`); 0 for others, which move more than they compute."""
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
