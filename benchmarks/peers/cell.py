"""Run a command in a memory cgroup of a given size, which counts the process's own memory and the file pages it caused.

    python -m benchmarks.peers.cell --size 1GB [--swap 4GB] -- python -m benchmarks.peers.plain ...

cgroup v1 and v2, as root. Without a size the same command is only watched. Prints one JSON line to standard error.

A file's pages are charged to the cgroup that first touched them and stay charged there, so the files named by `cold`
(libraries, the data) are taken out of the page cache first: a machine of this size would have to hold them too. Pages that
another process maps cannot be taken out: a command in a cgroup waits until they are no more than WARM.
"""

import argparse
import contextlib
import ctypes
import itertools
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.watch import tree

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
LOOK = 0.02
"""Seconds between two looks at the process."""
BLOCK = 512
"""Bytes of one block in ru_inblock and ru_oublock."""


class Alone(dict[int, None]):
    """Keeps tools/watch.py from a process's children. Every arm is one process; what it starts, to ask for versions, shares all
    its pages until it becomes another program: DeepSpeed would seem to need 2.1 GB, not 1.1. The cgroup counts everything."""

    def __contains__(self, _: object) -> bool:
        return True


class NoCgroup(RuntimeError):
    pass


class Warm(RuntimeError):
    """Another process maps the files that a cgroup should pay for."""


WARM, PATIENCE = 8 << 20, 600
"""Bytes that may be left in the page cache, and seconds that others may take to let go of them. 320 MB of libraries that a
test run mapped meanwhile made plain PyTorch's least memory look 0.3 GB smaller."""


@dataclass(frozen=True)
class Cell:
    """How a command ended. Memory in bytes."""

    exit_code: int
    out_of_memory: bool
    late: bool
    """Ended by us, because its time was over."""
    seconds: float
    peak: int
    """RssAnon + RssShmem of the process at the highest look."""
    used: int | None
    """The most that the cgroup charged: cache, kernel memory and all."""
    read: int
    written: int
    """Bytes from and to disks, by the process and those it waited for. Swapping is not among them."""
    warm: int
    output: str
    errors: str


class Cgroup:
    """A memory cgroup of its own; gone, with whatever still ran in it, at the end of a `with`."""

    _numbers = itertools.count()

    def __init__(self, size: int, swap: int = 0) -> None:
        self.v1 = (V1 / "memory.limit_in_bytes").exists()
        self._path = (V1 if self.v1 else V2) / f"peers-{os.getpid()}-{next(self._numbers)}"
        self._size, self._swap = size, swap

    def __enter__(self) -> "Cgroup":
        try:
            self._path.mkdir()
            for name, value in self._settings():
                (self._path / name).write_text(str(value))
        except OSError as error:
            with contextlib.suppress(OSError):
                self._path.rmdir()
            raise NoCgroup(
                f"no memory cgroup could be made in {self._path.parent}: {error.strerror}. Run as root, with the memory "
                "controller on (v2: echo +memory > /sys/fs/cgroup/cgroup.subtree_control)."
            ) from error
        return self

    def _settings(self) -> list[tuple[str, int]]:
        if self.v1:
            both = [("memory.limit_in_bytes", self._size), ("memory.memsw.limit_in_bytes", self._size + self._swap)]
            return both if (V1 / both[1][0]).exists() or self._swap else both[:1]
        return [("memory.max", self._size), ("memory.swap.max", self._swap)]

    def enter(self) -> None:
        """Move the calling process in; for a child between fork and exec."""
        (self._path / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def peak(self) -> int | None:
        path = self._path / ("memory.max_usage_in_bytes" if self.v1 else "memory.peak")
        return int(path.read_text()) if path.exists() else None

    @property
    def kills(self) -> int:
        lines = (self._path / ("memory.oom_control" if self.v1 else "memory.events")).read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.split()[0] == "oom_kill")

    def __exit__(self, *_: object) -> None:
        for _attempt in range(100):
            for pid in (self._path / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(OSError):
                self._path.rmdir()
                return
            time.sleep(0.1)
        print(f"{self._path} could not be removed: something in it still runs.", file=sys.stderr)


def run(
    command: list[str], size: int | None = None, *, swap: int = 0, timeout: float | None = None,
    environment: dict[str, str] | None = None, cold: Iterable[Path] = (),
) -> Cell:  # fmt: skip
    """The command, to its end or to `timeout` seconds. Raises NoCgroup or Warm where it cannot be held to `size`."""
    warm = make_cold(cold) if size is None else _waited_until_cold(list(cold))
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(Cgroup(size, swap)) if size is not None else None
        out, err = (stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(2))
        began = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=out, stderr=err, env=environment, start_new_session=True,
            preexec_fn=group.enter if group is not None else None,
        )  # fmt: skip
        stack.callback(_end, process)
        peak, usage, status, late = _watch(process, began, timeout)
        seconds = time.perf_counter() - began
        for file in (out, err):
            file.seek(0)
        return Cell(
            exit_code=os.waitstatus_to_exitcode(status), out_of_memory=bool(group and group.kills), late=late,
            seconds=round(seconds, 2), peak=peak, used=group.peak if group else None, read=usage.ru_inblock * BLOCK,
            written=usage.ru_oublock * BLOCK, warm=warm, output=out.read(), errors=err.read(),
        )  # fmt: skip


