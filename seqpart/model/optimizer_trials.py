"""Finds the state that an optimizer keeps for parameters of given shapes and types, and checks that it keeps nothing else.

An optimizer may keep other state for a vector than for a matrix, or for a large parameter than for a small one, without saying
so. So it makes a step on fake tensors of just these shapes, which take no memory; and on a few real numbers of each kind two
ways are compared: one lasting optimizer of all parameters, as in a plain loop, and one of each parameter alone, made anew for
every step with the state that it had, as partitions that come and go have it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, UnsupportedOperatorException
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seqpart.device.compiler import take_step, without_compiler
from seqpart.errors import OptionError
from seqpart.interrupts import put_off
from seqpart.store.layout import DTYPES, TensorSpec, spec_of

Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
State = tuple[TensorSpec, ...]
"""State of one parameter: names are keys of the optimizer's state."""
Step = tuple[Sequence[nn.Parameter], Sequence[Mapping[Any, object]]]
"""(parameters, state of each) after a step."""

_OTHERS = "Use adam, adamw, sgd or adafactor."
_FEW, _MANY = 1 << 14, 1 << 18
"""Numbers of a parameter in real steps: at most _FEW, or _MANY if it has other state with so few."""
_STEPS, _SKIPPED, _LATE = 12, 990, 3
"""Steps in which the two ways are compared. For the last `_LATE`, counters outside the state are raised by `_SKIPPED`, so that
what is done at every 10th or 100th step is done too."""


def kind_of(spec: TensorSpec) -> TensorSpec:
    """Returns all that a parameter's state depends on: shape, type and strides."""
    return replace(spec, name="", offset=0)


def states_of(name: str, build: Build, parameters: Mapping[str, TensorSpec], *, is_known: bool) -> dict[TensorSpec, State]:
    """Returns {kind: state} for each kind of these parameters. is_known: True if it keeps nothing beside a state that begins at
    zero.

    Raises OptionError for one that refuses a kind of parameter, and for one whose state can have no home or is not complete.
    """
    wanted: dict[TensorSpec, str] = {}
    for parameter, spec in parameters.items():
        wanted.setdefault(kind_of(spec), f"{parameter} of shape {spec.shape} ({spec.dtype})")
    with ExitStack() as stack:
        stack.enter_context(without_compiler())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        found = _laid_out(name, build, wanted)
        if not is_known and found:
            _refuse_other_knowledge(name, build, _for_real(name, build, wanted, found))
    return found


def makes_temporaries(build: Build) -> bool:
    """True if a step after the first, which makes the state, needs memory of the size of a parameter."""
    parameter = nn.Parameter(torch.ones(16, 16, dtype=torch.float32, device="cpu"))
    parameter.grad = torch.ones_like(parameter)
    optimizer = build([parameter])
    take_step(optimizer)
    made = _Made(parameter.numel())
    with made:
        take_step(optimizer)
    return made.any


def looks_at_whole(build: Build) -> bool:
    """True if steps on a matrix differ from steps on pieces of its rows, each a parameter: then they depend on more than each
    number alone. Pieces have multiples of 16 numbers, which kernels treat alike wherever they lie."""
    numbers = torch.Generator().manual_seed(0)
    whole = nn.Parameter(_numbers(TensorSpec(name="", shape=(128, 96), dtype=torch.float32), numbers))
    pieces = [nn.Parameter(piece.clone()) for piece in torch.split(whole.detach(), 32)]
    optimizers = [build([parameter]) for parameter in (whole, *pieces)]
    for _ in range(_LATE):
        whole.grad = _numbers(spec_of("", whole), numbers)
        for piece, gradient in zip(pieces, torch.split(whole.grad, 32), strict=True):
            piece.grad = gradient.clone()
        for optimizer in optimizers:
            take_step(optimizer)
    return not _same([whole], [torch.cat([piece.detach() for piece in pieces])])


# --- state ------------------------------------------------------------------------------------------------------------


