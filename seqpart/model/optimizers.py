"""Optimizers, and the state that each keeps for a parameter, found out before there is a parameter.

An optimizer creates its state in its first step, where and when it chooses. Here the state has a home and a layout as weights
do, so it must be known ahead: a step on tensors of the same shapes shows every tensor that it keeps.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from seqpart.device.compiler import without_compiler
from seqpart.errors import OptionError
from seqpart.model.optimizer_trials import (
    Build,
    State,
    follows_numbers,
    is_alike,
    kind_of,
    looks_at_whole,
    makes_temporaries,
    states_of,
)
from seqpart.model.scheduler import Scheduler, SchedulerFactory, tune
from seqpart.store.layout import Layout, TensorSpec, spec_of

AVERAGE = "average"
"""Name of a parameter's moving average in its state."""
_TUNED = ("lr", "weight_decay")
"""Options of a group whose values may change during training."""
_KINDS: dict[str, Any] = {
    "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adafactor": torch.optim.Adafactor,
}  # fmt: skip
NAMES = tuple(_KINDS)


@dataclass(frozen=True)
class Optimizer:
    """An optimizer: how to build it for some parameters, and the state that it will keep for each of them."""

    name: str
    build: Build
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
    states: dict[TensorSpec, State] = field(default_factory=dict, compare=False, repr=False)
    """{kind of parameter: its state}, for the kinds that it was tried on."""

    @functools.cached_property
    def fused(self) -> bool:
        """True if a step needs no temporary the size of a parameter: one fused kernel, or several in place."""
        with tried(self.name):
            return bool(self.build([_example()]).defaults.get("fused")) or not makes_temporaries(self.build)

    @functools.cached_property
    def whole(self) -> bool:
        """True if a step depends on a parameter as a whole, and not on each of its numbers alone."""
        with tried(self.name):
            return looks_at_whole(self.build)

    @property
    def is_bare(self) -> bool:
        """True if it keeps no state for the parameters that it was tried on."""
        return not any(self.states.values())

    def try_on(self, parameters: Mapping[str, TensorSpec]) -> None:
        """Finds the state that it keeps for such parameters. Raises OptionError, naming the first that it cannot train."""
        if new := {name: spec for name, spec in parameters.items() if kind_of(spec) not in self.states}:
            self.states.update(states_of(self.name, self.build, new, is_known=self.is_known))
        if self.average is not None and any(spec.name == AVERAGE for state in self.states.values() for spec in state):
            raise OptionError(f"--ema: optimizer {self.name} keeps a state {AVERAGE!r} of its own. Leave --ema out.")

    def state_layout(self, parameters: Mapping[str, TensorSpec]) -> Layout:
        """Returns the layout of the state of one block's trainable parameters: `weight.exp_avg`, ..."""
        self.try_on(parameters)
        found = []
        for name, parameter in parameters.items():
            found += [replace(spec, name=f"{name}.{spec.name}") for spec in self.states[kind_of(parameter)]]
            found += [replace(parameter, name=f"{name}.{AVERAGE}")] if self.average is not None else []
        return Layout.of(found)

    def adopt(
        self,
        optimizer: torch.optim.Optimizer,
        named: Iterable[tuple[str, nn.Parameter]],
        views: Mapping[str, torch.Tensor],
        *,
        begun: bool = True,
    ) -> None:
        """Gives `optimizer` the tensors in `views` as its state, which it updates in place. Their memory keeps its owner.

        begun: True if a step was made before, so that the average has values.
        """
        named = list(named)
        for name, parameter in named:
            state = self.states[kind_of(spec_of(name, parameter))]
            optimizer.state[parameter] = {spec.name: views[f"{name}.{spec.name}"] for spec in state}
        if self.average is not None and named:
            pairs = [(views[f"{name}.{AVERAGE}"], parameter) for name, parameter in named]
            optimizer.register_step_post_hook(_Averaging(self.average, pairs, begun))


@functools.cache
def choose(name: str, *, lr: float, weight_decay: float = 0.0, momentum: float = 0.0) -> Optimizer:
    """Returns `adam`, `adamw` or `sgd`, fused, or `adafactor`. Raises OptionError for another name or a negative number."""
    if name not in NAMES:
        raise OptionError(f"--optimizer: expected one of {', '.join(NAMES)}; found {name!r}.")
    for option, value in (("lr", lr), ("weight-decay", weight_decay), ("momentum", momentum)):
        if not value >= 0 or value == float("inf"):
            raise OptionError(f"--{option}: expected a finite number, zero or above; found {value}.")
    if momentum and name != "sgd":
        raise OptionError(f"--momentum goes with --optimizer sgd; {name} keeps moments of its own.")
    keywords: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    if name == "adafactor":
        # Parameter by parameter, as torch does on the CPU: all at once would take as much memory again as the parameters.
        keywords["foreach"] = False
    else:
        keywords |= {"fused": True} | ({"momentum": momentum} if name == "sgd" else {})
    found = describe(name, lambda parameters: _KINDS[name](parameters, **keywords), is_known=True)
    return replace(found, states=_states_of(name, bool(momentum)))


