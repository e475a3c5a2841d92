"""The boundary cache: rows of each boundary, read ahead in the order of a phase by one thread.

    disk --chunks--> window --gather--> ring of host batches --upload--> device
         (random order when shuffled)  (rows permuted inside)

Rows are shuffled in two levels, because random single rows would make a disk crawl: whole chunks in random order,
then all rows of WINDOW chunks among themselves. A boundary that fits one window is shuffled fully. The order is a
function of (seed, partition, epoch) alone, whatever the tier.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from seqpart.arena import Arena
from seqpart.device import Device, keyed_seed
from seqpart.direct import PAGE, aligned, aligned_bytes, bytes_of
from seqpart.kept import Kept
from seqpart.rows import RowLayout, Rows
from seqpart.schedule import Phase, Span
from seqpart.scratch import ROW_FILES

WINDOW = 8
"""Chunks that are shuffled among themselves."""
RING = 3
"""Batches on the way between the reader and the device."""


def reader_bytes(layout: RowLayout, count: int, micro_batch: int) -> int:
    """Host memory that reading takes: one window and the ring."""
    window = min(WINDOW, -(-count // layout.chunk_rows)) * layout.chunk_bytes
    # Pages of the ring that no row ever reaches are never touched.
    return aligned_bytes(window) + RING * 2 * PAGE + min(RING * micro_batch, count) * layout.nbytes


def writer_bytes(layout: RowLayout, micro_batch: int) -> int:
    """Host memory that writing takes: one chunk, and a batch on its way into it."""
    return aligned_bytes(layout.chunk_bytes) + micro_batch * layout.nbytes


Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """`order` lists rows of the window's chunks, counted from the first row of the first chunk."""

    chunks: tuple[int, ...]
    rows: Ints
    """The boundary's row number of each entry of `order`."""
    order: Ints


