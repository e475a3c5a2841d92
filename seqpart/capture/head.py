"""Finds the last linear layer of a recorded model, where the loss takes its output position by position.

Then the model can end before that layer, and the loss compute it over chunks of positions (model/loss_chunks.py). Between the
layer and the loss there may be calls that keep positions apart: other shapes of the same scores, other types, a scale or a cap,
and slices of positions, which are taken from the layer's inputs instead.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from seqpart.capture.program import Op, Own, RecordedHead, Ref, leaves, mapped
from seqpart.capture.segment import Segment, Steps
from seqpart.errors import ModelError
from seqpart.model.inspection import has_hooks, is_listened_to
from seqpart.model.loss_chunks import Head

_SHAPES = {"view", "reshape", "flatten", "contiguous", "unsqueeze", "squeeze", "clone"}
_VALUES = {"float", "double", "to", "type", "mul", "div", "__mul__", "__rmul__", "__truediv__", "tanh", "clamp"}
"""Names of calls that change a score alone: its type, scale or cap."""


def built(head: RecordedHead, segment: Segment) -> Head:
    """Returns the head. segment: has its modules and tensors. Raises ModelError if its parameters have hooks."""
    select, scores = segment.run_of(_chained(head.slices)), segment.run_of(_chained(head.scores))
    parameters = partial(segment.parameters_of, head.scores[0])
    if any(map(has_hooks, parameters())):
        raise _none(f"{head.name} has hooks on gradients, which would run for each chunk")
    return Head(head.name, (head.inputs, head.classes), parameters, select, scores)


def head_of(model: nn.Module, ops: Sequence[Op], scored: int, shapes: Mapping[int, tuple[int, ...]]) -> RecordedHead:
    """Returns the layer that scores come from, and the calls behind it. scored: their number.

    Raises ModelError if there is none.
    """
    maker, number = {made: op for op in ops for made in op.makes}, scored
    classes, values, slices = shapes[scored][-1], list[Op](), list[Op]()
    while True:
        op = maker.get(number)
        if op is None:
            raise _none("they come from no linear layer")
        taken = [leaf for leaf in leaves((op.args, op.kwargs)) if isinstance(leaf, Ref | torch.Tensor)]
        is_linear = op.function is F.linear and isinstance(op.args[0], Ref)
        plain = (
            not (op.owned and not is_linear) and not op.changed and not op.rebinds and (op.grad or not torch.is_grad_enabled())
        )
        if not plain or len(taken) != 1 or not isinstance(taken[0], Ref):
            raise _none(f"they come from {_name(op)}, in {op.where}")
        if op.is_module or is_linear:
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
    if op.is_module:
        layer = model.get_submodule(str(op.function))
        if type(layer) is not nn.Linear or is_listened_to(layer):
            raise _none(f"they come from {op.function}, a {type(layer).__name__}" + " with hooks" * (type(layer) is nn.Linear))
        if sum(other.function == op.function for other in ops) > 1:
            raise _none(f"{op.function} is called more than once")
    own = [leaf.name for leaf in leaves((op.args, op.kwargs)) if isinstance(leaf, Own)]
    name, states = str(op.function) if op.is_module else own[0], taken[0].number
    scores = (op, *reversed(values))
    return RecordedHead(name, states, shapes[states][-1], classes, scores, tuple(reversed(slices)))


def _none(why: str) -> ModelError:
    return ModelError(
        "--loss-chunks: the logits must be the output of an nn.Linear or of F.linear, at most scaled, capped, reshaped or cut "
        f"to some positions before the loss; {why}. Let the model end so, or leave --loss-chunks out."
    )


def _name(op: Op) -> str:
    return str(getattr(op.function, "__name__", op.function))


def _slices(index: Any, dimensions: int) -> bool:
    """True if an index leaves the last dimension as it is, and cuts the others to ranges."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or isinstance(part, slice) for part in parts):
        return False
    return len(parts) < dimensions or parts[-1] is Ellipsis or parts[-1] in (slice(None), slice(0, None))


def _chained(ops: Sequence[Op]) -> Steps:
    """Returns calls of one tensor as steps, each of the result of the one before it."""
    return Steps(tuple(_numbered(op, number) for number, op in enumerate(ops)), (0,), (len(ops),), None)


def _numbered(op: Op, number: int) -> Op:
    """Returns the op as one of the tensor with that number, which makes the next one."""

    def own(leaf: Any) -> Any:
        return Ref(number) if isinstance(leaf, Ref) else leaf

    return replace(op, args=mapped(op.args, own), kwargs=mapped(op.kwargs, own), result=Ref(number + 1))
