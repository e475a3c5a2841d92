"""Rows of a boundary, read ahead in the order of a phase by one thread.

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
from typing import Self

import numpy as np
import torch

from seqpart.data.row_file import RowLayout, Rows
from seqpart.files.direct import PAGE, aligned, aligned_bytes, bytes_of
from seqpart.memory.device import Device, Event, keyed_seed
from seqpart.schedule.steps import Phase, Span

WINDOW = 8
"""Chunks that are shuffled among themselves."""

_PIECE = 32 << 10
"""Bytes of small padded rows that are picked at a time."""

RING = 3
"""Batches on the way between the reader and the device."""


def reader_bytes(layout: RowLayout, count: int, micro_batch: int) -> int:
    """Host memory that reading takes: one window and the ring."""
    window = min(WINDOW, -(-count // layout.chunk_rows)) * layout.chunk_bytes
    # Pages of the ring that no row ever reaches are never touched.
    return aligned_bytes(window) + RING * 2 * PAGE + min(RING * micro_batch, count) * layout.nbytes


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
        self._key = (seed, "order", phase.source, phase.epoch) if phase.shuffle else None
        self._first_update = first_update
        layout = rows.layout
        self._window = aligned(min(WINDOW, rows.chunks) * layout.chunk_bytes)
        micro_batch = min(phase.micro_batch, phase.rows)
        self._ring = [device.host(micro_batch * layout.nbytes) for _ in range(RING)]
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue()
        self._free: queue.Queue[tuple[int, Event] | None] = queue.Queue()
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
            at, stop = self._phase.skips + span.start, self._phase.skips + span.stop
            while at < stop:
                while at >= window_start + len(window.order):
                    window_start += len(window.order)
                    window, loaded = next(passing), False
                if not loaded:
                    self._load(window)
                    loaded = True
                first = at - window_start
                last = min(stop - window_start, len(window.order))
                self._gather(window.order[first:last], slot, at - self._phase.skips - span.start)
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
        elif layout.nbytes > _PIECE:
            for place, row in enumerate(order):
                target[place] = source[row, : layout.nbytes]
        else:  # np.take would first copy the whole padded window; an index makes a copy of what it picks
            rows = np.ndarray(len(source), f"V{layout.nbytes}", source, strides=(layout.stride,))
            places = np.ndarray(len(target), rows.dtype, target)
            some = _PIECE // layout.nbytes
            for first in range(0, len(order), some):
                places[first : first + some] = rows[order[first : first + some]]

    def _view(self, slot: int, rows: int) -> torch.Tensor:
        layout = self._rows.layout
        flat = self._ring[slot][: rows * layout.nbytes]
        return flat.view(layout.dtype).view(rows, *layout.shape)
