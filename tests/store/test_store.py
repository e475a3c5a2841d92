"""Homes: what was put is what is got, from every tier; a damaged or torn file is named and never used."""

import errno
import os
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from seqpart.device.device import Device
from seqpart.device.pages import PAGE, aligned, bytes_of
from seqpart.errors import CorruptFile, DiskFull, StoreError
from seqpart.store import tensor_file as homefile
from seqpart.store.host_pool import HostPool
from seqpart.store.layout import Layout, TensorSpec, spec_of
from seqpart.store.store import Store, _widen
from tests.store.test_direct import largest_file


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path, Device())
    yield made
    made.close()


def tensors_of_a_block():
    return {
        "weight": torch.randn(33, 70),
        "half": torch.randn(7, 3).to(torch.bfloat16),
        "steps": torch.tensor(12),
        "mask": torch.rand(5) > 0.5,
        "nothing": torch.zeros(0, 4),
    }


def flat_of(tensors):
    layout = Layout.of(spec_of(name, tensor) for name, tensor in tensors.items())
    flat = aligned(layout.nbytes)
    for name, view in layout.views(flat).items():
        view.copy_(tensors[name])
    return layout, flat


def noise(numbers):
    return flat_of({"w": torch.randn(numbers)})


def got(store, name):
    layout = store.layout(name)
    flat = aligned(layout.nbytes)
    store.get(name, flat)
    return layout.views(flat)


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def read(path):
    """By the library that everybody has, without what fills the places between tensors."""
    return {name: tensor for name, tensor in load_file(path).items() if not name.startswith("seqpart.filler.")}


def flip(path, byte, bit=0):
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("budget", [0, 1 << 20], ids=["disk", "ram"])
def test_every_tier_gives_back_the_same_bytes(tmp_path, budget):
    store = Store(tmp_path, Device(), HostPool(budget, Device()) if budget else None)
    tensors = tensors_of_a_block()
    store.put("home", *flat_of(tensors))
    assert "home" in store
    assert store.tier("home") == ("ram" if budget else "disk")
    assert (store.path("home") is None) == bool(budget)
    assert same(got(store, "home"), tensors)
    store.close()


