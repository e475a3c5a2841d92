"""Losses with names, the default loss of a run, and the scores that its accuracy is counted from.

Classes are the last dimension of an output: (rows, classes), or (rows, T, classes) where every position has a label of its
own. torch's own cross-entropy expects them in dimension 1, where a language model does not have them; a convolution has,
(rows, classes, H, W) for labels (rows, H, W), and is judged so where the shapes say it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from seqpart.errors import DataError, ModelError

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(output (rows, ...), labels (rows, ...)) -> mean loss over the rows, a scalar. What else it may be: see `Trainer`."""
LossName = Literal["cross-entropy", "psl", "mse", "bce"]
LossSource = LossFunction | Literal["model"] | None
"""A function; "model": the loss that the model computes itself; None: the loss that the settings name."""
LossChoice = LossSource | LossName
"""A `LossSource`, or a loss by its name; None: the loss that suits the labels."""
IGNORED = -100
"""The label that torch's cross-entropy leaves out: its own default for `ignore_index`."""


def label_dtype(labels: torch.Tensor) -> torch.dtype:
    """Type of the labels that a loss gets: floats as they are, classes as int64, however narrow they are kept."""
    return labels.dtype if labels.is_floating_point() else torch.int64


def loss_named(name: LossName | None, labels: torch.Tensor, classes: int, smoothing: float = 0.0) -> LossFunction:
    """Returns the named loss for these labels: floats (rows, ...), classes of rows (rows,) or positions (rows, T, ...). For
    cross-entropy floats are the probabilities of classes.

    None: mse for floats, cross-entropy for classes. smoothing: the share of every label that all classes get alike. Raises
    DataError where the labels are of the other kind, and where smoothing goes with no cross-entropy.
    """
    found = _named(name, labels, classes)
    if not smoothing:
        return found
    if found not in (F.cross_entropy, token_cross_entropy):
        raise DataError("--label-smoothing goes with cross-entropy, and the loss is another. Leave it out.")
    return functools.partial(found, label_smoothing=smoothing)


def plain_of(loss: Any) -> Any:
    """Returns a loss without its label smoothing."""
    smooth = isinstance(loss, functools.partial) and not loss.args and set(loss.keywords) == {"label_smoothing"}
    return loss.func if smooth else loss


def _named(name: LossName | None, labels: torch.Tensor, classes: int) -> LossFunction:
    if name == "bce":
        _refuse_beyond_one(labels)
        return multi_label
    if name == "cross-entropy" and labels.is_floating_point() and labels.ndim > 1:  # of probabilities
        return F.cross_entropy
    if name is not None and (name == "mse") == bool(classes):
        expected, found = ("floats", "classes (integers)") if classes else ("classes (integers)", "floats")
        raise DataError(f"--loss {name} needs {expected} as labels; found {found}. Leave --loss out, or give another.")
    if not classes:
        return regression
    if name == "psl":
        return partially_separable
    return token_cross_entropy if labels.ndim > 1 else F.cross_entropy


def _refuse_beyond_one(labels: torch.Tensor) -> None:
    for piece in torch.split(labels.flatten(), 1 << 20):
        outside = piece[(piece < 0) | (piece > 1)]
        if len(outside):
            raise DataError(
                f"--loss bce needs labels from 0 to 1, as many as the network has outputs; found {outside[0].item():g}. Where "
                "some are not to count, give a function (output, labels) -> (sum, count)."
            )


def classes_first(shape: tuple[int, ...], positions: tuple[int, ...]) -> bool:
    """True if one row's outputs have the classes of each position first, (classes, H, W), and not last."""
    return shape[1:] == positions and shape[:-1] != positions


