"""Threads that read and write files beside the one that computes, and who watches them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

_STACK = 1 << 20
"""Bytes of a thread's stack: it moves bytes by system calls. The usual 8 MB are reserved and not used, and the kernel's limit
charges them."""


def movers(count: int, name: str) -> ThreadPoolExecutor:
    """`count` threads of that name, started now, so that their stacks are nobody's partition."""
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
    """What a stream is asked to stand in while it does `what`, and moves `nbytes` over `link`."""

    def __call__(self, stream: str, what: str, *, link: str = "", nbytes: int = 0) -> AbstractContextManager[None]: ...


def unwatched(stream: str, what: str, *, link: str = "", nbytes: int = 0) -> AbstractContextManager[None]:
    """Where nobody looks."""
    return _NOBODY


_NOBODY = nullcontext()
