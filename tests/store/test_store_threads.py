"""The store's threads: they give no range twice, bring no others with them, and hold on to nothing."""

import threading
import weakref
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from seqpart.device.device import Device
from seqpart.device.pages import PAGE, aligned
from seqpart.runtime.slots import at_once
from seqpart.store.host_pool import Extents, HostPool
from seqpart.store.layout import Layout, TensorSpec
from seqpart.store.row_file import RowLayout, Rows
from seqpart.store.store import Store


def test_two_threads_never_get_the_same_range_of_an_arena(monkeypatch):
    """The store's two threads place new homes at once; without a lock both could be given the same bytes."""
    entered, met, real = threading.Lock(), threading.Event(), Extents.take

    def take(self, nbytes):
        if not entered.acquire(blocking=False):
            met.set()
            return real(self, nbytes)
        met.wait(0.2)  # long enough for another thread to come in, if anything lets it
        entered.release()
        return real(self, nbytes)

    monkeypatch.setattr(Extents, "take", take)
    host_pool = HostPool(4 * PAGE, Device())
    threads = [threading.Thread(target=host_pool.take, args=(PAGE,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not met.is_set()


def test_copies_of_the_ram_tier_start_no_threads(tmp_path):
    """tensor.copy_ started an OpenMP team in the reader's and in each I/O thread; their stacks are charged to the limit."""
    device = Device()
    host_pool, flat = HostPool(8 << 20, device), aligned(1 << 20).zero_()
    layout = Layout.of([TensorSpec(name="w", shape=(1 << 18,), dtype=torch.float32)])
    store = Store(tmp_path, device, host_pool)
    rows = Rows(RowLayout((256,), torch.float32), 1024, tmp_path / "rows", device, host_pool)
    rows.append(torch.zeros(1024, 256))
    rows.finish()
    counts = []

    def work():
        counts.append(len(list(Path("/proc/self/task").iterdir())))
        store.put("home", layout, flat)
        store.get("home", flat)
        rows.read_chunk(0, flat)
        counts.append(len(list(Path("/proc/self/task").iterdir())))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert counts[0] == counts[1]
    store.close()


@pytest.mark.parametrize("way", ["home", "back"])
def test_a_thread_that_has_moved_a_partition_holds_none_of_it_any_more(way, tmp_path, monkeypatch):
    """A pool's thread forgets a job only after it has said that it is over. On a busy machine the next partition's slot was
    allocated in between, beside the previous one's, and the limit refused it: memory ran out in L1+, in one run of hundreds."""
    real, going_on = Future.set_result, threading.Event()

    def slow_to_forget(future, value):
        real(future, value)
        if threading.current_thread() is not threading.main_thread():
            going_on.wait()

    layout = Layout.of([TensorSpec(name="w", shape=(1 << 18,), dtype=torch.float32)])
    store, flat = Store(tmp_path, Device()), aligned(1 << 20).zero_()
    held = weakref.ref(flat)
    store.put("w", layout, flat)
    monkeypatch.setattr(Future, "set_result", slow_to_forget)
    items = [("w", layout, flat)] if way == "home" else [("w", flat)]
    move = store.begin_put if way == "home" else store.begin_get
    move(items, at_once).wait()
    del flat, items
    gone = held() is None
    going_on.set()
    store.close()
    assert gone
