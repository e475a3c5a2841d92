"""Finds out which of the tensors that a model returns the loss gets, and joins them behind the model's last layer.

All between the model and the loss, from the plan to the comparison of micro-batches, handles one tensor of rows
(joined_outputs.py).
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from seqpart.capture.joined_outputs import (
    COMPARES,
    DIFFERS,
    NOT_KEPT,
    OF_BATCH,
    LeftOut,
    LossOfOutputs,
    Part,
    Returned,
    carried,
)
from seqpart.capture.program import (
    OfRows,
    Ref,
    fields_of,
    followed,
    following,
    holds_fields,
    leaves,
    mapped,
    opened,
    tensors_in,
    with_fields,
)
from seqpart.capture.recorder import CONSTANTS, Recorder
from seqpart.capture.sources import Computed, comparing_rows, learned_through, sources_of
from seqpart.errors import ModelError, first_line
from seqpart.model.loss_probe import generators_left_alone
from seqpart.model.losses import LossFunction
from seqpart.model.packs import ROWS, has_gradients
from seqpart.model.reductions import name_of, total_of


class OtherRows(Exception):
    """A shape that seemed to follow the rows does not: the model is to be recorded again."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """Which tensors are joined."""

    places: tuple[int, ...]
    """Places of the joined tensors among those that the model returns."""
    left_out: tuple[str, ...]
    """For each why it is left out; "" if it is not."""
    sources: tuple[int, ...]
    """Numbers of further tensors, after those, that are needed for `computed`."""
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
        """What the model returns, by mode: True for training."""
        self._kept: dict[bool, _Kept] = {}
        self._fixed: set[tuple[bool, int | str]] = set()
        """(mode, number or name) of tensors whose first dimension does not follow the rows."""
        self._without_rows: set[tuple[bool, int | str]] = set()
        """(mode, number or name) of tensors of which no dimension follows the rows."""
        self._alone: set[tuple[bool, int | str]] = set()
        """(mode, number or name) of those that are all that the model returns, and seem to be of rows."""
        self._compares: set[tuple[bool, int | str]] = set()
        """(mode, number or name) of those that compare rows with each other."""
        self._rows = 0
        """Rows of the run that `_found` comes from."""
        self._shapes: dict[int, tuple[int, ...]] = {}
        """Shapes by number, in that run."""
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

    def sources(self, tensor: torch.Tensor, recorder: Recorder) -> set[int] | None:
        """Returns the numbers of the tensors that the loss is to compute this one from; None where it is kept itself."""
        name = recorder.name(tensor)

        def follows(number: int) -> bool:
            of_rows = self._dim_of_rows(recorder.shapes[number], number, recorder) == 0
            return of_rows and (recorder.training, number) not in self._compares

        if isinstance(name, str) or follows(name) or name not in following({ROWS}, recorder.ops):  # the last looks at all ops
            return None
        found = sources_of(name, recorder, follows)
        self._computes |= found is not None
        return found

    def _dim_of_rows(self, shape: Sequence[int], name: int | str, recorder: Recorder) -> int | None:
        """Returns the dimension of a tensor of that shape and number or name that seems to follow the rows: the first, or else
        the only other one of that size."""
        rows = recorder.rows
        if (recorder.training, name) in self._without_rows:
            return None
        if shape and shape[0] > 0 and not shape[0] % rows and (recorder.training, name) not in self._fixed:
            return 0
        return [*shape[1:]].index(rows) + 1 if [*shape[1:]].count(rows) == 1 else None

    def _is_alone(self, found: Any, recorder: Recorder) -> bool:
        """True for a tensor of rows, which is not joined. Raises OtherRows if it seemed to be one for other rows."""
        if not isinstance(found, torch.Tensor) or (self._found if not recorder.training else True in self._found):
            return False
        rows, key = recorder.rows, (recorder.training, recorder.name(found))
        alone = bool(found.ndim) and key not in self._fixed and (len(found) == rows or rows not in found.shape)
        if not alone and key in self._alone:
            self._alone.remove(key)
            self._fixed.add(key)
            raise OtherRows
        self._alone |= {key} if alone else set()
        return alone

    def prepare(
        self, found: Any, recorder: Recorder, *, total: torch.Tensor | None = None
    ) -> Callable[[], torch.Tensor] | None:
        """Returns a function that joins what a model returned; None if the loss is to get one tensor of it.

        total: the model's own loss. Raises ModelError if the loss takes what it returns in training and not what it returns in
        evaluation, OtherRows, Differs.
        """
        if self._is_alone(found, recorder):
            return None
        rows, tensors = recorder.rows, tensors_in(found)
        if not tensors:
            self.why_not = (
                f"a {type(found).__name__} is not read: expected tuples, lists, dicts, dataclasses, or tensors in them."
            )
            return None
        if recorder.training not in self._found:
            used = self._tried(found, tensors, recorder) if total is None else learned_through([total], tensors)
            if used is None:
                return None
            self._kept[recorder.training] = self._keeps(tensors, used, recorder)
            self._found[recorder.training], self._rows = self._described(found, tensors, recorder), rows
            self._shapes = dict(recorder.shapes)
        elif rows != self._rows:
            self._compare(found, tensors, recorder)
        described, kept = self._found[recorder.training], self._kept[recorder.training].tensors(tensors, recorder)
        return lambda: described.joined(kept, rows)

    def _tried(self, found: Any, tensors: Sequence[torch.Tensor], recorder: Recorder) -> list[bool] | None:
        """Tells for each tensor whether the loss has a gradient for it; None where the loss does not take them."""
        if not recorder.training and True not in self._found:
            return None
        own = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        copies = [tensor.clone() for tensor in own]  # a loss may write into them
        values = iter(copies)
        given = mapped(found, lambda leaf: next(values) if isinstance(leaf, torch.Tensor) else leaf)
        shape, dtype = self._labels
        try:
            with self._autocast(), generators_left_alone():
                total = total_of(self._loss(given, torch.zeros((recorder.rows, *shape), dtype=dtype)))
            self._refuse_shared(tensors, [copy._version > 0 for copy in copies])
            return learned_through([total], own)
        except (DataDependentOutputException, DynamicOutputShapeException):  # it came so far; the plan says what is wrong
            return [tensor.requires_grad for tensor in own]
        except ModelError:
            raise
        except Exception as error:
            if recorder.training:
                self.why_not = f"{type(error).__name__}: {error} (tried on {recorder.rows} rows)."
                return None
            raise ModelError(
                f"loss {name_of(self._given)}: it takes what the model returns in training, and fails on what it returns in "
                f"evaluation, a {type(found).__name__}: {first_line(error)}. "
                "Let it take both, or let the model return the same in both."
            ) from error

    def _refuse_shared(self, tensors: Sequence[torch.Tensor], written: Sequence[bool]) -> None:
        """Raises ModelError if the loss writes into a tensor that shares its memory with another."""
        places = [tensor.untyped_storage()._cdata for tensor in tensors]
        shared = [n for n, (place, wrote) in enumerate(zip(places, written, strict=True)) if wrote and places.count(place) > 1]
        if shared:
            raise ModelError(
                f"loss {name_of(self._given)}: it writes into tensor {shared[0]} of what the model returns, which shares its "
                "memory with another. Here each has its own: let the loss write into a clone()."
            )

    def _keeps(self, tensors: Sequence[torch.Tensor], used: Sequence[bool], recorder: Recorder) -> _Kept:
        """Decides which tensors are joined, left out, and computed from others. used: true for those with a gradient."""
        if self._given is None:  # what its loss takes has been decided
            names = frozenset(map(recorder.name, tensors))
            return _Kept(tuple(range(len(tensors))), ("",) * len(tensors), (), tuple(used), None, names)
        places, left_out, computed, sources = list[int](), list[str](), list[int](), set[int]()
        for place, (tensor, own) in enumerate(zip(tensors, used, strict=True)):
            taken = self.sources(tensor, recorder) if own or not tensor.requires_grad else None
            if taken is not None:
                computed.append(place)
                sources |= taken
            else:
                places.append(place)
                left_out.append("" if own else self._why_left_out(tensor, recorder))
        numbers = [recorder.name(tensors[place]) for place in places]
        others = tuple(sorted(sources - set(numbers)))
        takes = [tensors[place] for place in places] + [recorder.tensor(number) for number in others]
        through = learned_through([tensors[place] for place in computed if used[place]], takes)
        direct = [used[place] for place in places] + [False] * len(others)
        return _Kept(
            tuple(places), tuple(left_out), others, tuple(a or b for a, b in zip(direct, through, strict=True)),
            Computed([recorder.known(tensors[place]) for place in computed], sorted(sources), recorder) if computed else None,
        )  # fmt: skip

    def _why_left_out(self, tensor: torch.Tensor, recorder: Recorder) -> str:
        name = recorder.name(tensor)
        if (recorder.training, name) in self._compares:
            return COMPARES
        if self._dim_of_rows(tensor.shape, name, recorder) is not None:
            return ""
        return OF_BATCH if name in following({ROWS}, recorder.ops) else ""

    def _described(self, found: Any, tensors: Sequence[torch.Tensor], recorder: Recorder) -> Returned:
        kept = self._kept[recorder.training]
        joined = kept.tensors(tensors, recorder)
        floats = [tensor.dtype.to_real() for tensor in joined if has_gradients(tensor.dtype)]
        dtype = torch.float32 if not floats else floats[0]
        for other in floats:
            dtype = torch.promote_types(dtype, other)
        parts = self._parts(joined, recorder, dtype)
        computed = [place for place in range(len(tensors)) if place not in kept.places]
        order = [*kept.places, *(len(tensors) + number for number in range(len(kept.sources))), *computed]
        refs = iter([Ref(order.index(place)) for place in range(len(tensors))])
        tree = mapped(found, lambda leaf: next(refs) if isinstance(leaf, torch.Tensor) else _plain(leaf))
        names, takes = [recorder.name(tensor) for tensor in joined], () if kept.computed is None else kept.computed.sources
        described = Returned(tree, parts, dtype, takes=tuple(map(names.index, takes)))
        whole = self._found.get(True)
        if recorder.training or whole is None:
            return described
        alike = repr(whole.tree) == repr(tree) and [_kind(part) for part in whole.parts] == [_kind(part) for part in parts]
        if alike and kept.computed is None and whole.computes is None:
            return whole
        return replace(described, extra=int(sum(described.widths) == sum(whole.widths)))

    def _parts(self, tensors: Sequence[torch.Tensor], recorder: Recorder, dtype: torch.dtype) -> tuple[Part, ...]:
        """Returns the parts of the joined tensor, whose type is `dtype`."""
        kept, of_batch = self._kept[recorder.training], following({ROWS}, recorder.ops)
        left_out = (*kept.left_out, *("" for _ in kept.sources))
        found = []
        for tensor, why, used in zip(tensors, left_out, kept.used, strict=True):
            name = recorder.name(tensor)
            part = self._part(tensor, recorder, dtype) if not why else Part((), tensor.dtype, 0, left_out=why)
            found.append(replace(part, used=used, from_layer=not (why or part.times) and name in of_batch))
        return tuple(found)

    def _part(self, tensor: torch.Tensor, recorder: Recorder, dtype: torch.dtype) -> Part:
        rows, dim = recorder.rows, self._dim_of_rows(tensor.shape, recorder.name(tensor), recorder)
        shape = tuple(size for place, size in enumerate(tensor.shape) if place != dim)
        times = 0 if dim is None else tensor.shape[dim] // rows
        width = tensor.numel() if dim is None else tensor.numel() // rows
        if tensor.is_complex():
            width *= 2
        elif not tensor.is_floating_point():
            width = width * carried(tensor.dtype, dtype).itemsize // dtype.itemsize
        return Part(shape, tensor.dtype, width, times, dim or 0, _stride(tensor))

    def _without_lists_of_rows(self, found: Any, described: Returned, kept: _Kept) -> Returned:
        """Leaves out lists of another length than in the run of other rows. Raises ModelError if the loss takes a tensor in
        one, or others come after it."""
        tree = _without_lists(described.tree, found)
        gone = set(_refs(described.tree)) - set(_refs(tree))
        one, other = _places(described.tree), _places(found)
        taken = any(kept.used[number] for number in gone if number < len(kept.used))
        if gone and (taken or _refs(_without_lists(one, other)) != _refs(_without_lists(other, one))):
            raise ModelError(
                "the model returns a list of as many tensors as it has rows. Let it return them as one tensor (torch.stack), "
                "or only what the loss takes, such as the logits."
            )
        return replace(described, tree=tree)

    def _compare(self, found: Any, tensors: Sequence[torch.Tensor], recorder: Recorder) -> None:
        """Compares with the run of other rows. Raises OtherRows, ModelError, Differs."""
        described, kept, rows = self._found[recorder.training], self._kept[recorder.training], recorder.rows
        if other_names := kept.names - set(map(recorder.name, tensors)):  # they seemed to be of rows
            self._fixed |= {(recorder.training, name) for name in other_names}
            self._found.clear()
            raise OtherRows
        described = self._without_lists_of_rows(found, described, kept)
        parts, joined = [], kept.tensors(tensors, recorder)
        comparing = {(recorder.training, recorder.name(tensor)) for tensor in joined} & {
            (recorder.training, number) for number in comparing_rows(recorder.shapes, self._shapes, recorder.ops)
        }
        if comparing - self._compares:
            self._compares |= comparing
            self._found.clear()
            raise OtherRows
        for tensor, part, other in zip(joined, described.parts, self._parts(joined, recorder, described.dtype), strict=True):
            name = (recorder.training, recorder.name(tensor))
            known = self._compares
            if moved := (other.times, other.dim) != (part.times, part.dim):
                known = self._fixed if other.times and part.times else self._without_rows
            if (moved or other.shape != part.shape) and name not in known:
                known.add(name)
                self._found.clear()
                raise OtherRows
            if moved or other.shape != part.shape:
                raise ModelError(
                    f"a tensor of what the model returns has shape {tuple(tensor.shape)} for {rows} rows: rows must be its "
                    "first dimension alone, or functions that take no parameter must compute it from tensors of rows. Let the "
                    "loss compare rows with each other."
                )
            parts.append(part if other.stride == part.stride else replace(part, stride=()))
        computes = None
        if kept.computed is not None:
            computes = kept.computed.merged(recorder, self._rows, rows)
        values: list[Any] = []
        alike = _without_lists(found, self._found[recorder.training].tree)
        mapped(alike, lambda leaf: None if isinstance(leaf, torch.Tensor) else values.append(leaf))
        others = iter(values)
        tree = mapped(
            described.tree, lambda leaf: leaf if isinstance(leaf, Ref) else _merged(leaf, next(others), self._rows, rows)
        )
        self._found[recorder.training] = replace(described, tree=tree, parts=tuple(parts), computes=computes)


def _without_lists(tree: Any, other: Any) -> Any:
    """Returns `tree` with what stands for its lists in the place of those that have another length in `other`."""
    if isinstance(tree, list | tuple) and isinstance(other, LeftOut):
        return other
    if isinstance(tree, list | tuple) and isinstance(other, list | tuple):
        if len(tree) != len(other):
            return LeftOut(f"a {type(tree).__name__} of as many tensors as rows", DIFFERS)
        parts = [_without_lists(one, its) for one, its in zip(tree, other, strict=True)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if isinstance(tree, Mapping) and isinstance(other, Mapping):
        values = {key: _without_lists(part, other.get(key)) for key, part in tree.items()}
        return values if type(tree) is dict else type(tree)(**values)
    if holds_fields(tree) and holds_fields(other):
        theirs = fields_of(other)
        return with_fields(tree, {key: _without_lists(part, theirs.get(key)) for key, part in fields_of(tree).items()})
    return tree


def _places(tree: Any) -> Any:
    """Returns the tree with a Ref to its place among the tensors for each tensor."""
    places = itertools.count()
    return mapped(tree, lambda leaf: Ref(next(places)) if isinstance(leaf, torch.Tensor | Ref) else None)


def _refs(tree: Any) -> list[int]:
    return [leaf.number for leaf in leaves(opened(tree)) if isinstance(leaf, Ref)]


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
    return leaf if isinstance(leaf, (*CONSTANTS, np.generic)) else LeftOut(f"a {type(leaf).__name__}", NOT_KEPT)


def _merged(one: Any, other: Any, rows: int, other_rows: int) -> Any:
    """Returns the value of any number of rows, from those of two runs."""
    if isinstance(one, OfRows | LeftOut):
        return one
    try:
        return followed(one, other, rows, other_rows)
    except ValueError:
        return LeftOut(f"the value {one}", DIFFERS)
