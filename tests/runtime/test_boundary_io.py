"""What a boundary exchange holds comes back as it was: values, strides and type, however often its place is used again."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpart.device.device import Device
from seqpart.device.opening import open_device
from seqpart.device.pages import round_up
from seqpart.errors import StoreError
from seqpart.plan.problem import BUFFERS, exchange_bytes
from seqpart.runtime.boundary_io import InHost, OnDevice, OnDisk

LARGEST = 3 << 12
ROOM = 1 << 20
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
KEYS = [(p, m) for p in (-2, -1, 1, 2, 3) for m in range(3)]


def on_device(folder):
    return OnDevice()


def in_host(folder):
    return InHost(torch.zeros(ROOM, dtype=torch.uint8), {}, Device())


def on_disk(folder):
    return OnDisk(folder / "relay.part", LARGEST, Device())


boundary_tiers = pytest.mark.parametrize("make", [on_device, in_host, on_disk])


def dense(shape):
    return lambda flat: flat[: torch.Size(shape).numel()].view(shape)


FORMS = {
    "row after row": dense((5, 7)),
    "column after column": lambda flat: flat[:35].view(7, 5).T,
    "channels last": lambda flat: flat[:96].view(2, 4, 4, 3).permute(0, 3, 1, 2),
    "a part of rows": lambda flat: flat[:60].view(6, 10)[:, 3:7],
    "a part in the middle": lambda flat: flat[:60].view(6, 10)[2:4],
    "every second": lambda flat: flat[:40].view(4, 10)[::2, 1::2],
    "one row for all": lambda flat: flat[3:8].expand(4, 5),
    "one number for all": lambda flat: flat[9].expand(3, 3),
    "a scalar": lambda flat: flat[11],
    "nothing": dense((0, 4)),
    "one of one": dense((1, 1, 1)),
    "the largest": lambda flat: flat[: LARGEST // flat.element_size()],
}


def tensor_of(form, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return FORMS[form](torch.randint(0, 2 if dtype is torch.bool else 200, (LARGEST,), generator=generator).to(dtype))


def assert_same(found, expected):
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert torch.equal(found, expected)
    assert not found.requires_grad


puts = st.tuples(st.just("put"), st.sampled_from(KEYS), st.sampled_from(sorted(FORMS)), st.sampled_from(DTYPES))
others = st.tuples(st.sampled_from(["get", "get", "take", "forget"]), st.sampled_from(KEYS))


@boundary_tiers
@given(moves=st.lists(st.one_of(puts, others), max_size=60))
def test_a_relay_is_a_dict_of_tensors(make, moves, tmp_path_factory):
    exchange, model, taken = make(tmp_path_factory.mktemp("exchange")), {}, []
    for number, (verb, key, *what) in enumerate(moves):
        if verb == "put":
            model[key] = tensor_of(*what, seed=number)
            exchange.put(key, model[key].clone() if what[0] == "row after row" else model[key])
        elif verb == "forget":
            exchange.forget(key)
            model.pop(key, None)
        elif key in model and verb == "take":
            taken.append((exchange.take(key), model.pop(key)))
        elif key in model:
            assert_same(exchange.get(key), model[key])
    for found, expected in taken:  # they are the caller's: what came later did not touch them
        assert_same(found, expected)
    for key, expected in model.items():
        assert_same(exchange.get(key), expected)
    exchange.close()


@boundary_tiers
@pytest.mark.parametrize("form", FORMS)
def test_any_form_comes_back_twice_and_then_to_keep(form, make, tmp_path):
    exchange = make(tmp_path)
    for dtype in DTYPES:
        expected = tensor_of(form, dtype, seed=1)
        exchange.put((1, 0), expected)
        for found in (exchange.get((1, 0)), exchange.get((1, 0)), exchange.take((1, 0))):
            assert_same(found, expected)
    exchange.close()


@boundary_tiers
def test_a_column_for_all_columns_comes_back(make, tmp_path):
    exchange = make(tmp_path)
    expected = tensor_of("a part of rows", torch.float32, seed=1)[:, :1].expand(6, 3)
    exchange.put((1, 0), expected)
    assert_same(exchange.get((1, 0)), expected)


@boundary_tiers
def test_what_is_put_carries_no_graph(make, tmp_path):
    exchange, x = make(tmp_path), torch.ones(3, requires_grad=True)
    exchange.put((1, 0), x * 2)
    assert_same(exchange.get((1, 0)), torch.full((3,), 2.0))
    exchange.close()


def test_in_host_and_on_disk_what_is_put_may_change_afterwards(tmp_path):
    for exchange in (in_host(tmp_path), on_disk(tmp_path)):
        x = torch.ones(4)
        exchange.put((1, 0), x)
        x.zero_()
        assert_same(exchange.take((1, 0)), torch.ones(4))
        exchange.close()


def test_on_device_a_small_part_does_not_keep_the_whole_alive():
    exchange, whole = OnDevice(), torch.arange(1 << 16)
    for part in (whole[5:9], whole.view(256, 256)[:, 1]):
        exchange.put((1, 0), part)
        _, kept = exchange._held[1, 0]
        assert kept.untyped_storage().nbytes() == part.nbytes


def test_a_strided_value_leaves_an_accelerator_after_it_was_made_dense():
    """The copy out once waited for an event before the kernel that made it dense, and took whatever lay there."""
    for seed in range(4):
        device = open_device(f"sim:rtx3060-12gb@{seed}")
        with device.at_work():
            exchange = InHost(device.host(ROOM), {}, device)
            x = torch.arange(40.0, device=device.torch).view(4, 10)
            exchange.put((1, 0), x[::2, 1::2])
            assert torch.equal(device.download(exchange.get((1, 0))), torch.arange(40.0).view(4, 10)[::2, 1::2])


def test_a_gradient_takes_the_place_of_its_activation(tmp_path):
    exchange = on_disk(tmp_path)
    for update in range(4):
        for key in KEYS:
            exchange.put(key, torch.full((8,), float(update)))
        for key in KEYS:
            exchange.put(key, exchange.get(key) + 0.5)
        for key in KEYS:
            assert_same(exchange.take(key), torch.full((8,), update + 0.5))
    assert (tmp_path / "relay.part").stat().st_size == len(KEYS) << 12
    exchange.close()


def test_more_keys_than_buffers_wait_on_disk_and_come_back_in_any_order(tmp_path):
    exchange, count = on_disk(tmp_path), 4 * BUFFERS
    expected = {(1, m): torch.full((LARGEST // 4,), float(m)) for m in range(count)}
    for key, tensor in expected.items():
        exchange.put(key, tensor)
    for m in (*range(count), *reversed(range(count)), *range(0, count, 5)):
        assert_same(exchange.get((1, m)), expected[1, m])
    exchange.close()


@boundary_tiers
def test_what_was_got_stays_what_it_is_however_much_more_comes(make, tmp_path):
    """A step may need more values than the disk has buffers, and `get` gave the buffer itself: their values were mixed up."""
    exchange = make(tmp_path)
    values = {(n, 0): torch.full((LARGEST // 4,), float(n)) for n in range(4 * BUFFERS)}
    for key, tensor in values.items():
        exchange.put(key, tensor)
    found = {key: exchange.get(key) for key in values}
    exchange.put((99, 0), torch.zeros(LARGEST // 4))
    for key, tensor in values.items():
        assert_same(found[key], tensor)
    exchange.close()


def test_the_disk_relay_takes_the_memory_that_is_planned_and_leaves_no_file(tmp_path):
    exchange = on_disk(tmp_path)
    assert sum(buffer.untyped_storage().nbytes() for buffer in exchange._file.buffers) == exchange_bytes(LARGEST)
    exchange.put((1, 0), torch.ones(3))
    exchange.close()
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_grows_stays_within_the_room_for_a_whole_micro_batch():
    """An update may begin with its smallest micro-batch: the place was made for that one, and a second one for the next."""
    x = torch.arange(3000.0)
    room = round_up(x.nbytes)
    exchange = InHost(torch.zeros(room, dtype=torch.uint8), {1: room}, Device())
    exchange.put((1, 0), x[:500].clone())
    exchange.put((1, 0), x)
    assert_same(exchange.take((1, 0)), x)


def test_a_write_that_failed_is_told_by_the_next_use_of_its_buffer(tmp_path, monkeypatch):
    exchange = on_disk(tmp_path)

    def fail(memory, offset):
        raise StoreError("the disk is gone")

    monkeypatch.setattr(exchange._file._file, "write_from", fail)
    exchange.put((1, 0), torch.ones(3))
    with pytest.raises(StoreError, match="the disk is gone"):
        exchange.take((1, 0))
    assert Path(tmp_path / "relay.part").exists()
    exchange.close()
