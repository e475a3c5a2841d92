"""Optimizers, and the state that each keeps for a parameter, found out before there is a parameter.

An optimizer creates its state in its first step, where and when it chooses. Here the state has a home and a layout as weights
do, so it must be known ahead: steps on tensors of the same shapes show every tensor that it keeps, and what it keeps beside
tensors.
"""

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

import seqpart.model.optimizer_trials as trials
from seqpart.device.compiler import take_step, without_compiler
from seqpart.errors import CorruptFile, OptionError, refusing
from seqpart.model.named_optimizers import NAMES, OF_BITSANDBYTES, OF_TORCH, ROOM_IN_8_BITS, SLICE, is_spared, named_build
from seqpart.model.optimizer_state import TEXT, AtHome, NoHomeError, Several, empty_allowed, parts_of
from seqpart.model.optimizer_trials import Build, Found, Temporaries
from seqpart.model.rounding import NARROW, ROOM_TO_ROUND, RoundingSteps, average_into
from seqpart.model.rounding import SLICE as ROUNDED_AT_ONCE
from seqpart.model.scheduler import Groups, Scheduler, SchedulerFactory, Whole, note_rates, tune
from seqpart.model.slices import room_of_slices
from seqpart.model.tensors import twin_of
from seqpart.store.layout import Layout, TensorSpec, spec_of

AVERAGE = "average"
"""Name of a parameter's moving average in its state."""
_TUNED = ("lr", "weight_decay")
"""Options of a group whose values may change during training."""
_FOUND = defaultdict[tuple[str, bool], Found](Found)
"""Results of the trials so far by name, and whether it has a momentum: all learning rates share them."""
UNKNOWN = "?"
"""Group of a parameter whose group is not known yet."""


