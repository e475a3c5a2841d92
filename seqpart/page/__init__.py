"""The directory of a run as one page for the browser."""
