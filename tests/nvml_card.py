"""An invented GPU, for a process that loads tests/nvml_stand_in.c as NVML: what it answers may change at any time."""

import json
import os
from pathlib import Path

GB = 1 << 30
UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"
MIG_UUID = "MIG-fedcba98-7654-3210-fedc-ba9876543210"
ME = os.getpid()
NOT_AVAILABLE = (1 << 64) - 1

# nvml.h's codes
NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND, GPU_IS_LOST, UNKNOWN = 3, 4, 9, 13, 15, 999
LIST, MEMORY, MEMORY_V2 = "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"


class Allocator:
    """What torch's would say."""

    def __init__(self, reserved):
        self.reserved = reserved

    def __call__(self):
        return self.reserved


def answer(*processes, used=0, driver=0, device=UUID, fail=()):
    """From now on NVML says this: (pid, bytes) of processes, bytes used by all and by the driver, codes of entry points."""
    lines = [f"device {device}", f"memory {80 * GB} {driver} {used}"]
    lines += [f"process {pid} {held}" for pid, held in processes]
    lines += [f"fail {name} {code}" for name, code in dict(fail).items()]
    file = Path(os.environ["NVML_STAND_IN"])
    new = file.with_suffix(".new")
    new.write_text("\n".join(lines) + "\n")
    new.replace(file)  # whole, for a thread that looks meanwhile


def say(*values):
    print(json.dumps(values))
