"""Finds what an optimizer keeps for parameters of given shapes and types, and checks that it goes on from that alone.

An optimizer may keep other state for a vector than for a matrix, or for a large parameter than for a small one, without saying
so. So it makes steps on fake tensors of just these shapes, which take no memory; and on a few real numbers of each kind ways
are compared: one lasting optimizer of all parameters, as in a plain loop, and one of each parameter alone, made anew for every
step with what was kept of it, as partitions that come and go have it. Tensors that begin as zeros are tried first, then all
that the optimizer makes in its own first step, with plain data beside it; last the same for all parameters together.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seqpart.device.compiler import take_step, without_compiler
from seqpart.errors import OptionError
from seqpart.interrupts import put_off
from seqpart.model.loss_probe import all_generators
from seqpart.model.named_optimizers import IN_WORDS
from seqpart.model.optimizer_state import TEXT, AtHome, Classes, Knowledge, NoHomeError, parts_of, room_for, specs_in, text_spec
from seqpart.store.layout import TensorSpec, spec_of

Build = Callable[..., torch.optim.Optimizer]
"""A function from parameters, or from pairs (name, parameter), to their optimizer."""
BuildNamed = Callable[[Sequence[nn.Parameter], Sequence[str]], torch.optim.Optimizer]
"""A function from parameters and their names to their optimizer."""
State = tuple[TensorSpec, ...]
"""State of one parameter: tensors by name, and the text of plain data if there are any."""
Step = tuple[Sequence[nn.Parameter], Sequence[tuple[str, bool, Mapping[str, torch.Tensor]]]]
"""(parameters, (text, true if something beside the state has changed, tensors) of each) after a step."""
Counts = list[tuple[dict[str, Any], dict[str, int]]]
"""Dicts of an optimizer, each with its whole numbers."""

_OTHERS = f"Use {IN_WORDS}."
_ANEW = "when it is built anew for each visit of a partition, with all the state that it kept"
_FEW, _MANY = 1 << 14, 1 << 18
"""Numbers of a parameter in real steps: at most _FEW, or _MANY if it has other state with so few."""
_STEPS, _SKIPPED, _LATE = 12, 990, 3
"""Steps in which ways are compared. For the last `_LATE`, counters outside the state are raised by `_SKIPPED`, so that what is
done at every 10th or 100th step is done too."""
_SPIKE = 1024.0
"""Scale of the gradients of some parameters, in the last two steps, beside which the others' vanish: a step that is left out
for the sake of a single one is seen."""


class Temporaries(NamedTuple):
    """Memory that a step takes beyond the state, as multiples of parameters' memory."""

    largest: int = 0
    second: int = 0
    """Of another parameter, whose temporaries live until they are replaced by the next one's."""
    total: int = 0
    """Of all parameters, where they are updated in one list (foreach)."""


@dataclass
class Found:
    """Results of the trials of an optimizer."""

    states: dict[TensorSpec, State] = field(default_factory=dict)
    """{kind of parameter: its state}."""
    classes: Classes = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    """{name of a parameter: its group}, for a function that knows names."""
    counts: bool = False
    """True if it counts, or keeps anything else, in its groups or itself, and not with each parameter."""
    joint: bool = False
    """True if a step depends on all parameters together."""
    temporaries: dict[bool, Temporaries] = field(default_factory=dict)
    """By whether torch's optimizers take lists of parameters by default, as on a GPU."""


class _Way(Enum):
    LIVING = auto()
    """An optimizer that stays."""
    ZEROS = auto()
    """One that is made anew for each step, with tensors that began as zeros."""
    TEXTS = auto()
    """One that is made anew for each step, with what it has made itself, and the text of plain data."""


def kind_of(spec: TensorSpec, group: str = "") -> TensorSpec:
    """Returns all that a parameter's state depends on: shape, type, strides, and its group where that depends on its name."""
    return replace(spec, name=group, offset=0)


