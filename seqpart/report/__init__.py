"""What a run shows: the terminal, JSON lines, the HTML page, traces and trackers."""
