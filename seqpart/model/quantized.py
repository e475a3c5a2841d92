"""Linear layers of bitsandbytes, with their packed weights and scales as frozen tensors that have homes."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from seqpart.errors import ModelError
from seqpart.interrupts import undivided
from seqpart.model.inspection import Packed, is_listened_to
from seqpart.model.live_modules import refuse_away, refuse_hooked, refuse_inference, replaced

_PADDED = 64
"""The text beside a 4-bit weight is padded with spaces to a multiple of this many bytes, so that equal layers have tensors of
equal shapes, however many digits it has."""
_LARGEST = 127.0
"""Value of a row's largest weight in 8 bits."""


class Format(NamedTuple):
    """How a weight of shape (out, in) is packed. dtype: its type before packing, in which backward unpacks it."""

    shape: tuple[int, int]
    blocksize: int
    quant_type: str
    dtype: torch.dtype


class Quantized(nn.Module):
    """Replacement of a layer of the library. Its own tensors are frozen; the bias is the layer's own parameter.

    names: {name of a tensor here: name in the layer's state_dict}; the others are in no state_dict.
    """

    def __init__(self, bias: nn.Parameter | None, tensors: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.detach().as_subclass(torch.Tensor), requires_grad=False))
        self.register_parameter("bias", bias)
        self._names = {**names, "bias": "bias"}
        self.packed: Packed

    def share(self, other: "Quantized") -> None:
        """Uses the frozen tensors of `other`, a layer with the same weight."""
        self._parameters.update({name: tensor for name, tensor in other._parameters.items() if name != "bias"})

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, theirs in self._names.items():
            tensor = self._parameters[name]
            if tensor is not None:
                destination[prefix + theirs] = tensor if keep_vars else tensor.detach()


class Linear4bit(Quantized):
    """A linear layer (..., in) -> (..., out) with blocks of 4-bit weights, each with a scale that may be quantized too."""

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
        self.packed = Packed(f"4 bits ({state.quant_type})", state.shape.numel(), tuple(tensors), layout_in="quant_state")

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
        if x.device.type == "cpu":  # as the library does it there, in two operations whose memory can be counted
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
    absmax, *nested = scales
    if nested:
        blocks, code, offset = nested
        absmax = torch.ops.bitsandbytes.dequantize_blockwise.default(absmax, blocks, code, 256, torch.float32) + offset
    found: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
        weight.view(-1, 1), absmax, how.blocksize, how.quant_type, how.shape, dtype
    )
    return found


class Linear8bit(Quantized):
    """A linear layer (..., in) -> (..., out) with an 8-bit weight and a scale per row; computes in floats, as the library
    trains on a CPU."""

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
    """Copies codes, which all layers share, and pads the text with spaces, which JSON allows."""
    if "." not in name:
        return tensor.clone() if name.endswith("quant_map") else tensor
    room = -len(tensor) % _PADDED
    return torch.cat([tensor, torch.full((room,), ord(" "), dtype=tensor.dtype, device=tensor.device)])


_SCALES = 256
"""Scales in a block, where scales are quantized too: the library's products know no other number."""
_KINDS = ("Linear4bit", "LinearNF4", "LinearFP4", "Linear8bitLt")

_Place = tuple[object, str, str]
"""A tensor of the library's: its owner, the attribute, and the tensor's name in the layer of ours."""


@contextmanager
def plain_tensors(model: object, device: str) -> Iterator[object]:
    """A context in which layers of bitsandbytes in `model`, a module or a list of blocks, have their packed weights and scales
    as frozen parameters; its value is the model to train. The library's own layers are empty inside.

    device: the kind of device that they will run on. Raises ModelError, naming the layer, for one that cannot be replaced.
    """
    refuse_away(model)  # here every model comes in
    refuse_hooked(model)
    refuse_inference(model)
    library = sys.modules.get("bitsandbytes")
    kinds = () if library is None else (library.nn.Linear4bit, library.nn.Linear8bitLt)
    layers: dict[Any, str] = {module: name for name, module in _named(model) if isinstance(module, kinds)}
    if not layers:
        yield model
        return
    for layer, name in layers.items():
        if why := _why_not(layer, device):
            version = getattr(library, "__version__", "")
            raise ModelError(f"{name or 'the model'} is a {type(layer).__name__} of bitsandbytes {version}, and {why}.")
    _refuse_norms_of_weights(model, layers)
    ours = {layer: Linear8bit(layer) if _is_of_8_bits(layer) else Linear4bit(layer) for layer in layers}
    known: dict[int, Quantized] = {}
    for layer, own in ours.items():
        own.share(known.setdefault(id(layer.weight), own))  # a weight of two layers has one home
        own.train(layer.training)
    emptied = [(place, own) for layer, own in ours.items() for place in _places(layer)]
    with ExitStack() as stack:
        try:
            with undivided():
                for (owner, attribute, _), _ in emptied:  # here no name may hold a tensor: it would as long as the run lasts
                    dtype, device = getattr(owner, attribute).dtype, getattr(owner, attribute).device
                    setattr(owner, attribute, torch.empty(0, dtype=dtype, device=device))
                stack.enter_context(replaced(model, ours))
            if isinstance(model, list | tuple):
                yield [ours.get(part, part) for part in model]
            else:
                yield ours.get(model, model)
        finally:
            with undivided():
                stack.close()
                for (owner, attribute, name), own in emptied:
                    setattr(owner, attribute, own.get_parameter(name).data)


