"""Runs a model once on fake tensors, and records its calls."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, unset_fake_temporarily
from torch.nn.attention import _cur_sdpa_kernel_backends
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from seqpart.capture.program import (
    OfDevice,
    Op,
    Own,
    OwnBackward,
    Ref,
    leaves,
    mapped,
    needed_for,
    opened,
    put_into,
    tensors_in,
)
from seqpart.capture.segment import Segment, Steps
from seqpart.capture.unrecorded import LARGEST, HiddenPaths, Layers, ReadNumbers, why_not
from seqpart.errors import ModelError, first_line
from seqpart.model.inspection import OF_TORCH
from seqpart.model.packs import ROWS
from seqpart.profile.fake_mode import asks_for_values, run_for_real

CONSTANTS = (
    bool, int, float, complex, str, bytes, torch.dtype, torch.layout, torch.memory_format, type, Enum, range,
    FunctionType, BuiltinFunctionType, type(None), type(Ellipsis),
)  # fmt: skip
"""Types of values that hold no tensors."""


_CALLS = nn.Module.__call__.__code__.co_filename
"""The file of torch that calls forward."""
_UNTRAINED = (
    "torch.utils.checkpoint gets nothing that requires a gradient, so with use_reentrant=True nothing in it is trained; "
    "give use_reentrant=False"
)
_ROOM = 1 << 16
"""Numbers that are kept for the tensors of a block that returns several."""


class Inside(Exception):
    """An error while recording inside an opened module, which is not a block; None: the model."""

    def __init__(self, why: str, where: str = "", module: nn.Module | None = None, path: str = "") -> None:
        super().__init__(why)
        self.module, self.path, self.where, self.why = module, path, where, why
        self.alike = False
        """True if other modules of its class will fail too."""

    @classmethod
    def at(cls, why: str, op: Op | None, model: nn.Module) -> "Inside":
        """Returns the error of the module whose forward made this call."""
        if op is None:
            return cls(why)
        found = cls(why, op.where, model.get_submodule(op.inside), op.inside)
        found.alike = bool(op.inside) and not type(found.module).__module__.startswith("torch.")
        return found


def without_padding(x: torch.Tensor, mask: torch.Tensor, zeroes: bool) -> torch.Tensor:
    """Sets padding to 0 if it is at the end of every row, as nn.TransformerEncoder does where it makes nested tensors.

    x: (rows, positions, width). mask: (rows, positions), 0 where there is no padding. zeroes: False returns x.
    """
    if not zeroes or torch.is_autocast_enabled():  # on a GPU, as torch asks too
        return x
    kept = mask == 0
    at_the_end = (kept.int().cummin(1)[0] == kept).all()
    return x.masked_fill((at_the_end & ~kept)[..., None], 0.0)


def _learns(found: Any) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(found))


class Recorder(TorchFunctionMode):
    """A context in which calls of `blocks` ({module: path}), and torch functions outside of them, are recorded as ops.

    names: name of each parameter and buffer of the model, by its id. autocast: the type of the run's autocast. largest: true
    if `torch.rand` draws its largest possible value; else it draws 0. again: tensors of an earlier run may occur. row: returns
    a row of the data, (1, ...).
    """

    def __init__(
        self, blocks: Mapping[nn.Module, str], paths: Mapping[nn.Module, str], names: Mapping[int, str],
        autocast: torch.dtype | None = None, *, training: bool = True, largest: bool = False, again: bool = False,
        row: Callable[[], torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ops: list[Op] = []
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.learns: set[int] = set()
        self.reads: set[tuple[nn.Module, str]] = set()
        self._blocks, self._paths, self._names, self._autocast = blocks, paths, names, autocast
        self._numbers: dict[int, int] = {}
        """Number of each tensor, by its id."""
        self._alive: list[torch.Tensor] = []
        """Keeps tensors alive so that no id is used again."""
        self._storages: dict[int, list[torch.Tensor]] = {}
        self._numbers_read, self._layers, self._largest = ReadNumbers(names), Layers(blocks), largest
        self._again, self._row, self._hidden = again, row, HiddenPaths(names)
        self._count, self._inside, self._attention = 0, 0, tuple(_cur_sdpa_kernel_backends())
        self._stack: list[nn.Module] = []
        self.training, self._seed = training, torch.initial_seed()
        self._zeroes = dict[nn.Module, list[bool | None]]()
        """{last layer of an nn.TransformerEncoder: for each call, the last one first, whether padding becomes 0 after it}."""

    def number(self, tensor: torch.Tensor) -> int:
        """Gives a new number to a tensor that was made, or changed."""
        number, self._count = self._count, self._count + 1
        if id(tensor) not in self._numbers:
            self._alive.append(tensor)
            self._storages.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        self._numbers[id(tensor)] = number
        self.shapes[number] = tuple(tensor.shape)
        if tensor.requires_grad:
            self.learns.add(number)
        return number

    def tensor(self, number: int) -> torch.Tensor:
        """Returns the tensor that has this number now."""
        return next(tensor for tensor in self._alive if self._numbers[id(tensor)] == number)

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.shapes[ROWS][0]

    @property
    def current(self) -> set[int]:
        """Numbers of tensors that no later call has changed."""
        return set(self._numbers.values())

    def name(self, tensor: torch.Tensor) -> int | str:
        """Returns a tensor's current number, or the name of a parameter or buffer; "" for any other."""
        return self._numbers.get(id(tensor), self._names.get(id(tensor), ""))

    def known(self, tensor: torch.Tensor) -> int:
        """Returns a tensor's current number. Raises ModelError for a tensor that the model did not make."""
        number = self._numbers.get(id(tensor))
        if number is None:
            raise ModelError("the model returns a tensor that it did not compute from its input.")
        return number

    @contextmanager
    def calls(self) -> Iterator[None]:
        """A context in which calls of modules, of autograd functions and of scripted ones go through this recorder."""
        before, apply = nn.Module.__call__, vars(torch.autograd.Function)["apply"]
        script = torch.jit.ScriptFunction.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._call(before, module, args, kwargs)

        def applied(kind: Any, *args: Any, **kwargs: Any) -> Any:
            bound = apply.__get__(None, kind)
            if kind is CheckpointFunction and (not self._inside or not _learns(args)):
                found = args[0](*args[2:])
                if _learns(found) and not _learns(args):
                    raise self.failed(RuntimeError(_UNTRAINED))
                if not self._inside:  # a layer that recomputes its own graph does so inside its block
                    return found
            if self._inside:
                return self._hidden.run(bound, args, kwargs, self._numbers)
            return self._record(OwnBackward(kind), lambda: bound(*args, **kwargs), args, kwargs)

        def scripted(function: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return script(function, *args, **kwargs)
            return self._record(function, lambda: script(function, *args, **kwargs), args, kwargs)

        def read(module: nn.Module, name: str) -> Any:
            if not self._inside and name not in OF_TORCH and name[:2] != "__":
                self.reads.add((module, name))
            return object.__getattribute__(module, name)

        applies = patch.object(torch.autograd.Function, "apply", classmethod(applied))
        scripts = patch.object(torch.jit.ScriptFunction, "__call__", scripted)
        reads = patch.object(nn.Module, "__getattribute__", read)
        with patch.object(nn.Module, "__call__", call), applies, scripts, reads:
            yield

    def _call(self, before: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._inside:
            return before(module, *args, **kwargs)
        found = self._called(before, module, args, kwargs)
        if not self._zeroes.get(module) or (zeroes := self._zeroes[module].pop()) is None:
            return found
        given = (found, kwargs["src_key_padding_mask"], zeroes)
        return self._record(without_padding, lambda: without_padding(*given), given, {})

    def _called(self, before: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if module in self._blocks:
            if why := self._layers.why_not(module):
                raise self.failed(RuntimeError(why), self._blocks[module])
            buffers = tuple(module.buffers())

            def run() -> Any:
                try:
                    with self._hidden.call(self._blocks[module], module, tensors_in((args, kwargs))):
                        return before(module, *args, **kwargs)
                except Exception as error:
                    if not asks_for_values(error):
                        raise
                    return run_for_real(module, args, kwargs, self._from_row((args, kwargs)))

            found = self._record(self._blocks[module], run, args, kwargs, buffers)
            self._layers.called(module)
            return found
        self._stack.append(module)
        if module._backward_hooks or module._backward_pre_hooks:
            raise self.failed(RuntimeError("its hooks on gradients would be left out"))
        if type(module).forward is nn.TransformerEncoder.forward:
            self._look_for_padding(module, **inspect.signature(module.forward).bind(*args, **kwargs).arguments)
        found = before(module, *args, **kwargs)  # if it fails, the stack has the module
        self._stack.pop()
        return found

    def _look_for_padding(self, encoder: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None, **_: Any) -> None:
        """Notes after which layer padding becomes 0, if it does: in evaluation, and where no gradients are wanted."""
        packs = encoder.use_nested_tensor and torch.backends.mha.get_fastpath_enabled() and src.dim() == 3
        if not packs or mask is not None or src_key_padding_mask is None:
            return
        first, last = encoder.layers[0], encoder.layers[-1]
        learns = torch.is_grad_enabled() and any(one.requires_grad for one in (src, *first.parameters()))
        zeroes = not first.training and not (self.training and learns)
        self._zeroes[last] = [zeroes] + [None] * (sum(layer is last for layer in encoder.layers) - 1)

    def _from_row(self, given: Any) -> dict[int, torch.Tensor]:
        """Returns the values, by their ids, of those tensors that functions alone compute from the model's input."""
        found = dict[int, torch.Tensor]()
        tensors = {id(leaf): leaf for leaf in leaves(opened(given)) if self._row is not None and id(leaf) in self._numbers}
        for key in tensors:
            ops, lacking = needed_for({self._numbers[key]}, self.ops)
            if self._row is not None and lacking <= {ROWS} and not any(op.is_module or op.owned for op in ops):
                steps = Steps(ops, (ROWS,), (self._numbers[key],), None)
                with unset_fake_temporarily():
                    rows = self._row().expand(self.shapes[ROWS]).clone()
                    found[key] = Segment({}, {}, steps, steps, "")(rows)[0]
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return self._hidden.run(func, args, kwargs, self._numbers)
        if why := why_not(func, args, self._names):
            raise self.failed(RuntimeError(why), func.__name__.strip("_"), self._line(sys._getframe(1)))
        if func is torch.Tensor.__iter__:
            return iter(self.__torch_function__(torch.unbind, types, args))

        def run() -> Any:
            if any(isinstance(leaf, FakeTensor) for leaf in leaves(opened((args, kwargs)))):
                return func(*args, **kwargs)
            with unset_fake_temporarily():  # positions and masks have real values, which the code may read
                found = func(*args, **kwargs)
                if func is torch.rand:
                    with torch.no_grad():
                        found.fill_(LARGEST if self._largest else 0)
                return found

        return self._record(func, run, args, kwargs)

    def _record(
        self, function: Any, run: Callable[[], Any], args: Any, kwargs: Any, buffers: tuple[torch.Tensor, ...] = ()
    ) -> Any:
        """Runs a call and records it. buffers: those of a block, which it may change, at least in training."""
        places = sys._getframe(2)
        if torch.initial_seed() != self._seed:
            raise self.failed(
                RuntimeError("it sets the seed of torch's random numbers between its layers"), "", self._line(places)
            )
        theirs, (args, kwargs) = (args, kwargs), opened((args, kwargs))  # copies: a call may write into a dict that it gets
        given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        given += buffers
        versions = [tensor._version for tensor in given]
        self._inside += 1
        try:
            found = run()
            changed = [tensor for tensor, old in zip(given, versions, strict=True) if tensor._version != old]
            name = getattr(function, "__name__", "")
            if name.startswith("_foreach_") and name.endswith("_"):  # these count no versions
                changed += leaves(args[0])
            made = tensors_in(found)
            put = put_into(opened(theirs), {*self._names, *map(id, [*given, *made])}) if isinstance(function, str) else []
            made += put
            if why := self._numbers_read.why_not(function, given, changed, made):
                raise RuntimeError(why)
            if made or changed or buffers:
                self._note(function, args, kwargs, found, changed, self._line(places), put, keeps=bool(buffers))
        except Inside:
            raise
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError | MemoryError):
                raise
            what = function if isinstance(function, str) else getattr(function, "__name__", str(function))
            raise self.failed(error, what, self._line(places)) from error
        finally:
            self._inside -= 1
        return found

    def _note(
        self, function: Any, args: Any, kwargs: Any, found: Any, changed: Sequence[torch.Tensor], where: str,
        put: Sequence[torch.Tensor], *, keeps: bool,
    ) -> None:  # fmt: skip
        taken, named = mapped(args, self._encoded), mapped(kwargs, self._encoded)
        rebound = {id(t): t for one in changed for t in self._storages.get(one.untyped_storage()._cdata, [])}
        before = {key: self._numbers[key] for key in rebound}
        numbers = tuple(self._numbers[id(tensor)] for tensor in changed if id(tensor) in self._numbers)
        found = [found, *put] if put else found
        result = mapped(opened(found), lambda leaf: Ref(self.number(leaf)) if isinstance(leaf, torch.Tensor) else None)
        returned = set(map(id, tensors_in(found)))
        if isinstance(function, str) and len(returned) > 1:  # how many may depend on the rows, and later numbers must not
            self._count = -(-self._count // _ROOM) * _ROOM
        rebinds = tuple((self.number(t), before[key]) for key, t in rebound.items() if key not in returned)
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        own_autocast = None if autocast == self._autocast else autocast or torch.float32
        attention = None if (kernels := tuple(_cur_sdpa_kernel_backends())) == self._attention else kernels
        changes_own = any(id(tensor) in self._names for tensor in changed)
        self.ops.append(
            Op(
                function=function, args=taken, kwargs=named, result=result, rebinds=rebinds, changed=numbers,
                puts=len(put), grad=torch.is_grad_enabled(),
                autocast=own_autocast, attention=attention, effect=keeps or changes_own, changes_own=changes_own,
                inside=self._paths.get(self._stack[-1], "") if self._stack else "", where=where,
            )
        )  # fmt: skip

    def _encoded(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) in self._names:
                return Own(self._names[id(leaf)])
            if id(leaf) in self._numbers:
                return Ref(self._numbers[id(leaf)])
            if self._again or (type(leaf) is torch.Tensor and not leaf.requires_grad):
                return leaf  # made before the model ran, and no buffer of it
            raise TypeError(
                "it takes a tensor that requires grad and is not found in the model, as a weight of a layer in a plain list is "
                "(nn.ModuleList holds layers)"
            )
        if isinstance(leaf, torch.device):
            return OfDevice()
        if isinstance(leaf, CONSTANTS) or (callable(leaf) and not isinstance(leaf, nn.Module)):
            return leaf
        raise TypeError(f"it takes a {type(leaf).__name__}, which may hold tensors that are not seen")

    def remembers(self, module: nn.Module, why: str) -> Inside:
        path = self._paths.get(module, "")
        return Inside(why, f"{path or 'the model'} ({type(module).__name__})", module, path)

    def refuse_changes(self, before: Mapping[nn.Module, Mapping[str, torch.Tensor | None]]) -> None:
        """Raises Inside if the model changed a layer from outside after its last call, as by emptying what it keeps, or if a
        forward outside of blocks assigned a new tensor to a buffer. before: their buffers by module."""
        for block in self._blocks:
            if why := self._layers.why_not(block):
                raise Inside(why, self._blocks[block])
        for module, buffers in before.items():
            for name, tensor in buffers.items():
                if module._buffers.get(name) is not tensor:
                    why = f"it assigns a new tensor to its buffer {name}: write into the buffer in place instead"
                    raise self.remembers(module, why)

    def failed(self, error: Exception, what: str = "", where: str = "") -> Inside:
        module = self._stack[-1] if self._stack else next(iter(self._blocks))  # the model is the one block
        why = first_line(error).rstrip(".")
        if "_local_scalar_dense" in why or "data-dependent" in type(error).__name__.lower() or "DataDependent" in repr(error):
            why = "it reads a number out of a tensor (item(), a tensor in an if)"
        elif asks_for_values(error) and not isinstance(error, DynamicOutputShapeException):
            why = "it reads a number out of a tensor (tensors in a tuple that is an index, a kernel of its own)"
        if "BatchedTensor" in why:
            why = "it computes under torch.vmap, and calls in there cannot be recorded one by one"
        if isinstance(error, DynamicOutputShapeException):
            why = "it makes a shape of the values in a tensor (nonzero, a mask as an index), and a plan is made without values"
        return Inside(f"{what}: {why}" if what else why, where, module, self._paths.get(module, ""))

    def _line(self, frame: Any) -> str:
        """Returns path and type of the running module, with file and line of its code."""
        if not self._stack:
            return "the model's inputs"
        module = self._stack[-1]
        found, mine = "", str(Path(__file__).parent)
        while frame is not None:
            name = frame.f_code.co_filename
            if not name.startswith(mine) and name != _CALLS and frame.f_locals.get("self") is module:
                found = f", {name}:{frame.f_lineno}"
                break
            frame = frame.f_back
        path = self._paths.get(module, "")
        return f"{path or 'the model'} ({type(module).__name__}{found})"
