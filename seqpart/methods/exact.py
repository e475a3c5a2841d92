"""Exact training: back-propagation through the whole network, whatever part of it is on the device.

    full           one partition: the baseline for all comparisons
    checkpointed   all partitions on the device, activations kept only at the cuts and recomputed
    streamed       one partition on the device at a time, all its micro-batches before the next

The three give bit-identical parameters, gradients, moments, buffers and losses.
"""

from dataclasses import replace

from seqpart.methods.method import Method, PartitionLoss, Targets, TrueLoss, Workload, test_phases
from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.schedule.phases import Epochs, Phases
from seqpart.schedule.pieces import training


def whole_network(work: Workload, *, streamed: bool) -> Phase:
    """Returns one pass of updates through all partitions, as epoch 0."""
    first, last = work.partitions[0], len(work.partitions) - 1
    breadth_first = streamed and last > 0
    streams = frozenset(range(last + 1)) - work.stays if breadth_first else frozenset[int]()
    return Phase(
        kind=PhaseKind.TRAIN, partition=0, through=last if last else None, rows=work.train_rows, batch=first.batch_size,
        micro_batch=first.micro_batch, shuffle=work.shuffle, breadth_first=breadth_first, streams=streams, clips=work.clips,
        frozen=frozenset(p for p, part in enumerate(work.partitions) if not part.trainable),
        keeps=work.keeps, offloads=work.offloads,
    )  # fmt: skip


def exact_phases(work: Workload, *, streamed: bool) -> Phases:
    """Returns all epochs, then the test rows."""
    return trained(work, whole_network(work, streamed=streamed), test_phases(work, stays=not streamed))


def trained(work: Workload, train: Phase, behind: tuple[Phase, ...]) -> Phases:
    """Returns all updates of `train`, with the phases of `behind` at every evaluation and after the last update."""
    first = work.partitions[0]
    return Phases([training(train, first.epochs, first.updates, behind, work.tests)])


def staying_phases(work: Workload) -> Phases:
    return exact_phases(work, streamed=False)


def streamed_phases(work: Workload) -> Phases:
    return exact_phases(work, streamed=True)


def evaluation_phases(work: Workload) -> Phases:
    """Returns only the passes over the test rows."""
    train = whole_network(work, streamed=True)
    return Phases([Epochs(train=train, epochs=0, behind=test_phases(work))])


def recovery_phases(work: Workload) -> tuple[Epochs, ...]:
    """Returns the streamed schedule once more, with one side frozen (PNN paper, section 5), then the test rows."""
    recovery = work.recovery
    if recovery is None:
        return ()
    train = replace(
        whole_network(work, streamed=True), batch=recovery.batch_size, micro_batch=recovery.micro_batch, epochs=recovery.epochs,
        stage=1,
    )  # fmt: skip
    train = replace(train, frozen=train.frozen | recovery.frozen)
    size = recovery.micro_batch
    tests = tuple(replace(phase, stage=1, batch=size, micro_batch=size) for phase in test_phases(work))
    return (Epochs(train=train, epochs=recovery.epochs, behind=tests, every=work.tests.epochs),)


def true_loss(targets: Targets) -> PartitionLoss | None:
    """Returns the true loss for the last partition, and None for the others."""
    return TrueLoss(targets.final_loss, targets.reduction) if targets.partition == targets.partitions - 1 else None


FULL = Method(name="full", exact=True, cuts=False, phases=staying_phases, loss=true_loss, stays=True)
CHECKPOINTED = Method(name="checkpointed", exact=True, cuts=True, phases=staying_phases, loss=true_loss, stays=True)
STREAMED = Method(name="streamed", exact=True, cuts=True, phases=streamed_phases, loss=true_loss)
EVALUATION = replace(STREAMED, phases=evaluation_phases)
"""The streamed method without training: only its passes over the test rows."""
