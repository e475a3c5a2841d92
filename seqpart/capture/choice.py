"""Chooses the modules of a model that are blocks: its repeated layers, and the modules beside them."""

from collections.abc import Collection, Iterator

from torch import nn

from seqpart.model.tiling import Tiled

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
    if type(module) in _CONTAINERS or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return bool(len(module))  # type: ignore[arg-type]
    if any(isinstance(part, Tiled) for part in module.modules()):
        return True
    if is_layer and _size(module) * _LARGE <= total:
        return False
    return any(_holds_layers(part) for part in _containers(module))


def _containers(module: nn.Module) -> Iterator[nn.Module]:
    return (part for part in module.modules() if isinstance(part, _CONTAINERS))


def _holds_layers(container: nn.Module) -> bool:
    """True if it lists modules that consist of others, as an encoder does, and not the parts of one layer."""
    made = [part for part in container.children() if any(True for _ in part.children()) and _size(part)]
    return len(made) > isinstance(container, nn.Sequential)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
