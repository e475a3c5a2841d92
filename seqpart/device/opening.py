"""Opens devices by the names that users give."""

import os

import torch

from seqpart.device.card import load
from seqpart.device.cuda import CudaDevice
from seqpart.device.device import Device
from seqpart.device.ranks import started_by_torchrun
from seqpart.errors import OptionError

_DEFAULT_CARD = "rtx3060-12gb"
_CUDA_TOO = "PyTorch calls an AMD GPU cuda. Use --device cuda"
_REFUSED = {
    "mps": "the memory of Apple's GPUs is the system's own, shared with the processor and all programs. torch.mps caps its "
    "allocator only; what the driver holds beside it for this process is in no figure, so no limit could be kept",
    "xpu": "torch.xpu has streams, events, pinned memory and a cap of its allocator, but nothing that says what a process "
    "holds on an Intel GPU with the driver's context, as NVML does: a limit could not be proven",
    "hip": _CUDA_TOO,
    "rocm": _CUDA_TOO,
}
"""{name of an accelerator of PyTorch: why it is refused}."""


def open_device(name: str) -> Device:
    """Opens `auto` (CUDA if there is one), `cpu`, `cuda`, `cuda:1`, `sim` or `sim:CARD`. Raises OptionError for anything else.

    CARD: a card of seqpart/device/cards, or a file of that form; `@7` after it is the seed of how late copies happen.
    """
    kind, colon, rest = name.partition(":")
    if kind == "sim" and (rest or not colon):
        card, _, seed = rest.partition("@")
        if seed and not seed.isdecimal():
            raise OptionError(f"--device {name}: expected a whole number after @, the seed of the simulation; found {seed!r}.")
        from seqpart.device.simulated import SimulatedDevice  # with PyTorch's counter of operations, which loads Triton

        return SimulatedDevice(load(card or _DEFAULT_CARD), int(seed or 0))
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return Device()
    if kind in _REFUSED:
        raise OptionError(f"--device {name} is refused: {_REFUSED[kind]}.")
    if name != "auto" and (kind != "cuda" or (colon and not rest.isdecimal())):
        raise OptionError(f"--device: expected auto, cpu, cuda or cuda:N, sim or sim:CARD; found {name!r}.")
    if not torch.cuda.is_available():
        raise OptionError(f"--device {name}: no usable CUDA GPU was found. Use --device cpu.")
    number = int(rest or (os.environ.get("LOCAL_RANK", "0") if started_by_torchrun() else 0))
    if number >= torch.cuda.device_count():
        raise OptionError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA GPU(s), counted from 0.")
    return CudaDevice(number)
