"""The rows of one update at a time, as somebody else's loop brings them."""

import torch

from seqpart.data.reader import Batch
from seqpart.data.splits import Split, write_rows
from seqpart.device.device import Device
from seqpart.errors import OutOfMemory
from seqpart.schedule.phase import Phase
from seqpart.store.row_file import RowLayout


class FedRows:
    """Stands for the rows of boundary 0: each epoch of its phases is one update, of the batch that was fed for it.

    layout: of a row. rows: of the largest batch, for which there is memory.
    """

    def __init__(self, layout: RowLayout, rows: int, device: Device) -> None:
        self.layout = layout
        self._x = device.host(rows * layout.nbytes)[: rows * layout.nbytes].view(layout.dtype).view(rows, *layout.shape)
        self._labels = torch.empty(0)
        self.fed = 0
        """Batches so far."""

    def feed(self, batch: Split) -> None:
        """The rows of the next update. Raises DataError for a value that is not finite."""
        at = 0

        def append(rows: torch.Tensor) -> None:
            nonlocal at
            self._x[at : at + len(rows)] = rows
            at += len(rows)

        write_rows(batch, append)
        self._labels = batch.labels
        self.fed += 1

    def open_reader(self, phase: Phase, *, seed: int, first_update: int) -> "_FedReader":
        """Raises OutOfMemory where the batch of that update is gone."""
        if phase.epoch != self.fed:
            raise OutOfMemory(
                f"memory ran out in the middle of update {self.fed}, and the weights can only be taken back to what they were "
                f"before update {phase.epoch}, whose batch is gone. Give a larger --mem-limit, or a smaller --micro-batch-size."
            )
        return _FedReader(self._x, self._labels, phase)


class _FedReader:
    """Micro-batches of one batch, where it lies."""

    def __init__(self, x: torch.Tensor, labels: torch.Tensor, phase: Phase) -> None:
        self._x, self._labels, self._spans = x, labels, phase.spans()

    def take(self) -> Batch:
        m, span = next(self._spans)
        rows = slice(span.start, span.stop)
        return Batch(m, span, self._x[rows], self._labels[rows], 0)

    def done(self, batch: Batch) -> None:
        """Nobody writes there before the update is over."""

    def close(self) -> None:
        """Nothing is held."""
