"""What a run needs of the process that it is in: files, threads and memory. Looked at first, since libraries that lack one of
these end the process, each in its own words."""

import contextlib
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from seqpart.errors import OptionError

FILES = 32
"""Files that a run has open at most, with what the interpreter keeps open."""
THREADS = 4
"""Of its own: the reader, two that move homes, and the sampler."""
_STACK = 128 << 10
_SIZES = {"-v": (resource.RLIMIT_AS, "VmSize:"), "-d": (resource.RLIMIT_DATA, "VmData:")}
"""By the flag of ulimit: a limit on a process's memory, and the kernel's figure that it is on."""
_LIMITS = {
    name: soft for kind, name in _SIZES.values() if (soft := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY
}  # fmt: skip
"""As the process began: a run sets one itself."""


def limited_sizes() -> list[str]:
    """Flags of ulimit by which the size of this process is limited."""
    return [flag for flag, (_, name) in _SIZES.items() if name in _LIMITS]


def room() -> int:
    """Bytes that ulimit -v and ulimit -d let this process hold, what it holds now among them; 1 << 62 without these."""
    return min(1 << 62, room_left() + _figure("RssAnon:") + _figure("RssShmem:"))


def room_left() -> int:
    """Bytes that they let it take still; 1 << 62 without these. Both count what is reserved too: libraries, stacks."""
    return max(0, min((soft - _figure(name) for name, soft in _LIMITS.items()), default=1 << 62))


def _figure(name: str) -> int:
    """Bytes, of a line of the kernel's status of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def set_mark_back() -> bool:
    """Let VmHWM begin anew at what is held now; False where that cannot be: /proc is read-only."""
    try:
        with open("/proc/self/clear_refs", "wb", buffering=0) as marks:
            marks.write(b"5")
    except OSError:
        return False
    return True


class _Runs:
    """The thread that trains, how many runs it is in (a session, and in a callback an evaluation), and what they changed."""

    def __init__(self) -> None:
        self.lock, self.thread, self.count = threading.Lock(), 0, 0
        self.changes, self.kinds = contextlib.ExitStack(), set[str]()


_RUNS = _Runs()


@contextlib.contextmanager
def in_run(kind: str, changes: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Around a run on a device of that kind. `changes` of the process are made by the first of those that overlap, and undone
    with the last.

    Raises OptionError while another thread is in one: the limit on memory, signal handlers, random numbers and the allocator's
    settings are those of the process, and whoever ended first would take them from the other.
    """
    me = threading.get_ident()
    with _RUNS.lock:
        if _RUNS.count and _RUNS.thread != me:
            raise OptionError(
                "another thread of this program is in a fit, plan, evaluate or session of seqpart, and the memory limit is one "
                "on the whole process. Wait until it is over (a threading.Lock around both), or start a process for each: "
                "multiprocessing.get_context('spawn')."
            )
        _RUNS.thread, _RUNS.count = me, _RUNS.count + 1
    try:
        if kind not in _RUNS.kinds:
            _RUNS.changes.enter_context(changes())
            _RUNS.kinds.add(kind)
        yield
    finally:
        if _RUNS.count == 1:
            _RUNS.kinds.clear()
            _RUNS.changes.close()
        with _RUNS.lock:
            _RUNS.count -= 1


@contextlib.contextmanager
def files_and_threads(computing: int) -> Iterator[None]:
    """Inside, the process may open the files of a run. Raises OptionError where it may not, or may not start the threads.

    computing: threads that the libraries start beside ours.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < FILES
    if few and hard != resource.RLIM_INFINITY and hard < FILES:
        raise OptionError(f"this process may open {hard} files, and a run needs {FILES}. Allow more: ulimit -n {FILES}.")
    _try_threads(THREADS + computing)
    if few:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, hard))
    try:
        yield
    finally:
        if few:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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
