"""What partitions hand to each other within an update."""
