"""A block of a traced model: one of its modules, and the torch functions around it."""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.attention import sdpa_kernel

from seqpart.capture.program import OfDevice, OfRows, Op, Own, Ref, leaves, mapped, opened, put_into, tensors_in
from seqpart.errors import ModelError


@dataclass(frozen=True, slots=True)
class Steps:
    """A segment's ops in one mode, and the numbers of its inputs and outputs."""

    ops: tuple[Op, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    rows: int | None
    """Index of the input that has the number of rows, if that is needed."""
    used_up: list[list[int]] = field(init=False)
    """For each op the numbers that no later op uses."""

    def __post_init__(self) -> None:
        last = {number: place for place, op in enumerate(self.ops) for number in (*op.makes, *op.uses)}
        spare = {number: place for number, place in last.items() if number not in self.gives}
        used_up = [[number for number, where in spare.items() if where == place] for place in range(len(self.ops))]
        object.__setattr__(self, "used_up", used_up)


class _Written(dict[str, torch.Tensor | None]):
    """Buffers of modules that are not blocks: assigning one here assigns it in its module too."""

    def __init__(self, owners: Mapping[str, tuple[nn.Module, str]]) -> None:
        super().__init__()
        self._owners = owners

    def __setitem__(self, name: str, tensor: torch.Tensor | None) -> None:
        super().__setitem__(name, tensor)
        owner, theirs = self._owners[name]
        owner._buffers[theirs] = tensor


class Segment(nn.Module):
    """Maps its inputs to a tuple of its outputs. Modules, parameters and buffers are the model's own.

    modules: {path in the model: module}; tensors: {name in the model: (module that has it, its name there)}, of tensors that
    belong to no called module. It runs the ops that were recorded in its current mode, training or evaluation.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], tensors: Mapping[str, tuple[nn.Module, str]], train: Steps, evaluate: Steps,
        described: str,
    ) -> None:  # fmt: skip
        super().__init__()
        self.described = described
        """Type of its main module."""
        self.unmoved: dict[bool, tuple[str, ...]] = {True: (), False: ()}
        """Modules that stay in the other mode, by mode."""
        self._steps = {True: train, False: evaluate}
        self._paths = {path: str(number) for number, path in enumerate(modules)}
        self._names = {name: f"own{number}" for number, name in enumerate(tensors)}
        self._buffers = _Written({self._names[name]: owner for name, owner in tensors.items()})
        for path, module in modules.items():
            self.add_module(self._paths[path], module)
        for name, (owner, theirs) in tensors.items():
            if theirs in owner._parameters:
                self.register_parameter(self._names[name], owner._parameters[theirs])
            else:
                persistent = theirs not in owner._non_persistent_buffers_set
                self.register_buffer(self._names[name], owner._buffers[theirs], persistent=persistent)

    def train(self, mode: bool = True) -> "Segment":
        super().train(mode)
        for name in self.unmoved[mode]:
            self.get_submodule(name).training = not mode
        return self

    def exported(self, name: str) -> str:
        """Returns the model's name of the tensor that is called `name` here."""
        top, _, rest = name.partition(".")
        theirs = {ours: theirs for theirs, ours in (*self._paths.items(), *self._names.items())}[top]
        return f"{theirs}.{rest}" if theirs and rest else theirs or rest

    def __deepcopy__(self, memo: dict[int, Any]) -> "Segment":
        """Copies modules and tensors, also those of modules that are no blocks; the ops are shared."""
        copied = Segment.__new__(Segment)
        nn.Module.__init__(copied)
        memo[id(self)] = copied
        own = {name: value for name, value in vars(self).items() if name not in vars(copied)}
        vars(copied).update(own, training=self.training)
        for name in ("_modules", "_parameters"):
            getattr(copied, name).update(copy.deepcopy(getattr(self, name), memo))
        for name, buffer in self._buffers.items():
            copied.register_buffer(name, copy.deepcopy(buffer, memo), name not in self._non_persistent_buffers_set)
        return copied

    @property
    def wraps(self) -> str | None:
        """Name of its module, if it only calls that with one tensor and returns one; else None."""
        if self._names or len(self._paths) != 1 or not all(map(_is_one_call, self._steps.values())):
            return None
        return next(iter(self._paths.values()))

    @property
    def structure(self) -> tuple[object, ...]:
        """Its ops without names: equal for repeated layers, if their modules are alike."""
        return tuple(self._relative(steps) for steps in self._steps.values())

    def _relative(self, steps: Steps) -> tuple[object, ...]:
        numbers: dict[int, int] = {}

        def short(leaf: Any) -> object:
            if isinstance(leaf, Ref):
                return "ref", numbers.setdefault(leaf.number, len(numbers))
            if isinstance(leaf, Own):
                return "own", self._names[leaf.name]
            return "tensor" if isinstance(leaf, torch.Tensor) else repr(leaf)

        def relative(tree: Any) -> str:
            return repr(mapped(tree, short))

        taken = relative([Ref(number) for number in steps.takes])
        ops = [
            (self._paths[op.function] if isinstance(op.function, str) else op.function,
             relative((op.args, op.kwargs, op.result, [[Ref(n) for n in pair] for pair in op.rebinds])), op.grad)
            for op in steps.ops
        ]  # fmt: skip
        return taken, tuple(ops), relative([Ref(number) for number in steps.gives]), steps.rows

    def forward(self, *taken: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._run(self._steps[self.training], taken)

    def run_of(self, steps: Steps) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns a function of one tensor that runs other calls with this segment's modules and tensors."""
        return lambda x: self._run(steps, (x,))[0]

    def parameters_of(self, op: Op) -> list[nn.Parameter]:
        """Returns the parameters of this segment that a call uses."""
        modules = [self.get_submodule(self._paths[op.function])] if isinstance(op.function, str) else []
        tensors = [getattr(self, self._names[name]) for name in sorted(op.owned)]
        return [*(one for module in modules for one in module.parameters()), *tensors]

    def _run(self, steps: Steps, taken: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        values = dict(zip(steps.takes, taken, strict=True))
        rows = 0 if steps.rows is None else len(taken[steps.rows])
        for op, used_up in zip(steps.ops, steps.used_up, strict=True):
            self._do(op, values, rows, taken[0].device)
            for number in used_up:
                values.pop(number, None)
        return tuple(values[number] for number in steps.gives)

    def _do(self, op: Op, values: dict[int, torch.Tensor], rows: int, device: torch.device) -> None:
        def resolved(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return values[leaf.number]
            if isinstance(leaf, Own):
                return getattr(self, self._names[leaf.name])
            if isinstance(leaf, OfRows):
                return leaf.times * rows + leaf.plus
            if isinstance(leaf, torch.Tensor):
                return leaf.to(device)
            return device if isinstance(leaf, OfDevice) else leaf

        args, kwargs = mapped(op.args, resolved), mapped(op.kwargs, resolved)
        given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)] if op.puts else []
        function: Any = getattr(self, self._paths[op.function]) if isinstance(op.function, str) else op.function
        with torch.set_grad_enabled(torch.is_grad_enabled() and op.grad), _autocast(op, device), _attention(op):
            found = function(*args, **kwargs)
        made = tensors_in(found)
        if op.puts:
            own = itertools.chain(function.parameters(), function.buffers())
            made += put_into(opened((args, kwargs)), set(map(id, itertools.chain(given, made, own))))
        numbers = [leaf.number for leaf in leaves(op.result) if isinstance(leaf, Ref)]
        if len(made) != len(numbers) and not op.more:
            raise ModelError(
                f"{op.where}: it returned {len(made)} tensors, and {len(numbers)} when the model was recorded. How many a "
                "block returns must not depend on its rows."
            )
        changed = {new: values[old] for new, old in op.rebinds}
        values.update(zip(numbers, made, strict=False))
        values.update(changed)


def _autocast(op: Op, device: torch.device) -> AbstractContextManager[object]:
    if op.autocast is None:
        return nullcontext()
    if op.autocast is torch.float32:
        return torch.autocast(device.type, enabled=False)
    return torch.autocast(device.type, op.autocast)


def _attention(op: Op) -> AbstractContextManager[object]:
    return nullcontext() if op.attention is None else sdpa_kernel(list(op.attention))


def _is_one_call(steps: Steps) -> bool:
    if len(steps.ops) != 1 or len(steps.takes) != 1 or len(steps.gives) != 1 or steps.rows is not None:
        return False
    (op,), (taken,), (given,) = steps.ops, steps.takes, steps.gives
    tensors = [leaf for leaf in leaves((op.args, op.kwargs)) if isinstance(leaf, Ref | Own | torch.Tensor)]
    own = op.puts or op.more or op.autocast is not None or op.attention is not None
    return op.is_module and op.grad and not own and tensors == [Ref(taken)] and op.makes == {given}
