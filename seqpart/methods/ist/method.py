"""`ist`: parts of the network, each with some neurons of every hidden layer, trained in turn and put together again.

B. Yuan et al., "Distributed Learning of Fully Connected Neural Networks using Independent Subnet Training" (2022). A round:

    SPLIT   every hidden neuron is dealt to one of N subnets, which are cut out of the whole network        section 2.1
    TRAIN   each subnet for J updates on its own rows, back through all of it                                section 2.1
    MERGE   they are put back without collisions; what all of them have is averaged                          section 2.1

and after the last round mean and deviation of the whole network's neurons over some training rows           section 2.2
"""

from collections.abc import Iterator
from dataclasses import replace

from seqpart.methods.exact import true_loss, whole_network
from seqpart.methods.method import Method, Workload, test_phases
from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.schedule.phases import Phases
from seqpart.schedule.rounds import Rounds


def ist_phases(work: Workload) -> Phases:
    """Returns all rounds: SPLIT, the subnets in turn, MERGE. `work.partitions`: those of one subnet."""
    subnets = work.subnets
    assert subnets is not None
    split = Phase(
        kind=PhaseKind.SPLIT,
        partition=0,
        through=subnets.whole - 1 if subnets.whole > 1 else None,
        rows=1,
        batch=1,
        micro_batch=1,
    )
    epochs = work.partitions[0].epochs
    turn = replace(whole_network(work, streamed=True), epochs=epochs, rows=subnets.rows, rows_of=0)
    turns = tuple(
        replace(_moved(turn, subnets.whole + part * len(work.partitions)), skips=part * subnets.rows * (not subnets.all_rows))
        for part in range(subnets.count)
    )
    return Phases([
        Rounds(
            split=split, turns=turns, merge=replace(split, kind=PhaseKind.MERGE), local=subnets.local_steps, epochs=epochs,
            behind=(*_statistics(work), *_tests(work)), every=work.tests.epochs,
        )
    ])  # fmt: skip


def _moved(phase: Phase, by: int) -> Phase:
    """Returns the same phase with `by` added to all partition numbers."""

    def moved(partitions: frozenset[int]) -> frozenset[int]:
        return frozenset(p + by for p in partitions)

    return replace(
        phase, partition=phase.partition + by, through=None if phase.through is None else phase.through + by,
        frozen=moved(phase.frozen), streams=moved(phase.streams), keeps=moved(phase.keeps), offloads=moved(phase.offloads),
    )  # fmt: skip


def _statistics(work: Workload) -> Iterator[Phase]:
    """Yields the passes that recompute BatchNorm's running statistics, one partition of the whole network after the other."""
    subnets, size = work.subnets, work.partitions[0].micro_batch
    assert subnets is not None
    for p in range(subnets.observed):
        yield Phase(
            kind=PhaseKind.STATISTICS, partition=p, rows=subnets.observed_rows, batch=subnets.observed_rows,
            micro_batch=min(size, subnets.observed_rows), shuffle=work.shuffle and p == 0, ends=subnets.observed - 1,
        )  # fmt: skip


def _tests(work: Workload) -> Iterator[Phase]:
    """Returns the passes of the test rows through the whole network, one partition after the other."""
    assert work.subnets is not None
    whole = work.subnets.whole
    alike = replace(work, partitions=work.partitions[:1] * whole, one_value=True)
    return (replace(test, ends=whole - 1) for test in test_phases(alike))


IST = Method(name="ist", exact=False, cuts=True, phases=ist_phases, loss=true_loss)
