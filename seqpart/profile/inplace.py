"""Blocks that change their input in place, where PyTorch does not allow it.

A plain loop raises where a block overwrites what one before it saved for its gradients. Cut between the two they would train,
on a copy; so PyTorch itself is asked beforehand, on fake tensors.
"""

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from seqpart.errors import ModelError
from seqpart.model.blocks import Block
from seqpart.model.tensors import with_tensors
from seqpart.profile.blocks import BlockCost
from seqpart.profile.fake_mode import FakeMode, cast, quiet_log, quiet_random


def refuse_lost_gradients(
    chain: Sequence[Block], costs: Sequence[BlockCost], shape: tuple[int, ...], rows: int, autocast: torch.dtype | None
) -> None:
    """Raises ModelError, naming the block, for one that writes into what PyTorch does not let it change.

    shape: of one row of the data; rows: of a micro-batch.
    """
    if any(block.is_cut_out for block in chain):  # cut out of a model that ran whole
        return
    shapes = [(rows, *shape), *((rows, *cost.output_shape) for cost in costs)]
    asked: set[tuple[object, ...]] = set()
    for last, cost in enumerate(costs):
        first = last - 1
        while first > 0 and costs[first].passes:
            first -= 1
        key = (*(block.same_as for block in chain[max(0, first) : last + 1]), shapes[max(0, first)])
        if cost.writes and first >= 0 and key not in asked:
            asked.add(key)
            dtype = costs[first].takes[0].dtype
            x = torch.zeros(shapes[first], dtype=dtype, device="meta", requires_grad=first > 0 and dtype.is_floating_point)
            _ask(chain[first : last + 1], x, autocast)


def _ask(blocks: Sequence[Block], like: torch.Tensor, autocast: torch.dtype | None) -> None:
    mode = FakeMode()
    with ExitStack() as stack:
        modules = []
        for block in blocks:
            module, tensors = block.fake(mode)
            stack.enter_context(block.left_as_it_is())
            stack.enter_context(with_tensors(module, tensors))
            modules.append(module.train())
        for context in (mode, quiet_random(), quiet_log(), cast(autocast)):
            stack.enter_context(context)
        y = torch.zeros(like.shape, dtype=like.dtype, requires_grad=like.requires_grad).clone()
        try:
            for module in modules:
                y = module(y)
            if y.requires_grad:
                y.sum().backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            why = str(error).splitlines()[0].split(" Hint:")[0]
            if "inplace" not in why and "in-place" not in why:
                return  # measuring has its own word for what else does not work
            raise ModelError(
                f"{blocks[-1]} changes its input in place, which PyTorch does not allow behind {blocks[-2]}: {why} Give it "
                "inplace=False, or let it write into a copy."
            ) from None
