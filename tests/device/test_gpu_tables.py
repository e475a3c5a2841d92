"""What only a GPU would need leaves the memory, and says the same when it is looked at."""

import ctypes
import mmap
import os
import subprocess
import sys

import pytest

from seqpart.device import gpu_tables
from seqpart.device.gpu_tables import _gpu_tables, _Mapping, _release
from seqpart.device.usage import read_process

SIZE = 8 << 20
LIBC = ctypes.CDLL(None)


@pytest.fixture
def memory():
    """Anonymous memory with something in it, and where it lies."""
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block[:] = os.urandom(SIZE)
        start = ctypes.addressof(there := ctypes.c_char.from_buffer(block))
        del there  # or the block could not be closed
        yield block, _Mapping(start, start + SIZE, "rw-p", "", SIZE)


def test_memory_that_is_laid_down_says_the_same_and_is_written_to_as_before(memory):
    block, mapping = memory
    said, before = bytes(block), read_process()
    assert _release(LIBC, mapping)
    now = read_process()
    assert before.anon - now.anon > SIZE * 0.9
    assert now.file - before.file < SIZE // 2, "the pages that were compared are still mapped"
    assert now.data - before.data < SIZE // 2
    assert bytes(block) == said
    block[4096:4099] = b"new"
    assert bytes(block[:4096]) == said[:4096]
    assert bytes(block[4096:4099]) == b"new"
    assert bytes(block[4099:]) == said[4099:]


def test_memory_is_not_laid_down_in_a_file_system_that_is_memory(memory, monkeypatch):
    block, mapping = memory
    said = bytes(block)
    monkeypatch.setattr(gpu_tables, "_in_memory", lambda descriptor: True)
    assert not _release(LIBC, mapping)
    assert bytes(block) == said


def test_a_file_system_that_is_memory_is_told_from_a_disk(tmp_path, monkeypatch):
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    monkeypatch.setattr(gpu_tables, "_MOUNTS", mounts)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    for kind, expected in (("tmpfs", True), ("ext4", False)):
        mounts.write_text(f"24 1 {os.major(device)}:{os.minor(device)} / /mnt rw,noatime shared:1 - {kind} none rw\n")
        assert gpu_tables._in_memory(descriptor) == expected
    os.close(descriptor)


def test_only_mappings_that_lie_within_one_library_are_taken():
    size = 4 << 20
    places = [
        ("r-xp", "/lib/libcublasLt.so.13", 0),
        ("rw-p", "", size),  # its zeroed data
        ("---p", "/lib/libcublasLt.so.13", 0),
        ("rw-p", "", size),  # somebody else's, who came to lie between two libraries
        ("r--p", "/lib/libnvrtc.so.13", size),  # relocated
        ("rw-p", "/lib/libnvrtc.so.13", size // 4),  # most of it never read: it is in the file already
        ("rw-p", "", size),  # zeroed data that may go on as somebody else's
        ("rw-p", "/lib/libcurl.so.4", size),
        ("r-xp", "/lib/libtorch_cpu.so", 0),
    ]
    mappings = [
        _Mapping(place * size, (place + 1) * size, access, path, anonymous)
        for place, (access, path, anonymous) in enumerate(places)
    ]
    assert [mapping.start // size for mapping in _gpu_tables(mappings)] == [1, 4]


def test_a_process_with_cuda_libraries_loses_their_tables_and_ends_well():
    program = """
import torch
from seqpart.device.gpu_tables import _gpu_tables, _mappings
from seqpart.device.device import Device
from seqpart.device.usage import read_process
promised, before = sum(mapping.anonymous for mapping in _gpu_tables(_mappings())), read_process().anon
with Device().settled():
    torch.nn.Linear(64, 64)(torch.ones(8, 64)).sum().backward()
print(promised, before - read_process().anon)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    promised, gone = map(int, done.stdout.split())
    if not promised:
        pytest.skip("this torch brings no CUDA libraries")
    assert gone > promised - 5_000_000
