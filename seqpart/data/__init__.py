"""The user's rows, and the boundary cache that is read ahead."""
