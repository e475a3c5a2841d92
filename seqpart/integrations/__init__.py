"""Trainers of other libraries, under the limit."""
