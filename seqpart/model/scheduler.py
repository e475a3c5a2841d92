"""Learning-rate schedulers of torch, and others with its protocol: the options of their optimizer's groups at each update.

A partition's optimizer is built anew at every visit, and a scheduler belongs to one optimizer for good. So it is given one of
its own, with the groups of the whole model, that never learns; it steps once for each update, and the options that it has set
are then copied into the partition's groups, each by the names of its parameters. They depend on the number of updates done, or
on the evaluations so far (ReduceLROnPlateau): a resumed run steps the scheduler from the beginning, to the same bits.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from seqpart.device.compiler import without_compiler
from seqpart.errors import OptionError, refusing
from seqpart.model.optimizer_trials import BuildNamed

Named = Sequence[tuple[str, nn.Parameter]]
"""Parameters with their names in the model."""
SchedulerFactory = Callable[[torch.optim.Optimizer], Any]
"""A function from an optimizer to its scheduler: one of torch's, or any object with step(), or timm's step_update(updates)."""


class Groups(NamedTuple):
    """What a scheduler has set in the groups of an optimizer of all parameters."""

    options: tuple[Mapping[str, Any], ...]
    """Options of each group: lr, and whatever else the scheduler sets, as OneCycleLR does momentum."""
    of: Mapping[str, int]
    """{name of a parameter: number of its group}."""


_TRIED = 10_000
"""Most updates that are tried ahead, fewer with several groups: 0.1 s."""


class Whole:
    """An optimizer for schedulers: it has the groups of all parameters that learn, and none of these.

    build: builds it. parameters: all that learn.
    """

    def __init__(self, build: BuildNamed, parameters: Named) -> None:
        self.optimizer = build([parameter for _, parameter in parameters], [name for name, _ in parameters])
        groups, named = self.optimizer.param_groups, {id(parameter): name for name, parameter in reversed(parameters)}
        self.of = {named[id(one)]: number for number, group in enumerate(groups) for one in group["params"]}
        """{name of a parameter: number of its group}."""
        for group in groups:
            group["params"] = [nn.Parameter(torch.zeros(2, 3, dtype=torch.float32))]
        self._begun = [dict(group) for group in groups]

    def begin(self) -> torch.optim.Optimizer:
        """Returns the optimizer as it was built, for another scheduler."""
        for group, begun in zip(self.optimizer.param_groups, self._begun, strict=True):
            group.clear()  # a learning rate may be a tensor, which schedulers fill
            group.update({name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in begun.items()})
        self.optimizer.step = MethodType(_no_step, self.optimizer)  # type: ignore[method-assign]
        return self.optimizer


def _no_step(optimizer: torch.optim.Optimizer, closure: object = None) -> None:
    """A step that looks at no parameter: an optimizer may know the model's own, beside its groups."""


class Scheduler:
    """Options of an optimizer's groups as functions of the number of updates done."""

    def __init__(
        self, factory: SchedulerFactory, whole: Whole, measured: Callable[[], Sequence[tuple[int, float]]] = tuple
    ) -> None:
        """Makes the scheduler. measured: (updates before it, value) of each evaluation so far.

        Raises OptionError if it is no scheduler.
        """
        self._factory, self._whole, self._measured = factory, whole, measured
        self.sets_momentum = False
        """True if it has set a momentum at one of the updates so far."""
        self._begin()

    def at(self, done: int) -> Groups:
        """Options after `done` updates. Raises OptionError if the scheduler ends before."""
        if done < self._done:
            self._begin()
        values = [value for update, value in self._measured() if update <= done] if self.waits else []
        if self._metrics != values[: len(self._metrics)]:  # the run went back
            self._begin()
        for value in values[len(self._metrics) :]:
            with self._setting("it failed"):
                self._scheduler.step(value)
            self._metrics.append(value)
        while self._done < done and not self.waits:
            self._optimizer.step()  # schedulers warn where none comes before theirs
            self._look()
            with self._setting(f"its step {self._done + 1} failed (does it end before the run's last update?)"):
                self._step(self._done + 1)
            self._done += 1
        self._look()
        groups = self._optimizer.param_groups
        return Groups(tuple({name: group[name] for name in self._names if name in group} for group in groups), self._whole.of)

    @contextmanager
    def _setting(self, failed: str) -> Iterator[None]:
        """A context for the scheduler's work: notes the options that it sets."""
        before = [dict(group) for group in self._optimizer.param_groups]
        words = f"--lr-schedule: {failed}"
        with refusing(lambda error: OptionError(f"{words}: {type(error).__name__}: {error}")), without_compiler():
            yield
        for then, group in zip(before, self._optimizer.param_groups, strict=True):
            self._names |= {name for name, value in group.items() if name != "params" and not _same(value, then.get(name))}

    def _look(self) -> None:
        self.sets_momentum = self.sets_momentum or any(group.get("momentum") for group in self._optimizer.param_groups)

    def _begin(self) -> None:
        self._metrics: list[float] = []
        self._done, self._optimizer = 0, self._whole.begin()
        self._names = {"lr"}
        with self._setting("it failed"):
            self._scheduler = self._factory(self._optimizer)
        self.waits = isinstance(self._scheduler, ReduceLROnPlateau)
        """True if it steps after each evaluation, by its value."""
        self.mode = getattr(self._scheduler, "mode", "")
        if not self.waits:
            self._step = _step_of(self._scheduler)


