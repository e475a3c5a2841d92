"""Parameters that are frozen by name, for the whole run or until a time: the options --freeze and --unfreeze."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from seqpart.errors import OptionError
from seqpart.model.blocks import Block, Factory
from seqpart.text import short, with_suggestion

EXPECTED = "patterns of parameter names with times, such as 'backbone.*=epoch 1,embed.*=update 500'"


@dataclass(frozen=True, slots=True)
class Time:
    """The time from which parameters learn: after so many finished epochs, or updates, of the run."""

    unit: str
    count: int

    def __str__(self) -> str:
        return f"{self.unit} {self.count}"

    def updates(self, per_epoch: int) -> int:
        """Returns the number of updates before it. per_epoch: updates of an epoch."""
        return self.count * (per_epoch if self.unit == "epoch" else 1)


@dataclass(frozen=True)
class Frozen:
    """What the two options say. freeze: patterns; unfreeze: {pattern: time}. A parameter of both is frozen until its time."""

    freeze: tuple[str, ...] = ()
    unfreeze: Mapping[str, Time] = field(default_factory=dict)

    @classmethod
    def of(cls, freeze: str | tuple[str, ...] | None, unfreeze: str | None) -> "Frozen":
        """Raises OptionError for what is no pattern or time."""
        given = (freeze,) if isinstance(freeze, str) else freeze or ()
        patterns = [part.strip() for one in given for part in one.split(",")]
        if "" in patterns:
            raise OptionError(f"--freeze: expected patterns of parameter names, such as backbone.*; found {short(freeze)}.")
        return cls(tuple(patterns), dict(map(_pair, unfreeze.split(","))) if unfreeze is not None else {})

    def times(self, names: Iterable[str]) -> list[Time]:
        """Returns the times of a parameter with these names, for it may have several; none if it is not in `unfreeze`."""
        return [time for name in names for pattern, time in self.unfreeze.items() if fnmatchcase(name, pattern)]

    def learns(self, parameter: nn.Parameter, names: list[str]) -> bool | None:
        """True if a parameter with these names learns at any time, False if never; None if nothing names it, or it cannot."""
        late, never = bool(self.times(names)), any(fnmatchcase(name, one) for name in names for one in self.freeze)
        can = parameter.is_floating_point() or parameter.is_complex()
        return late if can and (late or never) else None

    def refuse_strangers(self, names: Iterable[str]) -> None:
        """Raises OptionError for a pattern that matches none of the model's parameters, with the nearest that do."""
        known = list(names)
        parents = dict.fromkeys(f"{name[: at.start()]}.*" for name in known for at in re.finditer(r"\.", name))
        for option, patterns in (("--freeze", self.freeze), ("--unfreeze", [*self.unfreeze])):
            if strange := [one for one in patterns if not any(fnmatchcase(name, one) for name in known)]:
                named = with_suggestion(strange, [*parents, *known])
                some = "" if named.endswith("?") else f" It has {', '.join(known[:3])}{', ...' if len(known) > 3 else ''}."
                raise OptionError(f"{option}: expected patterns that match parameters of the model; found {named}{some}")


def _pair(text: str) -> tuple[str, Time]:
    pattern, _, time = text.rpartition("=")
    found = re.fullmatch(r"(epoch|update)\s*(\d+)", time.strip())
    if not pattern.strip() or found is None or not int(found[2]):
        raise OptionError(
            f"--unfreeze: expected {EXPECTED}: after how many finished epochs or updates they learn, 1 or more; "
            f"found {short(text)}."
        )
    return pattern.strip(), Time(found[1], int(found[2]))


@contextmanager
def freezing(model: object, frozen: Frozen, mode: FakeTensorMode) -> Iterator[object]:
    """A context in which those parameters of a model (a module, or a list of modules and factories) require gradients that
    learn at any time of the run; its value is the model. Afterwards each requires them as before.

    mode: for what factories make.
    """
    if not (frozen.freeze or frozen.unfreeze):
        yield model
        return
    before = list[tuple[nn.Parameter, bool]]()
    try:
        yield _frozen(model, frozen, mode, before)
    finally:
        for parameter, learned in reversed(before):
            parameter.requires_grad_(learned)


def _frozen(model: object, frozen: Frozen, mode: FakeTensorMode, before: list[tuple[nn.Parameter, bool]]) -> object:
    """Returns the model that is frozen so. before: gets the parameters that were changed, with their requires_grad."""
    several = isinstance(model, list | tuple)
    parts: list[Any] = [*model] if isinstance(model, list | tuple) else [model]
    named = [
        [(name, f"{n}.{name}" if several else name, one) for name, one in parameters_of(part, n, mode)]
        for n, part in enumerate(parts)
    ]
    names = dict[int, list[str]]()
    for _, name, one in (found for own in named for found in own):
        names.setdefault(id(one), []).append(name)
    frozen.refuse_strangers([name for several_names in names.values() for name in several_names])
    made = dict[object, Factory]()
    for n, (part, own) in enumerate(zip(parts, named, strict=True)):
        found = ((name, one, frozen.learns(one, names[id(one)])) for name, _, one in own)
        wanted = [(name, one, learns) for name, one, learns in found if learns is not None]
        if isinstance(part, nn.Module):
            for _, one, learns in wanted:
                before.append((one, one.requires_grad))
                one.requires_grad_(learns)
        elif changed := tuple((name, learns) for name, one, learns in wanted if learns != one.requires_grad):
            # Blocks from one factory that are alike stay blocks from one factory.
            parts[n] = made.setdefault((id(part), changed), _factory(part, changed))
    return parts if several else parts[0]


def parameters_of(part: object, number: int, mode: FakeTensorMode) -> Iterator[tuple[str, Any]]:
    """Yields the parameters by name of a module, or those in `mode` of what a factory makes, which is block `number`."""
    if isinstance(part, nn.Module):
        yield from nn.Module.named_parameters(part, remove_duplicate=False)  # not its own, which may leave some out
    elif callable(part):
        tensors = Block(number, str(number), part).fake(mode)[1]
        yield from ((name, tensor) for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter))


def _factory(factory: Callable[[], nn.Module], changed: Iterable[tuple[str, bool]]) -> Factory:
    """Returns a factory of the same modules with another requires_grad of some parameters. changed: (name, requires_grad)."""

    def build() -> nn.Module:
        module = factory()
        for name, learns in changed:
            module.get_parameter(name).requires_grad_(learns)
        return module

    build.__name__ = Block(0, "", factory).kind
    return build
