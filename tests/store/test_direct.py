"""Files around the page cache: every byte comes back, and a refusing file system or a full disk is met in words."""

import errno
import fcntl
import os
import resource
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpart.device.pages import PAGE, aligned, bytes_of, round_up
from seqpart.errors import CorruptFile, DirectoryUnusable, DiskFull, StoreError
from seqpart.store import direct
from seqpart.store.direct import DirectFile, explained, probe_disk


def noise(nbytes):
    flat = aligned(nbytes)
    flat.copy_(torch.randint(0, 256, (len(flat),), dtype=torch.uint8))
    return flat


def write(path, flat, length):
    with DirectFile(path, write=True) as file:
        file.write_from(bytes_of(flat), 0)
        file.finish(length)
        return file.direct


def read(path, nbytes):
    flat = aligned(nbytes).zero_()
    with DirectFile(path) as file:
        got = file.read_into(bytes_of(flat), 0)
        return flat, got, file.direct


def refuse_direct_open(monkeypatch):
    real = os.open

    def refusing(path, flags, *rest, **named):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)


def refuse_direct_transfers(monkeypatch, code):
    """A file system that takes the flag when a file is opened, and refuses the transfer; or a virtual machine that refuses
    memory which a GPU's driver has pinned."""
    real_read, real_write = os.preadv, os.pwritev

    def transfer(real):
        def refusing(fd, *rest):
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(code, os.strerror(code))
            return real(fd, *rest)

        return refusing

    monkeypatch.setattr(os, "preadv", transfer(real_read))
    monkeypatch.setattr(os, "pwritev", transfer(real_write))


@given(st.integers(0, 10**9), st.sampled_from([1, 64, 512, PAGE]))
def test_rounding_up_gives_the_least_multiple_that_is_not_under(size, to):
    rounded = round_up(size, to)
    assert rounded % to == 0
    assert size <= rounded < size + to


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, PAGE + 1])
def test_an_aligned_buffer_starts_on_a_page_and_is_whole_pages(nbytes):
    flat = aligned(nbytes)
    assert len(flat) == round_up(nbytes)
    assert nbytes == 0 or flat.data_ptr() % PAGE == 0


def test_bytes_of_a_tensor_are_its_memory_and_no_copy():
    flat = torch.zeros(4, dtype=torch.uint8)
    bytes_of(flat)[2] = 7
    assert flat.tolist() == [0, 0, 7, 0]


@pytest.mark.parametrize("length", [0, 1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE + 123])
@pytest.mark.parametrize("file_system", ["as it is", "refuses the flag", errno.EINVAL, errno.EFAULT])
def test_what_was_written_is_read_back_on_every_file_system(tmp_path, monkeypatch, length, file_system):
    if file_system == "refuses the flag":
        refuse_direct_open(monkeypatch)
    elif file_system != "as it is":
        refuse_direct_transfers(monkeypatch, file_system)
    flat = noise(length)
    wrote_direct = write(tmp_path / "a", flat, length)
    back, got, read_direct = read(tmp_path / "a", length)
    assert (tmp_path / "a").stat().st_size == got == length
    assert torch.equal(back[:length], flat[:length])
    if length and file_system != "as it is":
        assert not wrote_direct
        assert not read_direct


def test_long_files_are_moved_by_several_requests(tmp_path, monkeypatch):
    monkeypatch.setattr(direct, "REQUEST", 2 * PAGE)
    length = 7 * PAGE + 5
    flat = noise(length)
    write(tmp_path / "a", flat, length)
    back, got, _ = read(tmp_path / "a", length)
    assert got == length
    assert torch.equal(back[:length], flat[:length])


def test_memory_that_is_not_aligned_is_moved_all_the_same(tmp_path):
    flat = noise(2 * PAGE)[1 : PAGE + 1]
    write(tmp_path / "a", flat, PAGE)
    back = aligned(2 * PAGE)[1 : PAGE + 1]
    with DirectFile(tmp_path / "a") as file:
        assert file.read_into(bytes_of(back), 0) == PAGE
    assert torch.equal(back, flat)


def test_a_write_that_the_system_cuts_short_is_continued(tmp_path, monkeypatch):
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: real(fd, [parts[0][:PAGE]], at))
    flat = noise(4 * PAGE)
    write(tmp_path / "a", flat, 4 * PAGE)
    assert (tmp_path / "a").read_bytes() == bytes(bytes_of(flat))


def test_reading_past_the_end_returns_fewer_bytes(tmp_path):
    write(tmp_path / "a", noise(PAGE), 100)
    with DirectFile(tmp_path / "a") as file:
        assert file.read_into(bytes_of(aligned(3 * PAGE)), 0) == 100
        assert file.read_into(bytes_of(aligned(PAGE)), PAGE) == 0


