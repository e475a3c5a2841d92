"""Outputs of several tensors as one of rows, and the loss that gets them as the model returned them.

    (scores, {"mean": m, "var": v}, scale) -> joined (rows, width) -> loss(as returned, labels)

Numbers are copied, not changed: parts keep their type, their strides, and the absence of a gradient. What is no tensor of rows
is computed again from some that are, with the loss (see sources.py), if functions alone do that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from seqpart.capture.program import OfRows, Ref, by_name, leaves, mapped, opened, tensors_in
from seqpart.capture.segment import Segment
from seqpart.errors import ModelError
from seqpart.model.losses import LossFunction, scores_of
from seqpart.model.packs import has_gradients
from seqpart.model.reductions import name_of


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of what a model returned, as columns of the joined tensor."""

    shape: tuple[int, ...]
    """Shape of the tensor, without the dimension that follows the rows."""
    dtype: torch.dtype
    width: int
    """Columns."""
    times: int = 0
    """The dimension that follows the rows, divided by the rows; 0: its shape does not follow the rows."""
    dim: int = 0
    """The place of that dimension: 1 for (positions, rows, classes)."""
    stride: tuple[int, ...] = ()
    """Where it is not contiguous; 0 where it is expanded."""
    used: bool = True
    """True if the loss has a gradient for it."""
    left_out: str = ""
    """Why it is not kept, where the loss does not use it."""
    from_layer: bool = False
    """True if a layer computes it from all rows of a batch, so that the loss cannot compute it again."""

    @property
    def learns(self) -> bool:
        """True if it gets a gradient."""
        return self.used and has_gradients(self.dtype)

    def taken_from(self, columns: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the tensor from its columns (rows, width). dtype: of the tensor that they were joined in."""
        if self.left_out:
            return columns
        rows, own = columns if self.times else columns[:1], self.dtype
        if not has_gradients(own):
            rows = rows.to(dtype).contiguous().view(carried(own, dtype)).to(own)
        elif rows.dtype == dtype:
            rows = rows.to(own.to_real())
        if own.is_complex:
            rows = torch.view_as_complex(rows.contiguous().reshape(-1, 2))
        found = rows.reshape((self.times * len(columns), *self.shape) if self.times else self.shape)
        found = found.movedim(0, self.dim) if self.dim else found
        if not self.stride:
            return torch.empty_like(found, memory_format=torch.contiguous_format).copy_(found)
        once = found[tuple(slice(None if step else 1) for step in self.stride)]
        return (
            torch.empty_strided(once.shape, self.stride, dtype=once.dtype, device=once.device).copy_(once).expand(found.shape)
        )


def carried(own: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The type of whole numbers in which `own` lies among floats of type `dtype`, bit by bit."""
    return torch.int64 if own in (torch.int64, torch.uint64) or dtype == torch.float64 else torch.int32


@dataclass(frozen=True, slots=True)
class Returned:
    """What a model returns: its structure with a Ref for each tensor, and these tensors as parts of a joined one."""

    tree: Any
    """A Ref's number: a place among the parts, followed by the numbers that `computes` returns."""
    parts: tuple[Part, ...]
    dtype: torch.dtype
    """Type of the joined tensor."""
    extra: int = 0
    """Number of columns of zeros, which distinguish the output of an evaluation from that of training."""
    computes: Segment | None = None
    """Numbers of the batch, from the joined tensor and the parts `takes`."""
    takes: tuple[int, ...] = ()

    @property
    def widths(self) -> list[int]:
        return [*(part.width for part in self.parts), self.extra]

    def joined(self, tensors: Sequence[torch.Tensor], rows: int) -> torch.Tensor:
        """Returns (rows, width). Only torch functions, which are recorded as a part of the model's program."""
        columns, parts = [], [part for part in self.parts if not part.left_out]
        for part, tensor in zip(self.parts, tensors, strict=True):
            if part.left_out:
                continue
            if part.dim:
                tensor = tensor.movedim(part.dim, 0)
            if tensor.is_complex():
                tensor = torch.view_as_real(tensor)
            flat = tensor.reshape(rows, -1) if part.times else tensor.reshape(1, -1).expand(rows, -1)
            if not tensor.is_floating_point():
                flat = flat.to(carried(part.dtype, self.dtype)).contiguous().view(self.dtype)
            columns.append(flat.to(self.dtype))
        if self.extra:
            columns.append(torch.zeros(rows, self.extra, dtype=self.dtype, device=columns[0].device))
        joined: torch.Tensor = _Join.apply(tuple(part.used for part in parts), *columns)
        return joined

    def taken_from(self, joined: torch.Tensor) -> Any:
        """Returns the structure with its tensors."""
        found = list(_Split.apply(joined, self))
        if self.computes is not None:
            found += self.computes(joined, *(found[place] for place in self.takes))
        for number, part in enumerate(self.parts):
            if part.left_out:
                found[number] = LeftOut(f"tensor {number}", part.left_out)

        def value(leaf: Any) -> Any:
            if isinstance(leaf, OfRows):
                return leaf.times * len(joined) + leaf.plus
            return found[leaf.number] if isinstance(leaf, Ref) else leaf

        return mapped(self.tree, value)


COMPARES = "compares rows with each other, and is kept only where the loss has a gradient for it"
OF_BATCH = "is a number of the whole batch from inside a layer, and is kept only where the loss has a gradient for it"
DIFFERS = "depends on the number of rows"
NOT_KEPT = "is not kept: there may be tensors in it"


class LeftOut:
    """Stands for a value of what a model returns that cannot be kept. Raises ModelError on every use."""

    def __init__(self, what: str, why: str) -> None:
        self._what, self._why = what, why

    def __repr__(self) -> str:
        return f"LeftOut({self._what})"

    def _refused(self, *_: Any, **__: Any) -> Any:
        raise ModelError(
            f"{self._what} of what the model returns {self._why}. Let the loss compute it from tensors that have a "
            "dimension of the rows."
        )

    __getattr__ = __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refused
    __rtruediv__ = __pow__ = __neg__ = __lt__ = __gt__ = __len__ = __iter__ = __bool__ = __float__ = __index__ = _refused
    __eq__ = __ne__ = __call__ = _refused
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        next(arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, cls))._refused()


