"""Which optimizer, and what state it keeps for a parameter, found out before there is a parameter.

An optimizer creates its state in its first step, at a moment and a place of its choosing. Here the state has a home
and a layout like weights do, so it must be known ahead: one step on six numbers shows every tensor it keeps.
"""

import enum
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from seqpart.errors import OptionError
from seqpart.memory.compiler import take_step, without_compiler
from seqpart.offload.layout import Layout, TensorSpec
from seqpart.rates.scheduler import Scheduler, SchedulerFactory, tune

Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

AVERAGE = "average"
"""Among a parameter's state, its moving average."""
_TUNED = ("lr", "weight_decay")
"""Options of a group that a later update may take other values of."""
NAMES = ("adam", "adamw", "sgd", "adafactor")
_TRIED: tuple[tuple[int, ...], ...] = ((2, 3), (5,), (4, 2, 3))
"""Shapes of the parameters of trial steps: a matrix, and where its state is another a vector and matrices in a row too."""


class Extent(enum.Enum):
    """The shape of a tensor of state."""

    ONE = "a scalar"
    ALL = "its parameter's"
    ROWS = "its parameter's, with the last dimension 1"
    COLUMNS = "its parameter's, with the dimension before the last 1"

    def of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self is Extent.ONE:
            return ()
        if self is Extent.ALL or len(shape) < 2:
            return shape
        return (*shape[:-1], 1) if self is Extent.ROWS else (*shape[:-2], 1, shape[-1])


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a parameter's state, of the parameter's type; a scalar is float32."""

    name: str
    extent: Extent
    dimensions: range = range(1 << 10)
    """Of the parameters that have it."""

    @property
    def like_parameter(self) -> bool:
        return self.extent is Extent.ALL

    def spec(self, parameter: TensorSpec) -> TensorSpec | None:
        """`weight.exp_avg`; None where a parameter of that shape has none."""
        if len(parameter.shape) not in self.dimensions:
            return None
        scalar = self.extent is Extent.ONE
        return TensorSpec(
            name=f"{parameter.name}.{self.name}", shape=self.extent.of(parameter.shape),
            dtype=torch.float32 if scalar else parameter.dtype, stride=parameter.stride if self.like_parameter else None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Optimizer:
    """How to build it for some parameters, and the state it will keep for each of them."""

    name: str
    build: Build
    state: tuple[StateTensor, ...]
    fused: bool
    """One kernel, or several in place: without a temporary the size of a parameter."""
    options: str = ""
    """What its groups say: a run that goes on must have the same."""
    tuned: str = ""
    """Learning rate and weight decay of its groups, which may be others."""
    average: float | None = None
    """The decay of the weights' moving average, which lies beside the state."""

    @property
    def whole(self) -> bool:
        """Whether it looks at a parameter as a whole, and not at each of its numbers alone, as its state tells."""
        return any(tensor.extent in (Extent.ROWS, Extent.COLUMNS) for tensor in self.state)

    @property
    def is_bare(self) -> bool:
        """Whether it knows nothing of earlier updates."""
        return all(tensor.name == AVERAGE for tensor in self.state)

    def state_layout(self, parameters: Mapping[str, TensorSpec]) -> Layout:
        """Layout of the state of one block's trainable parameters: `weight.exp_avg`, ..."""
        found = [tensor.spec(replace(spec, name=name)) for name, spec in parameters.items() for tensor in self.state]
        return Layout.of([spec for spec in found if spec is not None])

    def adopt(
        self,
        optimizer: torch.optim.Optimizer,
        named: Iterable[tuple[str, nn.Parameter]],
        views: Mapping[str, torch.Tensor],
        *,
        begun: bool = True,
    ) -> None:
        """Give `optimizer` the state in `views` as its own; it updates them in place. The memory stays its owner's.

        begun: whether a step was made before, so that an average is one.
        """
        named = list(named)
        for name, parameter in named:
            optimizer.state[parameter] = {
                tensor.name: views[f"{name}.{tensor.name}"]
                for tensor in self.state
                if parameter.ndim in tensor.dimensions and tensor.name != AVERAGE
            }
        if self.average is not None and named:
            pairs = [(views[f"{name}.{AVERAGE}"], parameter) for name, parameter in named]
            optimizer.register_step_post_hook(_Averaging(self.average, pairs, begun))


@functools.cache
def choose(name: str, *, lr: float, weight_decay: float = 0.0, momentum: float = 0.0) -> Optimizer:
    """`adam`, `adamw` or `sgd`, fused, or `adafactor`. Raises OptionError for another name or a negative number."""
    if name not in NAMES:
        raise OptionError(f"--optimizer: expected one of {', '.join(NAMES)}; found {name!r}.")
    for option, value in (("lr", lr), ("weight-decay", weight_decay), ("momentum", momentum)):
        if not value >= 0 or value == float("inf"):
            raise OptionError(f"--{option}: expected a finite number, zero or above; found {value}.")
    if momentum and name != "sgd":
        raise OptionError(f"--momentum goes with --optimizer sgd; {name} keeps moments of its own.")
    keywords: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    if name == "adafactor":
        # Parameter by parameter, as torch does on the CPU: for all at once it would take as much memory again as they have.
        return describe(name, lambda parameters: torch.optim.Adafactor(parameters, foreach=False, **keywords))
    if name == "sgd":
        keywords["momentum"] = momentum
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
    return describe(name, lambda parameters: kind(parameters, fused=True, **keywords))


