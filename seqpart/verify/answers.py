"""The answers of a plan, and plans drawn at random from all possible answers, independent of the planner's choice."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import NamedTuple, Self

import torch
import xxhash

from seqpart.model.optimizer_state import tensors_in
from seqpart.model.packs import DEVICE, Tiers, tier_at, tiers_of
from seqpart.plan.plan import KEPT, RECOMPUTED, Plan
from seqpart.runtime.executor import Executor
from seqpart.runtime.partition import Partition
from seqpart.schedule.steps import Step

_LOOKED_AT = 30
"""Number of draws, of which the one that differs most from the known plans is taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """The answers of a plan, for its method and micro-batch."""

    starts: tuple[int, ...]
    slots: int
    stays: frozenset[int]
    weights_stay: frozenset[int]
    keeps: frozenset[int]
    offloads: frozenset[int]
    graphs_at_host: frozenset[int]
    tiers: Tiers
    keeps_heap: bool

    @classmethod
    def of(cls, plan: Plan) -> Self:
        alike = {field.name: getattr(plan, field.name) for field in fields(cls) if field.name != "keeps_heap"}
        return cls(**alike, keeps_heap=plan.heap > 0)

    def __str__(self) -> str:
        heap = "heap kept" if self.keeps_heap else "heap given back"
        return (
            f"cut at {_named(self.starts)}, {self.slots} slot(s), staying: {_named(self.stays)}, by their weights: "
            f"{_named(self.weights_stay)}, keeping graphs: {_named(self.keeps)}, of them to host memory: "
            f"{_named(self.graphs_at_host)}, to the disk: {_named(self.offloads - self.graphs_at_host)}, "
            f"boundaries on {', '.join(self.tiers) or DEVICE}, {heap}"
        )

    def different(self, other: Self) -> int:
        return sum(one != two for one, two in zip(astuple(self), astuple(other), strict=True))

    def asked(self, like: Plan, blocks: int) -> Plan:
        """Returns `like` with these answers, to be planned again: their memory is not known."""
        ends, part, tier = (*self.starts[1:], blocks), like.partitions[0], "ram" if like.device.startswith("CPU") else "pinned"
        parts = tuple(
            replace(
                part, first=first, last=last, stays=p in self.stays, weights_stay=p in self.weights_stay,
                graph=self._graph(p, tier), boundary_tier=tier_at(self.tiers, p),
            )
            for p, (first, last) in enumerate(zip(self.starts, ends, strict=True))
        )  # fmt: skip
        return replace(like, partitions=parts, slots=self.slots, heap=int(self.keeps_heap))

    def _graph(self, p: int, tier: str) -> str:
        if p not in self.offloads:
            return KEPT if p in self.keeps else RECOMPUTED
        return tier if p in self.graphs_at_host else "disk"


