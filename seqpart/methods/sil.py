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

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from seqpart.capture.own_loss import OwnLoss
from seqpart.config import WITH_DIRECTIONS, Config, Recovery, Sil, given_of
from seqpart.data.row_packs import RowPack
from seqpart.data.splits import Split
from seqpart.errors import DataError, ModelError
from seqpart.fields import flag_of
from seqpart.methods.exact import recovery_phases
from seqpart.methods.method import Method, PartitionLoss, Targets, Workload
from seqpart.methods.objectives import OBJECTIVES, why_unsuited
from seqpart.model.blocks import Chain
from seqpart.model.losses import LossFunction, label_dtype
from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.schedule.phases import Epochs, Phases


class SilMethod(Method):
    """Trains partitions one after the other, each but the last against synthetic intermediate labels."""

    name, exact, alone = "sil", False, True
    options: ClassVar[tuple[type, ...]] = (Sil, Recovery)

    def phases(self, work: Workload) -> Phases:
        """Returns for each partition its epochs (2), the outputs for the next (3), its test rows; then recovery (6).

        With (*) each of several processes trains partitions of its own. Their weights are gathered after as many partitions as
        there are processes, and the test rows, which need all of them, come last.
        """
        stretches, tests, ungathered = list[Epochs](), list[Phase](), 0
        last = len(work.partitions) - 1
        independent = work.synthetic_inputs and work.ranks > 1
        rank, ranks = (0, 1) if independent else (work.rank, work.ranks)
        for p, part in enumerate(work.partitions):
            test = Phase(
                kind=PhaseKind.TEST, partition=p, rows=work.test_rows, batch=part.micro_batch, micro_batch=part.micro_batch,
                independent=independent,
            )  # fmt: skip
            train = replace(
                test, kind=PhaseKind.TRAIN, rows=work.train_rows, batch=part.batch_size, shuffle=work.shuffle,
                epochs=part.epochs, views=work.views, rank=rank, ranks=ranks,
                elsewhere=independent and p % work.ranks != work.rank,
            )  # fmt: skip
            tests += [test] * bool(work.test_rows)
            following = tests[-1:] if not independent else tests if p == last else []
            if p < last:
                # A frozen partition never learned its labels: the next one must see its real outputs.
                outputs = PhaseKind.DRAW if work.synthetic_inputs and part.trainable else PhaseKind.CACHE
                away = independent and outputs is PhaseKind.DRAW and (p + 1) % work.ranks != work.rank
                cached = replace(test, kind=outputs, rows=work.train_rows, elsewhere=away and work.partitions[p + 1].trainable)
                following = [*(replace(cached, view=view) for view in range(work.views)), *following]
            if independent:
                # Synthetic labels, unlike a frozen partition's outputs, are drawn again by a run that goes on from here.
                ends = p == last or (part.trainable and (p + 1) % work.ranks == 0)
                gather = Phase(
                    kind=PhaseKind.GATHER, partition=ungathered, through=p, rows=1, batch=1, micro_batch=1, elsewhere=not ends,
                    independent=True,
                )  # fmt: skip
                following, ungathered = [gather, *following], p + 1 if ends else ungathered
            every, epochs = work.tests.epochs if p == last else None, part.epochs if part.trainable else 0
            stretches.append(Epochs(train=train, epochs=epochs, following=tuple(following), every=every))
        return Phases([*stretches, *recovery_phases(work)])

    def loss(self, targets: Targets) -> PartitionLoss | None:
        """Returns the loss of (1) for an inner partition, and the true loss for the last (4)."""
        return super().loss(targets) or OBJECTIVES[targets.config.objective_name](targets)

    def contradictions(self, config: Config) -> Iterator[str]:
        if config.kappa is not None and config.objective_name != "mse":
            yield f"--kappa goes with --objective mse; found --objective {config.objective_name}"
        if config.prototype_scale is not None and config.objective_name not in WITH_DIRECTIONS:
            directions = " or ".join(WITH_DIRECTIONS)
            yield f"--prototype-scale goes with --objective {directions}; found --objective {config.objective_name}"
        if config.views > 1 and config.sil_inputs == "synthetic":
            yield "--cached-views goes with --sil-inputs cached. Leave one of the two out"
        for name in () if config.recovery_epochs else given_of(Recovery, config):
            yield f"{flag_of(name)} goes with --recovery-epochs only. Leave it out"
        if config.ema is not None and config.recovery_epochs:
            yield "--ema does not go with --recovery-epochs, which begins with an optimizer of its own. Leave one out"

    def trains_independently(self, config: Config) -> bool:
        return config.sil_inputs == "synthetic"

    def shuffles(self, config: Config) -> bool:
        """False for the paper's objective, which reads rows in one order."""
        return config.objective_name != "mse"

    def refuse_model(self, chain: Chain, classes: int, splits: Sequence[Split], loss: LossFunction | None) -> None:
        super().refuse_model(chain, classes, splits, loss)
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
                    "method sil trains inner partitions on the labels as they are, and the model's own loss takes others "
                    "(shifted by a position?). Give labels that are shifted already and a function (output, labels) -> loss, "
                    "or use --method auto."
                )

    def why_no_cut_after(self, config: Config, pack: RowPack, shape: tuple[int, ...], label_shape: tuple[int, ...]) -> str:
        if not (pack.why_not or pack.is_one) and config.sil_inputs == "synthetic":
            return "other tensors go past it, and synthetic inputs stand for one tensor alone (--sil-inputs synthetic)"
        return pack.why_not or why_unsuited(config.objective_name, shape, label_shape)

    def idle_options(self, config: Config, partitions: int) -> list[str]:
        given = list(map(flag_of, given_of(Sil, config)))
        if given and partitions == 1:
            return [f"without effect on one partition, which has the true loss: {', '.join(given)}"]
        spare, inner = len(config.prototype_scales) - max(1, partitions - 1), partitions - 1
        return [f"--prototype-scale: the last {spare} without effect on {inner} inner partition(s)"] if spare > 0 else []


SIL = SilMethod()
