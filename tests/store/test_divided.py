"""Weights that two ranks divide are at home in one of them, and come to both."""

import queue

import pytest
import torch

from seqpart.device.device import Device
from seqpart.device.ranks import Ranks
from seqpart.errors import CorruptFile
from seqpart.store.divided import DividedStore
from seqpart.store.layout import Layout, TensorSpec
from seqpart.store.store import Store

LAYOUT = Layout.of([TensorSpec(name="weight", shape=(700,), dtype=torch.float32)])
OWNERS = {"one": 0, "two": 1}


class Wired(Ranks):
    """One of two ranks in a process."""

    count = 2

    def __init__(self, number, wires):
        self.number, self.wires = number, wires

    def spread(self, buffer, source):
        if source == self.number:
            self.wires[source].put(buffer.clone())
        else:
            buffer.copy_(self.wires[source].get(timeout=20))


@pytest.fixture
def stores(tmp_path):
    wires = [queue.Queue() for _ in range(2)]
    made = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        made.append(DividedStore(tmp_path / str(number), Device(), None, Wired(number, wires), OWNERS))
    yield made
    for store in made:
        store.close()


def numbers(start):
    flat = torch.zeros(LAYOUT.padded_nbytes, dtype=torch.uint8)
    LAYOUT.views(flat)["weight"].copy_(torch.arange(start, start + 700))
    return flat


def begun(store, name):
    flat = torch.zeros(LAYOUT.padded_nbytes, dtype=torch.uint8)
    return flat, store.begin_get([(name, flat)], lambda: None)


def test_each_rank_keeps_its_own_weights_and_both_load_all(stores):
    for start in (0, 5000):  # the second time other numbers
        for store in stores:
            items = [("one", LAYOUT, numbers(start)), ("two", LAYOUT, numbers(start + 1000)), ("state", LAYOUT, numbers(7))]
            store.begin_put(items, lambda: None).wait()
        assert [["one" in store, "two" in store, "state" in store] for store in stores] == [
            [True, False, True],
            [False, True, True],
        ]
        loaded = [(begun(store, "one"), begun(store, "two"), begun(store, "state")) for store in stores]
        for transfers in loaded:
            for (flat, transfer), expected in zip(transfers, (start, start + 1000, 7), strict=True):
                transfer.wait()
                assert torch.equal(LAYOUT.views(flat)["weight"], torch.arange(expected, expected + 700.0))
    assert all(store.traffic.bytes_read == 4 * LAYOUT.nbytes for store in stores), "weights once, and a state of each"


def test_a_home_that_cannot_be_read_is_not_followed_by_another_in_its_place(stores):
    """The other rank waits for the first home, and would take the bytes of the second for it."""
    first, _ = stores
    first._owners = dict.fromkeys(OWNERS, 0)
    first.begin_put([(name, LAYOUT, numbers(0)) for name in OWNERS], lambda: None).wait()
    first.path("one").write_bytes(b"")
    transfers = [begun(first, name)[1] for name in OWNERS]
    for transfer in transfers:
        with pytest.raises(CorruptFile, match=r"one\.0\.safetensors"):
            transfer.wait()
    assert first._ranks.wires[0].empty()


def test_one_process_alone_keeps_every_home(tmp_path):
    store = Store(tmp_path, Device())
    assert store.owns("one") and not store.divides
    store.close()
