"""Layers too large for the limit, as tiles of their rows that come and go one by one."""
