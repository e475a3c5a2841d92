"""`ist`: parts of the network, each with some neurons of every hidden layer, trained in turn and put together again.

B. Yuan et al., "Distributed Learning of Fully Connected Neural Networks using Independent Subnet Training" (2022). A round:

    SPLIT   every hidden neuron is dealt to one of N subnets, which are cut out of the whole network        section 2.1
    TRAIN   each subnet for J updates on its own rows, back through all of it                                section 2.1
    MERGE   they are put back without collisions; what all of them have is averaged                          section 2.1

and after the last round mean and deviation of the whole network's neurons over some training rows           section 2.2
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from seqpart.config import Config, Ist
from seqpart.data.source import Source
from seqpart.errors import OptionError
from seqpart.methods.exact import whole_network
from seqpart.methods.method import Method, Workload, test_phases
from seqpart.schedule.phase import EpochSlice, Phase, PhaseKind
from seqpart.schedule.phases import Phases, Rounds


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


class IstMethod(Method):
    """Cuts subnets out of the network, trains each for some updates on its own rows, and puts them back."""

    name, exact, has_subnets, divides_weights = "ist", False, True, True
    options: ClassVar[tuple[type, ...]] = (Ist,)
    fixed: ClassVar[frozenset[str]] = frozenset({"epochs"})
    """Rounds are counted from the first epoch on."""

    def phases(self, work: Workload) -> Phases:
        """Returns all rounds: SPLIT, the subnets in turn, MERGE. `work.partitions`: those of one subnet."""
        subnets = work.subnets
        assert subnets is not None
        last = subnets.whole - 1 or None
        split = Phase(kind=PhaseKind.SPLIT, partition=0, through=last, rows=1, batch=1, micro_batch=1)
        epochs = work.partitions[0].epochs
        turn = replace(whole_network(work, streamed=True), epochs=epochs, rows=subnets.rows, rank=0, ranks=1)
        each, share = len(work.partitions), 0 if subnets.all_rows else subnets.rows
        turns = tuple(
            replace(
                _moved(turn, subnets.whole + part * each), within=EpochSlice(skips=part * share, rows_of=0),
                elsewhere=part % work.ranks != work.rank, independent=work.ranks > 1,
            )
            for part in range(subnets.count)
        )  # fmt: skip
        merge = replace(split, kind=PhaseKind.MERGE, rank=work.rank, ranks=work.ranks, independent=work.ranks > 1)
        return Phases([
            Rounds(
                split=split, turns=turns, merge=merge, local=subnets.local_steps, epochs=epochs,
                following=(*_statistics(work), *_tests(work)), every=work.tests.epochs,
            )
        ])  # fmt: skip

    def contradictions(self, config: Config) -> Iterator[str]:
        if config.subnets is None:
            yield "--method ist needs --subnets: how many parts the network is divided into"
        if config.tile_bytes:
            yield "--tile goes with exact methods; method ist divides large layers itself"
        if config.ema is not None:
            yield "--ema does not go with --method ist, whose subnets have other neurons in every round. Leave one out"

    def refuse_source(self, source: Source) -> None:
        if source.streams:
            raise OptionError(
                "--method ist gives every subnet rows by their numbers, and a stream has none. Give a data set that is read by "
                "data[i]."
            )
        super().refuse_source(source)


IST = IstMethod()
