"""`sil`: partitions trained one after the other against synthetic intermediate labels.

C. V. Karadağ and N. Topaloğlu, "Partitioned Neural Network Training via Synthetic Intermediate Labels" (2024),
section 2. Steps, as the comments below number them:

    (1) for every cut draw SIL[i, j] ~ kappa * U(0, 1), (boundary size, classes), once          eq. 1
    (2) train partition 0 against column SIL[:, label], nothing else on the device
    (3) one forward pass: its outputs are the next partition's inputs
    (4) the same for each partition; the last one has the true labels
    (5) joined, the partitions are the network
    (6) recovery: the left side once more, against the true loss through the frozen right side        section 5
"""

from dataclasses import replace

import torch
import torch.nn.functional as F

from seqpart.device import keyed_seed
from seqpart.errors import OptionError
from seqpart.methods.exact import recovery_phases
from seqpart.methods.method import Method, PartitionLoss, Targets, TrueLoss, Workload, with_tests
from seqpart.schedule import Phase, PhaseKind

OBJECTIVES = ("prototype", "mse")


def sil_phases(work: Workload) -> tuple[Phase, ...]:
    """Per partition: its epochs (2), the outputs for the next (3), the test rows through it; then recovery (6)."""
    phases: list[Phase] = []
    last = len(work.partitions) - 1
    for p, part in enumerate(work.partitions):
        test = Phase(
            kind=PhaseKind.TEST, partition=p, rows=work.test_rows, batch=part.micro_batch, micro_batch=part.micro_batch
        )
        train = replace(
            test, kind=PhaseKind.TRAIN, rows=work.train_rows, batch=part.batch_size, shuffle=work.shuffle, epochs=part.epochs
        )
        passes = [replace(train, epoch=e + 1) for e in range(part.epochs if part.trainable else 0)]
        if p < last:
            phases += [*passes, replace(test, kind=PhaseKind.CACHE, rows=work.train_rows), test]
        else:
            phases += with_tests(passes, [test], work.test_every)
    return (*phases, *recovery_phases(work))


class _Regression:
    """Mean squared error to kappa * U(0, 1): the paper's objective, eq. 1."""

    def __init__(self, targets: Targets) -> None:
        size = torch.Size(targets.output_shape).numel()
        sil = torch.rand(size, targets.classes, generator=_generator(targets))
        self._sil = sil.mul_(targets.kappa).to(targets.device)
        self.nbytes = self._sil.nbytes

    def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # Not F.mse_loss: on CPU its scalar keeps a buffer as large as the output alive, which no fake tensor shows.
        return (output.flatten(1) - self._sil[:, labels].T).square().mean()

    def scores(self, output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # The nearest column wins: -|h - s|^2 without |h|^2, which is the same for every class.
        return 2 * output.flatten(1) @ self._sil - self._sil.square().sum(0), labels


class _Prototypes:
    """Cross-entropy to fixed random unit directions, one per class: logits = scale * cos(direction, LayerNorm(h)).

    LayerNorm without learned weights keeps the logits' size independent of depth and width. Our own objective, not
    the paper's: it reaches full training's accuracy where regression stays several points below.
    """

    def __init__(self, targets: Targets) -> None:
        size = torch.Size(targets.output_shape).numel()
        directions = torch.randn(size, targets.classes, generator=_generator(targets))
        directions *= targets.prototype_scale / directions.norm(dim=0) / size**0.5
        self._directions = directions.to(targets.device)
        self._size = (size,)
        self.nbytes = self._directions.nbytes

    def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self._logits(output), labels)

    def scores(self, output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._logits(output), labels

    def _logits(self, output: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(output.flatten(1), self._size) @ self._directions


def _generator(targets: Targets) -> torch.Generator:
    return torch.Generator().manual_seed(keyed_seed(targets.seed, "sil", targets.partition))


def sil_loss(targets: Targets) -> PartitionLoss:
    """(1) for an inner partition, the true loss for the last (4)."""
    if targets.partition == targets.partitions - 1:
        return TrueLoss(targets.final_loss)
    if targets.objective == "mse":
        return _Regression(targets)
    if targets.objective == "prototype":
        return _Prototypes(targets)
    raise OptionError(f"--objective: expected one of {', '.join(OBJECTIVES)}; found {targets.objective!r}.")


SIL = Method(name="sil", exact=False, cuts=True, phases=sil_phases, loss=sil_loss)