def groups_of(build: BuildNamed, parameters: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Returns {name: its group's number} of parameters of these names; "" for one that is in no group."""
    with without_compiler(), _without_numbers():
        made = [nn.Parameter(_zeros(spec)) for spec in parameters.values()]
        groups = build(made, list(parameters)).param_groups
    places = {id(one): str(number) for number, group in enumerate(groups) for one in group["params"]}
    return {name: places.get(id(one), "") for name, one in zip(parameters, made, strict=True)}


def explore(name: str, build: BuildNamed, wanted: Mapping[TensorSpec, str], found: Found, *, is_known: bool) -> None:
    """Adds to `found` the state of each kind of parameter. wanted: {kind: name of a parameter of that kind}. is_known: true if
    it keeps nothing beside a state that begins at zero.

    Raises OptionError for one that refuses a kind of parameter, and for one that knows what can have no home.
    """
    with without_compiler(), torch.random.fork_rng(devices=[]):
        try:
            _explore(_Trial(name, build, found.classes, dict(wanted)), wanted, found, is_known=is_known)
        except OptionError:
            other = _Trial(name, build, found.classes, dict(wanted), answer=True)
            with suppress(OptionError):  # the first refusal says more
                return _explore(other, wanted, found, is_known=is_known)
            raise


def _explore(trial: "_Trial", wanted: Mapping[TensorSpec, str], found: Found, *, is_known: bool) -> None:
    laid = trial.laid_out(wanted, 1 if is_known else _STEPS)
    if is_known or not wanted:
        found.states.update({kind: state[:-1] for kind, state in laid.items()})
        return
    way, joint, counts = trial.way(trial.for_real(wanted, laid))
    found.states.update({kind: state if way is _Way.TEXTS else state[:-1] for kind, state in laid.items()})
    found.joint, found.counts = found.joint or joint, found.counts or counts


def temporaries(build: Build, *, in_lists: bool = False) -> Temporaries:
    """Returns the memory that a step after the first, which makes the state, takes beyond it. in_lists: True where torch's
    optimizers take lists of parameters by default, as on a GPU."""
    one, two, three = (_taken(build, count, in_lists=in_lists) for count in (1, 2, 3))
    return Temporaries(total=-(-three // 3)) if three > two else Temporaries(largest=one, second=two - one)


def _taken(build: Build, count: int, *, in_lists: bool) -> int:
    """Returns what a step of `count` equal parameters takes beyond their state, as a multiple of one's memory, rounded up."""
    spec = TensorSpec(name="", shape=(64, 64), dtype=torch.float32)
    parameters = [nn.Parameter(_numbers(spec, torch.Generator())) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = parameter.detach() ** 2
    optimizer = build(parameters)
    for group in optimizer.param_groups:
        if in_lists and not group.get("fused") and group.get("foreach", False) is None:
            group["foreach"] = True
    take_step(optimizer)
    most = 0
    for _ in range(_STEPS):
        made = _Made(spec.nbytes // spec.dtype.itemsize)
        with made:
            take_step(optimizer)
        most = max(most, made.most)
    return -(-most // spec.nbytes)


def looks_at_whole(build: Build) -> bool:
    """True if steps on a matrix differ from steps on pieces of its rows, each a parameter: then they depend on more than each
    number alone. Pieces have multiples of 16 numbers, which kernels treat alike wherever they lie."""
    numbers = torch.Generator().manual_seed(0)
    whole = nn.Parameter(_numbers(TensorSpec(name="", shape=(128, 96), dtype=torch.float32), numbers))
    pieces = [nn.Parameter(piece.clone()) for piece in torch.split(whole.detach(), 32)]
    optimizers = [build([parameter]) for parameter in (whole, *pieces)]
    for _ in range(_LATE):
        whole.grad = _numbers(spec_of("", whole), numbers)
        for piece, gradient in zip(pieces, torch.split(whole.grad, 32), strict=True):
            piece.grad = gradient.clone()
        for optimizer in optimizers:
            take_step(optimizer)
    return not _same([whole], [torch.cat([piece.detach() for piece in pieces])])


# --- state ------------------------------------------------------------------------------------------------------------


class _Halves(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode for steps on fake tensors, which have no values: a step that reads a number gets 1/2 (no division by zero), 1 or
    `answer`. Kernels without a fake version that return nothing are skipped."""

    def __init__(self, answer: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answer = answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return self._answer if dtype is torch.bool else 0.5 if dtype.is_floating_point else 1
        try:
            return func(*args, **(kwargs or {}))
        except UnsupportedOperatorException:
            if func._schema.returns:
                raise
        return None


@contextmanager
def _without_numbers(answer: bool = False) -> Iterator[None]:
    # No fallback kernels: torch would run those that it knows no shapes of on real tensors, which may be as large as the model.
    with put_off(), FakeTensorMode(allow_fallback_kernels=False), _Halves(answer):
        yield


@dataclass(frozen=True)
class _Trial:
    name: str
    build: BuildNamed
    classes: Classes
    names: dict[TensorSpec, str]
    """{kind: name of a parameter of that kind}."""
    answer: bool = False
    """What a step on fake tensors gets where it asks for a truth: Prodigy keeps a copy of parameters that are not all zeros."""

    def laid_out(self, wanted: Iterable[TensorSpec], steps: int) -> dict[TensorSpec, State]:
        """Finds the state of each kind by steps. The text is the last."""
        try:
            with _without_numbers(self.answer):
                states = self._after(steps, list(wanted))
        except Exception:  # find out which one failed
            states = [self._alone(steps, kind) for kind in wanted]
        return dict(zip(wanted, states, strict=True))

    def _in_words(self, kind: TensorSpec) -> str:
        return f"{self.names[kind]} of shape {kind.shape} ({kind.dtype})"

    def _alone(self, steps: int, kind: TensorSpec) -> State:
        """State of a parameter of that kind, with real numbers if fake tensors fail and it is small."""
        error: Exception
        try:
            with _without_numbers(self.answer):
                return self._after(steps, [kind])[0]
        except Exception as failed:
            error = failed
        if prod(kind.shape) <= _MANY:
            try:
                return self._after(steps, [kind])[0]
            except Exception as failed:
                error = failed
        if isinstance(error, NoHomeError):
            raise OptionError(
                f"optimizer {self.name}: its state {error}, so it has no fixed layout and cannot be offloaded. It is of "
                f"{self._in_words(kind)}. {_OTHERS}"
            ) from None
        raise OptionError(
            f"optimizer {self.name}: a trial step on {self._in_words(kind)} failed: {failure(error)}. Use an "
            "optimizer that takes it, or freeze it: requires_grad_(False)."
        ) from error

    def _after(self, steps: int, kinds: Sequence[TensorSpec]) -> list[State]:
        """State of one parameter of each kind, all zeros, which appears in steps on gradients of zeros."""
        parameters = [nn.Parameter(_zeros(kind)) for kind in kinds]
        optimizer, begun, knowledge = self._begun(parameters, kinds)
        found: list[dict[str, TensorSpec]] = [{} for _ in kinds]
        rooms = [0 for _ in kinds]
        for step in range(steps):
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            if step and step == steps - _LATE:
                _skip(optimizer, begun)
            take_step(optimizer)
            for number, parameter in enumerate(parameters):
                specs, text = specs_in(knowledge, parameter)
                for path, spec in specs.items():
                    if found[number].setdefault(path, spec) != spec:
                        was = found[number][path].shape
                        raise NoHomeError(f"{path!r} is of shape {spec.shape} after {step + 1} steps, and was {was}")
                rooms[number] = max(rooms[number], room_for(text))
        return [(*specs.values(), text_spec(room)) for specs, room in zip(found, rooms, strict=True)]

    def for_real(self, wanted: Iterable[TensorSpec], found: Mapping[TensorSpec, State]) -> dict[TensorSpec, State]:
        """Returns {kind: state} for kinds that are small enough for real numbers, with state like the large ones."""
        small = {kind: _smaller(kind) for kind in wanted}
        self.names.update({small[kind]: self.names[kind] for kind in wanted})
        states = {**found, **self.laid_out(dict.fromkeys(kind for kind in small.values() if kind not in found), _STEPS)}
        for kind in wanted:
            if _likened(kind, found[kind]) == _likened(small[kind], states[small[kind]]):
                continue
            if prod(kind.shape) > _MANY:
                raise OptionError(
                    f"optimizer {self.name}: it keeps other state for {self._in_words(kind)} than for a smaller one, and that "
                    f"is too large to be tried. {_OTHERS}"
                )
            small[kind] = kind
        return {kind: states[kind] for kind in small.values()}

    def way(self, states: Mapping[TensorSpec, State]) -> tuple[_Way, bool, bool]:
        """Returns (the first way with the steps of one lasting optimizer, true if it needs all parameters together, true if the
        optimizer keeps something beside the states)."""
        kinds = [*states, next(iter(states))]  # two at least: to see whether each is updated as if it were alone
        before, changed = all_generators(), False
        for _, found in self._steps(kinds, states, _Way.LIVING, together=True):
            changed = changed or any(more for _, more, _ in found)
        if all_generators() != before:
            raise OptionError(
                f"optimizer {self.name}: its steps draw random numbers, from generators that a plain loop's model and data "
                "draw from too: what comes next depends on all that was drawn before. Use one that draws none."
            )
        reasons = []
        ways = [(_Way.ZEROS, False), (_Way.TEXTS, False), (_Way.TEXTS, True)]
        for way, together in ways[changed:]:  # with zeros alone a change outside the state would not show
            try:
                step = _first_difference(
                    self._steps(kinds, states, _Way.LIVING, together=True), self._steps(kinds, states, way, together=together)
                )
                if step is None:
                    return way, together, changed
                reasons.append(f"its step {step} has another result {_ANEW}")
            except NoHomeError as error:
                reasons.append(str(error))
            except Exception as error:
                reasons.append(f"a trial step failed {_ANEW}: {type(error).__name__}: {error}")
        raise OptionError(f"optimizer {self.name}: {reasons[-1]}, so it cannot be offloaded. {_OTHERS}")

    def _steps(
        self, kinds: Sequence[TensorSpec], states: Mapping[TensorSpec, State], way: _Way, *, together: bool
    ) -> Iterator[Step]:
        """Parameters and their state after each step: of one optimizer for all (`together`), or of one for each."""
        numbers = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(_numbers(kind, numbers)) for kind in kinds]
        slopes = [_numbers(kind, numbers) for kind in kinds]  # gradients that have something in common, as a loss gives them
        homes = [{spec.name: _zeros(spec) for spec in states[kind]} for kind in kinds]
        for home in homes if way is _Way.ZEROS else ():
            del home[TEXT]
        sets = [[*range(len(kinds))]] if together else [[number] for number in range(len(kinds))]
        among = [[kinds[number] for number in each] for each in sets]
        living = [self._begun([parameters[number] for number in each], own) for each, own in zip(sets, among, strict=True)]
        living = living if way is _Way.LIVING else []
        for step in range(_STEPS):
            for number, (kind, parameter) in enumerate(zip(kinds, parameters, strict=True)):
                spike = 1.0 if step < _STEPS - 2 else _SPIKE if (number == 0) is (step < _STEPS - 1) else 1 / _SPIKE
                parameter.grad = (slopes[number] + _numbers(kind, numbers)) * ((0.5 + number % 3) * spike)
            found: list[tuple[str, bool, Mapping[str, torch.Tensor]]] = [("", False, {}) for _ in kinds]
            for place, each in enumerate(sets):
                own = [parameters[number] for number in each]
                optimizer, begun, knowledge = living[place] if living else self._begun(own, among[place])
                at_home = None if living else AtHome(optimizer, self.classes, learns=True)
                if at_home is not None:
                    for number in each:
                        at_home.take(parameters[number], f"p{number}", homes[number])
                    at_home.restore()
                if step == _STEPS - _LATE and way is not _Way.ZEROS:
                    _skip(optimizer, begun)
                take_step(optimizer)
                if at_home is not None:
                    at_home.settle()
                    at_home.write()
                for number in each:
                    found[number] = _seen(knowledge, parameters[number])
            yield parameters, found

    def _begun(
        self, parameters: Sequence[nn.Parameter], kinds: Sequence[TensorSpec]
    ) -> tuple[torch.optim.Optimizer, Counts, Knowledge]:
        optimizer = self.build(parameters, [self.names[kind] for kind in kinds])
        return optimizer, _counts(optimizer), Knowledge(optimizer, self.classes, learns=True)


def _seen(knowledge: Knowledge, parameter: nn.Parameter) -> tuple[str, bool, dict[str, torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = {}

    def keep(path: str, tensor: torch.Tensor) -> list[str]:
        tensors[path] = tensor
        return ["t", path]

    found = knowledge.of(parameter, knowledge.common(), keep)
    # Optimizers that know nothing of it do not count: a function may leave out those that have no parameters.
    text = repr([(sorted(state or "d", key=repr), *rest) for state, *rest in found if len(state or "d") > 1 or any(rest)])
    return text, any(any(rest) for _, *rest in found), tensors


def _likened(kind: TensorSpec, state: State) -> list[tuple[object, ...]]:
    return [(one.name, one.dtype, one.shape == kind.shape, len(one.shape)) for one in state if one.name != TEXT]


def failure(error: Exception) -> str:
    """Says what failed in a trial step."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, TypeError) and "'NoneType' object is not callable" in text:
        text += ". It may want a closure: a step is made of one gradient, and nothing calls the model again"
    if isinstance(error, AttributeError) and isinstance(error.obj, nn.Parameter):
        text += (
            f". The parameters of a trial have no attributes of yours: getattr(parameter, {error.name!r}, ...) with a default "
            "is taken, or a function of named_parameters"
        )
    return text


def follows_sizes(states: Mapping[TensorSpec, State]) -> bool:
    """True if states have only scalars and tensors of the parameter's shape, and parameters of the same type and number of
    dimensions have the same state, whatever their sizes."""
    if any(one.shape not in ((), kind.shape) for kind, state in states.items() for one in state if one.name != TEXT):
        return False
    found = {(kind.dtype, len(kind.shape)): _likened(kind, state) for kind, state in states.items()}
    return all(found[kind.dtype, len(kind.shape)] == _likened(kind, state) for kind, state in states.items())


def _smaller(kind: TensorSpec) -> TensorSpec:
    shape = list(kind.shape)
    while prod(shape) > _FEW:
        longest = shape.index(max(shape))
        shape[longest] = -(-shape[longest] // 2)
    stride = None
    if kind.stride is not None and shape:
        stride, step = [0] * len(shape), 1
        for axis in sorted(range(len(shape)), key=lambda axis: (kind.stride or ())[axis]):
            stride[axis], step = step, step * shape[axis]
    return replace(kind, shape=tuple(shape), stride=None if stride is None else tuple(stride))


def _counts(optimizer: torch.optim.Optimizer) -> Counts:
    """Counters outside the state: dicts of the optimizer with their whole numbers."""
    places = [place for part in parts_of(optimizer) for place in (*part.param_groups, vars(part))]
    return [(place, {key: value for key, value in place.items() if type(value) is int}) for place in places]


def _skip(optimizer: torch.optim.Optimizer, before: Counts) -> None:
    for (place, now), (_, then) in zip(_counts(optimizer), before, strict=True):
        place.update({key: value + _SKIPPED for key, value in now.items() if value != then.get(key)})


def _first_difference(ones: Iterator[Step], others: Iterator[Step]) -> int | None:
    """The first step, from 1 on, after which parameters or their states differ; None if none does."""
    for step, ((mine, state), (theirs, kept)) in enumerate(zip(ones, others, strict=True), 1):
        if not _same(mine, theirs) or any(
            words != others or one.keys() != other.keys() or not _same(list(one.values()), [other[key] for key in one])
            for (words, _, one), (others, _, other) in zip(state, kept, strict=True)
        ):
            return step
    return None


def _same(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """True if all tensors are equal. NaN equals NaN: a learning rate that is far too high is not checked here."""
    pairs = zip(ones, others, strict=True)
    return all(torch.equal(one.detach().nan_to_num(), other.detach().nan_to_num()) for one, other in pairs)


def _zeros(spec: TensorSpec) -> torch.Tensor:
    return spec.empty().zero_()


def _numbers(kind: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    """Draws numbers of both signs, no two alike, so that effects of sign, order or another parameter show."""
    drawn = torch.empty(kind.shape, dtype=torch.float32, device="cpu").normal_(generator=generator)
    return _zeros(kind).copy_(drawn)


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that notes in `most` the most bytes of new tensors, of at least `numbers` numbers, that are there at once."""

    def __init__(self, numbers: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers, self.most, self._alive = numbers, 0, dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        if func.namespace != "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU"):
            with self:  # a library's own, which may be written in operations that count
                found = func._op_dk(torch._C.DispatchKey.CPU, *args, **(kwargs or {}))
        else:
            found = func(*args, **(kwargs or {}))
        self._alive = {place: one for place, one in self._alive.items() if not one[0].expired()}  # type: ignore[no-untyped-call]
        for one in tree_leaves(found):
            if isinstance(one, torch.Tensor) and one.numel() >= self._numbers:
                storage = one.untyped_storage()
                if storage._cdata not in given:
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        self.most = max(self.most, sum(nbytes for _, nbytes in self._alive.values()))
        return found
