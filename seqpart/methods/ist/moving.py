"""SPLIT and MERGE: copies the whole network's homes into those of its parts and back, in one sequential pass over the bytes.

Only some rows of a home are in memory at a time, with a piece of each part's. A cut element belongs to one part and comes back
from it; an element of no part, where a row of one meets a column of another, stays as it is. An uncut tensor goes to all parts,
and their mean comes back.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

from seqpart.device.pages import PAGE, aligned_bytes
from seqpart.device.ranks import Ranks
from seqpart.methods.ist.narrow import NEURONS, Cut, Ints
from seqpart.methods.ist.parts import JointChain
from seqpart.model.optimizer_state import TEXT
from seqpart.store.layout import Layout, TensorSpec
from seqpart.store.store import Store
from seqpart.store.streams import Sink, Source

WHOLE, PART = 1 << 20, 1 << 18
"""Bytes of the whole home, and of each part's, that are in memory at a time; one row, if that is more."""

CutOf = Callable[[str], Cut]
"""Name of a tensor -> the axes along which it is divided."""
Units = Sequence[Sequence[Ints]]
"""Units by part and hidden layer."""


def buffer_bytes(layouts: Sequence[Layout], parts: int) -> int:
    """Returns the memory that moving homes of these layouts takes, one at a time, to `parts` parts or back."""
    rows = max((_row_bytes(spec) for layout in layouts for spec in layout.specs), default=0)
    longest = max((max((*spec.shape, 1)) for layout in layouts for spec in layout.specs), default=1)
    whole = aligned_bytes(WHOLE)
    return 2 * whole + parts * aligned_bytes(PART) + 5 * max(rows, WHOLE) + 3 * 8 * longest + (4 + parts) * PAGE


def split(
    store: Store, whole: str, names: Sequence[str], layouts: Sequence[Layout], cut_of: CutOf, units: Units,
    layer_of: Mapping[str, int],
) -> None:  # fmt: skip
    """Cuts the home `whole` into the homes `names`, one per part. layer_of: {a part's tensor of unit numbers: the layer}."""
    with ExitStack() as stack:
        source = store.source(whole, WHOLE)
        sinks = [
            _PartSink(stack.enter_context(store.sink(name, layout, PART)), layout, own, layer_of)
            for name, layout, own in zip(names, layouts, units, strict=True)
        ]
        for spec in store.layout(whole).specs:
            cut, start = cut_of(spec.name), 0
            chosen = [_chosen(cut, own) for own in units]
            for sink in sinks:
                sink.begin(spec.name)
            for rows in _rows_of(spec, source):
                for sink, (own_rows, own_columns) in zip(sinks, chosen, strict=True):
                    sink.append(_picked(rows, start, own_rows, own_columns))
                start += len(rows)
        for sink in sinks:
            sink.begin(None)
        source.close()


def merge(store: Store, whole: str, layout: Layout, names: Sequence[str], cut_of: CutOf, units: Units) -> None:
    """Puts the homes `names` of all parts back into the home `whole`; if that does not exist, elements of no part are zeros."""
    with ExitStack() as stack:
        source = store.source(whole, WHOLE) if whole in store else None
        parts = [_PartSource(store.source(name, PART), store.layout(name)) for name in names]
        sink = stack.enter_context(store.sink(whole, layout, WHOLE))
        for spec in layout.specs:
            cut, start = cut_of(spec.name), 0
            for part in parts:
                part.begin(spec.name)
            chosen = [_chosen(cut, own) for own in units]
            for rows in _rows_of(spec, source):
                if cut == Cut():
                    _average(rows, spec.dtype, parts)
                else:
                    for part, (own_rows, own_columns) in zip(parts, chosen, strict=True):
                        _put_back(rows, start, part, own_rows, own_columns)
                sink.append(_bytes(rows))
                start += len(rows)
        for part in parts:
            part.close()
        if source is not None:
            source.close()


Rows = np.ndarray[tuple[int, int], np.dtype[Any]]
"""Some rows of a tensor; its elements are moved unchanged, as integers of the same size."""


def _chosen(cut: Cut, units: Sequence[Ints]) -> tuple[Ints | None, Ints | None]:
    rows, columns = (axis.places(units[axis.layer]) if axis is not None else None for axis in cut)
    return rows, columns


