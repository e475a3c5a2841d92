"""`psl`: trains one pair of scores on the device at a time, with the partially-separable loss.

P. Raynaud, D. Orban, J. Bigeon, "Partially-separable loss to parallelize partitioned neural network training" (2023),
equations 6b and 6c: the loss is a sum of elements h[k, j], each of which depends only on the common weights and on those of
the scores k and j, and needs only the rows labelled k. h[j, k] depends on the same weights, so an unordered pair is one visit,
with the rows labelled with either. Gradients accumulate at home, and one optimizer step follows, that of the whole network,
with terms added up in another order: pair by pair, (0, 1), (0, 2), ..., (1, 2), ..., and within each by micro-batches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import ClassVar

import numpy as np
import torch

from seqpart.config import Config
from seqpart.data.reader import windows
from seqpart.data.source import Source
from seqpart.data.splits import Split
from seqpart.errors import DataError, OptionError
from seqpart.fields import flag_of
from seqpart.methods.exact import trained, whole_network
from seqpart.methods.method import Method, Workload, test_phases
from seqpart.model.losses import LossFunction, LossName, partially_separable
from seqpart.schedule.phase import Order, Phase, PhaseKind
from seqpart.schedule.phases import Phases
from seqpart.store.row_file import RowLayout

COMMON = 0
"""The partition that all scores share; after it comes one for each score, and then the one that concatenates them."""

KERNEL = 40 << 10
"""Bytes that oneDNN keeps for each number of rows that it meets, and pairs have many: measured in runs of PSNet."""


_EPOCHS = 200
"""Epochs whose row order is checked for the most rows of a pair; the plan leaves an eighth more for those after them."""


class PslMethod(Method):
    """Trains one pair of scores on the device at a time, with the partially-separable loss."""

    name, in_pairs, divides_weights = "psl", True, True
    loss_name: ClassVar[LossName | None] = "psl"
    unverified = (
        "--method psl adds up gradients pair by pair, which rounds differently from full training: their bits cannot be "
        "compared. Verify streamed or checkpointed with --loss psl."
    )

    def phases(self, work: Workload) -> Phases:
        """Returns all epochs, then the test rows through the whole network, no more rows at once than a pair has."""
        first, side_by_side = work.partitions[0], len(work.partitions) - 1
        fewer = replace(first, micro_batch=min(first.micro_batch, first.rows or first.micro_batch))
        pairs = replace(
            whole_network(work, streamed=True), through=side_by_side - 1, order=Order.PAIRS, defers_updates=True,
            streams=frozenset(range(COMMON + 1, side_by_side)), keeps=frozenset(range(side_by_side - 1)),
        )  # fmt: skip
        return trained(work, pairs, test_phases(replace(work, partitions=(fewer, *work.partitions[1:]))))

    def contradictions(self, config: Config) -> Iterator[str]:
        for name in ("clip_grad_norm", "partitions", "tile"):
            if getattr(config, name) not in (None, "auto", "never"):
                why = "whose gradients and partitions are those of pairs of scores"
                yield f"{flag_of(name)} does not go with --method psl, {why}. Leave it out"
        if config.loss not in (None, "psl"):
            yield f"--method psl trains by --loss psl; found --loss {config.loss}. Leave it out"

    def refuse_source(self, source: Source) -> None:
        raise OptionError(
            "--method psl counts the rows of every pair of classes in all batches beforehand, so its rows are kept: give "
            "--cache rows."
        )

    def rows_per_pass(
        self, loss: LossFunction, splits: Sequence[Split], *, batch: int, epochs: int, key: tuple[int | str, ...] | None
    ) -> Callable[[int], int]:
        """Returns the rows of one pair, see `_rows_of_a_pair`.

        Raises OptionError or DataError if the loss is no sum over pairs of scores.
        """
        _refuse_inseparable(loss, splits)
        train = splits[0]
        chunk = RowLayout(train.shape, train.dtype).chunk_rows
        return cache(lambda micro_batch: _rows_of_a_pair(train.labels, micro_batch, batch, epochs, chunk, key))

    def library_bytes(self, rows: int) -> int:
        return KERNEL * rows


PSL = PslMethod()


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
            "--method psl needs one class for each row, from 0 up; found several labels in a row, or labels below 0. Use "
            "--method auto."
        )
