"""Homes of tensors off the device: files, direct I/O, host memory, and the directory that holds them."""
