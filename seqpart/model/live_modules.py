"""Modules given alive: their tensors wait in a file while a run is planned and carried out.

The file has no name, so that nothing is left of it however the process ends. It holds pieces of storages, not tensors, so
tensors that shared memory share it again afterwards, with the strides that they had.
"""

import gc
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import swap_tensors
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from seqpart.device.pages import bytes_of, round_up
from seqpart.errors import CorruptFile, ModelError, OptionError
from seqpart.interrupts import undivided
from seqpart.model.blocks import Block
from seqpart.model.in_file import is_in_file, let_pages_go
from seqpart.model.inspection import has_hooks
from seqpart.model.tensors import away, mark_away, mark_back, range_of, tensors_of
from seqpart.store.direct import REQUEST, explaining

_ALIGNED = 64
"""Alignment in bytes of a piece in its storage: a multiple of every element's size."""


@dataclass(slots=True)
class _Piece:
    """The part of one storage that modules use: bytes `first` to `last` (not included), in the file from `offset` on."""

    storage: "weakref.ref[torch.UntypedStorage]"
    """The storage, which outlives `take` if anything else holds it."""
    device: torch.device
    first: int
    last: int
    in_file: bool
    """True if it lies in a file of its own, see `parameters_in_file`, and takes no memory."""
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return self.last - self.first


@dataclass(slots=True)
class _Taken:
    """A tensor of a module, its place in its storage, and (for a buffer) every name that it has in the module."""

    tensor: torch.Tensor
    piece: _Piece
    start: int
    """Bytes of the storage before its first element."""
    has_no_values: bool
    """True if its storage is empty and its values come from files."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    given: TensorWeakRef | None = None
    """The original buffer, which others may hold too: it keeps its values, while an empty one takes its places."""

    def empty(self) -> None:
        """Replaces the tensor in the module by an empty one."""
        empty = away(self.tensor.dtype, self.piece.device)
        if not self.places:
            self.tensor.grad = None  # of an earlier backward: a plain loop begins with zero_grad
            self.tensor.data = empty
            mark_away(self.tensor, torch.Size(self.shape))
            return
        self.given, self.tensor = TensorWeakRef(self.tensor), empty
        self.put(empty)

    def back(self, value: torch.Tensor) -> None:
        """Puts `value` into the original tensor, and that into the module."""
        given = None if self.given is None else self.given()
        self.tensor = self.tensor if given is None else given
        self.tensor.data = value
        mark_back(self.tensor)
        self.put(self.tensor)

    def put(self, tensor: torch.Tensor) -> None:
        for module, leaf in self.places:
            module._buffers[leaf] = tensor

    def on(self, storage: torch.UntypedStorage, first: int) -> torch.Tensor:
        """The tensor as a view of `storage`, whose byte 0 was byte `first` of the original storage."""
        found = torch.empty(0, dtype=self.tensor.dtype, device=storage.device)
        return found.set_(storage, (self.start - first) // self.tensor.itemsize, self.shape, self.stride)


class MetaTensors:
    """Tensors on the meta device of `model`, or of its blocks that are modules: their values come from files.

    Until `give_back` they are on the CPU, with shapes and empty storages. A parameter stays the same object, with its
    attributes, since an optimizer's groups may be made by these; a buffer is replaced by another.
    """

    def __init__(self, model: object) -> None:
        self._places: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor, torch.Tensor]] = []
        """(buffers of a module, name, buffer on meta, its replacement)."""
        self._parameters: list[tuple[nn.Parameter, nn.Parameter]] = []
        """(parameter of the model, the tensor that it is swapped with), each once."""
        others: dict[int, torch.Tensor] = {}
        for module in modules_of(model):
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta and id(parameter) not in others:
                    if has_hooks(parameter):
                        raise ModelError(
                            f"the parameter {name} of a {type(module).__name__} is on the meta device and has a hook, which "
                            "would be lost when it gets its values. Build that module without parameters_on_meta, or leave the "
                            "hook out."
                        )
                    others[id(parameter)] = other = _with_empty_storage(parameter)
                    self._parameters.append((parameter, other))
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    other = others.setdefault(id(buffer), _with_empty_storage(buffer))
                    self._places.append((module._buffers, name, buffer, other))
        self.take()

    def take(self) -> None:
        for parameter, other in self._parameters:
            if parameter.is_meta:
                try:
                    swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
                except RuntimeError as error:
                    self.give_back()
                    raise ModelError(
                        f"a parameter of shape {tuple(parameter.shape)} on the meta device cannot get values: {error}. Let go "
                        "of what refers to it (weak references, graphs), or build the model without parameters_on_meta."
                    ) from None
        for tensors, name, _, stand_in in self._places:
            tensors[name] = stand_in

    def give_back(self) -> None:
        """Restores the model's tensors on the meta device."""
        for parameter, other in self._parameters:
            if not parameter.is_meta:
                parameter.grad = None
                with suppress(RuntimeError):  # a graph that still refers to it has a tensor without values, as on meta
                    swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
        for tensors, name, buffer, _ in self._places:
            tensors[name] = buffer


