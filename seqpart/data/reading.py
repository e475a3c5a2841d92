"""Reads rows that are not kept: anew in every pass, here or in worker processes, batch by batch in the pass's order."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch

from seqpart.data.generators import generators_kept
from seqpart.data.reader import Batch, BatchReader
from seqpart.data.source import PIECE_BYTES, PIECE_ROWS, SPLITS, Job, Part, Source
from seqpart.data.splits import Split, copy_rows, first_rows
from seqpart.data.workers import Worker, probed
from seqpart.device.device import Device, Event
from seqpart.device.limit import WARM_UP_BYTES, margin_of
from seqpart.device.usage import held_by_tree, read_process
from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.store.row_file import PassingLayout, RowLayout

_NUMBER, _OF_SAMPLER = 8, 48
"""Bytes of a row's number, and the additional bytes while a sampler returns them as a list."""
_PROBE = 8
"""Fewest items that are read to measure the memory of reading."""


class Reading:
    """Reading of a run's rows that are not kept; it does nothing if they are kept. `close` ends its processes."""

    def __init__(self, train: Split, test: Split, workers: int | None, device: Device) -> None:
        """workers: number of processes; None: as many as the loader has."""
        self.workers: list[Worker] = []
        self.notes: list[str] = []
        kept = {split.kept for split in (train, test)}
        # One type for both splits; and for a device behind a link the plan has no room for rows in two types.
        dtype = train.kept if len(kept) == 1 and train.kept is not None and device.shares_memory else train.dtype
        self.parts = [Part(s.source, s, dtype) for s in (train, test) if isinstance(s.source, Source)]
        self._row = RowLayout(train.shape, dtype, None if dtype == train.dtype else train.dtype)
        self._work, self._asked = 0, 0
        self.first_row = cache(partial(_first_row, train))
        if self.parts:
            source = self.parts[0].source
            self._asked = source.workers if workers is None else workers
            if self._asked > 1 and source.streams:
                self._asked = 1
                self.notes.append(
                    "one worker process: a data set that streams is read by one alone, so that its rows come in order"
                )

    def start(self, limit: int, device: Device) -> None:
        """Starts the processes, and measures the memory of reading, before the run holds memory, which a fork would count too.

        Starts as many as fit in `limit` bytes beside the least that a plan needs, if the device shares the host's memory.
        """
        if not self.parts:
            return
        source = self.parts[0].source
        piece = min(PIECE_ROWS, PIECE_BYTES // self._row.nbytes + 1)
        probe = max(_PROBE, piece if source.collate is None else source.batch)
        with generators_kept():
            self._work = probed(self.parts[0], probe)[1]
        for number in range(self._asked):
            another = read_process().held + self._work + probe * self._row.nbytes
            if device.shares_memory and held_by_tree(os.getpid()) + another + WARM_UP_BYTES > limit - margin_of(limit):
                self._say_fewer()
                break
            self.workers.append(Worker(self.parts, number, probe, self.workers))
            self._work = max(self._work, self.workers[-1].work)

    @property
    def layout(self) -> RowLayout:
        if not self.parts:
            return self._row
        unit = max(one.source.batch if one.source.collate is not None else 0 for one in self.parts)
        part, source = self.parts[0], self.parts[0].source
        number = _NUMBER if source.sampler is None else _NUMBER + _OF_SAMPLER
        return PassingLayout(
            self._row.shape, self._row.dtype, self._row.becomes, unit=unit, label_row=part.label_nbytes, work=self._work,
            order=0 if source.streams else max(source.rows, source.count) * number,
            processes=len(self.workers),
        )  # fmt: skip

    def beside(self, rows: int) -> int:
        """Most bytes that workers hold beyond their idle memory, for a batch of `rows` rows."""
        layout = self.layout
        return layout.of_workers(rows) if isinstance(layout, PassingLayout) else 0

    def fewer(self) -> int:
        """Ends half of the workers. Returns the bytes that they held; 0 if there were none."""
        ending = self.workers[len(self.workers) // 2 :]
        freed = sum(held_by_tree(worker.pid) for worker in ending)
        for worker in ending:
            self.workers.remove(worker)
            worker.close()
        if ending:
            self._say_fewer()
        return freed

    def _say_fewer(self) -> None:
        self.notes = [f"{len(self.workers)} of {self._asked} worker processes: the limit has no room for more"]

    def rows(self, split: str, device: Device) -> "PassingRows | None":
        """Returns the replacement for the rows of a split; None if they are kept."""
        if not self.parts:
            return None
        return PassingRows(self, SPLITS.index(split), self.layout, device)

    @property
    def held(self) -> int:
        """Bytes that the workers hold now."""
        return sum(held_by_tree(worker.pid) for worker in self.workers)

    def close(self) -> None:
        while self.workers:
            self.workers.pop().close()


def _first_row(split: Split) -> torch.Tensor:
    """Returns the first row, (1, *shape), read without an effect on what is drawn later."""
    found = torch.empty((1, *split.shape), dtype=split.dtype)
    with generators_kept():
        copy_rows(first_rows(split, 1), found)
    return found


@dataclass(frozen=True, slots=True)
class PassingRows:
    """The rows of a split, none of which are kept; replaces `Rows` for the readers of phases."""

    reading: Reading
    number: int
    layout: RowLayout
    device: Device

    def open_reader(self, phase: Phase, *, seed: int, first_update: int) -> "PassingReader":
        return PassingReader(self, phase, seed=seed, first_update=first_update)


class _Unit(NamedTuple):
    """Rows that are read together: those of a micro-batch, or of a batch that a collate_fn makes."""

    first: int
    stop: int
    """first, stop: a range of places in the order of the pass."""
    job: Job


class PassingReader(BatchReader):
    """Batches of one phase in order, each read when it is needed, or ahead by the workers."""

    def __init__(self, rows: PassingRows, phase: Phase, *, seed: int, first_update: int) -> None:
        self._phase, self._rows, self._device, self._skips = phase, rows, rows.device, phase.within.skips
        self._part = rows.reading.parts[rows.number]
        self._workers, self._asked = list(rows.reading.workers), 0
        training = phase.kind is PhaseKind.TRAIN
        epoch = phase.epoch if training else -phase.view
        self._draws = self._part.source.draws(seed, SPLITS[rows.number], phase.stage, epoch)
        with generators_kept():
            self._order = self._part.source.order(self._draws, shuffle=phase.shuffle)
        self._spans = phase.spans(first_update)
        self._units, self._ahead = self._all_units(first_update), list[_Unit]()
        self._x, self._labels, self._first, self._stop = *self._part.empty(0), 0, 0
        self._flat = self._device.host(0)
        self._used: Event = None
        for worker in self._workers:
            worker.ask(rows.reading.beside(phase.micro_batch) // len(self._workers))
            self._ask(worker)

    def take(self) -> Batch:
        """Returns the next batch, in the memory of the one before. Raises DataError."""
        m, span = next(self._spans)
        start, stop = self._skips + span.start, self._skips + span.stop
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        while start < stop:
            if not self._first <= start < self._stop:
                found = [(x.clone(), labels) for x, labels in found]
                self._fill(self._ahead[0] if self._workers else next(self._units))
            last = min(stop, self._stop)
            own = slice(start - self._first, last - self._first)
            found.append((self._x[own], self._labels[own].clone()))
            start = last
        x, labels = found[0] if len(found) == 1 else (torch.cat([x for x, _ in found]), torch.cat([y for _, y in found]))
        return Batch(m, span, x, labels, 0)

    def done(self, batch: Batch) -> None:
        self._used = self._device.mark()

    def close(self) -> None:
        """Discards what workers have read ahead, and frees the memory."""
        waiting, self._ahead = self._ahead, []
        for place, unit in enumerate(waiting):
            with contextlib.suppress(Exception):  # a worker that has ended raises its error when its rows are needed
                worker = self._workers[(self._asked - len(waiting) + place) % len(self._workers)]
                worker.skip(self._nbytes(unit))
        self._x, self._labels = self._part.empty(0)
        self._flat = self._device.host(0)

    def _all_units(self, first_update: int) -> Iterator[_Unit]:
        source, phase = self._part.source, self._phase
        if source.collate is None:
            for number, span in phase.spans(first_update):
                yield self._unit(self._skips + span.start, self._skips + span.stop, number)
            return
        begins = self._skips + first_update * phase.batch
        ends, whole = self._skips + phase.rows, source.rows if phase.kind is PhaseKind.TRAIN else source.count
        for batch in range(begins // source.batch, -(-ends // source.batch)):
            yield self._unit(batch * source.batch, min((batch + 1) * source.batch, whole), batch)

    def _unit(self, first: int, stop: int, batch: int) -> _Unit:
        return _Unit(first, stop, Job(self._rows.number, self._draws, batch, np.asarray(self._order[first:stop], np.int64)))

    def _ask(self, worker: Worker) -> None:
        unit = next(self._units, None)
        if unit is not None:
            worker.ask(unit.job)
            self._ahead.append(unit)
            self._asked += 1

    def _nbytes(self, unit: _Unit) -> int:
        return (unit.stop - unit.first) * (self._rows.layout.nbytes + self._part.label_nbytes)

    def _fill(self, unit: _Unit) -> None:
        count, layout = unit.stop - unit.first, self._rows.layout
        self._device.wait(self._used)  # the copy to the device out of this memory is over
        if len(self._flat) < count * layout.nbytes:
            self._flat = self._device.host(count * layout.nbytes)
        self._x = self._flat[: count * layout.nbytes].view(layout.dtype).view(count, *layout.shape)
        self._labels = self._part.empty(count)[1]
        self._first, self._stop = unit.first, unit.stop
        if not self._workers:
            with generators_kept(), self._device.heap.aside():
                self._part.fill(unit.job, self._x, self._labels)
            return
        worker = self._workers[(self._asked - len(self._ahead)) % len(self._workers)]
        self._ahead.pop(0)
        worker.receive(self._x, self._labels)
        self._ask(worker)