def token_cross_entropy(output: torch.Tensor, labels: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Mean cross-entropy over all positions: output (rows, T, ..., classes) or (rows, classes, H, W), labels (rows, T, ...) or
    (rows, H, W)."""
    if classes_first(tuple(output.shape[1:]), tuple(labels.shape[1:])):
        return F.cross_entropy(output, labels, label_smoothing=label_smoothing)
    return cross_entropy(output.flatten(0, -2), labels.flatten(), label_smoothing=label_smoothing)


_CHUNK = 8 << 20
"""Bytes of the scores of one chunk."""


def cross_entropy(
    scores: torch.Tensor, labels: torch.Tensor, reduction: Literal["mean", "sum"] = "mean", ignored: int = IGNORED,
    label_smoothing: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """F.cross_entropy of scores (n, classes) and labels (n,), bit for bit: in chunks where classes are many, unless labels are
    smoothed or another label does not count."""
    whole = bool(label_smoothing) or ignored != IGNORED or scores.nbytes <= 2 * _CHUNK
    if whole or torch.is_autocast_enabled(scores.device.type):  # autocast computes it in another type
        return F.cross_entropy(scores, labels, ignore_index=ignored, reduction=reduction, label_smoothing=label_smoothing)
    return cross_entropy_in_chunks(scores, labels, reduction=reduction)


def cross_entropy_in_chunks(
    scores: torch.Tensor, labels: torch.Tensor, nbytes: int = _CHUNK, reduction: Literal["mean", "sum"] = "mean"
) -> torch.Tensor:
    """F.cross_entropy of scores (n, classes) and labels (n,), bit for bit, with workspace of `nbytes` beside the scores and, in
    backward, their gradient, instead of three times the scores."""
    loss: torch.Tensor = _InChunks.apply(scores, labels, max(1, nbytes * len(scores) // max(1, scores.nbytes)), reduction)
    return loss


class _InChunks(torch.autograd.Function):
    """Cross-entropy that recomputes log-probabilities in backward instead of keeping them."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, labels: torch.Tensor, rows: int, reduction: str) -> torch.Tensor:
        ctx.rows, ctx.is_mean = rows, reduction == "mean"
        ctx.save_for_backward(scores, labels)
        found = [
            F.log_softmax(part, -1).gather(1, own.clamp(min=0).unsqueeze(1))
            for part, own in zip(torch.split(scores, rows), torch.split(labels, rows), strict=True)
        ]
        # As if every label were class 0 of one: then torch adds them up in its own order.
        return F.nll_loss(torch.cat(found), labels.eq(IGNORED) * IGNORED, reduction=reduction)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        scores, labels = ctx.saved_tensors
        counted = labels.ne(IGNORED)
        each = torch.where(counted, -(grads[0] / counted.sum().to(scores.dtype) if ctx.is_mean else grads[0]), 0.0)
        found = torch.empty_like(scores)
        parts = (torch.split(tensor, ctx.rows) for tensor in (scores, labels, each, found))
        for part, own, gradient, into in zip(*parts, strict=True):
            chosen = torch.zeros_like(part).scatter_(1, own.clamp(min=0).unsqueeze(1), gradient.unsqueeze(1))
            into.copy_(torch._log_softmax_backward_data(chosen, F.log_softmax(part, -1), -1, part.dtype))
        return found, None, None, None


LINEAR_FROM = 10.0
"""Difference of two scores above which an element of the partially-separable loss continues as its tangent. There it is 22,026,
and one row's gradient as large: without the bound a single row that is far off would dominate an update."""


def partially_separable(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over rows of sum_{j != y} exp(c_j - c_y): P. Raynaud, D. Orban, J. Bigeon, "Partially-separable loss to parallelize
    partitioned neural network training" (2023), equation 6b. output (rows, ..., classes) or
    (rows, classes, H, W), labels (rows, ...).

    With j = y in the sum, as in their equation 6a, it would be larger by 1: exp(cross-entropy), with the same gradient. The
    gradient of each element is as large as the element, so above a difference of LINEAR_FROM it continues as its tangent: it
    stays finite, convex and a function of two scores alone, with a gradient of at most exp(LINEAR_FROM). Computed in float32 at
    least. Labels of -100 do not count.
    """
    first = classes_first(tuple(output.shape[1:]), tuple(labels.shape[1:]))
    scores, own = (output.movedim(1, -1) if first else output).flatten(0, -2), labels.flatten()
    with torch.autocast(output.device.type, enabled=False):
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        counted = own.ne(IGNORED)
        place = own.clamp(min=0).unsqueeze(1)
        # The label's own element is exp(-inf); subtracting its 1 from the sum would lose small elements.
        beyond = (scores - scores.gather(1, place)).scatter(1, place, -torch.inf)
        rows = separable_elements(beyond).sum(1)
        return rows.where(counted, 0.0).sum() / counted.sum()


OF_CLASSES: tuple[LossFunction, ...] = (F.cross_entropy, token_cross_entropy, partially_separable)
"""Our losses, and torch's cross-entropy, that take one score for each class."""
OF_MODULES = nn.CrossEntropyLoss.forward, nn.NLLLoss.forward
"""Forwards of torch's own modules, which subclasses may inherit unchanged."""


def refuse_unlike(loss: LossFunction, shape: tuple[int, ...], classes: int, labels: torch.Tensor) -> None:
    """Raises DataError where a loss of ours, or torch's cross-entropy, cannot judge outputs of `shape` (one row's) by `labels`
    of `classes` classes."""
    positions, loss = tuple(labels.shape[1:]), plain_of(loss)
    of_classes = loss in OF_CLASSES or getattr(type(loss), "forward", None) in OF_MODULES
    if of_classes and labels.is_floating_point() and positions != shape:
        raise DataError(
            f"the loss takes scores of classes, and a row's labels are {labels.dtype} of shape {positions}. Give classes as "
            f"integers (labels.long()), or the probabilities of all, of shape {shape}."
        )
    if of_classes and positions == (1,) and len(shape) == 1:
        raise DataError("the loss takes one class a row, and labels have the shape (rows, 1). Give labels.squeeze(1).")
    if loss in OF_NUMBERS and without_ones(shape) != without_ones(positions):
        needed = f"outputs of the shape {positions} of a row's labels" if positions else "one output per row"
        kind = "a regression needs" if loss is regression else "--loss bce needs"
        hint = " Classes are integers: labels.long()." if loss is regression and not positions else ""
        raise DataError(f"{kind} {needed}; the network ends with shape {shape}.{hint}")
    if loss in OF_CLASSES[1:] and len(positions) > 1 and shape[1:] == positions == shape[:-1]:
        raise DataError(
            f"the network ends with outputs of shape {shape} for labels of shape {positions}, of which the first or the last "
            "dimension may be the classes. Give a function (output, labels) -> loss, such as torch's cross_entropy."
        )
    found = shape[0] if shape and classes_first(shape, positions) else (shape or (0,))[-1]
    if of_classes and found < classes:
        one_less = found == classes - 1 and labels.numel() and labels.min() > 0
        raise DataError(
            f"the network ends with outputs of shape {shape}, and the labels have {classes} classes, counted from 0. "
            f"Let the last block have {classes} outputs{', or take 1 from every label: none is 0' if one_less else ''}."
        )


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions larger than 1: equal for two shapes of the same numbers in the same order."""
    return tuple(size for size in shape if size != 1)


def element_pair(first: torch.Tensor, second: torch.Tensor, is_first: torch.Tensor) -> torch.Tensor:
    """Sum over rows, labelled with either of two classes, of their elements of the partially-separable loss with the other one.

    first, second: scores (rows, 1); is_first (rows,): True if the label is the first class.
    """
    with torch.autocast(first.device.type, enabled=False):
        apart = (second - first).flatten().to(torch.promote_types(first.dtype, torch.float32))
        return separable_elements(apart.where(is_first, -apart)).sum()


def separable_elements(beyond: torch.Tensor) -> torch.Tensor:
    """exp of differences of scores, and its tangent from LINEAR_FROM on."""
    return beyond.clamp(max=LINEAR_FROM).exp() * (1 + F.relu(beyond - LINEAR_FROM))


def regression(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean squared error of outputs (rows, ...) to labels (rows, ...), of the same shape except for dimensions of 1: torch's
    own if a row's label has a shape."""
    if labels.ndim > 1:
        return F.mse_loss(output.reshape(labels.shape), labels)
    return (output.reshape(len(output)) - labels).square().mean()


def multi_label(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over rows and labels of the binary cross-entropy of outputs (rows, ...) before their sigmoid, labels from 0 to 1."""
    scores = output.to(torch.promote_types(output.dtype, torch.float32)).reshape(labels.shape)
    return F.binary_cross_entropy_with_logits(scores, labels.to(scores.dtype))


OF_NUMBERS: tuple[LossFunction, ...] = (regression, multi_label)
"""Our losses that take one output for each number of a label."""


def scores_of(output: torch.Tensor, labels: torch.Tensor, *, first: bool = False) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns (scores (n, classes, ...), labels (n, ...)); None where the output has no scores of several classes.

    first: True for torch's own loss, which has classes in dimension 1 even where the last may be meant.
    """
    if labels.is_floating_point() or output.dtype == torch.bool or output.ndim < 2:
        return None
    if output.shape[:-1] == labels.shape and not (first and output.ndim > 2):
        return (output.flatten(0, -2), labels.flatten()) if output.shape[-1] > 1 else None
    return (output, labels) if output.shape[:1] + output.shape[2:] == labels.shape and output.shape[1] > 1 else None


class SeparableLinear(nn.Module):
    """A linear layer in `groups`: output group g is a linear function of input group g alone, with 1/groups of the weights.

    Maps (..., in_features) to (..., out_features). Groups lie one after the other, as channels do in a grouped convolution and
    in the flattened output of a convolution with groups * a kernels. weight (out_features, in_features / groups), bias
    (out_features,), initialized as those of nn.Linear(in_features / groups, out_features / groups) are. Raises ModelError
    where groups do not divide both.
    """

    def __init__(self, in_features: int, out_features: int, groups: int, bias: bool = True) -> None:
        super().__init__()
        if groups < 1 or in_features % groups or out_features % groups:
            raise ModelError(
                f"SeparableLinear: expected a number of groups that divides {in_features} inputs and {out_features} outputs; "
                f"found {groups}."
            )
        self.in_features, self.out_features, self.groups = in_features, out_features, groups
        self.weight = nn.Parameter(torch.empty(out_features, in_features // groups))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(max(1, self.in_features // self.groups))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape, groups = x.shape[:-1], self.groups
        rows = x.reshape(-1, groups, self.in_features // groups).transpose(0, 1)  # (groups, rows, inputs of one)
        weight = self.weight.view(groups, -1, self.in_features // groups).transpose(1, 2)
        bias = self.bias
        found = torch.bmm(rows, weight) if bias is None else torch.baddbmm(bias.view(groups, 1, -1), rows, weight)
        return found.transpose(0, 1).reshape(*shape, self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, groups={self.groups}"
