"""Cross-entropy over chunks of positions, so that the logits of a micro-batch never exist whole, nor their gradient.

The network ends before its last linear layer, and the loss takes that layer's inputs, the states. For one chunk after the other
it computes the logits, the loss and their gradients, and frees the logits. Gradients and loss are bit for bit those of

    states, targets = states.flatten(0, -2), targets.flatten()
    parts = zip(states.chunk(n), targets.chunk(n))
    loss = sum(F.cross_entropy(head(one), own, reduction="sum") for one, own in parts) / (targets != -100).sum()
    loss.backward()

which keeps the logits of all chunks. Autograd goes through the chunks from the last to the first, and so does this: the head's
gradient is a sum over them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from seqpart.model.losses import IGNORED, cross_entropy


@dataclass(frozen=True, slots=True)
class Head:
    """The last linear layer of a model, and what follows it position by position."""

    name: str
    """Path in the model of the layer, or of its weight."""
    shape: tuple[int, int]
    """Numbers of inputs and of classes."""
    parameters: Callable[[], Sequence[nn.Parameter]]
    select: Callable[[torch.Tensor], torch.Tensor]
    """Chooses the positions that the loss looks at, of states (rows, ..., inputs)."""
    scores: Callable[[torch.Tensor], torch.Tensor]
    """Scores (n, classes) of states (n, inputs)."""

    def note(self, chunks: int) -> str:
        """What a plan says of it."""
        return f"{self.name} and the loss go over {chunks} chunks of positions: the logits of a micro-batch never exist whole"


class LossInChunks:
    """(states (rows, ..., inputs), labels (rows, ...)) -> mean cross-entropy of the labels that count."""

    def __init__(
        self, head: Head, targets: Callable[[torch.Tensor], torch.Tensor | None], chunks: int, ignored: int = IGNORED,
        smoothing: float = 0.0, in_tests: float | None = None,
    ) -> None:  # fmt: skip
        """targets: of labels, one for each position that the head selects. ignored: the label that does not count. in_tests:
        smoothing where no gradients are recorded, if other."""
        self.head, self.chunks, self.ignored, self._targets = head, chunks, ignored, targets
        self._smoothing = {True: smoothing, False: smoothing if in_tests is None else in_tests}
        self._best: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, states: torch.Tensor, labels: torch.Tensor, part: float = 1.0) -> torch.Tensor:
        """part: the loss's factor in its update, which backward multiplies it by: gradients are computed with it already."""
        selected, targets = self.head.select(states).flatten(0, -2), self._targets(labels)
        assert targets is not None
        targets, parameters = targets.flatten(), self.head.parameters()
        learns = torch.is_grad_enabled()
        loss, best = _Chunks.apply(self, part, learns, self._smoothing[learns], targets, selected, *parameters)
        self._best = best, targets.where(targets != self.ignored, -1)
        found: torch.Tensor = loss
        return found

    def scores(self, states: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns (likeliest classes, labels) of the positions of the last call; labels that do not count are below 0."""
        found, self._best = self._best, None
        return found


class _Chunks(torch.autograd.Function):
    """Computes the gradients in its forward pass, where the logits of a chunk are there."""

    @staticmethod
    def forward(
        ctx: Any, loss: LossInChunks, part: float, learns: bool, smoothing: float, targets: torch.Tensor,
        states: torch.Tensor, *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        wanted = [learns and needed for needed in ctx.needs_input_grad[5:]]
        count = targets.ne(loss.ignored).sum().clamp(min=1)  # a micro-batch in which nothing counts has gradients of zero
        gradient = torch.empty_like(states) if wanted[0] else None
        others: list[torch.Tensor | None] = [None] * len(parameters)
        sums, best = list[torch.Tensor](), list[torch.Tensor]()
        pieces = (torch.chunk(tensor, loss.chunks) for tensor in (states, targets, states if gradient is None else gradient))
        for own, labels, into in reversed([*zip(*pieces, strict=True)]):
            with torch.set_grad_enabled(any(wanted)):
                leaf = own.detach().requires_grad_(wanted[0])
                scores = loss.head.scores(leaf)
                total = cross_entropy(scores, labels, "sum", loss.ignored, smoothing)
            best.append(scores.detach().argmax(1))
            sums.append(total.detach())
            del scores
            if not any(wanted):
                continue
            inputs = [one for one, needed in zip((leaf, *parameters), wanted, strict=True) if needed]
            found = iter(torch.autograd.grad(total, inputs, torch.full_like(sums[-1], part) / count))
            if gradient is not None:
                into.copy_(next(found))
            for place, needed in enumerate(wanted[1:]):
                if needed:
                    before = others[place]
                    others[place] = next(found) if before is None else before.add_(next(found))
            del total, leaf, inputs, found
        ctx.found = gradient, *others
        found_best = torch.cat(best[::-1])
        ctx.mark_non_differentiable(found_best)
        total_of_all, *others_of_all = sums[::-1]
        return sum(others_of_all, start=total_of_all) / count, found_best

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[Any, ...]:
        found, ctx.found = ctx.found, None  # else the parameters would get copies
        return None, None, None, None, None, *found
