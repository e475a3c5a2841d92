"""benchmarks/gpu/sanitized.py: every note of the sanitizer is made in turn, and a true `Event.query` orders what follows it."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
from torch.cuda import _gpu_trace
from seqpart.device.cuda import CudaDevice

waited = []
CudaDevice.wait = lambda self, event: waited.append(event)

class Event:
    def __init__(self, over):
        self.query = lambda: over

from benchmarks.gpu import sanitized
sanitized.watch_all_threads()
inside = []
sanitized._LOCK = type("Lock", (), {"__enter__": lambda self: inside.append(1), "__exit__": lambda *_: None})()
_gpu_trace.StreamCreationCallbacks.fire_callbacks(7)
_gpu_trace.MemoryAllocationCallbacks.fire_callbacks(512)
device, over = CudaDevice.__new__(CudaDevice), Event(True)
print(device.is_over(over), device.is_over(Event(False)), device.is_over(None), waited == [over, None], len(inside))
"""


def test_notes_are_made_in_turn_and_a_query_that_is_true_orders_what_follows():
    """The sanitizer sees no query: parts dropped because they were over looked like races."""
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", PROGRAM], cwd=Path(__file__).parents[2], capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "False", "True", "True", "2"], done.stderr
