"""Outputs of several tensors: joined in one behind the model's last layer, and given to the loss as the model returned them.

    model -> (scores, {"mean": m, "var": v}, scale) -> joined (rows, width) -> loss(as returned, labels)

So that all between them, from the plan to the comparison of micro-batches, handles one tensor of rows. Numbers are copied, not
changed: parts keep their type, their strides, and the absence of a gradient.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_leaves

from seqpart.capture.program import Ref, by_name, fields_of, holds_fields, leaves, opened, with_fields
from seqpart.errors import ModelError
from seqpart.model.loss_probe import generators_left_alone
from seqpart.model.losses import LossFunction, scores_of
from seqpart.model.reductions import name_of, total_of


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of what a model returned, as columns of the joined tensor."""

    shape: tuple[int, ...]
    """Of the tensor; without its first dimension if that follows the rows."""
    dtype: torch.dtype
    width: int
    """Columns."""
    times: int = 0
    """Its first dimension divided by the rows; 0: its shape does not follow the rows."""
    stride: tuple[int, ...] = ()
    """Where it is not contiguous."""
    used: bool = True
    """True if the loss has a gradient for it."""
    left_out: bool = False
    """True if it compares rows with each other, and the loss does not use it."""

    def taken_from(self, columns: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the tensor from its columns (rows, width). dtype: of the tensor that they were joined in."""
        if self.left_out:
            return columns
        rows, own = columns if self.times else columns[:1], self.dtype
        if not own.is_floating_point and not own.is_complex:
            rows = rows.to(dtype).contiguous().view(_carried(own, dtype)).to(own)
        elif rows.dtype == dtype:
            rows = rows.to(own.to_real())
        rows = rows.contiguous()
        if own.is_complex:
            rows = torch.view_as_complex(rows.reshape(-1, 2))
        shape = (self.times * len(columns), *self.shape) if self.times else self.shape
        found = rows.reshape(shape)
        return found if not self.stride else torch.empty_strided(shape, self.stride, dtype=found.dtype).copy_(found)


def _carried(own: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The type of whole numbers in which `own` lies among floats of type `dtype`, bit by bit."""
    return torch.int64 if own in (torch.int64, torch.uint64) or dtype == torch.float64 else torch.int32


@dataclass(frozen=True, slots=True)
class Returned:
    """What a model returns: its structure with a Ref for each tensor, and these tensors as parts of a joined one."""

    tree: Any
    parts: tuple[Part, ...]
    dtype: torch.dtype
    """Of the joined tensor."""
    extra: int = 0
    """Columns of zeros, by which the output of an evaluation is told from that of training."""

    @property
    def widths(self) -> list[int]:
        return [*(part.width for part in self.parts), self.extra]

    def joined(self, tensors: Sequence[torch.Tensor], rows: int) -> torch.Tensor:
        """Returns (rows, width). Only torch functions, which are recorded as a part of the model's program."""
        columns, parts = [], [part for part in self.parts if not part.left_out]
        for part, tensor in zip(self.parts, tensors, strict=True):
            if part.left_out:
                continue
            if tensor.is_complex():
                tensor = torch.view_as_real(tensor)
            flat = tensor.reshape(rows, -1) if part.times else tensor.reshape(1, -1).expand(rows, -1)
            if not tensor.is_floating_point():
                flat = flat.to(_carried(part.dtype, self.dtype)).contiguous().view(self.dtype)
            columns.append(flat.to(self.dtype))
        if self.extra:
            columns.append(torch.zeros(rows, self.extra, dtype=self.dtype, device=columns[0].device))
        joined: torch.Tensor = _Join.apply(tuple(part.used for part in parts), *columns)
        return joined

    def taken_from(self, joined: torch.Tensor) -> Any:
        """Returns the structure with its tensors."""
        found = list(_Split.apply(joined, self))
        for number, part in enumerate(self.parts):
            if part.left_out:
                found[number] = LeftOut(number)
        return _changed(self.tree, lambda leaf: found[leaf.number] if isinstance(leaf, Ref) else leaf)


class LeftOut:
    """Stands for a tensor that no gradient was found for, and whose rows depend on each other."""

    def __init__(self, number: int) -> None:
        self._number = number

    def _refused(self, *_: Any, **__: Any) -> Any:
        raise ModelError(
            f"tensor {self._number} of what the model returns compares rows with each other, and is kept only where the loss "
            "depends on it. Let the loss compute it from tensors whose first dimension is the rows."
        )

    __getattr__ = __getitem__ = __add__ = __radd__ = __mul__ = __rmul__ = __neg__ = __len__ = __iter__ = _refused

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        next(arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, cls))._refused()


