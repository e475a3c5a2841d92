"""A recorded run of a model: calls of its modules, and torch functions between them, so that they can be repeated.

Tensors are numbered in the order in which they were made. A number that depends on the batch differs between runs with
different rows: two runs are merged into one program in which it follows the rows.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend


@dataclass(frozen=True, slots=True)
class Ref:
    """The tensor with this number."""

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
    """The device of the values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One call. function: a torch function, or the path of a module of the model."""

    function: Callable[..., Any] | str
    args: Any
    kwargs: Any
    result: Any
    """The structure that the call returned, with a Ref for each tensor."""
    rebinds: tuple[tuple[int, int], ...] = ()
    """(new number, old number) of tensors that the call changed in place: later calls see the change."""
    changed: tuple[int, ...] = ()
    """Numbers of inputs that it changed in place."""
    puts: int = 0
    """How many tensors it put into lists and dicts among its arguments; they are the last ones of the result."""
    more: bool = False
    """True if it returns further tensors, as many as the rows say, which no call takes."""
    grad: bool = True
    """True if it ran with gradients enabled."""
    autocast: torch.dtype | None = None
    """Type of the model's own autocast around it; float32 if that turns off the run's autocast."""
    attention: tuple[SDPBackend, ...] | None = None
    """Kernels of the model's own `torch.nn.attention.sdpa_kernel` around it; None: those of the process."""
    effect: bool = False
    """True if it may change a buffer: then it runs even if its outputs are not used."""
    changes_own: bool = False
    """True if it changed a buffer or parameter when it was recorded."""
    inside: str = ""
    """Path of the module whose forward called it; "" for the model's own."""
    where: str = ""
    """The same in words, with the line."""

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
    """A recorded run: ops in the order in which they ran; output: number of the model's output."""

    ops: tuple[Op, ...]
    output: int
    shapes: dict[int, tuple[int, ...]]
    learns: frozenset[int]
    """Tensors that require grad."""
    follows: frozenset[int] = frozenset()
    """Tensors whose first dimension is the number of rows."""
    loss: "Program | None" = None
    """The loss computed from the output and the labels, if it was recorded with labels."""
    takes: tuple[int, ...] = ()
    """Numbers that such a loss takes beside the labels."""
    head: "RecordedHead | None" = None
    """The last layer behind the output, if the loss is to compute it."""
    reads: frozenset[tuple[nn.Module, str]] = frozenset()
    """Modules and names of their attributes that code between layers read: their values are in the ops."""


@dataclass(frozen=True, slots=True)
class RecordedHead:
    """The last linear layer of a model, of the tensor with number `states`, and what follows it up to the loss."""

    name: str
    states: int
    inputs: int
    classes: int
    scores: tuple[Op, ...]
    """The layer's call, and those that change each score alone."""
    slices: tuple[Op, ...]
    """Calls that leave out positions."""


def needed_for(
    wanted: Set[int], ops: Sequence[Op], known: Set[int] = frozenset(), without: Set[int] | None = None
) -> tuple[tuple[Op, ...], set[int]]:
    """Returns those of `ops` that compute `wanted` from `known`, and the numbers that none of them makes.

    without: also keep ops that change a buffer, unless they take any of these numbers.
    """
    needed, made, kept = set(wanted) - known, set[int](), list[Op]()
    for op in reversed(ops):
        if op.makes & needed or (without is not None and op.effect and not op.uses & without):
            kept.append(replace(op, rebinds=tuple(pair for pair in op.rebinds if pair[0] in needed)))
            needed |= kept[-1].uses - known
            made |= op.makes
    return tuple(reversed(kept)), needed - made


def following(numbers: Iterable[int], ops: Iterable[Op]) -> set[int]:
    """Returns `numbers` and the numbers of all that is computed from them."""
    found = set(numbers)
    for op in ops:
        if op.uses & found:
            found |= op.makes
    return found


