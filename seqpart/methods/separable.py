"""`psl`: one pair of scores on the device at a time, by the partially-separable loss.

P. Raynaud, D. Orban, J. Bigeon, "Partially-separable loss to parallelize partitioned neural network training" (2023),
equations 6b and 6c: the loss is a sum of elements h[k, j], each of which depends on the common weights and on those of the
scores k and j alone, and needs only the rows labelled k. h[j, k] depends on the same, so an unordered pair is one visit, of the
rows labelled with either. Gradients are gathered at home, and one optimizer step follows: that of the whole network, whose
terms are added up in another order: pair by pair, (0, 1), (0, 2), ..., (1, 2), ..., and in each by micro-batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch

from seqpart.data.reader import windows
from seqpart.data.splits import Split
from seqpart.errors import DataError, OptionError
from seqpart.methods.exact import trained, true_loss, whole_network
from seqpart.methods.method import Method, Workload, test_phases
from seqpart.model.losses import LossFunction, partially_separable
from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.schedule.phases import Phases
from seqpart.store.row_file import RowLayout

COMMON = 0
"""The partition that all scores share; behind it comes one for each score, and then what puts them side by side."""

KERNEL = 40 << 10
"""Bytes that oneDNN keeps for each number of rows that it meets, as pairs have many: seen in runs of PSNet."""


def in_pairs(work: Workload) -> Phase:
    """One pass of updates through the common partition and the scores."""
    side_by_side = len(work.partitions) - 1
    return replace(
        whole_network(work, streamed=True), through=side_by_side - 1, in_pairs=True, clips=True,
        streams=frozenset(range(COMMON + 1, side_by_side)), keeps=frozenset(range(side_by_side - 1)),
    )  # fmt: skip


def psl_phases(work: Workload) -> Phases:
    """All epochs, then the test rows, through the whole network, no more of them at once than of a pair."""
    first = work.partitions[0]
    fewer = replace(first, micro_batch=min(first.micro_batch, first.rows or first.micro_batch))
    behind = test_phases(replace(work, partitions=(fewer, *work.partitions[1:])))
    return trained(work, in_pairs(work), behind)


PSL = Method(name="psl", exact=True, cuts=True, phases=psl_phases, loss=true_loss, in_pairs=True)


_EPOCHS = 200
"""That are looked at for the rows of a pair; for those behind them there is room for an eighth more."""


def rows_of_pairs(
    method: Method, loss: LossFunction, splits: Sequence[Split], *, batch: int, epochs: int, key: tuple[int | str, ...] | None
) -> Callable[[int], int]:
    """Micro-batch to the most rows of it that pass at once: of one pair, where the method has pairs. See `_rows_of_a_pair`.

    Raises OptionError or DataError for what is no sum over pairs of scores.
    """
    if not method.in_pairs:
        return lambda micro_batch: micro_batch
    _refuse_inseparable(loss, splits)
    train = splits[0]
    chunk = RowLayout(train.shape, train.dtype).chunk_rows
    return cache(lambda micro_batch: _rows_of_a_pair(train.labels, micro_batch, batch, epochs, chunk, key))


def _rows_of_a_pair(
    labels: torch.Tensor, micro_batch: int, batch: int, epochs: int, chunk_rows: int, key: tuple[int | str, ...] | None
) -> int:
    """Most rows of a micro-batch that are labelled with one of two classes: no more pass with a graph.

    labels (rows,): classes from 0 up. key: of the row order, without partition and epoch; None: rows are not shuffled.
    """
    count, classes = len(labels), int(labels.max()) + 1
    phase = Phase(kind=PhaseKind.TRAIN, partition=COMMON, rows=count, batch=batch, micro_batch=micro_batch)
    sizes = [span.stop - span.start for _, span in phase.spans()]
    place, own, most = np.repeat(np.arange(len(sizes)), sizes) * classes, labels.numpy(), 1
    for epoch in range(1, 1 + (1 if key is None else min(epochs, _EPOCHS))):
        order = np.concatenate(
            [window.rows for window in windows(count, chunk_rows, None if key is None else (*key, COMMON, epoch))]
        )
        counts = np.bincount(place + own[order], minlength=len(sizes) * classes).reshape(len(sizes), classes)
        most = max(most, int(np.sort(counts, axis=1)[:, -2:].sum(axis=1).max()))
    return min(micro_batch, most if key is None or epochs <= _EPOCHS else most + most // 8 + 1)


def _refuse_inseparable(loss: LossFunction, splits: Sequence[Split]) -> None:
    if loss is not partially_separable:
        raise OptionError("--method psl trains by --loss psl alone, a sum over pairs of scores: leave out the other loss.")
    if any(split.labels.ndim > 1 or bool((split.labels < 0).any()) for split in splits):
        raise DataError(
            "--method psl needs one class for each row, from 0 up; found labels of positions, or below 0. Use --method auto."
        )
