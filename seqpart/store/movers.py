"""Threads beside the one that computes, which read and write files or share its work, and hooks to observe them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

_STACK = 1 << 20
"""Bytes of a thread's stack: it moves bytes by system calls. The usual 8 MB would be charged to the kernel's limit, unused."""


def movers(count: int, name: str) -> ThreadPoolExecutor:
    """Starts `count` threads of that name at once, with small stacks, so that these are not charged to a partition."""
    before, ready = threading.stack_size(_STACK), threading.Barrier(count + 1)
    try:
        pool = ThreadPoolExecutor(count, thread_name_prefix=name)
        for _ in range(count):
            pool.submit(ready.wait)
        ready.wait()
    except BaseException:
        ready.abort()
        raise
    finally:
        threading.stack_size(before)
    return pool


class Watched(Protocol):
    """A function that returns a context for the work `what` of a stream, which moves `nbytes` over `link`."""

    def __call__(self, stream: str, what: str, *, link: str = "", nbytes: int = 0) -> AbstractContextManager[None]: ...


def unwatched(stream: str, what: str, *, link: str = "", nbytes: int = 0) -> AbstractContextManager[None]:
    """A `Watched` that observes nothing."""
    return nullcontext()
