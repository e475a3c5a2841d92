"""Base of devices with memory of their own, real or simulated."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from seqpart.device.device import Device


class Accelerator(Device):
    """A device with its own memory: streams for copies from and to pinned host memory, and a capped caching allocator."""

    shares_memory = False
    contention = 0.0
    host_tier = "pinned"
    granule = 512
    heap_below = 0
    growth = 64 << 20
    """Bytes allowed for kernel workspaces and the caching allocator's fragmentation."""

    @contextmanager
    def settled(self) -> Iterator[None]:
        """A context without effect: the limit caps the device's allocator, not the processor's memory."""
        yield

    def own(self, host: torch.Tensor) -> torch.Tensor:
        return self.upload(host)
