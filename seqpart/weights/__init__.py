"""Weights that a model begins with: safetensors files, their names and the model's, tensors that have no memory yet."""
