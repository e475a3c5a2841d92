"""A limit of a cgroup is found wherever the process is in one: v1, v2, nested, in a container or outside of what is mounted."""

import os
import subprocess
from pathlib import Path

import pytest

from seqpart.device import cgroups
from tests.command import command

V1 = Path("/sys/fs/cgroup/memory")


def written(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.fixture
def process(tmp_path):
    """Makes what the kernel says of a process: its cgroups, and what is mounted where."""

    def make(cgroup, *mounts):
        written(tmp_path / "proc", cgroup=cgroup)
        lines = [f"36 31 0:32 {root} {place} rw,relatime shared:9 - {kind}" for root, place, kind in mounts]
        written(tmp_path / "proc", mountinfo="\n".join(["22 1 8:1 / / rw - ext4 /dev/sda1 rw", *lines]))
        return tmp_path / "proc"

    return make


def test_without_cgroups_there_is_no_limit(process, tmp_path):
    assert cgroups.limit(tmp_path / "nowhere") == cgroups.free(tmp_path / "nowhere") == cgroups.NONE
    assert cgroups.limit(process("")) == cgroups.NONE


def test_of_nested_cgroups_the_smallest_limit_and_the_least_room_hold(process, tmp_path):
    """`systemd-run --scope -p MemoryMax=...` and SLURM put a process some levels deep, outside of a namespace."""
    mount = tmp_path / "cgroup"
    written(mount, memory__stat="inactive_file 5")
    written(mount / "user.slice", memory__max="max", memory__high="max", memory__current="900", memory__stat="inactive_file 0")
    written(mount / "user.slice/run.scope", memory__max="400", memory__current="390", memory__stat="anon 9\ninactive_file 90")
    written(mount / "user.slice/run.scope/leaf", memory__max="1000", memory__high="500", memory__current="300")
    made = process("0::/user.slice/run.scope/leaf", ("/", mount, "cgroup2 cgroup2 rw"))
    assert cgroups.limit(made) == 400
    assert cgroups.free(made) == 100, "file pages that can go are no use"


def test_v1_has_a_hierarchy_for_memory_and_a_number_for_no_limit(process, tmp_path):
    mount = tmp_path / "memory"
    written(mount, memory__limit_in_bytes=9223372036854771712)
    written(mount / "job", memory__limit_in_bytes=700, memory__usage_in_bytes=300, memory__stat="total_inactive_file 100")
    made = process(
        "4:memory:/job\n3:cpuset:/other\n0::/", ("/", mount, "cgroup cgroup rw,memory"), ("/", tmp_path, "cgroup2 c rw")
    )
    assert (cgroups.limit(made), cgroups.free(made)) == (700, 500)


@pytest.mark.parametrize("path", ["/docker/abc", "/docker/abc/inner", "/../elsewhere", "/another"])
def test_in_a_container_the_mounted_root_is_its_own_cgroup(process, tmp_path, path):
    mount = tmp_path / "cgroup"
    written(mount, memory__max="800", memory__current="0")
    written(mount / "inner", memory__max="600", memory__current="0")
    found = cgroups.limit(process(f"0::{path}", ("/docker/abc", mount, "cgroup2 cgroup2 rw")))
    assert found == (600 if path.endswith("inner") else 800)


def test_this_process_has_a_number_of_each():
    assert 0 < cgroups.free() <= cgroups.NONE and 0 < cgroups.limit() <= cgroups.NONE


@pytest.fixture
def group():
    """A cgroup of v1 with a limit of 400 MB; gone at the end."""
    place = V1 / f"seqpart-{os.getpid()}"
    try:
        place.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup (v1) can be made here: {error.strerror}")
    (place / "memory.limit_in_bytes").write_text("400000000")
    yield place
    place.rmdir()


@pytest.mark.parametrize(
    ("limit", "code", "said"), [("1.5GB", 2, "its cgroup allows"), ("400MB", 0, "violations 0"), ("auto", 0, "proof")]
)
@pytest.mark.few(1)
def test_a_limit_beyond_the_process_s_own_cgroup_is_refused_and_one_as_large_holds(tmp_path, group, limit, code, said):
    """It was planned, begun and killed: rc 137 and not a word."""
    size = ["--method", "streamed", "--width", "256", "--depth", "8", "--max-steps", "3", "--batch-size", "64"]
    done = subprocess.run(
        command([*size, "--mem-limit", limit, "--output-dir", "out"]), cwd=tmp_path, capture_output=True, text=True,
        timeout=300, check=False,
        preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())),
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    assert (group / "memory.failcnt").read_text().strip() == "0"
