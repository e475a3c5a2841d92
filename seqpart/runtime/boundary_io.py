"""Tensors that partitions pass to each other within one update: activations on the way up, their gradients on the way down.

    device   the tensors simply stay where they are
    host     they wait in host memory that the plan granted
    disk     they wait in one file; a few buffers are written and read while the computation goes on

The plan chooses the tier of each boundary: there is one exchange per tier.

A boundary and micro-batch have first the activation, which is needed until the partition above has run backward, and then
its gradient: both use the same place.

What comes out has the strides of what went in and the same offset from a cache line, because kernels round differently if
the memory layout differs: elements are kept in their layout. Only the gaps of a part of a larger tensor are left out, and
made again.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from seqpart.device.device import DOWN, Device, Event
from seqpart.device.pages import round_up
from seqpart.model.packs import DEVICE, BoundaryRouting, Pack, Tiers, Value, gradient_of
from seqpart.plan.problem import BUFFERS, boundary_bytes, largest_boundary, routing_of
from seqpart.profile.partition import PartitionCost
from seqpart.store.layout import ALIGNMENT, LINE
from seqpart.store.streams import BufferedFile

Key = tuple[int, int]
"""(number of a value, micro-batch); -1 - n: the gradient of the n-th shared weight."""


class BoundaryExchange(ABC):
    """`put` a tensor of a micro-batch for a later step, `get` it in any later step; `take` or `forget` it at its last use."""

    lends = False
    """True if `get` may return memory that is used again, so that a kept graph must not refer to it."""

    @abstractmethod
    def put(self, key: Key, tensor: torch.Tensor) -> None: ...

    @abstractmethod
    def get(self, key: Key) -> torch.Tensor: ...

    def take(self, key: Key) -> torch.Tensor:
        """Gets a tensor for the last time, in memory that the caller owns: gradients may become those of weights."""
        found = self.get(key)
        self.forget(key)
        return found

    def forget(self, key: Key) -> None:  # noqa: B027 (memory of the caller's is used again)
        pass

    def close(self) -> None:  # noqa: B027
        pass


@dataclass(frozen=True, slots=True)
class _Form:
    """A tensor's layout in memory, and the bytes in which it is kept."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    span: int
    """Number of elements from the first to the last, gaps included."""
    numbers: int
    """Number of distinct elements in memory: repeated ones count once."""
    lead: int
    """Offset of the first element from a cache line, in elements; new memory begins on a line, a view may begin anywhere."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
        line = LINE if tensor.device.type == "cpu" else ALIGNMENT
        lead = tensor.data_ptr() % line // tensor.dtype.itemsize
        return cls(tensor.shape, tensor.stride(), tensor.dtype, span, _once(tensor).numel(), lead)

    @property
    def gaps(self) -> bool:
        return self.span > self.numbers

    @property
    def nbytes(self) -> int:
        return (self.numbers if self.gaps else self.span) * self.dtype.itemsize

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the elements as one contiguous run in memory order, without gaps."""
        tensor = tensor.detach()
        return _once(tensor).flatten() if self.gaps else tensor.as_strided((self.span,), (1,))

    def again(self, kept: torch.Tensor) -> torch.Tensor:
        """Returns the tensor: a view of what was kept, or a copy if it had gaps or did not begin on a cache line."""
        if not self.gaps and not self.lead:
            return kept.as_strided(self.shape, self.stride)
        wide = self.empty(kept.device)
        once = _once(wide)
        once.copy_(kept.view(once.shape) if self.gaps else _once(kept.as_strided(self.shape, self.stride)))
        return wide

    def empty(self, device: torch.device) -> torch.Tensor:
        """Returns an uninitialized tensor with this layout."""
        return torch.empty(self.lead + self.span, dtype=self.dtype, device=device).as_strided(
            self.shape, self.stride, self.lead
        )


def clone_as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a clone with the memory layout of `tensor`, gaps included; it is differentiable. No element may be repeated."""
    clone: torch.Tensor = _Form.of(tensor).empty(tensor.device).data  # no view to autograd
    return clone.copy_(tensor)


def copied_as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy in new memory with the layout of `tensor`, which may repeat elements. It is not differentiable."""
    form = _Form.of(tensor)
    return form.again(form.kept(tensor).clone())


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view without the repetitions along dimensions of stride 0, as `expand` makes them."""
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


class OnDevice(BoundaryExchange):
    """Holds references to the tensors, whose own memory the plan counted, and copies of parts of larger tensors."""

    def __init__(self) -> None:
        self._held: dict[Key, tuple[_Form, torch.Tensor]] = {}

    def put(self, key: Key, tensor: torch.Tensor) -> None:
        form = _Form.of(tensor)
        kept = form.kept(tensor)
        if kept.untyped_storage().nbytes() > form.nbytes:
            kept = kept.clone()
        self._held[key] = form, kept

    def get(self, key: Key) -> torch.Tensor:
        form, kept = self._held[key]
        return form.again(kept)

    def forget(self, key: Key) -> None:
        self._held.pop(key, None)

    def close(self) -> None:
        self._held.clear()


@dataclass(frozen=True, slots=True)
class _Place:
    """A range of `capacity` bytes, and the layout of the tensor in it."""

    offset: int
    capacity: int
    form: _Form

    def on(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the kept elements in `flat`, a buffer that begins where this range does."""
        return flat[: self.form.nbytes].view(self.form.dtype)