def modules_of(model: object) -> Iterator[nn.Module]:
    """All submodules of a module, or of the modules in a list, each once."""
    parts = (model,) if isinstance(model, nn.Module) else model if isinstance(model, list | tuple) else ()
    modules = (module for part in parts if isinstance(part, nn.Module) for module in part.modules())
    yield from {id(module): module for module in modules}.values()


@contextmanager
def replaced(model: object, others: Mapping[nn.Module, nn.Module]) -> Iterator[None]:
    """A context in which modules inside `model` are replaced by `others`."""
    places = list[tuple[dict[str, nn.Module | None], str, nn.Module]]()
    for module in [*modules_of(model)]:
        for name, child in module._modules.items():
            if child is not None and child in others:
                places.append((module._modules, name, child))
                module._modules[name] = others[child]
    try:
        yield
    finally:
        for modules, name, child in places:
            modules[name] = child


def _with_empty_storage(tensor: torch.Tensor) -> Any:
    like = _empty(tensor.shape, tensor.stride(), tensor.dtype)
    if not isinstance(tensor, nn.Parameter):
        return like
    parameter = nn.Parameter(like, tensor.requires_grad)
    parameter.__class__, parameter.__dict__ = type(tensor), vars(tensor)  # one dict: also of what is set meanwhile
    return parameter


