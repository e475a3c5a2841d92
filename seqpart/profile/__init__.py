"""What blocks and partitions cost, counted on fake tensors or measured, and what the machine does per second."""
