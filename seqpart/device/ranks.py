"""The processes of one run under torchrun, its ranks: what they tell one another, and how they add up gradients.

torchrun starts them and names them in the environment; torch.distributed carries the bytes, gloo for host memory and NCCL for
that of GPUs. All values of a sum are added in the order of the ranks, so that W ranks of one micro-batch each have the bits of
one process that accumulates W; a ring's sum has not.
"""

import atexit
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from seqpart.device.device import Device
from seqpart.device.pages import lies_dense
from seqpart.errors import OptionError, OtherRank, SeqpartError, first_line

T = TypeVar("T")
CHUNK, _LEAST_PART = 4 << 20, 64 << 10
"""Least bytes of gradients that are exchanged at a time, and of each rank's part of them: a network has a latency."""
_RECORDED = "TORCH_FR_BUFFER_SIZE"
"""torch's name for the number of exchanges that it records, 2,000 unless it is set: a record is a small piece of memory."""
_TRIES = 4
"""How often the speed of an exchange is measured."""
_PATIENCE = timedelta(days=1)
"""How long a rank waits for another, which may be saving a checkpoint or evaluating. One that has ended is noticed at once."""


class Ranks:
    """One process alone, which has nobody to tell anything."""

    number, count, note = 0, 1, ""
    room = 0
    """Bytes that an exchange of gradients takes for a moment."""
    keeps_heap = True
    """False if exchanges leave small pieces of memory behind, between which a kept heap would grow."""

    @property
    def leads(self) -> bool:
        """True for the rank that prints, plans and saves."""
        return self.number == 0

    def gather(self, value: T) -> list[T]:
        """Returns the values of all ranks, in order."""
        return [value]

    @contextmanager
    def broadcasting(self) -> Iterator[None]:
        """A context in which the first rank calls `broadcast`; its error is raised by `receive` on the others."""
        yield

    def broadcast(self, value: object) -> None:
        """Gives `value` from the first rank to the others, which call `receive`; does nothing on these."""

    def receive(self) -> Any:
        """Returns what the first rank tells, or raises its error."""
        raise AssertionError("one process alone is the first")

    def any_of(self, *values: bool) -> list[bool]:
        """Returns what any of the ranks says of each."""
        return list(values)

    def send(self, buffer: torch.Tensor, source: int = 0, to: int | None = None) -> None:
        """Fills `buffer`, in host memory, with what it holds on rank `source`: on every rank, or on `to` alone."""

    def spread(self, buffer: torch.Tensor, source: int) -> None:
        """Fills `buffer` on every rank as `send` does, in one thread beside the one that computes."""

    def give(self, weights: Sequence[torch.Tensor], owner: int) -> int:
        """Fills `weights` on every rank with what they are on rank `owner`. Returns the bytes sent."""
        return 0

    def seconds_of(self, nbytes: int) -> float:
        """Returns the seconds that an exchange of so many bytes of gradients is expected to take."""
        return 0.0

    def add_up(self, parameters: Sequence[torch.nn.Parameter]) -> int:
        """Replaces gradients by their sums over all ranks; a parameter without one adds nothing. Returns the bytes sent."""
        return 0


