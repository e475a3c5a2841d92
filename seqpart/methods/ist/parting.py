"""SPLIT and MERGE of one partition of the whole network: its blocks' homes, one after the other, weights and moments alike."""

from collections.abc import Sequence
from functools import partial

from seqpart.device.pages import PAGE
from seqpart.methods.ist.moving import CutOf, Units, merge, split
from seqpart.methods.ist.narrow import Cut
from seqpart.methods.ist.parts import JointChain
from seqpart.store.layout import Layout
from seqpart.store.store import Store


class Parting:
    """layouts, states: of every block of `chain`, the whole's and those of its parts. edges: of each partition, its first block
    and the one behind its last. keeps_moments: else every round begins with moments of zero."""

    def __init__(
        self, chain: JointChain, layouts: Sequence[Layout], states: Sequence[Layout], edges: Sequence[tuple[int, int]],
        store: Store, *, keeps_moments: bool,
    ) -> None:  # fmt: skip
        self._parts, self._chain, self._layouts, self._states, self._edges = chain.parts, chain, layouts, states, edges
        self._store, self._keeps_moments = store, keeps_moments

    def split(self, p: int, round_: int) -> None:
        """Whatever the homes of the parts are, they are cut out of the whole's now; also where that was begun before."""
        for number in range(*self._edges[p]):
            block, (own, units) = self._chain[number], self._held(number, round_)
            homes = [self._chain[n].home for n in own]
            layer_of = self._parts.numbers(number)
            split(self._store, block.home, homes, [self._layouts[n] for n in own], self._cut_of(number), units, layer_of)
            states = [self._chain[n].state_home for n in own]
            if self._keeps_moments and block.state_home in self._store:
                cut_of = partial(self._cut_of_state, number)
                split(self._store, block.state_home, states, [self._states[n] for n in own], cut_of, units, {})
            else:
                for name in states:
                    self._store.discard(name)
            for n in self._parts.vacant(number):
                with self._store.sink(self._chain[n].home, self._layouts[n], PAGE):
                    pass

    def merge(self, p: int, round_: int) -> None:
        """The parts' homes stay as they are, so that what was begun before is done again."""
        for number in range(*self._edges[p]):
            block, (held, units) = self._chain[number], self._held(number, round_)
            own = [self._chain[n] for n in held]
            homes = [one.home for one in own]
            merge(self._store, block.home, self._layouts[number], homes, self._cut_of(number), units)
            states = [one.state_home for one in own]
            if self._keeps_moments and all(name in self._store for name in states):
                cut_of = partial(self._cut_of_state, number)
                merge(self._store, block.state_home, self._states[number], states, cut_of, units)

    def _held(self, number: int, round_: int) -> tuple[list[int], Units]:
        """(numbers of what parts have of the whole's block, the units of these parts)."""
        holders, units = self._parts.holders(number, round_), self._parts.units(round_)
        return [*holders.values()], [units[part] for part in holders]

    def _cut_of(self, number: int) -> CutOf:
        return lambda name: self._parts.cuts[number].get(name, Cut())

    def _cut_of_state(self, number: int, name: str) -> Cut:
        """Of a moment that of its parameter; a count of steps is nobody's alone."""
        parameter, _, _ = name.rpartition(".")
        spec = next(spec for spec in self._states[number].specs if spec.name == name)
        return self._parts.cuts[number].get(parameter, Cut()) if spec.shape else Cut()
