"""Checks the files, threads and memory that a run needs of its process. Made first, since libraries that lack one of these end
the process, each in its own words."""

import contextlib
import resource
import threading
from collections.abc import Callable, Iterator

from seqpart.errors import OptionError

FILES = 32
"""Most files that a run has open, with those of the interpreter."""
THREADS = 4
"""Threads of a run: the reader, two that move homes, and the sampler."""
_STACK = 128 << 10
_SIZES = {"-v": (resource.RLIMIT_AS, b"VmSize:"), "-d": (resource.RLIMIT_DATA, b"VmData:")}
"""{flag of ulimit: (limit on a process's memory, the kernel's figure that it limits)}."""
_LIMITS = {
    name: soft for kind, name in _SIZES.values() if (soft := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY
}  # fmt: skip
"""Limits when the process began: a run sets one itself."""


def limited_sizes() -> list[str]:
    """Flags of ulimit by which the size of this process is limited."""
    return [flag for flag, (_, name) in _SIZES.items() if name in _LIMITS]


def room() -> int:
    """Bytes that ulimit -v and ulimit -d let this process hold, what it holds now among them; 1 << 62 without these."""
    return min(1 << 62, room_left() + held(status_of()))


def room_left() -> int:
    """Bytes that ulimit -v and -d still let it take; 1 << 62 without these. Both count reserved bytes: libraries, stacks."""
    text = status_of()
    return max(0, min((soft - figure(text, name) for name, soft in _LIMITS.items()), default=1 << 62))


def status_of(pid: int | str = "self") -> bytes:
    with open(f"/proc/{pid}/status", "rb") as status:
        return status.read()


def figure(text: bytes, name: bytes) -> int:
    """Bytes in a line of that; 0 where there is none."""
    at = text.find(name)
    begin = at + len(name)
    return int(text[begin : text.index(b"k", begin)]) * 1024 if at >= 0 else 0


def held(text: bytes) -> int:
    """Bytes that only the process of that status holds."""
    return figure(text, b"RssAnon:") + figure(text, b"RssShmem:")


def highest() -> int:
    """Most bytes that this process held since the kernel's mark was reset, or since it began."""
    text = status_of()
    # The mark counts file pages too, which grow only where code runs for the first time.
    return max(held(text), figure(text, b"VmHWM:") - figure(text, b"RssFile:"))


def set_mark_back() -> bool:
    """Resets VmHWM to the bytes held now; returns False where /proc is read-only."""
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
    """A context for a run on a device of that kind. Of overlapping runs the first makes the `changes` of the process, and the
    last undoes them.

    Raises OptionError while another thread is in a run: the memory limit, signal handlers, random numbers and the allocator's
    settings belong to the process, and the run that ended first would take them from the other.
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
    """A context in which the process may open a run's files. Raises OptionError if it may not, or may not start the threads.

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
    """Starts `count` threads at once, and ends them. Raises OptionError if that fails."""
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
