"""The trained network as one plain safetensors file, streamed out of the homes block by block."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch

from seqpart.costs.blocks import BlockCost
from seqpart.files.direct import REQUEST, DirectFile, aligned, bytes_of, explained, round_up
from seqpart.files.owned import remove
from seqpart.model.blocks import Block
from seqpart.offload.layout import Layout, TensorSpec, encode_header
from seqpart.offload.store import Store
from seqpart.weights.names import named_tensors


def export_weights(path: Path, blocks: Sequence[Block], costs: Sequence[BlockCost], store: Store) -> int:
    """Write every tensor of the state_dict under the model's own names; returns the file's bytes.

    Holds one block and one request at a time. The file appears under `path` only when it is whole and on the disk.
    """
    entries = list(named_tensors(blocks, [cost.layout for cost in costs], lambda block: block.module))
    specs, offset = [], 0
    for entry in entries:
        specs.append(TensorSpec(name=entry.name, shape=entry.shape, dtype=entry.dtype, offset=offset))
        offset += entry.nbytes
    header = encode_header(specs, {"format": "pt"})
    part = path.with_name(path.name + ".part")
    flat = aligned(max(cost.layout.padded_nbytes for cost in costs))
    try:
        with DirectFile(part, write=True, mode=0o666) as file:
            out = _Stream(file)
            out.write(memoryview(header))
            loaded: Block | None = None
            for block, source in itertools.chain.from_iterable(entry.pieces for entry in entries):
                if block is not loaded:
                    store.get(block.home, flat)
                    loaded = block
                if source.stride is None:
                    out.write(bytes_of(flat)[source.offset : source.offset + source.nbytes])
                else:  # as every reader expects it: row by row
                    view = Layout((source,)).views(flat)[source.name]
                    out.write(bytes_of(view.contiguous().view(-1).view(torch.uint8)))
            out.finish()
        part.replace(path)
    except OSError as error:
        raise explained(error, path) from None
    finally:
        remove(part)
    return len(header) + offset


class _Stream:
    """Ragged pieces gathered into whole requests."""

    def __init__(self, file: DirectFile) -> None:
        self._file, self._memory = file, bytes_of(aligned(REQUEST))
        self._filled = self._written = 0

    def write(self, piece: memoryview) -> None:
        while len(piece):
            some = piece[: REQUEST - self._filled]
            self._memory[self._filled : self._filled + len(some)] = some
            self._filled += len(some)
            piece = piece[len(some) :]
            if self._filled == REQUEST:
                self._flush()

    def _flush(self) -> None:
        self._file.write_from(self._memory[: round_up(self._filled)], self._written)
        self._written += self._filled
        self._filled = 0

    def finish(self) -> None:
        if self._filled:
            self._flush()
        self._file.finish(self._written, durable=True)
