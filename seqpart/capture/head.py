"""Finds the last linear layer of a recorded model, where the loss takes its output position by position.

Then the model can end before that layer, and the loss compute it over chunks of positions (model/loss_chunks.py). Between the
layer and the loss there may be calls that keep positions apart: other shapes of the same scores, other types, a scale or a cap,
and slices of positions, which are taken from the layer's inputs instead.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from seqpart.capture.program import Op, RecordedHead, Ref, leaves, mapped
from seqpart.capture.segment import Segment, Steps
from seqpart.errors import ModelError
from seqpart.model.inspection import is_listened_to
from seqpart.model.loss_chunks import Head

_SHAPES = {"view", "reshape", "flatten", "contiguous", "unsqueeze", "squeeze", "clone"}
_VALUES = {"float", "double", "to", "type", "mul", "div", "__mul__", "__rmul__", "__truediv__", "tanh", "clamp"}
"""Names of calls that change a score alone: its type, scale or cap."""


def built(head: RecordedHead, layer: nn.Linear) -> Head:
    """Returns the head with the model's own layer."""
    return Head(head.path, layer, _run(head.slices, {}), _run(head.scores, {head.path: layer}))


def head_of(model: nn.Module, ops: Sequence[Op], judged: int, shapes: Mapping[int, tuple[int, ...]]) -> RecordedHead:
    """Returns the layer that scores come from, and the calls behind it. judged: their number.

    Raises ModelError if there is none.
    """
    maker, number = {made: op for op in ops for made in op.makes}, judged
    classes, values, slices = shapes[judged][-1], list[Op](), list[Op]()
    while True:
        op = maker.get(number)
        if op is None:
            raise _none("they come from no linear layer")
        taken = [leaf for leaf in leaves((op.args, op.kwargs)) if isinstance(leaf, Ref | torch.Tensor)]
        if len(taken) != 1 or op.owned or op.changed or op.rebinds or not op.grad or not isinstance(taken[0], Ref):
            raise _none(f"they come from {_name(op)}, in {op.where}")
        if op.is_module:
            break
        old, new = shapes[taken[0].number], shapes[number]
        if _name(op) in _SHAPES and old[-1:] == new[-1:] == (classes,) and math.prod(old) == math.prod(new):
            pass
        elif _name(op) in _VALUES and old == new:
            values.append(op)
        elif _name(op) == "__getitem__" and old[-1:] == new[-1:] and len(old) == len(new) and _slices(op.args[1], len(old)):
            slices += [op] if old != new else []
        else:
            raise _none(f"they go through {_name(op)}, in {op.where}")
        number = taken[0].number
    layer = model.get_submodule(str(op.function))
    if type(layer) is not nn.Linear or is_listened_to(layer):
        raise _none(f"they come from {op.function}, a {type(layer).__name__}" + " with hooks" * (type(layer) is nn.Linear))
    if sum(other.function == op.function for other in ops) > 1:
        raise _none(f"{op.function} is called more than once")
    scores = (op, *reversed(values))
    return RecordedHead(str(op.function), taken[0].number, classes, scores, tuple(reversed(slices)))


def _none(why: str) -> ModelError:
    return ModelError(
        "--loss-chunks: the logits must be the output of an nn.Linear, at most scaled, capped, reshaped or cut to some "
        f"positions before the loss; {why}. Let the model end so, or leave --loss-chunks out."
    )


def _name(op: Op) -> str:
    return str(getattr(op.function, "__name__", op.function))


def _slices(index: Any, dimensions: int) -> bool:
    """True if an index leaves the last dimension as it is, and cuts the others to ranges."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or isinstance(part, slice) for part in parts):
        return False
    return len(parts) < dimensions or parts[-1] is Ellipsis or parts[-1] in (slice(None), slice(0, None))


def _run(ops: Sequence[Op], modules: Mapping[str, nn.Module]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function of one tensor that makes these calls one after the other."""
    if not ops:
        return torch.positive
    steps = Steps(tuple(_numbered(op, number) for number, op in enumerate(ops)), (0,), (len(ops),), None)
    segment = Segment(modules, {}, steps, steps, "head")

    def run(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = segment(x)[0]
        return found

    return run


def _numbered(op: Op, number: int) -> Op:
    """Returns the op as one of the tensor with that number, which makes the next one."""

    def own(leaf: Any) -> Any:
        return Ref(number) if isinstance(leaf, Ref) else leaf

    return replace(op, args=mapped(op.args, own), kwargs=mapped(op.kwargs, own), result=Ref(number + 1))
