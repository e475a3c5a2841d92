"""Rows of a boundary: written once in order, read by chunks, equal to the bit, damage named with its rows."""

import errno
import json
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from seqpart.device.device import Device
from seqpart.device.pages import PAGE, aligned
from seqpart.errors import CorruptFile, DiskFull
from seqpart.store import row_file
from seqpart.store.host_pool import HostPool, OwnMemory
from seqpart.store.row_file import RowLayout, Rows

LAYOUTS = {
    "fp32, padded": RowLayout((3, 5), torch.float32),
    "fp32, stride is the row": RowLayout((16,), torch.float32),
    "bf16, padded": RowLayout((7,), torch.bfloat16),
    "bf16, stride is the row": RowLayout((32,), torch.bfloat16),
    "large rows": RowLayout((1025,), torch.float32),
    "one number": RowLayout((), torch.float32),
    "bytes": RowLayout((3, 4, 4), torch.uint8),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Few rows make several chunks; the arithmetic is the same as for a megabyte."""
    monkeypatch.setattr(row_file, "CHUNK", 2 * PAGE)


def values(layout, count):
    return torch.randint(0, 200, (count, *layout.shape)).to(layout.dtype)


def written(tmp_path, layout, data, batch=7, host_pool=None):
    rows = Rows(layout, len(data), tmp_path / "rows.safetensors", Device(), host_pool)
    for part in data.split(batch):
        rows.append(part)
    rows.finish()
    return rows


def read(rows):
    """All rows, chunk by chunk."""
    layout, parts = rows.layout, []
    for chunk in range(rows.chunks):
        flat = aligned(layout.chunk_bytes)
        rows.read_chunk(chunk, flat)
        whole = flat[: rows.rows_in(chunk) * layout.stride].view(-1, layout.stride)
        parts.append(whole[:, : layout.nbytes].contiguous().view(layout.dtype).view(-1, *layout.shape))
    return torch.cat(parts)


@given(
    st.lists(st.integers(1, 40), max_size=3).map(tuple),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.uint8]),
    st.integers(1, 10**6),
)
def test_chunks_are_whole_pages_of_whole_rows(shape, dtype, count):
    layout = RowLayout(shape, dtype)
    assert layout.nbytes <= layout.stride < layout.nbytes + (512 if layout.nbytes >= PAGE else 64)
    assert layout.stride % layout.dtype.itemsize == 0
    assert layout.chunk_bytes == layout.chunk_rows * layout.stride
    assert layout.chunk_bytes % PAGE == 0
    assert count * layout.stride <= layout.home_bytes(count) < count * layout.stride + PAGE


@layouts
@pytest.mark.parametrize("whole_chunks", [True, False])
@pytest.mark.parametrize("tier", ["disk", "ram"])
def test_rows_come_back_as_they_went(tmp_path, layout, whole_chunks, tier):
    data = values(layout, 3 * layout.chunk_rows - (0 if whole_chunks else 1))
    rows = written(tmp_path, layout, data, host_pool=HostPool(1 << 22, Device()) if tier == "ram" else None)
    assert rows.tier == tier
    assert torch.equal(read(rows), data)
    rows.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("batch", [1, 13, 1000])
def test_rows_may_come_in_batches_of_any_size(tmp_path, batch):
    layout = LAYOUTS["fp32, padded"]
    data = values(layout, 2 * layout.chunk_rows + 5)
    rows = written(tmp_path, layout, data, batch)
    assert torch.equal(read(rows), data)
    rows.discard()


def test_any_chunk_can_be_read_at_any_time(tmp_path):
    layout = LAYOUTS["fp32, stride is the row"]
    data = values(layout, 4 * layout.chunk_rows - 1)
    rows = written(tmp_path, layout, data)
    for chunk in (3, 0, 2, 2, 1):
        flat = aligned(layout.chunk_bytes)
        rows.read_chunk(chunk, flat)
        start = chunk * layout.chunk_rows
        expected = data[start : start + layout.chunk_rows]
        found = flat[: len(expected) * layout.stride].view(torch.float32).view(-1, 16)
        assert torch.equal(found, expected)
    rows.discard()


@layouts
def test_the_file_is_one_that_the_safetensors_library_reads(tmp_path, layout):
    data = values(layout, layout.chunk_rows + 3)
    rows = written(tmp_path, layout, data)
    found = load_file(rows.path)["rows"]
    width = data[0].numel()
    assert found.dtype == layout.dtype
    assert torch.equal(found[:, :width].reshape(data.shape), data)
    assert not found[:, width:].any(), "padding is zero"
    with safe_open(rows.path, "pt") as file:
        assert file.metadata()["row shape"] == ",".join(map(str, layout.shape))
    rows.discard()


def test_rows_are_cast_to_the_type_of_their_home(tmp_path):
    layout = RowLayout((6,), torch.bfloat16)
    data = torch.randn(10, 6, requires_grad=True)
    rows = written(tmp_path, layout, data)
    assert torch.equal(read(rows), data.detach().to(torch.bfloat16))
    rows.discard()


def test_the_file_ends_with_the_last_row_and_traffic_is_counted(tmp_path):
    layout = LAYOUTS["fp32, padded"]
    count = 2 * layout.chunk_rows + 1
    rows = written(tmp_path, layout, values(layout, count))
    assert rows.path.stat().st_size == PAGE + count * layout.stride
    assert rows.bytes_written == count * layout.stride
    read(rows)
    assert rows.bytes_read == count * layout.stride
    rows.discard()


def test_a_flipped_bit_is_named_with_the_rows_that_it_spoils(tmp_path):
    layout = LAYOUTS["fp32, padded"]
    rows = written(tmp_path, layout, values(layout, 3 * layout.chunk_rows))
    data = bytearray(rows.path.read_bytes())
    data[PAGE + layout.chunk_bytes + 5] ^= 4
    rows.path.write_bytes(data)
    flat = aligned(layout.chunk_bytes)
    rows.read_chunk(0, flat)
    with pytest.raises(CorruptFile, match=rf"rows\.safetensors is damaged in its rows from {layout.chunk_rows} on"):
        rows.read_chunk(1, flat)
    rows.read_chunk(2, flat)
    rows.discard()


def test_a_row_file_cut_short_is_named(tmp_path):
    layout = LAYOUTS["fp32, padded"]
    rows = written(tmp_path, layout, values(layout, 2 * layout.chunk_rows))
    os.truncate(rows.path, PAGE + layout.chunk_bytes + 1)
    flat = aligned(layout.chunk_bytes)
    rows.read_chunk(0, flat)
    with pytest.raises(CorruptFile, match=r"rows\.safetensors is shorter than it was written"):
        rows.read_chunk(1, flat)
    rows.discard()


def test_a_deleted_row_file_is_still_read_because_it_is_held_open(tmp_path):
    layout = LAYOUTS["fp32, padded"]
    data = values(layout, layout.chunk_rows + 1)
    rows = written(tmp_path, layout, data)
    rows.path.unlink()
    assert torch.equal(read(rows), data)
    rows.discard()


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    layout = LAYOUTS["fp32, padded"]
    rows = Rows(layout, layout.chunk_rows, tmp_path / "rows.safetensors", Device(), None)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(DiskFull, match=r"rows\.safetensors"):
        rows.append(values(layout, layout.chunk_rows))
    rows.discard()
    assert list(tmp_path.iterdir()) == []


def test_rows_that_are_not_all_in_cannot_be_finished(tmp_path):
    layout = LAYOUTS["fp32, padded"]
    rows = Rows(layout, 3, tmp_path / "rows.safetensors", Device(), None)
    rows.append(values(layout, 2))
    with pytest.raises(AssertionError, match="0 of 1 chunks were written"):
        rows.finish()
    rows.discard()


def test_discarded_rows_give_their_host_memory_back(tmp_path):
    layout = LAYOUTS["fp32, padded"]
    data = values(layout, layout.chunk_rows)
    host_pool = HostPool(layout.home_bytes(len(data)), Device())
    first = written(tmp_path, layout, data, host_pool=host_pool)
    second = written(tmp_path, layout, data, host_pool=host_pool)
    assert (first.tier, second.tier) == ("ram", "disk")
    first.discard()
    assert written(tmp_path, layout, data, host_pool=host_pool).tier == "ram"
    second.discard()


@layouts
@pytest.mark.parametrize("tiers", [(0, 0), (0, 1 << 22), (1 << 22, 0), (1 << 22, 1 << 22)], ids=str)
def test_another_process_adopts_rows_in_any_tier(tmp_path, layout, tiers):
    data = values(layout, 2 * layout.chunk_rows + 1)
    arenas = [HostPool(budget, Device()) if budget else None for budget in tiers]
    described = written(tmp_path, layout, data, host_pool=arenas[0]).persist()
    rows = Rows.adopt(json.loads(json.dumps(described)), tmp_path, Device(), arenas[1])
    assert (rows.tier, rows.layout, rows.count) == ("ram" if tiers[1] else "disk", layout, len(data))
    rows.verify()
    assert torch.equal(read(rows), data)
    assert rows.persist() == described, "nothing is written again"
    rows.discard()
    assert list(tmp_path.iterdir()) == []


@layouts
def test_rows_that_leave_memory_are_read_from_the_disk(tmp_path, layout):
    data = values(layout, 2 * layout.chunk_rows + 1)
    rows = written(tmp_path, layout, data, host_pool=OwnMemory())
    assert list(tmp_path.iterdir()) == []
    rows.leave_memory()
    assert (rows.tier, rows.in_memory) == ("disk", None)
    rows.verify()
    assert torch.equal(read(rows), data)
    rows.discard()
    assert list(tmp_path.iterdir()) == []


def test_rows_of_host_memory_that_find_the_disk_full_leave_no_file(tmp_path, monkeypatch):
    layout = LAYOUTS["fp32, padded"]
    rows = written(tmp_path, layout, values(layout, 9), host_pool=HostPool(1 << 20, Device()))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(DiskFull):
        patched.setattr(os, "pwritev", full)
        rows.persist()
    assert list(tmp_path.iterdir()) == []
    assert len(rows.persist()["digest"]) == 16


def test_rows_that_are_not_finished_cannot_be_persisted(tmp_path):
    rows = Rows(LAYOUTS["bytes"], 3, tmp_path / "rows.safetensors", Device(), None)
    with pytest.raises(AssertionError, match="not all written"):
        rows.persist()
    rows.discard()


def test_more_rows_than_announced_are_refused(tmp_path):
    """Rows beyond the last chunk had no room, so append waited for it in an endless loop."""
    rows = Rows(RowLayout((2,), torch.float32), 3, tmp_path / "rows.safetensors", Device(), None)
    rows.append(torch.zeros(2, 2))
    with pytest.raises(AssertionError, match="4 rows came, 3 were expected"):
        rows.append(torch.zeros(2, 2))
    rows.discard()
