"""The state that an optimizer keeps for a parameter: tensors, stored as weights are, and plain data, stored as text with them.

Plain data are whatever is no tensor in the parameter's state (counts, numbers, lists), and what the optimizer has changed in
its groups and attributes since it was built. An optimizer that is built anew and given both goes on as the former one would.
"""

import enum
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from seqpart.device.pages import round_up
from seqpart.store.layout import CODES, DTYPES, TensorSpec, spec_of

TEXT = "plain"
"""Name of the text of plain data in a parameter's state."""
_NUMBER = "9" * 24
"""As long as the text of any number that takes 64 bits."""
_STEP, _MOST = 256, 1 << 14
"""Texts have room for a multiple of `_STEP` bytes, and for at most `_MOST`."""
_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_SCALARS = (bool, int, float, str, type(None))
_TORCH_S = {"state", "param_groups", "defaults"}
"""Attributes of each optimizer that are no plain data."""

Keep = Callable[[str, torch.Tensor], Any]
"""A function from a tensor's name and the tensor to what stands for it in a text."""
Classes = dict[str, type]
"""Classes, by name, whose objects may be made from a text: those that a trial has met."""


class NoHomeError(Exception):
    """A part of an optimizer's state can have no home; the text says which, and what it is."""


# --- texts ------------------------------------------------------------------------------------------------------------


def plain(value: object, path: str, keep: Keep, classes: Classes, *, learns: bool) -> Any:
    """Returns `value` as JSON: numbers and texts as they are, anything else as a list that begins with a letter.

    learns: add new classes to `classes`. Raises NoHomeError.
    """

    def within(part: object, name: object) -> Any:
        inner = f"{path}/{str(name).replace('.', '_')}" if path else str(name)  # a dot parts parameter and state
        return plain(part, inner, keep, classes, learns=learns)

    kind = type(value)
    if kind in _SCALARS:
        return value
    if isinstance(value, torch.Tensor):
        return keep(path, value)
    if isinstance(value, torch.dtype):
        return ["y", str(value).removeprefix("torch.")]
    if kind in (list, tuple, torch.Size):
        assert isinstance(value, list | tuple)
        return [{list: "l", tuple: "u"}.get(kind, "z"), *(within(part, number) for number, part in enumerate(value))]
    if isinstance(value, deque):
        return ["q", value.maxlen, *(within(part, number) for number, part in enumerate(value))]
    if isinstance(value, set) and all(type(part) in _SCALARS for part in value):
        return ["s", *sorted(value, key=repr)]
    if isinstance(value, dict) and all(type(key) in _SCALARS for key in value):
        return ["d", *([key, within(part, key)] for key, part in value.items())]
    if isinstance(value, enum.Enum):
        return ["e", _named(kind, path, classes, learns), value.name]
    if hasattr(value, "__dict__") and not callable(value) and not isinstance(value, torch.optim.Optimizer | type(torch)):
        return ["o", _named(kind, path, classes, learns), *([key, within(part, key)] for key, part in vars(value).items())]
    raise NoHomeError(f"{path!r} is {kind.__name__}")


def _named(kind: type, path: str, classes: Classes, learns: bool) -> str:
    name = f"{kind.__module__}.{kind.__qualname__}"
    if learns:
        classes.setdefault(name, kind)
    if classes.get(name) is not kind:
        raise NoHomeError(f"{path!r} is {kind.__name__}, of which there was none in the trial steps")
    return name