@functools.cache
def _states_of(name: str, momentum: bool) -> dict[TensorSpec, State]:
    """The dict of states found so far, shared by all learning rates."""
    return {}


class _Averaging:
    """A hook after each step that averages parameters as torch.optim.swa_utils.AveragedModel does: after the first step the
    averages are the parameters themselves."""

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
    """`choice` with an exponential moving average of each parameter beside its state; decay None: without one."""
    return replace(choice, average=decay)


def chosen(name: str, lr: float, weight_decay: float, momentum: float, ema: float | None) -> Optimizer:
    """Like `choose`, with momentum for sgd only, and with a moving average of decay `ema`."""
    found = choose(name, lr=lr, weight_decay=weight_decay, momentum=momentum if name == "sgd" else 0.0)
    return averaging(found, ema)


def refuse_divided(optimizer: Optimizer, divided_by: str) -> None:
    """Raises OptionError for an optimizer that depends on whole weights if something divides them: divided_by, or ""."""
    if divided_by and optimizer.whole:
        raise OptionError(
            f"optimizer {optimizer.name} looks at a weight as a whole, and {divided_by} divides it. Take another."
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
    states = {kind_of(spec): optimizer.states[kind_of(spec)] for spec in parameters.values()}
    if not (is_alike(states) and all(follows_numbers(*pair) for pair in states.items())):
        raise OptionError(
            f"optimizer {optimizer.name} keeps other state for a whole weight than for pieces of it, and {divided_by} "
            "divides it. Take another."
        )


def describe(name: str, build: Build, *, is_known: bool = False) -> Optimizer:
    """Describes any optimizer that keeps all that it knows in a state that starts at zero. name: the function's, or "".

    Raises OptionError for one that cannot be built. Its state is found when the parameters are known: see `try_on`.
    """
    name = name if name.isidentifier() else ""
    with tried(name or "function"):
        return _described(name, functools.partial(_without_compiler, build), is_known)


@contextmanager
def tried(name: str) -> Iterator[None]:
    """A context for trial steps of an optimizer: errors become OptionError, and torch's random state is restored."""
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    except OptionError:
        raise
    except Exception as error:
        raise OptionError(f"optimizer {name}: a trial step failed: {type(error).__name__}: {error}") from error


def scheduled(schedule: str | SchedulerFactory, optimizer: Optimizer) -> Optimizer:
    """`optimizer` with the state that it keeps under this scheduler: OneCycleLR gives SGD a momentum."""
    if isinstance(schedule, str):
        return optimizer
    options = Scheduler(schedule, optimizer.build).at(0)

    def build(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        built = optimizer.build(parameters)
        tune(built, options)
        return built

    with tried(optimizer.name):
        found = replace(optimizer, build=build, states={})
        return found if _state_tensors(found) > _state_tensors(optimizer) else optimizer


def _state_tensors(optimizer: Optimizer) -> int:
    """Number of state tensors of a matrix."""
    return len(optimizer.state_layout({"": spec_of("", _example())}).specs)


def _without_compiler(build: Build, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    with without_compiler():
        return build(parameters)


def _example() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2, 3, dtype=torch.float32, device="cpu"))


def _described(name: str, build: Build, is_known: bool) -> Optimizer:
    parameter = _example()
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
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptionError("optimizer: LBFGS calls the whole model again inside its step, which a partition cannot do.")
    tuned, options = (
        repr(
            [
                {key: str(group[key]) for key in group if key != "params" and (key in _TUNED) is free}
                for group in optimizer.param_groups
            ]
        )
        for free in (True, False)
    )
    return Optimizer(
        name or type(optimizer).__name__, build, options, tuned,
        has_rate=any("lr" in group for group in optimizer.param_groups), is_known=is_known,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class GradientNorm:
    """The norm of one gradient."""

    norm: torch.Tensor
    dtype: torch.dtype
    """Type of the gradient; the norm of a complex one is real."""

    @classmethod
    def of(cls, gradient: torch.Tensor) -> "GradientNorm":
        return cls(torch.linalg.vector_norm(gradient), gradient.dtype)


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
