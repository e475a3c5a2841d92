"""Optimizer steps on weights in bfloat16, computed in float32 and rounded stochastically.

bfloat16 has 8 significant bits: rounded to the nearest, an update smaller than 1/512 of its weight is lost, however often it
comes. Rounded up or down by chance, with the nearer neighbour likelier, weights are right on average. The chance is random bits
that depend on their place alone (run seed, stage, update, parameter, number in it): another cut, a resumed run and another
order of steps round alike.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from seqpart.device.device import keyed_seed, random_words
from seqpart.model.optimizer_state import Several

NARROW = torch.bfloat16
SLICE = 1 << 18
"""Numbers that are rounded at once, and updated at once where a step depends on each number alone."""
ROOM = 40 * SLICE
"""Bytes that work on a slice takes."""
_ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_COUNT = "step"
"""The tensor in the state of these that is no moment."""
Key = tuple[int | str, ...]


def round_into(narrow: torch.Tensor, values: torch.Tensor, *key: int | str, first: int = 0) -> None:
    """Rounds `values`, float32, stochastically into `narrow`, bfloat16, both flat. first: number of the first in its parameter,
    a multiple of 4.

    A number between two of bfloat16 becomes the upper one with a probability of its distance from the lower one in units of
    theirs, to 16 bits. What is not finite becomes NaN.
    """
    base = keyed_seed(*key)
    for start in range(0, 0 if isinstance(narrow, FakeTensor) else len(narrow), SLICE):
        piece = values[start : start + SLICE]
        words = torch.arange((first + start) // 4, (first + start + len(piece) + 3) // 4, device=piece.device)
        bits = random_words(words, base).view(torch.int16)[: len(piece)].to(torch.int32).bitwise_and_(0xFFFF)
        sums = bits.add_(piece.view(torch.int32)).bitwise_and_(-1 << 16).view(torch.float32)
        narrow[start : start + SLICE].copy_(sums.add_(piece, alpha=0))  # NaN stays NaN, whatever its bits


def average_into(average: torch.Tensor, weights: torch.Tensor, share: float, *key: int | str) -> None:
    """Moves `average` by `share` of its way to `weights`, both bfloat16, rounded stochastically."""
    pieces = zip(torch.split(_flat(average), SLICE), torch.split(_flat(weights, like=average), SLICE), strict=True)
    for number, (one, other) in enumerate(pieces):
        round_into(one, one.float().lerp_(other.float(), share), *key, first=number * SLICE)


class RoundingSteps(Several):
    """An optimizer whose steps see parameters in bfloat16 as float32, one at a time, and round them stochastically.

    Each parameter's memory is replaced by its values in float32, the optimizer makes its step, and the result is rounded into
    the memory that the parameter gets back: of torch's fused optimizers a slice at a time.
    """

    def __init__(self, inner: torch.optim.Optimizer, names: Mapping[int, str], moments: torch.dtype) -> None:
        """names: {id of a parameter: its name}. moments: the type that tensors of a weight's shape in the state have."""
        super().__init__([inner])
        self.defaults = inner.defaults
        self.in_slices = type(inner) in _ELEMENTWISE and bool(inner.defaults.get("fused"))
        # Names by which `optimizer_state` leaves them alone: they are no state.
        self._step_names, self._step_moments, self._step_key = names, moments, Key()

    def at(self, *key: int | str) -> None:
        """Says where the run is: the next step's rounding depends on it."""
        self._step_key = key

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Makes a step of all parameters that have a gradient."""
        slopes = {p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None}
        narrow = [parameter for parameter in slopes if parameter.dtype is NARROW]
        for parameter in narrow:
            parameter.grad = None
        if len(narrow) < len(slopes) or not slopes:
            super().step()
        for parameter in slopes:
            parameter.grad = None
        for parameter in narrow:
            values = parameter.data
            try:
                self._update(parameter, values, slopes[parameter])
            finally:
                parameter.grad, parameter.data = None, values
        for parameter, slope in slopes.items():
            parameter.grad = slope

    def _update(self, parameter: nn.Parameter, values: torch.Tensor, slope: torch.Tensor) -> None:
        key = *self._step_key, self._step_names[id(parameter)]
        if self.in_slices:
            self._update_in_slices(parameter, values, slope, key)
            return
        parameter.data, parameter.grad = values.float(), None
        parameter.grad = slope.float()
        super().step()
        round_into(_flat(values), _flat(parameter.data, like=values), *key)

    def _update_in_slices(self, parameter: nn.Parameter, values: torch.Tensor, slope: torch.Tensor, key: Key) -> None:
        (inner,), weights, slopes = self.optimizers, _flat(values), _flat(slope, like=values)
        kept, counted, size = inner.state.pop(parameter, {}), None, len(weights) if isinstance(weights, FakeTensor) else SLICE
        begun = bool(kept)
        for start in range(0, len(weights), max(1, size)):
            here = slice(start, start + size)
            given = {name: one.clone() if name == _COUNT else _flat(one)[here].float() for name, one in kept.items() if begun}
            if begun:
                inner.state[parameter] = dict(given)
            parameter.grad, parameter.data = None, weights[here].float()
            parameter.grad = slopes[here].float()
            inner.step()
            made = inner.state.pop(parameter, {})
            counted = made.pop(_COUNT, None)
            if not kept:
                kept = {name: torch.zeros_like(values, dtype=self._step_moments) for name in made}
                kept |= {} if counted is None else {_COUNT: counted.clone()}
            for name, one in made.items():
                if self._step_moments is NARROW:
                    round_into(_flat(kept[name])[here], one, *key, name, first=start)
                elif one is not given.get(name):
                    _flat(kept[name])[here].copy_(one)
            round_into(weights[here], parameter.data, *key, first=start)
        if counted is not None:
            kept[_COUNT].copy_(counted)
        if kept:
            inner.state[parameter] = kept


def _flat(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """The numbers of a dense tensor in the order of memory; or of a copy that lies as `like` does, if it does not."""
    if like is not None and tensor.stride() != like.stride():
        tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