def unplain(found: Any, tensor: Callable[[Sequence[Any]], torch.Tensor], classes: Mapping[str, type]) -> Any:
    """Returns the value that `plain` was given. tensor: from what stood for a tensor to the tensor."""

    def inner(part: Any) -> Any:
        return unplain(part, tensor, classes)

    if not isinstance(found, list):
        return found
    letter, *rest = found
    if letter == "y":
        return _BY_NAME[rest[0]]
    if letter in "luz":
        made = [inner(part) for part in rest]
        return made if letter == "l" else tuple(made) if letter == "u" else torch.Size(made)
    if letter == "s":
        return set(rest)
    if letter == "q":
        return deque(map(inner, rest[1:]), rest[0])
    if letter == "d":
        return {key: inner(part) for key, part in rest}
    if letter == "e":
        return classes[rest[0]][rest[1]]  # type: ignore[index]
    if letter == "o":
        made = object.__new__(classes[rest[0]])
        vars(made).update({key: inner(part) for key, part in rest[1:]})
        return made
    return tensor(found)


def inline(path: str, tensor: torch.Tensor) -> Any:
    """Returns a small tensor as part of a text, for those outside a parameter's state."""
    if type(tensor) is FakeTensor:
        return ["v", "F32", [1], "00" * tensor.nbytes]
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.dtype not in CODES or tensor.nbytes > _MOST:
        raise NoHomeError(f"{path!r} is {type(tensor).__name__} of shape {tuple(tensor.shape)}, outside a parameter's state")
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return ["v", CODES[tensor.dtype], list(tensor.shape), flat.numpy().tobytes().hex()]


def _tensor_of(tensors: Mapping[str, torch.Tensor], device: torch.device, found: Sequence[Any]) -> torch.Tensor:
    return tensors[found[1]] if found[0] == "t" else _from_inline(found, device)


