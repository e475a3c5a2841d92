"""Optimizers that the command knows by name: how each is built, of torch, of a library that is imported only then, or here."""

import sys
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from math import sqrt
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from seqpart.errors import OptionError
from seqpart.model.slices import share_slices

OptimizerName = Literal["adam", "adamw", "sgd", "adafactor", "lion", "muon", "schedulefree", "adamw8bit", "lion8bit"]
NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)
IN_WORDS = f"{', '.join(NAMES[:-1])} or {NAMES[-1]}"
OF_TORCH: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"fused": True}),
    "adamw": (torch.optim.AdamW, {"fused": True}),
    "sgd": (torch.optim.SGD, {"fused": True}),
    # Parameter by parameter, as torch does on the CPU: all at once would take as much memory again as the parameters.
    "adafactor": (torch.optim.Adafactor, {"foreach": False}),
}
"""Class of each optimizer of torch, and how it is called."""
OF_BITSANDBYTES = {"lion": ("Lion", 1, False), "adamw8bit": ("AdamW8bit", 2, True), "lion8bit": ("Lion8bit", 1, True)}
"""Class of bitsandbytes, its moments, and whether they have 8 bits."""
NEED_WHOLE = ("adafactor", "muon", "adamw8bit", "lion8bit")
"""Optimizers whose step depends on a weight as a whole, or on where its blocks of numbers begin."""
SLICE, _BLOCK, _SMALLEST = 1 << 17, 256, 4096
"""Numbers of a parameter that a thread updates at once on a CPU; that have one scale; and that have moments of 8 bits."""
ROOM_IN_8_BITS = 32
"""Most bytes that a step of OF_BITSANDBYTES takes on a CPU for each number in slices: of weights in bfloat16."""
_NOT_HIDDEN = ("*embed*", "*wte*", "*wpe*", "*head*")
"""Names of matrices that Muon's author leaves to AdamW: the first and the last."""
FAR_END, TO_AVERAGE = "z", 1 - 1 / 0.9
"""Schedule-free weights are trained between their average and this tensor of the state; and the share of the way from them to
it that gives the average: `eval()` of schedulefree 1.4 (https://arxiv.org/abs/2405.15682, equation 1, beta 0.9)."""
Given = list[Any]
"""Parameters, or pairs (name, parameter)."""


def named_build(name: str, *, lr: float, weight_decay: float, momentum: float, no_decay: str) -> Callable[[Given], Any]:
    """Returns the function that builds an optimizer of NAMES. no_decay: see `is_spared`.

    Raises OptionError if its library is not installed.
    """
    if name == "muon":
        return partial(_muon, lr=lr, weight_decay=weight_decay, no_decay=no_decay)
    options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    if name in OF_TORCH:
        of_torch, fixed = OF_TORCH[name]
        options |= fixed | ({"momentum": momentum} if name == "sgd" else {})
        kind = partial(_apart_if_complex, of_torch) if "fused" in fixed else of_torch
    else:
        kind = _schedule_free if name == "schedulefree" else partial(_of_bitsandbytes, name)
    if not (no_decay and weight_decay):
        return lambda parameters: kind(parameters, **options)
    return lambda named_parameters: kind(_groups(named_parameters, no_decay), **options)


def _apart_if_complex(kind: Any, parameters: Sequence[Any], **options: Any) -> torch.optim.Optimizer:
    """Builds an optimizer of torch with its fused steps; complex parameters, which those refuse, have groups of their own."""
    given = parameters if parameters and isinstance(parameters[0], dict) else [{"params": [*parameters]}]
    groups = []
    for group in given:
        floats, others = ([p for p in group["params"] if p.is_complex() is way] for way in (False, True))
        groups += [{**group, "params": floats}] if floats or not others else []
        groups += [{**group, "params": others, "fused": False, "foreach": False}] if others else []
    built: torch.optim.Optimizer = kind(groups, **options)
    return built


