"""Runs every kind of block once for real, under a meter, to find what fake tensors do not show.

A kernel takes memory inside one operation (an LSTM's gates, a convolution's reordered weights, the powers of a matrix), and
some operations differ on fake tensors. Memory measured in a real run beyond what was counted is added to the block's cost.

In this process and not in a child: a child would hold the imported libraries, 300 MB, a second time, and it would count.
"""

import logging
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn.modules.conv import _ConvNd

from seqpart.device.compiler import back_propagate, without_symbols
from seqpart.device.device import Device
from seqpart.device.heap import page_faults, seconds_per_fault
from seqpart.device.limit import Grant, limit_for, refused
from seqpart.device.pages import round_up
from seqpart.device.sampler import Sampler
from seqpart.device.usage import MemoryUsage, Reservations
from seqpart.errors import DoesNotFit, ModelError, first_line
from seqpart.interrupts import put_off
from seqpart.model.blocks import Block
from seqpart.model.inspection import Kind, remembered, structure_of
from seqpart.model.loss_probe import generators_left_alone
from seqpart.model.packs import has_gradients
from seqpart.model.tensors import run_fake, with_tensors
from seqpart.profile.blocks import BlockCost
from seqpart.profile.fake_mode import FakeMode, real_module
from seqpart.store.layout import ALIGNMENT
from seqpart.units import format_seconds, format_size

_LOGGER = logging.getLogger("seqpart.planning")


@dataclass(frozen=True, kw_only=True, slots=True)
class Excess:
    """Bytes by which a block's real run exceeded what was counted for it, and the seconds that it took."""

    forward: int = 0
    saved: int = 0
    hidden: int = 0
    """Bytes of storages that autograd saved, beyond those that fake tensors show."""
    untouched: int = 0
    untouched_peak: int = 0
    """Bytes reserved but not touched, in these storages, and while the block runs."""
    backward: int = 0
    inference: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    kept_seconds: float = 0.0

    def on(self, cost: BlockCost, share: float) -> BlockCost:
        """Adds the excess to `cost`. share: rows that `cost` is for, as a fraction of the rows that were run."""
        return replace(
            cost, saved_sizes=(*cost.saved_sizes, int(self.hidden * share)) if self.hidden else cost.saved_sizes,
            forward_peak=cost.forward_peak + self.forward, saved=cost.saved + self.saved,
            saved_alone=cost.saved_alone + self.saved,
            untouched=int(self.untouched * share), untouched_peak=int(self.untouched_peak * share),
            backward_peak=cost.backward_peak + self.backward, accumulate_peak=cost.accumulate_peak + self.backward,
            inference_peak=cost.inference_peak + self.inference, forward_seconds=self.forward_seconds * share,
            backward_seconds=self.backward_seconds * share, kept_seconds=self.kept_seconds * share,
        )  # fmt: skip

    def times(self, factor: int) -> "Excess":
        return Excess(**{field.name: factor * getattr(self, field.name) for field in fields(self)})


_SHORT = 0.05
"""Runs shorter than this many seconds are timed twice."""
_NO_KERNEL = "could not create a primitive descriptor"
"""oneDNN's error for what it cannot do at all, as an LSTM of bfloat16 on a processor without instructions for that."""
_NARROW = (torch.bfloat16, torch.float16)
_KERNELS = 2 << 20
"""Bytes of kernels that oneDNN keeps for a kind of block and each number of rows in narrow floats."""
_UNMEASURED = 32 << 20
"""Least allowance in bytes for blocks not yet run: an LSTM's library took 10 MB more than was counted, and a convolution's 24;
those of wide ones as much as their weights."""
_UNTOUCHED = 3
"""Bytes that oneDNN reserves and does not touch in the backward pass of a dilated convolution, for each thread, as a multiple
of its weight's. Of as many again it touches a part."""
_FEW = 2
"""Rows of a first small trial, from which larger ones are estimated: one row would be too few for BatchNorm."""
_CPP, _STAYS = 520 << 20, 100 << 20
"""Least bytes planned for compiling a block: a C++ compiler in a process of its own (500 MB where it first reads torch's
headers, and 240 MB later; none where torch's cache on disk has the code), and for the first block what stays of torch's own
compiler."""
_LEAST_SHARE = 0.2
"""Least share of a run's seconds that counts as computing, even if nearly all seems to be page faults: both measures vary."""
CostsAt = Callable[[int], Sequence[BlockCost]]
"""Costs as they are counted on fake tensors, at a number of rows."""


