"""A home's file: its header is compared to the bit, and a put that fails leaves it and its layout as they were."""

import pytest
import torch

from seqpart.device.device import Device
from seqpart.device.pages import PAGE, aligned
from seqpart.errors import CorruptFile
from seqpart.store.layout import Layout, TensorSpec
from seqpart.store.store import Store


def test_any_flipped_bit_of_a_home_s_header_is_named(tmp_path):
    """A longer header length, another end of a tensor or a changed word of metadata was taken for the file we wrote."""
    store = Store(tmp_path, Device())
    layout = Layout.of([TensorSpec(name="w", shape=(8,), dtype=torch.float32)])
    flat = aligned(layout.nbytes)
    flat.zero_()
    store.put("home", layout, flat)
    path = store.path("home")
    whole = path.read_bytes()
    for bit in [*range(8 * 200), 8 * PAGE - 1]:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(CorruptFile, match=r"home.*\.safetensors"):
            store.get("home", flat)
    store.close()


def test_a_file_cut_off_in_its_header_is_not_judged_by_an_earlier_one(tmp_path):
    """The header was read into a reused buffer and compared whole, so an empty file passed as the one read before."""
    store = Store(tmp_path, Device())
    layout = Layout.of([])
    store.put("home", layout, aligned(0))
    store.path("home").write_bytes(b"")
    with pytest.raises(CorruptFile, match=r"home.*\.safetensors"):
        store.get("home", aligned(0))
    store.close()


def test_a_put_that_fails_leaves_the_old_home_readable_under_its_old_layout(tmp_path, monkeypatch):
    """The home took the new layout before its bytes were written, so after a full disk the good old file looked damaged."""
    store = Store(tmp_path, Device())
    small, large = (Layout.of([TensorSpec(name="w", shape=(n,), dtype=torch.float32)]) for n in (4, 8))
    flat = aligned(large.nbytes)
    small.views(flat)["w"].fill_(3)
    store.put("home", small, flat)

    def broken(*_):
        raise MemoryError

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr("seqpart.store.tensor_file.encode_header", broken)
        store.put("home", large, flat)
    back = aligned(small.nbytes)
    store.get("home", back)
    assert small.views(back)["w"].tolist() == [3, 3, 3, 3]
    store.close()