def _watch(process: "subprocess.Popen[str]", began: float, timeout: float | None):
    """(peak, resource usage, wait status, whether it was ended for being late)."""
    peak, late = 0, False
    while True:
        done, status, usage = os.wait4(process.pid, os.WNOHANG)
        if done:
            process.returncode = os.waitstatus_to_exitcode(status)
            return peak, usage, status, late
        peak = max(peak, tree(process.pid, Alone())[0])
        if timeout is not None and not late and time.perf_counter() - began > timeout:
            late = True
            _kill(process)
        time.sleep(LOOK)


def _end(process: "subprocess.Popen[str]") -> None:
    """Whatever happened to us, nothing that we started goes on."""
    if process.returncode is None:
        _kill(process)
        process.wait()


def _kill(process: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def make_cold(files: Iterable[Path]) -> int:
    """Take files out of the page cache; how many bytes of them stayed, because some process maps them."""
    left = 0
    for path in files:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            left += _cached(file.fileno(), os.fstat(file.fileno()).st_size)
    return left


def _waited_until_cold(files: list[Path]) -> int:
    deadline = time.monotonic() + PATIENCE
    while (left := make_cold(files)) > WARM:
        if time.monotonic() > deadline:
            raise Warm(
                f"{left / 1e6:.0f} MB of the libraries are in use by another process, so that this cgroup would not be charged "
                "for them. End what runs from the same environment, or give it an environment of its own."
            )
        time.sleep(2)
    return left


def _cached(handle: int, size: int) -> int:
    """Bytes of a file that are in the page cache."""
    if not size:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(handle, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        view = (ctypes.c_char * size).from_buffer(mapped)
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size), pages)
        del view
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@contextlib.contextmanager
def swap_file(path: Path, nbytes: int) -> Iterator[None]:
    """The system pages to `path` inside; as root."""
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    try:
        path.chmod(0o600)
        for command in (["mkswap", str(path)], ["swapon", str(path)]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise NoCgroup(f"{' '.join(command)}: {done.stderr.strip()}")
        yield
    finally:
        subprocess.run(["swapoff", str(path)], capture_output=True, check=False)
        path.unlink()


def parse(text: str) -> int:
    """620MB as bytes."""
    units = {"GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1}
    unit = next(unit for unit in units if text.upper().endswith(unit))
    return int(float(text[: -len(unit)]) * units[unit])


def end_by_exception() -> None:
    """Let a SIGTERM unwind us, so that cgroup, swap file and process go too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse, help="such as 620MB; without it the command is only watched")
    parser.add_argument("--swap", type=parse, default=0, help="how much of it the system may swap; swap must be on")
    parser.add_argument("--timeout", type=float, help="seconds")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    end_by_exception()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        found = asdict(run(command, options.size, swap=options.swap, timeout=options.timeout))
    except (NoCgroup, Warm) as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        return 3
    sys.stdout.write(found.pop("output"))
    sys.stderr.write(found.pop("errors"))
    print(json.dumps(found), file=sys.stderr)
    return int(found["exit_code"])


if __name__ == "__main__":
    sys.exit(main())
