"""Outputs of several tensors: joined in one behind the model's last layer, and given to the loss as the model returned them.

    model -> (scores, {"mean": m, "var": v}, scale) -> joined (rows, width) -> loss(as returned, labels)

So that all between them, from the plan to the comparison of micro-batches, handles one tensor of rows. Numbers are copied, not
changed: parts keep their type, their strides, and the absence of a gradient. What is no tensor of rows is computed again from
some that are, with the loss (see sources.py), if functions alone do that.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_leaves

from seqpart.capture.program import (
    OfRows,
    Ref,
    by_name,
    fields_of,
    followed,
    following,
    holds_fields,
    leaves,
    opened,
    with_fields,
)
from seqpart.capture.recorder import CONSTANTS, Recorder
from seqpart.capture.segment import Segment
from seqpart.capture.sources import Computed, learned_through, sources_of
from seqpart.errors import ModelError
from seqpart.model.loss_probe import generators_left_alone
from seqpart.model.losses import LossFunction, scores_of
from seqpart.model.packs import ROWS
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
    """Where it is not contiguous; 0 where it is expanded."""
    used: bool = True
    """True if the loss has a gradient for it."""
    left_out: str = ""
    """Why it is not kept, where the loss does not use it."""
    of_batch: bool = False
    """True if a layer computes it from all rows of a batch."""

    @property
    def learns(self) -> bool:
        """True if it gets a gradient."""
        return self.used and (self.dtype.is_floating_point or self.dtype.is_complex)

    def taken_from(self, columns: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the tensor from its columns (rows, width). dtype: of the tensor that they were joined in."""
        if self.left_out:
            return columns
        rows, own = columns if self.times else columns[:1], self.dtype
        if not own.is_floating_point and not own.is_complex:
            rows = rows.to(dtype).contiguous().view(_carried(own, dtype)).to(own)
        elif rows.dtype == dtype:
            rows = rows.to(own.to_real())
        if own.is_complex:
            rows = torch.view_as_complex(rows.contiguous().reshape(-1, 2))
        found = rows.reshape((self.times * len(columns), *self.shape) if self.times else self.shape)
        if not self.stride:
            return torch.empty_like(found, memory_format=torch.contiguous_format).copy_(found)
        once = found[tuple(slice(None if step else 1) for step in self.stride)]
        return (
            torch.empty_strided(once.shape, self.stride, dtype=once.dtype, device=once.device).copy_(once).expand(found.shape)
        )