class _Join(torch.autograd.Function):
    """torch.cat along dimension 1, with contiguous gradients for the parts that are used, and none for the others."""

    @staticmethod
    def forward(ctx: Any, used: tuple[bool, ...], *parts: torch.Tensor) -> torch.Tensor:
        ctx.used, ctx.widths = used, [part.shape[1] for part in parts]
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = torch.split(grads[0], ctx.widths, 1)
        own = [part.contiguous() if used else None for part, used in zip(parts, ctx.used, strict=False)]
        return None, *own, *[None] * (len(parts) - len(own))


class _Split(torch.autograd.Function):
    """The tensors of a joined one, each with its own memory."""

    @staticmethod
    def forward(ctx: Any, joined: torch.Tensor, returned: Returned) -> tuple[torch.Tensor, ...]:
        ctx.shape, ctx.dtype, ctx.returned = joined.shape, joined.dtype, returned
        columns = torch.split(joined, returned.widths, 1)
        found = tuple(part.taken_from(own, returned.dtype) for part, own in zip(returned.parts, columns, strict=False))
        ctx.mark_non_differentiable(*(tensor for tensor in found if not (tensor.is_floating_point() or tensor.is_complex())))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = torch.zeros(ctx.shape, dtype=ctx.dtype, device=next(grad.device for grad in grads if grad is not None))
        for part, into, grad in zip(ctx.returned.parts, torch.split(gradient, ctx.returned.widths, 1), grads, strict=False):
            if grad is None or part.left_out or not (part.dtype.is_floating_point or part.dtype.is_complex):
                continue
            grad = torch.view_as_real(grad) if grad.is_complex() else grad
            if part.times:
                into.copy_(grad.reshape(into.shape))
            else:  # the first row stands for all
                into[0].copy_(grad.reshape(-1))
        return gradient, None


class OtherRows(Exception):
    """A dimension that seemed to follow the rows does not: the model is to be recorded again."""