def is_spared(no_decay: str, name: str, dimensions: int) -> bool:
    """True if a parameter has no weight decay: by its model's name, or because it is a bias, or the weight of a norm.

    no_decay: patterns between commas. `bias`: parameters with that in their own name; `norm`: others of one
    dimension or none; or a pattern of names such as `*.embed*`.
    """
    is_bias = "bias" in name.rpartition(".")[2]
    return any(
        is_bias if pattern == "bias" else dimensions < 2 and not is_bias if pattern == "norm" else fnmatchcase(name, pattern)
        for pattern in map(str.strip, no_decay.split(","))
    )


def _groups(named: Iterable[tuple[str, nn.Parameter]], no_decay: str) -> list[dict[str, Any]]:
    """Two groups: the second has no weight decay."""
    groups: list[list[nn.Parameter]] = [[], []]
    for name, parameter in named:
        groups[is_spared(no_decay, name, parameter.ndim)].append(parameter)
    return [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}]


def _muon(
    named_parameters: list[tuple[str, nn.Parameter]], *, lr: float, weight_decay: float, no_decay: str
) -> list[torch.optim.Optimizer]:
    """Muon for hidden matrices and AdamW for all others, with one learning rate: Muon's steps are scaled to the size of AdamW's
    (https://arxiv.org/abs/2502.16982, section 2.2)."""
    parts: list[list[tuple[str, nn.Parameter]]] = [[], []]
    for name, parameter in named_parameters:
        hidden = parameter.ndim == 2 and not any(fnmatchcase(name.lower(), pattern) for pattern in _NOT_HIDDEN)
        parts[hidden].append((name, parameter))
    others, hidden_ones = (_groups(part, no_decay) for part in parts)
    return [
        torch.optim.Muon(hidden_ones, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, fused=True),
    ]


def _schedule_free(parameters: Sequence[Any], **options: Any) -> torch.optim.Optimizer:
    try:
        from schedulefree import AdamWScheduleFree
    except ImportError:
        raise _missing("schedulefree", "schedulefree") from None
    optimizer: torch.optim.Optimizer = AdamWScheduleFree(parameters, **options, foreach=False)
    optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def _missing(name: str, library: str) -> OptionError:
    return OptionError(f"--optimizer {name} is of {library}, which is not installed: pip install 'seqpart[lowbit]'.")


def _of_bitsandbytes(name: str, parameters: Sequence[Any], **options: Any) -> torch.optim.Optimizer:
    """Builds bitsandbytes' optimizer on a GPU, and one with the same state on a CPU."""
    kind, moments, is_in_8_bits = OF_BITSANDBYTES[name]
    built = InBlocks(parameters, moments=moments, is_in_8_bits=is_in_8_bits, **options)
    given = [parameter for group in built.param_groups for parameter in group["params"]]
    if not any(parameter.is_cuda for parameter in given):
        return built
    try:
        import bitsandbytes.optim
    except ImportError:
        raise _missing(name, "bitsandbytes") from None
    if not all(parameter.is_contiguous() for parameter in given):  # it would move them out of their memory
        raise OptionError(f"--optimizer {name} on a GPU needs parameters that lie row by row: no channels_last. Take another.")
    found: torch.optim.Optimizer = getattr(bitsandbytes.optim, kind)(parameters, **options)
    found.initialized = True  # type: ignore[attr-defined]  # as if the first step were made
    return found


