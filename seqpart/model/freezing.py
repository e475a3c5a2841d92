"""Parameters that are frozen by name, for the whole run or until a time: the options --freeze and --unfreeze."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from seqpart.errors import OptionError
from seqpart.fields import PerPartition, said_of, values_of
from seqpart.model.blocks import Block, Factory
from seqpart.text import short

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
    def of(cls, freeze: PerPartition[str] | None, unfreeze: str | None) -> "Frozen":
        """Raises OptionError for what is no pattern or time."""
        patterns = [part.strip() for one in values_of(freeze or ()) for part in one.split(",")]
        if "" in patterns:
            raise OptionError(f"--freeze: expected patterns of parameter names, such as backbone.*; found {short(freeze)}.")
        return cls(tuple(patterns), dict(map(_pair, unfreeze.split(","))) if unfreeze is not None else {})

    def times(self, names: Iterable[str]) -> list[Time]:
        """Returns the times of a parameter with these names, for it may have several; none if it is not in `unfreeze`."""
        return [time for name in names for pattern, time in self.unfreeze.items() if fnmatchcase(name, pattern)]

    def freezes(self, name: str) -> bool:
        """True if the parameter never learns."""
        return any(fnmatchcase(name, pattern) for pattern in self.freeze) and not self.times([name])

    def refuse_strangers(self, names: Iterable[str]) -> None:
        """Raises OptionError for a pattern that matches none of the model's parameters, with the nearest that do."""
        known = list(names)
        parents = dict.fromkeys(f"{name[: at.start()]}.*" for name in known for at in re.finditer(r"\.", name))
        for option, patterns in (("--freeze", self.freeze), ("--unfreeze", [*self.unfreeze])):
            if strange := [one for one in patterns if not any(fnmatchcase(name, one) for name in known)]:
                said = said_of(strange, [*parents, *known])
                some = "" if said.endswith("?") else f" It has {', '.join(known[:3])}{', ...' if len(known) > 3 else ''}."
                raise OptionError(f"{option}: expected patterns that match parameters of the model; found {said}{some}")


def _pair(text: str) -> tuple[str, Time]:
    pattern, _, time = text.rpartition("=")
    found = re.fullmatch(r"(epoch|update)\s*(\d+)", time.strip())
    if not pattern.strip() or found is None or not int(found[2]):
        raise OptionError(
            f"--unfreeze: expected {EXPECTED}: after how many finished epochs or updates they learn, 1 or more; "
            f"found {short(text)}."
        )
    return pattern.strip(), Time(found[1], int(found[2]))


class Freezing:
    """A context in which those parameters of a model (a module, or a list of modules and factories) require gradients that
    learn at any time of the run; its value is the model. Afterwards each requires them as before."""

    def __init__(self, model: object, frozen: Frozen) -> None:
        self._model, self._frozen = model, frozen
        self._before: list[tuple[nn.Parameter, bool]] = []

    def __enter__(self) -> object:
        frozen, model = self._frozen, self._model
        if not (frozen.freeze or frozen.unfreeze):
            return model
        several = isinstance(model, list | tuple)
        parts: list[Any] = [*model] if isinstance(model, list | tuple) else [model]
        named = [
            [(name, f"{number}.{name}" if several else name, one) for name, one in _named(part)]
            for number, part in enumerate(parts)
        ]
        frozen.refuse_strangers([name for own in named for _, name, _ in own])
        pairs = [*zip(parts, named, strict=True)]
        of_factories = [name for part, own in pairs if not isinstance(part, nn.Module) for _, name, _ in own]
        if late := [name for name in of_factories if frozen.times([name])]:
            raise OptionError(
                f"--unfreeze: expected parameters of modules that were passed built; found {late[0]}, which a factory makes. "
                "Pass the module, on the meta device with --weights where it is large, or leave it to --freeze."
            )
        names = dict[int, list[str]]()
        for _, name, one in (found for own in named for found in own):
            names.setdefault(id(one), []).append(name)
        made = dict[tuple[int, tuple[str, ...]], Factory]()
        for number, (part, own) in enumerate(pairs):
            if isinstance(part, nn.Module):
                for _, _, one in own:
                    self._apply(one, names[id(one)])
                continue
            if still := tuple(inner for inner, name, _ in own if frozen.freezes(name)):
                key = id(part), still  # blocks from one factory that are alike stay blocks from one factory
                parts[number] = made.setdefault(key, _without_learning(part, still))
        return parts if several else model

    def _apply(self, parameter: nn.Parameter, names: list[str]) -> None:
        late, never = bool(self._frozen.times(names)), any(map(self._frozen.freezes, names))
        if (late or never) and (parameter.is_floating_point() or parameter.is_complex()):
            self._before.append((parameter, parameter.requires_grad))
            parameter.requires_grad_(late)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for parameter, learned in reversed(self._before):
            parameter.requires_grad_(learned)
        self._before = []


def _named(part: Any) -> Iterator[tuple[str, Any]]:
    """Yields the parameters by name of a module, or fake ones of what a factory makes."""
    if isinstance(part, nn.Module):
        yield from part.named_parameters(remove_duplicate=False)
    elif callable(part):
        tensors = Block(0, "", part).fake(FakeTensorMode())[1]
        yield from ((name, tensor) for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter))


def _without_learning(factory: Callable[[], nn.Module], names: tuple[str, ...]) -> Factory:
    def build() -> nn.Module:
        module = factory()
        for name in names:
            module.get_parameter(name).requires_grad_(False)
        return module

    build.__name__ = Block(0, "", factory).kind
    return build
