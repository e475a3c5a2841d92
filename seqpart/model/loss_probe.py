"""Explains in words why a loss cannot be planned with tensors that have shapes and no values.

torch names the kernel that failed (aten._local_scalar_dense); what a user wrote is seen by watching torch's functions.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.overrides import TorchFunctionMode

from seqpart.errors import DataError, OptionError, SeqpartError
from seqpart.model.tensors import Lend

_ONE_HOT = "calls F.one_hot without num_classes, which looks for the largest label"
_NUMBER = "reads a number out of a tensor (item(), float(), tolist(), numpy())"
_BRANCH = "branches on a value (a tensor in an `if` or an `assert`)"
_SHAPE = "makes a shape of values (a mask as an index, nonzero, unique)"
_CTC = "calls F.ctc_loss, whose memory depends on the labels"
BY_NAME = "looks a value up by its name, where it gets one tensor: what a model returns as `logits` or `out` of several"
_GRAPH = (
    "goes back through a tensor of the network that it was not given (features that a hook or an attribute keeps), or that it "
    "kept from an earlier batch (a running mean)"
)
_BETWEEN = "asks for the gradient of one output of the model with respect to another, which are apart here"
_CURES = {
    _BETWEEN: "Let the model compute that gradient and return it, or what depends on it.",
    _ONE_HOT: "Give F.one_hot(labels, num_classes=K), with the number of classes as K.",
    _NUMBER: "Let it stay a tensor: detach() in the place of item().",
    _BRANCH: "Give torch.where(condition, one, other) in the place of the `if`; a loss that is not finite ends a run anyway.",
    _SHAPE: (
        "Multiply by the mask and return (sum, count), or label what does not count -100, which cross-entropy leaves out. "
        "Classes are counted by F.one_hot(labels, K).sum(0)."
    ),
    _CTC: "Let a layer of the model compute it: give the labels as an input of a row too, and return the loss of each row.",
    BY_NAME: "Let the model return a dict with that name.",
    _GRAPH: "Let the model return it too, beside its output, or keep it in a buffer that a layer of the model changes.",
}
_OF_ONE_HOT = ("for target with class probabilities", "to match target batch_size")
_ONE_HOT_LABELS = " If labels are one-hot rows of whole numbers, give their classes (y.argmax(1)) or floats (y.float())."
_OF_WHOLE_NUMBERS = ("desired output type Long", "dtype Long but expected Float", "could not infer output dtype")
_WHOLE_LABELS = " Labels are whole numbers here, as classes are: give such a loss floats (y.float())."
_CALLS = {
    torch.Tensor.__bool__: _BRANCH,
    **dict.fromkeys(
        (
            torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__float__,
            torch.Tensor.__int__, torch.Tensor.__index__,
        ),
        _NUMBER,
    ),
}  # fmt: skip
_SECOND_TIME = "backward through the graph a second time"
"""torch's words for a second backward pass, here through the graph of the model's example pass, which is gone."""
_OUTSIDE_TORCH = (torch.Tensor.numpy, torch.Tensor.__array__)
"""Functions that return memory for fake tensors, which have none, instead of failing."""


class _Watch(TorchFunctionMode):
    """A mode that notes which functions read values."""

    def __init__(self, *, values: bool) -> None:
        super().__init__()
        self._values, self.asked = values, ""
        """Description of the last function that read a value."""
        self.cannot = ""
        """Description of a call that neither a trial nor a plan can make."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.one_hot and kwargs.get("num_classes", args[1] if len(args) > 1 else -1) == -1:
            self.asked = self.cannot = _ONE_HOT
        elif func is torch.Tensor.__getitem__ and isinstance(args[1], str):
            self.cannot = BY_NAME
        elif func is torch.autograd.grad:
            before, self.cannot = self.cannot, _BETWEEN
            found = func(*args, **kwargs)
            if all(one is not None for one in found):
                self.cannot = before
            return found
        elif func is F.ctc_loss and not self._values:
            self.cannot = _CTC
        elif func in _CALLS:
            self.asked = _CALLS[func]
            if func in _OUTSIDE_TORCH and not self._values:
                raise DataDependentOutputException(func)
        return func(*args, **kwargs)


def seed_all(seed: int) -> int:
    """Seeds the generators of torch, Python and numpy, whose seeds have 32 bits. Returns the seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    return seed


def generators() -> tuple[object, object]:
    """The states of Python's and numpy's generators, to be compared."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (name, np.asarray(keys).tobytes(), *rest)


def all_generators() -> tuple[object, ...]:
    """The states of the generators that everything draws from: torch's, Python's and numpy's."""
    return torch.get_rng_state().numpy().tobytes(), *generators()


@contextmanager
def generators_left_alone() -> Iterator[None]:
    """A context after which Python's and numpy's generators continue as if nothing had been drawn inside."""
    python, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)


def cure_of(problem: object) -> str:
    """The cure for labels that a loss fails on with such words, after a space; "" for other words."""
    known = ((_OF_ONE_HOT, _ONE_HOT_LABELS), (_OF_WHOLE_NUMBERS, _WHOLE_LABELS))
    return next((cure for words, cure in known if any(word in str(problem) for word in words)), "")


@contextmanager
def judging(loss: str, shape: tuple[int, ...], against: str, *, values: bool) -> Iterator[None]:
    """A context for a call of the loss of that name on outputs of `shape` (one row's).

    values: True if tensors have values. Raises OptionError where the loss reads one and there are none, or counts classes by
    the labels of a part; DataError where it fails for another reason.
    """
    with generators_left_alone(), Lend(), _Watch(values=values) as watch:  # a loss may draw
        try:
            yield
        except SeqpartError:
            if watch.cannot:
                raise _refusal(loss, watch.cannot) from None
            raise
        except Exception as error:
            if watch.cannot or _SECOND_TIME in str(error):
                raise _refusal(loss, watch.cannot or _GRAPH) from error
            if not values and isinstance(error, DataDependentOutputException):
                raise _refusal(loss, watch.asked or _NUMBER) from error
            if not values and isinstance(error, DynamicOutputShapeException):
                raise _refusal(loss, _SHAPE) from error
            raise DataError(f"the loss does not take outputs of shape {shape}{against}: {error}{cure_of(error)}") from error
    if watch.cannot:
        raise _refusal(loss, watch.cannot)


def refuse_borrowed(loss: str, found: Any) -> None:
    """Raises OptionError if a loss of real outputs has no values: it used a tensor of the network that it was not given."""
    if isinstance(found, FakeTensor):
        raise _refusal(loss, _GRAPH)


def _refusal(loss: str, asked: str) -> OptionError:
    expected = "is to be measured on tensors that have shapes and no values"
    if asked == _BETWEEN:
        expected = "is a function of what the model returns"
    elif asked in (BY_NAME, _GRAPH):
        expected = "takes the output, one tensor, and the labels"
    return OptionError(f"loss {loss}: expected one that {expected}; found that it {asked}. {_CURES[asked]}")
