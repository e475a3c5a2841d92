"""`sil`: partitions trained one after the other against synthetic intermediate labels.

C. V. Karadağ and N. Topaloğlu, "Partitioned Neural Network Training via Synthetic Intermediate Labels" (2024),
section 2. Steps, as the comments below number them:

    (1) for every cut draw SIL[i, j] ~ kappa * U(0, 1), (boundary size, classes), once          eq. 1
    (2) train partition 0 against column SIL[:, label], nothing else on the device
    (3) one forward pass: its outputs are the next partition's inputs
    (4) the same for each partition; the last one has the true labels
    (5) joined, the partitions are the network
    (*) figure 5: instead of (3) the next partition's inputs are the synthetic labels themselves, so that no partition
        waits for another                                                                                section 2
    (6) recovery: the left side once more, against the true loss through the frozen right side        section 5
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from seqpart.capture.own_loss import OwnLoss
from seqpart.data.splits import Split
from seqpart.errors import DataError, ModelError
from seqpart.methods.exact import recovery_phases
from seqpart.methods.method import Method, PartitionLoss, Targets, TrueLoss, Workload
from seqpart.methods.objectives import OBJECTIVES
from seqpart.model.blocks import Chain
from seqpart.model.losses import LossFunction, label_dtype
from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.schedule.phases import Epochs, Phases


def sil_phases(work: Workload) -> Phases:
    """Returns for each partition its epochs (2), the outputs for the next (3), its test rows; then recovery (6)."""
    stretches: list[Epochs] = []
    last = len(work.partitions) - 1
    for p, part in enumerate(work.partitions):
        test = Phase(
            kind=PhaseKind.TEST, partition=p, rows=work.test_rows, batch=part.micro_batch, micro_batch=part.micro_batch
        )
        train = replace(
            test,
            kind=PhaseKind.TRAIN,
            rows=work.train_rows,
            batch=part.batch_size,
            shuffle=work.shuffle,
            epochs=part.epochs,
            views=work.views,
        )
        behind: tuple[Phase, ...] = (test,) if work.test_rows else ()
        if p < last:
            # A frozen partition never learned its labels: the next one must see its real outputs.
            outputs = PhaseKind.DRAW if work.synthetic_inputs and part.trainable else PhaseKind.CACHE
            cached = (replace(test, kind=outputs, rows=work.train_rows, view=view) for view in range(work.views))
            behind = *cached, *behind
        every = work.tests.epochs if p == last else None
        stretches.append(Epochs(train=train, epochs=part.epochs if part.trainable else 0, behind=behind, every=every))
    return Phases([*stretches, *recovery_phases(work)])


def sil_loss(targets: Targets) -> PartitionLoss:
    """Returns the loss of (1) for an inner partition, and the true loss for the last (4)."""
    if targets.partition == targets.partitions - 1:
        return TrueLoss(targets.final_loss, targets.reduction)
    return OBJECTIVES[targets.objective](targets)


SIL = Method(name="sil", exact=False, alone=True, cuts=True, phases=sil_phases, loss=sil_loss)


def refuse_partitions_alone(chain: Chain, classes: int, splits: Sequence[Split], loss: LossFunction | None) -> None:
    """Raises ModelError or DataError if partitions cannot be trained one after another, each alone. loss: the user's."""
    if any(block.tied for block in chain):
        raise ModelError("method sil trains each partition alone, so blocks must not share a parameter. Use --method auto.")
    if not classes:
        found = "several labels in a row" if splits[0].label_form else "floats"
        raise DataError(f"method sil needs classes (integers) as labels; found {found}. Use --method auto.")
    if any((split.labels < 0).any() for split in splits):
        raise DataError("method sil needs a class in every label; found some below 0. Use --method auto.")
    if isinstance(loss, OwnLoss) and splits[0].labels.ndim > 1:
        labels = splits[0].labels[:4].to(label_dtype(splits[0].labels))
        targets = loss.targets(labels)
        if targets is None or not torch.equal(targets.flatten(), labels.flatten()):
            raise ModelError(
                "method sil judges inner partitions by the labels as they are, and the model's own loss takes others (shifted "
                "by a position?). Give labels that are shifted already and a function (output, labels) -> loss, or use "
                "--method auto."
            )
