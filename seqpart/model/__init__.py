"""The chain of blocks and its values, losses, optimizers, weights, tiles and quantized layers."""

from seqpart.model.losses import SeparableLinear

__all__ = ["SeparableLinear"]
