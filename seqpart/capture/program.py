"""What a model did when it ran once: calls of its modules, and torch functions between them; and how to do it again.

Tensors are numbered in the order in which they were made. A number that depends on the batch was 2 in one run and 3 in another:
of two runs one program is made in which it follows the rows.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend


@dataclass(frozen=True, slots=True)
class Ref:
    """The tensor of that number."""

    number: int


@dataclass(frozen=True, slots=True)
class Own:
    """A parameter or buffer of the model, by the first of its names."""

    name: str


@dataclass(frozen=True, slots=True)
class OfRows:
    """An integer that follows the rows of the batch: times * rows, or rows + plus."""

    times: int
    plus: int


@dataclass(frozen=True, slots=True)
class OfDevice:
    """The device on which the values lie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One call. function: a torch function, or the path of a module of the model."""

    function: Callable[..., Any] | str
    args: Any
    kwargs: Any
    result: Any
    """Of the same structure as what the call returned: a Ref for each tensor."""
    rebinds: tuple[tuple[int, int], ...] = ()
    """(new number, old number) of tensors that the call changed in place: who comes later sees the change."""
    changed: tuple[int, ...] = ()
    """Numbers of what it took and changed in place."""
    grad: bool = True
    """Whether it ran where gradients are wanted."""
    autocast: torch.dtype | None = None
    """Of the model's own autocast around it: float32 where it turns off the one it is trained under."""
    attention: tuple[SDPBackend, ...] | None = None
    """Of `torch.nn.attention.sdpa_kernel` around it in the model; None: those of the process."""
    effect: bool = False
    """Whether it changes a buffer: then it runs also where nobody takes what it makes."""
    changes_own: bool = False
    """Whether it did so when it ran."""
    where: str = ""
    """Path of the module whose forward called it, and the line."""

    @property
    def is_module(self) -> bool:
        return isinstance(self.function, str)

    @property
    def uses(self) -> set[int]:
        taken = {leaf.number for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, Ref)}
        return taken | {old for _, old in self.rebinds}

    @property
    def makes(self) -> set[int]:
        return {leaf.number for leaf in leaves(self.result) if isinstance(leaf, Ref)} | {new for new, _ in self.rebinds}

    @property
    def owned(self) -> set[str]:
        return {leaf.name for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, Own)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """ops in the order in which they ran; output: number of what the model returned."""

    ops: tuple[Op, ...]
    output: int
    shapes: dict[int, tuple[int, ...]]
    learns: frozenset[int]
    """Tensors that require grad."""
    follows: frozenset[int] = frozenset()
    """Tensors whose first dimension is that of the rows."""
    loss: "Program | None" = None
    """What it computes from its output and the labels, where it was given labels."""


def needed_for(
    wanted: Set[int], ops: Sequence[Op], known: Set[int] = frozenset(), without: Set[int] | None = None
) -> tuple[tuple[Op, ...], set[int]]:
    """Those of `ops` that compute `wanted` from `known`, and the numbers that none of them gives.

    without: with the ops that change a buffer, unless they take any of these numbers.
    """
    needed, made, kept = set(wanted) - known, set[int](), list[Op]()
    for op in reversed(ops):
        if op.makes & needed or (without is not None and op.effect and not op.uses & without):
            kept.append(replace(op, rebinds=tuple(pair for pair in op.rebinds if pair[0] in needed)))
            needed |= kept[-1].uses - known
            made |= op.makes
    return tuple(reversed(kept)), needed - made


def by_name(found: Any) -> dict[str, Any]:
    """What a model returned, where that has names (a mapping, a named tuple or a dataclass); else nothing."""
    if isinstance(found, Mapping):
        return dict(found)
    if hasattr(found, "_fields"):
        return dict(found._asdict())
    return fields_of(found) if holds_fields(found) else {}


def attention_kernels() -> tuple[SDPBackend, ...]:
    """Those that `scaled_dot_product_attention` may choose among."""
    cuda: Any = torch.backends.cuda
    enabled = {
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: cuda.math_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled(),
    }
    return tuple(kernel for kernel, may in enabled.items() if may)


def leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, list | tuple):
        for part in tree:
            yield from leaves(part)
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from leaves(part)
    elif isinstance(tree, slice):
        yield from leaves((tree.start, tree.stop, tree.step))
    elif holds_fields(tree):
        yield from leaves(fields_of(tree))
    else:
        yield tree


def holds_fields(tree: Any) -> bool:
    """Whether it is a dataclass's: something that modules hand to each other with tensors in it."""
    return is_dataclass(tree) and not isinstance(tree, type | Ref | Own | OfRows | OfDevice | OwnBackward)


def fields_of(tree: Any) -> dict[str, Any]:
    return {field.name: getattr(tree, field.name) for field in fields(tree)}


def with_fields(tree: Any, values: dict[str, Any]) -> Any:
    """A copy with these values, also of one that is frozen or computes some of them."""
    found = copy.copy(tree)
    for name, value in values.items():
        object.__setattr__(found, name, value)
    return found


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The same tree with every leaf changed."""
    if isinstance(tree, torch.Size):
        return tuple(change(part) for part in tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(mapped(part, change) for part in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(part, change) for part in tree)
    if isinstance(tree, dict):
        return {key: mapped(part, change) for key, part in tree.items()}
    if isinstance(tree, slice):
        return slice(*(mapped(part, change) for part in (tree.start, tree.stop, tree.step)))
    if holds_fields(tree):
        return with_fields(tree, mapped(fields_of(tree), change))
    return change(tree)


@dataclass(frozen=True, slots=True)
class OwnBackward:
    """A torch.autograd.Function, whose backward is its own: it is called as one."""

    kind: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.kind.apply(*args, **kwargs)


class Differs(Exception):
    """Two runs of one model did not do the same: `op` of the first is where."""

    def __init__(self, op: Op) -> None:
        super().__init__(op.where)
        self.op = op


def generalised(one: Program, other: Program, rows: int, other_rows: int) -> Program:
    """One program of two runs with so many rows. Raises Differs where they differ in more than numbers that follow the rows."""
    ops = []
    for first, second in zip(one.ops, other.ops, strict=False):
        if (first.function, first.rebinds) != (second.function, second.rebinds):
            raise Differs(first)
        try:
            args, kwargs = (
                _follow(a, b, rows, other_rows) for a, b in ((first.args, second.args), (first.kwargs, second.kwargs))
            )
        except ValueError:
            raise Differs(first) from None
        ops.append(replace(first, args=args, kwargs=kwargs))
    if len(one.ops) != len(other.ops):
        raise Differs(max(one.ops, other.ops, key=len)[len(ops)])
    both = ((number, shape[:1], other.shapes.get(number, ())[:1]) for number, shape in one.shapes.items())
    follows = frozenset(number for number, *firsts in both if firsts == [(rows,), (other_rows,)])
    loss = generalised(one.loss, other.loss, rows, other_rows) if one.loss and other.loss else None
    return replace(one, ops=tuple(ops), follows=follows, loss=loss)


def _follow(one: Any, other: Any, rows: int, other_rows: int) -> Any:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        parts = [_follow(a, b, rows, other_rows) for a, b in zip(one, other, strict=True)]
        return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            raise ValueError
        return {key: _follow(one[key], other[key], rows, other_rows) for key in one}
    if isinstance(one, slice) and isinstance(other, slice):
        ends = ((one.start, other.start), (one.stop, other.stop), (one.step, other.step))
        return slice(*(_follow(a, b, rows, other_rows) for a, b in ends))
    if type(one) is type(other) and holds_fields(one):
        return with_fields(one, _follow(fields_of(one), fields_of(other), rows, other_rows))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one is other or (one.shape == other.shape and torch.equal(one, other)):
            return one
        raise ValueError
    if type(one) is type(other) and (one == other or one is other):
        return one
    if type(one) is int and type(other) is int:
        times, rest = divmod(other - one, other_rows - rows)
        if not rest and (times == 1 or one == times * rows):  # two runs do not tell a line from a curve
            return OfRows(times, one - times * rows)
    raise ValueError