class Group(Ranks):
    def __init__(self, device: Device, environment: Mapping[str, str]) -> None:
        self.number, self.count = (int(environment[name]) for name in ("RANK", "WORLD_SIZE"))
        self._device, self._to_broadcast = device, False
        # Touched, so that it counts as there before the plan. Memory of an exchange's own would leave holes in a kept heap.
        self.chunk = chunk_of(self.count)
        self.room = 6 * self.chunk
        self._buffers = torch.ones(2, 2, self.chunk, dtype=torch.uint8, device=device.torch)
        self.note = f"{self.count} processes train together; the limit is that of each"
        if torch.get_num_threads() == 1 and per_machine() > 1:
            self.note += ". Each computes on one thread (torchrun sets OMP_NUM_THREADS=1 unless you do), which gives other bits"
        self.keeps_heap = environment.get(_RECORDED, "" if dist.is_initialized() else "0") == "0"
        with self._others_heard(), _environment(_RECORDED, "0"):
            if not dist.is_initialized():
                # torchrun keeps its store when it starts ranks again, and gloo would find addresses of those that have ended.
                store, _, _ = next(rendezvous("env://", timeout=_PATIENCE))
                attempt = cast(Any, dist).PrefixStore(environment.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
                dist.init_process_group("gloo", store=attempt, rank=self.number, world_size=self.count, timeout=_PATIENCE)
                atexit.register(dist.destroy_process_group)
            self._words: Any = dist.new_group(backend="gloo", timeout=_PATIENCE)
            self._loads: Any = dist.new_group(backend="gloo", timeout=_PATIENCE)
            self._sums: Any = self._words if device.kind != "cuda" else dist.new_group(backend="nccl", timeout=_PATIENCE)
            self._seconds = self.tried(self.chunk // 4)

    def tried(self, count: int) -> float:
        """Returns the seconds that an exchange of `count` gradients takes; all ranks call it."""
        weight, took = torch.nn.Parameter(torch.zeros(count, device=self._device.torch)), list[float]()
        for _ in range(_TRIES):
            weight.grad = torch.zeros_like(weight)
            self.gather(None)
            began = time.perf_counter()
            self.add_up([weight])
            took.append(time.perf_counter() - began)
        return min(took)

    def seconds_of(self, nbytes: int) -> float:
        return self._seconds * max(1.0, nbytes / self.chunk)

    def gather(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.count
        with self._others_heard():
            dist.all_gather_object(found, value, group=self._words)
        return found

    @contextmanager
    def broadcasting(self) -> Iterator[None]:
        self._to_broadcast = True
        try:
            yield
        except Exception as error:
            if self.leads and self._to_broadcast:
                self.broadcast(error if isinstance(error, SeqpartError) else OtherRank(f"rank 0 ended: {error!r}."))
                setattr(error, _SHARED, True)
            raise

    def broadcast(self, value: object) -> None:
        if self.leads:
            self._to_broadcast = False
            with self._others_heard():
                dist.broadcast_object_list([value], group=self._words)

    def receive(self) -> Any:
        found: list[Any] = [None]
        with self._others_heard():
            dist.broadcast_object_list(found, group=self._words)
        if isinstance(error := found[0], Exception):
            setattr(error, _SHARED, True)
            raise error
        return found[0]

    def leave(self) -> None:
        """Closes the connections, so that ranks that wait for this one hear it."""
        for group in {self._words, self._loads, self._sums}:
            dist.destroy_process_group(group)
        self._words = self._loads = self._sums = None

    def any_of(self, *values: bool) -> list[bool]:
        return self._bytes_of_all(values).any(0).tolist()

    def _bytes_of_all(self, own: Sequence[int]) -> torch.Tensor:
        """Returns the same numbers, below 256, of all ranks: (ranks, numbers)."""
        found = torch.empty(self.count, len(own), dtype=torch.uint8)
        with self._others_heard():
            dist.all_gather([*found], torch.tensor(own, dtype=torch.uint8), group=self._words)
        return found

    def send(self, buffer: torch.Tensor, source: int = 0, to: int | None = None) -> None:
        with self._others_heard():
            if to is None:
                dist.broadcast(buffer, source, group=self._words)
            elif self.number == source:
                dist.send(buffer, to, group=self._words)
            else:
                dist.recv(buffer, source, group=self._words)

    def spread(self, buffer: torch.Tensor, source: int) -> None:
        with self._others_heard():
            dist.broadcast(buffer, source, group=self._loads)

    def give(self, weights: Sequence[torch.Tensor], owner: int) -> int:
        alike: dict[torch.dtype, list[torch.Tensor]] = {}
        for weight in weights:
            alike.setdefault(weight.dtype, []).append(_in_a_row(weight) if lies_dense(weight) else weight)
        with self._others_heard(), torch.no_grad():
            for pieces in (chunk for own in alike.values() for chunk in _chunks(own, 1, self.chunk)):
                flat = self._in_one(pieces, sum(piece.numel() for piece in pieces), place=0)
                dist.broadcast(flat, owner, group=self._sums)
                _put_back(flat, pieces)
        return sum(weight.nbytes for weight in weights) * (self.count - 1 if owner == self.number else 0)

    def add_up(self, parameters: Sequence[torch.nn.Parameter]) -> int:
        parameters = [parameter for parameter in parameters if parameter.numel()]
        kinds = self._bytes_of_all([_kind_of(parameter) for parameter in parameters])
        alike: dict[tuple[torch.dtype, tuple[int, ...]], list[torch.Tensor]] = {}
        for parameter, kind in zip(parameters, kinds.unbind(1), strict=True):
            if ranks := tuple(kind.nonzero().flatten().tolist()):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                flat = _in_a_row(parameter.grad) if kind.max() == _AS_THE_WEIGHT else parameter.grad
                alike.setdefault((parameter.grad.dtype, ranks), []).append(flat)
        with self._others_heard(), torch.no_grad():
            return sum(self._add_up(own, ranks) for (_, ranks), own in alike.items())

    def _add_up(self, gradients: Sequence[torch.Tensor], ranks: Sequence[int]) -> int:
        """Replaces gradients by the sums of those of `ranks`; a chunk is on its way while the one before is added up."""
        finish: Callable[[], int] = int  # 0: nothing was sent
        sent = 0
        for number, pieces in enumerate(_chunks(gradients, self.count, self.chunk)):
            begun = self._exchange(pieces, ranks, number % 2)
            sent += finish()
            finish = begun
        return sent + finish()

    def _exchange(self, pieces: Sequence[torch.Tensor], ranks: Sequence[int], place: int) -> Callable[[], int]:
        """Begins to replace a chunk of gradients by the sum of those of `ranks`: each rank adds up a part of it for all.

        Returns what ends it, and returns the bytes sent."""
        each = -(-sum(piece.numel() for piece in pieces) // self.count)
        flat = self._in_one(pieces, each * self.count, place)
        received = self._memory(each * self.count, flat.dtype, place, 1)
        begun = cast(Any, dist).all_to_all_single(received, flat, group=self._sums, async_op=True)

        def finish() -> int:
            begun.wait()
            parts = received.view(self.count, each)
            mine = parts[ranks[0]]
            for rank in ranks[1:]:
                mine += parts[rank]
            for part in parts:  # gathering them would take memory of gloo's own, which leaves holes in a kept heap
                part.copy_(mine)
            dist.all_to_all_single(flat, received, group=self._sums)
            _put_back(flat, pieces)
            return 2 * (self.count - 1) * each * flat.element_size()

        return finish

    def _in_one(self, pieces: Sequence[torch.Tensor], count: int, place: int) -> torch.Tensor:
        """Returns the numbers of the pieces in a row of `count`: the only piece itself, or memory of a chunk on its way."""
        if len(pieces) == 1 and pieces[0].ndim == 1 and pieces[0].numel() == count:
            return pieces[0]
        flat = self._memory(count, pieces[0].dtype, place, 0)
        torch.cat([piece.reshape(-1) for piece in pieces], out=flat[: sum(piece.numel() for piece in pieces)])
        return flat

    def _memory(self, count: int, dtype: torch.dtype, place: int, use: int) -> torch.Tensor:
        """Memory for a chunk on its way, the same each time."""
        nbytes = count * dtype.itemsize
        if nbytes > self.chunk:  # a gradient in another order than its weight, which is not cut
            return torch.empty(count, dtype=dtype, device=self._device.torch)
        return self._buffers[place, use, :nbytes].view(dtype)

    @contextmanager
    def _others_heard(self) -> Iterator[None]:
        """Raises OtherRank where torch.distributed says that a process does not answer any more."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if self._device.is_out_of_memory(error):
                raise
            reason = first_line(error).rpartition("] ")[2].partition(". ")[0]  # gloo begins with a place in its source
            raise OtherRank(
                f"rank {self.number} cannot exchange with the others any more. One has most likely ended, and its own message "
                f"says why. torch.distributed says: {reason}."
            ) from None


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """A context in which a variable of the environment has this value, if it has none."""
    absent = name not in os.environ
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if absent:
            del os.environ[name]


_AS_THE_WEIGHT, _OTHERWISE = 1, 2
"""How a gradient lies in memory: without gaps and in the order of its weight, or not so."""


def _kind_of(parameter: torch.nn.Parameter) -> int:
    if parameter.grad is None:
        return 0
    alike = parameter.grad.stride() == parameter.stride() and lies_dense(parameter)
    return _AS_THE_WEIGHT if alike else _OTHERWISE


def _in_a_row(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient's memory as one row, in its own order."""
    return gradient.as_strided((gradient.numel(),), (1,))


def _put_back(flat: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Copies numbers in a row, perhaps with more at its end, back into the pieces that they came from."""
    if flat is pieces[0]:
        return
    sizes = [piece.numel() for piece in pieces]
    for piece, found in zip(pieces, torch.split(flat[: sum(sizes)], sizes), strict=True):
        piece.copy_(found.view(piece.shape))


def chunk_of(ranks: int) -> int:
    """Returns the bytes of gradients that so many ranks exchange at a time."""
    return max(CHUNK, ranks * _LEAST_PART)


def _chunks(gradients: Sequence[torch.Tensor], ranks: int, nbytes: int) -> Iterator[list[torch.Tensor]]:
    """Yields pieces of the gradients, of `nbytes` together at most, and of one size for each rank. A piece is a view."""
    most = nbytes // gradients[0].element_size() // ranks * ranks
    pieces, left = list[torch.Tensor](), most
    for gradient in gradients:
        for piece in torch.split(gradient, most) if gradient.ndim == 1 else [gradient]:
            if piece.numel() == most:
                yield [piece]
                continue
            if pieces and piece.numel() > left:
                yield pieces
                pieces, left = [], most
            pieces.append(piece)
            left -= piece.numel()
    if pieces:
        yield pieces


def started_by_torchrun() -> bool:
    """True in a process that is one of several that torchrun, or a program like it, has started."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


def per_machine() -> int:
    """Number of processes of the run on this machine, which share its memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if started_by_torchrun() else 1


def leads() -> bool:
    """True in the process that prints and saves."""
    return not started_by_torchrun() or int(os.environ["RANK"]) == 0


_SHARED = "_is_of_first_rank"
"""Attribute of errors of the first rank that it has told the others."""


def is_of_first_rank(error: BaseException) -> bool:
    """True for an error that the first rank has printed, or will print."""
    return not leads() and (hasattr(error, _SHARED) or isinstance(error, KeyboardInterrupt))


@contextmanager
def leaving_on_error() -> Iterator[None]:
    """A context in which an error that the other ranks do not have parts this rank from them, until its next run."""
    try:
        yield
    except BaseException as error:
        if not hasattr(error, _SHARED):
            for kind in list(_GROUPS):
                _GROUPS.pop(kind).leave()
        raise


def begun_before(folder: Path | None) -> Path | None:
    """Returns the directory of a run that torchrun has started again after a rank had ended, if it was begun there."""
    again = started_by_torchrun() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    return folder if again and folder is not None and folder.exists() else None


ALONE = Ranks()


_GROUPS: dict[str, Group] = {}
"""The connected ranks, by the kind of their devices."""


def ranks_of(device: Device) -> Ranks:
    """Returns the ranks of this run, and connects them; a process that was started alone is alone."""
    if not started_by_torchrun():
        return ALONE
    if device.kind not in _GROUPS:
        _GROUPS[device.kind] = Group(device, os.environ)
    return _GROUPS[device.kind]


def refuse_ranks(what: str, cure: str) -> None:
    """Raises OptionError if torchrun has started several processes, for what only one can do."""
    if started_by_torchrun():
        raise OptionError(f"{what} is done by one process, and torchrun has started {os.environ['WORLD_SIZE']}. {cure}")
