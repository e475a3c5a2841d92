"""Reads rows of a boundary in the order of a phase: ahead by one thread, or out of memory when they are needed.

    disk --chunks--> window --gather--> ring of host batches --upload--> device
         (random order when shuffled)  (rows permuted inside)

Rows are shuffled in two levels, because random single rows would make a disk crawl: whole chunks in random order,
then all rows of WINDOW chunks among themselves. A boundary that fits one window is shuffled fully. The order is a
function of (seed, partition, epoch) alone, whatever the tier.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from seqpart.device.device import Device, Event, keyed_seed
from seqpart.device.pages import PAGE, aligned, aligned_bytes, bytes_of
from seqpart.schedule.phase import Phase, Span
from seqpart.store.movers import Watched, unwatched
from seqpart.store.row_file import PassingLayout, RowLayout, Rows

WINDOW = 8
"""Number of chunks whose rows are shuffled together."""

_PIECE = 32 << 10
"""Bytes of small padded rows that are gathered at a time."""

RING = 3
"""Number of batches in flight between the reader and the device."""


def reader_bytes(layout: RowLayout, count: int, micro_batch: int, *, in_memory: bool = False) -> int:
    """Bytes of host memory for reading: one window and the ring; one batch if the rows are in memory."""
    if isinstance(layout, PassingLayout):
        return layout.reading_bytes(min(micro_batch, count))
    converted = layout.converted_bytes(min(micro_batch, count))
    if in_memory:
        return aligned_bytes(min(micro_batch, count) * layout.nbytes) + converted
    window = min(WINDOW, -(-count // layout.chunk_rows)) * layout.chunk_bytes
    # Pages of the ring that no row ever reaches are never touched.
    return aligned_bytes(window) + RING * 2 * PAGE + min(RING * micro_batch, count) * layout.nbytes + converted


Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """`order` lists rows of the window's chunks, counted from the first row of the first chunk."""

    chunks: tuple[int, ...]
    rows: Ints
    """The boundary's row number of each entry of `order`."""
    order: Ints


def windows(count: int, chunk_rows: int, shuffle_key: tuple[int | str, ...] | None) -> Iterator[Window]:
    """Yields the row order of one pass, window by window. Without a key: dataset order."""
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


Pick = tuple[Window, int, int]
"""(window, start, stop): a range of the window's order."""


def picks(rows: Rows, phase: Phase, seed: int, first_update: int) -> Iterator[tuple[int, Span, list[Pick]]]:
    """Yields the rows of every micro-batch from update `first_update` on."""
    key = (seed, "order", phase.source, phase.epoch) if phase.shuffle else None
    passing = windows(rows.count, rows.layout.chunk_rows, key)
    window, start = next(passing), 0
    for m, span in phase.spans(first_update):
        found, at, stop = [], phase.within.skips + span.start, phase.within.skips + span.stop
        while at < stop:
            while at >= start + len(window.order):
                start += len(window.order)
                window = next(passing)
            last = min(stop - start, len(window.order))
            found.append((window, at - start, last))
            at = start + last
        yield m, span, found


@dataclass(slots=True)
class Batch:
    """One micro-batch: `x` (rows, *row shape) in host memory that belongs to the reader until `done` is called."""

    micro_batch: int
    span: Span
    x: torch.Tensor
    labels: torch.Tensor
    slot: int


class BatchReader:
    """Batches of one phase in order."""

    def take(self) -> Batch:
        """Returns the next batch. The caller must call `done` for it."""
        raise NotImplementedError

    def done(self, batch: Batch) -> None:
        """Frees `batch.x` for reuse once the work issued to the device so far is over."""

    def close(self) -> None:
        """Stops reading and frees the memory."""


