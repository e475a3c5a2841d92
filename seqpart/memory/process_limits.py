"""What a run needs of the process that it is in: files and threads. Looked at first, since libraries that lack one of these
end the process, each in its own words."""

import contextlib
import resource
import threading

from seqpart.errors import OptionError

FILES = 32
"""Files that a run has open at most, with what the interpreter keeps open."""
THREADS = 4
"""Of its own: the reader, two that move homes, and the sampler."""
_STACK = 128 << 10


def refuse_poor_surroundings(computing: int) -> None:
    """Raises OptionError. `computing`: threads that the libraries start beside ours."""
    _allow_files()
    _try_threads(THREADS + computing)


def _allow_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= FILES:
        return
    if hard != resource.RLIM_INFINITY and hard < FILES:
        raise OptionError(f"this process may open {hard} files, and a run needs {FILES}. Allow more: ulimit -n {FILES}.")
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, hard))


def _try_threads(count: int) -> None:
    """Start so many at once, and let them go again."""
    go, started, before = threading.Event(), [], threading.stack_size(_STACK)
    try:
        for _ in range(count):
            thread = threading.Thread(target=go.wait)
            thread.start()
            started.append(thread)
    except RuntimeError:
        raise OptionError(
            f"this process may start {len(started)} threads more, and a run needs {count}. Allow more (ulimit -u, or pids.max "
            "of the container), or compute with fewer: OMP_NUM_THREADS=1."
        ) from None
    finally:
        with contextlib.suppress(ValueError):
            threading.stack_size(before)
        go.set()
        for thread in started:
            thread.join()
