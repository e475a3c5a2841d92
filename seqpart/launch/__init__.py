"""What only a process that does nothing but runs may do before torch loads, as the command's own does.

from seqpart.launch import prepare  # before torch
prepare()
"""

from seqpart.launch.process import prepare

__all__ = ["prepare"]
