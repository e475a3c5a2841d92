"""Blocks, their costs, optimizers and losses; and the layer that models for the partially-separable loss are made of."""

from seqpart.model.separable import SeparableLinear

__all__ = ["SeparableLinear"]
