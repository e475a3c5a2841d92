"""Where tensors rest off the device: the store, its files and host memory."""
