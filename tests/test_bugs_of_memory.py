"""One test for each bug that there was in the figures of memory, with its story. Append only."""

import os
import subprocess
import sys
import time
from pathlib import Path

from seqpart.memory.usage import read_tree

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from watch import tree

SIZE = 64 << 20


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
            assert SIZE <= read_tree(process.pid).anon < 1.5 * SIZE
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
