"""Chooses where to cut a recorded program, one for training and one for evaluating, and cuts it into a chain of segments."""

import copy
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from seqpart.capture.head import built
from seqpart.capture.program import OfRows, Op, Own, Program, Ref, leaves, mapped, other_inside
from seqpart.capture.recorder import Inside
from seqpart.capture.segment import Segment, Steps
from seqpart.model.blocks import Block, Chain, checked
from seqpart.model.inspection import left_as_they_are
from seqpart.model.packs import ROWS
from seqpart.model.tensors import tensors_of
from seqpart.model.tiling import Tiled, tile_of, whole_names


@dataclass(frozen=True, slots=True)
class _Cut:
    """A program in pieces, each one module call with the functions before it, and its inputs and outputs by number."""

    program: Program
    pieces: list[tuple[Op, ...]]
    takes: list[list[int]] = field(default_factory=list)
    gives: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, program: Program, inside: Collection[int] = ()) -> "_Cut":
        """inside: module calls, by their place among the module calls, after which it is not cut. Nor is it cut after one whose
        output nobody takes, which runs for its buffers."""
        pieces = _pieces(program.ops, inside)
        while True:
            maker = {number: place for place, ops in enumerate(pieces) for op in ops for number in op.makes}
            used = [{n for op in ops for n in op.uses if maker.get(n, -1) < place} for place, ops in enumerate(pieces)]
            given = {program.output}.union(*used)
            gives = [sorted(n for op in ops for n in op.makes if n in given) for ops in pieces]
            if all(gives) or len(pieces) == 1:
                break
            idle = min(gives.index([]), len(pieces) - 2)
            pieces[idle : idle + 2] = [pieces[idle] + pieces[idle + 1]]
        for place, ops in enumerate(pieces):
            for op in ops:  # tensors that share memory in one piece may be separate in another
                if len({n for n in (*op.changed, *(old for _, old in op.rebinds)) if maker.get(n, -1) < place}) > 1:
                    why = (
                        "a tensor is changed in place that shares its memory with another, used later: change a copy (.clone())"
                    )
                    raise Inside(why, op.where)
        return cls(program, pieces, [sorted(numbers) for numbers in used], gives)

    def rows(self, place: int) -> int | None:
        """Returns the input of a piece that has the number of rows, if the piece needs that; adds the rows if none has."""
        asked = any(isinstance(leaf, OfRows) for op in self.pieces[place] for leaf in leaves((op.args, op.kwargs)))
        if self.takes[place] and not asked:
            return None
        for number in self.takes[place]:
            if number in self.program.follows:
                return number
        self.takes[place].insert(0, ROWS)
        return ROWS


def _pieces(ops: tuple[Op, ...], inside: Collection[int] = ()) -> list[tuple[Op, ...]]:
    """Divides ops into pieces; those after the last module call belong to its piece."""
    found: list[list[Op]] = [[]]
    calls, ends = 0, False
    for op in ops:
        if ends:
            found.append([])
        found[-1].append(op)
        ends = op.is_module and calls not in inside
        calls += op.is_module
    if len(found) > 1 and not ends:
        last = found.pop()
        found[-1] += last
    return [tuple(piece) for piece in found]


def _give_alike(train: _Cut, evaluate: _Cut) -> None:
    """Lets pieces that end with a call of one module give the same of what it returns: a loss may take more in training."""
    for ops, others, given, theirs in zip(train.pieces, evaluate.pieces, train.gives, evaluate.gives, strict=False):
        returned = [[leaf.number for leaf in leaves(run[-1].result) if isinstance(leaf, Ref)] for run in (ops, others)]
        if ops[-1].is_module and ops[-1].function == others[-1].function and len(returned[0]) == len(returned[1]):
            both = [pair for pair in zip(*returned, strict=True) if pair[0] in given or pair[1] in theirs]
            given[:] = sorted({*given, *(one for one, _ in both)})
            theirs[:] = sorted({*theirs, *(other for _, other in both)})