class _Halves(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode for steps on fake tensors, which have no values: a step that reads a number gets 1/2 (no division by zero), 1 or
    False. Kernels without a fake version that return nothing are skipped."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return False if dtype is torch.bool else 0.5 if dtype.is_floating_point else 1
        try:
            return func(*args, **(kwargs or {}))
        except UnsupportedOperatorException:
            if func._schema.returns:
                raise
        return None


def _without_numbers() -> AbstractContextManager[object]:
    stack = ExitStack()
    stack.enter_context(put_off())
    # Not what torch does for kernels that it knows no shapes of: with real tensors, which may be as large as the model.
    stack.enter_context(FakeTensorMode(allow_fallback_kernels=False))
    stack.enter_context(_Halves())  # type: ignore[no-untyped-call]
    return stack


def _laid_out(name: str, build: Build, wanted: Mapping[TensorSpec, str]) -> dict[TensorSpec, State]:
    """Finds the state of each kind by a step. wanted: {kind: the parameter that errors name}."""
    try:
        with _without_numbers():
            states = _after_a_step(build, list(wanted))
    except Exception:  # find out which one failed
        states = [_alone(name, build, kind, parameter) for kind, parameter in wanted.items()]
    return {kind: _specs(name, parameter, state) for (kind, parameter), state in zip(wanted.items(), states, strict=True)}


def _alone(name: str, build: Build, kind: TensorSpec, parameter: str) -> Mapping[object, object]:
    """State of a parameter of that kind, with real numbers if fake tensors fail and it is small."""
    try:
        with _without_numbers():
            return _after_a_step(build, [kind])[0]
    except Exception as error:
        found = error
    if prod(kind.shape) <= _MANY:
        try:
            return _after_a_step(build, [kind])[0]
        except Exception as error:
            found = error
    raise OptionError(
        f"optimizer {name}: a trial step on {parameter} failed: {type(found).__name__}: {found}. Use an optimizer that takes "
        "it, or freeze it: requires_grad_(False)."
    ) from found


def _after_a_step(build: Build, kinds: Sequence[TensorSpec]) -> list[Mapping[object, object]]:
    """State of one parameter of each kind, all zeros, after a step on gradients of zeros."""
    parameters = [nn.Parameter(_zeros(kind)) for kind in kinds]
    optimizer = build(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    take_step(optimizer)
    return [_state(optimizer, parameter) for parameter in parameters]


def _state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[object, object]:
    return {key: value for key, value in optimizer.state[parameter].items() if value is not None}


def _specs(name: str, parameter: str, state: Mapping[object, object]) -> State:
    for key, value in state.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            what = f"is {type(value).__name__}, not a tensor"
        elif type(value) not in (torch.Tensor, nn.Parameter, FakeTensor):
            what = f"is a tensor of a kind of its own, {type(value).__name__}"
        elif value.dtype not in DTYPES.values():
            what = f"is {value.dtype}, which no home has"
        else:
            continue
        raise OptionError(
            f"optimizer {name}: its state {key!r} of {parameter} {what}, so it has no fixed layout and cannot be kept at home. "
            + _OTHERS
        )
    return tuple(spec_of(str(key), value) for key, value in state.items() if isinstance(value, torch.Tensor))


# --- is the state complete? -------------------------------------------------------------------------------------------


def _for_real(
    name: str, build: Build, wanted: Mapping[TensorSpec, str], found: Mapping[TensorSpec, State]
) -> dict[TensorSpec, State]:
    """Returns {kind: state} for kinds that are small enough to be tried with real numbers, with state like the large ones."""
    small = {kind: _smaller(kind) for kind in wanted}
    states = _laid_out(name, build, {small[kind]: parameter for kind, parameter in wanted.items()})
    for kind, parameter in wanted.items():
        if _likened(kind, found[kind]) == _likened(small[kind], states[small[kind]]):
            continue
        if prod(kind.shape) > _MANY:
            raise OptionError(
                f"optimizer {name}: it keeps other state for {parameter} than for a smaller one, and that is too large to be "
                f"tried. {_OTHERS}"
            )
        states[kind] = found[kind]
    return states


def _likened(kind: TensorSpec, state: State) -> list[tuple[object, ...]]:
    return [(one.name, one.dtype, one.shape == kind.shape, len(one.shape)) for one in state]


def follows_numbers(kind: TensorSpec, state: State) -> bool:
    """True if the state has only scalars, and tensors of the parameter's shape."""
    return all(one.shape in ((), kind.shape) for one in state)


def is_alike(states: Mapping[TensorSpec, State]) -> bool:
    """True if parameters of the same type and number of dimensions have the same state, whatever their sizes."""
    found = {(kind.dtype, len(kind.shape)): _likened(kind, state) for kind, state in states.items()}
    return all(found[kind.dtype, len(kind.shape)] == _likened(kind, state) for kind, state in states.items())


def _smaller(kind: TensorSpec) -> TensorSpec:
    shape = list(kind.shape)
    while prod(shape) > _FEW:
        longest = shape.index(max(shape))
        shape[longest] = -(-shape[longest] // 2)
    stride = None
    if kind.stride is not None and shape:
        stride, step = [0] * len(shape), 1
        for axis in sorted(range(len(shape)), key=lambda axis: (kind.stride or ())[axis]):
            stride[axis], step = step, step * shape[axis]
    return replace(kind, shape=tuple(shape), stride=None if stride is None else tuple(stride))


def _refuse_other_knowledge(name: str, build: Build, states: Mapping[TensorSpec, State]) -> None:
    """Raises OptionError if a parameter's updates depend on more than its gradients and the state that has a home."""
    kinds = [*states, next(iter(states))]  # two at least: each is to learn as if it were alone
    try:
        step = _first_difference(
            _steps(build, kinds, states=None, together=True), _steps(build, kinds, states=states, together=False)
        )
        if step is None:
            return
        joint = _first_difference(
            _steps(build, kinds, states=None, together=True), _steps(build, kinds, states=None, together=False)
        )
        started = [key for state in _after_a_step(build, kinds) for key, value in state.items() if _has_begun(key, value)]
    except Exception as error:
        raise OptionError(
            f"optimizer {name}: a trial step failed where it is built anew for each visit of a partition, with the state "
            f"that it had: {type(error).__name__}: {error}. {_OTHERS}"
        ) from error
    if joint is not None:
        raise OptionError(
            f"optimizer {name}: its step looks at several parameters together (their norm, or their places in the list?), "
            "and a partition has its own alone. Clip with --clip-grad-norm, or use an optimizer that takes each by itself."
        )
    if started:
        raise OptionError(f"optimizer {name}: its state {started[0]!r} does not start at zero. {_OTHERS}")
    raise OptionError(
        f"optimizer {name}: its step {step} is not a step from a state of zeros, kept while the optimizer is built anew "
        "for each visit of a partition (it may take a first gradient as it is, as dampening does, start from a copy "
        f"of the parameter, give its state new tensors, or count in its groups), so it cannot be kept at home. {_OTHERS}"
    )


def _has_begun(key: object, value: object) -> bool:
    """True if a state is not zero after one step on zeros: a moment still is, and a scalar may only be the step count."""
    return isinstance(value, torch.Tensor) and bool(value.count_nonzero()) and (value.ndim > 0 or key != "step")


def _steps(
    build: Build, kinds: Sequence[TensorSpec], *, states: Mapping[TensorSpec, State] | None, together: bool
) -> Iterator[Step]:
    """Parameters and their state after each step: of one optimizer for all (`together`), or of one for each. With `states`,
    which begin as zeros, each is built anew for every step."""
    numbers = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(_numbers(kind, numbers)) for kind in kinds]
    slopes = [_numbers(kind, numbers) for kind in kinds]  # gradients that have something in common, as a loss gives them
    kept = [{spec.name: _zeros(spec) for spec in states[kind]} for kind in kinds] if states is not None else None
    stay = [] if kept is not None else [build(parameters)] if together else [build([one]) for one in parameters]
    begun, of_each = [_counts(optimizer) for optimizer in stay], stay * len(kinds) if together else stay
    for step in range(_STEPS):
        for number, (kind, parameter) in enumerate(zip(kinds, parameters, strict=True)):
            parameter.grad = (slopes[number] + _numbers(kind, numbers)) * (0.5 + number % 3)
        if step == _STEPS - _LATE:
            for optimizer, before in zip(stay, begun, strict=True):
                _skip(optimizer, before)
        for optimizer in stay:
            take_step(optimizer)
        for parameter, own in zip(parameters, kept, strict=True) if kept is not None else ():
            anew = build([parameter])
            anew.state[parameter] = dict(own)
            take_step(anew)
        yield parameters, [_state(*pair) for pair in zip(of_each, parameters, strict=True)] if kept is None else [*kept]


def _counts(optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], dict[str, int]]]:
    """Counters outside the state: dicts of the optimizer with their whole numbers."""
    places: list[dict[str, Any]] = [*optimizer.param_groups, vars(optimizer)]
    return [(place, {key: value for key, value in place.items() if type(value) is int}) for place in places]


