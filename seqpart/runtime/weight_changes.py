"""Changes weights at home by a rule of the user's, such as a teacher that follows its student."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from seqpart.device.pages import aligned
from seqpart.errors import ModelError
from seqpart.model.blocks import Block
from seqpart.plan.planner import ExecutionPlan
from seqpart.store.store import Store
from seqpart.text import short

Place = tuple[Block, str]
"""A parameter: its block, and its name in it."""


def change_weights(
    prepared: ExecutionPlan, store: Store, rule: Callable[..., Any], parts: Sequence[str], spoilt: Callable[[], None]
) -> None:
    """Calls `rule` with each parameter of the model's first part, and with those of the same name in the other parts. It
    changes the first in place, or returns its new value.

    Homes are read block by block, and written when all of a block is changed; an error restores them. spoilt: called where they
    cannot be, since homes in host memory have one version.

    Raises ModelError for parts that do not match.
    """
    layouts = {block: cost.layout for block, cost in zip(prepared.chain, prepared.costs, strict=True)}
    together = dict[Block, list[tuple[Place, ...]]]()
    for places in _matching({block: layout.specs for block, layout in layouts.items()}, parts):
        if tiled := [prepared.chain.wholes[name] for name in _names(places) if name in prepared.chain.wholes]:
            raise ModelError(
                f"change_weights: {tiled[0]} is in tiles, and a rule would see one at a time. Give tile=0, and a larger limit."
            )
        together.setdefault(places[0][0], []).append(places)
    store.mark()
    try:
        for block, matching in together.items():
            blocks = dict.fromkeys(one for places in matching for one, _ in places)
            flats = {one: aligned(layouts[one].padded_nbytes) for one in blocks}
            store.get_all((one.home, flat) for one, flat in flats.items())
            views = {one: layouts[one].views(flat) for one, flat in flats.items()}
            with torch.no_grad():
                for places in matching:
                    first, *others = (views[one][name] for one, name in places)
                    made = rule(first, *others)
                    if made is not None and getattr(made, "shape", None) != first.shape:
                        raise ModelError(
                            f"change_weights: expected a rule that changes its first tensor, or returns another of shape "
                            f"{tuple(first.shape)}; found {short(made)} for {_names(places)[0]}."
                        )
                    if made is not None and made is not first:
                        first.copy_(made)
            store.put(block.home, layouts[block], flats[block])
    except BaseException:
        if not store.rollback():
            spoilt()
        raise
    store.mark()


def _matching(specs: dict[Block, Any], parts: Sequence[str]) -> list[tuple[Place, ...]]:
    """Returns the places of each parameter of the first part, and of those of the same name in the others."""
    shapes = {
        block.exported(spec.name): (block, spec.name, spec.shape, spec.dtype)
        for block, own in specs.items()
        for learned in [dict(block.module.named_parameters())]
        for spec in own
        if spec.name in learned
    }
    for block in specs:  # a tied parameter has a name in each module that uses it
        for tie in block.tied:
            shapes[block.exported(tie.name)] = shapes[tie.owner.exported(tie.owner_name)]
    named = [{name.removeprefix(part).lstrip("."): one for name, one in shapes.items() if _is_in(name, part)} for part in parts]
    for part, own in zip(parts, named, strict=True):
        if not own:
            raise ModelError(
                f"change_weights: expected parts of the model with parameters, such as {next(iter(shapes)).partition('.')[0]}; "
                f"found {short(part)}."
            )
        if {name: one[2:] for name, one in own.items()} != {name: one[2:] for name, one in named[0].items()}:
            odd = next(name for name in (*named[0], *own) if name not in own or named[0].get(name, ())[2:] != own[name][2:])
            raise ModelError(
                f"change_weights: expected parts with parameters of the same names, shapes and types; found {odd} in "
                f"{parts[0]} or {part} alone, or unlike."
            )
    found = {named[0][name][:2]: tuple(own[name][:2] for own in named) for name in named[0]}
    return list(found.values())  # each once


def _names(places: Sequence[Place]) -> list[str]:
    return [block.exported(name) for block, name in places]


def _is_in(name: str, part: str) -> bool:
    return not part or name == part or name.startswith(f"{part}.")
