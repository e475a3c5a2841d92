"""Random generators: those that everything draws from, and those that a data set or its transforms hold for themselves.

albumentations, MONAI and many data sets draw from a generator of their own, which worker processes get as a copy: all of them
draw the same, and a run that goes on in another process draws otherwise. So these too are seeded before each item is read.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from seqpart.device.device import keyed_seed
from seqpart.model.loss_probe import all_generators

_KINDS = torch.Generator, random.Random, np.random.Generator, np.random.RandomState
_IN_ONE, _IN_ALL = 64, 10_000
"""Parts of a list, and objects in all, that are looked at."""


def own_generators(*holders: Any) -> list[Any]:
    """Returns the generators that objects hold in attributes, lists, dicts and closures, at any depth, and those that their
    methods know by a global name. The order is the same in every process."""
    shared = torch.default_generator, getattr(random, "_inst", None), np.random.mtrand._rand
    found, left, seen = list[Any](), list(reversed(holders)), dict[int, Any]()
    while left and len(seen) < _IN_ALL:
        one = left.pop()
        if id(one) in seen or any(one is other for other in shared):
            continue
        seen[id(one)] = one  # alive, so that no other object gets its id
        if isinstance(one, _KINDS) and not isinstance(one, random.SystemRandom):
            found.append(one)
        else:
            left += reversed(list(_parts_of(one)))
    return found


def _parts_of(one: Any) -> Iterator[Any]:
    if isinstance(one, dict):
        yield from islice(dict.values(one), _IN_ONE)
    elif isinstance(one, list | tuple):
        yield from islice(list.__iter__(one) if isinstance(one, list) else tuple.__iter__(one), _IN_ONE)
    if isinstance(one, partial):
        yield from (one.func, *one.args, *one.keywords.values())
    elif isinstance(one, MethodType):
        yield one.__self__
    elif isinstance(one, FunctionType):
        for cell in one.__closure__ or ():
            with suppress(ValueError):  # of a name that has no value yet
                yield cell.cell_contents
        named = (one.__globals__.get(name) for name in one.__code__.co_names)
        yield from (value for value in named if isinstance(value, _KINDS))
    elif not isinstance(one, type | ModuleType | torch.Tensor | torch.nn.Module):
        for kind in type(one).__mro__:
            for name, value in vars(kind).items():
                if isinstance(value, FunctionType):
                    yield value
                elif isinstance(value, MemberDescriptorType):  # of __slots__
                    with suppress(AttributeError):
                        yield value.__get__(one)
                elif name == "__dict__":
                    yield from value.__get__(one).values()


def seed_generators(seed: int, own: Sequence[Any] = ()) -> None:
    """Seeds torch's, Python's and numpy's generators, and some that are held elsewhere, each with another seed."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    for number, generator in enumerate(own):
        other = keyed_seed(seed, "own", number)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(other)
        elif isinstance(generator, np.random.Generator):
            kind: Any = type(generator.bit_generator)
            generator.bit_generator.state = kind(other).state
        else:
            generator.seed(other % (1 << 32))


def states(own: Sequence[Any] = ()) -> list[object]:
    """Returns the states of torch's, Python's and numpy's generators, and of some that are held elsewhere."""
    return [*all_generators(), *map(_state, own)]


def _state(generator: Any) -> object:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return repr(
        generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state(legacy=False)
    )
