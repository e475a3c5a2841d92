"""Which optimizer, and what state it keeps for a parameter, found out before there is a parameter.

An optimizer creates its state in its first step, at a moment and a place of its choosing. Here the state has a home
and a layout like weights do, so it must be known ahead: one step on six numbers shows every tensor it keeps.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from seqpart.errors import OptionError
from seqpart.memory.compiler import take_step, without_compiler
from seqpart.offload.layout import Layout, TensorSpec

Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_TUNED = ("lr", "weight_decay")
"""Options of a group that a later update may take other values of."""
NAMES = ("adam", "adamw", "sgd")


@dataclass(frozen=True, slots=True)
class StateTensor:
    name: str
    like_parameter: bool
    """Shape and type of its parameter; otherwise a float32 scalar."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """How to build it for some parameters, and the state it will keep for each of them."""

    name: str
    build: Build
    state: tuple[StateTensor, ...]
    fused: bool
    """One kernel, without a temporary the size of a parameter."""
    options: str = ""
    """What its groups say: a run that goes on must have the same."""
    tuned: str = ""
    """Learning rate and weight decay of its groups, which may be others."""

    def state_layout(self, parameters: Mapping[str, TensorSpec]) -> Layout:
        """Layout of the state of one block's trainable parameters: `weight.exp_avg`, ..."""
        specs = []
        for name, spec in parameters.items():
            for tensor in self.state:
                shape = spec.shape if tensor.like_parameter else ()
                dtype = spec.dtype if tensor.like_parameter else torch.float32
                stride = spec.stride if tensor.like_parameter else None
                specs.append(TensorSpec(name=f"{name}.{tensor.name}", shape=shape, dtype=dtype, stride=stride))
        return Layout.of(specs)

    def adopt(
        self,
        optimizer: torch.optim.Optimizer,
        named: Iterable[tuple[str, nn.Parameter]],
        views: Mapping[str, torch.Tensor],
    ) -> None:
        """Give `optimizer` the state in `views` as its own; it updates them in place. The memory stays its owner's."""
        for name, parameter in named:
            optimizer.state[parameter] = {tensor.name: views[f"{name}.{tensor.name}"] for tensor in self.state}


@functools.cache
def choose(name: str, *, lr: float, weight_decay: float = 0.0, momentum: float = 0.0) -> Optimizer:
    """`adam`, `adamw` or `sgd`, fused. Raises OptionError for another name or a negative number."""
    if name not in NAMES:
        raise OptionError(f"--optimizer: expected one of {', '.join(NAMES)}; found {name!r}.")
    for option, value in (("lr", lr), ("weight-decay", weight_decay), ("momentum", momentum)):
        if not value >= 0 or value == float("inf"):
            raise OptionError(f"--{option}: expected a finite number, zero or above; found {value}.")
    if momentum and name != "sgd":
        raise OptionError(f"--momentum goes with --optimizer sgd; {name} keeps moments of its own.")
    keywords: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "fused": True}
    if name == "sgd":
        keywords["momentum"] = momentum
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
    return describe(name, lambda parameters: kind(parameters, **keywords))


def describe(name: str, build: Build) -> Optimizer:
    """Any optimizer that keeps all it knows in a state that starts at zero: found by trial steps.

    Raises OptionError for one that cannot be built, and for one whose state cannot be laid out ahead: neither a scalar
    nor shaped like its parameter, not zero at the start, or elsewhere than in the state of its parameters.
    """
    try:
        return _tried(name, functools.partial(_without_compiler, build))
    except OptionError:
        raise
    except Exception as error:
        raise OptionError(f"optimizer {name}: a trial step failed: {type(error).__name__}: {error}") from error


def _without_compiler(build: Build, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    with without_compiler():
        return build(parameters)


def _tried(name: str, build: Build) -> Optimizer:
    parameter = nn.Parameter(torch.zeros(2, 3))
    optimizer = build([parameter])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(
            f"optimizer: expected a function that returns a torch.optim.Optimizer; found {type(optimizer).__name__}."
        )
    if "closure" in inspect.signature(type(optimizer).step).parameters and isinstance(optimizer, torch.optim.LBFGS):
        raise OptionError("optimizer: LBFGS calls the whole model again inside its step, which a partition cannot do.")
    parameter.grad = torch.zeros(2, 3)
    take_step(optimizer)
    state = tuple(_state_tensor(name, key, value) for key, value in optimizer.state[parameter].items() if value is not None)
    tuned, options = (
        repr(
            [
                {key: str(group[key]) for key in group if key != "params" and (key in _TUNED) is free}
                for group in optimizer.param_groups
            ]
        )
        for free in (True, False)
    )
    found = Optimizer(name, build, state, bool(optimizer.defaults.get("fused")), options, tuned)
    step = next((n for n, (one, other) in enumerate(_steps_both_ways(found), 1) if not _same(one, other)), None)
    if step is not None:
        raise OptionError(
            f"optimizer {name}: its step {step} is not a step from a state of zeros, kept while the optimizer is built anew "
            "for each visit of a partition (it may take a first gradient as it is, as dampening does, start from a copy "
            "of the parameter, or count in its groups), so it cannot be kept at home. Use adam, adamw or sgd."
        )
    return found


_TRIAL_STEPS = 12


def _steps_both_ways(choice: Optimizer) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """(parameter and state after each step of one that stays, the same of one that is built anew for every step)."""
    stays, visits = (nn.Parameter(torch.arange(1.0, 7.0).view(2, 3)) for _ in range(2))
    layout = choice.state_layout({"p": TensorSpec(name="p", shape=(2, 3), dtype=torch.float32)})
    views = layout.views(torch.zeros(layout.padded_nbytes, dtype=torch.uint8))
    one = choice.build([stays])
    for step in range(_TRIAL_STEPS):
        for parameter in (stays, visits):
            parameter.grad = torch.arange(1.0, 7.0).view(2, 3) * (-0.7) ** step
        take_step(one)
        other = choice.build([visits])
        choice.adopt(other, [("p", visits)], views)
        take_step(other)
        names = [tensor.name for tensor in choice.state]
        yield (
            [stays.detach(), *(one.state[stays][name] for name in names)],
            [visits.detach(), *(other.state[visits][name] for name in names)],
        )


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """NaN equals NaN: a rate that is far too high is not our affair."""
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, other, strict=True))


def _state_tensor(name: str, key: str, value: object) -> StateTensor:
    if not isinstance(value, torch.Tensor) or value.shape not in ((), (2, 3)) or value.dtype is not torch.float32:
        raise OptionError(
            f"optimizer {name}: its state {key!r} has no fixed layout, so it cannot be kept at home. Use adam, adamw or sgd."
        )
    like_parameter = value.shape == (2, 3)
    # After one step on zeros a moment is still zero; a scalar may only be the step count.
    if value.count_nonzero().item() and (like_parameter or key != "step"):
        raise OptionError(f"optimizer {name}: its state {key!r} does not start at zero. Use adam, adamw or sgd.")
    return StateTensor(key, like_parameter)
