"""What a run leaves of itself as it goes."""