def _from_inline(found: Sequence[Any], device: torch.device) -> torch.Tensor:
    _, code, shape, text = found
    flat = torch.frombuffer(bytearray.fromhex(text) or bytearray(1), dtype=torch.uint8)
    flat = flat[: len(text) // 2].view(DTYPES[code])
    return flat.view(shape).to(device)


def room_for(found: Any) -> int:
    """Returns bytes in which the text of `found` has room whatever its numbers are."""
    text = json.dumps(_widest(found), separators=(",", ":"))
    return round_up(len(text.encode()) + _STEP // 2, _STEP)


def _widest(found: Any) -> Any:
    if isinstance(found, list):
        return [_widest(part) for part in found]
    if isinstance(found, dict):
        return {key: _widest(part) for key, part in found.items()}
    return _NUMBER if type(found) in (int, float) else found


def text_spec(nbytes: int) -> TensorSpec:
    return TensorSpec(name=TEXT, shape=(nbytes,), dtype=torch.uint8)


# --- optimizers -------------------------------------------------------------------------------------------------------


class Several(torch.optim.Optimizer):
    """Several optimizers as one: their groups in order, and their steps one after the other."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for one in optimizers for group in one.param_groups], {})
        self.optimizers = list(optimizers)

    def step(self, closure: Any = None) -> Any:
        for optimizer in self.optimizers:
            optimizer.step()


@contextmanager
def empty_allowed() -> Iterator[None]:
    """A context in which an optimizer may be built with no parameters, which torch refuses: of two optimizers, one for matrices
    and one for the rest, a partition may need only one."""
    begin = torch.optim.Optimizer.__init__

    def begin_empty(self: torch.optim.Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        given = params if isinstance(params, torch.Tensor) else list(params)
        begin(self, given if len(given) else [{"params": []}], defaults)

    with patch.object(torch.optim.Optimizer, "__init__", begin_empty):
        yield


def parts_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Returns the optimizer, and those inside it: a wrapper has one, `Several` has some."""
    found = [optimizer]
    for value in vars(optimizer).values():
        for inner in value if isinstance(value, list | tuple) else (value,):
            if isinstance(inner, torch.optim.Optimizer):
                found += [one for one in parts_of(inner) if not any(one is other for other in found)]
    return found


def tensors_in(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of everything in the parameter's state, whatever holds it."""
    found: list[tuple[str, torch.Tensor]] = []
    for part in parts_of(optimizer):
        if parameter in part.state:
            plain(part.state[parameter], "", lambda path, tensor: found.append((path, tensor)), {}, learns=True)
    yield from found


class Knowledge:
    """All that an optimizer knows beside its options, as texts and tensors. Made right after the optimizer was built.

    classes: see `plain`; learns: true in a trial.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, classes: Classes, *, learns: bool = False) -> None:
        self._parts, self._classes, self._learns = parts_of(optimizer), classes, learns
        self._parameters = [one for part in self._parts for group in part.param_groups for one in group["params"]]
        self._built = [([self._texts(group) for group in part.param_groups], self._texts(_own(part))) for part in self._parts]
        self._places = [
            {id(parameter): number for number, group in enumerate(part.param_groups) for parameter in group["params"]}
            for part in self._parts
        ]

    @contextmanager
    def tuned(self) -> Iterator[None]:
        """A context in which a schedule sets options of the groups, which do not count as the optimizer's own changes."""
        before = [[self._texts(group) for group in part.param_groups] for part in self._parts]
        yield
        for part, groups, (built, _) in zip(self._parts, before, self._built, strict=True):
            for group, then, known in zip(part.param_groups, groups, built, strict=True):
                known.update({key: now for key, now in self._texts(group).items() if now != then.get(key)})

    def holder(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        having = (part for part, places in zip(self._parts, self._places, strict=True) if id(parameter) in places)
        return [self._parts[0], *having][-1]

    def common(self) -> list[Any]:
        """Returns what has changed in groups and in the optimizers themselves since they were built."""
        found = []
        for part, (groups, own) in zip(self._parts, self._built, strict=True):
            changed = [self._changed(group, then) for group, then in zip(part.param_groups, groups, strict=True)]
            odd = {str(key): value for key, value in part.state.items() if not isinstance(key, torch.Tensor)}
            found.append([changed, self._changed(_own(part), own), self._changed(odd, {})])
        return found

    def of(self, parameter: nn.Parameter, common: Sequence[Any], keep: Keep) -> list[Any]:
        """Returns the text, as JSON, of all that bears on a parameter. common: see `common`. Raises NoHomeError."""
        found = []
        for state, places, (groups, own, odd) in zip(self.state(parameter, keep), self._places, common, strict=True):
            place = places.get(id(parameter))
            found.append([state, groups[place] if place is not None else {}, own, odd])
        return found

    def state(self, parameter: nn.Parameter, keep: Keep) -> list[Any]:
        """Returns the parameter's state alone as JSON, for each of the optimizers."""
        held = (part.state.get(parameter) for part in self._parts)
        return [None if one is None else plain(dict(one), "", keep, self._classes, learns=self._learns) for one in held]

    def learn(self, parameter: nn.Parameter, found: Sequence[Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Gives the optimizer what `of` returned, with the tensors of the state by name."""
        for part, places, (_, group, own, odd) in zip(self._parts, self._places, found, strict=True):
            place = places.get(id(parameter))
            if place is not None:
                part.param_groups[place].update(self._read(group, parameter.device))
            vars(part).update(self._read(own, parameter.device))
            for key, value in self._read(odd, parameter.device).items():
                part.state[key] = value  # type: ignore[index]
        self.lay(parameter, [part[0] for part in found], tensors)

    def lay(self, parameter: nn.Parameter, states: Sequence[Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Sets the parameter's state to what `state` returned, made of these tensors."""
        for part, state in zip(self._parts, states, strict=True):
            if state is not None:
                part.state[parameter] = unplain(state, partial(_tensor_of, tensors, parameter.device), self._classes)
            else:
                part.state.pop(parameter, None)

    def _read(self, found: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        return {key: unplain(value, lambda one: _from_inline(one, device), self._classes) for key, value in found.items()}

    def _texts(self, values: Mapping[str, object]) -> dict[str, object]:
        """{key: its JSON, or the object itself where it has none}."""
        found: dict[str, object] = {}
        for key, value in values.items():
            if key != "params" and not self._only_names_parameters(value):
                try:
                    found[key] = json.dumps(self._plain(value, key))
                except NoHomeError:
                    found[key] = value
        return found

    def _only_names_parameters(self, value: object) -> bool:
        """True for what an optimizer finds its parameters by and makes anew: the parameters, views of them, and these in lists
        and dicts with a name or number beside each."""
        if isinstance(value, torch.Tensor):
            place = value.untyped_storage()._cdata
            return any(
                place == one.untyped_storage()._cdata
                and 0 <= value.storage_offset() - one.storage_offset() < max(1, one.numel())
                for one in self._parameters
            )
        if isinstance(value, dict):
            return bool(value) and all(map(self._only_names_parameters, value.values()))
        if isinstance(value, list | tuple):
            tensors = [part for part in value if not isinstance(part, int | str)]
            return bool(tensors) and all(map(self._only_names_parameters, tensors))
        return False

    def _plain(self, value: object, key: str) -> Any:
        return plain(value, key, inline, self._classes, learns=self._learns)

    def _changed(self, values: Mapping[str, object], then: Mapping[str, object]) -> dict[str, Any]:
        found = {}
        for key, value in values.items():
            if key == "params" or (key in then and then[key] is value) or self._only_names_parameters(value):
                continue
            now = self._plain(value, key)
            if json.dumps(now) != then.get(key):
                found[key] = now
        return found


def _own(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Attributes of the optimizer's own, without those that torch gives to each and without other optimizers."""
    return {
        key: value
        for key, value in vars(optimizer).items()
        if key not in _TORCH_S
        and not key.startswith(("_optimizer_", "_zero_grad", "_patch", "_warned", "_step_", "_need_device"))
        and not callable(value)
        and not isinstance(value, torch.optim.Optimizer)
        and not (isinstance(value, list | tuple) and any(isinstance(one, torch.optim.Optimizer) for one in value))
    }


class AtHome:
    """An optimizer that was just built, with state that lies in views of memory that somebody else owns."""

    def __init__(self, optimizer: torch.optim.Optimizer, classes: Classes, *, learns: bool = False) -> None:
        self.knowledge = Knowledge(optimizer, classes, learns=learns)
        self._homes: list[tuple[nn.Parameter, str, Mapping[str, torch.Tensor], torch.Tensor | None]] = []
        self._waiting: list[tuple[nn.Parameter, Mapping[str, torch.Tensor], torch.Tensor]] = []
        self._steps = 0
        """Steps that were made until now, in all visits: a parameter that was frozen for some has an older text."""

    def take(self, parameter: nn.Parameter, label: str, views: Mapping[str, torch.Tensor]) -> None:
        """Gives the parameter its state: the tensors in `views`, all of them at once; or, if there is a text among them, what
        that says, once `restore` is called. label: names the parameter in errors."""
        own = dict(views)
        text = own.pop(TEXT, None)
        self._homes.append((parameter, label, own, text))
        if text is not None:
            self._waiting.append((parameter, own, text))
        else:
            self.knowledge.holder(parameter).state[parameter] = dict(own)

    def restore(self) -> None:
        """Reads the texts. A parameter with none yet has the state that it was built with: its first step makes the rest."""
        found = [(parameter, views, bytes(text.cpu().numpy()).rstrip(b"\0")) for parameter, views, text in self._waiting]
        for parameter, views, text in found:
            if not text and any(bool(view.count_nonzero()) for view in views.values()):  # 0.2.0 kept tensors alone
                self.knowledge.holder(parameter).state[parameter] = dict(views)
        known = [(*json.loads(text), parameter, views) for parameter, views, text in found if text]
        for steps, each, parameter, views in sorted(known, key=lambda one: one[0]):
            self.knowledge.learn(parameter, each, views)
            self._steps = steps
        self._waiting = []

    def settle(self) -> None:
        """After each step: copies what the optimizer has made anew into its views. Raises NoHomeError for what has none."""
        self._steps += 1
        for parameter, label, views, text in self._homes:
            state = self.knowledge.holder(parameter).state.get(parameter, {})
            if text is None and state.keys() == views.keys() and all(value is views[name] for name, value in state.items()):
                continue
            moved: list[tuple[torch.Tensor, torch.Tensor]] = []
            try:
                found = self.knowledge.state(parameter, partial(_kept, views, moved))
            except NoHomeError as error:
                raise NoHomeError(f"its state of {label}: {error}") from None
            if text is None and [one[1:] for one in found if one] != [[[name, ["t", name]] for name in state]]:
                raise NoHomeError(f"its state of {label}: it has more than tensors")
            if moved:
                owned = {view.untyped_storage().data_ptr() for view in views.values()}
                values = [one.clone() if one.untyped_storage().data_ptr() in owned else one for _, one in moved]
                for (view, _), value in zip(moved, values, strict=True):
                    view.copy_(value)
                self.knowledge.lay(parameter, found, views)

    def write(self) -> None:
        """Writes the texts, before the views are saved. Raises NoHomeError for what has none."""
        if all(text is None for *_, text in self._homes):
            return
        common = self.knowledge.common()
        for parameter, label, views, text in self._homes:
            if text is None:
                continue
            found = self._steps, self.knowledge.of(parameter, common, partial(_kept, views, []))
            line = json.dumps(found, separators=(",", ":")).encode()
            if len(line) > len(text):
                raise NoHomeError(f"its state of {label} beside tensors has grown to {len(line)} bytes, beyond {len(text)}")
            text.copy_(torch.frombuffer(bytearray(line.ljust(len(text), b"\0")), dtype=torch.uint8))


def _kept(
    views: Mapping[str, torch.Tensor], moved: list[tuple[torch.Tensor, torch.Tensor]], path: str, tensor: torch.Tensor
) -> Any:
    """A `Keep` for tensors that lie in `views`; those that do not are added to `moved`."""
    view = views.get(path)
    if (
        view is None
        or type(tensor) not in (torch.Tensor, nn.Parameter)
        or (view.shape, view.dtype) != (tensor.shape, tensor.dtype)
    ):
        if view is not None and type(tensor) is torch.Tensor and tensor.ndim == 0:  # a number in place of equal ones
            return inline(path, tensor)
        was = "there was none in the trial steps" if view is None else f"it was {_in_words(view)} in the trial steps"
        raise NoHomeError(f"{path!r} is {_in_words(tensor)}, and {was}")
    if tensor is not view and (tensor.data_ptr() != view.data_ptr() or tensor.stride() != view.stride()):
        moved.append((view, tensor))
    return ["t", path]


def _in_words(tensor: torch.Tensor) -> str:
    return f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} ({tensor.dtype})"


def specs_in(knowledge: Knowledge, parameter: nn.Parameter) -> tuple[dict[str, TensorSpec], list[Any]]:
    """Returns ({name: tensor of the parameter's state}, the text of all that the optimizer knows of it). Raises NoHomeError."""
    found: dict[str, TensorSpec] = {}

    def keep(path: str, tensor: torch.Tensor) -> list[str]:
        if type(tensor) not in (torch.Tensor, nn.Parameter, FakeTensor) or tensor.layout is not torch.strided:
            raise NoHomeError(f"{path!r} is a tensor of a kind of its own, {type(tensor).__name__}")
        if tensor.dtype not in CODES:
            raise NoHomeError(f"{path!r} is {tensor.dtype}")
        if found.setdefault(path, spec_of(path, tensor)) != spec_of(path, tensor) or path == TEXT:
            raise NoHomeError(f"{path!r} is there twice")
        return ["t", path]

    text = knowledge.of(parameter, knowledge.common(), keep)
    return found, [0, text]
