"""Trackers of runs: TensorBoard and Weights & Biases."""
