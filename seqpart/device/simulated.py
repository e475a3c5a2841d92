"""A simulated accelerator: its memory, streams, links and rates, computed by the processor.

The same calls as CUDA's, and the same rules, each of which is checked where a GPU would silently go wrong or hardware would be
needed to see it:

    memory     taken from a caching allocator of the card's size, under a cap; unwritten memory is not a number
    host       a kernel uses no host memory, and the host none of the device's, except by `copy`, `upload` and `download`
    streams    copies happen late, and every two accesses must be ordered by events; see ordering.py and streams.py
    seconds    copies take as long as the card's links do, kernels as long as its rates say

Tensors are the processor's, so results have the bits of the CPU; the two sides are told apart by their addresses.
"""

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from seqpart.device.caching_allocator import Block, CachingAllocator
from seqpart.device.card import Hardware
from seqpart.device.device import DOWN, UP, Accelerator
from seqpart.device.ordering import HOST, Memory, Unordered, act, touch
from seqpart.device.pages import aligned, watched
from seqpart.device.streams import COMPUTING, Event, Stream, Streams

Used = tuple[torch.Tensor, bool]
"""(tensor, True if it is written)."""
_COPIES = {UP: "the stream of copies to the device", DOWN: "the stream of copies home"}


class SimulatedDevice(Accelerator):
    """A simulation of `hardware`. seed: seed of how late copies happen."""

    kind = "sim"
    hardware: Hardware

    def __init__(self, hardware: Hardware, seed: int = 0) -> None:
        super().__init__()
        # An index tells what is asked of the device from what is asked of the processor, on which both are made.
        self.torch, self.hardware = torch.device("cpu", 0), hardware
        self._name = f"simulated {hardware.name}"
        self.streams = Streams(tuple(_COPIES.values()), seed)
        self._allocator = CachingAllocator(hardware.memory - hardware.context)
        self._memories: dict[int, Memory] = {}
        """{address of a storage: its memory}."""
        self._freed: deque[Memory] = deque()
        """Memory whose storage was freed."""
        self._links = {UP: 0.0, DOWN: 0.0, "disk": 0.0}
        """Times at which the links are free."""
        self.busy = {UP: 0.0, DOWN: 0.0, "disk": 0.0, "computing": 0.0}
        """Seconds of work of each."""
        self._freed_too_early: list[str] = []

    @property
    def name(self) -> str:
        return self._name

    def total_memory(self) -> int:
        return self.hardware.memory

    def free_memory(self) -> int:
        return self.hardware.memory - self.used()

    def used(self) -> int:
        """Bytes of the card that this process holds, as its driver would say."""
        return self.hardware.context + self._allocator.reserved

    # --- memory ---------------------------------------------------------------------------------------------------

    def empty(self, nbytes: int) -> torch.Tensor:
        flat = aligned(nbytes)
        flat.fill_(0xFF)
        with self.streams.lock:
            self._made([flat], "a buffer")
        return flat

    def host(self, nbytes: int) -> torch.Tensor:
        flat = aligned(nbytes)
        with self.streams.lock:
            self._note(flat, "pinned memory", on_device=False)
        return flat

    def is_host(self, tensor: torch.Tensor) -> bool:
        memory = self._memory_of(tensor)
        return memory is None or not memory.on_device

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes(), torch.no_grad():
            there = torch.empty_like(host)
        with self.streams.lock:
            self._made([there], "an upload")
        self.copy(host, there)
        return there

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_host(tensor):
            return tensor
        with _disable_current_modes(), torch.no_grad():
            here = torch.empty_like(tensor)
        self.copy(tensor, here)
        self.wait(self.mark())
        return here

    def _memory_of(self, tensor: torch.Tensor) -> Memory | None:
        self._forget_freed()
        return self._memories.get(tensor.untyped_storage().data_ptr())

    def _note(self, tensor: torch.Tensor, name: str, *, on_device: bool, block: Block | None = None) -> Memory:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        memory = Memory(f"{name} of {storage.nbytes()} bytes", address, storage.nbytes(), on_device, block)
        self._memories[address] = memory
        weakref.finalize(storage, self._freed.append, memory).atexit = False
        return memory

    def _made(self, tensors: list[torch.Tensor], name: str) -> None:
        """Notes tensors that were made on the device: their memory belonged to the computing stream before."""
        for tensor in tensors:
            nbytes = tensor.untyped_storage().nbytes()
            if nbytes and self._memory_of(tensor) is None:
                memory = self._note(tensor, f"memory of {name}", on_device=True, block=self._allocator.take(nbytes))
                stream = self.streams.current
                act(stream.name, stream.clock)
                touch(memory, 0, nbytes, write=True, actor=stream.name, clock=stream.clock, what=f"allocated for {name}")

    def _forget_freed(self) -> None:
        """Frees blocks of freed storages, later: a last reference may be dropped anywhere, also by the garbage collector inside
        the allocator."""
        while self._freed:
            with self.streams.lock:
                if not self._freed:
                    return
                memory = self._freed.popleft()
                if self._memories.get(memory.address) is memory:
                    del self._memories[memory.address]
                if memory.block is not None:
                    self._allocator.give(memory.block)

    # --- streams --------------------------------------------------------------------------------------------------

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        with self.streams.lock:
            way = UP if self.is_host(source) else DOWN
            stream = self.streams.current
            begins = max(self.streams.begin(stream), self._links[way])
            rate = self.hardware.h2d if way == UP else self.hardware.d2h
            took = self.hardware.copy_latency + source.nbytes / rate
            stream.seconds = self._links[way] = begins + took
            self.busy[way] += took
            for tensor, write in ((source, False), (target, True)):
                self._touch(tensor, write=write, actor=stream.name, what=f"a copy {way}")
            held = source.detach(), target.detach()

            def late() -> None:
                self._refuse_freed(held, stream)
                with _disable_current_modes(), torch.no_grad():
                    held[1].copy_(held[0])

            self.streams.issue(stream, late)
            self._raise_errors()

    def _refuse_freed(self, held: tuple[torch.Tensor, torch.Tensor], stream: Stream) -> None:
        """Notes an error for a late copy of memory that was freed without waiting: its next owner would find it overwritten."""
        for tensor in held:
            memory = self._memory_of(tensor)
            if memory is None or not memory.on_device or stream.name in memory.lent or stream.name == COMPUTING:
                continue
            if torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= _OURS:
                what = f"{memory.name} was freed while {stream.name} was yet to use it, and was not lent."
                self._freed_too_early.append(what)

    def _raise_errors(self) -> None:
        if self._freed_too_early:
            raise Unordered(self._freed_too_early.pop())

    def lend(self, tensor: torch.Tensor) -> None:
        memory = self._memory_of(tensor)
        if memory is not None:
            memory.lent.add(self.streams.current.name)

    def mark(self) -> Event:
        return self.streams.record()

    def after(self, event: Event | None) -> None:
        if event is not None:
            self.streams.follow(event)
            self._raise_errors()

    def wait(self, event: Event | None) -> None:
        if event is not None:
            self.streams.wait(event)
            self._raise_errors()

    def is_over(self, event: Event | None) -> bool:
        return event is None or self.streams.is_known(event)

    @contextmanager
    def copying(self, way: str) -> Iterator[None]:
        with self.streams.using(_COPIES[way]), Watching(self):
            self.streams.dawdle()
            yield

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self.streams.dawdle()
        with watched(self._host_used), Watching(self):
            yield

    # --- what is used ---------------------------------------------------------------------------------------------

    def _touch(self, tensor: torch.Tensor, *, write: bool, actor: str, what: str) -> None:
        memory = self._memory_of(tensor)
        if memory is not None and tensor.numel():
            first = tensor.data_ptr() - memory.address
            span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            clock = self.streams.host if actor == HOST else self.streams.current.clock
            touch(memory, first, first + span * tensor.itemsize, write=write, actor=actor, clock=clock, what=what)

    def _host_used(self, address: int, nbytes: int, *, write: bool, disk: bool) -> None:
        """Notes that the processor uses memory, for a file or for itself."""
        with self.streams.lock:
            act(HOST, self.streams.host)
            self._forget_freed()
            for memory in list(self._memories.values()):
                first = address - memory.address
                if -nbytes < first < memory.nbytes:
                    if memory.on_device:
                        raise Unordered(f"{memory.name}: the host used it, and it is the device's. Copy it first.")
                    first, last = max(0, first), min(first + nbytes, memory.nbytes)
                    what = "the program" if not disk else "a file that is read" if write else "a file that is written"
                    touch(memory, first, last, write=write, actor=HOST, clock=self.streams.host, what=what)
            if disk:
                took = nbytes / (self.hardware.disk_read if write else self.hardware.disk_write)
                self.streams.reach(max(self._links["disk"], self.streams.seconds) + took)
                self._links["disk"] = self.streams.seconds
                self.busy["disk"] += took

    def begins(self, name: str, used: list[Used], *, makes: bool) -> bool:
        """Notes an operation that begins; returns True if it is the device's. makes: it makes tensors there."""
        with self.streams.lock:
            memories = [self._memory_of(tensor) for tensor, _ in used]
            ours = makes or any(memory is not None and memory.on_device for memory in memories)
            theirs = any(memory is not None and not memory.on_device for memory in memories)
            if ours and theirs:
                raise Unordered(f"{name}: a kernel of the device uses pinned memory. Copy it first.")
            if ours:
                self.streams.finish(self.streams.current)
                self.streams.begin(self.streams.current)
            else:
                act(HOST, self.streams.host)
            for tensor, write in used:
                self._touch(tensor, write=write, actor=self.streams.current.name if ours else HOST, what=name)
            self._raise_errors()
            return ours

    def ends(self, name: str, found: list[torch.Tensor], *, nbytes: int, flops: int, dtype: torch.dtype) -> None:
        with self.streams.lock:
            stream, rates = self.streams.current, self.hardware.flops
            rate = rates.get(str(dtype).removeprefix("torch."), rates["float32"])
            took = self.hardware.launch + max(flops / rate, nbytes / self.hardware.memory_bandwidth)
            stream.seconds = max(stream.seconds, self.streams.seconds) + took
            self.busy["computing"] += took
            self._made(found, name)
            if name.startswith(_WAITS):
                self.streams.wait(self.streams.record())

    # --- the allocator --------------------------------------------------------------------------------------------

    def reserved(self) -> int:
        self._forget_freed()
        return self._allocator.reserved

    def allocated(self) -> int:
        self._forget_freed()
        return self._allocator.allocated

    def allocated_peak(self) -> int:
        return self._allocator.allocated_peak

    def restart_peaks(self) -> bool:
        self._allocator.restart_peaks()
        return False

    def cap(self, nbytes: int | None) -> None:
        self._allocator.cap(nbytes)

    def allocator_peak(self) -> int | None:
        return self._allocator.reserved_peak

    def release_cached(self) -> None:
        with self.streams.lock:
            self._forget_freed()
            self._allocator.release_cached()


_OURS = 2
"""Number of references to a storage from one tensor of ours and its Python object."""


_WAITS = ("aten._local_scalar_dense", "aten.equal", "aten.nonzero", "aten.masked_select", "aten.is_nonzero")
"""Operations for which the host waits, since the program reads their result or its shape."""
_UNSET = ("aten.empty", "aten.new_empty")


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that reports this thread's operations on real tensors to a device: before each the tensors that it uses, after it
    those that it made, and its costs."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = list(_used(func, args, kwargs))
        makes = kwargs.get("device") == self._device.torch
        if any(isinstance(tensor, FakeTensor) or tensor.device.type != "cpu" for tensor, _ in used):
            return func(*args, **kwargs)
        name = str(func)
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        if is_view or not self._device.begins(name, used, makes=makes):
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
        self._device.ends(name, found, nbytes=nbytes, flops=int(flops), dtype=dtype)
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
