"""What lies in a partition's slot beside its weights: optimizer state, and gradients that wait for their norm."""

from collections.abc import Sequence

from seqpart.costs import BlockCost
from seqpart.layout import Layout
from seqpart.optimizers import Optimizer


def state_layouts(costs: Sequence[BlockCost], optimizer: Optimizer | None) -> list[Layout]:
    """Layout of every block's optimizer state; empty ones without an optimizer."""
    if optimizer is None:
        return [Layout(()) for _ in costs]
    return [
        optimizer.state_layout({spec.name: spec for spec in cost.layout.specs if spec.name in cost.trainable}) for cost in costs
    ]


def gradient_layouts(costs: Sequence[BlockCost]) -> list[Layout]:
    """Layout of every block's gradients, for those that wait at home for their norm."""
    return [cost.gradient_layout for cost in costs]


def slot_bytes(costs: Sequence[BlockCost], optimizer: Optimizer | None, *, gradients: bool = False) -> int:
    """Bytes of the slot for a partition of these blocks."""
    layouts = [*(cost.layout for cost in costs), *state_layouts(costs, optimizer)]
    return sum(layout.room for layout in layouts + (gradient_layouts(costs) if gradients else []))
