"""How long OpenMP's threads spin before they sleep, while they wait for the next kernel.

GNU's OpenMP, which PyTorch's wheels bring, reads two counts when it loads: a long one, and a short one that holds where more of
its threads are there than processors. Small kernels want the long one: a network of 0.5 ms a step takes 1.4 times as long with
the short one (benchmarks/small_jobs.py). Threads that read, copy and write while the device computes want the short one,
because they need the processors: so while they do, two threads more are there, asleep. Other libraries are left alone.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

_THREADS = 2


@contextmanager
def short_waits(wanted: bool) -> Iterator[None]:
    """While the body runs, threads that wait sleep soon, where that is `wanted`."""
    library = _library() if wanted else None
    if library is None:
        yield
        return
    ready, over = threading.Event(), threading.Event()

    def sleeps() -> None:
        # A team of its own, counted until this thread ends; free(NULL) does nothing, without Python.
        library.GOMP_parallel(no_work, None, _THREADS, 0)
        ready.set()
        over.wait()

    no_work = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
    thread = threading.Thread(target=sleeps, name="seqpart-short-waits", daemon=True)
    thread.start()
    ready.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


@cache
def _library() -> ctypes.CDLL | None:
    """The one that PyTorch has loaded, and no other that lies beside it in the process."""
    home = str(Path(torch.__file__).parent)
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    found = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}
    ours = next((path for path in sorted(found) if path.startswith(home)), None)
    if ours is None:
        return None
    library = ctypes.CDLL(ours)
    library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    library.GOMP_parallel.restype = None
    return library