def _named(numbers: Sequence[int] | frozenset[int]) -> str:
    return ", ".join(map(str, sorted(numbers))) or "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """The sets that answers are drawn from."""

    starts: tuple[int, ...]
    """Blocks at which a partition may begin, including the first."""
    tiers: tuple[str, ...]
    graph_tiers: tuple[str, ...]
    """Tiers of offloaded graphs."""
    heap: bool
    """True if the heap may be kept."""
    streams: bool
    """True if partitions may stream; else all of them stay."""

    def draw(self, random: Random, known: Sequence[Answers]) -> Answers | None:
        """Returns answers that differ from all `known` ones; None if no draw did."""
        if len(self.starts) < 2:  # nothing to cut
            return None
        found = [answers for answers in (self._one(random) for _ in range(_LOOKED_AT)) if answers not in known]
        return max(found, key=lambda answers: sum(answers.different(other) for other in known), default=None)

    def _one(self, random: Random) -> Answers:
        count = random.randint(2, len(self.starts))
        tiers = tiers_of(self._boundaries(random, count))
        every = range(count)
        there = [random.choice(("stays", "stays", "weights", "in turn")) if self.streams else "stays" for _ in every]
        stays, weights = (frozenset(p for p in every if there[p] == what) for what in ("stays", "weights"))
        # The last partition's graph is always there.
        ways = (RECOMPUTED, KEPT, *self.graph_tiers)
        graphs = [random.choice(ways) for _ in every[:-1]]
        kept, host, disk = (frozenset(p for p, way in enumerate(graphs) if way == at) for at in (KEPT, "host", "disk"))
        return Answers(
            starts=(0, *sorted(random.sample(self.starts[1:], count - 1))), tiers=tiers, stays=stays,
            weights_stay=weights, keeps=kept | host | disk, offloads=host | disk, graphs_at_host=host,
            slots=min(count - len(stays), random.randint(1, 2)) if self.streams else count,
            keeps_heap=self.heap and not tiers and random.random() < 0.5,
        )  # fmt: skip

    def _boundaries(self, random: Random, count: int) -> list[str]:
        """Returns the tiers of boundaries: the same for all, or drawn for each."""
        one = random.choice(self.tiers)
        return [random.choice(self.tiers) for _ in range(count)] if random.random() < 0.5 else [one] * count


_AT_ONCE = 1 << 20
"""Bytes of a tensor that are looked at at once: a copy of all of it could break the limit."""
VALUE, STATE, BUFFER, LOSS, GRADIENT = range(5)
"""Kinds of compared tensors, in the order in which an update computes them."""
_WORDS = ("", "optimizer state ", "buffer ", "the loss", "the gradient of ")


class Key(NamedTuple):
    """Identifies one tensor of one update, in order of computation: the first that differs is nearest to the cause."""

    update: int
    """Number of the update, from 0; one more than the last for the final tensors."""
    kind: int
    block: int
    """Number of the block; negative for gradients, which are computed from the last block to the first."""
    name: str

    def __str__(self) -> str:
        return _WORDS[self.kind] + self.name

    def when(self, steps: int) -> str:
        return f"in update {self.update + 1} of {steps}" if self.update < steps else f"after update {steps}"


class Digests:
    """Records a digest of every tensor of one run.

    expected: digests to compare with; the run ends after the update in which one differs, and `keeps` is the file that
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
        """Loss and accuracy after the last update."""
        self._expected, self._keeps, self._wanted = expected, keeps, wanted
        self._done, self._begun, self._updates = 0, 0, dict[int, int]()

    def before_update(self, partition: Partition, step: Step) -> None:
        update = self._updates[step.partition] = self._updates.get(step.partition, self._begun - 1) + 1
        for block in partition.blocks:
            for name, parameter in block.own(dict(block.module.named_parameters())).items():
                own = f"{block.name}.{name}"
                self.see(Key(update, VALUE, block.number, own), parameter)
                if parameter.requires_grad:
                    self.see(Key(update, GRADIENT, -block.number, own), parameter.grad)
                for part, value in () if partition.optimizer is None else tensors_in(partition.optimizer, parameter):
                    self.see(Key(update, STATE, block.number, f"{own}.{part}"), value)
            for name, buffer in block.module.named_buffers():
                self.see(Key(update, BUFFER, block.number, f"{block.name}.{name}"), buffer)

    def at_rest(self, executor: Executor) -> bool:
        """Called after an update. Returns False after the last one to be recorded."""
        self.see(Key(self._done, LOSS, 0, ""), torch.as_tensor(executor.compute.metrics.loss))
        self.losses.append(executor.compute.metrics.mean_loss)
        self._done += 1
        return not self.found and self._done < self.steps

    def go_back(self, done: int) -> None:
        """Called when the run continues from an earlier number of updates."""
        self._done = self._begun = done
        self._updates.clear()
        del self.losses[done:]

    @property
    def found(self) -> bool:
        """True if the wanted tensor was found, so that the rest of the run does not matter."""
        return self.first is not None or self.difference is not None

    def see(self, key: Key, tensor: torch.Tensor | None) -> None:
        self.seen[key] = digest = digest_of(tensor)
        if self._expected is not None and self._expected.get(key) != digest:
            self._differs(key, tensor)
        if self._wanted is not None and self._wanted[0] == key:
            self.difference = _difference(self._wanted[1], tensor)

    def miss(self) -> None:
        """Called at the end of the run: counts expected digests that are missing as different."""
        for key in (self._expected or {}).keys() - self.seen.keys():
            self._differs(key, None)

    def _differs(self, key: Key, tensor: torch.Tensor | None) -> None:
        if self.first is not None and self.first < key:
            return
        self.first = key
        if self._keeps is not None:
            keep_tensor(self._keeps, tensor)


def keep_tensor(path: Path, tensor: torch.Tensor | None) -> None:
    """Writes the tensor's bytes, to be compared with another run's."""
    with open(path, "wb") as file:
        for part in _parts(tensor):
            file.write(part.view(torch.uint8).numpy().data)


def _parts(tensor: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """Yields the tensor's elements in order, flat, on the host, some rows at a time."""
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
    """Returns the difference of `tensor` from the one whose bytes are in the file."""
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