def _carried(own: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The type of whole numbers in which `own` lies among floats of type `dtype`, bit by bit."""
    return torch.int64 if own in (torch.int64, torch.uint64) or dtype == torch.float64 else torch.int32


@dataclass(frozen=True, slots=True)
class Returned:
    """What a model returns: its structure with a Ref for each tensor, and these tensors as parts of a joined one."""

    tree: Any
    """A Ref's number: a place among the parts, and behind them among the numbers that `computes` returns."""
    parts: tuple[Part, ...]
    dtype: torch.dtype
    """Of the joined tensor."""
    extra: int = 0
    """Columns of zeros, by which the output of an evaluation is told from that of training."""
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
        if self.computes is not None:
            found += self.computes(joined, *(found[place] for place in self.takes))
        for number, part in enumerate(self.parts):
            if part.left_out:
                found[number] = LeftOut(f"tensor {number}", part.left_out)

        def value(leaf: Any) -> Any:
            if isinstance(leaf, OfRows):
                return leaf.times * len(joined) + leaf.plus
            return found[leaf.number] if isinstance(leaf, Ref) else leaf

        return _changed(self.tree, value)


_COMPARES = "compares rows with each other, and is kept only where the loss has a gradient for it"
_OF_BATCH = "is a number of the whole batch from inside a layer, and is kept only where the loss has a gradient for it"
_DIFFERS = "depends on the number of rows"
_NOT_KEPT = "is not kept: there may be tensors in it"


class LeftOut:
    """Stands for a value of what a model returns that cannot be kept. Raises ModelError on every use."""

    def __init__(self, what: str, why: str) -> None:
        self._what, self._why = what, why

    def __repr__(self) -> str:
        return f"LeftOut({self._what})"

    def _refused(self, *_: Any, **__: Any) -> Any:
        raise ModelError(
            f"{self._what} of what the model returns {self._why}. Let the loss compute it from tensors whose first dimension "
            "is the rows."
        )

    __getattr__ = __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refused
    __rtruediv__ = __pow__ = __neg__ = __lt__ = __gt__ = __len__ = __iter__ = __bool__ = __float__ = __index__ = _refused
    __eq__ = __ne__ = _refused
    __hash__ = object.__hash__

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
            grad = torch.view_as_real(grad) if grad.is_complex() else grad
            if part.times:
                into.copy_(grad.reshape(into.shape))
            else:  # the first row stands for all
                into[0].copy_(grad.reshape(-1))
        return gradient, None


class OtherRows(Exception):
    """A shape that seemed to follow the rows does not: the model is to be recorded again."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """Which tensors are joined."""

    places: tuple[int, ...]
    """Of those among the tensors that the model returns."""
    left_out: tuple[str, ...]
    """For each why it is left out; "" if it is not."""
    sources: tuple[int, ...]
    """Numbers of others, behind them, that are needed for `computed`."""
    used: tuple[bool, ...]
    """For each of all these: true if the loss has a gradient for it."""
    computed: Computed | None
    """The other tensors that the model returns."""
    names: frozenset[int | str] = frozenset()
    """Numbers, or names, of the tensors that the model returns; of its own loss: that this takes."""

    def tensors(self, returned: Sequence[torch.Tensor], recorder: Recorder) -> list[torch.Tensor]:
        return [*(returned[place] for place in self.places), *map(recorder.tensor, self.sources)]


class Outputs:
    """Finds out, while a model is recorded, whether the user's loss takes all that it returns, and joins that then.

    The loss decides: it is tried on what the model returned. One that fails there gets one tensor of it, the logits.

    loss: None for the model's own. tried: the same loss, for labels of the shape and type that follow.
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
        self._kept: dict[bool, _Kept] = {}
        self._fixed: set[tuple[bool, int | str]] = set()
        """(mode, number or name) of tensors whose first dimension does not follow the rows."""
        self._compares: set[tuple[bool, int | str]] = set()
        """(mode, number or name) of those that compare rows with each other."""
        self._rows = 0
        """Of the run that `_found` is of."""
        self._computes = False
        """True if the loss computes a number of the batch."""
        self.why_not = ""
        """Why the loss does not take all that the model returns."""

    @property
    def joined(self) -> "LossOfOutputs | None":
        """The loss of joined outputs; None if none were joined."""
        if not self._found:
            return None
        return LossOfOutputs(self._given, self._found, computes=self._computes)  # type: ignore[arg-type]

    @property
    def loss(self) -> LossFunction:
        """The loss of the chain's output."""
        assert self._given is not None
        return self.joined or self._given

    def sources(self, tensor: torch.Tensor, recorder: Recorder, *, training: bool) -> set[int] | None:
        """Returns the numbers of the tensors that the loss is to compute this one from; None where it is kept itself."""
        name = recorder.name(tensor)

        def follows(number: int) -> bool:
            return self._is_of_rows(number, recorder, training) and (training, number) not in self._compares

        if isinstance(name, str) or name not in following(ROWS, recorder.ops) or follows(name):
            return None
        found = sources_of(name, recorder, follows)
        self._computes |= found is not None
        return found

    def _is_of_rows(self, number: int, recorder: Recorder, training: bool) -> bool:
        shape, rows = recorder.shapes[number], recorder.shapes[ROWS][0]
        return bool(shape) and shape[0] > 0 and not shape[0] % rows and (training, number) not in self._fixed

    def prepare(
        self, found: Any, recorder: Recorder, *, training: bool, total: torch.Tensor | None = None
    ) -> Callable[[], torch.Tensor] | None:  # fmt: skip
        """Returns a function that joins what a model returned; None if the loss is to get one tensor of it.

        total: the model's own loss. Raises ModelError if the loss takes what it returns in training and not what it returns in
        evaluation, OtherRows, Differs.
        """
        if isinstance(found, torch.Tensor) and (training or not self._found):
            return None
        rows, tensors = recorder.shapes[ROWS][0], [leaf for leaf in leaves(opened(found)) if isinstance(leaf, torch.Tensor)]
        if training not in self._found:
            used = self._tried(found, tensors, rows, training) if total is None else learned_through([total], tensors)
            if used is None:
                return None
            self._kept[training] = self._keeps(tensors, used, recorder, training)
            self._found[training], self._rows = self._described(found, tensors, recorder, training), rows
        elif rows != self._rows:
            self._compare(found, tensors, recorder, training)
        described, kept = self._found[training], self._kept[training].tensors(tensors, recorder)
        return lambda: described.joined(kept, rows)

    def _tried(self, found: Any, tensors: Sequence[torch.Tensor], rows: int, training: bool) -> list[bool] | None:
        """Tells for each tensor whether the loss has a gradient for it; None where the loss does not take them."""
        if not training and True not in self._found:
            return None
        own = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        values = iter([tensor.clone() for tensor in own])  # a loss may write into them
        given = _changed(found, lambda leaf: next(values) if isinstance(leaf, torch.Tensor) else leaf)
        shape, dtype = self._labels
        try:
            with self._autocast(), generators_left_alone():
                total = total_of(self._loss(given, torch.zeros((rows, *shape), dtype=dtype)))
            return learned_through([total], own)
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

    def _keeps(self, tensors: Sequence[torch.Tensor], used: Sequence[bool], recorder: Recorder, training: bool) -> _Kept:
        """Decides which tensors are joined, left out, and computed from others. used: true for those with a gradient."""
        if self._given is None:  # what its loss takes has been decided
            names = frozenset(map(recorder.name, tensors))
            return _Kept(tuple(range(len(tensors))), ("",) * len(tensors), (), tuple(used), None, names)
        places, left_out, computed, sources = list[int](), list[str](), list[int](), set[int]()
        for place, (tensor, own) in enumerate(zip(tensors, used, strict=True)):
            taken = self.sources(tensor, recorder, training=training) if own or not tensor.requires_grad else None
            if taken is not None:
                computed.append(place)
                sources |= taken
            else:
                places.append(place)
                left_out.append("" if own else self._why_left_out(tensor, recorder, training))
        numbers = [recorder.name(tensors[place]) for place in places]
        others = tuple(sorted(sources - set(numbers)))
        takes = [tensors[place] for place in places] + [recorder.tensor(number) for number in others]
        through = learned_through([tensors[place] for place in computed if used[place]], takes)
        direct = [used[place] for place in places] + [False] * len(others)
        return _Kept(
            tuple(places), tuple(left_out), others, tuple(a or b for a, b in zip(direct, through, strict=True)),
            Computed([recorder.known(tensors[place]) for place in computed], sorted(sources), recorder) if computed else None,
        )  # fmt: skip

    def _why_left_out(self, tensor: torch.Tensor, recorder: Recorder, training: bool) -> str:
        name = recorder.name(tensor)
        if (training, name) in self._compares:
            return _COMPARES
        of_batch = not isinstance(name, str) and name in following(ROWS, recorder.ops)
        return _OF_BATCH if of_batch and not self._is_of_rows(int(name), recorder, training) else ""

    def _described(self, found: Any, tensors: Sequence[torch.Tensor], recorder: Recorder, training: bool) -> Returned:
        kept = self._kept[training]
        joined = kept.tensors(tensors, recorder)
        floats = [tensor.dtype.to_real() for tensor in joined if tensor.is_floating_point() or tensor.is_complex()]
        dtype = torch.float32 if not floats else floats[0]
        for other in floats:
            dtype = torch.promote_types(dtype, other)
        parts = self._parts(joined, recorder, training, dtype)
        computed = [place for place in range(len(tensors)) if place not in kept.places]
        order = [*kept.places, *(len(tensors) + number for number in range(len(kept.sources))), *computed]
        refs = iter([Ref(order.index(place)) for place in range(len(tensors))])
        tree = _changed(found, lambda leaf: next(refs) if isinstance(leaf, torch.Tensor) else _plain(leaf))
        names, takes = [recorder.name(tensor) for tensor in joined], () if kept.computed is None else kept.computed.sources
        described = Returned(tree, parts, dtype, takes=tuple(map(names.index, takes)))
        whole = self._found.get(True)
        if training or whole is None:
            return described
        alike = repr(whole.tree) == repr(tree) and [_kind(part) for part in whole.parts] == [_kind(part) for part in parts]
        if alike and kept.computed is None and whole.computes is None:
            return whole
        return replace(described, extra=int(sum(described.widths) == sum(whole.widths)))

    def _parts(
        self, tensors: Sequence[torch.Tensor], recorder: Recorder, training: bool, dtype: torch.dtype
    ) -> tuple[Part, ...]:  # fmt: skip
        """Returns the parts of the joined tensor, whose type is `dtype`."""
        kept, of_batch = self._kept[training], following(ROWS, recorder.ops)
        left_out = (*kept.left_out, *("" for _ in kept.sources))
        found = []
        for tensor, why, used in zip(tensors, left_out, kept.used, strict=True):
            name = recorder.name(tensor)
            part = self._part(tensor, recorder, training, dtype) if not why else Part((), tensor.dtype, 0, left_out=why)
            found.append(replace(part, used=used, of_batch=not (why or part.times) and name in of_batch))
        return tuple(found)

    def _part(self, tensor: torch.Tensor, recorder: Recorder, training: bool, dtype: torch.dtype) -> Part:
        rows = recorder.shapes[ROWS][0]
        of_rows = tensor.ndim and tensor.shape[0] and not tensor.shape[0] % rows
        of_rows = of_rows and (training, recorder.name(tensor)) not in self._fixed
        shape = tuple(tensor.shape[1:] if of_rows else tensor.shape)
        times = tensor.shape[0] // rows if of_rows else 0
        width = tensor.numel() // rows if of_rows else tensor.numel()
        if tensor.is_complex():
            width *= 2
        elif not tensor.is_floating_point():
            width = width * _carried(tensor.dtype, dtype).itemsize // dtype.itemsize
        return Part(shape, tensor.dtype, width, times, _stride(tensor))

    def _compare(self, found: Any, tensors: Sequence[torch.Tensor], recorder: Recorder, training: bool) -> None:
        """Compares with the run of other rows. Raises OtherRows, ModelError, Differs."""
        described, kept, rows = self._found[training], self._kept[training], recorder.shapes[ROWS][0]
        if other_names := kept.names - set(map(recorder.name, tensors)):  # they seemed to be of rows
            self._fixed |= {(training, name) for name in other_names}
            self._found.clear()
            raise OtherRows
        parts, joined = [], kept.tensors(tensors, recorder)
        for tensor, part, other in zip(
            joined, described.parts, self._parts(joined, recorder, training, described.dtype), strict=True
        ):
            name = (training, recorder.name(tensor))
            if other.times != part.times or (other.shape != part.shape and name not in self._compares):
                (self._fixed if other.times != part.times else self._compares).add(name)
                self._found.clear()
                raise OtherRows
            if other.shape != part.shape:
                raise ModelError(
                    f"a tensor of what the model returns has shape {tuple(tensor.shape)} for {rows} rows: rows must be its "
                    "first dimension alone. Let the loss compare rows with each other."
                )
            parts.append(part if other.stride == part.stride else replace(part, stride=()))
        computes = None
        if kept.computed is not None:
            computes = kept.computed.merged(recorder, self._rows, rows)
        values: list[Any] = []
        _changed(found, lambda leaf: None if isinstance(leaf, torch.Tensor) else values.append(leaf))
        others = iter(values)
        tree = _changed(
            described.tree, lambda leaf: leaf if isinstance(leaf, Ref) else _merged(leaf, next(others), self._rows, rows)
        )
        self._found[training] = replace(described, tree=tree, parts=tuple(parts), computes=computes)


def _kind(part: Part) -> Part:
    return replace(part, used=True, stride=())


def _stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides of a tensor, with 0 where it is expanded; () if it is contiguous, or its numbers share memory."""
    stride = tuple(step if size > 1 else 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(stride, tensor.shape, strict=True) if step and size > 1):
        if step <= reach:
            return ()
        reach += step * (size - 1)
    return () if tensor.is_contiguous() else stride


def _plain(leaf: Any) -> Any:
    """Returns a leaf that is no tensor, or what stands for it."""
    return leaf if isinstance(leaf, (*CONSTANTS, np.generic)) else LeftOut(f"a {type(leaf).__name__}", _NOT_KEPT)


def _merged(one: Any, other: Any, rows: int, other_rows: int) -> Any:
    """Returns the value of any number of rows, from those of two runs."""
    if isinstance(one, OfRows | LeftOut):
        return one
    try:
        return followed(one, other, rows, other_rows)
    except ValueError:
        return LeftOut(f"the value {one}", _DIFFERS)


class LossOfOutputs:
    """The user's loss (what the model returns, labels), called with a joined tensor."""

    def __init__(self, loss: LossFunction, found: Mapping[bool, Returned], *, computes: bool) -> None:
        self._loss: Any = loss
        self._by_width = {sum(returned.widths): returned for returned in found.values()}
        self.__qualname__ = name_of(loss)
        self.of_layers = any(part.of_batch for returned in found.values() for part in returned.parts)
        """True if it takes a number of the batch that a layer computes."""
        self.of_batch = computes or self.of_layers
        """True if it takes a number of the batch."""
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
        """Returns random numbers as an output: whole numbers are 0 or 1, what does not follow the rows is 1/2, and nothing is
        rounded to a narrower type."""
        returned = self._by_width[output.shape[1]]
        rounds = any(part.dtype.is_floating_point and part.dtype != returned.dtype for part in returned.parts)
        other = torch.float32 if returned.dtype == torch.float64 else torch.float64
        columns = list(torch.split(output, returned.widths, 1))
        for number, part in enumerate(returned.parts):
            if not part.dtype.is_floating_point and not part.dtype.is_complex:
                whole = _carried(part.dtype, returned.dtype)
                times = whole.itemsize // returned.dtype.itemsize
                own = (columns[number][:, ::times] > 0).to(whole).contiguous().view(returned.dtype)
                columns[number] = own.to(output.dtype)
            elif not part.times or (part.stride and not part.stride[0]):
                columns[number] = torch.full_like(columns[number], 0.5)
        return torch.cat(columns, 1).to(other if rounds else output.dtype)


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