@pytest.mark.parametrize("budget", [0, 1 << 20], ids=["disk", "ram"])
def test_a_home_that_is_written_and_read_tensor_by_tensor_is_the_same_home(tmp_path, budget):
    """As `ist` cuts and joins them: what fills the places between tensors is nobody's affair there."""
    store = Store(tmp_path, Device(), HostPool(budget, Device()) if budget else None)
    tensors = tensors_of_a_block()
    layout, flat = flat_of(tensors)
    assert layout.gaps
    with store.sink("home", layout, PAGE) as sink:
        for spec in layout.specs:
            data = bytes_of(flat)[spec.offset : spec.offset + spec.nbytes]
            sink.append(data[: len(data) // 2])
            sink.append(data[len(data) // 2 :])
    assert same(got(store, "home"), tensors)
    source = store.source("home", PAGE)
    for spec in layout.specs:
        found = bytearray(spec.nbytes)
        source.fill(memoryview(found))
        assert found == bytes(bytes_of(flat)[spec.offset : spec.offset + spec.nbytes])
    source.close()
    store.close()


def test_homes_of_an_earlier_version_are_laid_anew(store, tmp_path):
    """They had their tensors one right behind the other."""
    tensors = tensors_of_a_block()
    layout, offset, specs = flat_of(tensors)[0], 0, []
    for spec in layout.specs:
        specs.append(replace(spec, offset=offset))
        offset += spec.nbytes
    packed = Layout(tuple(specs))
    flat = aligned(packed.nbytes)
    for spec, view in zip(specs, packed.views(flat).values(), strict=True):
        view.copy_(tensors[spec.name])
    store.put("home", packed, flat)
    store.lay_anew({"home": layout, "not there": layout})
    assert store.layout("home") == layout and same(got(store, "home"), tensors)
    store.lay_anew({"home": noise(9)[0]})
    assert same(got(store, "home"), tensors), "one that holds other tensors is not touched"


def test_a_full_arena_sends_the_next_home_to_the_disk(tmp_path):
    store = Store(tmp_path, Device(), HostPool(PAGE, Device()))
    for name in ("first", "second"):
        store.put(name, *flat_of({"w": torch.full((9,), float(len(name)))}))
    assert [store.tier(name) for name in ("first", "second")] == ["ram", "disk"]
    assert [got(store, name)["w"][0].item() for name in ("first", "second")] == [5, 6]
    store.discard("first")
    store.put("third", *noise(9))
    assert store.tier("third") == "ram"
    store.close()


def test_a_home_is_a_file_that_the_safetensors_library_reads(store):
    tensors = tensors_of_a_block()
    store.put("home", *flat_of(tensors))
    path = store.path("home")
    assert same(read(path), tensors)
    with safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_data_starts_on_a_page_and_the_file_ends_with_the_last_tensor(store):
    layout, flat = noise(1000)
    store.put("home", layout, flat)
    size = store.path("home").stat().st_size
    assert (size - layout.nbytes) % PAGE == 0
    assert store.traffic.bytes_written == layout.nbytes, "the header is not traffic"
    got(store, "home")
    assert store.traffic.bytes_read == layout.nbytes


def test_long_homes_are_moved_by_several_requests(store, monkeypatch):
    monkeypatch.setattr(homefile, "REQUEST", 2 * PAGE)
    tensors = {"w": torch.randn(5 * PAGE // 2 + 1)}
    store.put("home", *flat_of(tensors))
    assert same(got(store, "home"), tensors)
    flip(store.path("home"), store.path("home").stat().st_size - 1)
    with pytest.raises(CorruptFile, match="is damaged"):
        got(store, "home")


def test_each_put_replaces_the_one_before_whatever_its_size(store, tmp_path):
    for number, size in enumerate((5, 5000, 1, 0, 3000)):
        store.put("home", *flat_of({"w": torch.full((size,), float(number))}))
        assert got(store, "home")["w"].tolist() == [number] * size
        assert load_file(store.path("home"))["w"].tolist() == [number] * size
    store.discard("home")
    assert list(tmp_path.iterdir()) == []


def test_many_homes_go_and_come_together(store):
    flats = {f"home-{n}": noise(100 + n) for n in range(9)}
    store.begin_put(((name, layout, flat) for name, (layout, flat) in flats.items()), lambda: None).wait()
    back = {name: aligned(layout.nbytes) for name, (layout, _) in flats.items()}
    store.get_all(back.items())
    for name, (layout, flat) in flats.items():
        assert torch.equal(back[name][: layout.nbytes], flat[: layout.nbytes])


def test_an_error_of_one_home_among_many_is_raised(store):
    names = [f"home-{n}" for n in range(5)]
    store.begin_put(((name, *noise(9)) for name in names), lambda: None).wait()
    store.path("home-3").unlink()
    with pytest.raises(CorruptFile, match=r"home-3.*\.safetensors is missing"):
        store.get_all((name, aligned(36)) for name in names)


def test_a_discarded_home_is_gone_from_the_disk_and_twice_is_no_error(store, tmp_path):
    store.put("home", *noise(9))
    store.discard("home")
    store.discard("home")
    assert "home" not in store
    assert list(tmp_path.iterdir()) == []


def test_a_torn_file_is_named_and_never_used(store):
    layout, flat = noise(3000)
    store.put("home", layout, flat)
    path = store.path("home")
    whole = path.read_bytes()
    for length in (len(whole) - 1, len(whole) - PAGE, PAGE + 1, PAGE):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptFile, match=r"home.*\.safetensors is shorter than it was written"):
            store.get("home", flat)
    for length in (PAGE - 1, 8, 1, 0):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptFile, match=r"home.*\.safetensors"):
            store.get("home", flat)


@pytest.mark.parametrize("byte", [PAGE, PAGE + 1234, -1])
def test_a_flipped_bit_of_the_data_is_named(store, byte):
    store.put("home", *noise(3000))
    flip(store.path("home"), byte)
    with pytest.raises(CorruptFile, match=r"home.*\.safetensors is damaged: its checksum is not the one that was written"):
        got(store, "home")


@pytest.mark.parametrize("byte", [0, 3, 20, 60, PAGE - 1])
def test_a_flipped_bit_of_the_header_is_named(store, byte):
    store.put("home", *noise(9))
    flip(store.path("home"), byte)
    with pytest.raises(CorruptFile, match=r"home.*\.safetensors"):
        got(store, "home")


def test_a_deleted_home_is_named(store):
    store.put("home", *noise(9))
    store.path("home").unlink()
    with pytest.raises(CorruptFile, match=r"home.*\.safetensors is missing"):
        got(store, "home")


def test_the_file_of_another_home_is_not_taken_for_this_one(store):
    for name in ("home", "other"):
        store.put(name, *noise(9))
    store.path("home").write_bytes(store.path("other").read_bytes())
    with pytest.raises(CorruptFile, match="is not the file that this run wrote"):
        got(store, "home")


def test_a_put_that_failed_can_be_tried_again(store, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    store.put("home", *noise(9))
    with monkeypatch.context() as patched, pytest.raises(DiskFull):
        patched.setattr(os, "pwritev", full)
        store.put("home", *noise(9))
    for _ in range(2):
        new = {"w": torch.randn(9)}
        store.put("home", *flat_of(new))
        assert same(got(store, "home"), new)


def test_a_put_of_before_the_mark_that_fails_after_it_is_not_made_good_by_a_rollback(store, monkeypatch):
    """The home that the rollback came back to was never written: a run was saved with the one before it."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    store.put("home", *noise(9))
    goes_on = threading.Event()
    late = store.begin_put([("home", *noise(9))], goes_on.wait)
    store.mark()
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", full)
        goes_on.set()
        late.settle()
    assert store.rollback()
    for refused in (store.persist, store.refuse_lost):
        with pytest.raises(DiskFull):
            refused()
    new = {"w": torch.randn(9)}
    store.put("home", *flat_of(new))
    store.persist()
    assert same(got(store, "home"), new)


def test_an_older_version_of_the_same_home_is_not_taken_for_the_new_one(store):
    store.put("home", *noise(9))
    old = store.path("home").read_bytes()
    store.put("home", *noise(9))
    store.path("home").write_bytes(old)
    with pytest.raises(CorruptFile, match="is not the file that this run wrote"):
        got(store, "home")


@pytest.mark.parametrize("call", [1, 2, 3])
def test_the_old_home_is_intact_when_a_put_fails_midway(store, tmp_path, monkeypatch, call):
    monkeypatch.setattr(homefile, "REQUEST", 2 * PAGE)
    old = {"w": torch.randn(4 * PAGE // 4)}
    store.put("home", *flat_of(old))
    real, calls = os.pwritev, []

    def filling_up(*arguments):
        calls.append(arguments)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    with monkeypatch.context() as patched, pytest.raises(DiskFull, match="Earlier files are untouched"):
        patched.setattr(os, "pwritev", filling_up)
        store.put("home", *noise(4 * PAGE // 4))
    assert len(calls) == call
    assert same(got(store, "home"), old)
    assert list(tmp_path.iterdir()) == [store.path("home")]


def test_a_home_that_could_not_be_put_is_not_there(store, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(DiskFull, match=r"home.*\.safetensors"):
        store.put("home", *noise(9))
    assert "home" not in store
    assert list(tmp_path.iterdir()) == []


def test_a_real_limit_on_the_disk_leaves_the_old_home(tmp_path):
    """RLIMIT_FSIZE stops the second put in the middle of its data."""
    store = Store(tmp_path, Device())
    small, large = (Layout.of([TensorSpec(name="w", shape=(n,), dtype=torch.uint8)]) for n in (4096, 65536))
    store.put("home", small, aligned(4096).fill_(7))
    with largest_file(16384), pytest.raises(StoreError, match="ulimit -f"):
        store.put("home", large, aligned(65536).fill_(8))
    back = aligned(4096)
    store.get("home", back)
    assert (back == 7).all() and list(tmp_path.iterdir()) == [store.path("home")]
    store.close()


def test_a_file_system_without_direct_transfers_keeps_homes_too(tmp_path, monkeypatch):
    real = os.open

    def refusing(path, flags, *rest, **named):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)
    store, tensors = Store(tmp_path, Device()), tensors_of_a_block()
    store.put("home", *flat_of(tensors))
    assert same(got(store, "home"), tensors)
    store.close()


def test_a_block_without_tensors_has_an_empty_home(store):
    layout = Layout.of([])
    store.put("home", layout, aligned(0))
    store.get("home", aligned(0))
    assert load_file(store.path("home")) == {}


def test_names_and_layouts_of_a_home_are_those_that_were_put(store):
    layout = Layout.of([TensorSpec(name="block.weight", shape=(2, 3), dtype=torch.float32)])
    store.put("home", layout, aligned(layout.nbytes).zero_())
    assert store.layout("home") == layout
    assert "other" not in store


def put_unsealed(store, name, content):
    store.begin_put([(name, *content)], lambda: None, checksummed=False).wait()


def test_a_home_without_a_checksum_is_the_same_file_otherwise(store):
    tensors = tensors_of_a_block()
    put_unsealed(store, "home", flat_of(tensors))
    assert same(read(store.path("home")), tensors)
    assert same(got(store, "home"), tensors)


def test_a_home_gets_its_checksum_when_a_checkpoint_is_to_name_it(store):
    tensors = tensors_of_a_block()
    put_unsealed(store, "home", flat_of(tensors))
    header = store.path("home").read_bytes()
    store.persist()
    checksummed = store.path("home").read_bytes()
    assert len(checksummed) == len(header) and checksummed != header
    assert same(got(store, "home"), tensors)
    flip(store.path("home"), len(checksummed) - 3)
    with pytest.raises(CorruptFile, match=r"home\.0\.safetensors is damaged"):
        got(store, "home")


def test_a_sealed_home_is_found_by_another_process_and_every_damage_of_it(tmp_path, store):
    put_unsealed(store, "home", noise(5000))
    described = store.persist()
    path = store.path("home")
    whole = path.read_bytes()
    for byte in (9, PAGE + 1, len(whole) - 1):
        flip(path, byte)
        other = Store(tmp_path, Device())
        with pytest.raises(CorruptFile, match=r"home\.0\.safetensors"):
            other.adopt(described)
            other.verify()
        other.close()
        path.write_bytes(whole)


def test_a_home_without_a_checksum_that_was_cut_off_or_exchanged_is_named(store):
    put_unsealed(store, "home", noise(5000))
    put_unsealed(store, "other", noise(4000))
    whole = store.path("home").read_bytes()
    store.path("home").write_bytes(whole[:-PAGE])
    with pytest.raises(CorruptFile, match="shorter than it was written"):
        got(store, "home")
    store.path("home").write_bytes(store.path("other").read_bytes() + bytes(PAGE))
    with pytest.raises(CorruptFile, match="its header differs"):
        got(store, "home")


def test_a_disk_that_fills_up_while_a_home_is_sealed_leaves_it_readable(store, monkeypatch):
    content = noise(5000)
    put_unsealed(store, "home", content)

    def full(fd, buffers, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(DiskFull):
            store.persist()
    assert torch.equal(got(store, "home")["w"], content[0].views(content[1])["w"])
    store.persist()


@given(count=st.integers(0, 5000))
def test_numbers_of_16_bits_are_widened_in_the_memory_that_they_end_in(count):
    narrow = torch.randn(count).bfloat16()
    flat = aligned(4 * count)[: 4 * count]
    flat[2 * count :].view(torch.bfloat16).copy_(narrow)
    done = _widen(flat)
    assert count - 128 <= done <= count
    assert torch.equal(flat.view(torch.float32)[:done], narrow[:done].float())


def test_a_copy_in_16_bits_is_brought_until_its_home_changes(tmp_path):
    tensors = {"norm": torch.rand(100), "weight": torch.randn(300, 7), "bias": torch.randn(7), "other": torch.randn(2, 999)}
    layout = Layout.of(spec_of(name, tensor) for name, tensor in tensors.items())
    narrow = Layout.of(spec_of(name, tensors[name].bfloat16()) for name in ("weight", "other"))
    store = Store(tmp_path, Device(), HostPool(1 << 20, Device()))
    store.reserve({"block": layout.nbytes, "block.narrow": narrow.nbytes})

    def brought(**how):
        into = aligned(layout.nbytes)
        store.begin_get([("block", into)], lambda: None, **how).wait()
        return {name: view.clone() for name, view in layout.views(into).items()}

    def put(factor):
        flat = aligned(layout.nbytes)
        for name, view in layout.views(flat).items():
            view.copy_(factor * tensors[name])
        store.put("block", layout, flat)

    def whole(found, factor):
        return {name for name, tensor in tensors.items() if torch.equal(found[name], factor * tensor)}

    put(1)
    assert whole(brought(narrow=True), 1) == set(tensors)  # there is no copy yet
    store.narrow("block", "block.narrow", narrow)
    found = brought(narrow=True)
    assert whole(found, 1) == {"norm", "bias"}
    assert all(torch.equal(found[name].bfloat16(), tensors[name].bfloat16()) for name in tensors)
    assert whole(brought(), 1) == set(tensors)
    put(2)
    assert whole(brought(narrow=True), 2) == set(tensors)
    assert set(store.persist()) == {"block"}
    store.close()