class _Join(torch.autograd.Function):
    """torch.cat along dimension 1, with gradients for the parts that are used, and none for the others: contiguous ones, but
    where the loss joined all parts as here and so gave ranges of rows, of which sums have other last bits."""

    @staticmethod
    def forward(ctx: Any, used: tuple[bool, ...], *parts: torch.Tensor) -> torch.Tensor:
        ctx.used, ctx.widths = used, [part.shape[1] for part in parts]
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = torch.split(grads[0], ctx.widths, 1)
        own = [
            (part if getattr(grads[0], "ranges", False) else part.contiguous()) if used else None
            for part, used in zip(parts, ctx.used, strict=False)
        ]
        return None, *own, *[None] * (len(parts) - len(own))


class _Split(torch.autograd.Function):
    """The tensors of a joined one, each with its own memory: a loss may write into them."""

    @staticmethod
    def forward(ctx: Any, joined: torch.Tensor, returned: Returned) -> tuple[torch.Tensor, ...]:
        ctx.shape, ctx.dtype, ctx.returned = joined.shape, joined.dtype, returned
        columns = torch.split(joined, returned.widths, 1)
        found = tuple(part.taken_from(own, returned.dtype) for part, own in zip(returned.parts, columns, strict=False))
        ctx.mark_non_differentiable(*(tensor for tensor, part in zip(found, returned.parts, strict=True) if not part.learns))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = torch.zeros(ctx.shape, dtype=ctx.dtype, device=next(grad.device for grad in grads if grad is not None))
        for part, into, grad in zip(ctx.returned.parts, torch.split(gradient, ctx.returned.widths, 1), grads, strict=False):
            if grad is None or not part.learns:
                continue
            grad = grad.movedim(part.dim, 0) if part.dim else grad
            grad = torch.view_as_real(grad) if grad.is_complex() else grad
            if part.times:
                into.copy_(grad.reshape(into.shape))
            else:  # the first row stands for all
                into[0].copy_(grad.reshape(-1))
        learn = [
            (part.times * (not part.dim), grad) for part, grad in zip(ctx.returned.parts, grads, strict=False) if part.learns
        ]
        gradient.ranges = all(  # type: ignore[attr-defined]
            times == 1 and grad is not None and (grad.stride(0), grad[0].is_contiguous()) == (ctx.shape[1], True)
            for times, grad in learn
        )
        return gradient, None