class _KeptTensor(Exception):
    """A block computes with a tensor without values, which it has kept since it was recorded."""


class Trials:
    """Results of real runs so far, by kind of block and number of rows, each run once."""

    def __init__(self, chain: Sequence[Block], costs_at: CostsAt, device: Device, autocast: torch.dtype | None) -> None:
        self._chain, self._costs_at, self._device, self._autocast = chain, costs_at, device, autocast
        self._works, self._reservations = device.restart_peaks(), Reservations()
        self._found: dict[Kind, dict[int, Excess]] = {}
        self._structures: dict[object, Kind] = {}
        self.first = 0
        """The first block that is run: those before it are never trained, and may be larger than the limit."""
        self.peak = 0
        """Most bytes held during any trial, which may be too short for a sampler."""
        self.beyond = self._begun = 0
        """Most bytes held during any trial beyond those before it: a trial accumulates gradients, and training need not."""
        self.grant: Grant = lambda *, at_rest=False, untouched=0: False
        """Called after each trial: generated code that it leaves is reserved and not held."""
        self.beside = 0
        """Bytes of the limit that other processes of the run have."""
        self._versions, self._compiling, self._compiler_peak = 0, 0.0, 0
        """Blocks and numbers of rows that were compiled, the seconds, and the most bytes that the compiler held."""
        self.new_notes: list[str] = []
        """Blocks that could not be run alone, in words: their costs are counted only."""

    def refined(self, rows: int) -> tuple[BlockCost, ...]:
        """The costs of micro-batches of `rows` rows with the excess of real runs, of as many rows or the next larger number."""
        found: list[BlockCost] = []
        now: dict[int, BlockCost] = {}
        for number, cost in enumerate(self._costs_at(rows)):
            known = self._found.get(self._kind(number, cost), {}) if self._found else {}
            nearest = min((count for count in known if count >= rows), default=None)
            excess = Excess() if nearest is None else known[nearest]
            share = 1.0 if nearest is None else rows / nearest
            now[id(cost)] = excess.on(replace(cost, borrows=tuple(now[id(owner)] for owner in cost.borrows)), share)
            found.append(now[id(cost)])
        return tuple(found)

    @property
    def notes(self) -> list[str]:
        """Remarks for the user."""
        compiled = (
            f"{self._versions} kind(s) of blocks and numbers of rows were compiled in {format_seconds(self._compiling)}, for "
            f"which {format_size(self._compiler_peak)} are planned"
        )
        return [*self.new_notes, *([compiled] if self._versions else [])]

    @property
    def are_to_come(self) -> bool:
        """True if blocks can be run, and none was."""
        return self._works and not self._found

    def least_limit(self, rows: int, smallest: int) -> int:
        """The limit to suggest instead of `smallest`, at which trials have room: an allowance for blocks not yet run with so
        many rows, kernels of narrow floats for two more numbers of rows, which are kept, and the compiler."""
        costs = self._costs_at(rows)
        kinds = {self._kind(number, cost) for number, cost in enumerate(costs) if number >= self.first}
        types = {self._autocast, *(spec.dtype for cost in costs for spec in cost.layout.specs)}
        kernels = 2 * _KERNELS * len(kinds) if self._device.shares_memory and types.intersection(_NARROW) else 0
        if all(any(count >= rows for count in self._found.get(kind, {})) for kind in kinds):
            return smallest + kernels
        blocks = {block.same_as: block for block in self._chain}.values()
        copies = (_weight_of_convolution(block, dilated=one) for block in blocks for one in (False, True))
        beyond = max(_UNMEASURED, 2 * max(copies, default=0))
        stays, compiler = 0, 0
        if any(block.compiles for block in self._chain):
            stays, compiler = 0 if self._versions else _STAYS, limit_for(self._to_compile() + self.beside + _UNMEASURED)
        return max(smallest + stays + kernels + beyond, compiler)

    def _to_compile(self) -> int:
        """Bytes held while a block is compiled, as far as known before."""
        return self._device.allocated() + _CPP + (0 if self._versions else _STAYS)

    def held(self) -> int:
        """Bytes held now, after cached memory was returned to the system: of a GPU with its context, which grows with every
        kernel that is loaded."""
        self._device.release_cached()
        return self._device.allocated() if self._device.shares_memory else MemoryUsage(self._device).read()

    def run(self, rows: int, first: int, last: int, available: int) -> bool:
        """Runs the kinds among blocks first..last (last not included) that have not been run with so many rows.

        Blocks that take more than `available` bytes alone are left out: their counted cost stands. Returns True if any was run.
        """
        fresh, costs, most = False, self._costs_at(rows), available + self._device.allocated()
        for number in range(max(first, self.first), last) if self._works else ():
            known = self._found.setdefault(self._kind(number, costs[number]), {})
            if rows not in known and _alone(costs[number]) <= available:
                if self._chain[number].compiles:
                    self._compile(number, rows, most)
                self.grant(untouched=_UNTOUCHED * _weight_of_convolution(self._chain[number], dilated=True))
                known[rows], fresh = self._measured(number, rows, available), True
                self.grant()
        return fresh

    def last_rows(self, micro_batches: Collection[int], batches: Collection[int]) -> set[int]:
        """Rows left over when `batches` are cut into `micro_batches`, if trials must run them too.

        oneDNN makes kernels of bfloat16 weights for each number of rows: 5 MB a layer, for good, which the plan has to know.
        Once memory for one was refused, it makes no other in that process. Compiled code is made for each, too.
        """
        layouts = (cost.layout for cost in self._costs_at(max(micro_batches)))
        narrow = any(spec.dtype in _NARROW for layout in layouts for spec in layout.specs)
        if not self._device.shares_memory or not (narrow or any(block.compiles for block in self._chain)):
            return set()
        return {rows % size for rows in batches for size in micro_batches} - {0}

    def _kind(self, number: int, cost: BlockCost) -> Kind:
        """A key that is equal for blocks whose real runs are alike: the same modules and settings, tensors and rows."""
        block = self._chain[number]
        if block.same_as not in self._structures:
            self._structures[block.same_as] = structure_of(*block.fake(FakeMode()))
        learned = self._learned if block.compiles else ()
        takes = [(value.shape[1:], value.dtype, value.number in learned) for value in cost.takes]
        return self._structures[block.same_as], *takes

    @cached_property
    def _learned(self) -> frozenset[int]:
        """Values that a gradient passes, since something before them learns."""
        found: set[int] = set()
        for cost in self._costs_at(_FEW):
            if cost.trainable or cost.tied or any(value.number in found for value in cost.takes):
                found.update(value.number for value in cost.gives if value.learns)
        return frozenset(found)

    def _compile(self, number: int, rows: int, most: int) -> None:
        """Compiles a block for so many rows, as training and evaluation call it. Raises DoesNotFit where that takes more than
        `most` bytes together with what the process holds."""
        block, held, began, needed = self._chain[number], self._device.allocated(), time.perf_counter(), self._to_compile()
        if needed > most:
            raise self._no_room(needed, most)
        _LOGGER.info("block %d of %d is compiled, %d rows", number + 1, len(self._chain), rows)
        sampler = Sampler(MemoryUsage(self._device), limit=1 << 62)
        sampler.start()
        try:
            quiet = warnings.catch_warnings(action="ignore")  # torch's compiler looks at gradients of tensors that have none
            with put_off(), _left_alone(block, self._device), quiet:
                self._call_as_in_a_run(number, rows)
        except Exception as error:
            if self._device.is_out_of_memory(error) or "out of memory" in str(error):  # or the C++ compiler's
                raise self._no_room(needed + _CPP, most) from error
            lines = (line.strip() for line in str(error).splitlines() if "error:" in line)
            reason = next(lines, first_line(error))
            raise ModelError(f"{block} could not be compiled: {reason}. Leave --compile out.") from error
        finally:
            sampler.stop()
            self.peak = max(self.peak, sampler.peak)
        _LOGGER.info("compiling held %s, of %s at most", format_size(sampler.peak), format_size(most))
        peak = max(sampler.peak - self.beside, needed)
        self.beyond = max(self.beyond, peak - self._device.allocated())
        self._compiler_peak = max(self._compiler_peak, peak - held)
        self._versions, self._compiling = self._versions + 1, self._compiling + time.perf_counter() - began
        if peak > most:
            raise self._no_room(peak, most)

    def _no_room(self, peak: int, most: int) -> DoesNotFit:
        return refused(
            f"compiling takes {format_size(peak)} with what the process holds (torch's compiler, and a C++ compiler beside "
            f"it), and the limit leaves {format_size(most)} after its margin. Leave --compile out, or give more.",
            limit_for(peak + self.beside + _UNMEASURED),
        )

    def _call_as_in_a_run(self, number: int, rows: int) -> None:
        """Calls a block once in every way that a run does: code is made for each. Weights may learn or not in evaluation."""
        module, tensors = real_module(self._chain[number], self._device.torch)
        xs = self._rows(number, rows)
        learn = [tensor for tensor in tensors.values() if tensor.requires_grad]
        with with_tensors(module, tensors):
            module.train()
            for _ in range(2):  # the second adds to gradients that exist
                self._train(module, tensors, xs, number)
            module.eval()
            for learns in (True, False):
                for tensor in learn:
                    tensor.requires_grad_(learns)
                with torch.no_grad():
                    self._forward(module, tensors, [x.detach() for x in xs], number)

    def _measured(self, number: int, rows: int, available: int) -> Excess:
        """Runs a block, with fewer rows where memory does not suffice: a workspace does not grow faster than its rows."""
        block, fewer = self._chain[number], rows
        if rows > _FEW and _has(block.fake(FakeMode())[0], nn.LSTM):
            fewer = self._rows_within(number, rows, available)
        _LOGGER.debug("block %d of %d is run, %d rows", number + 1, len(self._chain), rows)
        while True:
            try:
                with put_off(), _left_alone(block, self._device):
                    found, changed = self._once(number, fewer)
                remembers = bool(changed) and not self._does_the_same(number, fewer)
            except _KeptTensor as error:
                raise ModelError(f"{block} {error}") from None
            except Exception as error:
                if self._device.is_out_of_memory(error) and fewer > 1:
                    fewer = -(-fewer // 2)
                    continue
                reason = first_line(error)
                if _NO_KERNEL in reason:
                    cure = f" under autocast of {self._autocast}: give --dtype fp32" if self._autocast else ""
                    raise ModelError(f"{block} cannot be run on this processor{cure}. torch says: {reason}") from error
                self.new_notes.append(f"{block} could not be run alone, so its memory is counted and not measured: {reason}")
                return Excess()
            if remembers:
                names = ", ".join(sorted(changed))
                place = f"an attribute ({names})" if names else "a closure, a global, an array or a generator"
                raise ModelError(
                    f"{block} gives other outputs for the same rows when it is called again: it keeps state in {place}, which "
                    "is in no checkpoint, and changes once more where the block is recomputed. Make it a buffer "
                    "(register_buffer) in __init__."
                )
            return found.times(-(-rows // fewer))

    def _does_the_same(self, number: int, rows: int) -> bool:
        """True if a block's outputs depend on its weights, buffers, rows and random numbers alone: the same when it is called
        again, and whatever its first rows and random numbers were. Memory that it leaves unset, for a later block to fill, is
        set, so that it is the same."""
        with _left_alone(self._chain[number], self._device):
            xs, others = self._rows(number, rows), self._rows(number, rows)
        tensors, buffers, found = dict[str, torch.Tensor](), dict[str, torch.Tensor](), list[tuple[torch.Tensor, ...]]()
        for first, seed in ((others, 1), (xs, 2)):
            with _left_alone(self._chain[number], self._device), _memory_set():
                module, own = real_module(self._chain[number], self._device.torch)
                tensors = tensors or own
                buffers = buffers or {name: t.clone() for name, t in own.items() if not isinstance(t, nn.Parameter)}
                module.train()
                for taken, draws in ((first, seed), (xs, 0), (xs, 0)):
                    for name, buffer in buffers.items():
                        tensors[name].copy_(buffer)
                    torch.manual_seed(draws)
                    with with_tensors(module, tensors), torch.no_grad():
                        found.append(self._forward(module, tensors, [x.clone() for x in taken], number))
                del found[-3]
        return all(_alike(one, found[0]) for one in found)

    def _rows_within(self, number: int, rows: int, available: int) -> int:
        """Halves `rows` until they fit, estimated from a run with a few.

        oneDNN makes no more kernels in a thread in which memory for one was refused, so that must not happen in a trial.
        """
        few = self._measured(number, _FEW, available)
        alone, least = (_alone(self._costs_at(count)[number]) for count in (rows, _FEW))
        hidden = few.saved + few.untouched + max(few.forward, few.backward)
        fewer = rows
        while fewer > _FEW and least + (alone - least) * fewer // rows + hidden * fewer // _FEW > available:
            fewer = -(-fewer // 2)
        return fewer

    def _once(self, number: int, rows: int) -> tuple[Excess, set[str]]:
        """Runs two micro-batches, the first to warm up; the second adds to gradients that exist, and is timed again if it is
        short; then one without a graph. Returns the excess, and names of attributes that changed; "" where none did, and
        outputs were others nevertheless."""
        self._begun = self._device.allocated()
        module, tensors = real_module(self._chain[number], self._device.torch)
        cost, xs = self._costs_at(rows)[number], self._rows(number, rows)
        with with_tensors(module, tensors):
            module.train()
            before = remembered(module.modules())
            _, sums = self._train(module, tensors, xs, number)
            kept = self._kept(module, tensors, xs, number) if _has(module, nn.RNNBase) else 0
            faults = page_faults()
            seen, sums_again = self._train(module, tensors, xs, number)
            faults = page_faults() - faults
            seconds = seen.forward_seconds, seen.backward_seconds
            if sum(seconds) < _SHORT:  # anything else that runs for a moment would be taken for its own time
                again, _ = self._train(module, tensors, xs, number)
                seconds = min(seconds[0], again.forward_seconds), min(seconds[1], again.backward_seconds)
            now = remembered(module.modules())
            module.eval()
            with torch.no_grad():
                held = self._restarted()
                self._forward(module, tensors, [x.detach() for x in xs], number)
                inference = self._most() - held
        kept_seconds = 0.0
        if self._device.keeps_heap:
            kept_seconds = max(_LEAST_SHARE * sum(seconds), sum(seconds) - faults * seconds_per_fault())
        # oneDNN's workspace of an LSTM is 16 times what fake tensors show of it, and two thirds of that are never touched.
        found = Excess(
            forward=max(0, seen.forward - cost.forward_peak), saved=max(0, seen.saved - cost.saved),
            hidden=max(0, kept - sum(round_up(size, ALIGNMENT) for size in cost.saved_sizes)),
            untouched=max(0, kept - max(seen.saved, cost.saved)) if _has(module, nn.LSTM) else 0,
            untouched_peak=seen.untouched_peak,
            backward=max(0, seen.backward - cost.accumulate_peak), inference=max(0, inference - cost.inference_peak),
            forward_seconds=seconds[0], backward_seconds=seconds[1], kept_seconds=kept_seconds,
        )  # fmt: skip
        changed = {name for (part, name), value in now.items() if before.get((part, name)) != value}
        return found, changed or ({""} if sums_again != sums else set())

    def _kept(self, module: nn.Module, tensors: dict[str, torch.Tensor], xs: Sequence[torch.Tensor], number: int) -> int:
        """Bytes of the storages that autograd saves, each rounded up as in an offloaded graph
        (runtime/graph_offload.py)."""
        found: dict[int, int] = {}

        def noted(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = round_up(storage.nbytes(), ALIGNMENT)
            return tensor.detach()  # itself it would hold its own graph, in a cycle

        with saved_tensors_hooks(noted, lambda tensor: tensor):
            graph = self._forward(module, tensors, xs, number)
        for tensor in (*xs, *tensors.values()):
            found.pop(tensor.untyped_storage().data_ptr(), None)
        del graph
        return sum(found.values())

    def _rows(self, number: int, rows: int) -> list[torch.Tensor]:
        compiles, takes = self._chain[number].compiles, self._costs_at(rows)[number].takes
        learn = [value.learns and (not compiles or value.number in self._learned) for value in takes]
        return [value.sample(self._device.torch, learns=one) for value, one in zip(takes, learn, strict=True)]

    def _train(
        self, module: nn.Module, tensors: dict[str, torch.Tensor], xs: Sequence[torch.Tensor], number: int
    ) -> tuple[Excess, list[str]]:
        """Runs one micro-batch from the same seed; returns all bytes that it took, measured as in profile/blocks.py, and the
        seconds; and the sums of its outputs."""
        entering = [x.clone() for x in xs]  # inside a chain a block's input is no leaf
        torch.manual_seed(0)
        self._reservations.restart()
        held, began = self._restarted(), self._now()
        ys = self._forward(module, tensors, entering, number)
        forward_seconds = self._now() - began
        forward, saved = self._most() - held, self._device.allocated() - held
        sums = [repr(y.detach().sum()) for y in ys]
        roots = [y for y in ys if y.requires_grad]
        if not roots:
            return Excess(forward=forward, saved=saved, forward_seconds=forward_seconds), sums
        edges, gradients = [get_gradient_edge(y) for y in roots], [torch.ones_like(y) for y in roots]
        del ys, roots
        held, began = self._restarted(), self._now()
        back_propagate(edges, gradients)
        backward_seconds = self._now() - began
        backward = self._most() - held
        for x in xs:
            x.grad = None
        untouched = max(0, self._reservations.most() - max(forward, saved + backward))
        self._reservations.end()
        return Excess(
            forward=forward, saved=saved, untouched_peak=untouched, backward=backward,
            forward_seconds=forward_seconds, backward_seconds=backward_seconds,
        ), sums  # fmt: skip

    def _now(self) -> float:
        self._device.wait(self._device.mark())
        return time.perf_counter()

    def _restarted(self) -> int:
        """Bytes held now, from which on `_most` counts."""
        self._device.restart_peaks()
        return self._device.allocated()

    def _most(self) -> int:
        most = self._device.allocated_peak()
        self.peak, self.beyond = max(self.peak, most), max(self.beyond, most - self._begun)
        return most

    def _forward(
        self, module: nn.Module, tensors: dict[str, torch.Tensor], xs: Sequence[torch.Tensor], number: int
    ) -> tuple[torch.Tensor, ...]:
        with without_symbols(), self._device.autocast(self._autocast), self._chain[number].compiled(module):
            found = run_fake(module, tensors, *xs)
        if any(isinstance(one, FakeTensor) for one in found):
            raise _KeptTensor(
                "computes with a tensor that it made when it was recorded, without values, and kept in a global or a closure. "
                "No checkpoint has that: make it a buffer (register_buffer) in __init__."
            )
        return found


def _alike(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """True if outputs are equal, up to the order in which a GPU adds up."""
    return all(
        torch.equal(one, other) or (has_gradients(one.dtype) and torch.allclose(one, other, 1e-4, 1e-6, equal_nan=True))
        for one, other in zip(ones, others, strict=True)
    )


@contextmanager
def _memory_set() -> Iterator[None]:
    """A context in which torch fills new memory, as it does for deterministic algorithms."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings(action="ignore"):  # of kernels that are not deterministic
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _alone(cost: BlockCost) -> int:
    """Counted bytes of a trial."""
    working = max(cost.forward_peak, cost.saved + cost.output + max(cost.backward_peak, cost.accumulate_peak))
    return 2 * cost.input + cost.weights + sum(nbytes for _, nbytes in cost.tied) + cost.gradients + working


def _weight_of_convolution(block: Block, *, dilated: bool) -> int:
    """Bytes of a block's largest weight of a convolution; of a dilated one in all threads, each of which has copies of it."""
    sizes = (
        one.out_channels * one.in_channels // one.groups * math.prod(one.kernel_size) * one.weight.itemsize
        for one in block.fake(FakeMode())[0].modules()
        if isinstance(one, _ConvNd) and (not dilated or max(one.dilation) > 1)
    )  # a live module's weights are empty
    return max(sizes, default=0) * (torch.get_num_threads() if dilated else 1)


def _has(module: nn.Module, kind: type[nn.Module]) -> bool:
    return any(isinstance(one, kind) for one in module.modules())


@contextmanager
def _left_alone(block: Block, device: Device) -> Iterator[None]:
    """A context after which random states, the user's module's attributes and its modes are as before the trial."""
    with generators_left_alone(), device.own_random_state(), block.left_as_it_is():
        yield