def _empty(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Makes a tensor on the CPU with a shape and an empty storage; memory is reserved for a moment, and not touched."""
    like = torch.empty_strided(shape, stride, dtype=dtype)
    like.untyped_storage().resize_(0)
    return like


_away = WeakTensorKeyDictionary()
"""Tensors that are in the file of a run or a session. Weak keys: another tensor may get the address of one that is gone."""


def refuse_away(model: object) -> None:
    """Raises OptionError for a model that a run or a session is using: it is empty meanwhile."""
    parameters = (tensor for module in modules_of(model) for tensor in module._parameters.values() if tensor is not None)
    if any(tensor in _away for tensor in parameters):
        raise OptionError(
            "the model, or a part of it, is in a session or a run that is not over, which holds its weights until then. "
            "Evaluate by `session.evaluate`, or end the session first. Networks that take turns, as a GAN's, are one model "
            "with losses by step: Trainer(both, {'d': d_loss, 'g': g_loss}).session(example, learns={'d': 'd.*', 'g': 'g.*'})."
        )


def refuse_inference(model: object) -> None:
    """Raises ModelError for weights that were made in inference mode, which autograd does not take."""
    for module in modules_of(model):
        for name, parameter in module._parameters.items():
            if parameter is not None and not is_lazy(parameter) and parameter.is_inference():
                raise ModelError(
                    f"{name} of a {type(module).__name__} was made inside torch.inference_mode(), and cannot learn. Build or "
                    "load the model outside of it."
                )


def refuse_hooked(model: object) -> None:
    """Raises ModelError for modules with hooks of accelerate, which move their weights to the device and back."""
    hooked = [type(module).__name__ for module in modules_of(model) if "_hf_hook" in vars(module)]
    if hooked:
        raise ModelError(
            f"the model has hooks of accelerate (cpu_offload, disk_offload, a device_map), on a {hooked[0]}"
            + (f" and {len(hooked) - 1} more" if len(hooked) > 1 else "")
            + ", which move its weights. Here seqpart does: take them off with accelerate.hooks.remove_hook_from_module(model, "
            "recurse=True), and give weights=DIR for what is on the meta device then. Where the model does not fit into "
            "memory, build it with seqpart.parameters_on_meta() from its configuration, and give weights=DIR."
        )


class LiveModules:
    """The modules of `chain` that were given alive, and the file in `folder` that holds their tensors while they are empty.

    meta: the model's tensors on the meta device.
    """

    def __init__(self, chain: Sequence[Block], folder: Path, meta: MetaTensors | None = None) -> None:
        self._blocks = [block for block in chain if block.alive is not None]
        self._folder, self._file, self._meta = folder, -1, meta or MetaTensors(None)
        self._taken: dict[int, dict[str, _Taken]] = {}
        """Tensors in the file, by the number of the block and the name in it."""
        self._pieces: list[_Piece] = []
        self._emptied: list[torch.Tensor] = []
        self.empty_tensors = {block.number: set(_without_values(block)) for block in self._blocks}
        """{block number: names of tensors whose storage is empty}."""

    @property
    def empty(self) -> bool:
        """True if some of the modules' tensors have shapes alone."""
        return any(self.empty_tensors.values())

    @property
    def away(self) -> bool:
        return self._file >= 0

    def alive(self, kind: str) -> int:
        """Bytes that the modules' tensors take on that kind of device (cpu, cuda); 0 while they are in the file."""
        pieces = (piece for piece in self._found()[1] if piece.device.type == kind and not piece.in_file)
        return 0 if self.away else sum(piece.nbytes for piece in pieces)

    def nbytes(self, kind: str) -> int:
        """Bytes on that kind of device (cpu, cuda) that emptying the modules freed, and that they take again at the end."""
        return sum(round_up(piece.nbytes) for piece in self._pieces if piece.device.type == kind and piece.storage() is None)

    def take(self) -> None:
        """Writes every tensor to the file, and empties the modules. Raises StoreError; then nothing was changed."""
        if self.away or not self._blocks:
            return
        self._meta.take()
        self._taken, self._pieces = self._found()
        with explaining(self._folder), tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
            offset = 0
            for piece in (one for one in self._pieces if not one.in_file):
                piece.offset = offset
                self._write(file.fileno(), piece)
                offset += round_up(piece.nbytes)
            with undivided():
                self._file = os.dup(file.fileno())
                for tensors in self._taken.values():
                    for taken in tensors.values():
                        taken.empty()
                        self._emptied.append(taken.tensor)
                        _away[taken.tensor] = True

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """A context in which the modules are empty."""
        away = self.away
        self.take()
        try:
            yield
        finally:
            if not away:
                gc.collect()  # a real run's tensors, in cycles
                self.give_back()
                self._meta.take()

    def read(self, block: Block, views: dict[str, torch.Tensor]) -> None:
        """Copies a block's original tensors into `views` (without gaps, on the CPU). Raises StoreError."""
        for name, view in views.items():
            taken = self._taken[block.number][name]
            if taken.has_no_values:
                continue
            if (place := self.place(block, name)) is not None:
                view.copy_(place)
                let_pages_go(taken.tensor)
            elif taken.stride == view.stride():
                self._read(
                    taken.piece.offset + taken.start - taken.piece.first,
                    view.as_strided((view.numel(),), (1,)).view(torch.uint8),
                )
            else:
                view.copy_(taken.on(self._storage(taken.piece, torch.device("cpu")), taken.piece.first))

    def place(self, block: Block, name: str) -> torch.Tensor | None:
        """Returns the tensor in the file in which a parameter of the block lies from the beginning; None if there is none."""
        taken = self._taken[block.number].get(name)
        storage = taken.piece.storage() if taken is not None and taken.piece.in_file else None
        return None if taken is None or storage is None else taken.on(storage, 0)

    def keep(self, block: Block) -> None:
        """Makes `give_back` leave the block's module with the values that it has now."""
        for name, taken in self._taken.pop(block.number, {}).items():
            let_pages_go(taken.tensor)
            if taken.places and block.alive is not None and (now := tensors_of(block.alive).get(name)) is not None:
                taken.back(now)

    @undivided()
    def give_back(self) -> None:
        """Restores the modules, except for blocks given to `keep`. Raises StoreError where the file cannot be read."""
        if not self.away:
            self._meta.give_back()
            return
        try:
            back: dict[int, tuple[torch.UntypedStorage, int]] = {}
            for tensors in self._taken.values():
                for taken in tensors.values():
                    if taken.has_no_values:
                        taken.tensor.data = _empty(taken.shape, taken.stride, taken.tensor.dtype)
                        continue
                    piece, held = taken.piece, taken.piece.storage()
                    if id(piece) not in back:
                        back[id(piece)] = (self._storage(piece, piece.device), piece.first) if held is None else (held, 0)
                    taken.back(taken.on(*back[id(piece)]))
            for block in self._blocks:
                if block.number in self._taken:
                    block.restore_learning()
        finally:
            os.close(self._file)
            self._file, self._taken, self._pieces = -1, {}, []
            for tensor in self._emptied:
                if tensor in _away:  # it has several names
                    del _away[tensor]
            self._emptied.clear()
            self._meta.give_back()

    def _found(self) -> tuple[dict[int, dict[str, _Taken]], list[_Piece]]:
        pieces: dict[int, _Piece] = {}
        taken: dict[int, dict[str, _Taken]] = {}
        for block in self._blocks:
            module = block.alive
            assert module is not None
            places: dict[int, list[tuple[nn.Module, str]]] = {}
            for part in module.modules():
                for leaf, buffer in part._buffers.items():
                    places.setdefault(id(buffer), []).append((part, leaf))
            taken[block.number] = {
                name: _taken(tensor, pieces, places.get(id(tensor), []))
                for name, tensor in block.own(tensors_of(module)).items()
            }
        return taken, list(pieces.values())

    def _write(self, file: int, piece: _Piece) -> None:
        storage = piece.storage()
        assert storage is not None
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        for at in range(0, piece.nbytes, REQUEST):
            part = whole[piece.first + at : min(piece.first + at + REQUEST, piece.last)].cpu()
            done, memory = 0, bytes_of(part)
            while done < len(memory):
                done += os.pwrite(file, memory[done:], piece.offset + at + done)

    def _storage(self, piece: _Piece, device: torch.device) -> torch.UntypedStorage:
        """Reads the piece into a new storage."""
        flat = torch.empty(piece.nbytes, dtype=torch.uint8)
        self._read(piece.offset, flat)
        return flat.to(device).untyped_storage()

    def _read(self, offset: int, flat: torch.Tensor) -> None:
        done, memory = 0, bytes_of(flat)
        with explaining(self._folder):
            while done < len(memory):
                got = os.preadv(self._file, [memory[done : done + REQUEST]], offset + done)
                if not got:
                    raise CorruptFile(f"a file of this run in {self._folder} was cut off: the disk, or another program.")
                done += got


def _taken(tensor: torch.Tensor, pieces: dict[int, _Piece], places: list[tuple[nn.Module, str]]) -> _Taken:
    storage = tensor.untyped_storage()
    empty = bool(tensor.numel()) and not storage.nbytes()
    start, end = range_of(tensor)
    end = end if tensor.numel() and not empty else start
    first = start // _ALIGNED * _ALIGNED
    piece = pieces.setdefault(storage._cdata, _Piece(weakref.ref(storage), tensor.device, first, end, False))
    piece.in_file = piece.in_file or is_in_file(tensor)
    piece.first, piece.last = min(piece.first, first), max(piece.last, end)
    return _Taken(tensor, piece, start, empty, tuple(tensor.shape), tuple(tensor.stride()), places)


def _without_values(block: Block) -> list[str]:
    assert block.alive is not None
    own = block.own(tensors_of(block.alive))
    return [name for name, tensor in own.items() if tensor.numel() and not tensor.untyped_storage().nbytes()]
