"""Devices and their memory: what is used, what is allowed, and what enforces it."""