class _Averaging:
    """Behind each step: the averages of some parameters, as torch.optim.swa_utils.AveragedModel makes them. The first step's
    are the parameters themselves."""

    def __init__(self, decay: float, pairs: Iterable[tuple[torch.Tensor, nn.Parameter]], begun: bool) -> None:
        self._take, self._begun = get_ema_multi_avg_fn(decay), begun  # type: ignore[no-untyped-call]
        self._pairs: dict[torch.dtype, list[tuple[torch.Tensor, nn.Parameter]]] = {}
        for average, parameter in pairs:
            self._pairs.setdefault(average.dtype, []).append((average, parameter))

    def __call__(self, *_: object) -> None:
        for pairs in self._pairs.values():
            averages, parameters = [one for one, _ in pairs], [one.detach() for _, one in pairs]
            if self._begun:
                self._take(averages, parameters, None)
            else:
                torch._foreach_copy_(averages, parameters)
        self._begun = True


def averaging(choice: Optimizer, decay: float | None) -> Optimizer:
    """`choice`, with an exponential moving average of each parameter beside its state; None: without one."""
    if decay is None:
        return choice
    return replace(choice, state=(*choice.state, StateTensor(AVERAGE, Extent.ALL)), average=decay)


def chosen(name: str, lr: float, weight_decay: float, momentum: float, ema: float | None) -> Optimizer:
    """As `choose`, with momentum where that is for it, and with a moving average of decay `ema`."""
    found = choose(name, lr=lr, weight_decay=weight_decay, momentum=momentum if name == "sgd" else 0.0)
    return averaging(found, ema)


def refuse_divided(optimizer: Optimizer, divided_by: str) -> None:
    """Raises OptionError for one that looks at a weight as a whole where something divides it. divided_by: in words, or ""."""
    if optimizer.whole and divided_by:
        raise OptionError(
            f"optimizer {optimizer.name} looks at a weight as a whole, and {divided_by} divides it. Take another."
        )


def describe(name: str, build: Build) -> Optimizer:
    """Any optimizer that keeps all it knows in a state that starts at zero: found by trial steps.

    Raises OptionError for one that cannot be built, and for one whose state cannot be laid out ahead: neither a scalar
    nor shaped like its parameter or like its rows or columns, not zero at the start, or elsewhere than in the state of its
    parameters.
    """
    try:
        return _tried(name, functools.partial(_without_compiler, build))
    except OptionError:
        raise
    except Exception as error:
        raise OptionError(f"optimizer {name}: a trial step failed: {type(error).__name__}: {error}") from error