def _named(model: object) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(model, nn.Module):
        yield from model.named_modules()
    elif isinstance(model, list | tuple):
        for number, part in enumerate(model):
            for path, module in part.named_modules() if isinstance(part, nn.Module) else ():
                yield f"{number}.{path}".rstrip("."), module


def _is_of_8_bits(layer: Any) -> bool:
    return type(layer).__name__ == "Linear8bitLt"


def _places(layer: Any) -> list[_Place]:
    """All places where the library keeps tensors of a layer, except codes, which all layers share."""
    places: list[_Place] = [(layer.weight, "data", "weight")]
    if _is_of_8_bits(layer):
        places += [(owner, "CB", "weight") for owner in (layer.weight, layer.state)]
        places += [(owner, "SCB", "SCB") for owner in (layer.weight, layer.state)]
        return [place for place in places if getattr(*place[:2], None) is not None]
    state = layer.weight.quant_state
    nested: list[_Place] = [(state.state2, "absmax", "nested_absmax"), (state, "offset", "offset")] if state.nested else []
    return [*places, (state, "absmax", "absmax"), *nested]


_NOT_YET = 'it is not quantized yet. Move the model once, for example model.to("cpu"): that quantizes it'


def _why_not(layer: Any, device: str) -> str:
    """Why the layer cannot be part of a model that is trained, in words; "" where it can."""
    if is_listened_to(layer):
        return "it has hooks, or a forward of its own, which would be left out. Remove them"
    if type(layer).__name__ not in _KINDS:
        return f"of its linear layers {', '.join(_KINDS)} are known. Take one of these"
    if _is_of_8_bits(layer):
        return _why_not_8_bits(layer, device)
    if layer.weight.requires_grad:
        return (
            "its packed weight requires a gradient, which the library does not compute. Freeze it "
            "(weight.requires_grad_(False)), and let an adapter learn"
        )
    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        return _NOT_YET
    if getattr(state, "packing_format_for_cpu", False):
        return (
            "it was run on this CPU in evaluation mode, for which the library packs weights again and rounds their scales: "
            "they do not train. Load it again, and run nothing before it is trained, or model.train() first"
        )
    if not hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        return "that version has no product of its own for 4 bits (gemm_4bit). Install a newer one"
    if tuple(state.shape) != (layer.out_features, layer.in_features):
        return f"its weight was packed with shape {tuple(state.shape)}: quantize it again, as (out, in)"
    if state.nested and state.state2.blocksize != _SCALES:
        return f"its scales are quantized in blocks of {state.state2.blocksize}, and the library multiplies with {_SCALES}"
    return ""


def _why_not_8_bits(layer: Any, device: str) -> str:
    if type(layer.weight).__name__ != "Int8Params" or layer.state.has_fp16_weights:
        return "its weights are trained in 16 bits. Build it with has_fp16_weights=False, freeze it, and let an adapter learn"
    if layer.weight.dtype is not torch.int8:
        return _NOT_YET
    if device != "cpu":
        return (
            f"on {device} the library picks columns by the values in them, which no plan can count. Take 4 bits "
            "(load_in_4bit), or train on the CPU"
        )
    return ""


def _refuse_norms_of_weights(model: object, layers: Mapping[Any, str]) -> None:
    """Raises ModelError for DoRA, whose forward reads the whole weight of the library's layer, which is empty by then."""
    for _, module in _named(model):
        base = module._modules.get("base_layer")
        if base in layers and len(getattr(module, "lora_magnitude_vector", ())):
            raise ModelError(
                f"{layers[base]} is quantized, and its adapter (use_dora=True) needs the norms of the whole weight in every "
                "pass. Use a LoRA without, or a base that is not quantized."
            )
