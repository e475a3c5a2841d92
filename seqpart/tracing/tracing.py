"""Any nn.Module as a chain of blocks (DESIGN: models come in as they are)."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from seqpart.costs.blocks import quiet_log, quiet_random
from seqpart.costs.fake_mode import FakeMode
from seqpart.errors import ModelError
from seqpart.model.blocks import Block, Chain, as_chain, checked, left_as_they_are, listed, with_tensors
from seqpart.model.packs import ROWS
from seqpart.tracing.choice import blocks_of
from seqpart.tracing.program import Differs, OfRows, Op, Program, generalised, leaves
from seqpart.tracing.recorder import Inside, Recorder, program_of
from seqpart.tracing.segment import Segment, Steps

_ROWS, _OTHER_ROWS = 4, 6
"""Of the batches that are run: their difference tells what follows the rows."""


def chain_of(model: object, shape: tuple[int, ...], dtype: torch.dtype) -> Chain:
    """A list of blocks or an nn.Sequential as it is (see as_chain), any other module traced. shape, dtype: of one row."""
    whole = isinstance(model, nn.Module) and not isinstance(model, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    return trace(model, shape, dtype) if whole else as_chain(model)  # type: ignore[arg-type]


def trace(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> Chain:
    """The model as a chain of blocks that train and evaluate as it does. shape, dtype: of one row of its input.

    Raises ModelError where it cannot be cut, with the module and the line that are in the way.
    """
    whole: set[nn.Module] = set()
    while True:
        try:
            blocks = blocks_of(model, whole)
            programs = [_in_mode(model, blocks, shape, dtype, training) for training in (True, False)]
            return _chain(model, *programs)
        except Inside as error:
            # It cannot be looked into: as one block it may do.
            if error.module is model or error.module in whole:
                where = error.where or error.path or type(model).__name__
                raise ModelError(
                    f"the model cannot be cut into blocks: {error.why}, in {where}. Let that be a module of its own, or give "
                    "the model as a list of blocks."
                ) from error
            whole.add(error.module)


def _in_mode(
    model: nn.Module, blocks: Mapping[nn.Module, str], shape: tuple[int, ...], dtype: torch.dtype, training: bool
) -> Program:
    one, other = (_recorded(model, blocks, (rows, *shape), dtype, training) for rows in (_ROWS, _OTHER_ROWS))
    try:
        return generalised(one, other, _ROWS, _OTHER_ROWS)
    except Differs as error:
        raise ModelError(
            f"the model does other things with {_OTHER_ROWS} rows than with {_ROWS}, in {error.op.where}: what it does must "
            "not depend on the number of rows. Let that be inside a layer, or give the model as a list of blocks."
        ) from None


def _recorded(
    model: nn.Module, blocks: Mapping[nn.Module, str], shape: tuple[int, ...], dtype: torch.dtype, training: bool
) -> Program:
    mode = FakeMode()
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with ExitStack() as stack:
        stack.enter_context(_left_as_it_is(model))
        stack.enter_context(quiet_random())
        stack.enter_context(quiet_log())
        fakes = {name: _faked(tensor, mode) for name, tensor in own.items()}
        stack.enter_context(with_tensors(model, fakes))
        stack.enter_context(listed(model, {id(tensor): fakes[name] for name, tensor in own.items()}))
        stack.enter_context(mode)
        model.train(training)
        rows = torch.zeros(shape, dtype=dtype)
        recorder = Recorder(blocks, {m: path for path, m in model.named_modules()}, {id(f): n for n, f in fakes.items()})
        assert recorder.number(rows) == ROWS
        stack.enter_context(recorder.calls())
        stack.enter_context(recorder)
        stack.enter_context(torch.enable_grad())
        try:
            found = _ran(model, rows)
        except (Inside, ModelError):
            raise
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError | MemoryError) or not recorder._stack:
                raise
            raise recorder.failed(error) from error
        return program_of(recorder, _output(model, found))


def _ran(model: nn.Module, rows: torch.Tensor) -> Any:
    """Models of transformers take their rows by name."""
    name = getattr(model, "main_input_name", None)
    return model(**{name: rows}) if isinstance(name, str) else model(rows)


def _output(model: nn.Module, found: Any) -> torch.Tensor:
    """What is to be judged, of what the model returned."""
    if isinstance(found, torch.Tensor):
        return found
    if isinstance(found, Mapping):
        for name in ("logits", "out", "last_hidden_state"):
            if isinstance(one := found.get(name), torch.Tensor):
                return one
    tensors = [leaf for leaf in leaves(found) if isinstance(leaf, torch.Tensor)]
    if len(tensors) == 1:
        return tensors[0]
    said = f"a {type(found).__name__}" + (f" with {', '.join(map(str, found))}" if isinstance(found, Mapping) else "")
    raise ModelError(
        f"{type(model).__name__} returned {said}, of {len(tensors)} tensors, and which of them is to be judged is not known. "
        "Wrap it in a module that returns one, or a dict with it as logits."
    )


@contextmanager
def _left_as_it_is(model: nn.Module) -> Iterator[None]:
    """Modes, what modules remember, and a cache of keys that a language model would fill are what they were."""
    config: Any = getattr(model, "config", None)
    cache = getattr(config, "use_cache", None)
    if cache:
        config.use_cache = False
    try:
        with left_as_they_are(model.modules()):
            yield
    finally:
        if cache:
            config.use_cache = cache


def _faked(tensor: torch.Tensor, mode: FakeMode) -> torch.Tensor:
    with mode:
        if not tensor.ndim and not tensor.is_floating_point() and not tensor.is_meta:
            return torch.tensor(tensor.item(), dtype=tensor.dtype)
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


# --- cutting ----------------------------------------------------------------------------------------------------------


def _pieces(program: Program) -> list[tuple[Op, ...]]:
    """One call of a module each, with the functions before it; what comes behind the last one belongs to it."""
    pieces: list[list[Op]] = [[]]
    for op in program.ops:
        if pieces[-1] and pieces[-1][-1].is_module:
            pieces.append([])
        pieces[-1].append(op)
    if len(pieces) > 1 and not any(op.is_module for op in pieces[-1]):
        last = pieces.pop()
        pieces[-1] += last
    return [tuple(piece) for piece in pieces]


@dataclass(frozen=True, slots=True)
class _Cut:
    """A program in pieces: what each takes and gives, in the order of making."""

    program: Program
    pieces: list[tuple[Op, ...]]
    takes: list[list[int]]
    gives: list[list[int]]

    @classmethod
    def of(cls, program: Program) -> "_Cut":
        pieces = _pieces(program)
        maker = {number: place for place, ops in enumerate(pieces) for op in ops for number in op.makes}
        takes: list[list[int]] = [[] for _ in pieces]
        given: set[int] = {program.output}
        for place, ops in enumerate(pieces):
            used = {n for op in ops for n in op.uses if maker.get(n, -1) < place}
            takes[place] = sorted(used)
            given |= used
        gives = [sorted(n for op in ops for n in op.makes if n in given) for ops in pieces]
        return cls(program, pieces, takes, gives)

    def rows(self, place: int) -> int | None:
        """Where a piece that needs it reads the number of rows off, of what it takes; the rows come along where nothing else
        tells it."""
        numbers = [leaf for op in self.pieces[place] for leaf in leaves((op.args, op.kwargs)) if isinstance(leaf, OfRows)]
        if not numbers and self.takes[place]:
            return None
        for which, number in enumerate(self.takes[place]):
            if number in self.program.follows:
                return which
        self.takes[place].insert(0, ROWS)
        return 0


def _chain(model: nn.Module, training: Program, evaluating: Program) -> Chain:
    train, evaluate = _Cut.of(training), _Cut.of(evaluating)
    calls = [[op.function for op in program.ops if op.is_module] for program in (training, evaluating)]
    if calls[0] != calls[1] or [len(g) for g in train.gives] != [len(g) for g in evaluate.gives]:
        raise ModelError(
            f"{type(model).__name__} calls other modules when it trains than when it evaluates, or hands other tensors from "
            "one to another: it cannot be cut. Let what differs be inside a layer, or give the model as a list of blocks."
        )
    # The same value has a number of its own in each mode.
    known = {ROWS: ROWS} | {n: n for gives in train.gives for n in gives}
    theirs = {ROWS: ROWS} | {
        b: a for ours, others in zip(train.gives, evaluate.gives, strict=True) for a, b in zip(ours, others, strict=True)
    }
    values = {number: place for place, number in enumerate(sorted(known))}
    segments, wiring = [], []
    modules, owners = dict(model.named_modules()), _owners(model)
    spare = set(owners) - {
        n for cut in (train, evaluate) for ops in cut.pieces for op in ops for n in _names(op, modules, owners)
    }
    for place in range(len(train.pieces)):
        rows = train.rows(place), evaluate.rows(place)
        ours, others = train.takes[place], evaluate.takes[place]
        back = {theirs[n]: n for n in others}
        taken = sorted({*ours, *back})
        steps = [
            Steps(cut.pieces[place], tuple(numbers), tuple(cut.gives[place]), _moved(at, own, numbers))
            for cut, numbers, at, own in (
                (train, [n if n in ours else -1 - n for n in taken], rows[0], ours),
                (evaluate, [back.get(n, -1 - n) for n in taken], rows[1], others),
            )
        ]
        ops = [*train.pieces[place], *evaluate.pieces[place]]
        paths = dict.fromkeys(op.function for op in ops if isinstance(op.function, str))
        direct = dict.fromkeys(name for op in ops for name in sorted(op.owned))
        if place == len(train.pieces) - 1:
            direct |= dict.fromkeys(sorted(spare))  # what no call needs is there when the model is written
        described = type(modules[next(iter(paths))]).__name__ if paths else type(model).__name__
        segments.append(Segment({p: modules[p] for p in paths}, {n: owners[n] for n in direct}, steps[0], steps[1], described))
        wiring.append(
            (next(iter(paths), f"{place}"), tuple(values[n] for n in taken), tuple(values[n] for n in train.gives[place]))
        )
    if wiring[-1][2] != (values[training.output],):
        raise ModelError(
            f"{type(model).__name__} does not return what it computes last: it cannot be cut. Give a list of blocks."
        )
    differentiable = frozenset(values[n] for n in training.learns if n in values)
    names = _unique([name for name, _, _ in wiring])
    blocks = (
        Block(number, name, segment, taken, given)
        for number, (name, segment, (_, taken, given)) in enumerate(zip(names, segments, wiring, strict=True))
    )
    return checked(Chain(blocks, differentiable))


def _moved(rows: int | None, own: list[int], numbers: list[int]) -> int | None:
    return None if rows is None else numbers.index(own[rows])


def _owners(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Of every parameter and buffer, by the first of its names: the module that has it, and its name there."""
    found = {}
    for name in (*dict(model.named_parameters()), *dict(model.named_buffers())):
        path, _, leaf = name.rpartition(".")
        found[name] = (model.get_submodule(path), leaf)
    return found


def _names(op: Op, modules: Mapping[str, nn.Module], owners: Mapping[str, Any]) -> set[str]:
    """Names of the tensors that a call uses."""
    if not isinstance(op.function, str):
        return op.owned
    ids = {id(t) for t in (*modules[op.function].parameters(), *modules[op.function].buffers())}
    tensors = {name: getattr(owner, leaf) for name, (owner, leaf) in owners.items()}
    return op.owned | {name for name, tensor in tensors.items() if id(tensor) in ids}


def _unique(names: list[str]) -> list[str]:
    """A module that is called twice is in two blocks."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found