def _left_out(calls: Sequence[object], others: Sequence[object]) -> set[int] | None:
    """Returns places of `calls` that `others` lack, such as an auxiliary head that only training calls; None if `others` have
    calls of their own, or another order. Each belongs to the piece after it."""
    found, left = set[int](), list(others)
    for place, call in enumerate(calls):
        if left and left[0] == call:
            left.pop(0)
        else:
            found.add(place)
    return None if left else found


def _between(paths: Collection[object], calls: Sequence[object]) -> range:
    """Returns the places of `calls` from the first of some modules to before the last of them."""
    places = [place for place, call in enumerate(calls) if call in paths]
    return range(places[0], places[-1]) if places else range(0)


class Cutter:
    """Makes segments of `model`; they hold its own modules and tensors."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        self._owners = _owners(model)
        self._calls = set[str]()
        by_identity = {id(getattr(owner, leaf)): name for name, (owner, leaf) in self._owners.items()}
        self._held = {
            path: {by_identity[id(t)] for t in itertools.chain(module.parameters(), module.buffers())}
            for path, module in self._modules.items()
        }
        """Names of the tensors in each module."""

    def chain(self, training: Program, evaluating: Program, whole_parts: tuple[str, ...] = ()) -> Chain:
        """Returns the chain of both programs. Raises Inside if they do not pass on the same values.

        whole_parts: why modules with layers of their own stay one block each.
        """
        programs = [self._with_shared_buffers(program) for program in (training, evaluating)]
        calls = [[op.function for op in program.ops if op.is_module] for program in programs]
        only_training, together = _left_out(*calls), self._called_together(training.ops)
        inside = [{place for paths in together for place in _between(paths, called)} for called in calls]
        train, evaluate = _Cut.of(programs[0], inside[0].union(only_training or ())), _Cut.of(programs[1], inside[1])
        _give_alike(train, evaluate)
        if only_training is None or [len(given) for given in train.gives] != [len(given) for given in evaluate.gives]:
            why = "it calls other modules when it trains than when it evaluates, or passes other tensors between them"
            raise Inside.at(why, other_inside(training.ops, evaluating.ops), self._model)
        if train.gives[-1] != [train.program.output]:
            raise Inside("it does not return what it computes last")
        # A value has one number in each mode, and another one in the chain.
        numbers = {ROWS: ROWS} | {n: place for place, n in enumerate(itertools.chain(*train.gives), start=1)}
        theirs = {ROWS: ROWS} | dict(zip(itertools.chain(*evaluate.gives), itertools.chain(*train.gives), strict=True))
        spare = set(self._owners).difference(*(self._used(op) for cut in (train, evaluate) for op in cut.program.ops))
        spare -= set().union(*(self._used(op) for op in training.head.scores)) if training.head is not None else set()
        unmoved = _unmoved(self._model)
        places = {id(parameter): n for n, parameter in enumerate(self._model.parameters())}
        blocks, names = [], _unique(self._named(train, place) for place in range(len(train.pieces)))
        for place, name in enumerate(names):
            last = place == len(names) - 1
            beside = training.head.scores if last and training.head is not None else ()
            segment, taken = self._segment(train, evaluate, place, theirs, spare if last else set(), beside)
            given = tuple(numbers[n] for n in train.gives[place])
            blocks.append(Block(place, name, segment, tuple(numbers[n] for n in taken), given))
            segment.unmoved = {
                mode: tuple(own for own, part in segment.named_modules() if part in parts) for mode, parts in unmoved.items()
            }
            blocks[-1].places = {own: places[id(p)] for own, p in segment.named_parameters() if id(p) in places}
        differentiable = frozenset(numbers[n] for n in training.learns if n in numbers)
        wholes, tile = whole_names(self._model), tile_of(self._model)
        head = None if training.head is None else built(training.head, segment)
        chain = Chain(blocks, differentiable, self._aliases(blocks), wholes, tile, whole_parts=whole_parts, head=head)
        chain.reads = training.reads | evaluating.reads
        return checked(chain)

    def _segment(
        self, train: _Cut, evaluate: _Cut, place: int, theirs: Mapping[int, int], spare: set[str], beside: Sequence[Op]
    ) -> tuple[Segment, list[int]]:
        """Returns a piece as a segment, and its inputs' numbers in training. spare: names of tensors that no call needs, but
        that are written with the model. beside: further calls whose modules and tensors it has."""
        rows = train.rows(place), evaluate.rows(place)
        back = {theirs[n]: n for n in evaluate.takes[place]}
        taken = sorted({*train.takes[place], *back})
        orders = [n if n in train.takes[place] else -1 - n for n in taken], [back.get(n, -1 - n) for n in taken]
        steps = [
            Steps(cut.pieces[place], tuple(order), tuple(cut.gives[place]), None if at is None else order.index(at))
            for cut, order, at in zip((train, evaluate), orders, rows, strict=True)
        ]
        ops = [*train.pieces[place], *evaluate.pieces[place]]
        paths = dict.fromkeys(op.function for op in (*ops, *beside) if isinstance(op.function, str))
        direct = dict.fromkeys([name for op in (*ops, *beside) for name in sorted(op.owned)] + sorted(spare))
        described = type(self._modules[next(reversed(paths), "")]).__name__
        modules, tensors = {path: self._called(path) for path in paths}, {name: self._owners[name] for name in direct}
        return Segment(modules, tensors, steps[0], steps[1], described), taken

    def _called(self, path: str) -> nn.Module:
        """Returns the module at `path`; a copy with the same parameters if another segment calls it too and its buffers are
        constants, as positions and rotary embeddings are."""
        module: nn.Module = self._modules[path]
        again = path in self._calls
        self._calls.add(path)
        if not again or not any(True for _ in module.buffers()):
            return module
        return copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})

    def _called_together(self, ops: Sequence[Op]) -> set[frozenset[str]]:
        """Returns the paths of modules that share a buffer which changes or is saved, so that one block must call them all."""
        found: dict[str, set[str]] = {}
        changing = {op.function for op in ops if op.changes_own}
        for path in {op.function for op in ops if isinstance(op.function, str)}:
            for name in self._held[path]:
                owner, leaf = self._owners[name]
                if leaf in owner._buffers and (
                    path in changing or isinstance(owner, _BatchNorm) or leaf not in owner._non_persistent_buffers_set
                ):
                    found.setdefault(name, set()).add(path)
        return set(map(frozenset, found.values()))

    def _with_shared_buffers(self, program: Program) -> Program:
        """Returns the program with each buffer in one home: if several pieces use it, the first passes its value on."""
        pieces = _pieces(program.ops)
        buffers = {name for name, (owner, leaf) in self._owners.items() if leaf in owner._buffers}
        uses = [set().union(*(self._used(op) for op in ops)) & buffers for ops in pieces]
        shared = {name for one, other in itertools.combinations(uses, 2) for name in one & other}
        ops, known, shapes = list[Op](), dict[str, Ref](), dict(program.shapes)

        def value(leaf: Any) -> Any:
            return known.get(leaf.name, leaf) if isinstance(leaf, Own) else leaf

        def give(name: str, where: str) -> None:
            known[name] = Ref(1 + max(shapes))
            owner, leaf = self._owners[name]
            shapes[known[name].number] = tuple(getattr(owner, leaf).shape)
            ops.append(Op(function=torch.clone, args=(Own(name),), kwargs={}, result=known[name], where=where))

        for op in program.ops:
            changes = op.effect and not op.is_module  # it changes the buffer itself; later ops take the new value
            for name in sorted(op.owned & shared - known.keys()) if not changes else ():
                give(name, op.where)
            ops.append(op if changes else replace(op, args=mapped(op.args, value), kwargs=mapped(op.kwargs, value)))
            for name in sorted(op.owned & shared) if changes else ():
                give(name, op.where)
        return replace(program, ops=tuple(ops), shapes=shapes)

    def _used(self, op: Op) -> set[str]:
        """Returns the names of the tensors that a call uses."""
        return op.owned | (self._held[op.function] if isinstance(op.function, str) else set())

    def _named(self, cut: _Cut, place: int) -> str:
        return next((op.function for op in reversed(cut.pieces[place]) if isinstance(op.function, str)), str(place))

    def _aliases(self, blocks: list[Block]) -> dict[str, str]:
        """Returns {name in the model's state_dict: name of the same tensor in a block}, for names that no block has."""
        found: dict[int, str] = {}
        named: set[str] = set()
        for block in blocks:
            assert block.alive is not None
            for name, tensor in block.alive.state_dict(keep_vars=True).items():
                found.setdefault(id(tensor), block.exported(name))
                named.add(block.exported(name))
        every = self._model.state_dict(keep_vars=True).items()
        return {name: found[id(tensor)] for name, tensor in every if name not in named and id(tensor) in found}


def _unmoved(model: nn.Module) -> dict[bool, set[nn.Module]]:
    """Returns by mode the modules that the model's own `train` leaves in the other mode, such as frozen BatchNorms."""
    found = {}
    with left_as_they_are(model.modules()):
        for training in (True, False):
            model.train(training)
            found[training] = {part for part in model.modules() if part.training is not training}
    return found


def _owners(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Returns the module that has each parameter and buffer, and its name there, by its first name in the model."""
    found = {}
    for name in tensors_of(model):
        path, _, leaf = name.rpartition(".")
        found[name] = (model.get_submodule(path), leaf)
    return found


def _unique(names: Iterator[str]) -> list[str]:
    """Makes names unique: a module that is called twice is in two blocks."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_MANY = 800
"""Most blocks; beyond that, layers with adapters stay whole."""
_LARGE = 12
"""A layer with more than one part in so many of the model's parameters may be cut further."""


def blocks_of(model: nn.Module, whole: Collection[nn.Module] = ()) -> dict[nn.Module, str]:
    """Returns {module: path} of the blocks. A module with a list of layers is opened, as code around blocks; so is a layer that
    is frozen except for an adapter, whose own layers are then blocks: frozen weights are never written back.

    whole: modules that must not be opened.
    """
    if model in whole:
        return {model: ""}
    total = _size(model)

    def walk(module: nn.Module, path: str, *, adapted: bool) -> Iterator[tuple[nn.Module, str]]:
        for name, child in module.named_children():
            inside = f"{path}.{name}" if path else name
            is_open = _is_open(child, isinstance(module, _CONTAINERS), total) or (adapted and _is_adapted(child))
            if child not in whole and is_open:
                yield from walk(child, inside, adapted=adapted)
            else:
                yield child, inside

    found = list(walk(model, "", adapted=True))
    if len(found) > _MANY:
        found = list(walk(model, "", adapted=False))
    first: dict[nn.Module, str] = {}
    for module, path in found:
        first.setdefault(module, path)
    return first


def _is_adapted(module: nn.Module) -> bool:
    """True if some of its parameters learn but more are frozen, all of them in layers of its own."""
    learn = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    own = any(True for _ in module.parameters(recurse=False))
    return 0 < 2 * learn < _size(module) and not own and any(_size(part) for part in module.children())


def _is_open(module: nn.Module, is_layer: bool, total: int) -> bool:
    """True if a module is opened. is_layer: true if it is in a list of layers."""
    if type(module) in (*_CONTAINERS, nn.Module) or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return any(True for _ in module.children())  # an nn.Module itself, as torch.fx makes them, has no forward
    if any(isinstance(part, Tiled) for part in module.modules()):
        return True
    if is_layer and _size(module) * _LARGE <= total:
        return False
    return any(isinstance(part, _CONTAINERS) and _holds_layers(part) for part in module.modules())


def _holds_layers(container: nn.Module) -> bool:
    """True if it lists modules that consist of others, as an encoder does, and not the parts of one layer."""
    made = [part for part in container.children() if any(True for _ in part.children()) and _size(part)]
    return len(made) > isinstance(container, nn.Sequential)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
