"""What only our own process may do before torch loads: keeping the compiler and NVIDIA's tables out of memory."""
