"""`full`: plain back-propagation through the whole network at once, the baseline that everything is measured by."""

from dataclasses import replace

from seqpart.methods.method import Method, PartitionLoss, Targets, TrueLoss, Workload
from seqpart.schedule import Phase, PhaseKind


def full_phases(work: Workload) -> tuple[Phase, ...]:
    """All epochs of the one partition, then the test rows."""
    (only,) = work.partitions
    test = Phase(kind=PhaseKind.TEST, partition=0, rows=work.test_rows, batch=only.micro_batch, micro_batch=only.micro_batch)
    train = replace(test, kind=PhaseKind.TRAIN, rows=work.train_rows, batch=only.batch_size, shuffle=work.shuffle)
    return (*(replace(train, epoch=e + 1) for e in range(only.epochs)), test)


def true_loss(targets: Targets) -> PartitionLoss:
    return TrueLoss(targets.final_loss)


FULL = Method(name="full", exact=True, cuts=False, phases=full_phases, loss=true_loss)
