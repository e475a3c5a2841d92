"""A run's output: the terminal, JSON lines, the HTML page, traces and trackers."""
