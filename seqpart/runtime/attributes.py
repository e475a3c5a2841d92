"""Plain attributes of the model and the loss that the user's code sets during a run, as its checkpoints hold them."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from seqpart.errors import OptionError
from seqpart.model.inspection import OF_TORCH, is_plain
from seqpart.report.reporter import Reporter

_MOST = 1000
"""Most values of a container, and most elements of a tensor, that are saved."""


def _owners(place: str, one: Any, known: set[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place, attributes) of a module or a loss, and of the modules and functions that it holds."""
    if id(one) in known:
        return
    known.add(id(one))
    inner: Collection[tuple[Any, Any]]
    if isinstance(one, list | tuple | dict):
        inner = [*(one.items() if isinstance(one, dict) else enumerate(one))]
    elif isinstance(one, nn.Module):
        yield place, vars(one)
        inner = one._modules.items()
    elif callable(one) and hasattr(one, "__dict__") and not isinstance(one, type):
        yield place, one.__dict__
        inner = [*one.__dict__.items(), *((name, getattr(one, name, None)) for name in ("__self__", "func"))]
    else:
        return
    for name, value in inner:
        yield from _owners(f"{place}.{name}".lstrip("."), value, known)


def _small(value: object) -> bool:
    """True for a list, a tuple or a dict of few plain values."""
    if not isinstance(value, list | tuple | dict) or len(value) > _MOST:
        return False
    return all(is_plain(one) for one in (value.values() if isinstance(value, dict) else value))


def _look(value: object) -> object:
    """Something that differs for another value, and for one that was changed in place."""
    if type(value) is torch.Tensor and not value.is_inference():
        return id(value), value._version
    return repr(value) if is_plain(value) or _small(value) else id(value)


def looks_of_data(data: Any, rows: int, depth: int = 4) -> list[object]:
    """Returns looks at the tensors of so many rows, or more, in a pair, a dict or a TensorDataset, or a subset of it. A data
    set of the user's own may hold other tensors, such as predictions."""
    if isinstance(data, torch.Tensor):
        return [_look(data)] if data.ndim and len(data) >= rows else []
    held: Any = data if isinstance(data, tuple | dict) else ()
    if isinstance(data, TensorDataset | Subset):
        held = data.tensors if isinstance(data, TensorDataset) else (data.dataset,)
    if not depth or len(held) > _MOST:
        return []
    return [look for one in (held.values() if isinstance(held, dict) else held) for look in looks_of_data(one, rows, depth - 1)]


def _text(value: Any, before: object) -> str | None:
    """Returns JSON for a value, a list for a tensor that was changed in place; None for what has none."""
    if type(value) is torch.Tensor and isinstance(before, tuple) and before[0] == id(value) and value.numel() <= _MOST:
        value = value.flatten().tolist()
    elif type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        value = value.item()
    if not is_plain(value) and not _small(value):
        return None
    try:
        text = json.dumps(value)
    except TypeError:  # such as a key of a dict
        return None
    return text if repr(json.loads(text)) == repr(value) else None


class Attributes:
    """The attributes of a model and its loss, of which those that the user's code changes are saved."""

    def __init__(self, model: object, loss: object, fixed: Iterable[tuple[nn.Module, str]]) -> None:
        """fixed: those that a run refuses to change."""
        self._fixed = {(id(vars(module)), name) for module, name in fixed}
        self._owners = dict(_owners("", {"model": model, "loss": loss}, set()))
        self.saved = dict[str, str | None]()
        """{place: value as JSON, None if it has none} of those that were changed."""

    def looks(self) -> dict[str, object]:
        return {
            f"{at}.{name}": _look(own[name])
            for at, own in self._owners.items()
            for name in own.keys() - OF_TORCH
            if (id(own), name) not in self._fixed or isinstance(own[name], torch.Tensor)
        }

    def note(self, before: Mapping[str, object]) -> None:
        """Notes what has changed since `looks` gave `before`."""
        for place, look in self.looks().items():
            if place not in before or before[place] != look:
                at, _, name = place.rpartition(".")
                self.saved[place] = _text(self._owners[at][name], before.get(place))

    def tell_lost(self, reporter: Reporter) -> None:
        """Warns of values that the checkpoint does not hold."""
        if lost := [place for place, text in self.saved.items() if text is None]:
            reporter.warn(
                f"a callback, or code between steps, had set {', '.join(lost)} to something that no checkpoint holds. Unless "
                "it is set again by now, the run goes on with other bits"
            )

    def set_again(self, saved: Mapping[str, str | None]) -> None:
        """Sets what a checkpoint says was changed."""
        self.saved = {**saved}
        for place, text in saved.items():
            at, _, name = place.rpartition(".")
            own = self._owners.get(at)
            if text is None or own is None or name in OF_TORCH:
                continue
            try:
                value = json.loads(text)
                if type(before := own.get(name)) is torch.Tensor:
                    with torch.no_grad():
                        before.copy_(torch.tensor(value, dtype=before.dtype).view(before.shape))
                else:
                    own[name] = value
            except (ValueError, TypeError, RuntimeError):
                raise OptionError(f"--resume: the checkpoint has no value for the attribute {place}.") from None
