"""`psl`: one pair of scores on the device at a time, by the partially-separable loss.

P. Raynaud, D. Orban, J. Bigeon, "Partially-separable loss to parallelize partitioned neural network training" (2023),
equations 6b and 6c: the loss is a sum of elements h[k, j], each of which depends on the common weights and on those of the
scores k and j alone, and needs only the rows labelled k. h[j, k] depends on the same, so an unordered pair is one visit, of the
rows labelled with either. Gradients are gathered at home, and one optimizer step follows: that of the whole network, whose
terms are added up in another order: pair by pair, (0, 1), (0, 2), ..., (1, 2), ..., and in each by micro-batches.
"""

from collections.abc import Sequence
from dataclasses import replace

from seqpart.data.splits import Split
from seqpart.errors import DataError, OptionError
from seqpart.methods.exact import true_loss, whole_network
from seqpart.methods.method import Method, Workload, test_phases
from seqpart.model.losses import LossFunction, partially_separable
from seqpart.schedule.phases import Epochs, Phases
from seqpart.schedule.steps import Phase

COMMON = 0
"""The partition that all scores share; behind it comes one for each score, and then what puts them side by side."""


def in_pairs(work: Workload) -> Phase:
    """One pass of updates through the common partition and the scores."""
    side_by_side = len(work.partitions) - 1
    return replace(
        whole_network(work, streamed=True), through=side_by_side - 1, in_pairs=True, clips=True,
        streams=frozenset(range(COMMON + 1, side_by_side)), keeps=frozenset(range(side_by_side - 1)),
    )  # fmt: skip


def psl_phases(work: Workload) -> Phases:
    """All epochs, then the test rows, through the whole network."""
    epochs = work.partitions[0].epochs
    train = replace(in_pairs(work), epochs=epochs)
    return Phases([Epochs(train=train, epochs=epochs, behind=test_phases(work), every=work.test_every)])


PSL = Method(name="psl", exact=True, cuts=True, phases=psl_phases, loss=true_loss, in_pairs=True)


def refuse_inseparable(method: Method, loss: LossFunction, splits: Sequence[Split]) -> None:
    """Raises OptionError or DataError for what is no sum over pairs of scores, where the method needs one."""
    if not method.in_pairs:
        return
    if loss is not partially_separable:
        raise OptionError("--method psl trains by --loss psl alone, a sum over pairs of scores: leave out the other loss.")
    if any(split.labels.ndim > 1 or split.labels.min() < 0 for split in splits):
        raise DataError(
            "--method psl needs one class for each row, from 0 up; found labels of positions, or below 0. Use --method auto."
        )
