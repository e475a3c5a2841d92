"""The loss that a run takes where the user gives none, and the scores that its accuracy is counted from.

Classes stand in the last dimension of an output: (rows, classes), or (rows, T, classes) where every position has a
label of its own. torch's own cross-entropy expects them in dimension 1, which a language model's output has not.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(output (rows, ...), labels (rows, ...)) -> mean loss over the rows, a scalar. What else it may be: see `Trainer`."""
LossChoice = LossFunction | Literal["model"] | None
"""A function; the one that the model computes itself; None: what suits the labels."""
IGNORED = -100
"""The label that torch's cross-entropy leaves out: its own default for `ignore_index`."""


def label_dtype(labels: torch.Tensor) -> torch.dtype:
    """The type in which a loss gets labels: floats as they are, classes as int64, however narrow they are kept."""
    return labels.dtype if labels.is_floating_point() else torch.int64


def default_loss(labels: torch.Tensor, classes: int) -> LossFunction:
    """The loss for labels of this kind: floats, classes of rows (rows,), or classes of positions (rows, T, ...)."""
    if not classes:
        return regression
    return token_cross_entropy if labels.ndim > 1 else F.cross_entropy


def token_cross_entropy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over all positions: output (rows, T, classes), labels (rows, T). In chunks where it is large."""
    scores, ours = output.flatten(0, -2), labels.flatten()
    if output.nbytes <= 2 * _CHUNK or torch.is_autocast_enabled(output.device.type):  # autocast computes it in another type
        return F.cross_entropy(scores, ours)
    return cross_entropy_in_chunks(scores, ours)


_CHUNK = 8 << 20
"""Bytes of the scores that are looked at together."""


def cross_entropy_in_chunks(scores: torch.Tensor, labels: torch.Tensor, nbytes: int = _CHUNK) -> torch.Tensor:
    """F.cross_entropy of scores (n, classes) and labels (n,), bit for bit, with `nbytes` at work beside the scores and, in
    backward, their gradient; else it is three times the scores."""
    loss: torch.Tensor = _InChunks.apply(scores, labels, max(1, nbytes * len(scores) // max(1, scores.nbytes)))
    return loss


class _InChunks(torch.autograd.Function):
    """Logarithms of probabilities are computed a second time in backward, instead of being kept."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, labels: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.rows = rows
        ctx.save_for_backward(scores, labels)
        found = [
            F.log_softmax(part, -1).gather(1, own.clamp(min=0).unsqueeze(1))
            for part, own in zip(torch.split(scores, rows), torch.split(labels, rows), strict=True)
        ]
        # As if every label were class 0 of one: then torch adds them up in its own order.
        return F.nll_loss(torch.cat(found), labels.eq(IGNORED) * IGNORED)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        scores, labels = ctx.saved_tensors
        counted = labels.ne(IGNORED)
        each = torch.where(counted, -(grads[0] / counted.sum().to(scores.dtype)), 0.0)
        found = torch.empty_like(scores)
        parts = (torch.split(tensor, ctx.rows) for tensor in (scores, labels, each, found))
        for part, own, gradient, into in zip(*parts, strict=True):
            chosen = torch.zeros_like(part).scatter_(1, own.clamp(min=0).unsqueeze(1), gradient.unsqueeze(1))
            into.copy_(torch._log_softmax_backward_data(chosen, F.log_softmax(part, -1), -1, part.dtype))
        return found, None, None


def regression(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean squared error of outputs (rows, 1) or (rows,) to labels (rows,)."""
    return (output.reshape(len(output)) - labels).square().mean()


def scores_of(output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(scores (n, classes), labels (n,)): one row for each label. None where the output gives no scores for them."""
    if labels.is_floating_point() or output.ndim < 2 or output.shape[:-1] != labels.shape:
        return None
    return output.flatten(0, -2), labels.flatten()
