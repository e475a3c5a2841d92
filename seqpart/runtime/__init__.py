"""A run from start to proof: the one loop, partitions on the device, what they hand to each other."""
