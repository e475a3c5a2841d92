"""Worker processes that read rows: forked before the run has memory of its own, each with two pipes to it.

    the run --(pass, numbers of items)--> worker --(rows, labels)--> the run

A worker reads one batch and waits until that is taken, so as many batches are read ahead as there are workers, and there
is no shared memory. Its memory counts like that of the whole process tree; the kernel enforces its own limit.
"""

import ctypes
import os
import resource
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

import numpy as np
import torch

from seqpart.data.source import Job, Part
from seqpart.device.device import Device
from seqpart.device.pages import bytes_of
from seqpart.device.process_limits import highest, set_mark_back
from seqpart.device.usage import read_process
from seqpart.errors import DataError, OutOfMemory, SeqpartError
from seqpart.files import write_all
from seqpart.units import format_size

_DIES_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
RESERVED = 24 << 20
"""Bytes that RLIMIT_DATA charges to a worker beyond what was measured and planned: reservations that are never touched."""


class Worker:
    """One worker process, seen from the run. `close` ends it."""

    def __init__(self, parts: Sequence[Part], number: int, probe: int, others: "Sequence[Worker]") -> None:
        """probe: number of items that it reads as a trial. others: workers that were started before."""
        self.number, self._source = number, parts[0].source
        jobs, self.jobs = Pipe(duplex=False)
        self.rows, back = Pipe(duplex=False)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # whoever reads it may be gone
                stream.flush()
        with warnings.catch_warnings():  # about threads: a worker has one thread, and takes no lock of the run's others
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            for worker in (self, *others):
                worker.jobs.close()
                worker.rows.close()
            _live(parts, number, probe, jobs, back)
        jobs.close()
        back.close()
        try:
            self.idle, self.work = self._reply()
        except BaseException:
            self.close()
            raise

    def ask(self, job: Job | int) -> None:
        """Asks for a batch, or sets the bytes that the worker may hold beyond its idle memory."""
        try:
            self.jobs.send(job)
        except BrokenPipeError:
            raise self._ended() from None

    def receive(self, rows: torch.Tensor, labels: torch.Tensor) -> None:
        """Receives the requested rows into tensors of exactly that size. Raises the worker's error."""
        self._reply()
        for tensor in (rows, labels):
            self._receive_into(bytes_of(tensor.reshape(-1).view(torch.uint8)))

    def skip(self, nbytes: int) -> None:
        """Discards a reply that is no longer needed, be it rows or an error."""
        with suppress(DataError, OutOfMemory):
            self._reply()
            piece = memoryview(bytearray(1 << 16))
            for at in range(0, nbytes, len(piece)):
                self._receive_into(piece[: nbytes - at])

    def close(self) -> None:
        self.jobs.close()
        self.rows.close()
        os.kill(self.pid, signal.SIGKILL)  # it may be in the middle of an item; nothing of it is worth keeping
        os.waitpid(self.pid, 0)

    def _reply(self) -> Any:
        """Returns what the worker says before any rows. Raises its error."""
        try:
            found = self.rows.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        if isinstance(found, SeqpartError):
            raise found
        return found

    def _receive_into(self, memory: memoryview) -> None:
        while memory:
            count = os.readv(self.rows.fileno(), [memory])
            if not count:
                raise self._ended()
            memory = memory[count:]

    def _ended(self) -> DataError:
        return DataError(
            f"{self._source.name} data: worker process {self.number} has ended while it read rows. Something in the data set "
            "ended it, or the system did: try --workers 0, which reads in the run's own process, to see what."
        )


# --- in the worker ----------------------------------------------------------------------------------------------------


def _live(
    parts: Sequence[Part], number: int, probe: int, jobs: "Connection[Any, Any]", back: "Connection[Any, Any]"
) -> NoReturn:
    """Runs in the worker until the run ends."""
    status = 1
    try:
        for number_of in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # these may go to all; the run answers them
            signal.signal(number_of, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
        torch.set_num_threads(1)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        _serve(parts, number, probe, jobs, back)
        status = 0
    except (BrokenPipeError, EOFError):  # the run is gone, or needs no rows any more
        status = 0
    finally:
        os._exit(status)


def _serve(parts: Sequence[Part], number: int, probe: int, jobs: "Connection[Any, Any]", back: "Connection[Any, Any]") -> None:
    parts = [part.anew() for part in parts]
    try:
        if parts[0].source.begin_worker is not None:
            parts[0].source.begin_worker(number)
        back.send(probed(parts[0], probe))
    except BaseException as error:
        back.send(_as_error(error))
        return
    while True:
        job = jobs.recv()
        if isinstance(job, int):
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (read_process().data + job + RESERVED, hard))
            continue
        try:
            rows, labels = parts[job.part].empty(len(job.numbers))
            parts[job.part].fill(job, rows, labels)
        except BaseException as error:
            back.send(_as_error(error))
            continue
        back.send(None)
        for tensor in (rows, labels):
            write_all(back.fileno(), bytes_of(tensor.view(-1).view(torch.uint8)))
        del rows, labels, tensor


def _as_error(error: BaseException) -> SeqpartError:
    """Returns what the run raises for an error in a worker."""
    if Device().is_out_of_memory(error):
        held = format_size(read_process().held)
        return OutOfMemory(
            f"memory ran out in a worker process that reads rows and holds {held}: an item takes more than those that were "
            "measured when the run was planned. Give fewer --workers, or a larger --mem-limit."
        )
    return DataError(error.with_flags if isinstance(error, SeqpartError) else f"{type(error).__name__}: {error}")


def probed(part: Part, items: int) -> tuple[int, int]:
    """Reads some items. Returns (bytes that this process holds, most bytes beyond that and the rows while it read)."""
    source, count = part.source, min(items, part.source.count)
    step = 1 if source.streams or source.collate is not None else max(1, source.count // count)
    rows, labels = part.empty(count)
    rows.view(-1).view(torch.uint8)[:] = 0
    job = Job(0, source.draws(0, "train", 0, 0), 0, np.arange(count) * step)
    part.fill(job, rows, labels)  # the first read loads what stays in memory
    works = set_mark_back()
    before = read_process().held
    part.fill(job, rows, labels)
    work = highest() - before if works else _UNSEEN
    del rows, labels
    return read_process().held, max(0, work)


_UNSEEN = 32 << 20
"""Bytes assumed for reading an item if the kernel's peak mark cannot be reset."""