class ReaderThread:
    """The one thread that reads ahead. `close` stops it wherever it is, even if an interrupt lost its Reader."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.watched: Watched = unwatched
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="seqpart-reader")
        self._pool.submit(int).result()  # started now: its stack belongs to the runtime

    def submit(self, work: Callable[[], None]) -> "Future[None]":
        return self._pool.submit(work)

    def close(self) -> None:
        self.stopping.set()
        self._pool.shutdown()


class Reader(BatchReader):
    """Batches of one phase in order. One thread reads ahead; an error there is raised at the next `take`."""

    def __init__(
        self, rows: Rows, labels: torch.Tensor, phase: Phase, device: Device, thread: ReaderThread,
        *, seed: int, first_update: int = 0,
    ) -> None:  # fmt: skip
        self._rows, self._labels, self._phase, self._device = rows, labels.numpy(), phase, device
        self._picks = picks(rows, phase, seed, first_update)
        layout = rows.layout
        self._window = aligned(min(WINDOW, rows.chunks) * layout.chunk_bytes)
        micro_batch = min(phase.micro_batch, phase.rows)
        self._ring = [device.host(micro_batch * layout.nbytes) for _ in range(RING)]
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue()
        self._free: queue.Queue[tuple[int, Event] | None] = queue.Queue()
        for slot in range(RING):
            self._free.put((slot, None))
        self._closed = threading.Event()
        self._stopping, self._watched = thread.stopping, thread.watched
        self._work = thread.submit(self._read_ahead)

    def take(self) -> Batch:
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        assert item is not None, f"{self._phase} has no more batches"
        return item

    def done(self, batch: Batch) -> None:
        self._free.put((batch.slot, self._device.mark()))

    def close(self) -> None:
        """Returns when the thread no longer uses the buffers."""
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
        loaded: Window | None = None
        for m, span, picked in self._picks:
            slot = self._take_slot()
            if slot is None:
                return
            at = 0
            for window, first, last in picked:
                if window is not loaded:
                    with self._watched("reader", "read rows"):
                        self._load(window)
                    loaded = window
                with self._watched("reader", f"gather rows of {m}"):
                    self._gather(window.order[first:last], slot, at)
                at += last - first
            labels = np.concatenate([self._labels[window.rows[first:last]] for window, first, last in picked])
            yield Batch(m, span, _as_rows(self._ring[slot], self._rows.layout, at), torch.from_numpy(labels), slot)

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
        """Copies rows of the window to rows `at`... of the slot. numpy: torch would start a second OpenMP team here."""
        layout = self._rows.layout
        source = np.asarray(bytes_of(self._window)).reshape(-1, layout.stride)
        target = np.asarray(bytes_of(self._ring[slot]))[: len(self._ring[slot]) // layout.nbytes * layout.nbytes]
        target = target.reshape(-1, layout.nbytes)[at : at + len(order)]
        if layout.stride == layout.nbytes:
            np.take(source, order, axis=0, out=target, mode="clip")
        elif layout.nbytes > _PIECE:
            for place, row in enumerate(order):
                target[place] = source[row, : layout.nbytes]
        else:  # np.take would first copy the whole padded window; indexing copies only the chosen rows
            rows = np.ndarray(len(source), f"V{layout.nbytes}", source, strides=(layout.stride,))
            places = np.ndarray(len(target), rows.dtype, target)
            some = _PIECE // layout.nbytes
            for first in range(0, len(order), some):
                places[first : first + some] = rows[order[first : first + some]]


class MemoryReader(BatchReader):
    """Batches from rows in memory that the device shares, so that nothing has to be read ahead."""

    def __init__(self, rows: Rows, labels: torch.Tensor, phase: Phase, *, seed: int, first_update: int = 0) -> None:
        assert rows.in_memory is not None
        self._source, self._layout, self._labels, self._phase = rows.in_memory, rows.layout, labels, phase
        self._picks = picks(rows, phase, seed, first_update)
        self._batch = aligned(min(phase.micro_batch, phase.rows) * self._layout.nbytes)

    def take(self) -> Batch:
        """Returns the next batch, in the memory of the one before."""
        found = next(self._picks, None)
        assert found is not None, f"{self._phase} has no more batches"
        m, span, picked = found
        order = torch.from_numpy(np.concatenate([window.rows[first:last] for window, first, last in picked]))
        x = _as_rows(self._batch, self._layout, len(order))
        torch.index_select(self._source, 0, order, out=x.view(len(order), -1).view(torch.uint8))
        return Batch(m, span, x, self._labels[order], 0)

    def close(self) -> None:
        self._batch = self._batch[:0].clone()


class Passing(Protocol):
    """Rows that are read again in every pass."""

    @property
    def layout(self) -> RowLayout: ...
    def open_reader(self, phase: Phase, *, seed: int, first_update: int) -> BatchReader: ...


def open_reader(
    rows: Rows | Passing, labels: torch.Tensor, phase: Phase, device: Device, thread: ReaderThread,
    *, seed: int, first_update: int = 0,
) -> BatchReader:  # fmt: skip
    """Returns a reader of `rows`, whether on disk, in memory or read anew."""
    if not isinstance(rows, Rows):
        return rows.open_reader(phase, seed=seed, first_update=first_update)
    if rows.in_memory is not None:
        return MemoryReader(rows, labels, phase, seed=seed, first_update=first_update)
    return Reader(rows, labels, phase, device, thread, seed=seed, first_update=first_update)


def _as_rows(flat: torch.Tensor, layout: RowLayout, rows: int) -> torch.Tensor:
    return flat[: rows * layout.nbytes].view(layout.dtype).view(rows, *layout.shape)
