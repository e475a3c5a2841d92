"""Blocks, their costs, optimizers and losses."""