def windows(count: int, chunk_rows: int, shuffle_key: tuple[int | str, ...] | None) -> Iterator[Window]:
    """The row order of one pass, window by window. Without a key: dataset order."""
    numbers = np.arange(-(-count // chunk_rows))
    random = np.random.default_rng(keyed_seed(*shuffle_key)) if shuffle_key is not None else None
    if random is not None:
        random.shuffle(numbers)
    for start in range(0, len(numbers), WINDOW):
        chunks = tuple(int(n) for n in numbers[start : start + WINDOW])
        lengths = [min(chunk_rows, count - chunk * chunk_rows) for chunk in chunks]
        # In the window chunks lie at multiples of chunk_rows, even when one is short.
        local = np.concatenate([k * chunk_rows + np.arange(n) for k, n in enumerate(lengths)])
        rows = np.concatenate([c * chunk_rows + np.arange(n) for c, n in zip(chunks, lengths, strict=True)])
        if random is not None:
            permutation = random.permutation(len(local))
            local, rows = local[permutation], rows[permutation]
        yield Window(chunks, rows, local)


@dataclass(slots=True)
class Batch:
    """One micro-batch: `x` (rows, *row shape) in host memory that belongs to the reader until `done` is called."""

    micro_batch: int
    span: Span
    x: torch.Tensor
    labels: torch.Tensor
    slot: int


class Boundaries:
    """The rows of every boundary that is alive: `(split, p)` are the inputs of partition p. Homes go under `folder`.

    Each creation has a file name of its own, so that what a checkpoint names is never written over.
    """

    def __init__(self, folder: Path, device: Device, arena: Arena | None) -> None:
        self._folder, self._device, self._arena = folder, device, arena
        self._rows: dict[tuple[str, int], Rows] = {}
        self._kept, self._created = Kept(folder), 0
        self.labels: dict[str, torch.Tensor] = {}

    def create(self, split: str, partition: int, layout: RowLayout, count: int) -> Rows:
        """Empty rows to be appended to; rows of the same place that were left half-written are discarded."""
        self.discard(split, partition)
        path = self._folder / f"{split}-{partition:05d}.{self._created}.safetensors"
        self._created += 1
        rows = self._rows[split, partition] = Rows(layout, count, path, self._device, self._arena)
        return rows

    def __contains__(self, place: tuple[str, int]) -> bool:
        return place in self._rows

    def rows(self, split: str, partition: int) -> Rows:
        return self._rows[split, partition]

    def discard(self, split: str, partition: int) -> None:
        rows = self._rows.pop((split, partition), None)
        if rows is not None:
            rows.close()
            for file in rows.files:
                self._kept.remove(file)

    def close(self) -> None:
        for split, partition in list(self._rows):
            self.discard(split, partition)

    def persist(self) -> dict[str, dict[str, Any]]:
        """Bring finished rows to the disk, and say how another process can `adopt` them. Unfinished ones are left out."""
        return {f"{split}-{p}": rows.persist() for (split, p), rows in self._rows.items() if rows.finished}

    def keep(self, files: Iterable[str]) -> None:
        """From now on the files of these names, and no others, stay when their rows are discarded."""
        self._kept.keep(files)

    def adopt(self, described: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over the rows that another process persisted here; other files here go, except kept ones.

        Raises CorruptFile as Rows.adopt does. The labels are the caller's to give again.
        """
        for place, entry in described.items():
            split, _, partition = place.rpartition("-")
            self._rows[split, int(partition)] = Rows.adopt(entry, self._folder, self._device, self._arena)
        self._created = 1 + max((_number(path) for path in self._folder.glob("*.safetensors")), default=-1)
        self._kept.sweep(ROW_FILES, [file for rows in self._rows.values() for file in rows.files])

    def verify(self) -> None:
        """Read every row on the disk once. Raises CorruptFile, naming the first file that is damaged."""
        for rows in self._rows.values():
            rows.verify()


def _number(path: Path) -> int:
    number = path.name.split(".")[-2]
    return int(number) if number.isdecimal() else -1


class ReaderThread:
    """The one thread that reads ahead. `close` stops it wherever it is, also when an interrupt lost its Reader."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="seqpart-reader")
        self._pool.submit(int).result()  # started now: its stack belongs to the runtime

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, work: Callable[[], None]) -> "Future[None]":
        return self._pool.submit(work)

    def close(self) -> None:
        self.stopping.set()
        self._pool.shutdown()


class Reader:
    """Batches of one phase in order. One thread reads ahead; an error there is raised at the next `take`."""

    def __init__(
        self, rows: Rows, labels: torch.Tensor, phase: Phase, device: Device, thread: ReaderThread,
        *, seed: int, first_update: int = 0,
    ) -> None:  # fmt: skip
        self._rows, self._labels, self._phase, self._device = rows, labels.numpy(), phase, device
        self._key = (seed, "order", phase.partition, phase.epoch) if phase.shuffle else None
        self._first_update = first_update
        layout = rows.layout
        self._window = aligned(min(WINDOW, rows.chunks) * layout.chunk_bytes)
        micro_batch = min(phase.micro_batch, phase.rows)
        self._ring = [device.host(micro_batch * layout.nbytes) for _ in range(RING)]
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue()
        self._free: queue.Queue[tuple[int, torch.cuda.Event | None] | None] = queue.Queue()
        for slot in range(RING):
            self._free.put((slot, None))
        self._closed = threading.Event()
        self._stopping = thread.stopping
        self._work = thread.submit(self._read_ahead)

    def take(self) -> Batch:
        """The next batch; waits for the reader. The caller owes a `done` for it."""
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        assert item is not None, f"{self._phase} has no more batches"
        return item

    def done(self, batch: Batch) -> None:
        """The device no longer needs `batch.x`'s host memory once the work issued so far is over."""
        self._free.put((batch.slot, self._device.mark()))

    def close(self) -> None:
        """Stop reading and free the buffers; returns when the thread has let go of them."""
        self._closed.set()
        self._free.put(None)
        self._work.result()
        self._ring, self._window = [], self._window[:0].clone()

    def _read_ahead(self) -> None:
        try:
            for batch in self._batches():
                self._ready.put(batch)
            self._ready.put(None)
        except BaseException as error:  # raised again by take(), in the thread that trains
            self._ready.put(error)

    def _batches(self) -> Iterator[Batch]:
        layout = self._rows.layout
        passing = windows(self._rows.count, layout.chunk_rows, self._key)
        window, window_start = next(passing), 0
        loaded = False
        for m, span in self._phase.spans(self._first_update):
            slot = self._take_slot()
            if slot is None:
                return
            labels = []
            at = span.start
            while at < span.stop:
                while at >= window_start + len(window.order):
                    window_start += len(window.order)
                    window, loaded = next(passing), False
                if not loaded:
                    self._load(window)
                    loaded = True
                first = at - window_start
                last = min(span.stop - window_start, len(window.order))
                self._gather(window.order[first:last], slot, at - span.start)
                labels.append(self._labels[window.rows[first:last]])
                at = window_start + last
            yield Batch(m, span, self._view(slot, span.stop - span.start), torch.from_numpy(np.concatenate(labels)), slot)

    def _take_slot(self) -> int | None:
        free = None
        while free is None:
            if self._closed.is_set() or self._stopping.is_set():
                return None
            try:
                free = self._free.get(timeout=0.2)
            except queue.Empty:
                continue
        slot, event = free
        self._device.wait(event)  # the copy to the device out of this slot is over
        return slot

    def _load(self, window: Window) -> None:
        size = self._rows.layout.chunk_bytes
        for index, chunk in enumerate(window.chunks):
            self._rows.read_chunk(chunk, self._window[index * size : (index + 1) * size])

    def _gather(self, order: Ints, slot: int, at: int) -> None:
        """Copy rows of the window to places `at`... of the slot. numpy: torch would start a second OpenMP team here."""
        layout = self._rows.layout
        source = np.asarray(bytes_of(self._window)).reshape(-1, layout.stride)
        target = np.asarray(bytes_of(self._ring[slot]))[: len(self._ring[slot]) // layout.nbytes * layout.nbytes]
        target = target.reshape(-1, layout.nbytes)[at : at + len(order)]
        if layout.stride == layout.nbytes:
            np.take(source, order, axis=0, out=target, mode="clip")
            return
        for place, row in enumerate(order):  # np.take would first copy the whole padded window
            target[place] = source[row, : layout.nbytes]

    def _view(self, slot: int, rows: int) -> torch.Tensor:
        layout = self._rows.layout
        flat = self._ring[slot][: rows * layout.nbytes]
        return flat.view(layout.dtype).view(rows, *layout.shape)