def by_name(found: Any) -> dict[str, Any]:
    """Returns a model's outputs by name, if it returned a mapping, a named tuple or a dataclass; else an empty dict."""
    if isinstance(found, Mapping):
        return dict(found)
    if hasattr(found, "_fields"):
        return dict(found._asdict())
    return fields_of(found) if holds_fields(found) else {}


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


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Returns the tensors in a tree, as often as they occur, also those in mappings of any kind."""
    return [leaf for leaf in leaves(opened(tree)) if isinstance(leaf, torch.Tensor)]


def put_into(tree: Any, known: Set[int]) -> list[torch.Tensor]:
    """Returns the tensors in `tree` that are none of `known`, by their ids, each once."""
    found = {id(leaf): leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor) and id(leaf) not in known}
    return list(found.values())


def opened(tree: Any) -> Any:
    """Returns the tree with mappings of any kind, such as results of transformers, as dicts."""
    if isinstance(tree, Mapping):
        return {key: opened(part) for key, part in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(opened(part) for part in tree))
    if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        return type(tree)(opened(part) for part in tree) if type(tree) in (list, tuple) else [opened(part) for part in tree]
    return with_fields(tree, opened(fields_of(tree))) if holds_fields(tree) else tree


def holds_fields(tree: Any) -> bool:
    """True if it is an instance of a dataclass, which modules may pass to each other with tensors in it."""
    return is_dataclass(tree) and not isinstance(tree, type | Ref | Own | OfRows | OfDevice | OwnBackward)


def fields_of(tree: Any) -> dict[str, Any]:
    return {field.name: getattr(tree, field.name) for field in fields(tree)}


def with_fields(tree: Any, values: dict[str, Any]) -> Any:
    """Returns a copy with these field values, also of a frozen dataclass or one that computes some of them."""
    found = copy.copy(tree)
    for name, value in values.items():
        object.__setattr__(found, name, value)
    return found


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Returns the tree with `change` applied to every leaf, in mappings of any kind too."""
    if isinstance(tree, torch.Size):
        return tuple(change(part) for part in tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(mapped(part, change) for part in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(part, change) for part in tree)
    if isinstance(tree, Mapping):
        parts = {key: mapped(part, change) for key, part in tree.items()}
        if type(tree) is dict:
            return parts
        return type(tree)(**parts) if all(isinstance(key, str) for key in parts) else type(tree)(parts)  # type: ignore[call-arg]
    if isinstance(tree, slice):
        return slice(*(mapped(part, change) for part in (tree.start, tree.stop, tree.step)))
    if holds_fields(tree):
        return with_fields(tree, mapped(fields_of(tree), change))
    return change(tree)


@dataclass(frozen=True, slots=True)
class OwnBackward:
    """A torch.autograd.Function as a callable: it has its own backward, so it is recorded as one call."""

    kind: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.kind.apply(*args, **kwargs)


class Differs(Exception):
    """Two recorded runs of one model differ in these calls; `op` is the one deepest inside."""

    def __init__(self, *ops: Op) -> None:
        super().__init__(ops[0].where)
        self.op = max(ops, key=depth)


def depth(op: Op) -> int:
    return len(op.inside.split(".")) if op.inside else 0


def other_inside(ops: Sequence[Op], others: Sequence[Op]) -> Op | None:
    """Returns the first call that only one of two runs makes, by a module and not the model itself; None if there is none."""
    one, other = ([(op.inside, getattr(op.function, "__qualname__", op.function)) for op in run] for run in (ops, others))
    for same, start, stop, begin, end in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        if same != "equal" and depth(found := max((*ops[start:stop], *others[begin:end]), key=depth)):
            return found
    return None


def generalised(one: Program, other: Program, rows: int, other_rows: int) -> Program:
    """Merges two runs with different rows into one program. Raises Differs if they differ in more than the numbers of rows."""
    ops = []
    for first, second in zip(one.ops, other.ops, strict=False):
        if (first.function, first.rebinds) != (second.function, second.rebinds):
            raise Differs(first, second)
        try:
            args, kwargs = (
                followed(a, b, rows, other_rows) for a, b in ((first.args, second.args), (first.kwargs, second.kwargs))
            )
        except ValueError:
            raise Differs(first, second) from None
        ops.append(_with_common_results(replace(first, args=args, kwargs=kwargs), second))
    if len(one.ops) != len(other.ops):
        raise Differs(max(one.ops, other.ops, key=len)[len(ops)])
    both = ((number, shape[:1], other.shapes.get(number, ())[:1]) for number, shape in one.shapes.items())
    follows = frozenset(number for number, *firsts in both if firsts == [(rows,), (other_rows,)])
    loss = generalised(one.loss, other.loss, rows, other_rows) if one.loss and other.loss else None
    return replace(one, ops=tuple(ops), follows=follows, loss=loss)


def _with_common_results(first: Op, second: Op) -> Op:
    """Returns `first`, with those tensors alone that both calls of a module returned, if their numbers of them differ.

    Raises Differs if it put some into its arguments.
    """
    one, other = ([leaf for leaf in leaves(op.result) if isinstance(leaf, Ref)] for op in (first, second))
    if len(one) == len(other) or not first.is_module:
        return first
    if first.puts or second.puts:
        raise Differs(first, second)
    return replace(first, result=one[: len(other)], more=True)


def followed(one: Any, other: Any, rows: int, other_rows: int) -> Any:
    """Merges values of two runs with different rows. Raises ValueError if they differ in more than the numbers of rows."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        parts = [followed(a, b, rows, other_rows) for a, b in zip(one, other, strict=True)]
        return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            raise ValueError
        return {key: followed(one[key], other[key], rows, other_rows) for key in one}
    if isinstance(one, slice) and isinstance(other, slice):
        ends = ((one.start, other.start), (one.stop, other.stop), (one.step, other.step))
        return slice(*(followed(a, b, rows, other_rows) for a, b in ends))
    if type(one) is type(other) and holds_fields(one):
        return with_fields(one, followed(fields_of(one), fields_of(other), rows, other_rows))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one is other or (one.shape == other.shape and torch.equal(one, other)):
            return one
        raise ValueError
    if type(one) is type(other) and (one == other or one is other):
        return one
    if type(one) is int and type(other) is int:
        times, rest = divmod(other - one, other_rows - rows)
        if not rest and (times == 1 or one == times * rows):  # two runs cannot distinguish a line from a curve
            return OfRows(times, one - times * rows)
    raise ValueError