def _shape(spec: TensorSpec) -> tuple[int, int]:
    """Returns the shape as rows x columns; a tensor that is not contiguous is one column, in the order of its memory."""
    return (spec.shape[0], prod(spec.shape[1:])) if spec.shape and spec.stride is None else (prod(spec.shape), 1)


def _row_bytes(spec: TensorSpec) -> int:
    return _shape(spec)[1] * spec.dtype.itemsize


def _rows_of(spec: TensorSpec, source: Source | None) -> Iterator[Rows]:
    """Yields the tensor some rows at a time, in one buffer that is reused; zeros without a source."""
    count, columns = _shape(spec)
    at_once = max(1, WHOLE // max(1, _row_bytes(spec)))
    buffer = np.zeros((min(at_once, max(1, count)), columns), f"u{spec.dtype.itemsize}")
    for start in range(0, max(1, count), at_once):
        rows = buffer[: min(at_once, count - start)]
        if source is None:
            rows[:] = 0
        elif rows.size:
            source.fill(_bytes(rows))
        yield rows


def _bytes(rows: np.ndarray[Any, np.dtype[Any]]) -> memoryview:
    return rows.reshape(-1).view(np.uint8).data


def _between(places: Ints, start: int, count: int) -> tuple[int, int]:
    """Returns the slice of the ascending `places` that lies in start..start + count."""
    first, last = np.searchsorted(places, [start, start + count])
    return int(first), int(last)


def _picked(rows: Rows, start: int, own_rows: Ints | None, columns: Ints | None) -> Rows:
    if own_rows is not None:
        first, last = _between(own_rows, start, len(rows))
        rows = rows[own_rows[first:last] - start]
    return rows if columns is None else np.take(rows, columns, axis=1)


def _put_back(rows: Rows, start: int, part: "_PartSource", own_rows: Ints | None, columns: Ints | None) -> None:
    width = rows.shape[1] if columns is None else len(columns)
    if own_rows is None:
        assert columns is not None
        rows[:, columns] = part.take(len(rows), width, rows.dtype)
        return
    first, last = _between(own_rows, start, len(rows))
    places = own_rows[first:last] - start
    found = part.take(len(places), width, rows.dtype)
    if columns is None:
        rows[places] = found
    else:
        rows[np.ix_(places, columns)] = found


def _average(rows: Rows, dtype: torch.dtype, parts: "Sequence[_PartSource]") -> None:
    """Sets `rows` to the parts' mean, as the first part's value plus the mean difference: equal values keep their bits.
    Counters are the first part's."""

    def taken(part: "_PartSource") -> torch.Tensor:
        return torch.from_numpy(part.take(len(rows), rows.shape[1], rows.dtype).view(np.uint8)).view(dtype)

    first, others = taken(parts[0]), (taken(part) for part in parts[1:])
    if dtype.is_floating_point and len(parts) > 1:
        wide = torch.promote_types(dtype, torch.float32)
        differing = sum((other.to(wide).sub_(first) for other in others), torch.zeros((), dtype=wide))
        first = (first + differing / len(parts)).to(dtype)
    for _ in others:  # those of counters are passed over
        pass
    rows[:] = first.view(torch.uint8).numpy().view(rows.dtype)


class _PartSink:
    """A part's home while it is written; also writes the tensors of unit numbers, which the whole network does not have."""

    def __init__(self, sink: Sink, layout: Layout, units: Sequence[Ints], layer_of: Mapping[str, int]) -> None:
        self._sink, self._specs, self._units, self._layer_of = sink, iter(layout.specs), units, layer_of

    def begin(self, name: str | None) -> None:
        """Starts with the tensor `name`, after the unit numbers before it; None: ends."""
        for spec in self._specs:
            if spec.name == name:
                return
            assert spec.name in self._layer_of, f"expected the tensor {name}; found {spec.name}"
            self.append(self._units[self._layer_of[spec.name]])
        assert name is None, f"expected the tensor {name}; found the end"

    def append(self, rows: np.ndarray[Any, np.dtype[Any]]) -> None:
        self._sink.append(_bytes(rows))


class _PartSource:
    """A part's home while it is read."""

    def __init__(self, source: Source, layout: Layout) -> None:
        self._source, self._specs = source, iter(layout.specs)

    def begin(self, name: str) -> None:
        """Starts with the tensor `name`, and skips the unit numbers before it."""
        for spec in self._specs:
            if spec.name == name:
                return
            assert spec.name.rpartition(".")[2] == NEURONS, f"expected the tensor {name}; found {spec.name}"
            self.take(1, spec.nbytes, np.dtype(np.uint8))

    def take(self, rows: int, columns: int, dtype: np.dtype[Any]) -> Rows:
        found = np.empty((rows, columns), dtype)
        if found.size:
            self._source.fill(_bytes(found))
        return found

    def close(self) -> None:
        """Skips the unit numbers at the end, and closes the source."""
        for spec in self._specs:
            self.take(1, spec.nbytes, np.dtype(np.uint8))
        self._source.close()


class Parting:
    """Splits partitions of the whole network into homes of its parts, and merges them again.

    layouts, states: by block of `chain`, the whole network's and those of its parts. edges: (first block, one past the last) by
    partition. keeps_moments: split and merge optimizer state too; if False, every round begins with moments of zero. ranks: the
    processes that train the parts, part s on rank s mod W. give: gives homes of a rank to all, and returns the bytes sent.
    """

    def __init__(
        self, chain: JointChain, layouts: Sequence[Layout], states: Sequence[Layout], edges: Sequence[tuple[int, int]],
        store: Store, *, keeps_moments: bool, ranks: Ranks, give: Callable[[Sequence[str], int], int],
    ) -> None:  # fmt: skip
        self._parts, self._chain, self._layouts, self._states, self._edges = chain.parts, chain, layouts, states, edges
        self._store, self._keeps_moments, self._ranks, self._give = store, keeps_moments, ranks, give

    def split(self, p: int, round_: int) -> None:
        """Writes the homes of this rank's parts from partition `p` of the whole network. Safe to repeat after an
        interruption."""
        for number in range(*self._edges[p]):
            block, (own, units) = self._chain[number], self._held(number, round_, self._ranks.number)
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

    def gather(self, p: int, round_: int) -> int:
        """Gives the other ranks the homes of this one's parts of partition `p`, and takes theirs. Returns the bytes sent."""
        sent = 0
        for rank in range(self._ranks.count):
            own = [self._chain[n] for number in range(*self._edges[p]) for n in self._held(number, round_, rank)[0]]
            states = [block.state_home for block in own] if self._keeps_moments else []
            sent += self._give([*(block.home for block in own), *states], rank)
        return sent

    def merge(self, p: int, round_: int) -> None:
        """Writes partition `p` of the whole network from the parts' homes, which stay unchanged: safe to repeat."""
        for number in range(*self._edges[p]):
            block, (held, units) = self._chain[number], self._held(number, round_)
            own = [self._chain[n] for n in held]
            homes = [one.home for one in own]
            merge(self._store, block.home, self._layouts[number], homes, self._cut_of(number), units)
            states = [one.state_home for one in own]
            if self._keeps_moments and all(name in self._store for name in states):
                cut_of = partial(self._cut_of_state, number)
                merge(self._store, block.state_home, self._states[number], states, cut_of, units)

    def _held(self, number: int, round_: int, rank: int | None = None) -> tuple[list[int], Units]:
        """Returns (blocks of the joint chain that hold parts of block `number`, the units of these parts): of all ranks, or of
        one."""
        holders, units = self._parts.holders(number, round_), self._parts.units(round_)
        if rank is not None:
            holders = {part: n for part, n in holders.items() if part % self._ranks.count == rank}
        return [*holders.values()], [units[part] for part in holders]

    def _cut_of(self, number: int) -> CutOf:
        return lambda name: self._parts.cuts[number].get(name, Cut())

    def _cut_of_state(self, number: int, name: str) -> Cut:
        """Returns the cut of an optimizer tensor: its parameter's for a moment, none for a step count or for plain data."""
        parameter, _, part = name.rpartition(".")
        spec = next(spec for spec in self._states[number].specs if spec.name == name)
        return self._parts.cuts[number].get(parameter, Cut()) if spec.shape and part != TEXT else Cut()
