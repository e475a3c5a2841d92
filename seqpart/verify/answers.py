"""What a plan may answer, and plans drawn from all of that: the schedules of a method, whatever the planner prefers."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from random import Random
from typing import Self

from seqpart.model.packs import DEVICE, Tiers, tier_at, tiers_of
from seqpart.plan.plan import AGAIN, KEPT, Plan

_LOOKED_AT = 30
"""Draws, of which the one is taken that differs most from those that are known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Of a plan, at its method and micro-batch."""

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
        return cls(
            starts=plan.starts, slots=plan.slots, stays=plan.stays, weights_stay=plan.weights_stay, keeps=plan.keeps,
            offloads=plan.offloads, graphs_at_host=plan.graphs_at_host, tiers=plan.tiers, keeps_heap=plan.heap > 0,
        )  # fmt: skip

    def __str__(self) -> str:
        heap = "heap kept" if self.keeps_heap else "heap given back"
        return (
            f"cut at {_named(self.starts)}, {self.slots} slot(s), staying: {_named(self.stays)}, by their weights: "
            f"{_named(self.weights_stay)}, keeping graphs: {_named(self.keeps)}, of them to host memory: "
            f"{_named(self.graphs_at_host)}, to the disk: "
            f"{_named(self.offloads - self.graphs_at_host)}, boundaries on {', '.join(self.tiers) or DEVICE}, {heap}"
        )

    def different(self, other: Self) -> int:
        """In how many answers."""
        return sum(one != two for one, two in zip(astuple(self), astuple(other), strict=True))

    def asked(self, like: Plan, blocks: int) -> Plan:
        """`like` with these answers, to be planned again: what they take is not known."""
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
            return KEPT if p in self.keeps else AGAIN
        return tier if p in self.graphs_at_host else "disk"


def _named(numbers: Sequence[int] | frozenset[int]) -> str:
    return ", ".join(map(str, sorted(numbers))) or "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """What the answers are drawn from."""

    starts: tuple[int, ...]
    """Blocks at which a partition may begin, the first among them."""
    tiers: tuple[str, ...]
    """Of boundaries."""
    graph_tiers: tuple[str, ...]
    """Where graphs may wait that do not on the device."""
    heap: bool
    """Whether it may be kept."""
    streams: bool
    """Whether partitions may come and go: else all of them stay."""

    def draw(self, random: Random, known: Sequence[Answers]) -> Answers | None:
        """Answers that none of `known` has; None where so many draws found none."""
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
        ways = (AGAIN, KEPT, *self.graph_tiers)
        graphs = [random.choice(ways) for _ in every[:-1]]
        kept, host, disk = (frozenset(p for p, way in enumerate(graphs) if way == at) for at in (KEPT, "host", "disk"))
        return Answers(
            starts=(0, *sorted(random.sample(self.starts[1:], count - 1))), tiers=tiers, stays=stays,
            weights_stay=weights, keeps=kept | host | disk, offloads=host | disk, graphs_at_host=host,
            slots=min(count - len(stays), random.randint(1, 2)) if self.streams else count,
            keeps_heap=self.heap and not tiers and random.random() < 0.5,
        )  # fmt: skip

    def _boundaries(self, random: Random, count: int) -> list[str]:
        """All in one place, or each in a place of its own."""
        one = random.choice(self.tiers)
        return [random.choice(self.tiers) for _ in range(count)] if random.random() < 0.5 else [one] * count
