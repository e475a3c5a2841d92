"""The model as a chain of blocks, and a block's parameters as views of memory that someone else owns.

A block is a module that is never cut. It comes from a factory, which is called only when the block is built, so that
a model larger than memory never exists whole; or it is a module given alive, whose parameters are moved home.
Between its visits to the device a block is its module with empty parameters.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy

from seqpart.device.device import Device
from seqpart.errors import ModelError
from seqpart.model.compiled import Layers
from seqpart.model.inspection import beside, left_as_they_are, modes_of, packed_in, structure_of
from seqpart.model.loss_chunks import Head
from seqpart.model.tensors import refuse_sharing, tensors_in_attributes, tensors_of
from seqpart.store.layout import stride_of
from seqpart.units import format_size

Factory = Callable[[], nn.Module]
MOST_BLOCKS = 1024


@dataclass(frozen=True, slots=True)
class Tied:
    """A tied parameter: `name` of a block is `owner_name` of the earlier block `owner`, and has its home there."""

    name: str
    owner: "Block"
    owner_name: str


class Block:
    """One block of the chain: `number` in the chain, `name` in the model's own state_dict.

    takes, gives: numbers of values (model/packs.py), for a block that was cut out of a whole model: then it returns a tuple,
    and its tensors have the model's own names. Otherwise it takes one tensor from the block before, and returns one.
    """

    def __init__(
        self, number: int, name: str, source: nn.Module | Factory,
        takes: tuple[int, ...] | None = None, gives: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        self.number, self.name, self._source = number, name, source
        self.home = f"block-{number:05d}"
        """Name in the store of its weights."""
        self.state_home, self.gradient_home = f"{self.home}.optimizer", f"{self.home}.gradients"
        """Names in the store of its optimizer state, and of its gradients while they wait for their norm."""
        self.narrow_home = f"{self.home}.narrow"
        """Name in the store of copies of its weights in 16 bits, beside optimizer steps on the host."""
        self.draws_as = number
        """The block number that seeds its random numbers."""
        self.compiles = False
        """True if its layers run compiled."""
        self._layers: tuple[nn.Module | None, Layers] = None, Layers(())
        self.is_cut_out = takes is not None
        self.takes = (number,) if takes is None else takes
        self.gives = (number + 1,) if gives is None else gives
        self._module: nn.Module | None = None
        self._buffers: list[str] = []
        self.alive = source if isinstance(source, nn.Module) else None
        """The user's own module, which is empty during a run, and gets its weights back at the end."""
        self.places: dict[str, int] = {}
        """{own name of a parameter: its position among the parameters of the whole model}."""
        self.learns = dict[str, bool]()
        """{name of a parameter: new requires_grad}, as set by the user, or by --unfreeze, since the run began."""
        # Read now: the module is empty when it is measured, and when it is measured again with fewer rows.
        self._shapes = {name: _on_meta(t) for name, t in tensors_of(self.alive).items()} if self.alive is not None else {}
        held = set(map(id, beside(self.alive))) if self.alive is not None else set()
        self.held_twice = [name for name, t in self.alive.named_buffers() if id(t) in held] if self.alive is not None else []
        """Buffers that its modules also hold in attributes or lists, which do not change when the buffers come and go."""
        self.tied: tuple[Tied, ...] = ()
        self.same_as: object = id(source)
        """A key that is equal for blocks from one factory, and for layers of a whole model that are alike."""
        if self.is_cut_out and self.alive is not None:
            self.same_as = structure_of(self.alive, self._shapes)

    def __str__(self) -> str:
        return f"block {self.number} ({self.kind})"

    @property
    def kind(self) -> str:
        if isinstance(self._source, nn.Module):
            return str(self._source.described) if self.is_cut_out else type(self._source).__name__
        source = self._source
        while isinstance(source, functools.partial):
            source = source.func
        return getattr(source, "__name__", None) or type(source).__name__

    def fake(self, mode: FakeTensorMode) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        """Returns the module, and its parameters and buffers by name as fake tensors: shapes without memory."""
        if self.alive is not None:
            return self.alive, {name: fake_like(tensor, mode) for name, tensor in self._shapes.items()}
        try:
            with mode:
                module = _called(self._source, self)
            if problems := _without_values(module, self.name):
                raise _unusable(problems)
            refuse_sharing(_named(self, module), tensors_in_attributes(module, self.name))
            return module, tensors_of(module)
        except ModelError:
            raise
        except Exception as error:
            return self._fake_from_meta(mode, error)

    def _fake_from_meta(self, mode: FakeTensorMode, why: Exception) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        """Builds on `meta` first: fake parameters cannot be converted, as a factory does with `Linear(...).double()`."""
        try:
            with torch.device("meta"):
                module = _called(self._source, self)
        except Exception:
            raise ModelError(
                f"{self} cannot be built without memory: {type(why).__name__}: {why}. "
                "Its factory must not read the values of its own tensors."
            ) from why
        if problems := _without_values(module, self.name, meta=False):
            raise _unusable(problems) from None
        return module, {name: fake_like(tensor, mode) for name, tensor in tensors_of(module).items()}

    def build(self, device: Device, seed: int) -> nn.Module:
        """Builds the real module, with random initial weights keyed by (seed, block)."""
        device.seed(seed, "build", self.number)
        module = self._source if isinstance(self._source, nn.Module) else _called(self._source, self)
        self._module, self._buffers = module, _buffers(module)
        return module

    def compiled(self, module: nn.Module) -> AbstractContextManager[None]:
        """A context in which `module`, the block's or another from its factory, runs compiled, if the block is to."""
        return self.layers_of(module) if self.compiles else nullcontext()

    def layers_of(self, module: nn.Module) -> Layers:
        """Returns what is compiled: its module, or of one that was cut out of a model, the model's modules."""
        if self._layers[0] is not module:
            self._layers = module, Layers(module.children() if self.is_cut_out else [module])
        return self._layers[1]

    def another(self) -> nn.Module:
        """Returns another module from the factory, not the one to be trained."""
        return _called(self._source, self)

    def restore_learning(self) -> None:
        """Restores requires_grad of parameters of a module given alive: a pass over the test rows turns gradients off."""
        for name, parameter in self.alive.named_parameters() if self.alive is not None else ():
            if name in self._shapes:
                parameter.requires_grad_(self.learns.get(name, self._shapes[name].requires_grad))

    def left_as_it_is(self) -> AbstractContextManager[None]:
        """A context after which a module given alive has its earlier attributes again: no cache of fake tensors, no mode."""
        return left_as_they_are(self.alive.modules() if self.alive is not None else ())

    def exported(self, name: str) -> str:
        """Name of the block's tensor `name` in the model's own state_dict."""
        return str(self._source.exported(name)) if self.is_cut_out else f"{self.name}.{name}"  # type: ignore[union-attr, operator]

    def own(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The `tensors` that have their home in this block: all but tied ones."""
        tied = {tie.name for tie in self.tied}
        return {name: tensor for name, tensor in tensors.items() if name not in tied}

    @property
    def buffers_made(self) -> list[str]:
        """Names of buffers that were registered after the module was built, by a forward pass, for example to cache a mask:
        they are no part of the weights, and stay where they are, as tensors in plain attributes do."""
        return [name for name in _buffers(self.module) if name not in self._buffers]

    @property
    def module(self) -> nn.Module:
        assert self._module is not None, f"{self} was not built"
        return self._module


class Chain(Sequence[Block]):
    """A model as a sequence of blocks.

    differentiable: values that gradients pass through; None: all floating-point ones. aliases: {name in the model's
    state_dict: the name by which a block has the same tensor}. wholes: {name of a tile: the name in the model of the tensor
    whose rows it has}, tiles of one tensor in the order of the chain. tile: most bytes of a tile; 0: there are none. begins:
    blocks that take the model's input; each after the first begins the chain of a part of the network. whole_parts: why modules
    with layers of their own stay one block each. head: the layer behind the last block, which the loss computes over chunks of
    positions; its weights belong to that block.
    """

    def __init__(
        self, blocks: Iterable[Block], differentiable: frozenset[int] | None = None, aliases: Mapping[str, str] | None = None,
        wholes: Mapping[str, str] | None = None, tile: int = 0, begins: tuple[int, ...] = (0,),
        whole_parts: tuple[str, ...] = (), head: Head | None = None,
    ) -> None:  # fmt: skip
        self.whole_parts, self.head = whole_parts, head
        self._blocks, self.differentiable, self.aliases = tuple(blocks), differentiable, aliases or {}
        self.wholes, self.tile, self.begins = wholes or {}, tile, begins
        self.ends = (*begins[1:], len(self._blocks))
        """Block numbers after those that return the network's output, one for each of `begins`."""
        self.reads = frozenset[tuple[nn.Module, str]]()
        """Modules and names of their attributes whose values are in what the blocks do."""
        self.row: Callable[[], torch.Tensor] | None = None
        """Returns a row of the data, (1, ...), which a block is run on if its shapes depend on values."""

    @property
    def notes(self) -> list[str]:
        """Remarks on the model for the user: tiles, quantized layers, parts that stay in evaluation."""
        count = Counter(whole for whole in self.wholes.values() if whole.endswith("weight"))
        layers = ", ".join(f"{whole} ({many})" for whole, many in count.items())
        tiles = [f"in tiles of at most {format_size(self.tile)}, by rows: {layers}"] if self.tile else []
        alive = [block.alive for block in self._blocks if block.alive is not None]
        return tiles + packed_in(alive) + modes_of(alive)

    @property
    def whole(self) -> "Chain":
        """The chain of the whole network, without those of its parts."""
        return self if len(self.begins) == 1 else Chain(self._blocks[: self.ends[0]], aliases=self.aliases)

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._blocks[index]


def as_chain(model: object) -> Chain:
    """Converts an nn.Sequential, a list of modules or a list of factories to a chain.

    A parameter may belong to several blocks, as the first and last weights of many language models do. Raises ModelError
    for anything else, for no blocks or more than MOST_BLOCKS, and for shared buffers.
    """
    if isinstance(model, nn.Sequential):
        # Not named_children(): it names a module once, and one ReLU used twice is two links of the chain.
        named = list(model._modules.items())
    elif isinstance(model, Sequence) and not isinstance(model, str | bytes):
        named = [(str(number), part) for number, part in enumerate(model)]
    else:
        raise ModelError(
            f"a model must be an nn.Module, a list of modules or a list of block factories; found {type(model).__name__}. "
            "Where it holds blocks and has no forward, give list(model)."
        )
    if not named:
        raise ModelError("the model has no blocks: give at least one.")
    if len(named) > MOST_BLOCKS:
        raise ModelError(
            f"the model has {len(named)} blocks, and a plan can be made for at most {MOST_BLOCKS}: each has files of its own, "
            "and all ranges of them are compared. Join some: an nn.Sequential of several blocks is one."
        )
    wrong = [f"entry {name} is a {type(part).__name__}" for name, part in named if not callable(part)]
    if wrong:
        raise ModelError("a model's entries must be modules or factories (callables that return one): " + "; ".join(wrong))
    refuse_without_values({name: part for name, part in named if isinstance(part, nn.Module)})
    return checked(Chain(Block(number, name, part) for number, (name, part) in enumerate(named)))


def checked(chain: Chain) -> Chain:
    """Finds parameters that blocks share, and returns the chain. Raises ModelError for tensors that are shared otherwise."""
    _find_tied(chain)
    alive = [(block, block.alive) for block in chain if block.alive is not None]
    once = {id(tensor): (name, tensor) for block, module in reversed(alive) for name, tensor in _named(block, module).items()}
    attributes = {name: t for block, module in alive for name, t in tensors_in_attributes(module, block.name).items()}
    refuse_sharing(dict(once.values()), attributes)
    return chain


def _find_tied(chain: Chain) -> None:
    owners: dict[int, tuple[Block, str]] = {}
    problems = []
    for block in chain:
        for name, tensor in tensors_of(block.alive).items() if block.alive is not None else ():
            owner, owner_name = owners.setdefault(id(tensor), (block, name))
            if owner is block:
                continue
            if not isinstance(tensor, nn.Parameter):
                one, other = block.exported(name), owner.exported(owner_name)
                problems.append(f"{one} is {other}" if one != other else f"{one} is of a module that is called twice")
            block.tied += (Tied(name, owner, owner_name),)
    if problems:
        raise ModelError(
            "only a parameter may be shared by blocks, and each other tensor is stored with one block: "
            + ", ".join(problems) + ". Give each block its own, or let one layer make both calls."
        )  # fmt: skip


_QUANTIZED = ("bitsandbytes", "torchao")
"""Libraries with quantized tensor classes of their own."""


def refuse_without_values(modules: Mapping[str, nn.Module]) -> None:
    """Raises ModelError for tensors of `modules` (by name) without a shape, without values, or with quantization scales."""
    for name, module in modules.items():
        for own, tensor in tensors_of(module).items():
            if type(tensor).__module__.partition(".")[0] in _QUANTIZED:
                raise ModelError(
                    f"{name}.{own} is a {type(tensor).__name__} of quantized weights, which has scales beside its numbers that "
                    "cannot be stored. Give the network unquantized, in bfloat16 where memory or disk are short."
                )
            if not is_lazy(tensor) and tensor.layout != torch.strided:
                raise ModelError(
                    f"{name}.{own} is sparse ({tensor.layout}), and weights and buffers are stored dense. Give its "
                    "to_dense(), or keep it in a plain attribute (self.x = ...), where it stays in memory."
                )
    if problems := [text for name, module in modules.items() for text in _without_values(module, name)]:
        raise _unusable(problems)


def _without_values(module: nn.Module, name: str, *, meta: bool = True) -> list[str]:
    """Describes the module's tensors that cannot be trained since they have no shape yet or, with `meta`, are on meta."""
    found = []
    for own, tensor in tensors_of(module).items():
        if is_lazy(tensor):
            found.append(f"{name}.{own} of a {type(module).__name__} has no shape before the first rows")
        elif meta and tensor.is_meta:
            found.append(f"{name}.{own} is on the meta device and has no values")
    return found


def _unusable(problems: Sequence[str]) -> ModelError:
    more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
    return ModelError(
        f"a model's tensors must have shapes and values: {'; '.join(problems[:3])}{more}. Run a lazy module once on some rows, "
        "or give it its sizes; build a module on the CPU, give a factory that does, or weights for one on meta."
    )


def _called(factory: Factory, block: Block) -> nn.Module:
    module = factory()
    if not isinstance(module, nn.Module):
        raise ModelError(f"{block}: the factory returned a {type(module).__name__}, not an nn.Module.")
    return module


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Copies type and shape of `tensor` without memory; a counter keeps its value, which a forward pass may read."""
    if _is_counter(tensor):
        return tensor.detach().cpu().clone()
    shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(shape, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shape


def _is_counter(tensor: torch.Tensor) -> bool:
    return not tensor.ndim and not tensor.is_floating_point() and not tensor.is_meta


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """Returns a fake tensor of the same shape, strides and type; a counter has its value."""
    value, stride = tensor.item() if _is_counter(tensor) else None, stride_of(tensor)
    with mode:
        if value is not None:
            return torch.tensor(value, dtype=tensor.dtype)
        shape, dtype = tensor.shape, tensor.dtype
        fake = torch.empty(shape, dtype=dtype) if stride is None else torch.empty_strided(shape, stride, dtype=dtype)
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _buffers(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_buffers(remove_duplicate=False)]


def _named(block: Block, module: nn.Module) -> dict[str, torch.Tensor]:
    return {block.exported(name): tensor for name, tensor in tensors_of(module).items()}
