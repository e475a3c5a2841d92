"""Narrow copies of a chain that are cut out of its homes, trained alone, and put back."""
