"""The boundary cache: the rows of every boundary that a run still needs."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from seqpart.data.reader import Batch, BatchReader, Passing
from seqpart.data.splits import Split, copy_rows
from seqpart.device.device import Device
from seqpart.device.pages import aligned_bytes
from seqpart.errors import CorruptFile, OutOfMemory
from seqpart.schedule.phase import Phase
from seqpart.store.host_pool import HostPool, OwnMemory
from seqpart.store.layout import LINE
from seqpart.store.row_file import RowLayout, Rows
from seqpart.store.scratch import ROW_FILES
from seqpart.store.store import RetainedFiles


def writer_bytes(layout: RowLayout, micro_batch: int, *, in_memory: bool = False) -> int:
    """Bytes of host memory for writing: one chunk, and a batch to be copied into it. in_memory: no chunk is needed."""
    return (0 if in_memory else aligned_bytes(layout.chunk_bytes)) + micro_batch * layout.nbytes


def once_of(split: str) -> str:
    """Returns the name under which a boundary's values without rows are kept, beside its rows of that split."""
    return f"{split}-once"


class Boundaries:
    """The rows of every boundary that is alive: `(split, p)` are the inputs of partition p. Files go under `folder`.

    Each creation has a file name of its own, so that what a checkpoint names is never overwritten. in_memory: partitions whose
    rows are kept in memory instead.
    """

    def __init__(
        self, folder: Path, device: Device, host_pool: HostPool | None, in_memory: Collection[int] = frozenset()
    ) -> None:
        self._folder, self._device, self._host_pool, self._in_memory = folder, device, host_pool, in_memory
        self._rows: dict[tuple[str, int], Rows] = {}
        self._retained, self._created = RetainedFiles(folder), 0
        self.labels: dict[str, torch.Tensor] = {}
        self.label_types: dict[str, torch.dtype] = {}
        """The type in which a loss gets the labels."""
        self.passing: dict[str, Passing] = {}
        """Replaces the data's own rows of a split if none of them are kept."""

    def create(self, split: str, partition: int, layout: RowLayout, count: int) -> Rows:
        """Returns empty rows to append to; discards rows of the same place that were left half-written."""
        self.discard(split, partition)
        path = self._folder / f"{split}-{partition:05d}.{self._created}.safetensors"
        self._created += 1
        rows = self._rows[split, partition] = Rows(layout, count, path, self._device, self._room(partition))
        return rows

    def _room(self, partition: int) -> HostPool | OwnMemory | None:
        return OwnMemory() if partition in self._in_memory else self._host_pool

    def keep_in_memory(self, partitions: Collection[int]) -> None:
        """Keeps only the rows of `partitions` in memory from now on: others move to disk, and none moves back."""
        self._in_memory = partitions
        for (_, p), rows in self._rows.items():
            if p not in partitions:
                rows.leave_memory()

    def __contains__(self, place: tuple[str, int]) -> bool:
        return place in self._rows or (place[1] == 0 and place[0] in self.passing)

    def entering(self, split: str, partition: int) -> "Rows | Passing":
        return self.passing[split] if partition == 0 and split in self.passing else self.rows(split, partition)

    def rows(self, split: str, partition: int) -> Rows:
        """Returns the rows of a place. Raises CorruptFile if there are none, because the checkpoint should have named them."""
        if (split, partition) not in self._rows:
            place = f"{split}-{partition}"
            raise CorruptFile(f"{self._folder}: the checkpoint names no rows {place!r}, and the run needs them.", self._folder)
        return self._rows[split, partition]

    def discard(self, split: str, partition: int) -> None:
        """Deletes the rows of a place, the values kept once beside them, and all views of them."""
        own = split, once_of(split)
        for name, p in [*self._rows]:
            if p == partition and (name in own or name.startswith(f"{split}.")):
                rows = self._rows.pop((name, p))
                rows.close()
                for file in rows.files:
                    self._retained.remove(file)

    def close(self) -> None:
        for split, partition in list(self._rows):
            self.discard(split, partition)

    def persist(self) -> dict[str, dict[str, Any]]:
        """Writes finished rows to the disk, and returns what another process needs to `adopt` them. Omits unfinished ones."""
        return {f"{split}-{p}": rows.persist() for (split, p), rows in self._rows.items() if rows.finished}

    def keep(self, files: Iterable[str]) -> None:
        """Sets the names of the only files that stay when their rows are discarded."""
        self._retained.keep(files)

    def adopt(self, described: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes over the rows that another process persisted here; deletes other files here, except kept ones.

        Raises CorruptFile as Rows.adopt does. The caller must set the labels again.
        """
        for place, entry in described.items():
            split, _, partition = place.rpartition("-")
            self._rows[split, int(partition)] = Rows.adopt(entry, self._folder, self._device, self._room(int(partition)))
        self._created = 1 + max((_number(path) for path in self._folder.glob("*.safetensors")), default=-1)
        self._retained.sweep(ROW_FILES, [file for rows in self._rows.values() for file in rows.files])

    def verify(self) -> None:
        """Reads every row on the disk once. Raises CorruptFile, naming the first file that is damaged."""
        for rows in self._rows.values():
            rows.verify()


def _number(path: Path) -> int:
    number = path.name.split(".")[-2]
    return int(number) if number.isdecimal() else -1


class FedRows:
    """Replaces the rows of boundary 0 in a session: each epoch of its phases is one update, on the batch that was fed for it.

    layout: layout of a row. rows: rows of the largest batch, for which memory is allocated.
    """

    def __init__(self, layout: RowLayout, rows: int, device: Device) -> None:
        self.layout, self._device = layout, device
        self._x = device.host(rows * layout.nbytes)[: rows * layout.nbytes].view(layout.dtype).view(rows, *layout.shape)
        self._labels = torch.empty(0)
        self.fed = 0
        """Number of batches so far."""

    def feed(self, batch: Split) -> None:
        """Takes the rows of the next update. Raises DataError for a value that is not finite."""
        copy_rows(batch, self._x)
        self._labels = batch.labels
        self.fed += 1

    def open_reader(self, phase: Phase, *, seed: int, first_update: int) -> "_FedReader":
        """Returns a reader of the phase's batch. Raises OutOfMemory if that batch is gone."""
        if phase.epoch != self.fed:
            raise OutOfMemory(
                f"memory ran out in the middle of update {self.fed}, and the weights can only be restored to those before "
                f"update {phase.epoch}, whose batch is gone. Give a larger --mem-limit, or a smaller --micro-batch-size."
            )
        return _FedReader(self._x, self._labels, phase, self._device)


class _FedReader(BatchReader):
    """Reads micro-batches as views of one batch; on the CPU as copies, where kernels would round otherwise."""

    def __init__(self, x: torch.Tensor, labels: torch.Tensor, phase: Phase, device: Device) -> None:
        self._x, self._labels, self._spans, self._device = x, labels, phase.spans(), device

    def take(self) -> Batch:
        m, span = next(self._spans)
        rows = slice(span.start, span.stop)
        x = self._x[rows]
        if self._device.shares_memory and x.data_ptr() % LINE:
            x = self._device.own(x)
        return Batch(m, span, x, self._labels[rows], 0)