def _step_of(scheduler: Any) -> Callable[[int], object]:
    """Returns a function that steps a scheduler for update n, from 1. Raises OptionError if it has no such step."""
    kind = type(scheduler).__name__
    if callable(getattr(scheduler, "step", None)):
        by_place = [
            one for one in inspect.signature(scheduler.step).parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD
        ]
        if all(one.default is not one.empty for one in by_place):
            return lambda _: scheduler.step()
        if callable(update := getattr(scheduler, "step_update", None)):  # as timm's have it
            if getattr(scheduler, "t_in_epochs", False):
                raise OptionError(
                    f"--lr-schedule: {kind} counts epochs, and a schedule counts updates. Give t_in_epochs=False."
                )
            return cast(Callable[[int], object], update)
    raise OptionError(
        "--lr-schedule: expected a function from an optimizer to a scheduler, with a step() for each update; it returned "
        f"{kind}."
    )


def _same(one: object, other: object) -> bool:
    return one is other if isinstance(one, torch.Tensor) else one == other


def note_rates(optimizer: torch.optim.Optimizer) -> None:
    """Stores in the optimizer's groups the learning rates that they were built with, for `tune`."""
    for group in optimizer.param_groups:
        if "lr" in group:
            group["initial_lr"] = group["lr"]


def tune(optimizer: torch.optim.Optimizer, rate: float | Groups, names: Mapping[int, str]) -> None:
    """Sets the groups' learning rates to `rate` times their initial ones, if they have any, or to the scheduler's options.

    names: {id of a parameter: its name in the model}. Raises OptionError for a group whose parameters are in several groups of
    the whole model's optimizer.
    """
    for group in optimizer.param_groups:
        if not isinstance(rate, Groups):
            if "initial_lr" in group:
                group["lr"] = group["initial_lr"] * rate
            continue
        numbers = {rate.of[names[id(one)]]: names[id(one)] for one in group["params"]}
        if len(numbers) > 1:
            raise OptionError(
                f"--lr-schedule: {' and '.join(numbers.values())} are in one group where the optimizer function gets them with "
                "few others, and in several where it gets all: which options are theirs is not known. Let it make groups by "
                "the names (named_parameters) or the attributes of each."
            )
        for number in numbers:
            group.update(rate.options[number])


def refuse_unfit(
    schedule: str | SchedulerFactory, runs: Iterable[int], optimizers: Iterable[tuple[Whole, bool]],
    *, tested: bool, larger: bool,
) -> None:  # fmt: skip
    """Raises OptionError for a scheduler that cannot be built, ends before one of `runs` (numbers of updates), sets a momentum
    later, or waits for evaluations that there are not.

    optimizers: (optimizer of all parameters, True if it keeps no state). tested: true if there are evaluations during the
    training; larger: true if a larger value of them is better.
    """
    if not isinstance(schedule, str):
        for updates, (whole, is_bare) in itertools.product(runs, optimizers):
            scheduler = Scheduler(schedule, whole)
            groups = max(1, len(whole.optimizer.param_groups))
            scheduler.at(max(0, min(updates - 1, _TRIED // groups + _TRIED // 10)))
            if scheduler.waits and not tested:
                raise OptionError(
                    "--lr-schedule: ReduceLROnPlateau steps by the value of each evaluation. Give --eval-every '1 epoch', with "
                    "test rows and an exact method, or a scheduler that steps after each update, as in a session."
                )
            if scheduler.waits and (scheduler.mode == "max") != larger:
                raise OptionError(
                    f"--lr-schedule: ReduceLROnPlateau has mode={scheduler.mode!r}, and evaluations are compared by a number "
                    f"of which {'larger' if larger else 'smaller'} is better (--best-by). Let both say the same."
                )
            if scheduler.sets_momentum and is_bare:
                raise OptionError(
                    "--lr-schedule: the scheduler begins without momentum and sets it later, which needs memory that was not "
                    "planned. Let it begin with a small one."
                )


NAMES = ("constant", "linear", "cosine")


def rate_schedule(name: str, warmup: int) -> Callable[[int, int], float]:
    """Returns the schedule `constant`, `linear` or `cosine` (down to zero), after `warmup` updates of linear growth: a function
    from (updates done, updates of the whole stage) to the factor of the learning rate.

    Raises OptionError for another name or a negative warm-up.
    """
    if name not in NAMES:
        raise OptionError(f"--lr-schedule: expected one of {', '.join(NAMES)}; found {name!r}.")
    if warmup < 0:
        raise OptionError(f"--warmup-updates: expected a whole number from 0 up; found {warmup}.")

    def factor(done: int, total: int) -> float:
        if done < warmup:
            return (done + 1) / (warmup + 1)
        share = (done - warmup) / max(1, total - warmup)
        if name == "linear":
            return max(0.0, 1.0 - share)
        if name == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))
        return 1.0

    return factor