@dataclass(frozen=True)
class Optimizer:
    """An optimizer: how to build it for some parameters, and the state that it will keep for each of them."""

    name: str
    function: Build
    """The user's, whose list of several optimizers is one."""
    options: str = ""
    """Options of its groups, which a resumed run must repeat."""
    tuned: str = ""
    """Learning rate and weight decay of its groups, which a resumed run may change."""
    has_rate: bool = True
    """True if its groups have a learning rate."""
    average: float | None = None
    """Decay of the weights' moving average, which is kept beside the state; None: there is none."""
    is_known: bool = False
    """True for an optimizer of torch chosen by name, which needs no trial steps that show whether its state is complete."""
    named: bool = False
    """True if the function takes pairs (name, parameter)."""
    example: str = "weight"
    """Name of one of the model's parameters, which trials give to theirs."""
    is_schedule_free: bool = False
    """True if its `eval()` makes other weights than those that are trained: a result of their own, tested at the end."""
    moments: torch.dtype | None = None
    """Type of the state of weights in bfloat16 whose steps are rounded stochastically; None: steps are the optimizer's."""
    found: Found = field(default_factory=Found, compare=False, repr=False)
    """Results of its trials, by kind of parameter."""

    def build(self, parameters: Sequence[nn.Parameter], names: Sequence[str] = ()) -> torch.optim.Optimizer:
        """Builds the optimizer of these parameters. names: theirs in the model; without any, all have that of the example."""
        given: list[Any] = [*parameters]
        return self.function([*zip(names or [self.example] * len(given), given, strict=True)] if self.named else given)

    @property
    def at_once(self) -> int:
        """Numbers of a parameter that each of some threads works on at a time; 0: torch shares whole parameters."""
        if self.moments is not None:
            return ROUNDED_AT_ONCE if self.in_slices else 0
        return SLICE if self.name in OF_BITSANDBYTES else 0

    def step_room(self, largest: int, second: int, total: int, *, in_lists: bool = False) -> int:
        """Bytes that a step takes beside the state. largest, second, total: bytes of the largest parameter, of the next and of
        all. in_lists: see `temporaries`."""
        if self.moments is not None:
            whole = 0 if self.in_slices else 2 * largest * (2 + sum(self.temporaries()))
            return whole + room_of_slices(ROOM_TO_ROUND, largest // NARROW.itemsize, ROUNDED_AT_ONCE)
        if self.at_once:
            return room_of_slices(ROOM_IN_8_BITS, largest // 2, self.at_once)
        found = self.temporaries(in_lists=in_lists)
        return found.largest * largest + found.second * second + found.total * total

    @functools.cached_property
    def in_slices(self) -> bool:
        """True if weights in bfloat16 are updated a slice at a time."""
        with tried(self.name):
            return isinstance(built := self.build([_example()]), RoundingSteps) and built.in_slices

    @property
    def averages(self) -> bool:
        """True if its state holds averages of the weights, which are a result of their own, tested at the end."""
        return self.average is not None or self.is_schedule_free

    def temporaries(self, *, in_lists: bool = False) -> Temporaries:
        """Memory that a step takes beside the state: none in one fused kernel, or in several in place. in_lists: True where
        torch's optimizers take lists of parameters by default, as on a GPU."""
        known = self.found.temporaries
        if in_lists not in known:
            with tried(self.name):
                fused = self.build([_example()]).defaults.get("fused")
                known[in_lists] = Temporaries() if fused else trials.temporaries(self.build, in_lists=in_lists)
        return known[in_lists]

    @functools.cached_property
    def whole(self) -> bool:
        """True if a step depends on a parameter as a whole, and not on each of its numbers alone."""
        with tried(self.name):
            return trials.looks_at_whole(self.build)

    @functools.cached_property
    def has_modes(self) -> bool:
        """True if its library wants `train()` and `eval()` called around training, which a run does not do."""
        with tried(self.name):
            return callable(getattr(self.build([_example()]), "eval", None))

    @property
    def is_bare(self) -> bool:
        """True if it keeps no state for the parameters that it was tried on."""
        return not any(self.found.states.values())

    @property
    def begins_itself(self) -> bool:
        """True if its first step makes its state in new memory; else it begins as zeros, in its home."""
        return any(spec.name == TEXT for state in self.found.states.values() for spec in state)

    def kind(self, name: str, spec: TensorSpec) -> TensorSpec:
        """All that a parameter's state depends on. name: in the model, if the function knows names."""
        return trials.kind_of(spec, self.found.groups.get(name, UNKNOWN) if self.named else "")

    def try_on(self, parameters: Mapping[str, TensorSpec]) -> None:
        """Finds the state that it keeps for such parameters. Raises OptionError, naming the first that it cannot train."""
        if new := {name: spec for name, spec in parameters.items() if self.kind(name, spec) not in self.found.states}:
            with tried(self.name):
                if self.named:
                    self.found.groups |= trials.groups_of(self.build, new)
                wanted = dict[TensorSpec, str]()
                for name, spec in new.items():
                    wanted.setdefault(self.kind(name, spec), name)
                trials.explore(self.name, self.build, wanted, self.found, is_known=self.is_known)
        states = self.found.states.values()
        if self.average is not None and any(spec.name == AVERAGE for state in states for spec in state):
            raise OptionError(f"--ema: optimizer {self.name} keeps a state {AVERAGE!r} of its own. Leave --ema out.")

    def state_layout(self, parameters: Mapping[str, TensorSpec], named: Callable[[str], str] = str) -> Layout:
        """Returns the layout of the state of one block's trainable parameters: `weight.exp_avg`, ... named: gives the
        names that they have in the model."""
        self.try_on({named(name): spec for name, spec in parameters.items()})
        found = []
        for name, parameter in parameters.items():
            state = self.found.states[self.kind(named(name), parameter)]
            found += [replace(spec, name=f"{name}.{spec.name}") for spec in state]
            found += [replace(parameter, name=f"{name}.{AVERAGE}")] if self.average is not None else []
        return Layout.of(found)

    def groups_by_identity(self, name: str, parameter: nn.Parameter) -> bool:
        """True if the options of a parameter depend on which object it is, and not on its name, form and attributes alone."""
        with tried(self.name):
            return self._options_of(name, parameter) != self._options_of(name, twin_of(parameter, parameter.detach()))

    def _options_of(self, name: str, parameter: nn.Parameter) -> list[str]:
        groups = [group for part in parts_of(self.build([parameter], [name])) for group in part.param_groups]
        return [
            repr([(key, str(value)) for key, value in group.items() if key != "params"])
            for group in groups
            if any(one is parameter for one in group["params"])
        ]


class Adopted:
    """An optimizer that was just built, whose state lies in memory that keeps its owner. names: {id of a parameter: its name in
    the model}, needed for a scheduler's options."""

    def __init__(self, choice: Optimizer, optimizer: torch.optim.Optimizer, names: Mapping[int, str] = {}) -> None:
        self.optimizer, self._choice, self._names = optimizer, choice, names
        self._state, self._rate = AtHome(optimizer, choice.found.classes), 1.0
        self._averaging: list[_Averaging] = []
        note_rates(optimizer)

    def take(
        self, parameters: Iterable[tuple[str, nn.Parameter]], views: Mapping[str, torch.Tensor],
        named: Callable[[str], str] = str, *, begun: bool = True,
    ) -> None:  # fmt: skip
        """Gives parameters the tensors in `views` as their state. named: see `state_layout`. begun: true if a step was made
        before, so that the average has values; otherwise all are zeros."""
        parameters = list(parameters)
        for name, parameter in parameters:
            state = self._choice.found.states[self._choice.kind(named(name), spec_of(name, parameter))]
            self._state.take(parameter, named(name), {spec.name: views[f"{name}.{spec.name}"] for spec in state})
        if self._choice.average is not None and parameters:
            pairs = [(views[f"{name}.{AVERAGE}"], parameter) for name, parameter in parameters]
            names = [named(name) for name, _ in parameters] if self._choice.moments is not None else []
            self._averaging.append(_Averaging(self._choice.average, pairs, begun, names))

    def restore(self) -> None:
        """Once the state has come: gives the optimizer what it knew besides tensors. Raises CorruptFile for what none wrote."""
        try:
            self._state.restore()
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            raise CorruptFile(
                f"optimizer {self._choice.name}: expected the state that it wrote; found another one ({type(error).__name__}: "
                f"{error}). Resume from another checkpoint, or start again."
            ) from error

    def tune(self, rate: float | Groups) -> None:
        """Sets the learning rate of the next step, see `seqpart.model.scheduler.tune`."""
        if isinstance(rate, Groups) or rate != self._rate:
            with self._state.knowledge.tuned():
                tune(self.optimizer, rate, self._names)
            self._rate = rate if isinstance(rate, float) else 1.0

    def step(self, *place: int) -> None:
        """Makes a step. place: run seed, stage and update, for rounding. Raises OptionError for state that the plan has no room
        for."""
        if isinstance(self.optimizer, RoundingSteps):
            self.optimizer.at(*place)
        take_step(self.optimizer)
        with self._explained():
            self._state.settle()
        for averaging in self._averaging:
            averaging(*place)

    def write(self) -> None:
        """Writes what the optimizer knows besides tensors into the views, before these are saved. Raises OptionError."""
        with self._explained():
            self._state.write()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except NoHomeError as error:
            raise OptionError(
                f"optimizer {self._choice.name}: {error}. The trial steps did not show it, so the plan has no room for it. Use "
                "another optimizer."
            ) from None


@functools.cache
def choose(name: str, *, lr: float, weight_decay: float = 0.0, momentum: float = 0.0, no_decay: str = "") -> Optimizer:
    """Returns an optimizer of NAMES. no_decay: see `is_spared`.

    Raises OptionError for another name, a negative number, and one whose library is not installed.
    """
    if name not in NAMES:
        raise OptionError(f"--optimizer: expected one of {', '.join(NAMES)}; found {name!r}.")
    for option, value in (("lr", lr), ("weight-decay", weight_decay), ("momentum", momentum)):
        if not value >= 0 or value == float("inf"):
            raise OptionError(f"--{option}: expected a finite number, zero or above; found {value}.")
    if momentum and name != "sgd":
        raise OptionError(f"--momentum goes with --optimizer sgd; {name} keeps moments of its own.")
    build: Build = named_build(name, lr=lr, weight_decay=weight_decay, momentum=momentum, no_decay=no_decay)
    found = describe(name, build, is_known=name in OF_TORCH)
    found = replace(found, is_schedule_free=name == "schedulefree")
    return found if found.named else replace(found, found=_FOUND[name, bool(momentum)])


def refuse_unknown(no_decay: str, dimensions: Mapping[str, int]) -> None:
    """Raises OptionError for a pattern that spares none of the parameters, {name: its dimensions}; bias and norm may spare none
    beside others that do."""
    patterns = [*map(str.strip, no_decay.split(","))]
    spare = {pattern: any(is_spared(pattern, *one) for one in dimensions.items()) for pattern in patterns}
    for pattern in patterns:
        if not spare[pattern] and not (pattern in ("bias", "norm") and any(spare.values())):
            raise OptionError(
                f"--no-decay: expected bias, norm, or a pattern of parameters' names; found {pattern!r}, which is none of "
                f"{', '.join(list(dimensions)[:6])}{', ...' if len(dimensions) > 6 else ''}."
            )


class _Averaging:
    """Averages parameters after each step as torch.optim.swa_utils.AveragedModel does: after the first step the averages are
    the parameters themselves."""

    def __init__(
        self, decay: float, pairs: Sequence[tuple[torch.Tensor, nn.Parameter]], begun: bool, names: Sequence[str] = ()
    ) -> None:
        """names: of the parameters, if averages in bfloat16 are rounded stochastically."""
        self._take, self._begun, self._share = get_ema_multi_avg_fn(decay), begun, 1 - decay  # type: ignore[no-untyped-call]
        self._pairs: dict[torch.dtype, list[tuple[torch.Tensor, nn.Parameter]]] = {}
        for average, parameter in pairs:
            self._pairs.setdefault(average.dtype, []).append((average, parameter))
        self._names = [name for name, (average, _) in zip(names, pairs, strict=False) if average.dtype is NARROW]

    def __call__(self, *place: int) -> None:
        for dtype, pairs in self._pairs.items():
            averages, parameters = [one for one, _ in pairs], [one.detach() for _, one in pairs]
            if self._begun and self._names and dtype is NARROW:
                for name, average, parameter in zip(self._names, averages, parameters, strict=True):
                    average_into(average, parameter, self._share, *place, name, AVERAGE)
            elif self._begun:
                self._take(averages, parameters, None)
            else:
                torch._foreach_copy_(averages, parameters)
        self._begun = True


@functools.cache
def rounding(choice: Optimizer, moments: torch.dtype) -> Optimizer:
    """`choice` with steps of weights in bfloat16 that are computed in float32 and rounded stochastically."""

    def function(named_parameters: list[Any]) -> torch.optim.Optimizer:
        given = named_parameters if choice.named else [parameter for _, parameter in named_parameters]
        names = {id(parameter): name for name, parameter in named_parameters}
        with without_compiler():
            return RoundingSteps(choice.function(given), names, moments)

    return replace(choice, function=function, named=True, moments=moments, found=Found())


def refuse_divided(optimizer: Optimizer, divided_by: str) -> None:
    """Raises OptionError for an optimizer that depends on whole weights if something divides them: divided_by, or ""."""
    if divided_by and optimizer.whole:
        raise OptionError(
            f"optimizer {optimizer.name} needs each weight as a whole, and {divided_by} divides it. Take another."
        )


def refuse_joint(optimizer: Optimizer, methods: Sequence[object], *, late: bool = False) -> None:
    """Raises OptionError for an optimizer of all parameters together, unless a method is left that makes one partition.

    late: true for one that counts updates in its groups, where parameters begin to learn during the run.
    """
    if not methods and late and not optimizer.found.joint:
        raise OptionError(
            f"--unfreeze: optimizer {optimizer.name} counts updates in its groups. Each partition has one of its own, which "
            "would count from another update on. Give --method full, --freeze alone, or an optimizer that counts with each "
            "parameter."
        )
    if not methods:
        raise OptionError(
            f"optimizer {optimizer.name}: its step looks at several parameters together (their norm, or their places in the "
            "list?), and each partition has an optimizer of its own. Give --method full. Elsewhere clip with --clip-grad-norm, "
            "or use an optimizer that takes each parameter by itself."
        )


def refuse_unrounded(optimizer: Optimizer, parameters: Iterable[TensorSpec]) -> None:
    """Raises OptionError where steps cannot be rounded stochastically. parameters: all that learn, on which it was tried."""
    if optimizer.moments is None:
        return
    option, types = "--rounding stochastic", {spec.dtype for spec in parameters}
    if NARROW not in types:
        found = ", ".join(sorted(str(one).removeprefix("torch.") for one in types))
        raise OptionError(
            f"{option} is for weights in bfloat16; found {found}. Convert the model, model.to(torch.bfloat16), or leave it out."
        )
    if optimizer.found.joint or optimizer.found.counts:
        raise OptionError(
            f"{option} makes the step of each weight by itself, and optimizer {optimizer.name} counts updates in its groups or "
            "looks at several weights together. Take adam, adamw or sgd."
        )
    if optimizer.moments is NARROW and not optimizer.in_slices:
        raise OptionError(
            f"--moments-dtype bf16 goes with --optimizer adam, adamw or sgd; found {optimizer.name}. Leave it out: fp32."
        )


def refuse_rateless(optimizer: Optimizer, schedule: str | SchedulerFactory, warmup: int) -> None:
    """Raises OptionError for an optimizer without a learning rate if a schedule would change it."""
    if not optimizer.has_rate and (warmup or schedule != "constant"):
        option = "--warmup-updates" if schedule == "constant" else "--lr-schedule"
        raise OptionError(
            f"{option}: the groups of optimizer {optimizer.name} have no learning rate (lr) to be changed. Leave it out, or "
            "give an optimizer that has one."
        )


def refuse_unlike_pieces(optimizer: Optimizer, parameters: Mapping[str, TensorSpec], divided_by: str) -> None:
    """Raises OptionError for an optimizer whose state depends on a weight's size. parameters: weights and pieces, all tried."""
    if optimizer.named:
        raise OptionError(
            f"optimizer {optimizer.name} chooses by names, and {divided_by} divides weights into rows that have none. Let it "
            "take parameters alone."
        )
    kinds = [optimizer.kind(name, spec) for name, spec in parameters.items()]
    states = {kind: optimizer.found.states[kind] for kind in kinds}
    texts = {spec for state in states.values() for spec in state if spec.name == TEXT}
    if len(texts) > 1 or not trials.follows_sizes(states):
        raise OptionError(
            f"optimizer {optimizer.name} keeps other state for a whole weight than for pieces of it, and {divided_by} "
            "divides it. Take another."
        )


def describe(name: str, build: Build, *, is_known: bool = False, example: str = Optimizer.example) -> Optimizer:
    """Describes any optimizer. name: the function's, or "". example: the name of one of the model's parameters.

    Raises OptionError for one that cannot be built. Its state is found when the parameters are known: see `try_on`.
    """
    name = name if name.isidentifier() else ""
    with tried(name or "function"):
        made = Optimizer(name, functools.partial(_built, build), is_known=is_known, named=_takes_names(build), example=example)
        return _described(made)


@contextmanager
def tried(name: str) -> Iterator[None]:
    """A context for trial steps of an optimizer: errors become OptionError, and torch's random state is restored."""
    failed = f"optimizer {name}: a trial step failed"
    with refusing(lambda error: OptionError(f"{failed}: {trials.failure(error)}")), torch.random.fork_rng(devices=[]):
        yield


def scheduled(schedule: str | SchedulerFactory, optimizer: Optimizer) -> Optimizer:
    """`optimizer` with the state that it keeps under this scheduler: OneCycleLR gives SGD a momentum."""
    if isinstance(schedule, str):
        return optimizer
    first = Scheduler(schedule, Whole(optimizer.build, [(optimizer.example, _example())])).at(0).options[0]

    def function(given: list[Any]) -> torch.optim.Optimizer:
        built = optimizer.function(given)
        for group in built.param_groups:
            group.update({name: value for name, value in first.items() if name != "lr" and name in group})
        return built

    with tried(optimizer.name):
        found = replace(optimizer, function=function, found=Found())
        return found if _state_tensors(found) > _state_tensors(optimizer) else optimizer


def _state_tensors(optimizer: Optimizer) -> int:
    return len(optimizer.state_layout({optimizer.example: spec_of("", _example())}).specs)


def _takes_names(function: Build) -> bool:
    """True if the function's first parameter is called `named_parameters`: then it gets pairs (name, parameter)."""
    try:
        return next(iter(inspect.signature(function).parameters), "") == "named_parameters"
    except (TypeError, ValueError):  # a callable without a signature
        return False


def _built(build: Build, parameters: list[Any]) -> torch.optim.Optimizer:
    """Returns what `build` makes of these parameters: one optimizer, also where it returns several."""
    with without_compiler(), empty_allowed():
        found = build(parameters)
        if isinstance(found, list | tuple) and all(isinstance(one, torch.optim.Optimizer) for one in found):
            return Several(found)  # of none, where the function has none for these names
    return found


def _example() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2, 3, dtype=torch.float32, device="cpu"))