def _skip(optimizer: torch.optim.Optimizer, before: list[tuple[dict[str, Any], dict[str, int]]]) -> None:
    for (place, now), (_, then) in zip(_counts(optimizer), before, strict=True):
        place.update({key: value + _SKIPPED for key, value in now.items() if value != then.get(key)})


def _first_difference(ones: Iterator[Step], others: Iterator[Step]) -> int | None:
    """The first step, from 1 on, after which parameters or their states differ; None if none does."""
    for step, ((mine, state), (theirs, kept)) in enumerate(zip(ones, others, strict=True), 1):
        if not _same(mine, theirs) or any(
            one.keys() != other.keys() or not _same(list(one.values()), [other[key] for key in one])
            for one, other in zip(state, kept, strict=True)
        ):
            return step
    return None


def _same(ones: Sequence[object], others: Sequence[object]) -> bool:
    """True if all tensors are equal. NaN equals NaN: a learning rate that is far too high is not checked here."""
    return all(
        isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(ones, others, strict=True)
    )


def _zeros(spec: TensorSpec) -> torch.Tensor:
    if spec.stride is None:
        return torch.zeros(spec.shape, dtype=spec.dtype, device="cpu")
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu").zero_()


def _numbers(kind: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    """Draws numbers of both signs, no two alike, so that effects of sign, order or another parameter show."""
    drawn = torch.empty(kind.shape, dtype=torch.float32, device="cpu").normal_(generator=generator)
    return _zeros(kind).copy_(drawn)


class _Made(TorchFunctionMode):
    """A mode that notes in `any` whether an operation makes a new tensor of at least `numbers` numbers."""

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
