"""Threads that read and write files, behind the one that computes."""

import threading
from concurrent.futures import ThreadPoolExecutor

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
