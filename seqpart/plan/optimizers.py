"""The optimizers of a run: the user's own, or those that the settings name, tried on the parameters that learn."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from seqpart.errors import OptionError
from seqpart.fields import values_of
from seqpart.model.blocks import Block, Chain
from seqpart.model.optimizers import (
    Optimizer,
    choose,
    refuse_unknown,
    refuse_unlike_pieces,
    refuse_unrounded,
    rounding,
    scheduled,
)
from seqpart.model.scheduler import Whole
from seqpart.profile.blocks import BlockCost
from seqpart.profile.fake_mode import quiet_log
from seqpart.settings import Settings
from seqpart.store.layout import TensorSpec


class RunOptimizers:
    """The optimizers of a run. given: the user's own; without one the settings name one for each partition."""

    def __init__(self, settings: Settings, given: Optimizer | None) -> None:
        self._settings = settings
        self._scheduled = cache(partial(scheduled, settings.lr_schedule))
        self._given = None if given is None else self._finished(given)
        self._learning: list[tuple[Block, TensorSpec]] = []
        """Each parameter that learns at any time, with its block."""
        self._wholes: dict[Optimizer, Whole] = {}
        self.groups_by_identity = False
        """True if the user's optimizer has groups by which objects parameters are, so that others cannot stand for them."""
        self.name = "of the settings" if given is None else f"{given.name} {given.options}"
        """Identifies an optimizer that was given as a function, as far as that can be seen."""
        self.tuned = "" if given is None else given.tuned
        """Options of an optimizer given as a function that a resumed run may change; "" for one of the settings."""

    def of_partitions(self, count: int, *, recovery: bool = False) -> tuple[Optimizer, ...]:
        """One optimizer for each of `count` partitions; in recovery the learning rate may differ."""
        if self._given is not None:
            return (self._given,) * count
        settings = self._settings
        names = settings.of_partitions("optimizer", count)
        rates = settings.of_partitions("lr", count)
        if recovery and settings.recovery_lr is not None:
            rates = (settings.recovery_lr,) * count
        if settings.momentum and "sgd" not in names:
            raise OptionError("--momentum goes with --optimizer sgd; the others keep moments of their own.")
        decay = {"weight_decay": settings.weight_decay, "no_decay": settings.no_decay}
        return tuple(self._named(name, lr=rate, **decay) for name, rate in zip(names, rates, strict=True))

    def possible(self) -> list[Optimizer]:
        """All optimizers of the settings: until the cut is known, any partition may get any of them."""
        if self._given is not None:
            return [self._given]
        return [self._named(name, lr=1.0) for name in values_of(self._settings.optimizer)]

    @property
    def notes(self) -> list[str]:
        """What the plan says of the user's own."""
        if self._given is None or not self._given.has_modes:
            return []
        given = "its train() and eval() are not called: tests, checkpoints and results have the weights that it trains"
        return [f"optimizer {self._given.name}: {given}"]

    def _named(self, name: str, **options: Any) -> Optimizer:
        """Returns the optimizer of that name, with the settings' momentum where it is sgd."""
        return self._finished(choose(name, momentum=self._settings.momentum if name == "sgd" else 0.0, **options))

    def _finished(self, optimizer: Optimizer) -> Optimizer:
        optimizer, moments = replace(optimizer, average=self._settings.ema), self._settings.rounded_moments
        return self._scheduled(optimizer if moments is None else rounding(optimizer, moments))

    def try_on(self, chain: Chain, costs: Sequence[BlockCost], *, looks_at_groups: bool) -> Optimizer | None:
        """Tries the optimizers on every kind of parameter that learns, and returns one that needs all of them in one partition.

        looks_at_groups: whether `groups_by_identity` is to be found. Raises OptionError for one that does not suit them.
        """
        self._learning = [
            (block, spec)
            for block, cost in zip(chain, costs, strict=True)
            for spec in cost.layout.specs
            if spec.name in cost.trainable
        ]
        learns: dict[str, TensorSpec] = {}
        for block, spec in self._learning:
            name = block.exported(spec.name)
            learns[name if name not in learns else f"{name} of {block}"] = spec
        settings, divided_by = self._settings, self._settings.divides_weights
        if settings.no_decay:
            refuse_unknown(settings.no_decay, {name: len(spec.shape) for name, spec in learns.items()})
            if divided_by:
                raise OptionError(f"--no-decay tells weights by name, and {divided_by} divides them. Leave it out.")
        every, joint = learns | _wholes(chain, learns) if divided_by else learns, None
        with quiet_log():
            for optimizer in self.possible():
                optimizer.try_on(every)
                refuse_unrounded(optimizer, learns.values())
                if divided_by:
                    refuse_unlike_pieces(optimizer, every, divided_by)
                if optimizer.found.joint or (settings.unfreeze is not None and optimizer.found.counts):
                    joint = joint or optimizer
            if self._given is not None and looks_at_groups:
                given = ((b.exported(s.name), b.alive.get_parameter(s.name)) for b, s in self._learning if b.alive is not None)
                self.groups_by_identity = any(self._given.groups_by_identity(*one) for one in given)
        return joint

    def whole(self, optimizer: Optimizer) -> Whole:
        """Returns an optimizer with the groups of all parameters that learn at any time, in the model's order. The user's is
        built once, of the model's own parameters, before they leave it: its groups may be by which objects these are."""
        if optimizer not in self._wholes:
            found = list[tuple[str, nn.Parameter]]()
            for block, spec in sorted(self._learning, key=lambda one: one[0].places.get(one[1].name, one[0].number)):
                if optimizer is self._given and block.alive is not None:
                    parameter = block.alive.get_parameter(spec.name)
                else:
                    parameter = nn.Parameter(torch.zeros((), dtype=spec.dtype).expand(spec.shape))
                found.append((block.exported(spec.name), parameter))
            self._wholes[optimizer] = Whole(optimizer.build, found)
        return self._wholes[optimizer]


def _wholes(chain: Chain, learns: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """The larger parameters that some of `learns` are rows of."""
    found: dict[str, TensorSpec] = {}
    for name, spec in learns.items():
        if spec.shape and (whole := chain.wholes.get(name, name)) != name:
            rows = found[whole].shape[0] if whole in found else 0
            found[whole] = replace(spec, shape=(rows + spec.shape[0], *spec.shape[1:]))
    return found
