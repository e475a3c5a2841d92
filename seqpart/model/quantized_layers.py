"""Linear layers of bitsandbytes whose packed weights and scales are frozen parameters: tensors with homes like any others.

A weight is dequantized where it is used, in forward and again in backward, as the library does it: T. Dettmers, A. Pagnoni,
A. Holtzman, L. Zettlemoyer, "QLoRA: Efficient Finetuning of Quantized LLMs" (2023), section 3, and T. Dettmers et al.,
"LLM.int8()" (2022). The library keeps what backward needs outside of autograd's saved tensors, where it is not found again
when the weights lie elsewhere by then; here autograd has it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from seqpart.model.inspection import Packed

_PADDED = 64
"""The text beside a 4-bit weight ends in spaces at a multiple of so many bytes: equal layers have tensors of equal shapes,
whatever digits it has."""
_LARGEST = 127.0
"""Of 8 bits: what a row's largest weight became."""


class Format(NamedTuple):
    """How a weight of that shape (out, in) is packed. dtype: of what was packed, in which backward has it again."""

    shape: tuple[int, int]
    blocksize: int
    quant_type: str
    dtype: torch.dtype


class Quantized(nn.Module):
    """What stands in the place of a layer of the library. Its own tensors are frozen; the bias is the layer's own parameter.

    names: {name of a tensor here: name in the layer's state_dict}; the others are in no state_dict.
    """

    def __init__(self, bias: nn.Parameter | None, tensors: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(_plain(tensor), requires_grad=False))
        self.register_parameter("bias", bias)
        self._names = {**names, "bias": "bias"}
        self.packed: Packed

    def share(self, other: "Quantized") -> None:
        """Have the frozen tensors of a layer of the same weight."""
        self._parameters.update({name: tensor for name, tensor in other._parameters.items() if name != "bias"})

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, theirs in self._names.items():
            tensor = self._parameters[name]
            if tensor is not None:
                destination[prefix + theirs] = tensor if keep_vars else tensor.detach()


class Linear4bit(Quantized):
    """x (..., in) -> (..., out), by a weight in blocks of 4-bit numbers with a scale each, which may be quantized again."""

    def __init__(self, layer: Any) -> None:
        """layer: a bitsandbytes.nn.Linear4bit that is quantized."""
        state = layer.weight.quant_state
        found = state.as_dict(packed=True)
        names = {name: name.partition(".")[0] for name in found}
        tensors = {"weight": layer.weight} | {names[name]: _padded(name, tensor) for name, tensor in found.items()}
        tensors |= {"offset": state.offset} if state.nested else {}  # the text has it in digits
        if layer.bias is not None and layer.compute_dtype is not None:  # as the library does it when it first runs
            layer.bias.data = layer.bias.data.to(layer.compute_dtype)
        super().__init__(layer.bias, tensors, {"weight": "weight"} | {own: f"weight.{name}" for name, own in names.items()})
        self.format = Format(tuple(state.shape), state.blocksize, state.quant_type, state.dtype)
        self._compute_dtype = layer.compute_dtype
        self._scales = ("absmax", "nested_absmax", "nested_quant_map", "offset") if state.nested else ("absmax",)
        self.packed = Packed(f"4 bits ({state.quant_type})", state.shape.numel(), tuple(tensors), said_in="quant_state")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.dtype
        x = x if self._compute_dtype is None else x.to(self._compute_dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        scales = (self._parameters[name] for name in self._scales)
        found: torch.Tensor = _Product4bit.apply(x, bias, self.format, self.weight, *scales)
        return found.to(given)


class _Product4bit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, how: Format, weight: torch.Tensor, *scales: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, *scales)
        ctx.how, ctx.bias_type = how, None if bias is None else bias.dtype
        if x.device.type == "cpu":  # as the library there does it, in two operations that memory can be counted of
            return F.linear(x, _dequantized(weight, scales, how, x.dtype), bias)
        packed, (absmax, *nested) = weight.view(-1, 1), scales
        found: torch.Tensor = torch.ops.bitsandbytes.gemm_4bit.default(
            x, packed, how.shape, nested[0] if nested else absmax, how.blocksize, how.quant_type, bias=bias,
            absmax_8bit=absmax if nested else None, absmax_code=nested[1] if nested else None,
            absmax_offset=nested[2] if nested else None,
        )  # fmt: skip
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        weight, *scales = ctx.saved_tensors
        of_x = of_bias = None
        if ctx.needs_input_grad[1]:
            of_bias = gradient.sum(0, dtype=ctx.bias_type)
        if ctx.needs_input_grad[0]:
            of_x = torch.matmul(gradient, _dequantized(weight, scales, ctx.how, ctx.how.dtype).to(gradient.dtype))
        return of_x, of_bias, None, None, *(None for _ in scales)


def _dequantized(weight: torch.Tensor, scales: Any, how: Format, dtype: torch.dtype) -> torch.Tensor:
    """(out, in)."""
    absmax, *nested = scales
    if nested:
        blocks, code, offset = nested
        absmax = torch.ops.bitsandbytes.dequantize_blockwise.default(absmax, blocks, code, 256, torch.float32) + offset
    found: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
        weight.view(-1, 1), absmax, how.blocksize, how.quant_type, how.shape, dtype
    )
    return found


class Linear8bit(Quantized):
    """x (..., in) -> (..., out), by a weight of bytes with a scale for each row: in floats, as the library trains on a CPU."""

    def __init__(self, layer: Any) -> None:
        """layer: a bitsandbytes.nn.Linear8bitLt that is quantized."""
        scale = layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB
        tensors = {"weight": layer.weight, "SCB": scale}
        super().__init__(layer.bias, tensors, {name: name for name in tensors})
        self.packed = Packed("8 bits", layer.weight.numel(), tuple(tensors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        found: torch.Tensor = _Product8bit.apply(x, bias, self.weight, self.SCB)
        return found


class _Product8bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor, scale: torch.Tensor) -> Any:
        ctx.save_for_backward(weight, scale)
        ctx.x_type, ctx.bias_type = x.dtype, None if bias is None else bias.dtype
        return F.linear(x, _scaled(weight, scale, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        weight, scale = ctx.saved_tensors
        of_x = of_bias = None
        if ctx.needs_input_grad[1]:
            of_bias = gradient.sum(0, dtype=ctx.bias_type)
        if ctx.needs_input_grad[0]:
            rows = gradient.reshape(-1, gradient.shape[-1]).contiguous() if gradient.ndim == 3 else gradient
            of_rows = torch.matmul(rows.to(ctx.x_type), _scaled(weight, scale, ctx.x_type))
            of_x = of_rows.view(*gradient.shape[:-1], weight.shape[1])
        return of_x, of_bias, None, None


def _scaled(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return weight.to(dtype).mul_(scale.unsqueeze(1).mul(1.0 / _LARGEST))


def _padded(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A copy, since codes are shared by all layers; of the text with spaces behind it, which JSON allows."""
    if "." not in name:
        return tensor.clone() if name.endswith("quant_map") else tensor
    room = -len(tensor) % _PADDED
    return torch.cat([tensor, torch.full((room,), ord(" "), dtype=tensor.dtype, device=tensor.device)])


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as no kind of tensor but torch's own."""
    return tensor.detach().as_subclass(torch.Tensor)
