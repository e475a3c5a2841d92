"""Exact training: back-propagation through the whole network, whatever part of it is on the device.

    full           one partition: the baseline for all comparisons
    checkpointed   all partitions on the device, activations kept only at the cuts and recomputed
    streamed       one partition on the device at a time, all its micro-batches before the next

The three give bit-identical parameters, gradients, moments, buffers and losses.
"""

from collections.abc import Iterator
from dataclasses import replace

from seqpart.config import Config
from seqpart.fields import as_text
from seqpart.methods.method import Method, Workload, test_phases
from seqpart.schedule.phase import Order, Phase, PhaseKind
from seqpart.schedule.phases import Epochs, Phases, training


def whole_network(work: Workload, *, streamed: bool) -> Phase:
    """Returns one pass of updates through all partitions, as epoch 0."""
    first, last = work.partitions[0], len(work.partitions) - 1
    order = Order.PARTITIONS if streamed and last else Order.MICRO_BATCHES
    streams = frozenset(range(last + 1)) - work.stays if order is Order.PARTITIONS else frozenset[int]()
    return Phase(
        kind=PhaseKind.TRAIN, partition=0, through=last if last else None, rows=work.train_rows, batch=first.batch_size,
        micro_batch=first.micro_batch, shuffle=work.shuffle, order=order, streams=streams, defers_updates=work.defers_updates,
        frozen=frozenset(p for p, part in enumerate(work.partitions) if not part.trainable),
        keeps=work.keeps, offloads=work.offloads, host_steps=work.host_steps,
        rank=work.rank, ranks=work.ranks,
        divides_state=work.divides_state and bool(streams) and not work.host_steps,  # state that stays needs no disk
    )  # fmt: skip


def trained(work: Workload, train: Phase, following: tuple[Phase, ...]) -> Phases:
    """Returns all updates of `train`, with the phases of `following` at every evaluation and after the last update."""
    first = work.partitions[0]
    return Phases([training(train, first.epochs, first.updates, following, work.tests)])


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
    return (Epochs(train=train, epochs=recovery.epochs, following=tests, every=work.tests.epochs),)


class _Exact(Method):
    def phases(self, work: Workload) -> Phases:
        """Returns all epochs, then the test rows."""
        return trained(work, whole_network(work, streamed=not self.stays), test_phases(work, stays=self.stays))


class Streamed(_Exact):
    """Loads one partition at a time, and runs all micro-batches of an update through it before the next."""

    name = "streamed"


class Evaluation(Streamed):
    """The streamed method without training: only its passes over the test rows."""

    def phases(self, work: Workload) -> Phases:
        return Phases([Epochs(train=whole_network(work, streamed=True), epochs=0, following=test_phases(work))])


class Checkpointed(_Exact):
    """Keeps all partitions on the device and activations only at the cuts, and recomputes the others."""

    name, stays = "checkpointed", True


class Full(Checkpointed):
    """Trains the whole network as one partition: the baseline for all comparisons."""

    name, cuts = "full", False
    unverified = "--method full is what the others are compared with. Verify streamed or checkpointed."

    def contradictions(self, config: Config) -> Iterator[str]:
        if config.partitions not in ("auto", 1):
            yield f"--partitions: method {self.name} has one partition; found {as_text(config.partitions)!r}"


STREAMED, EVALUATION, CHECKPOINTED, FULL = Streamed(), Evaluation(), Checkpointed(), Full()
