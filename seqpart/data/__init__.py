"""The user's rows: checked, read anew or kept, padded, drawn by loaders and their workers."""
