"""The CPU, a CUDA GPU or a simulated one: memory in use, the limit and what enforces it, streams, the sampler."""
