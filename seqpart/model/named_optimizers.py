"""Optimizers that the command knows by name: how each is built, of torch or of a library that is imported only then."""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from math import sqrt
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from seqpart.errors import OptionError

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
OF_BITSANDBYTES = {"lion": "Lion", "adamw8bit": "AdamW8bit", "lion8bit": "Lion8bit"}
NEED_WHOLE = ("adafactor", "muon", "adamw8bit", "lion8bit")
"""Optimizers whose step depends on a weight as a whole, or on where its blocks of numbers begin."""
SLICE, _BLOCK = 1 << 16, 256
"""Numbers of a parameter that are updated at once on the CPU, and that have one scale, both of bitsandbytes' optimizers."""
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
        return _muon(lr, weight_decay, no_decay)
    options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    if name in OF_TORCH:
        kind, fixed = OF_TORCH[name]
        options |= fixed | ({"momentum": momentum} if name == "sgd" else {})
    else:
        kind = _library(name)
        options |= {"foreach": False} if name == "schedulefree" else {}
    if not (no_decay and weight_decay):
        return lambda parameters: kind(parameters, **options)
    return lambda named_parameters: kind(_groups(named_parameters, no_decay), **options)


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


def _muon(lr: float, weight_decay: float, no_decay: str) -> Callable[[Given], list[torch.optim.Optimizer]]:
    """Muon for hidden matrices and AdamW for all others, with one learning rate: Muon's steps are scaled to the size of AdamW's
    (https://arxiv.org/abs/2502.16982, section 2.2)."""

    def muon(named_parameters: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
        parts: list[list[tuple[str, nn.Parameter]]] = [[], []]
        for name, parameter in named_parameters:
            hidden = parameter.ndim == 2 and not any(fnmatchcase(name.lower(), pattern) for pattern in _NOT_HIDDEN)
            parts[hidden].append((name, parameter))
        others, hidden_ones = (_groups(part, no_decay) for part in parts)
        return [
            torch.optim.Muon(hidden_ones, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, fused=True),
        ]

    return muon


def _training(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    def build(parameters: Sequence[Any], **options: Any) -> torch.optim.Optimizer:
        optimizer = kind(parameters, **options)
        optimizer.train()  # type: ignore[attr-defined]
        return optimizer

    return build


def _library(name: str) -> Any:
    """Returns the class of an optimizer that is not torch's."""
    library = "schedulefree" if name == "schedulefree" else "bitsandbytes"
    try:
        if name == "schedulefree":
            from schedulefree import AdamWScheduleFree

            return _training(AdamWScheduleFree)
        import bitsandbytes.optim

        return _in_slices(getattr(bitsandbytes.optim, OF_BITSANDBYTES[name]))
    except ImportError:
        raise OptionError(
            f"--optimizer {name} is of {library}, which is not installed: pip install 'seqpart[lowbit]'."
        ) from None


def _in_slices(kind: Any) -> Any:
    """Returns a class of bitsandbytes that steps on the CPU on slices of a parameter, and leaves it where it lies.

    The library's own step takes five times the parameter's memory there. And in 8 bits its kernel of version 0.50 makes of a
    zero 2e-5 of the largest number of its block: weights without a gradient would move, with Lion as fast as all others. Here a
    state becomes the nearest of its 256 values, as on a GPU. In 32 bits Lion has the library's bits.
    """

    class InSlices(kind):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.initialized = True  # else the first step sets it, as if the optimizer kept something beside the state

        def get_state_buffer(self, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(p.shape, dtype=dtype, device=p.device)

        @torch.no_grad()
        def update_step(self, group: dict[str, Any], p: nn.Parameter, gindex: int, pindex: int) -> None:
            state, values, gradient = self.state[p], p.detach().contiguous(), p.grad.contiguous()  # type: ignore[union-attr]
            if p.device.type == "cpu" and not isinstance(p, FakeTensor):
                state["step"] += 1
                moments = [_Moment(state, number) for number in (1, 2) if f"state{number}" in state]
                pieces = [torch.split(whole.view(-1), SLICE) for whole in (values, gradient)]
                for place, (piece, slope) in enumerate(zip(*pieces, strict=True)):
                    _step(piece, slope.float(), moments, place, state["step"], group)
            else:
                whole = nn.Parameter(values)
                whole.grad = gradient
                self.state[whole] = state
                super().update_step(group, whole, gindex, pindex)
                del self.state[whole]
            if not p.is_contiguous():
                p.copy_(values)

    InSlices.__name__ = InSlices.__qualname__ = kind.__name__
    return InSlices


def _step(values: torch.Tensor, gradient: torch.Tensor, moments: "list[_Moment]", place: int, step: int, group: Any) -> None:
    """A step of AdamW or, with one moment, Lion on a slice."""
    rate, (beta1, beta2) = group["lr"], group["betas"][:2]
    first, *second = (moment.read(place) for moment in moments)
    new = values.float()
    if group["weight_decay"] > 0:
        new.mul_(1 - rate * group["weight_decay"])
    if second:
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second[0].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        spread = (second[0].sqrt() / sqrt(1 - beta2**step)).add_(group["eps"])
        new.addcdiv_(first, spread, value=-rate / (1 - beta1**step))
    else:
        new.add_(first.mul(beta1).add_(gradient, alpha=1 - beta1).sign_(), alpha=-rate)
        first.mul_(beta2).add_(gradient, alpha=1 - beta2)
    values.copy_(new)
    for moment, numbers in zip(moments, (first, *second), strict=True):
        moment.write(place, numbers)


class _Moment:
    """A moment of a parameter in slices: 32-bit numbers, or places in a table of 256 values, times the scale of their block."""

    def __init__(self, state: dict[str, torch.Tensor], number: int) -> None:
        self._slices = torch.split(state[f"state{number}"].view(-1), SLICE)
        self._scales: Sequence[torch.Tensor] = ()
        if self._slices[0].dtype is torch.uint8:
            self._values = state[f"qmap{number}"]
            self._nearest = _Nearest.of(tuple(self._values.tolist()))
            self._scales = torch.split(state[f"absmax{number}"], SLICE // _BLOCK)

    def read(self, place: int) -> torch.Tensor:
        """The numbers of a slice; of 32 bits in place."""
        if not self._scales:
            return self._slices[place]
        found = self._values[self._slices[place].int()]
        return found.mul_(self._of_each(place))

    def write(self, place: int, numbers: torch.Tensor) -> None:
        """Sets a slice to the nearest values."""
        if not self._scales:
            return
        rows = F.pad(numbers, (0, -len(numbers) % _BLOCK)).view(-1, _BLOCK)
        torch.amax(rows.abs(), 1, out=self._scales[place])
        self._slices[place].copy_(self._nearest(numbers.div_(self._of_each(place).clamp_(min=torch.finfo().tiny))))

    def _of_each(self, place: int) -> torch.Tensor:
        return self._scales[place].repeat_interleave(_BLOCK)[: len(self._slices[place])]


class _Nearest:
    """Finds the nearest of 256 values, faster than torch.bucketize: the upper 16 bits of a number leave two of them."""

    def __init__(self, values: torch.Tensor) -> None:
        self._between = torch.cat([(values[1:] + values[:-1]) / 2, torch.tensor([torch.inf])])
        upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
        least = torch.where(upper < 0, upper | 0xFFFF, upper).view(torch.float32)
        self._first = torch.bucketize(least, self._between[:-1], out_int32=True)

    @classmethod
    @cache
    def of(cls, values: tuple[float, ...]) -> "_Nearest":
        return cls(torch.tensor(values))

    def __call__(self, numbers: torch.Tensor) -> torch.Tensor:
        found = self._first[(numbers.view(torch.int32) >> 16).add_(1 << 15)]
        return found.add_(numbers > self._between[found])