class _Places:
    """One range for each boundary and micro-batch, made when it is first needed and used again in every update."""

    def __init__(self, capacities: Mapping[int, int]) -> None:
        self._capacities = capacities
        self._places: dict[Key, _Place] = {}
        self._end = 0

    def of(self, key: Key, tensor: torch.Tensor) -> _Place:
        form, known = _Form.of(tensor), self._places.get(key)
        if known is None or known.capacity < form.nbytes:
            known = _Place(self._end, max(round_up(form.nbytes), self._capacities.get(key[0], 0)), form)
            self._end += known.capacity
        place = self._places[key] = replace(known, form=form)
        return place

    def __getitem__(self, key: Key) -> _Place:
        return self._places[key]


class InHost(BoundaryExchange):
    """Keeps copies in `flat`, host memory of the caller. They are copied out while the computation goes on, and uploaded in
    its stream's order.

    capacities: bytes of each place for a whole micro-batch, since an update may begin with a smaller one.
    """

    lends = True

    def __init__(self, flat: torch.Tensor, capacities: Mapping[int, int], device: Device) -> None:
        self._flat, self._device = flat, device
        self._places = _Places(capacities)
        self._left: dict[Key, Event] = {}
        """The event after the copy of each tensor that was put."""

    def put(self, key: Key, tensor: torch.Tensor) -> None:
        place = self._places.of(key, tensor)
        kept = place.form.kept(tensor)  # perhaps a copy
        there = self._device.mark()
        with self._device.copying(DOWN):
            self._device.after(there)  # and so after whoever read what the place held before
            self._device.copy(kept, place.on(self._flat[place.offset :]))
            self._device.lend(kept)
            self._left[key] = self._device.mark()

    def get(self, key: Key) -> torch.Tensor:
        return self._again(key, own=False)

    def take(self, key: Key) -> torch.Tensor:
        return self._again(key, own=True)

    def _again(self, key: Key, *, own: bool) -> torch.Tensor:
        place = self._places[key]
        self._device.after(self._left[key])
        kept = place.on(self._flat[place.offset :])
        return place.form.again(self._device.own(kept) if own else self._device.upload(kept))


class OnDisk(BoundaryExchange):
    """One file, written and read by a thread of its own through BUFFERS buffers of the largest micro-batch.

    `get` returns a copy, which the plan counts as a partition's input: a step may need more values than there are buffers.
    """

    def __init__(self, path: Path, largest: int, device: Device) -> None:
        self._device = device
        self._places = _Places({})
        self._file = BufferedFile[Key](path, largest, BUFFERS, "seqpart-boundaries", device)

    def put(self, key: Key, tensor: torch.Tensor) -> None:
        place = self._places.of(key, tensor)
        number = self._file.number_of(key)
        if number is None:
            number = self._file.claim(key)
        else:
            self._file.settle(number)
        self._device.copy(place.form.kept(tensor), place.on(self._file.buffers[number]))
        self._device.wait(self._device.mark())
        self._file.write(number, place.form.nbytes, place.offset)

    def get(self, key: Key) -> torch.Tensor:
        place, number = self._places[key], self._file.number_of(key)
        if number is None:  # else a buffer holds it, perhaps while it is being written
            number = self._file.claim(key)
            self._file.read(number, place.form.nbytes, place.offset)
            self._file.settle(number)
        self._file.touch(number)
        kept = self._device.own(place.on(self._file.buffers[number]))
        self._device.wait(self._device.mark())  # the buffer is used again
        return place.form.again(kept)

    def forget(self, key: Key) -> None:
        number = self._file.number_of(key)
        if number is not None:
            self._file.settle(number)
            self._file.empty(number)

    def close(self) -> None:
        self._file.close()


