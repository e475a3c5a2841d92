"""FORWARD and BACKWARD of a pair of scores and the common partition, on the rows that are labelled with one of the two.

    F0.m   common: x -> h, with a graph                        B2.m  score 2 of h, the loss of the pair; gradients of h, s1
    F1.m   score 1: h -> s1, with a graph                      B1.m  from the gradient of s1; gradient of h
                                                               B0.m  from the sum of both gradients of h

Rows of an update wait on the device, from its first pair to its last. See methods/separable.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from seqpart.data.reader import Batch
from seqpart.device.compiler import back_propagate
from seqpart.model.losses import element_pair
from seqpart.model.packs import Pack
from seqpart.runtime.graph_offload import apart_from
from seqpart.runtime.partition import Partition
from seqpart.schedule.phase import Phase
from seqpart.schedule.steps import Step


@dataclass(kw_only=True, slots=True)
class Elements:
    """Runs pairs of scores. loaded: partitions on the device. read: returns the next rows of a phase, with their labels. run:
    a partition's forward. tell: takes the loss of some rows, and how many of the update's rows they are."""

    loaded: Mapping[int, Partition]
    read: Callable[[Step], tuple[Batch, Pack, torch.Tensor]]
    done: Callable[[Batch], None]
    run: Callable[[Step, Pack], Pack]
    add_loss: Callable[[torch.Tensor, int], None]
    _rows: dict[int, tuple[Pack, torch.Tensor]] = field(default_factory=dict)
    """(rows, labels) of the current update by micro-batch."""
    _is_first: torch.Tensor | None = None
    """Boolean per row of the pair: labelled with the first of the two; None if the pair has no rows."""
    _common: torch.Tensor | None = None
    _score: torch.Tensor | None = None
    """The outputs of FORWARD, the common value and the first score, with their graphs."""
    _entered: torch.Tensor | None = None
    """The common value as the first score took it."""
    _handed: torch.Tensor | None = None
    """The gradient of the common value: the second score's, then the sum."""
    _score_gradient: torch.Tensor | None = None

    def forward(self, step: Step, phase: Phase) -> int:
        """Runs FORWARD. Returns the bytes that were read."""
        if step.partition != phase.partition:
            if self._is_first is not None:
                self._entered, (self._score,) = self._through(step)
            return 0
        nbytes = self._bring(step)
        assert step.micro_batch is not None
        taken, labels = self._rows[step.micro_batch]
        first, second = (p - phase.partition - 1 for p in self._pair(phase))
        chosen = ((labels == first) | (labels == second)).nonzero().squeeze(1)
        if (first, second) == (0, 1):
            self.add_loss(labels.new_zeros((), dtype=torch.float32), len(labels))
        self._is_first = labels[chosen] == first if len(chosen) else None
        if self._is_first is not None:
            own = {number: x.index_select(0, chosen) for number, x in taken.items()}
            (self._common,) = self.run(step, own).values()
        return nbytes

    def backward(self, step: Step, phase: Phase, update_rows: int) -> None:
        if self._is_first is None:
            return
        first, second = self._pair(phase)
        if step.partition == second:
            self._backward_from_loss(step, update_rows)
        elif step.partition == first:
            assert self._score is not None and self._score_gradient is not None
            self._propagate(step, self._score, self._score_gradient, self._entered)
            self._score = self._score_gradient = self._entered = None
        else:
            assert self._common is not None
            if self._handed is not None:  # else nothing in it learns
                self._propagate(step, self._common, self._handed, None)
            self._common = self._handed = None

    def _backward_from_loss(self, step: Step, update_rows: int) -> None:
        assert self._score is not None and self._is_first is not None
        entered, (score,) = self._through(step)
        other = self._score.detach().requires_grad_()
        loss = element_pair(other, score, self._is_first)
        self.add_loss(loss.detach(), 0)
        self._propagate(step, loss, torch.full_like(loss, 1 / update_rows), entered)
        self._score_gradient = other.grad

    def _through(self, step: Step) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Runs a score. Returns (the common value as its input, its outputs)."""
        assert self._common is not None
        entered = self._common.detach().requires_grad_(self._common.requires_grad)
        (value,) = self.loaded[step.partition].entering
        return entered, [*self.run(step, {value.number: entered}).values()]

    def _propagate(self, step: Step, root: torch.Tensor, gradient: torch.Tensor, entered: torch.Tensor | None) -> None:
        self.loaded[step.partition].finish_state()  # waits for gradients of earlier pairs, to which these are added
        if root.requires_grad:
            back_propagate([root], [gradient])
        arrived: dict[int, torch.Tensor] = {}
        if entered is not None and entered.grad is not None:
            arrived = apart_from(frozenset(), {0: entered.grad})
        self.loaded[step.partition].unalias_gradients(arrived.values())
        for gradient in arrived.values():
            self._handed = gradient if self._handed is None else self._handed.add_(gradient)

    def _pair(self, phase: Phase) -> list[int]:
        return sorted(p for p in self.loaded if p != phase.partition)

    def _bring(self, step: Step) -> int:
        if step.micro_batch in self._rows:
            return 0
        batch, taken, labels = self.read(step)
        assert step.micro_batch is not None
        own = {number: x.clone() if x.data_ptr() == batch.x.data_ptr() else x for number, x in taken.items()}
        self._rows[step.micro_batch] = own, labels
        self.done(batch)
        return batch.x.nbytes

    def end_update(self) -> None:
        """Frees everything when an update is over or given up."""
        self._rows.clear()
        self._is_first = self._common = self._score = self._entered = self._score_gradient = self._handed = None
