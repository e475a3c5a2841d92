"""A small run that saves after every update, here or in processes that are killed; it can say whether what it finds is whole.

As a program it imports once and then forks a run for each line of its input: `ROOT BUDGET DIE_AT UPDATES`. The run ends
itself, as a kill would, before its DIE_AT-th call that changes the disk (0: never), or after UPDATES updates.
"""

import os
import sys
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch

from seqpart.checkpoint.manifest import load, restore, save
from seqpart.data.boundary_cache import Boundaries
from seqpart.device.device import Device
from seqpart.device.pages import PAGE, aligned
from seqpart.store import row_file
from seqpart.store.host_pool import HostPool
from seqpart.store.layout import Layout, TensorSpec
from seqpart.store.row_file import RowLayout
from seqpart.store.scratch import has_checkpoint
from seqpart.store.store import Store

NAMES = ("block-0", "block-1", "block-1.optimizer")
LAYOUT = Layout.of([TensorSpec(name="w", shape=(1500,), dtype=torch.float32)])
ROWS = RowLayout((3,), torch.float32)
ROW_COUNT = 400
CHUNK = 4 * PAGE
"""Two chunks of rows."""
CALLS = ("pwritev", "ftruncate", "fsync", "replace", "unlink")


@contextmanager
def opened(root, budget=0):
    """The store and the boundaries of the run in `root`."""
    device = Device()
    host_pool = HostPool(budget, device) if budget else None
    for name in ("homes", "rows"):
        (root / name).mkdir(parents=True, exist_ok=True)
    store, boundaries = Store(root / "homes", device, host_pool), Boundaries(root / "rows", device, host_pool)
    try:
        yield store, boundaries
    finally:
        boundaries.close()
        store.close()


def fill(store, boundaries, number):
    """The state of update `number`: a home's values, one home that comes and goes, the rows of one boundary."""
    flat = aligned(LAYOUT.nbytes)
    LAYOUT.views(flat)["w"].fill_(number)
    present = [name for name in NAMES if name != "block-1.optimizer" or number % 3]
    store.begin_put(((name, LAYOUT, flat) for name in present), lambda: None).wait()
    if not number % 3:
        store.discard("block-1.optimizer")
    rows = boundaries.create("train", 1, ROWS, ROW_COUNT)
    rows.append(torch.full((ROW_COUNT, 3), float(number)))
    rows.finish()
    store.mark()


def is_whole(store, boundaries, number):
    """Whether everything is as update `number` left it."""
    flat = aligned(LAYOUT.nbytes)
    for name in NAMES:
        if (name in store) != (name != "block-1.optimizer" or bool(number % 3)):
            return False
        if name in store:
            store.get(name, flat)
            if not (LAYOUT.views(flat)["w"] == number).all():
                return False
    rows = boundaries.rows("train", 1)
    for chunk in range(rows.chunks):
        memory = aligned(ROWS.chunk_bytes)
        rows.read_chunk(chunk, memory)
        found = memory[: rows.rows_in(chunk) * ROWS.stride].view(-1, ROWS.stride)[:, :12].contiguous().view(torch.float32)
        if not (found == number).all():
            return False
    return True


def resumed(path, store, boundaries):
    """The number of the update that the checkpoint at `path` was saved after; all of it is there again."""
    manifest = load(path)
    restore(manifest, store, boundaries)
    assert is_whole(store, boundaries, manifest.state["number"])
    return manifest.state["number"]


def go_on(root, budget, updates):
    """Resume or begin, then save after each of so many updates."""
    with opened(root, budget) as (store, boundaries):
        last = resumed(root, store, boundaries) if has_checkpoint(root) else 0
        for number in range(last + 1, last + 1 + updates):
            fill(store, boundaries, number)
            save(root, root, {"number": number}, store, boundaries)


def die_at(call):
    """End this process before its `call`-th change of the disk."""
    numbers = count(1)

    def counted(real):
        def dying(*arguments, **named):
            if next(numbers) == call:
                os._exit(9)
            return real(*arguments, **named)

        return dying

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def serve():
    row_file.CHUNK = CHUNK
    for line in sys.stdin:
        root, budget, call, updates = line.split()
        child = os.fork()
        if not child:
            if int(call):
                die_at(int(call))
            go_on(Path(root), int(budget), int(updates))
            os._exit(0)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
