"""Devices by the names that users give."""

import torch

from seqpart.devices.cuda import CudaDevice
from seqpart.errors import OptionError
from seqpart.memory.device import Device


def open_device(name: str) -> Device:
    """`auto` (CUDA where there is one), `cpu`, `cuda` or `cuda:1`. Raises OptionError for anything else."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return Device()
    kind, colon, index = name.partition(":")
    if name != "auto" and (kind != "cuda" or (colon and not index.isdecimal())):
        raise OptionError(f"--device: expected auto, cpu, cuda or cuda:N; found {name!r}.")
    if not torch.cuda.is_available():
        raise OptionError(f"--device {name}: no usable CUDA GPU was found. Use --device cpu.")
    number = int(index or 0)
    if number >= torch.cuda.device_count():
        raise OptionError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA GPU(s), counted from 0.")
    return CudaDevice(number)