def scheduled(schedule: str | SchedulerFactory, optimizer: Optimizer) -> Optimizer:
    """`optimizer` with the state that it keeps under such a scheduler: OneCycleLR gives SGD a momentum."""
    if isinstance(schedule, str):
        return optimizer
    options = Scheduler(schedule, optimizer.build).at(0)

    def build(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        built = optimizer.build(parameters)
        tune(built, options)
        return built

    found = averaging(describe(optimizer.name, build), optimizer.average)
    return found if len(found.state) > len(optimizer.state) else optimizer


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
    if any(one is not parameter for group in optimizer.param_groups for one in group["params"]):
        raise OptionError(
            "optimizer: the function is called with the parameters of each partition, and gave the optimizer others. Let it "
            "pass on what it gets: lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        )
    if "closure" in inspect.signature(type(optimizer).step).parameters and isinstance(optimizer, torch.optim.LBFGS):
        raise OptionError("optimizer: LBFGS calls the whole model again inside its step, which a partition cannot do.")
    _refuse_joint_step(name, build)
    parameter.grad = torch.zeros(2, 3)
    take_step(optimizer)
    shapes = _TRIED[:1]
    if any(
        isinstance(value, torch.Tensor) and value.shape not in ((), (2, 3)) for value in optimizer.state[parameter].values()
    ):
        shapes = _TRIED
    state = _states(name, {shape: _after_zeros(build, shape) for shape in shapes})
    tuned, options = (
        repr(
            [
                {key: str(group[key]) for key in group if key != "params" and (key in _TUNED) is free}
                for group in optimizer.param_groups
            ]
        )
        for free in (True, False)
    )
    in_place = bool(optimizer.defaults.get("fused")) or not _makes_temporaries(build)
    found = Optimizer(name, build, state, in_place, options, tuned)
    steps = itertools.chain(*(enumerate(_steps_both_ways(found, shape), 1) for shape in shapes))
    step = next((n for n, (one, other) in steps if not _same(one, other)), None)
    if step is not None:
        raise OptionError(
            f"optimizer {name}: its step {step} is not a step from a state of zeros, kept while the optimizer is built anew "
            "for each visit of a partition (it may take a first gradient as it is, as dampening does, start from a copy "
            "of the parameter, or count in its groups), so it cannot be kept at home. Use adam, adamw, sgd or adafactor."
        )
    return found


class _Made(TorchFunctionMode):
    """Whether anything inside makes a tensor of so many numbers."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self._numbers, self.any = numbers, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "__get__":  # of an attribute, as a gradient
            return found
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        made = (one for one in tree_leaves(found) if isinstance(one, torch.Tensor) and one.numel() >= self._numbers)
        self.any = self.any or any(one.untyped_storage()._cdata not in given for one in made)
        return found


def _makes_temporaries(build: Build) -> bool:
    """Whether a step, behind the first, which makes the state, needs memory of the size of a parameter."""
    parameter = nn.Parameter(torch.ones(16, 16))
    parameter.grad = torch.ones(16, 16)
    optimizer = build([parameter])
    take_step(optimizer)
    made = _Made(parameter.numel())
    with made:
        take_step(optimizer)
    return made.any


def _refuse_joint_step(name: str, build: Build) -> None:
    """Raises OptionError where what a parameter becomes depends on which others are beside it: a partition's are alone."""
    alone, beside, other = (nn.Parameter(torch.full((2, 3), number)) for number in (1.0, 1.0, 2.0))
    for parameters in ([alone], [beside, other]):
        for parameter in parameters:
            parameter.grad = parameter.detach() / 4
        take_step(build(parameters))
    if not torch.equal(alone, beside):
        raise OptionError(
            f"optimizer {name}: its step looks at several parameters together (their norm?), and a partition has its own "
            "alone. Clip with --clip-grad-norm, or use an optimizer that takes each parameter by itself."
        )


_TRIAL_STEPS = 12


def _steps_both_ways(choice: Optimizer, shape: tuple[int, ...]) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """(parameter and state after each step of one that stays, the same of one that is built anew for every step)."""
    numbers = torch.arange(1.0, 1.0 + prod(shape)).view(shape)
    stays, visits = (nn.Parameter(numbers.clone()) for _ in range(2))
    layout = choice.state_layout({"p": TensorSpec(name="p", shape=shape, dtype=torch.float32)})
    views = layout.views(torch.zeros(layout.padded_nbytes, dtype=torch.uint8))
    one = choice.build([stays])
    for step in range(_TRIAL_STEPS):
        for parameter in (stays, visits):
            parameter.grad = numbers * (-0.7) ** step
        take_step(one)
        other = choice.build([visits])
        choice.adopt(other, [("p", visits)], views)
        take_step(other)
        names = [tensor.name for tensor in choice.state if len(shape) in tensor.dimensions]
        yield (
            [stays.detach(), *(one.state[stays][name] for name in names)],
            [visits.detach(), *(other.state[visits][name] for name in names)],
        )


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """NaN equals NaN: a rate that is far too high is not our affair."""
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, other, strict=True))


def _after_zeros(build: Build, shape: tuple[int, ...]) -> dict[str, object]:
    """The state of a parameter of that shape after one step on zeros."""
    parameter = nn.Parameter(torch.zeros(shape))
    optimizer = build([parameter])
    parameter.grad = torch.zeros(shape)
    take_step(optimizer)
    return {key: value for key, value in optimizer.state[parameter].items() if value is not None}


def _states(name: str, found: Mapping[tuple[int, ...], Mapping[str, object]]) -> tuple[StateTensor, ...]:
    """found: by the shape of a parameter, its state after one step on zeros."""
    keys = dict.fromkeys(key for state in found.values() for key in state)
    return tuple(
        _state_tensor(name, key, {shape: state[key] for shape, state in found.items() if key in state}, tuple(found))
        for key in keys
    )


def _state_tensor(
    name: str, key: str, values: Mapping[tuple[int, ...], object], tried: tuple[tuple[int, ...], ...]
) -> StateTensor:
    """values: by the shape of the parameter, of those among `tried` that have it."""
    fitting = [
        extent
        for extent in Extent
        if all(isinstance(value, torch.Tensor) and value.shape == extent.of(shape) for shape, value in values.items())
    ]
    tensors = [value for value in values.values() if isinstance(value, torch.Tensor) and value.dtype is torch.float32]
    kinds = {tried[:1] + tried[2:]: range(2, 1 << 10), tried[1:2]: range(2), tried: range(1 << 10)}
    dimensions = kinds.get(tuple(shape for shape in tried if shape in values))
    if not fitting or len(tensors) < len(values) or dimensions is None:
        raise OptionError(
            f"optimizer {name}: its state {key!r} has no fixed layout, so it cannot be kept at home. Use adam, adamw or sgd."
        )
    # After one step on zeros a moment is still zero; a scalar may only be the step count.
    if any(value.count_nonzero().item() for value in tensors) and (fitting[0] is not Extent.ONE or key != "step"):
        raise OptionError(f"optimizer {name}: its state {key!r} does not start at zero. Use adam, adamw or sgd.")
    return StateTensor(key, fitting[0], dimensions)
