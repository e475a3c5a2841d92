"""Modules that run to be looked at are afterwards what they were: modes, caches, hooks."""

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def _shallow(value: object) -> object:
    """A copy of a container, in which a module may keep what it has made; anything else as it is."""
    return copy.copy(value) if type(value) in (dict, OrderedDict, list, set) else value


def _put_back(value: Any, content: Any) -> object:
    """The container itself, since the handle of a hook knows it, with the content that `_shallow` kept."""
    if type(value) is list:
        value[:] = content
    elif value is not content:
        value.clear()
        value.update(content)
    return value


@contextmanager
def left_as_they_are(modules: Iterable[nn.Module]) -> Iterator[None]:
    """What the body makes modules remember is forgotten."""
    before = [(module, {name: (value, _shallow(value)) for name, value in vars(module).items()}) for module in modules]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update({name: _put_back(*both) for name, both in attributes.items()})
