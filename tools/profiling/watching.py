"""A child process watched from outside: the kernel's or NVML's figure of its memory over time, and its disk traffic."""

import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from watch import status, tree

CPU_SOURCE = "RssAnon + RssShmem of the process tree, from outside"
_TREE_EVERY = 20
"""Samples between two looks at the process's children, which take ten times as long."""
_SECTOR = 512


@dataclass(frozen=True)
class Sample:
    at: float
    """The machine's monotonic clock, in seconds."""
    device: int
    """Bytes on the device: on the CPU the same as `ram`."""
    ram: int
    file: int


@dataclass(frozen=True)
class Watched:
    exit_code: int
    seconds: float
    samples: list[Sample]
    disk_read: int
    disk_written: int
    """Bytes that went to and from the disk on this process's account."""
    source: str
    errors: str


def watched(
    command: list[str], *, environment: Mapping[str, str], folder: Path, gpu: "Gpu | None", interval: float = 0.01
) -> Watched:
    """Run `command` to its end and look at it every `interval` seconds."""
    began = time.monotonic()
    with open(folder / "errors.txt", "w+") as errors:
        process = subprocess.Popen(command, env=dict(environment), stdout=errors, stderr=errors)
        samples: list[Sample] = []
        children = 0
        while True:
            pid, code, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            anon, file = status(process.pid)
            if len(samples) % _TREE_EVERY == 0:
                children = max(0, tree(process.pid, {process.pid: None})[0] - anon)
            ram = anon + children
            samples.append(Sample(time.monotonic(), gpu.used(process.pid) if gpu else ram, ram, file))
            time.sleep(interval)
        process.returncode = os.waitstatus_to_exitcode(code)
        errors.seek(0)
        text = errors.read()
    source = gpu.source if gpu else CPU_SOURCE
    return Watched(
        process.returncode,
        time.monotonic() - began,
        samples,
        usage.ru_inblock * _SECTOR,
        usage.ru_oublock * _SECTOR,
        source,
        text,
    )


class Gpu:
    """NVML's figure for another process; where there is none (containers, WSL), the growth of the whole device."""

    def __init__(self, index: int = 0) -> None:
        import pynvml

        pynvml.nvmlInit()
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        name = visible[index] if index < len(visible) else str(index)
        by_uuid = not name.isdecimal()
        self._nvml = pynvml
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(name) if by_uuid else pynvml.nvmlDeviceGetHandleByIndex(int(name))
        self._before, self.source = 0, ""

    def start(self) -> None:
        """The child is not there yet: what is used now is others'."""
        self._before = int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
        self.source = "NVML, growth of the whole device, from outside"

    def used(self, pid: int) -> int:
        try:
            listed = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError:  # some virtual machines do not say who computes
            listed = []
        for process in listed:
            if process.pid == pid and process.usedGpuMemory is not None:
                self.source = "NVML, that process, from outside"
                return int(process.usedGpuMemory)
        return max(0, int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used) - self._before)
