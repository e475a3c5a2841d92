"""`full`: plain back-propagation through the whole network at once, the baseline that everything is measured by."""

from seqpart.methods.method import Method, PartitionLoss, Targets, TrueLoss, Workload
from seqpart.schedule import Phase, PhaseKind


def full_phases(work: Workload) -> tuple[Phase, ...]:
    """All epochs of the one partition, then the test rows."""
    (only,) = work.partitions
    sizes = {"partition": 0, "micro_batch": only.micro_batch}
    train = [
        Phase(kind=PhaseKind.TRAIN, rows=work.train_rows, batch=only.batch_size, epoch=e + 1, shuffle=work.shuffle, **sizes)
        for e in range(only.epochs)
    ]
    return (*train, Phase(kind=PhaseKind.TEST, rows=work.test_rows, batch=only.micro_batch, **sizes))


def true_loss(targets: Targets) -> PartitionLoss:
    return TrueLoss(targets.final_loss)


FULL = Method(name="full", exact=True, cuts=False, phases=full_phases, loss=true_loss)
