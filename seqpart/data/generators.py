"""Random generators: those that everything draws from, and those that a data set or its transforms hold for themselves.

albumentations, MONAI and many data sets draw from a generator of their own, which worker processes get as a copy: all of them
draw the same, and a run that goes on in another process draws otherwise. So these too are seeded before each item is read.
"""

import random
import types
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

from seqpart.device.device import keyed_seed
from seqpart.model.loss_probe import all_generators, generators_left_alone

_KINDS = torch.Generator, random.Random, np.random.Generator, np.random.RandomState
_LEAVES = (
    str, bytes, int, float, complex, type(None), type, torch.Tensor, np.ndarray, types.ModuleType, types.GetSetDescriptorType,
    types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType,
)  # fmt: skip
"""Types of objects that hold none."""
_IN_ONE, _IN_ALL = 1_000, 10_000
"""Parts of a list, and objects in all, that are looked at."""


def own_generators(*holders: Any) -> list[Any]:
    """Returns the generators that objects hold in attributes, lists, dicts and closures, at any depth, and those that their
    methods know by a global name. The order is the same in every process."""
    shared = torch.default_generator, getattr(random, "_inst", None), np.random.mtrand._rand
    found, left, seen = list[Any](), deque(holders), dict[int, Any]()
    while left and len(seen) < _IN_ALL:
        one = left.popleft()  # the nearest first
        if id(one) in seen or any(one is other for other in shared):
            continue
        seen[id(one)] = one  # alive, so that no other object gets its id
        with suppress(Exception):  # of a dead proxy, or an attribute that cannot be read
            if isinstance(one, _KINDS) and not isinstance(one, random.SystemRandom):
                found.append(one)
            else:
                left += (part for part in _parts_of(one) if not isinstance(part, _LEAVES))
    return found


def _parts_of(one: Any) -> Iterator[Any]:
    if isinstance(one, dict):
        yield from islice(dict.values(one), _IN_ONE)
    elif isinstance(one, list | tuple):
        yield from islice(list.__iter__(one) if isinstance(one, list) else tuple.__iter__(one), _IN_ONE)
    if isinstance(one, types.FunctionType):
        yield from (one.__defaults__, one.__kwdefaults__)
        for cell in one.__closure__ or ():
            with suppress(ValueError):  # of a name that has no value yet
                yield cell.cell_contents
        yield from (one.__globals__.get(name) for name in _names_in(one.__code__))
    elif isinstance(one, partial):
        yield from (one.func, one.args, one.keywords)
    elif isinstance(one, types.MethodType | types.BuiltinFunctionType):  # of a class in C: `rng.random`
        yield from (one.__self__, getattr(one, "__func__", None))
    elif isinstance(one, staticmethod | classmethod):
        yield one.__func__
    elif isinstance(one, property):
        yield one.fget
    elif type(one) not in (dict, list, tuple):
        for name, value in (pair for kind in type(one).__mro__[:-1] for pair in vars(kind).items()):
            if isinstance(value, types.MemberDescriptorType):  # of __slots__
                with suppress(AttributeError):
                    yield value.__get__(one)
            elif name == "__dict__":
                yield from value.__get__(one).values()
            else:
                yield value


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, types.CodeType):  # of a comprehension
            yield from _names_in(part)


def seed_generators(seed: int, own: Sequence[Any] = ()) -> None:
    """Seeds torch's, Python's and numpy's generators, and some that are held elsewhere, each with another seed."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    for number, generator in enumerate(own):
        other = keyed_seed(seed, "own", number)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(other)
        elif isinstance(generator, random.Random):
            random.Random.seed(generator, other)  # a class of the user's may have another `seed`
        elif isinstance(generator, np.random.RandomState) and isinstance(generator._bit_generator, np.random.MT19937):
            generator.seed(other % (1 << 32))
        else:
            kind: Any = type(generator._bit_generator)
            _set_state(generator, kind(other).state)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restores the random generators afterwards, as if nothing had been drawn inside."""
    with torch.random.fork_rng(devices=[]), generators_left_alone():
        yield


@contextmanager
def left_alone(own: Sequence[Any]) -> Iterator[None]:
    """A context after which generators of a data set's own go on as if nothing had been drawn: the user's loop, or the loader,
    may draw from them too."""
    before = [_state(generator) for generator in own]
    try:
        yield
    finally:
        for generator, state in zip(own, before, strict=True):
            _set_state(generator, state)


def states(own: Sequence[Any] = ()) -> list[object]:
    """Returns the states of torch's, Python's and numpy's generators, and of some that are held elsewhere, to be compared."""
    found = map(_state, own)
    return [*all_generators(), *(one.numpy().tobytes() if isinstance(one, torch.Tensor) else repr(one) for one in found)]


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state(legacy=False)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