class Outputs:
    """Finds out, while a model is recorded, whether the user's loss takes all that it returns, and joins that then.

    The loss decides: it is tried on what the model returned. One that fails there gets one tensor of it, the logits.

    loss: None if all tensors are taken. tried: the same loss, for labels of the shape and type that follow.
    """

    def __init__(
        self, loss: LossFunction | None, tried: LossFunction | None, label_shape: Sequence[int], label_type: torch.dtype,
        autocast: Callable[[], AbstractContextManager[object]],
    ) -> None:  # fmt: skip
        self._given, self._labels = loss, (tuple(label_shape), label_type)
        self._loss: Any = tried
        self._autocast = autocast
        self._found: dict[bool, Returned] = {}
        """By mode: True for training."""
        self._fixed: set[tuple[bool, int]] = set()
        """(mode, number of a tensor) of those whose first dimension does not follow the rows."""
        self._compares: set[tuple[bool, int]] = set()
        """(mode, number of a tensor) of those that compare rows with each other, and are left out."""
        self._rows = 0
        """Of the run that `_found` is of."""
        self.why_not = ""
        """Why the loss does not take all that the model returns."""

    @property
    def joined(self) -> "LossOfOutputs | None":
        """The loss of joined outputs; None if none were joined."""
        return LossOfOutputs(self._given, self._found) if self._found else None  # type: ignore[arg-type]

    @property
    def loss(self) -> LossFunction:
        """The loss of the chain's output."""
        assert self._given is not None
        return self.joined or self._given

    def prepare(self, found: Any, rows: int, *, training: bool) -> Callable[[], torch.Tensor] | None:
        """Returns a function that joins what a model returned for so many rows; None if the loss is to get one tensor of it.

        Raises ModelError if the loss takes what it returns in training and not what it returns in evaluation, OtherRows.
        """
        if isinstance(found, torch.Tensor) and (training or not self._found):
            return None
        tensors = [leaf for leaf in leaves(opened(found)) if isinstance(leaf, torch.Tensor)]
        if training not in self._found:
            used = self._tried(found, tensors, rows, training)
            if used is None:
                return None
            self._found[training], self._rows = self._described(found, tensors, rows, used, training), rows
        elif rows != self._rows:
            self._compare(tensors, rows, training)
        described = self._found[training]
        return lambda: described.joined(tensors, rows)

    def _tried(self, found: Any, tensors: Sequence[torch.Tensor], rows: int, training: bool) -> list[bool] | None:
        """Tells for each tensor whether the loss has a gradient for it; None where the loss does not take them."""
        if not training and True not in self._found:
            return None
        if self._given is None:
            return [tensor.requires_grad for tensor in tensors]
        own = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        values = iter(own)
        given = _changed(found, lambda leaf: next(values) if isinstance(leaf, torch.Tensor) else leaf)
        shape, dtype = self._labels
        try:
            with self._autocast(), generators_left_alone():
                total = total_of(self._loss(given, torch.zeros((rows, *shape), dtype=dtype)))
            learns = [tensor for tensor in own if tensor.requires_grad]
            grads = iter(torch.autograd.grad(total, learns, allow_unused=True) if total.requires_grad else [None] * len(learns))
            return [tensor.requires_grad and next(grads) is not None for tensor in own]
        except (DataDependentOutputException, DynamicOutputShapeException):  # it came so far; the plan says what is wrong
            return [tensor.requires_grad for tensor in own]
        except Exception as error:
            if training:
                self.why_not = f"{type(error).__name__}: {error}."
                return None
            raise ModelError(
                f"loss {name_of(self._given)}: it takes what the model returns in training, and fails on what it returns in "
                f"evaluation, a {type(found).__name__}: {str(error).splitlines()[0] if str(error) else type(error).__name__}. "
                "Let it take both, or let the model return the same in both."
            ) from error

    def _described(
        self, found: Any, tensors: Sequence[torch.Tensor], rows: int, used: Sequence[bool], training: bool
    ) -> Returned:  # fmt: skip
        floats = [tensor.dtype.to_real() for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
        dtype = torch.float32 if not floats else floats[0]
        for other in floats:
            dtype = torch.promote_types(dtype, other)
        numbers = iter(range(len(tensors)))
        tree = _changed(found, lambda leaf: Ref(next(numbers)) if isinstance(leaf, torch.Tensor) else _plain(leaf))
        parts = [self._part(tensor, rows, dtype, training, n) for n, tensor in enumerate(tensors)]
        described = Returned(tree, tuple(replace(part, used=own) for part, own in zip(parts, used, strict=True)), dtype)
        whole = self._found.get(True)
        if training or whole is None:
            return described
        if repr(whole.tree) == repr(tree) and [_kind(part) for part in whole.parts] == [_kind(part) for part in parts]:
            return whole
        return replace(described, extra=int(sum(described.widths) == sum(whole.widths)))

    def _part(self, tensor: torch.Tensor, rows: int, dtype: torch.dtype, training: bool, number: int) -> Part:
        if (training, number) in self._compares:
            return Part((), tensor.dtype, 0, left_out=True)
        of_rows = tensor.ndim and not tensor.shape[0] % rows and tensor.shape[0] and (training, number) not in self._fixed
        shape = tuple(tensor.shape[1:] if of_rows else tensor.shape)
        times = tensor.shape[0] // rows if of_rows else 0
        width = tensor.numel() // rows if of_rows else tensor.numel()
        if tensor.is_complex():
            width *= 2
        elif not tensor.is_floating_point():
            width = width * _carried(tensor.dtype, dtype).itemsize // dtype.itemsize
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        dense = tensor.is_contiguous() or any(size > 1 and not step for size, step in sizes)
        return Part(shape, tensor.dtype, width, times, () if dense else tuple(tensor.stride()))

    def _compare(self, tensors: Sequence[torch.Tensor], rows: int, training: bool) -> None:
        """Compares with the run of other rows. Raises OtherRows, ModelError."""
        described = self._found[training]
        parts = []
        for number, (tensor, part) in enumerate(zip(tensors, described.parts, strict=False)):
            other = self._part(tensor, rows, described.dtype, training, number)
            if other.times != part.times or (other.shape != part.shape and not part.used):
                (self._fixed if other.times != part.times else self._compares).add((training, number))
                self._found.clear()
                raise OtherRows
            if other.shape != part.shape:
                raise ModelError(
                    f"tensor {number} of what the model returns has shape {tuple(tensor.shape)} for {rows} rows: rows must be "
                    "its first dimension, and no other may follow them. Let the loss compare rows with each other."
                )
            parts.append(part if other.stride == part.stride else replace(part, stride=()))
        self._found[training] = replace(described, parts=tuple(parts))


def _kind(part: Part) -> Part:
    return replace(part, used=True, stride=())


def _plain(leaf: Any) -> Any:
    """Returns a leaf that is no tensor: a cache of keys, which may hold some, is left out."""
    return leaf if leaf is None or isinstance(leaf, int | float | str) else None


class LossOfOutputs:
    """The user's loss (what the model returns, labels), called with a joined tensor."""

    def __init__(self, loss: LossFunction, found: Mapping[bool, Returned]) -> None:
        self._loss: Any = loss
        self._by_width = {sum(returned.widths): returned for returned in found.values()}
        self.__qualname__ = name_of(loss)
        if callable(counts := getattr(loss, "counts", None)):
            self.counts = counts

    def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> Any:
        return self._loss(self.returned(output), labels)

    def returned(self, output: torch.Tensor) -> Any:
        """Returns what the model returned, from the joined tensor (rows, width); unchanged if it never was joined."""
        return self._by_width[output.shape[1]].taken_from(output) if isinstance(output, torch.Tensor) else output

    def scores(self, output: torch.Tensor, labels: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns scores and labels for the accuracy: those of the loss, else of the logits, or the first tensor."""
        found = self.returned(output)
        if callable(own := getattr(self._loss, "scores", None)):
            scores: tuple[torch.Tensor, torch.Tensor] | None = own(found, labels)
            return scores
        named = by_name(found)
        first = next((named[name] for name in ("logits", "out") if name in named), None)
        first = (
            next((leaf for leaf in leaves(opened(found)) if isinstance(leaf, torch.Tensor)), None) if first is None else first
        )
        return scores_of(first, labels) if isinstance(first, torch.Tensor) and isinstance(labels, torch.Tensor) else None

    def example(self, output: torch.Tensor) -> torch.Tensor:
        """Returns random numbers as an output: whole numbers are 0, what does not follow the rows is 1/2, and nothing is
        rounded to a narrower type."""
        returned = self._by_width[output.shape[1]]
        rounds = any(part.dtype.is_floating_point and part.dtype != returned.dtype for part in returned.parts)
        other = torch.float32 if returned.dtype == torch.float64 else torch.float64
        return self._filled(output.to(other if rounds else output.dtype), lambda columns: torch.full_like(columns, 0.5))

    def averaged(self, output: torch.Tensor) -> torch.Tensor:
        """Returns the outputs of several micro-batches as those of one: what does not follow the rows is their mean."""
        return self._filled(output, lambda columns: columns.mean(0, keepdim=True).expand_as(columns), whole_too=False)

    def _filled(
        self, output: torch.Tensor, fixed: Callable[[torch.Tensor], torch.Tensor], *, whole_too: bool = True
    ) -> torch.Tensor:  # fmt: skip
        returned = self._by_width[output.shape[1]]
        columns = list(torch.split(output, returned.widths, 1))
        for number, part in enumerate(returned.parts):
            if not part.dtype.is_floating_point and not part.dtype.is_complex:
                columns[number] = torch.zeros_like(columns[number]) if whole_too else columns[number]
            elif not part.times:
                columns[number] = fixed(columns[number])
        return torch.cat(columns, 1)


def _changed(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a structure of the same kind with `change` applied to every leaf, in the order of `leaves`."""
    if isinstance(tree, Mapping):
        parts = {key: _changed(part, change) for key, part in tree.items()}
        if type(tree) is dict:
            return parts
        return type(tree)(**parts) if all(isinstance(key, str) for key in parts) else type(tree)(parts)  # type: ignore[call-arg]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_changed(part, change) for part in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(_changed(part, change) for part in tree)
    if holds_fields(tree):
        return with_fields(tree, {name: _changed(part, change) for name, part in fields_of(tree).items()})
    return change(tree)
