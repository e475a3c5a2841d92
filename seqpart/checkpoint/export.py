"""The trained network as one plain safetensors file, streamed out of the homes block by block, and back into them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from seqpart.costs.blocks import BlockCost
from seqpart.errors import CorruptFile
from seqpart.files.direct import REQUEST, DirectFile, aligned, bytes_of, explained, round_up
from seqpart.files.owned import opened, remove
from seqpart.model.blocks import Block, tensors_of
from seqpart.offload.layout import Layout, TensorSpec, decode_header, encode_header, header_size
from seqpart.offload.store import Store


def export_weights(path: Path, blocks: Sequence[Block], costs: Sequence[BlockCost], store: Store) -> int:
    """Write every tensor of the state_dict under the model's own names; returns the file's bytes.

    Holds one block and one request at a time. The file appears under `path` only when it is whole and on the disk.
    """
    entries = list(_entries(blocks, costs))
    specs, offset = [], 0
    for _, name, source in entries:
        specs.append(TensorSpec(name=name, shape=source.shape, dtype=source.dtype, offset=offset))
        offset += source.nbytes
    header = encode_header(specs, {"format": "pt"})
    part = path.with_name(path.name + ".part")
    flat = aligned(max(cost.layout.padded_nbytes for cost in costs))
    try:
        with DirectFile(part, write=True, mode=0o666) as file:
            out = _Stream(file)
            out.write(memoryview(header))
            loaded: Block | None = None
            for block, _, source in entries:
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


def import_weights(path: Path, blocks: Sequence[Block], costs: Sequence[BlockCost], store: Store) -> None:
    """Write the tensors of a file of `export_weights` into the homes of blocks that come from factories, which are there.

    Holds one block and one tensor at a time. What a state_dict leaves out stays what the factory made it. Raises CorruptFile
    for a file of another model, StoreError where it cannot be read.
    """
    wanted: dict[Block, list[tuple[str, TensorSpec]]] = {}
    for block, name, source in _entries(blocks, costs):
        if not block.given_alive:
            wanted.setdefault(block, []).append((name, source))
    flat = aligned(max(cost.layout.padded_nbytes for cost in costs))
    try:
        with open(opened(path), "rb") as file:
            length = header_size(file.read(8), path)
            file.seek(0)
            layout, _ = decode_header(file.read(length), path)
            found = {spec.name: spec for spec in layout.specs}
            for block, named in wanted.items():
                store.get(block.home, flat)
                views = store.layout(block.home).views(flat)
                for name, source in named:
                    spec = found.get(name)
                    if spec is None or (spec.shape, spec.dtype) != (source.shape, source.dtype):
                        raise CorruptFile(f"{path} holds the weights of another model: {name} is not what it was.", path)
                    file.seek(length + spec.offset)
                    _fill(views[source.name], file, path)
                store.put(block.home, store.layout(block.home), flat)
    except OSError as error:
        raise explained(error, path) from None


def _fill(view: torch.Tensor, file: BinaryIO, path: Path) -> None:
    """Row by row, as `export_weights` writes it."""
    rows = view if view.is_contiguous() else torch.empty(view.shape, dtype=view.dtype)
    if rows.numel() and file.readinto(bytes_of(rows.view(-1).view(torch.uint8))) < rows.nbytes:  # type: ignore[attr-defined]
        raise CorruptFile(f"{path} is shorter than it was written.", path)
    if rows is not view:
        view.copy_(rows)


def _entries(blocks: Sequence[Block], costs: Sequence[BlockCost]) -> Iterator[tuple[Block, str, TensorSpec]]:
    """(block, exported name, where it lies in the block), widest elements first so that no tensor is misaligned.

    A state_dict leaves some buffers out and may name one parameter twice: it decides, by identity.
    """
    found = []
    for block, cost in zip(blocks, costs, strict=True):
        place = {spec.name: spec for spec in cost.layout.specs}
        source = {id(tensor): (block, place[name]) for name, tensor in block.own(tensors_of(block.module)).items()}
        for tie in block.tied:  # under both names, as a state_dict has it
            owned = next(spec for spec in costs[tie.owner.number].layout.specs if spec.name == tie.owner_name)
            source[id(tensors_of(block.module)[tie.name])] = tie.owner, owned
        for name, tensor in block.module.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor):
                owner, spec = source[id(tensor)]
                found.append((owner, block.exported(name), spec))
    known = {name: (owner, spec) for owner, name, spec in found}
    for alias, name in getattr(blocks, "aliases", {}).items():
        found.append((known[name][0], alias, known[name][1]))
    yield from sorted(found, key=lambda entry: -entry[2].dtype.itemsize)


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