class InBlocks(torch.optim.Optimizer):
    """AdamW or Lion on a CPU, with the state of bitsandbytes' optimizers: moments of 32 bits, or of 8 and a scale for each 256.

    A parameter is updated in slices. bitsandbytes' own step takes five times the parameter's memory on a CPU, its import 130
    MB, and in 8 bits its kernel of version 0.50 makes of a zero 2e-5 of the largest number of its block: weights without a
    gradient would move, with Lion as fast as all others. Here a moment becomes the nearest of 256 values, as on a GPU.
    Parameters of fewer than 4,096 numbers have moments of 32 bits. (https://arxiv.org/abs/2110.02861, sections 2 and 2.1;
    https://arxiv.org/abs/2302.06675, algorithm 2.)
    """

    def __init__(self, parameters: Any, *, moments: int, is_in_8_bits: bool, lr: float, weight_decay: float = 0.0) -> None:
        self._moments, self._is_in_8_bits = moments, is_in_8_bits
        betas = (0.9, 0.99) if moments == 1 else (0.9, 0.999)
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: nn.Parameter, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            self._begin(parameter, state)
        state["step"] += 1
        if isinstance(parameter, FakeTensor):
            return
        moments = [_Moment(state, number + 1) for number in range(self._moments)]
        values = parameter.detach().contiguous()
        pieces = [torch.split(whole.reshape(-1), SLICE) for whole in (values, gradient)]

        def work(rooms: _Rooms, starts: Iterable[int]) -> None:
            for place in (start // SLICE for start in starts):
                _step(pieces[0][place], pieces[1][place].float(), moments, place, state["step"], group, rooms)

        share_slices(values.numel(), SLICE, values.device, _Rooms, work)
        if not parameter.is_contiguous():
            parameter.copy_(values)

    def _begin(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        small = not self._is_in_8_bits or parameter.numel() < _SMALLEST
        device = parameter.device
        state["step"] = 0
        for number in range(1, self._moments + 1):
            state[f"state{number}"] = torch.zeros(parameter.shape, dtype=torch.float32 if small else torch.uint8, device=device)
            if not small:
                values = _values(signed=number == 1)
                state[f"qmap{number}"] = torch.tensor(values, dtype=torch.float32, device=device)
                scales = torch.zeros(-(-parameter.numel() // _BLOCK), dtype=torch.float32, device=device)
                state[f"absmax{number}"] = scales


@cache
def _values(*, signed: bool) -> tuple[float, ...]:
    """The 256 values of a moment in 8 bits, ascending: zero, 1, and for each power of ten from 1e-7 on evenly spaced ones,
    twice as many as for the power before."""
    found = [0.0, 1.0]
    for exponent in range(7):
        ends = np.linspace(0.1, 1, (1 << exponent) * (1 if signed else 2) + 1, dtype=np.float32)
        middles = ((ends[:-1] + ends[1:]) / 2 * np.float32(10 ** (exponent - 6))).tolist()
        found += [*middles, *(-middle for middle in middles)] if signed else middles
    return tuple(sorted(found))


class _Rooms:
    """Memory for a step on slices of at most `size` numbers, so that none is mapped anew for each: for three tensors of
    numbers, and numpy's places in tables."""

    def __init__(self, size: int) -> None:
        size = -(-size // _BLOCK) * _BLOCK
        self.numbers = torch.empty(3, size, dtype=torch.float32)
        self.places, self.found, self.above = np.empty(size, np.intp), np.empty(size, np.uint8), np.empty(size, np.bool_)

    def looked_up(self, table: "np.ndarray[Any, Any]", places: "np.ndarray[Any, Any]", out: "np.ndarray[Any, Any]") -> None:
        """Writes `table[places]` into `out`: two to three times as fast as torch, on one thread."""
        np.copyto(self.places[: len(places)], places)
        np.take(table, self.places[: len(places)], out=out, mode="clip")


def _step(
    values: torch.Tensor, gradient: torch.Tensor, moments: "list[_Moment]", place: int, step: int, group: dict[str, Any],
    rooms: _Rooms,
) -> None:  # fmt: skip
    """A step of AdamW or, with one moment, Lion on a slice."""
    rate, (beta1, beta2) = group["lr"], group["betas"]
    first, *second = (moment.read(place, rooms, room) for moment, room in zip(moments, rooms.numbers, strict=False))
    room = rooms.numbers[2, : len(values)]
    new = values.float()
    if group["weight_decay"] > 0:
        new.mul_(1 - rate * group["weight_decay"])
    if second:
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second[0].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        spread = torch.sqrt(second[0], out=room).div_(sqrt(1 - beta2**step)).add_(group["eps"])
        new.addcdiv_(first, spread, value=-rate / (1 - beta1**step))
    else:
        new.add_(torch.mul(first, beta1, out=room).add_(gradient, alpha=1 - beta1).sign_(), alpha=-rate)
        first.mul_(beta2).add_(gradient, alpha=1 - beta2)
    if new is not values:
        values.copy_(new)
    for moment, numbers in zip(moments, (first, *second), strict=True):
        moment.write(place, numbers, rooms)


class _Moment:
    """A moment of a parameter in slices: 32-bit numbers, or places in a table of 256 values, times the scale of their block."""

    def __init__(self, state: dict[str, torch.Tensor], number: int) -> None:
        self._slices = torch.split(state[f"state{number}"].view(-1), SLICE)
        self._scales: Sequence[torch.Tensor] = ()
        if self._slices[0].dtype is torch.uint8:
            self._values = state[f"qmap{number}"].numpy()
            self._nearest = _nearest(tuple(self._values.tolist()))
            self._scales = torch.split(state[f"absmax{number}"], SLICE // _BLOCK)

    def read(self, place: int, rooms: _Rooms, room: torch.Tensor) -> torch.Tensor:
        """The numbers of a slice, in `room`; of 32 bits in place."""
        codes = self._slices[place]
        if not self._scales:
            return codes
        rooms.looked_up(self._values, codes.numpy(), room[: len(codes)].numpy())
        self._blocks(room, place).mul_(self._scales[place][:, None])
        return room[: len(codes)]

    def write(self, place: int, numbers: torch.Tensor, rooms: _Rooms) -> None:
        """Sets a slice to the nearest values of `numbers`, the memory that `read` returned."""
        if not self._scales:
            return
        blocks, scales = self._blocks(numbers, place), self._scales[place]
        blocks.view(-1)[len(numbers) :].zero_()
        torch.amax(blocks, 1, out=scales)
        torch.maximum(scales, blocks.amin(1).neg_(), out=scales)
        blocks.div_(scales.clamp(min=torch.finfo().tiny)[:, None])
        self._slices[place].copy_(self._nearest(numbers, rooms))

    def _blocks(self, room: torch.Tensor, place: int) -> torch.Tensor:
        """The room of a slice, with that of its last block as a whole."""
        return room.as_strided((len(self._scales[place]), _BLOCK), (_BLOCK, 1))


class _Nearest:
    """Finds the nearest of 256 values, seven times as fast as torch.bucketize: the upper 16 bits of a number leave two."""

    def __init__(self, given: tuple[float, ...]) -> None:
        values = torch.tensor(given)
        between = (values[1:] + values[:-1]) / 2
        upper = torch.arange(1 << 16, dtype=torch.int32) << 16
        least = torch.where(upper < 0, upper | 0xFFFF, upper).view(torch.float32)
        self._first = torch.bucketize(least, between, out_int32=True).to(torch.uint8).numpy()
        self._between = np.append(between.numpy(), np.float32(np.inf))

    def __call__(self, numbers: torch.Tensor, rooms: _Rooms) -> torch.Tensor:
        """The codes of `numbers`, in memory of `rooms`."""
        given = numbers.numpy()
        found, above, between = (room[: len(given)] for room in (rooms.found, rooms.above, rooms.numbers[2].numpy()))
        rooms.looked_up(self._first, given.view(np.uint16)[sys.byteorder == "little" :: 2], found)
        rooms.looked_up(self._between, found, between)
        found += np.greater(given, between, out=above)
        return torch.from_numpy(found)


_nearest = cache(_Nearest)
