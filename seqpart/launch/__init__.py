"""Prepares a process that only trains, before torch loads, as the command does.

from seqpart.launch import prepare  # before torch
prepare()
"""

from seqpart.launch.process import prepare

__all__ = ["prepare"]
