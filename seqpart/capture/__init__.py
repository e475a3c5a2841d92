"""Any nn.Module as a chain of blocks: it runs once on fake tensors, and what is seen is cut at its layers."""
