"""What a run needs of the process that it is in: files, threads and memory. Looked at first, since libraries that lack one of
these end the process, each in its own words."""

import contextlib
import resource
import sys
import threading
from collections.abc import Iterator
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


def load_torch() -> None:
    """Import it, or end the program in words where this process may not be large enough for it."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        small = [flag for flag, (_, name) in _SIZES.items() if name in _LIMITS]
        if not small or "map" not in str(error):
            raise
        sys.stderr.write(
            f"seqpart: PyTorch does not fit into this process, whose size is limited (ulimit {' '.join(small)}): {error}. "
            "Allow more; what a run itself may take is said by --mem-limit.\n"
        )
        sys.exit(OptionError.exit_code)


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


class _Holder:
    """The thread that trains, and how many runs it is in: a session, and in a callback an evaluation."""

    def __init__(self) -> None:
        self.lock, self.thread, self.runs = threading.Lock(), 0, 0


_HOLDER = _Holder()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Around a run. Raises OptionError while another thread is in one: the limit on memory, signal handlers, random numbers and
    the allocator's settings are those of the process, and whoever ended first would take them from the other."""
    me = threading.get_ident()
    with _HOLDER.lock:
        if _HOLDER.runs and _HOLDER.thread != me:
            raise OptionError(
                "another thread of this program is in a fit, plan, evaluate or session of seqpart, and the memory limit is one "
                "on the whole process. Wait until it is over (a threading.Lock around both), or start a process for each: "
                "multiprocessing.get_context('spawn')."
            )
        _HOLDER.thread, _HOLDER.runs = me, _HOLDER.runs + 1
    try:
        yield
    finally:
        with _HOLDER.lock:
            _HOLDER.runs -= 1


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
