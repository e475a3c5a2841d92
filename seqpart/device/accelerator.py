"""What devices with memory of their own have in common, whether they are there or simulated."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from seqpart.device.device import Device


class Accelerator(Device):
    """Copies from and to pinned host memory, by streams of their own; a caching allocator, which is capped."""

    shares_memory = False
    contention = 0.0
    host_tier = "pinned"
    granule = 512
    heap_below = 0
    growth = 64 << 20
    """Kernel workspaces, and what the caching allocator loses to fragments."""

    @contextmanager
    def settled(self) -> Iterator[None]:
        """The limit caps its allocator; the processor's memory is no matter of it."""
        yield

    def own(self, host: torch.Tensor) -> torch.Tensor:
        return self.upload(host)
