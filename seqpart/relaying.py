"""Which relay hands boundaries on within an update, and how much memory it takes."""

from collections.abc import Sequence
from pathlib import Path

import torch

from seqpart.device import Device
from seqpart.direct import PAGE, round_up
from seqpart.relay import InHost, OnDevice, OnDisk, Relay
from seqpart.simulate import PartitionCost


def open_relay(
    kind: str,
    parts: Sequence[PartitionCost],
    batch: int,
    micro_batch: int,
    host: torch.Tensor | None,
    path: Path,
    device: Device,
) -> Relay:
    """As planned: `kind` is device, host or disk. After a halved micro-batch `host` may be too small: then on disk."""
    if kind == "device" or len(parts) == 1:
        return OnDevice()
    if host is not None and relay_room(parts, batch, micro_batch) <= len(host):
        return InHost(host, relay_rooms(parts, micro_batch), device)
    return OnDisk(path, largest_relayed(parts, micro_batch), device)


def relay_rooms(parts: Sequence[PartitionCost], micro_batch: int) -> dict[int, int]:
    """Bytes of the place of what partition p is handed with one micro-batch, by p."""
    return {p: round_up(cost.input_row * micro_batch) for p, cost in enumerate(parts)}


def relay_room(parts: Sequence[PartitionCost], batch: int, micro_batch: int) -> int:
    """Bytes of all that partitions hand to each other in one update, each tensor's rounded up to pages."""
    tied = sum(round_up(cost.tied) + _TIED_PAGES * PAGE for cost in parts if cost.tied)
    return -(-batch // micro_batch) * (sum(relay_rooms(parts, micro_batch).values()) + tied)


_TIED_PAGES = 16
"""A partition's shared weights are counted together, and rounded up one by one."""


def largest_relayed(parts: Sequence[PartitionCost], micro_batch: int) -> int:
    """Bytes of the largest tensor that one partition hands to another."""
    return max(max(micro_batch * cost.input_row, cost.tied) for cost in parts)
