"""Layout of the boundary cache's rows if partitions are trained one after the other: all that later blocks need.

If one value crosses a cut, a row is that value's row. If several do, such as skips of a U-Net or a mask beside hidden
states, it is their rows concatenated as bytes. A value without rows, such as positions that all samples share, is kept
once, and must be the same for every micro-batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Self

import torch

from seqpart.data.boundary_cache import Boundaries, once_of
from seqpart.device.device import Device
from seqpart.device.pages import aligned, aligned_bytes
from seqpart.errors import CorruptFile, DataError, ModelError
from seqpart.model.packs import Pack, Value
from seqpart.profile.blocks import BlockCost
from seqpart.profile.partition import passing
from seqpart.store.row_file import RowLayout, Rows


@dataclass(frozen=True, slots=True)
class Column:
    """A value's place in a row, or in what is kept once."""

    number: int
    shape: tuple[int, ...]
    """Shape of one row; of the whole value if it is kept once."""
    dtype: torch.dtype
    """The type in which it is kept."""
    offset: int
    """Offset of its first byte."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns (n, *shape) out of `rows`, (n, bytes) of uint8, as a copy, since its offset may be unaligned."""
        picked = rows[:, self.offset : self.offset + self.nbytes].clone(memory_format=torch.contiguous_format)
        return picked.view(self.dtype).view(len(rows), *self.shape)


def _nbytes(columns: Sequence[Column]) -> int:
    return sum(column.nbytes for column in columns)


@dataclass(frozen=True, slots=True)
class RowPack:
    """Layout of one boundary: the columns of its rows, and the values that are kept once."""

    loss_input: int
    """Number of the value that the loss of the boundary's partition takes."""
    layout: RowLayout
    columns: tuple[Column, ...]
    once: tuple[Column, ...] = ()
    why_not: str = ""
    """Why these values cannot be kept, in words; "" if they can."""

    @classmethod
    def of_one(cls, number: int, layout: RowLayout) -> Self:
        return cls(number, layout, (Column(number, layout.shape, layout.dtype, 0),))

    @property
    def is_one(self) -> bool:
        """True if it has only one value."""
        return len(self.columns) == 1 and not self.once

    @property
    def loss_input_bytes(self) -> int:
        """Bytes of a row's value that the loss takes."""
        return next((column.nbytes for column in self.columns if column.number == self.loss_input), self.layout.nbytes)

    @property
    def once_layout(self) -> RowLayout:
        return RowLayout((_nbytes(self.once),), torch.uint8)

    def home_bytes(self, rows: int) -> int:
        """Bytes at home of `rows` rows, in two splits."""
        return self.layout.home_bytes(rows) + (2 * self.once_layout.home_bytes(1) if self.once else 0)

    def working_bytes(self, micro_batch: int) -> int:
        """Bytes of host memory beyond the cache's own buffers, while a micro-batch is packed or unpacked."""
        once = aligned_bytes(self.once_layout.chunk_bytes) + 2 * self.once_layout.nbytes if self.once else 0
        if len(self.columns) == 1:
            return once
        return once + micro_batch * (self.layout.nbytes + max(column.nbytes for column in self.columns))


class RowPacks:
    """The row layout after each block, if a partition ends with it; each is found once."""

    def __init__(self, costs_at: Callable[[int], Sequence[BlockCost]], rows: int, cache_type: torch.dtype | None) -> None:
        """costs_at: the model's costs at any micro-batch. rows: a micro-batch at which the model runs. cache_type: type of
        differentiable values; None: the run uses a boundary exchange, and the cache keeps a block's output bit for bit."""
        self._costs_at, self._rows, self._cache_type = costs_at, rows, cache_type
        self._behind, self._alone = cache(self._find), cache(self._is_alone)

    def __call__(self, cost: BlockCost) -> RowPack:
        if self._cache_type is None:
            return RowPack.of_one(cost.result.number, RowLayout(cost.output_shape, cost.output_dtype))
        return self._behind(cost.result.giver)

    def has_one_that_learns(self, cost: BlockCost) -> bool:
        """True if no other differentiable value crosses the cut beside the one that the loss takes."""
        return self._alone(cost.result.giver)

    def _is_alone(self, last: int) -> bool:
        costs = self._costs_at(self._rows)
        return all(value == costs[last].result or not value.learns for value in passing(costs, last))

    def _find(self, last: int) -> RowPack:
        costs = self._costs_at(self._rows)
        result, live = costs[last].result, passing(costs, last)
        more = self._rows + 1  # one more row shows which tensors grow with the rows
        try:
            other = [result.with_rows(more)] if live == (result,) else passing(self._costs_at(more), last)
        except (DataError, ModelError):
            return self._unfit(result, f"several tensors pass there, of a model that takes batches of {self._rows} rows alone")
        shapes = {value.number: value.shape for value in other}
        growing = [value for value in live if shapes[value.number] != value.shape]
        with_rows = [value for value in growing if shapes[value.number] == value.with_rows(more).shape]
        if unclear := [value.shape for value in growing if value not in with_rows]:
            return self._unfit(result, f"a tensor of shape {unclear[0]} passes there, whose first dimension is not the rows")
        if result not in with_rows or not result.dtype.is_floating_point:
            return self._unfit(result, "that is not a row of floats for each sample")
        columns = self._columns(with_rows, result, 1)
        one = columns[0] if len(columns) == 1 else None
        layout = RowLayout(one.shape, one.dtype) if one is not None else RowLayout((_nbytes(columns),), torch.uint8)
        return RowPack(result.number, layout, columns, self._columns([v for v in live if v not in with_rows], result, 0))

    def _columns(self, values: Sequence[Value], result: Value, first: int) -> tuple[Column, ...]:
        """Returns the columns of `values`. first: the first dimension that is kept."""
        columns, offset = list[Column](), 0
        for value in values:
            learns = first and (value == result or (value.learns and value.giver >= 0))
            dtype = self._cache_type if learns else value.dtype
            assert dtype is not None
            columns.append(Column(value.number, value.shape[first:], dtype, offset))
            offset += columns[-1].nbytes
        return tuple(columns)

    def _unfit(self, result: Value, why_not: str) -> RowPack:
        return RowPack(result.number, RowLayout(result.shape[1:], result.dtype), (), why_not=why_not)


