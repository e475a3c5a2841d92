"""Writes the trained network as one plain safetensors file, streamed out of the homes block by block."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from seqpart.device.pages import aligned, bytes_of
from seqpart.files import remove
from seqpart.model.blocks import Block
from seqpart.model.named_optimizers import FAR_END, TO_AVERAGE
from seqpart.model.optimizers import AVERAGE
from seqpart.model.weight_files import named_tensors
from seqpart.profile.blocks import BlockCost
from seqpart.store.direct import REQUEST, DirectFile, explained
from seqpart.store.layout import TensorSpec, encode_header
from seqpart.store.store import Store
from seqpart.store.streams import Gathering


def export_weights(
    path: Path, blocks: Sequence[Block], costs: Sequence[BlockCost], store: Store, *, averages: bool = False
) -> int:
    """Writes every tensor of the state_dict under the model's own names; returns the file's bytes.

    averages: write the average of tensors that have one. Memory holds one block, with averages also its optimizer state,
    and one request at a time. The file appears under `path` only when it is complete and on the disk.
    """
    entries = list(named_tensors(blocks, [cost.layout for cost in costs], lambda block: block.module))
    specs, offset = [], 0
    for entry in entries:
        specs.append(TensorSpec(name=entry.name, shape=entry.shape, dtype=entry.dtype, offset=offset))
        offset += entry.nbytes
    header = encode_header(specs, {"format": "pt"})
    part = path.with_name(path.name + ".part")
    homes = _Homes(store, averages)
    try:
        with DirectFile(part, write=True, mode=0o666) as file:
            written = 0

            def write(memory: memoryview, nbytes: int) -> None:
                nonlocal written
                file.write_from(memory, written)
                written += nbytes

            out = Gathering(write, REQUEST)
            out.append(memoryview(header))
            for block, source in itertools.chain.from_iterable(entry.pieces for entry in entries):
                flat, lies = homes.read(block, source)
                if lies.stride is None:
                    out.append(bytes_of(flat)[lies.offset : lies.offset + lies.nbytes])
                else:  # as every reader expects it: row by row
                    out.append(bytes_of(_row_by_row(lies.view(flat))))
            out.flush()
            file.finish(written, durable=True)
        part.replace(path)
    except OSError as error:
        raise explained(error, path) from None
    finally:
        remove(part)
    return len(header) + offset


def _row_by_row(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, as every reader expects them."""
    return tensor.contiguous().view(-1).view(torch.uint8)


class _Homes:
    """Reads whole homes and caches one of weights and one of optimizer state, since a block's tensors come in any order."""

    def __init__(self, store: Store, averages: bool) -> None:
        self._store, self._averages = store, averages
        self._read: dict[bool, tuple[str, torch.Tensor]] = {}

    def read(self, block: Block, source: TensorSpec) -> tuple[torch.Tensor, TensorSpec]:
        """Returns the bytes of a home, and the place of the tensor, or of its average, in them."""
        if self._averages and block.state_home in self._store:
            state = self._store.layout(block.state_home)
            average = next((spec for spec in state.specs if spec.name == f"{source.name}.{AVERAGE}"), None)
            if average is not None:
                return self._flat(block.state_home, state=True), average
            far_end = next((spec for spec in state.specs if spec.name == f"{source.name}.{FAR_END}"), None)
            if far_end is not None:
                trained = source.view(self._flat(block.home, state=False))
                far = far_end.view(self._flat(block.state_home, state=True))
                return _row_by_row(trained.lerp(far, TO_AVERAGE)), replace(source, offset=0, stride=None)
        return self._flat(block.home, state=False), source

    def _flat(self, name: str, *, state: bool) -> torch.Tensor:
        loaded, flat = self._read.pop(state, ("", torch.empty(0, dtype=torch.uint8)))
        if loaded != name:
            needed = self._store.layout(name).padded_nbytes
            if len(flat) < needed:
                del flat  # so that there are never two
                flat = aligned(needed)
            self._store.get(name, flat)
        self._read[state] = name, flat
        return flat
