"""The kernel's figures: memory that is used is seen, wherever in the process tree it is."""

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seqpart.device.device import Device
from seqpart.device.usage import MemoryUsage, Reading, held_by_tree, read_process

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from watch import tree

SIZE = 64 << 20
SLACK = 8 << 20
"""The interpreter allocates and frees some memory of its own between two looks; a tenth of SIZE is far above it."""


@pytest.fixture
def child():
    """A process that holds SIZE bytes until its input closes."""
    program = f"held = bytearray({SIZE})\nheld[::4096] = b'x' * len(held[::4096])\nprint('ready', flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.stdin.write(b"\n")


def touch(memory):
    for page in range(0, SIZE, mmap.PAGESIZE):
        memory[page] = 1


def private():
    """SIZE bytes of the kernel's own, not of the heap, which may hold them free already and keep them when they are freed."""
    return mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def test_anonymous_memory_is_seen_when_it_is_touched_and_again_when_it_is_freed():
    before = read_process()
    with private() as held:
        touch(held)
        during = read_process()
    after = read_process()
    assert abs(during.anon - before.anon - SIZE) < SLACK
    assert abs(after.anon - before.anon) < SLACK


def test_memory_that_is_reserved_and_not_touched_counts_as_data_only():
    before = read_process()
    with private():
        during = read_process()
    assert abs(during.anon - before.anon) < SLACK
    assert abs(during.data - before.data - SIZE) < SLACK


def test_shared_memory_is_seen_apart():
    before = read_process()
    with mmap.mmap(-1, SIZE) as shared:
        touch(shared)
        during = read_process()
    assert abs(during.shmem - before.shmem - SIZE) < SLACK
    assert abs(during.anon - before.anon) < SLACK


def test_the_gauge_counts_anonymous_and_shared_memory_of_this_process():
    usage = MemoryUsage(Device())
    before = usage.read()
    with private() as held, mmap.mmap(-1, SIZE) as shared:
        touch(held)
        touch(shared)
        assert abs(usage.read() - before - 2 * SIZE) < SLACK
    assert "RssAnon + RssShmem" in usage.source


def test_a_child_s_memory_belongs_to_the_tree(child):
    own, tree = read_process().held, held_by_tree(os.getpid())
    assert SIZE <= tree - own < SIZE + 4 * SLACK, "the child's interpreter is a few megabytes more"
    assert read_process(child.pid).anon >= SIZE


def test_the_process_that_tests_are_forked_from_is_in_no_tree(processes, tmp_path):
    """Its 300 MB counted in what later tests of the same process measured: one of them failed now and then."""
    assert processes.test(tmp_path, "tests/test_units.py")[0] == 0
    assert held_by_tree(os.getpid()) - read_process().held < SLACK


def test_the_gauge_finds_a_child_within_a_few_looks(child):
    usage = MemoryUsage(Device())
    own = read_process().anon
    assert max(usage.read() for _ in range(30)) - own >= SIZE - SLACK


def test_a_process_that_is_gone_holds_nothing():
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    assert read_process(int(process.stdout)) == Reading()
    assert held_by_tree(int(process.stdout)) == 0


def test_a_thread_that_looks_while_the_interpreter_ends_says_nothing():
    """The open file was closed under it: an early refusal had the traceback of a thread behind its message."""
    program = (
        "import atexit, time; atexit.register(time.sleep, 0.3)\n"  # runs after what is registered later
        "from seqpart.device.device import Device; from seqpart.device.usage import MemoryUsage\n"
        "from seqpart.device.sampler import Sampler\n"
        "Sampler(MemoryUsage(Device()), limit=1 << 62).start()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


# `import torch` may start ldconfig. A sampler that looked between vfork and exec saw the parent's bytes under both
# process numbers, and a run within 357 MB was said to have held 461 MB.
def test_a_child_that_still_runs_in_its_parent_s_memory_is_not_counted_again(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = (
        f"import os\nheld = bytearray({SIZE})\nheld[::4096] = b'x' * len(held[::4096])\n"
        # The spawned child opens the FIFO before its exec, and waits there for somebody who writes.
        f"os.posix_spawn('/bin/true', ['true'], {{}}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, {str(fifo)!r}, os.O_RDONLY, 0)])"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            child = _child_of(process)
            assert tree(child, {})[0] >= SIZE, "the kernel shows the parent's bytes for the child too"
            assert SIZE <= held_by_tree(process.pid) < 1.5 * SIZE
            assert SIZE <= tree(process.pid, {})[0] < 1.5 * SIZE
        finally:
            fifo.open("w").close()


def _child_of(process):
    while process.poll() is None:
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
            if children := file.read().split():
                return int(children[0])
        time.sleep(0.01)
    raise AssertionError("it ended before it had a child")
