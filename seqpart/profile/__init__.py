"""Costs of blocks and partitions, counted on fake tensors or measured, and speeds of the machine."""