class LossOfOutputs:
    """The user's loss (what the model returns, labels), called with a joined tensor."""

    def __init__(self, loss: LossFunction, found: Mapping[bool, Returned], *, computes: bool) -> None:
        self._loss: Any = loss
        self._by_width = {sum(returned.widths): returned for returned in found.values()}
        self.__qualname__ = name_of(loss)
        self.from_layers = any(part.from_layer for returned in found.values() for part in returned.parts)
        """True if it takes a number of the batch that a layer computes."""
        self.of_batch = computes or self.from_layers
        """True if it takes a number of the batch."""
        if callable(counts := getattr(loss, "counts", None)):
            self.counts = counts

    def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> Any:
        return self._loss(self.returned(output), labels)

    def returned(self, output: torch.Tensor) -> Any:
        """Returns what the model returned, from the joined tensor (rows, width); unchanged if it never was joined."""
        return self._by_width[output.shape[1]].taken_from(output) if isinstance(output, torch.Tensor) else output

    def folded(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns a joined gradient with all of a tensor that does not follow the rows in the first row."""
        folded = gradient.clone()
        parts = self._by_width[gradient.shape[1]].parts
        for part, own in zip(parts, torch.split(folded, self._by_width[gradient.shape[1]].widths, 1), strict=False):
            if not part.times:
                total = own.sum(0)
                own.zero_()
                own[0] = total
        return folded

    def row_dims(self, output: torch.Tensor) -> list[int | None]:
        """Returns the dimension of the rows of each tensor that `returned` returns, in order; None where it has none."""
        shapes = [
            [leaf.shape for leaf in leaves(self.returned(rows)) if isinstance(leaf, torch.Tensor)]
            for rows in (output, torch.cat([output, output[:1]]))
        ]
        return [
            next((dim for dim in range(len(one)) if one[dim] != more[dim]), None) for one, more in zip(*shapes, strict=True)
        ]

    def scores(self, output: torch.Tensor, labels: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns scores and labels for the accuracy: those of the loss, or of the logits or first tensor, rows first."""
        if callable(own := getattr(self._loss, "scores", None)):
            scores: tuple[torch.Tensor, torch.Tensor] | None = own(self.returned(output), labels)
            return scores
        found, returned = self.returned(output), self._by_width[output.shape[1]]
        named, every = by_name(found), tensors_in(found)
        first = next((named[name] for name in ("logits", "out") if name in named), every[0] if every else None)
        if not isinstance(first, torch.Tensor) or not isinstance(labels, torch.Tensor):
            return None
        refs = zip(leaves(opened(found)), leaves(opened(returned.tree)), strict=True)
        kept = {id(leaf): ref.number for leaf, ref in refs if isinstance(ref, Ref) and ref.number < len(returned.parts)}
        if id(first) in kept and (dim := returned.parts[kept[id(first)]].dim):
            first = first.movedim(dim, 0)
        return scores_of(first, labels)

    def example(self, output: torch.Tensor) -> torch.Tensor:
        """Returns random numbers as an output: whole numbers are 0 or 1, what does not follow the rows is 1/2, as is a mask
        that the model's own loss divides by; nothing is rounded to a narrower type."""
        returned = self._by_width[output.shape[1]]
        rounds = any(part.dtype.is_floating_point and part.dtype != returned.dtype for part in returned.parts)
        other = torch.float32 if returned.dtype == torch.float64 else torch.float64
        columns = list(torch.split(output, returned.widths, 1))
        for number, part in enumerate(returned.parts):
            if not has_gradients(part.dtype):
                whole = carried(part.dtype, returned.dtype)
                times = whole.itemsize // returned.dtype.itemsize
                own = (columns[number][:, ::times] > 0).to(whole).contiguous().view(returned.dtype)
                columns[number] = own.to(output.dtype)
            elif not part.times or (part.stride and not part.stride[part.dim]) or (self._loss is None and not part.used):
                columns[number] = torch.full_like(columns[number], 0.5)
        return torch.cat(columns, 1).to(other if rounds else output.dtype)
