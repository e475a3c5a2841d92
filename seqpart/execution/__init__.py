"""The only loop, and what it does with one partition on one micro-batch."""
