"""What is seen of a run: a digest of every tensor before each update, compared with those of another run as they come.

Not copies of the tensors: those of a few updates are many times the model. Of two runs only the first tensor that
differs is kept, on disk.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash

from seqpart.runtime.executor import Executor
from seqpart.runtime.partition import Partition
from seqpart.schedule.steps import Step

_AT_ONCE = 1 << 20
"""Bytes of a tensor that are looked at at once: a copy of all of it could break the limit."""
VALUE, STATE, BUFFER, LOSS, GRADIENT = range(5)
"""What is compared, in the order in which an update makes it."""
_WORDS = ("", "optimizer state ", "buffer ", "the loss", "the gradient of ")


class Key(NamedTuple):
    """One tensor of one update, ordered as they come about: the first that differs is the nearest to the cause."""

    update: int
    """Counts from 0; one more than the last for what the last update left."""
    kind: int
    block: int
    """Of gradients negative: they come from the last block to the first."""
    name: str

    def __str__(self) -> str:
        return _WORDS[self.kind] + self.name

    def when(self, steps: int) -> str:
        return f"in update {self.update + 1} of {steps}" if self.update < steps else f"after update {steps}"


class Digests:
    """What is seen of one run: a digest of every tensor.

    expected: digests to compare with; the run ends behind the update in which one differs, and `keeps` is the file that
        the first of them goes to. wanted: a tensor, and the file with another run's, to measure the difference.
    """

    def __init__(
        self, steps: int, *, expected: dict[Key, bytes] | None = None, keeps: Path | None = None,
        wanted: tuple[Key, Path] | None = None,
    ) -> None:  # fmt: skip
        self.steps, self.seen = steps, dict[Key, bytes]()
        self.first: Key | None = None
        self.difference: str | None = None
        self.losses: list[float] = []
        """The mean loss of the first update, of the first two, ..."""
        self.evaluation: tuple[float, float | None] | None = None
        """Loss and accuracy behind the last update."""
        self._expected, self._keeps, self._wanted = expected, keeps, wanted
        self._done, self._begun, self._updates = 0, 0, dict[int, int]()

    def before_update(self, partition: Partition, step: Step) -> None:
        update = self._updates[step.partition] = self._updates.get(step.partition, self._begun - 1) + 1
        state = partition.optimizer.state if partition.optimizer is not None else {}
        for block in partition.blocks:
            for name, parameter in block.own(dict(block.module.named_parameters())).items():
                own = f"{block.name}.{name}"
                self.see(Key(update, VALUE, block.number, own), parameter)
                if parameter.requires_grad:
                    self.see(Key(update, GRADIENT, -block.number, own), parameter.grad)
                for part, value in state.get(parameter, {}).items():
                    self.see(Key(update, STATE, block.number, f"{own}.{part}"), value)
            for name, buffer in block.module.named_buffers():
                self.see(Key(update, BUFFER, block.number, f"{block.name}.{name}"), buffer)

    def at_rest(self, executor: Executor) -> bool:
        """An update is over. Returns whether to go on: not behind the last one that is to be seen."""
        self.see(Key(self._done, LOSS, 0, ""), torch.as_tensor(executor.compute.metrics.loss))
        self.losses.append(executor.compute.metrics.mean_loss)
        self._done += 1
        return not self.found and self._done < self.steps

    def go_back(self, done: int) -> None:
        """The run goes on from where it had made so many updates."""
        self._done = self._begun = done
        self._updates.clear()
        del self.losses[done:]

    @property
    def found(self) -> bool:
        """Whether what was looked for is there: the rest of the run does not matter."""
        return self.first is not None or self.difference is not None

    def see(self, key: Key, tensor: torch.Tensor | None) -> None:
        self.seen[key] = digest = digest_of(tensor)
        if self._expected is not None and self._expected.get(key) != digest:
            self._differs(key, tensor)
        if self._wanted is not None and self._wanted[0] == key:
            self.difference = _difference(self._wanted[1], tensor)

    def miss(self) -> None:
        """The run is over: what it should have had and did not differs too."""
        for key in (self._expected or {}).keys() - self.seen.keys():
            self._differs(key, None)

    def _differs(self, key: Key, tensor: torch.Tensor | None) -> None:
        if self.first is not None and self.first < key:
            return
        self.first = key
        if self._keeps is not None:
            keep_tensor(self._keeps, tensor)


def keep_tensor(path: Path, tensor: torch.Tensor | None) -> None:
    """Its bytes, for what is `wanted` of another run."""
    with open(path, "wb") as file:
        for part in _parts(tensor):
            file.write(part.view(torch.uint8).numpy().data)


def _parts(tensor: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """Its elements in order, flat, on the host, some rows at a time."""
    if tensor is None or not tensor.numel():
        return
    rows = tensor.detach().reshape(1) if not tensor.ndim else tensor.detach()
    at_once = max(1, _AT_ONCE * len(rows) // rows.nbytes)
    for part in (rows[start : start + at_once] for start in range(0, len(rows), at_once)):
        yield part.cpu().contiguous().view(-1)


def digest_of(tensor: torch.Tensor | None) -> bytes:
    if tensor is None:
        return b"none"
    digest = xxhash.xxh3_128(repr((tensor.dtype, tuple(tensor.shape))).encode())
    for part in _parts(tensor):
        digest.update(part.view(torch.uint8).numpy().data)
    return digest.digest()


def _difference(path: Path, tensor: torch.Tensor | None) -> str:
    """Of `tensor` from the one whose bytes are in the file."""
    if tensor is None or path.stat().st_size != tensor.nbytes:
        return "one of them has none there, or another type or shape"
    count, largest = 0, 0.0
    with open(path, "rb") as file:
        for part in _parts(tensor):
            other = torch.frombuffer(bytearray(file.read(part.nbytes)), dtype=part.dtype)
            bits = [each.view(torch.uint8).view(-1, part.itemsize) for each in (part, other)]
            differ = (bits[0] != bits[1]).any(1)
            if bool(differ.any()):
                wide = torch.complex128 if part.is_complex() else torch.float64
                far = (part[differ].to(wide) - other[differ].to(wide)).abs()
                count, largest = count + int(differ.sum()), max(largest, float(far.nan_to_num(nan=float("inf")).max()))
    return f"{count} of {tensor.numel()} elements, by at most {largest:.3g}" if count else "though equal when it was run again"
