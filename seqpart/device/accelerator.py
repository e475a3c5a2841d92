"""What devices with memory of their own have in common, whether they are there or simulated."""

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

    def settle(self) -> None:
        """The limit caps its allocator; the processor's memory is no matter of it."""

    def own(self, host: torch.Tensor) -> torch.Tensor:
        return self.upload(host)
