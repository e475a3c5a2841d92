"""What each block costs in bytes and operations, found without allocating any of it.

A block runs forward and backward on fake tensors: shapes and types without memory. A dispatch mode watches storages
be born and die, so every live byte between the operations is counted exactly; what a kernel takes inside one
operation is not seen, and belongs to the plan's margin.
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from seqpart.costs.fake_mode import FakeMode
from seqpart.costs.flops import flops_of
from seqpart.errors import DataError, ModelError
from seqpart.files.direct import round_up
from seqpart.memory.device import Device
from seqpart.model.blocks import Block, Chain, layout_of, run_fake, with_tensors
from seqpart.offload.layout import Layout

Loss = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCost:
    """Bytes of one block for one micro-batch; every figure is a whole number of bytes."""

    layout: Layout
    trainable: tuple[str, ...]
    gradient_layout: Layout
    """Of its gradients, where they wait at home for their norm."""
    gradients: int
    held: int
    """Of tensors in plain attributes (what old-style weight_norm computes): nobody but the module frees them."""
    buffers: int
    """Of the layout: what is not a parameter. An update keeps a copy, in case it has to be done again."""
    forward_peak: int
    """Most bytes alive while it runs forward with a graph, beyond those before it."""
    saved: int
    """Bytes alive when it has run: what autograd saved, and its output."""
    saved_alone: int
    """The same without the output, unless autograd saved that too."""
    saved_sizes: tuple[int, ...]
    """Each storage among `saved`. See [Note: the heap] in costs/partition.py."""
    backward_peak: int
    """Most bytes alive while it runs backward, beyond those before; its gradients are among them."""
    accumulate_peak: int
    """The same when its gradients exist already and a second micro-batch is added to them."""
    inference_peak: int
    """Most bytes alive while it runs forward without a graph."""
    input: int
    input_row: int
    input_shape: tuple[int, ...]
    """Without the batch dimension."""
    output: int
    output_shape: tuple[int, ...]
    """Without the batch dimension."""
    input_dtype: torch.dtype
    output_dtype: torch.dtype
    flops: int
    """Floating point operations of one forward pass."""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    """Of a real run with as many rows; 0 where there was none."""
    borrows: "tuple[BlockCost, ...]" = ()
    """Earlier blocks whose parameters it uses too: their homes come along where they are in another partition."""
    tied: int = 0
    """Bytes of those parameters."""
    writes_input: bool = False
    """Whether it works in place, as ReLU(inplace=True) does."""
    passes_input: bool = False
    """Whether its output lies in the memory of its input, as a view does."""

    @property
    def weights(self) -> int:
        return self.layout.nbytes


def written_input(blocks: Iterable[BlockCost]) -> bool:
    """Whether blocks in a row change the first one's input in place: as a partition they need a copy of it."""
    for block in blocks:
        if block.writes_input:
            return True
        if not block.passes_input:
            return False
    return False


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages alive among the results of operations; views and inputs are not counted twice. And what
    the operations compute."""

    def __init__(self, granule: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.flops = 0
        self._granule = granule
        self._known: dict[int, Any] = {}
        self.sizes: dict[int, int] = {}
        """Bytes of every counted storage that is alive."""

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are somebody else's: weights, the input."""
        for tensor in tensors:
            self._known[id(tensor.untyped_storage())] = weakref.ref(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.flops += flops_of(func.overloadpacket.__name__, args, result)
        for tensor in _tensors(result):
            self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key = id(storage)
        known = self._known.get(key)
        if known is not None and known() is storage:
            return
        size = round_up(storage.nbytes(), self._granule)
        self._known[key] = weakref.ref(storage, lambda _: self._died(key, size))
        self.live += size
        self.sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _died(self, key: int, size: int) -> None:
        self.live -= size
        self._known.pop(key, None)
        self.sizes.pop(key, None)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Restart the peak at what is alive now."""
        self.peak = self.live
        yield


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for part in result:
            yield from _tensors(part)


def measure_chain(
    chain: Chain | Sequence[Block], input_shape: tuple[int, ...], batch: int, *, granule: int = 1,
    dtype: torch.dtype = torch.float32, autocast: torch.dtype | None = None,
) -> tuple[BlockCost, ...]:  # fmt: skip
    """Costs of every block for micro-batches of `batch` rows of `input_shape` and `dtype`, each run under `autocast`.

    Raises DataError where the rows do not suit the first block, ModelError where one block's output does not suit
    the next; the message names the block and the shapes.
    """
    costs: list[BlockCost] = []
    shape = input_shape
    known: dict[tuple[object, ...], BlockCost] = {}
    for block in chain:
        key = (block.same_as, block.tied, shape, dtype)  # one factory builds the same structure every time
        if key not in known:
            known[key] = _measure_block(block, (batch, *shape), dtype, granule, autocast)
        owners = {tie.owner.number: costs[tie.owner.number] for tie in block.tied}
        costs.append(replace(known[key], borrows=tuple(owners.values())))  # a value of its own, told from others by identity
        shape, dtype = known[key].output_shape, known[key].output_dtype
    return tuple(costs)


def _measure_block(
    block: Block, shape: tuple[int, ...], dtype: torch.dtype, granule: int, autocast: torch.dtype | None
) -> BlockCost:
    mode = FakeMode()
    module, tensors = block.fake(mode)
    with block.left_as_it_is():
        return _measure_module(block, module, mode, tensors, shape, dtype, granule, autocast)


def _measure_module(
    block: Block, module: nn.Module, mode: FakeMode, tensors: dict[str, torch.Tensor], shape: tuple[int, ...],
    dtype: torch.dtype, granule: int, autocast: torch.dtype | None,
) -> BlockCost:  # fmt: skip
    module.train()
    trainable, own = tuple(name for name, tensor in tensors.items() if tensor.requires_grad), block.own(tensors)
    try:
        with mode, quiet_random(), quiet_log(), with_tensors(module, tensors):
            with _SameTypes():  # type: ignore[no-untyped-call]
                inference, flops = _watch_inference(module, tensors, shape, dtype, granule, autocast)
            training = _watch_training(module, tensors, shape, dtype, granule, autocast)
    except ModelError as error:
        raise ModelError(f"{block}: {error.with_flags}") from None
    except Exception as error:
        if Device().is_out_of_memory(error):  # planning keeps a limit too; the block may well take these rows
            raise
        reason = (str(error).splitlines() or [repr(error)])[0].rstrip(".")
        if "_local_scalar_dense" in reason:
            reason = "it reads a number out of a tensor (item(), float(), a tensor in an if), and planning has no numbers"
        kind = "" if dtype == torch.float32 else f" and type {dtype}"
        text = f"{block} cannot take rows of shape {shape[1:]}{kind}: {reason}. Change the block, or the rows."
        if block.number:
            raise ModelError(text) from error
        if not dtype.is_floating_point:
            text += " Whole numbers of 64 bits are tokens, for an embedding: give quantities as floats."
        elif any(isinstance(part, nn.Embedding) for part in module.modules()):
            text += " An embedding takes tokens: give them as whole numbers of 64 bits."
        raise DataError(text) from error
    layout = layout_of(own)
    return replace(
        training,
        layout=layout,
        gradient_layout=Layout.of(spec for spec in layout.specs if spec.name in trainable),
        trainable=tuple(name for name in trainable if name in own),
        tied=sum(_nbytes(tensors[tie.name]) for tie in block.tied),
        gradients=sum(round_up(_nbytes(tensors[name]), granule) for name in trainable),
        buffers=sum(_nbytes(tensor) for tensor in tensors.values() if not isinstance(tensor, nn.Parameter)),
        inference_peak=inference,
        flops=flops,
        held=_held(module),
    )


def _held(module: nn.Module) -> int:
    values = [value for part in module.modules() for value in vars(part).values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return sum({tensor.untyped_storage()._cdata: _nbytes(tensor) for tensor in tensors}.values())


class _SameTypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fake products take matrices of different types, which real ones refuse."""

    _PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in self._PRODUCTS and len(found := {str(tensor.dtype) for tensor in _tensors(args)}) > 1:
            raise TypeError(f"it multiplies {' and '.join(sorted(found))}, which must be of one type")
        return func(*args, **(kwargs or {}))


@contextmanager
def quiet_log() -> Iterator[None]:
    """torch logs the traceback of an operation that refuses its input; we say so in words."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def quiet_random() -> Iterator[None]:
    """Measuring must not move the run's random state."""
    with torch.random.fork_rng(devices=[]):
        yield


@contextmanager
def cast(autocast: torch.dtype | None) -> Iterator[None]:
    """As the executor runs a forward pass: the narrow copies of weights that autocast makes go when it is over, but for
    those that autograd saved. Fake tensors lie on the CPU, whatever the device will be."""
    if autocast is None:
        yield
        return
    with torch.autocast("cpu", dtype=autocast):
        yield


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _watch_training(
    module: nn.Module, tensors: dict[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype, granule: int,
    autocast: torch.dtype | None = None,
) -> BlockCost:  # fmt: skip
    peaks, saved, saved_alone = [], 0, 0
    saved_sizes: tuple[int, ...] = ()
    forward_peak = 0
    output_shape: tuple[int, ...] = ()
    output_dtype, output = dtype, 0
    writes = passes = False
    leaves = [torch.zeros(shape, dtype=dtype, requires_grad=dtype.is_floating_point) for _ in range(2)]
    # Inside a chain a block's input is no leaf: it may be written into, as ReLU(inplace=True) does.
    inputs = [leaf.clone() for leaf in leaves]
    with LiveBytes(granule) as live:
        for leaf, x in zip(leaves, inputs, strict=True):  # the second micro-batch adds to gradients that exist
            live.ignore([x, *tensors.values()])
            before, others = live.live, set(live.sizes)
            version = x._version
            with live.watch(), cast(autocast), _weights_stay(tensors):
                y = run_fake(module, tensors, x)
            writes, passes = x._version > version, y.untyped_storage()._cdata == x.untyped_storage()._cdata
            _refuse_bad_boundary(y, shape[0])
            forward_peak, saved = live.peak - before, live.live - before
            saved_sizes = tuple(size for key, size in live.sizes.items() if key not in others)
            output_shape, output_dtype, output = tuple(y.shape[1:]), y.dtype, round_up(_nbytes(y), granule)
            if not y.requires_grad:  # nothing to train, and nothing to carry a gradient through
                peaks.append(0)
                continue
            edge = get_gradient_edge(y)
            gradient = torch.empty_like(y)
            # In a chain the next block's backward has let go of this output by now.
            del y
            start = live.live
            saved_alone = start - before - output
            with live.watch():
                torch.autograd.backward(edge, grad_tensors=gradient)
                peaks.append(live.peak - start)
            del edge, gradient
            leaf.grad = None
    return BlockCost(
        layout=Layout(()), trainable=(), gradient_layout=Layout(()), gradients=0, held=0, buffers=0, forward_peak=forward_peak,
        saved=saved, saved_alone=saved_alone,
        saved_sizes=saved_sizes,
        backward_peak=peaks[0], accumulate_peak=peaks[1], inference_peak=0, input=round_up(_row_bytes(shape, dtype), granule),
        input_row=_row_bytes(shape[1:], dtype), input_shape=tuple(shape[1:]), output=output, output_shape=output_shape,
        input_dtype=dtype, output_dtype=output_dtype, flops=0, writes_input=writes, passes_input=passes,
    )  # fmt: skip


@contextmanager
def _weights_stay(tensors: dict[str, torch.Tensor]) -> Iterator[None]:
    """Raises ModelError where the body changes a parameter: such a change is lost when the partition leaves."""
    before = {name: tensor._version for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}
    yield
    for name, version in before.items():
        if tensors[name]._version > version:
            raise ModelError(
                f"its forward pass changes parameter {name} (as Embedding(max_norm=...) does), which only an optimizer may "
                "do: a pass that is done again would change it twice. Make it a buffer, or leave that out."
            )


def _refuse_bad_boundary(y: torch.Tensor, rows: int) -> None:
    if y.shape[:1] != (rows,):
        raise ModelError(f"it turned {rows} rows into shape {tuple(y.shape)}; dimension 0 must stay the batch.")
    if not y.dtype.is_floating_point:
        raise ModelError(f"it returns {y.dtype}; a boundary is floats, which carry a gradient. Join it with the next block.")


def _row_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _watch_inference(
    module: nn.Module, tensors: dict[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype, granule: int,
    autocast: torch.dtype | None = None,
) -> tuple[int, int]:  # fmt: skip
    x = torch.zeros(shape, dtype=dtype)
    with torch.no_grad(), LiveBytes(granule) as live, cast(autocast):
        live.ignore([x, *tensors.values()])
        run_fake(module, tensors, x)
        return live.peak, live.flops


def measure_loss(
    loss: Loss, output_shape: tuple[int, ...], batch: int, granule: int = 1, dtype: torch.dtype = torch.float32
) -> int:
    """Most bytes alive while `loss` judges an output (batch, *output_shape), forward and backward, beyond the output."""
    mode = FakeMode()
    with mode:
        y = torch.empty((batch, *output_shape), dtype=dtype, requires_grad=True)
    with mode, _SameTypes(), LiveBytes(granule) as live:  # type: ignore[no-untyped-call]
        live.ignore([y])
        loss(y).backward()  # type: ignore[no-untyped-call]
        return int(live.peak)
