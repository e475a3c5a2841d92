"""Observes every operation of PyTorch for simulated devices: the memory that it reads, writes and makes, and its costs."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from seqpart.device.caching_allocator import Block

Used = tuple[torch.Tensor, bool]
"""(tensor, True if it is written)."""


class Observer(Protocol):
    """An observer of operations."""

    def begins(self, name: str, used: list[Used], *, makes: bool) -> bool:
        """Called before an operation on tensors `used`; returns True if it is the device's. makes: it makes tensors there."""

    def ends(self, name: str, found: list[torch.Tensor], *, nbytes: int, flops: int, dtype: torch.dtype) -> None:
        """Called after an operation, with its result tensors, its bytes moved and its floating-point operations."""


_WAITS = ("aten._local_scalar_dense", "aten.equal", "aten.nonzero", "aten.masked_select", "aten.is_nonzero")
"""Operations for which the host waits, since the program reads their result or its shape."""
_UNSET = ("aten.empty", "aten.new_empty")


def waits(name: str) -> bool:
    return name.startswith(_WAITS)


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that reports this thread's operations on real tensors to `observer`. card: the simulated device of new tensors."""

    def __init__(self, observer: Observer, card: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observer, self._card = observer, card

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = list(_used(func, args, kwargs))
        makes = kwargs.get("device") == self._card
        if any(isinstance(tensor, FakeTensor) or tensor.device.type != "cpu" for tensor, _ in used):
            return func(*args, **kwargs)
        name = str(func)
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        if is_view or not self._observer.begins(name, used, makes=makes):
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if found and isinstance(found[0], FakeTensor):
            return result
        if name.startswith(_UNSET):
            for tensor in found:
                _spoil(tensor)
        packet = func._overloadpacket
        flops = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
        nbytes = sum(tensor.nbytes * (2 if write else 1) for tensor, write in used)  # what is written was read before
        nbytes += sum(tensor.nbytes for tensor in found if not any(tensor is other for other, _ in used))
        dtype = found[0].dtype if found else torch.float32
        self._observer.ends(name, found, nbytes=nbytes, flops=int(flops), dtype=dtype)
        return result


def _used(func: Any, args: Any, kwargs: Any) -> Iterator[Used]:
    arguments = func._schema.arguments
    named = {argument.name: argument for argument in arguments}
    for argument, value in [*zip(arguments, args, strict=False), *((named[name], value) for name, value in kwargs.items())]:
        write = argument.alias_info is not None and argument.alias_info.is_write
        for leaf in value if isinstance(value, list | tuple) else (value,):
            if isinstance(leaf, torch.Tensor):
                yield leaf, write


def _spoil(tensor: torch.Tensor) -> None:
    """Fills unwritten memory with values that no program can use unnoticed."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


HOST = "the host"
Clock = dict[str, int]
"""{actor: number of its actions that are known to be over}."""


class Unordered(RuntimeError):
    """Raised for two accesses to the same bytes, one of them a write, in no defined order: a defect of the program."""


@dataclass(frozen=True, slots=True)
class _Access:
    first: int
    last: int
    """Bytes of the memory; the last is not included."""
    write: bool
    actor: str
    action: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} ({'writes' if self.write else 'reads'} bytes {self.first} to {self.last}, by {self.actor})"


@dataclass(slots=True, eq=False)
class Memory:
    """A piece of the device's memory, or of the host's that the device reads and writes."""

    name: str
    address: int
    nbytes: int
    on_device: bool
    block: Block | None = None
    """Its block in the allocator."""
    lent: set[str] = field(default_factory=set)
    """Streams that use it, for which the allocator waits before it reuses the memory."""
    accesses: "list[_Access]" = field(default_factory=list)


def join(clock: Clock, other: Clock) -> None:
    for actor, action in other.items():
        if clock.get(actor, 0) < action:
            clock[actor] = action


def act(actor: str, clock: Clock) -> int:
    """Counts the actor's next action in its own clock, and returns its number."""
    clock[actor] = clock.get(actor, 0) + 1
    return clock[actor]


def touch(memory: Memory, first: int, last: int, *, write: bool, actor: str, clock: Clock, what: str) -> None:
    """Notes an access of `actor`, whose clock is at that action. Raises Unordered."""
    now = _Access(first, last, write, actor, clock[actor], what)
    for before in memory.accesses:
        overlaps = before.first < last and first < before.last and (write or before.write)
        if overlaps and before.actor != actor and clock.get(before.actor, 0) < before.action:
            raise Unordered(f"{memory.name}: {before} and {now} are not ordered by any event.")
    memory.accesses = [*_needed(memory.accesses, now), now]


def _needed(accesses: Iterable[_Access], now: _Access) -> Iterable[_Access]:
    """The accesses without those that `now` replaces: what is ordered after it is ordered after them."""
    for before in accesses:
        inside = now.first <= before.first and before.last <= now.last
        if not (inside and (now.write or (before.actor == now.actor and not before.write))):
            yield before
