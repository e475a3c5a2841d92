"""Optimizer steps on weights in bfloat16, computed in float32 and rounded stochastically.

bfloat16 has 8 significant bits: rounded to the nearest, an update smaller than 1/512 of its weight is lost, however often it
comes. Rounded up or down by chance, with the nearer neighbour likelier, weights are right on average. The chance is random bits
that depend on their place alone (run seed, stage, update, parameter, number in it): another cut, a resumed run and another
order of steps round alike.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from seqpart.device.device import keyed_seed, random_words
from seqpart.model.optimizer_state import Several
from seqpart.model.slices import share_slices

NARROW = torch.bfloat16
SLICE = 1 << 18
"""Numbers that a thread rounds at once, and updates at once where a step depends on each number alone."""
ROOM_TO_ROUND = 36
"""Most bytes that a step takes for each number in slices."""
_ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_COUNT = "step"
"""The tensor in the state of these that is no moment."""
Key = tuple[int | str, ...]


class Room:
    """Memory for work on a slice of `size` numbers, with room for `others` tensors of it in float32."""

    def __init__(self, size: int, device: torch.device, others: int = 0) -> None:
        self._words = torch.empty(2, -(-size // 4), dtype=torch.int64, device=device)
        self._numbers = torch.empty(size, dtype=torch.int32, device=device)
        self._others = torch.empty(others, size, dtype=torch.float32, device=device)

    def random(self, first: int, count: int, base: int) -> torch.Tensor:
        """Returns `count` random numbers of 16 bits, as int32, from place `first` of the sequence `base`."""
        words, other = self._words[:, : -(-count // 4)]
        torch.arange(first // 4, first // 4 + len(words), out=words)
        numbers = self._numbers[:count].copy_(random_words(words, base, other).view(torch.int16)[:count])
        return numbers.bitwise_and_(0xFFFF)

    def widened(self, narrow: torch.Tensor, other: int) -> torch.Tensor:
        """Returns the numbers of `narrow`, flat, in float32, in the memory of number `other` if they are not."""
        return narrow if narrow.dtype is torch.float32 else self._others[other, : len(narrow)].copy_(narrow)


def round_into(narrow: torch.Tensor, values: torch.Tensor, *key: int | str, first: int = 0, room: Room | None = None) -> None:
    """Rounds `values`, float32, stochastically into `narrow`, bfloat16, both flat. first: number of the first in its parameter,
    a multiple of 4.

    A number between two of bfloat16 becomes the upper one with a probability of its distance from the lower one in units of
    theirs, to 16 bits. What is not finite becomes NaN.
    """
    if isinstance(narrow, FakeTensor):
        return
    base = keyed_seed(*key)

    def work(room: Room, starts: Iterable[int]) -> None:
        for start in starts:
            piece = values[start : start + SLICE]
            bits = room.random(first + start, len(piece), base)
            sums = bits.add_(piece.view(torch.int32)).bitwise_and_(-1 << 16).view(torch.float32)
            narrow[start : start + SLICE].copy_(sums.add_(piece, alpha=0))  # NaN stays NaN, whatever its bits

    if room is not None:
        work(room, range(0, len(narrow), SLICE))
    else:
        share_slices(len(narrow), SLICE, narrow.device, lambda size: Room(size, narrow.device), work)


def average_into(average: torch.Tensor, weights: torch.Tensor, share: float, *key: int | str) -> None:
    """Moves `average` by `share` of its way to `weights`, both bfloat16, rounded stochastically."""
    into, given = _flat(average), _flat(weights, like=average)

    def work(room: Room, starts: Iterable[int]) -> None:
        for start in starts:
            here = slice(start, start + SLICE)
            moved = room.widened(into[here], 0).lerp_(room.widened(given[here], 1), share)
            round_into(into[here], moved, *key, first=start, room=room)

    share_slices(len(into), SLICE, into.device, lambda size: Room(size, into.device, 2), work)


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
        (group,) = (group for group in inner.param_groups if any(one is parameter for one in group["params"]))

        def of_a_slice() -> tuple[torch.optim.Optimizer, nn.Parameter]:
            steps, piece = copy.copy(inner), nn.Parameter(weights[:0].float())
            steps.state, steps.param_groups, piece.grad = defaultdict(dict), [{**group, "params": [piece]}], slopes[:0].float()
            return steps, piece

        kept, counts = inner.state.pop(parameter, {}), list[torch.Tensor]()
        begun = bool(kept)
        if not begun:  # what an optimizer keeps, it says with its first step
            steps, piece = of_a_slice()
            steps.step()
            kept = {
                name: one.clone() if name == _COUNT else torch.zeros_like(values, dtype=self._step_moments)
                for name, one in steps.state[piece].items()
            }

        def work(room: Room, starts: Iterable[int]) -> None:
            steps, piece = of_a_slice()
            for start in starts:
                here = slice(start, start + SLICE)
                given = {
                    name: one.clone() if name == _COUNT else room.widened(_flat(one)[here], number)
                    for number, (name, one) in enumerate(kept.items(), 2) if begun
                }  # fmt: skip
                steps.state = defaultdict(dict, {piece: dict(given)} if begun else {})
                piece.grad, piece.data = None, room.widened(weights[here], 0)
                piece.grad = room.widened(slopes[here], 1)
                steps.step()
                for name, one in steps.state[piece].items():
                    if name == _COUNT:
                        counts[:] = [one]
                    elif self._step_moments is NARROW:
                        round_into(_flat(kept[name])[here], one, *key, name, first=start, room=room)
                    elif one is not given.get(name):
                        _flat(kept[name])[here].copy_(one)
                round_into(weights[here], piece.data, *key, first=start, room=room)

        others = 2 + (len(kept) if begun and self._step_moments is NARROW else 0)
        if not isinstance(values, FakeTensor):
            share_slices(len(weights), SLICE, values.device, lambda size: Room(size, values.device, others), work)
        if counts:
            kept[_COUNT].copy_(counts[0])
        if kept:
            inner.state[parameter] = kept


def _flat(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """The numbers of a dense tensor in the order of memory; or of a copy that lies as `like` does, if it does not."""
    if like is not None and tensor.stride() != like.stride():
        tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
