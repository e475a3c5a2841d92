"""The loss that a run takes where the user gives none, and the scores that its accuracy is counted from.

Classes stand in the last dimension of an output: (rows, classes), or (rows, T, classes) where every position has a
label of its own. torch's own cross-entropy expects them in dimension 1, which a language model's output has not.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(output (rows, ...), labels (rows, ...)) -> mean loss over the rows, a scalar. What else it may be: see `Trainer`."""
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
    """Mean cross-entropy over all positions: output (rows, T, classes), labels (rows, T)."""
    return F.cross_entropy(output.flatten(0, -2), labels.flatten())


def regression(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean squared error of outputs (rows, 1) or (rows,) to labels (rows,)."""
    return (output.reshape(len(output)) - labels).square().mean()


def scores_of(output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(scores (n, classes), labels (n,)): one row for each label. None where the output gives no scores for them."""
    if labels.is_floating_point() or output.ndim < 2 or output.shape[:-1] != labels.shape:
        return None
    return output.flatten(0, -2), labels.flatten()
