"""The boundary cache: every row once, in an order that place decides, read ahead without losing an error."""

from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpart.data import reader as reading
from seqpart.data.boundary_cache import Boundaries
from seqpart.data.reader import RING, WINDOW, MemoryReader, Reader, ReaderThread, reader_bytes, windows
from seqpart.device.device import Device
from seqpart.device.pages import PAGE
from seqpart.errors import CorruptFile
from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.store import row_file
from seqpart.store.host_pool import HostPool, OwnMemory
from seqpart.store.row_file import RowLayout, Rows

KEY = (3, "order", 1, 2)
LAYOUTS = {
    "fp32, padded": RowLayout((5, 3), torch.float32),
    "fp32, stride is the row": RowLayout((16,), torch.float32),
    "bf16, padded": RowLayout((7,), torch.bfloat16),
    "bf16, stride is the row": RowLayout((32,), torch.bfloat16),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
COUNT = 1500
"""Rows of a test: more than one window of the small chunks below, and no multiple of anything."""


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(row_file, "CHUNK", PAGE)
    monkeypatch.setattr(reading, "WINDOW", 3)


@pytest.fixture
def pool():
    with closing(ReaderThread()) as threads:
        yield threads


def made(folder, layout, count=COUNT, host_pool=None):
    """`count` rows whose first number is the row's own, and their labels."""
    data = torch.randint(0, 100, (count, *layout.shape)).to(layout.dtype)
    rows = Rows(layout, count, folder / "rows.safetensors", Device(), host_pool)
    rows.append(data)
    rows.finish()
    return rows, data, torch.arange(count) * 7


def phase_of(rows=COUNT, batch=100, micro_batch=30, **others):
    given_too = {"kind": PhaseKind.TRAIN, "partition": 1, "epoch": 2, "shuffle": True} | others
    return Phase(rows=rows, batch=batch, micro_batch=micro_batch, **given_too)


def order_of(rows, phase, seed=3):
    key = (seed, "order", phase.partition, phase.epoch) if phase.shuffle else None
    return np.concatenate([window.rows for window in windows(rows.count, rows.layout.chunk_rows, key)])


def assert_read(reader, rows, data, labels, phase, first_update=0):
    """The reader gives exactly the rows and labels of the phase's order, span by span."""
    order = order_of(rows, phase)
    for m, span in phase.spans(first_update):
        batch = reader.take()
        expected = torch.from_numpy(order[span.start : span.stop])
        assert (batch.micro_batch, batch.span) == (m, span)
        assert torch.equal(batch.x, data[expected])
        assert torch.equal(batch.labels, labels[expected])
        reader.done(batch)


@given(st.integers(1, 400), st.integers(1, 12), st.booleans())
def test_a_pass_is_a_permutation_of_the_rows(count, chunk_rows, shuffle):
    passing = list(windows(count, chunk_rows, KEY if shuffle else None))
    order = np.concatenate([window.rows for window in passing])
    assert sorted(order) == list(range(count))
    if not shuffle:
        assert list(order) == list(range(count))


@given(st.integers(1, 400), st.integers(1, 12), st.booleans())
def test_a_window_lists_rows_of_its_own_chunks_where_they_lie(count, chunk_rows, shuffle):
    for window in windows(count, chunk_rows, KEY if shuffle else None):
        assert len(window.chunks) <= 3
        chunks = np.array(window.chunks)[window.order // chunk_rows]
        assert (chunks * chunk_rows + window.order % chunk_rows == window.rows).all()


@given(st.integers(2, 300), st.integers(1, 12))
def test_the_order_is_a_function_of_its_key_alone(count, chunk_rows):
    one, again = ([w.rows.tolist() for w in windows(count, chunk_rows, KEY)] for _ in range(2))
    assert one == again


def test_each_epoch_partition_and_seed_has_its_own_order():
    keys = [KEY, (4, "order", 1, 2), (3, "order", 0, 2), (3, "order", 1, 3)]
    orders = {tuple(np.concatenate([w.rows for w in windows(500, 10, key)])) for key in keys}
    assert len(orders) == len(keys)


def test_rows_that_fit_one_window_are_shuffled_among_themselves():
    (window,) = windows(30, 10, KEY)
    assert len(set(window.rows[:10] // 10)) == 3, "one chunk's rows alone lead the order"


@layouts
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("tier", ["disk", "ram"])
def test_a_reader_gives_exactly_the_rows_and_labels_in_order(tmp_path, pool, layout, shuffle, tier):
    rows, data, labels = made(tmp_path, layout, host_pool=HostPool(1 << 20, Device()) if tier == "ram" else None)
    assert rows.tier == tier
    phase = phase_of(shuffle=shuffle)
    reader = Reader(rows, labels, phase, Device(), pool, seed=3)
    assert_read(reader, rows, data, labels, phase)
    reader.close()
    rows.discard()


def test_padded_rows_larger_than_a_piece_are_read_as_they_are(tmp_path, pool, monkeypatch):
    monkeypatch.setattr(reading, "_PIECE", 59)
    rows, data, labels = made(tmp_path, LAYOUTS["fp32, padded"])
    phase = phase_of(shuffle=True)
    reader = Reader(rows, labels, phase, Device(), pool, seed=3)
    assert_read(reader, rows, data, labels, phase)
    reader.close()
    rows.discard()


@pytest.mark.parametrize(("batch", "micro_batch"), [(1500, 1500), (400, 400), (64, 7), (7, 64), (1, 1), (5000, 999)])
def test_micro_batches_need_not_divide_anything(tmp_path, pool, batch, micro_batch):
    count = 200 if batch == 1 else COUNT
    rows, data, labels = made(tmp_path, LAYOUTS["fp32, padded"], count)
    phase = phase_of(count, batch, micro_batch)
    reader = Reader(rows, labels, phase, Device(), pool, seed=3)
    assert_read(reader, rows, data, labels, phase)
    reader.close()
    rows.discard()


@layouts
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("batch", "micro_batch", "first_update"), [(100, 30, 0), (400, 400, 1), (64, 7, 3), (5000, 999, 0)])
def test_rows_in_memory_are_read_in_the_order_of_those_on_the_disk(tmp_path, layout, shuffle, batch, micro_batch, first_update):
    rows, data, labels = made(tmp_path, layout, host_pool=OwnMemory())
    assert not rows.path.exists()
    phase = phase_of(COUNT, batch, micro_batch, shuffle=shuffle)
    reader = MemoryReader(rows, labels, phase, seed=3, first_update=first_update)
    assert_read(reader, rows, data, labels, phase, first_update)
    taken = reader._batch.untyped_storage().nbytes()
    assert taken == reader_bytes(layout, COUNT, micro_batch, in_memory=True)
    reader.close()
    rows.discard()


@pytest.mark.parametrize("first_update", [1, 7, 14])
def test_a_reader_starts_at_a_later_update_with_the_rows_of_that_update(tmp_path, pool, first_update):
    rows, data, labels = made(tmp_path, LAYOUTS["fp32, padded"])
    phase = phase_of()
    reader = Reader(rows, labels, phase, Device(), pool, seed=3, first_update=first_update)
    assert_read(reader, rows, data, labels, phase, first_update)
    reader.close()
    rows.discard()


def test_a_reader_may_read_fewer_rows_than_there_are(tmp_path, pool):
    rows, data, labels = made(tmp_path, LAYOUTS["fp32, padded"])
    phase = phase_of(rows=COUNT // 2)
    reader = Reader(rows, labels, phase, Device(), pool, seed=3)
    assert_read(reader, rows, data, labels, phase)
    reader.close()
    rows.discard()


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_closing_early_frees_the_thread_for_the_next_reader(tmp_path, pool, taken):
    rows, data, labels = made(tmp_path, LAYOUTS["fp32, padded"])
    phase = phase_of()
    early = Reader(rows, labels, phase, Device(), pool, seed=3)
    for _ in range(taken):
        early.done(early.take())
    early.close()
    reader = Reader(rows, labels, phase, Device(), pool, seed=3)
    assert_read(reader, rows, data, labels, phase)
    reader.close()
    rows.discard()


def test_batches_that_are_not_given_back_stay_as_they_are(tmp_path, pool):
    rows, data, labels = made(tmp_path, LAYOUTS["fp32, padded"])
    phase = phase_of()
    reader = Reader(rows, labels, phase, Device(), pool, seed=3)
    order = order_of(rows, phase)
    held = [reader.take() for _ in range(RING)]
    for batch in held:
        assert torch.equal(batch.x, data[order[batch.span.start : batch.span.stop]])
    reader.close()
    rows.discard()


def test_a_reader_past_its_last_batch_says_so(tmp_path, pool):
    rows, _, labels = made(tmp_path, LAYOUTS["fp32, padded"], 10)
    reader = Reader(rows, labels, phase_of(10, 10, 10), Device(), pool, seed=3)
    reader.done(reader.take())
    with pytest.raises(AssertionError, match=r"\[train 1.2\] has no more batches"):
        reader.take()
    reader.close()
    rows.discard()


def test_damage_found_by_the_thread_is_raised_where_the_batch_is_taken(tmp_path, pool):
    rows, data, labels = made(tmp_path, LAYOUTS["fp32, padded"])
    damaged = bytearray(rows.path.read_bytes())
    damaged[-rows.layout.stride] ^= 1  # a row of the last chunk
    rows.path.write_bytes(damaged)
    phase = phase_of(shuffle=False)
    reader = Reader(rows, labels, phase, Device(), pool, seed=3)
    good = 0
    with pytest.raises(CorruptFile, match=r"rows\.safetensors is damaged in its rows from"):
        for m, span in phase.spans():
            batch = reader.take()
            assert torch.equal(batch.x, data[span.start : span.stop])
            reader.done(batch)
            good = m + 1
    assert good, "the batches before the damage are good"
    reader.close()
    rows.discard()


def test_any_error_of_the_thread_is_raised_where_the_batch_is_taken(tmp_path, pool, monkeypatch):
    rows, _, labels = made(tmp_path, LAYOUTS["fp32, padded"])

    def broken(*_):
        raise ValueError("no chunk today")

    monkeypatch.setattr(rows, "read_chunk", broken)
    reader = Reader(rows, labels, phase_of(), Device(), pool, seed=3)
    with pytest.raises(ValueError, match="no chunk today"):
        reader.take()
    reader.close()
    rows.discard()


@layouts
@pytest.mark.parametrize("count", [1, COUNT])
def test_a_reader_s_buffers_are_what_the_plan_counts(tmp_path, pool, layout, count):
    rows, _, labels = made(tmp_path, layout, count)
    phase = phase_of(count, 100, 30)
    reader = Reader(rows, labels, phase, Device(), pool, seed=3)
    taken = sum(flat.untyped_storage().nbytes() for flat in [reader._window, *reader._ring])
    assert taken <= reader_bytes(layout, count, 30)
    # The plan counts the pages that rows can touch, two more for each batch than its bytes fill.
    assert reader_bytes(layout, count, 30) <= taken + RING * 2 * PAGE
    reader.close()
    rows.discard()


def test_boundaries_have_a_file_each_and_leave_none(tmp_path):
    boundaries, layout = Boundaries(tmp_path, Device(), None), LAYOUTS["fp32, padded"]
    for split, partition in (("train", 0), ("test", 0), ("train", 1)):
        rows = boundaries.create(split, partition, layout, 3)
        rows.append(torch.zeros(3, *layout.shape))
        rows.finish()
    assert boundaries.rows("train", 1).path.name == "train-00001.2.safetensors"
    assert len(list(tmp_path.iterdir())) == 3
    boundaries.discard("train", 0)
    boundaries.discard("train", 0)
    assert len(list(tmp_path.iterdir())) == 2
    boundaries.close()
    assert list(tmp_path.iterdir()) == []


def test_rows_left_half_written_are_replaced(tmp_path):
    boundaries, layout = Boundaries(tmp_path, Device(), None), RowLayout((2,), torch.float32)
    boundaries.create("train", 0, layout, 30).append(torch.zeros(20, 2))
    rows = boundaries.create("train", 0, layout, 2)
    rows.append(torch.ones(2, 2))
    rows.finish()
    assert boundaries.rows("train", 0) is rows
    boundaries.close()


def test_rows_made_again_take_another_file_and_kept_ones_stay_until_they_are_let_go(tmp_path):
    boundaries, layout = Boundaries(tmp_path, Device(), None), RowLayout((2,), torch.float32)
    for _ in range(2):
        boundaries.create("train", 0, layout, 30).append(torch.zeros(30, 2))
        boundaries.rows("train", 0).finish()
    described = boundaries.persist()
    kept = {described["train-0"]["file"], described["train-0"]["sums"]}
    assert {path.name for path in tmp_path.iterdir()} == kept
    boundaries.keep(kept)
    boundaries.create("train", 0, layout, 30)
    assert len(list(tmp_path.iterdir())) == 3
    boundaries.close()
    assert {path.name for path in tmp_path.iterdir()} == kept
    boundaries.keep(())
    assert list(tmp_path.iterdir()) == []


def test_rows_created_after_others_were_adopted_take_no_file_of_theirs(tmp_path):
    first, layout = Boundaries(tmp_path, Device(), None), RowLayout((2,), torch.float32)
    for split in ("train", "test"):
        first.create(split, 11, layout, 3).append(torch.ones(3, 2))
        first.rows(split, 11).finish()
    described = first.persist()
    again = Boundaries(tmp_path, Device(), None)
    again.adopt(described)
    again.verify()
    assert again.rows("test", 11).path == first.rows("test", 11).path
    assert again.create("train", 0, layout, 3).path.name == "train-00000.2.safetensors"
    again.close()


def test_the_window_of_a_run_is_at_least_two_chunks():
    assert WINDOW > 1, "one chunk at a time would hardly shuffle"