class BoundaryIO:
    """Passes boundary tensors between partitions, each value by the exchange of its tier."""

    def __init__(self, exchanges: Mapping[str, BoundaryExchange], tiers: Tiers, routing: BoundaryRouting) -> None:
        self._exchanges, self._tiers, self._routing = exchanges, tiers, routing
        self._waiting: set[Key] = set()
        """Keys of gradients that have been put: some values get none."""

    def _of(self, number: int) -> BoundaryExchange:
        return self._exchanges[self._routing.tier_of(number, self._tiers)]

    def close(self) -> None:
        for exchange in self._exchanges.values():
            exchange.close()

    def put_outputs(self, m: int, pack: Pack) -> None:
        """Puts the outputs of micro-batch m that other partitions take."""
        for number, tensor in pack.items():
            self._of(number).put((number, m), tensor)

    def take_inputs(self, p: int, m: int, *, to_keep: bool = False) -> Pack:
        """Returns partition p's inputs; they stay for others and for p's backward. to_keep: in memory that is not reused."""
        pack = {value.number: self._of(value.number).get((value.number, m)) for value in self._routing.entering[p]}
        lent = [number for number in pack if to_keep and self._of(number).lends]
        return pack | {number: copied_as_it_lies(pack[number]) for number in lent}

    def used_up(self, p: int, m: int) -> None:
        """Forgets the values that p was the last to take."""
        for value in self._routing.used_up(p):
            self._of(value.number).forget((value.number, m))

    def wanted(self, p: int, lowest: int) -> frozenset[int]:
        """Returns p's inputs whose gradients an earlier partition learns from; `lowest`: the first partition that learns."""
        return frozenset(v.number for v in self._routing.entering[p] if self._routing.wants_gradient(v, lowest))

    def taken_again(self, p: int) -> frozenset[int]:
        """Returns p's inputs that later partitions take too: their gradients arrive first."""
        return frozenset(value.number for value in self._routing.taken_again(p))

    def take_gradients(self, p: int, m: int, edges: Collection[int]) -> Pack:
        """Takes waiting gradients of p's outputs, and of inputs that later partitions took too; returns those in `edges`."""
        found: Pack = {}
        for value in (*self._routing.leaving[p], *self._routing.taken_again(p)):
            key = self._gradient_key(value, m)
            if key in self._waiting:
                self._waiting.remove(key)
                if value.number in edges:
                    found[value.number] = self._of(key[0]).take(key)
                else:
                    self._of(key[0]).forget(key)
        return found

    def put_gradients(self, p: int, m: int, gradients: Mapping[int, torch.Tensor], lowest: int) -> None:
        """Puts the gradients of p's inputs for others, and forgets the activations that nobody needs any more."""
        for value in self._routing.entering[p]:
            key, gradient = self._gradient_key(value, m), gradients.get(value.number)
            if self._routing.is_first_user(p, value, lowest) and (gradient is None or key[0] != value.number):
                self._of(value.number).forget((value.number, m))
            if gradient is not None:
                self._of(key[0]).put(key, gradient)
                self._waiting.add(key)

    def gradients_wait(self, m: int) -> bool:
        return any(key[1] == m for key in self._waiting)

    def put_shared_gradient(self, number: int, m: int, gradient: torch.Tensor) -> None:
        """Puts the gradient of a weight that a lower partition owns."""
        key = -1 - number, m
        self._of(key[0]).put(key, gradient)
        self._waiting.add(key)

    def take_shared_gradient(self, number: int, m: int) -> Iterable[torch.Tensor]:
        key = -1 - number, m
        if key in self._waiting:
            self._waiting.remove(key)
            yield self._of(key[0]).take(key)

    def abandon(self) -> None:
        """Forgets the unfinished update."""
        self._waiting.clear()

    def _gradient_key(self, value: Value, m: int) -> Key:
        """Returns the key of a value's gradient; a value that several partitions take is still needed, so it has its own."""
        return (gradient_of(value.number) if self._routing.is_shared(value) else value.number), m


def open_boundaries(
    tiers: Tiers, parts: Sequence[PartitionCost], batch: int, micro_batch: int, host: torch.Tensor | None, path: Path,
    device: Device,
) -> BoundaryIO:  # fmt: skip
    """Opens the exchanges of the plan. After the micro-batch was halved `host` may be too small: then the disk replaces it."""
    if len(parts) == 1:
        tiers = ()
    if host is None or boundary_bytes(parts, batch, micro_batch, tiers, "host") > len(host):
        tiers = tuple("disk" if tier == "host" else tier for tier in tiers)
    routing, exchanges = routing_of(parts), dict[str, BoundaryExchange]()
    for tier in sorted({*tiers, routing.tier_of(-1, tiers)}):
        if tier == DEVICE:
            exchanges[tier] = OnDevice()
        elif tier == "host" and host is not None:
            exchanges[tier] = InHost(host, routing.places(micro_batch), device)
        else:
            exchanges[tier] = OnDisk(path, largest_boundary(parts, micro_batch, tiers), device)
    return BoundaryIO(exchanges, tiers, routing)


def falsified(handed: torch.Tensor) -> torch.Tensor:
    """Returns `handed` made slightly wrong, in a way that no normalization undoes."""
    if not handed.is_floating_point():
        return handed.flip(*range(handed.ndim))
    growing = torch.linspace(2**-7, 2**-5, handed.numel(), dtype=torch.float32, device=handed.device).view(handed.shape)
    return handed + (handed * growing).to(handed.dtype)