def test_a_full_disk_is_named_with_a_cure(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(DiskFull, match=r"could not write .*/a\. Free some space"):
        write(tmp_path / "a", noise(PAGE), PAGE)


def test_a_disk_that_fills_up_only_when_flushed_is_named_too(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", full)
    with DirectFile(tmp_path / "a", write=True) as file, pytest.raises(DiskFull):
        file.finish(0, durable=True)


@contextmanager
def largest_file(nbytes):
    """Where this process may write no larger file: ulimit -f."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_system_s_own_limit_on_a_file_s_size_is_explained(tmp_path):
    with largest_file(8192), pytest.raises(StoreError, match="ulimit -f"), DirectFile(tmp_path / "a", write=True) as file:
        file.write_from(bytes_of(aligned(16384)), 0)


def test_a_missing_file_is_damage_and_a_file_for_a_folder_is_unusable(tmp_path):
    with pytest.raises(CorruptFile, match="a is missing"):
        DirectFile(tmp_path / "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryUnusable, match="Give a directory that you may write to"):
        DirectFile(tmp_path / "file" / "a", write=True)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, DiskFull),
        (errno.EDQUOT, DiskFull),
        (errno.EACCES, DirectoryUnusable),
        (errno.EROFS, DirectoryUnusable),
        (errno.ENOENT, CorruptFile),
        (errno.EIO, StoreError),
    ],
)
def test_each_failure_of_the_system_has_its_kind_and_names_the_file(tmp_path, number, kind):
    error = explained(OSError(number, os.strerror(number)), tmp_path / "a")
    assert type(error) is kind
    assert str(tmp_path / "a") in str(error)


def test_the_probe_gives_two_speeds_and_leaves_nothing(tmp_path):
    assert all(speed > 0 for speed in probe_disk(tmp_path, nbytes=direct.REQUEST))
    assert list(tmp_path.iterdir()) == []


def test_a_failing_probe_leaves_nothing_either(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(DiskFull):
        probe_disk(tmp_path)
    assert list(tmp_path.iterdir()) == []


def forbid_nameless(monkeypatch):
    """A file system that knows no files without names. Returns the paths that are opened to be written."""
    real, paths = os.open, []

    def refusing(path, flags, *rest, **named):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        if flags & os.O_CREAT:
            paths.append(Path(path))
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)
    return paths


def test_the_probe_writes_through_no_link_and_removes_nobody_s_file(tmp_path):
    """`.probe-<pid>` was a name that anybody could foresee: a link of that name lost 64 MiB of the file it led to."""
    (tmp_path / "mine").write_text("years of work")
    for name in (f".probe-{os.getpid()}", ".seqpart-probe", ".probe-1"):
        (tmp_path / name).symlink_to(tmp_path / "mine")
    before = sorted(tmp_path.iterdir())
    probe_disk(tmp_path, nbytes=direct.REQUEST)
    assert (tmp_path / "mine").read_text() == "years of work"
    assert sorted(tmp_path.iterdir()) == before


def test_where_every_file_has_a_name_the_probe_s_is_new_and_gone_at_once_and_a_dry_run_s_is_elsewhere(tmp_path, monkeypatch):
    paths = forbid_nameless(monkeypatch)
    names = set()
    for _ in range(3):
        probe_disk(tmp_path, nbytes=direct.REQUEST)
        names.add(paths.pop())
        assert list(tmp_path.iterdir()) == []
    assert len(names) == 3 and {path.parent for path in names} == {tmp_path}
    changed = tmp_path.stat().st_mtime_ns
    probe_disk(tmp_path, nbytes=direct.REQUEST, hidden=True)
    assert [path.parent for path in paths] == [Path(tempfile.gettempdir())]
    assert tmp_path.stat().st_mtime_ns == changed


def test_a_file_is_written_over_only_where_it_has_no_other_name(tmp_path):
    """A copy of a run that was made of hard links, `cp -al`, was written over with the original."""
    for keep in (False, True):
        for lay in (os.link, os.symlink):
            mine = tmp_path / f"mine-{keep}-{lay.__name__}"
            mine.write_bytes(b"years of work")
            lay(mine, tmp_path / "a")
            with DirectFile(tmp_path / "a", write=True, keep=keep) as file:
                file.write_from(bytes_of(noise(PAGE)), 0)
                file.finish(PAGE)
            assert mine.read_bytes() == b"years of work"
            assert (tmp_path / "a").stat().st_size == PAGE and not (tmp_path / "a").is_symlink()
            inode = (tmp_path / "a").stat().st_ino
            DirectFile(tmp_path / "a", write=True, keep=True).__exit__()
            assert (tmp_path / "a").stat().st_ino == inode, "its blocks are used again"
            (tmp_path / "a").unlink()


@pytest.mark.parametrize("lay", [lambda path: path.symlink_to("/etc/passwd"), lambda path: path.mkdir(), os.mkfifo])
def test_what_is_no_plain_file_is_not_read(tmp_path, lay):
    """A pipe in the place of a home made the run wait for ever."""
    lay(tmp_path / "a")
    for options in ({}, {"patch": True}):
        with pytest.raises(CorruptFile, match=r"/a is a link, a directory or a pipe, and no file that seqpart wrote"):
            DirectFile(tmp_path / "a", **options)


def test_probing_a_file_as_if_it_were_a_folder_is_explained(tmp_path):
    """The clean-up after the failed probe raised NotADirectoryError itself and hid the explanation."""
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(DirectoryUnusable, match="Give a directory"):
        probe_disk(path)


def test_a_disk_with_less_room_than_the_probe_wants_is_probed_with_less(tmp_path, monkeypatch):
    """The 64 MiB speed probe filled a small disk and refused a run that needed 1 MB."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=3 * PAGE))
    ends = []
    real = DirectFile.write_from
    monkeypatch.setattr(
        DirectFile, "write_from", lambda self, memory, at: (ends.append(at + len(memory)), real(self, memory, at))
    )
    probe_disk(tmp_path)
    assert max(ends) == PAGE


def test_a_directory_that_takes_no_files_is_not_called_missing(tmp_path):
    """/proc was said to have been there when the run began."""
    error = explained(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)), tmp_path)
    assert isinstance(error, DirectoryUnusable)
    assert str(error).startswith(f"cannot use {tmp_path}")