def example_of(model: object) -> str:
    """Returns the name of a model's first matrix, or a name that any parameter may have."""
    several = isinstance(model, list | tuple)
    for number, part in enumerate(model if isinstance(model, list | tuple) else [model]):
        for name, parameter in part.named_parameters() if isinstance(part, nn.Module) else ():
            if parameter.ndim > 1:
                return f"{number}.{name}" if several else name
    return Optimizer.example


def _described(choice: Optimizer) -> Optimizer:
    parameter = _example()
    optimizer = choice.build([parameter])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(
            "optimizer: expected a function that returns a torch.optim.Optimizer, or a list of several; found "
            f"{type(optimizer).__name__}."
        )
    if any(one is not parameter for group in optimizer.param_groups for one in group["params"]):
        raise OptionError(
            "optimizer: the function is called with the parameters of each partition, and gave the optimizer others. Let it "
            "pass on what it gets: lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        )
    if any(isinstance(part, torch.optim.LBFGS) for part in parts_of(optimizer)):
        raise OptionError("optimizer: LBFGS calls the whole model again inside its step, which a partition cannot do.")
    groups = [{key: str(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    tuned, options = (
        repr([{key: one[key] for key in one if (key in _TUNED) is free} for one in groups]) for free in (True, False)
    )
    names = "+".join(type(part).__name__ for part in parts_of(optimizer) if type(part) is not Several)
    has_rate = optimizer.param_groups == [{"params": []}] or any("lr" in group for group in optimizer.param_groups)
    return replace(choice, name=choice.name or names, options=options, tuned=tuned, has_rate=has_rate)


@dataclass(frozen=True, slots=True)
class GradientNorm:
    norm: torch.Tensor
    dtype: torch.dtype
    """Type of the gradient; the norm of a complex one is real."""

    @classmethod
    def of(cls, gradient: torch.Tensor) -> "GradientNorm":
        """Computes it by the kernel of `torch.nn.utils.clip_grad_norm_`: that of lists of tensors on a GPU, which adds up in
        another order, and for each tensor alone."""
        return cls(torch._foreach_norm([gradient])[0], gradient.dtype)


def total_norm(norms: Sequence[GradientNorm]) -> torch.Tensor | None:
    """Returns the norm of all gradients, a scalar, from norms in the order of the model's parameters; None without any."""
    if not norms:
        return None
    order: Sequence[int] = range(len(norms))
    if len({one.dtype for one in norms}) > 1:
        like: list[torch.Tensor | None] = [torch.empty(0, dtype=one.dtype, device=one.norm.device) for one in norms]
        groups = _group_tensors_by_device_and_dtype([like], with_indices=True)
        order = [place for _, places in groups.values() for place in places]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norms[place].norm for place in order]))
    return total
