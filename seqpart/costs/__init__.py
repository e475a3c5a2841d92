"""What blocks, partitions and the machine cost: counted on fake tensors, measured in real runs."""
