"""Where tensors lie in one buffer, and the header that any safetensors reader understands."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from seqpart.device.pages import PAGE, aligned, bytes_of
from seqpart.errors import CorruptFile, ModelError
from seqpart.store.layout import ALIGNMENT, LINE, Layout, TensorSpec, decode_header, encode_header, header_size, spec_of

HOME = Path("home.safetensors")
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
spec_lists = st.lists(
    st.builds(
        TensorSpec,
        name=st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
        dtype=st.sampled_from(DTYPES),
    ),
    max_size=6,
    unique_by=lambda spec: spec.name,
)


@given(spec_lists, st.sampled_from([LINE, ALIGNMENT]))
def test_tensors_are_aligned_as_torch_s_own_and_what_lies_between_them_is_known(specs, alignment):
    """A matrix behind a scalar began on byte 4, and with one row its product had other last bits than a plain loop's. On a GPU
    cuBLASLt asks for alignments up to 256, which multiples of 64 have not."""
    assert ALIGNMENT % 256 == 0
    layout = Layout.of(specs, alignment)
    end, gaps = 0, dict(layout.gaps)
    for spec in layout.specs:
        end += gaps.pop(end, 0) if spec.nbytes else 0
        assert spec.offset == end
        assert spec.offset % (alignment if spec.shape and spec.nbytes else spec.dtype.itemsize) == 0
        end += spec.nbytes
    assert not gaps
    assert end == layout.nbytes <= layout.padded_nbytes
    assert layout.padded_nbytes % PAGE == 0
    assert {(s.name, s.shape, s.dtype) for s in layout.specs} == {(s.name, s.shape, s.dtype) for s in specs}


@given(spec_lists)
def test_views_are_the_buffer_itself_and_do_not_overlap(specs):
    layout = Layout.of(specs)
    flat = torch.zeros(layout.padded_nbytes, dtype=torch.uint8)
    views = layout.views(flat)
    for spec in layout.specs:
        assert (views[spec.name].shape, views[spec.name].dtype) == (spec.shape, spec.dtype)
    for number, spec in enumerate(layout.specs, start=1):
        # Bytes of one value, whatever the type; a bool may only be 0 or 1, and is not looked at here.
        flat[spec.offset : spec.offset + spec.nbytes] = number
        assert (flat == number).sum() == spec.nbytes


@given(spec_lists, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
def test_a_header_is_whole_pages_and_reads_back_the_same(specs, metadata):
    layout = Layout.of(specs)
    head = encode_header(layout.specs, metadata)
    assert len(head) % PAGE == 0
    assert header_size(head, HOME) == len(head)
    decoded, words = decode_header(head, HOME)
    assert words == metadata
    assert decoded.nbytes == layout.nbytes
    assert set(decoded.specs) == set(layout.specs)


def test_the_safetensors_library_reads_the_same_tensors():
    tensors = {f"t.{dtype}": torch.randint(0, 2, (3, 5)).to(dtype) for dtype in DTYPES} | {"scalar": torch.tensor(3.5)}
    layout = Layout.of(spec_of(name, tensor) for name, tensor in tensors.items())
    flat = aligned(layout.nbytes)
    for name, view in layout.views(flat).items():
        view.copy_(tensors[name])
    found = load(encode_header(layout.specs, {"format": "pt"}) + bytes(bytes_of(flat)[: layout.nbytes]))
    found = {name: tensor for name, tensor in found.items() if not name.startswith("seqpart.filler.")}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) and found[name].dtype == tensors[name].dtype for name in tensors)


def test_a_type_without_a_home_is_refused_by_name():
    with pytest.raises(ModelError, match=r"tensor 'phase' has type torch\.complex128"):
        Layout.of([spec_of("phase", torch.zeros(2, dtype=torch.complex128))])


@pytest.mark.parametrize("head", [b"", b"\0\0", bytes(8), (4089).to_bytes(8, "little"), b"\xff" * 8])
def test_a_length_that_seqpart_never_writes_is_named(head):
    with pytest.raises(CorruptFile, match=r"home\.safetensors is not a file that seqpart wrote whole"):
        decode_header(head, HOME)


def framed(text):
    return (PAGE - 8).to_bytes(8, "little") + text.encode().ljust(PAGE - 8)


@pytest.mark.parametrize(
    "entries",
    [
        [],
        "text",
        {"w": {}},
        {"w": {"dtype": "F32", "shape": [2]}},
        {"w": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]}},
        {"w": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F32", "shape": [2], "data_offsets": []}},
        {"w": {"dtype": "F32", "shape": [2], "data_offsets": [1e999, 8]}},
        {"__metadata__": 3},
    ],
)
def test_a_header_that_makes_no_sense_is_damage_and_not_a_crash(entries):
    with pytest.raises(CorruptFile, match="header is damaged"):
        decode_header(framed(json.dumps(entries)), HOME)


LAYOUT = Layout.of(
    [TensorSpec(name="w", shape=(30, 40), dtype=torch.float32), TensorSpec(name="n", shape=(), dtype=torch.int64)]
)
HEAD = encode_header(LAYOUT.specs, {"format": "pt", "crc32": "0123456789"})


@given(st.integers(0, 8 * len(HEAD) - 1))
def test_no_flipped_bit_of_a_header_reads_as_the_header(bit):
    damaged = bytearray(HEAD)
    damaged[bit // 8] ^= 1 << bit % 8
    try:
        found = decode_header(bytes(damaged), HOME)
    except CorruptFile:
        return
    assert found != (LAYOUT, {"format": "pt", "crc32": "0123456789"})


@given(st.integers(0, len(HEAD) - 1))
def test_a_header_cut_off_anywhere_is_damage(length):
    with pytest.raises(CorruptFile):
        decode_header(HEAD[:length], HOME)
