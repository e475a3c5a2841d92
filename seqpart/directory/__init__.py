"""The directory of a run: whose it is, what it holds, and how results are published."""
