"""`psl`: trains one pair of scores on the device at a time, with the partially-separable loss.

P. Raynaud, D. Orban, J. Bigeon, "Partially-separable loss to parallelize partitioned neural network training" (2023),
equations 6b and 6c: the loss is a sum of elements h[k, j], each of which depends only on the common weights and on those of
the scores k and j, and needs only the rows labelled k. h[j, k] depends on the same weights, so an unordered pair is one visit,
with the rows labelled with either. Gradients accumulate at home, and one optimizer step follows, that of the whole network,
with terms added up in another order: pair by pair, (0, 1), (0, 2), ..., (1, 2), ..., and within each by micro-batches.
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
"""The partition that all scores share; after it comes one for each score, and then the one that concatenates them."""

KERNEL = 40 << 10
"""Bytes that oneDNN keeps for each number of rows that it meets, and pairs have many: measured in runs of PSNet."""


def in_pairs(work: Workload) -> Phase:
    """Returns one pass of updates through the common partition and the scores."""
    side_by_side = len(work.partitions) - 1
    return replace(
        whole_network(work, streamed=True), through=side_by_side - 1, in_pairs=True, clips=True,
        streams=frozenset(range(COMMON + 1, side_by_side)), keeps=frozenset(range(side_by_side - 1)),
    )  # fmt: skip


def psl_phases(work: Workload) -> Phases:
    """Returns all epochs, then the test rows through the whole network, no more rows at once than a pair has."""
    first = work.partitions[0]
    fewer = replace(first, micro_batch=min(first.micro_batch, first.rows or first.micro_batch))
    behind = test_phases(replace(work, partitions=(fewer, *work.partitions[1:])))
    return trained(work, in_pairs(work), behind)


PSL = Method(name="psl", exact=True, cuts=True, phases=psl_phases, loss=true_loss, in_pairs=True)


_EPOCHS = 200
"""Epochs whose row order is checked for the most rows of a pair; the plan leaves an eighth more for those after them."""


def rows_of_pairs(
    method: Method, loss: LossFunction, splits: Sequence[Split], *, batch: int, epochs: int, key: tuple[int | str, ...] | None
) -> Callable[[int], int]:
    """Returns the function from a micro-batch to its most rows per forward pass: one pair's, for a method with pairs. See
    `_rows_of_a_pair`.

    Raises OptionError or DataError if the loss is no sum over pairs of scores.
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
    """Returns the most rows of a micro-batch that are labelled with one of two classes: no more run with a graph.

    labels (rows,): classes from 0 up. key: seeds the row order, without partition and epoch; None: rows are not shuffled.
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