class PackWriter:
    """Writes the rows of a boundary once, from the first to the last, and the values that are kept once."""

    def __init__(self, pack: RowPack, boundaries: Boundaries, split: str, partition: int, count: int, device: Device) -> None:
        self._pack, self._device, self._partition = pack, device, partition
        self._rows = boundaries.create(split, partition, pack.layout, count)
        self._once = boundaries.create(once_of(split), partition, pack.once_layout, 1) if pack.once else None
        self._first: torch.Tensor | None = None

    def append(self, given: Mapping[int, torch.Tensor], passed_by: Callable[[int], torch.Tensor]) -> int:
        """Adds a partition's outputs for one micro-batch, and the values that bypass it, by number. Returns the bytes written.

        Raises ModelError if a value that is kept once differs from an earlier micro-batch's.
        """
        pack = self._pack
        found = {c.number: given[c.number] if c.number in given else passed_by(c.number) for c in (*pack.columns, *pack.once)}
        count = len(found[pack.loss_input])
        rows = found[pack.loss_input] if len(pack.columns) == 1 else self._joined(pack.columns, found, count)
        self._rows.append(rows)
        if self._once is not None:
            self._keep_once(self._joined(pack.once, found, 1))
        return count * pack.layout.nbytes

    def _joined(self, columns: Sequence[Column], found: Pack, count: int) -> torch.Tensor:
        rows = torch.empty(count, _nbytes(columns), dtype=torch.uint8)
        for column in columns:
            part = found[column.number].detach().to(column.dtype).reshape(count, prod(column.shape))
            part = self._device.download(part).contiguous().view(torch.uint8)
            rows[:, column.offset : column.offset + column.nbytes].copy_(part)
        return rows

    def _keep_once(self, kept: torch.Tensor) -> None:
        assert self._once is not None
        if self._first is None:
            self._first = kept
            self._once.append(kept)
            self._once.finish()
        for column in self._pack.once:
            if not torch.equal(*(rows[:, column.offset : column.offset + column.nbytes] for rows in (kept, self._first))):
                raise ModelError(
                    f"a tensor of shape {column.shape} goes past the end of partition {self._partition - 1}, has no dimension "
                    "of rows and differs from batch to batch, so it cannot be kept for the next partition. Cut elsewhere with "
                    "--partitions, or use --method auto."
                )

    def finish(self) -> None:
        """Finishes the rows after the last one."""
        self._rows.finish()


class PackReader:
    """Unpacks micro-batches of a boundary's rows, with the values that were kept once."""

    def __init__(
        self, pack: RowPack, boundaries: Boundaries, split: str, partition: int, entering: Sequence[Value], device: Device
    ) -> None:
        """entering: the values that the partition takes. Raises CorruptFile if the rows have another layout."""
        self._pack, self._entering, self._device = pack, entering, device
        self._columns = {column.number: column for column in pack.columns}
        self._once: Pack = {}
        rows = boundaries.entering(split, partition)
        if isinstance(rows, Rows) and rows.layout != pack.layout:
            raise CorruptFile(
                f"{rows.path} holds rows of {rows.layout.shape}, {rows.layout.dtype}, where this model has "
                f"{pack.layout.shape}, {pack.layout.dtype}. It was not used. Start again, without --resume.",
                rows.path,
            )
        if pack.once:
            kept = boundaries.rows(once_of(split), partition)
            memory = aligned(kept.layout.chunk_bytes)
            kept.read_chunk(0, memory)
            whole = memory[: kept.layout.nbytes].view(1, -1)
            self._once = {column.number: column.read(whole)[0] for column in pack.once}

    def take(self, rows: torch.Tensor) -> Pack:
        """Returns the partition's inputs on the device. A single value may share the memory of `rows`."""
        return {value.number: self._device.upload(self.value(value.number, rows)).to(value.dtype) for value in self._entering}

    def value(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """Returns a value in host memory; a copy if it was kept once, as blocks may change their inputs in place."""
        if number in self._once:
            return self._once[number].clone()
        return rows if len(self._columns) == 1 else self._columns[number].read(rows)
