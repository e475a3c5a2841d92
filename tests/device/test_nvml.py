"""NVML's figure, read through nvidia-ml-py from a library that stands in for the driver's; what stands in for it is named."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GB = 1 << 30
IMPORTS = "import os\nfrom seqpart.device.nvml import MOST_CONTEXT, NvmlUsage\nfrom tests.nvml_card import *\n"


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The folder of a libnvidia-ml.so.1 made of nvml_stand_in.c."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    source, target = ROOT / "tests" / "nvml_stand_in.c", folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", target, source], check=True)
    return folder


@pytest.fixture
def says(library, tmp_path):
    """What a program says whose NVML is the stand-in."""

    def run(program, *, before=(), folder=library):
        paths = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
        environment = {
            **os.environ, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths)), "NVML_STAND_IN": str(tmp_path / "answers"),
        }  # fmt: skip
        ran = subprocess.run(
            [*before, sys.executable, "-c", IMPORTS + program], cwd=ROOT, env=environment, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert (ran.returncode, ran.stderr) == (0, "")
        return json.loads(ran.stdout)

    return run


def test_the_figure_is_that_of_this_process_and_others_on_the_card_do_not_count(says):
    assert says("""
answer((ME, 2 * GB), (ME + 1, 9 * GB), used=12 * GB)
usage = NvmlUsage(UUID, Allocator(GB))
first = usage.read()
answer((ME + 1, 9 * GB), (ME + 2, 20 * GB), (ME, 3 * GB), used=33 * GB)
say(first, usage.read(), usage.source)
""") == [2 * GB, 3 * GB, "NVML, this process"]


def test_a_watcher_outside_takes_the_whole_card_where_processes_are_not_listed(says):
    """In some virtual machines the question is refused: the watcher ended, and with it all that it measured."""
    assert says("""
import sys
sys.path.insert(0, "tools")
from profiling.watching import Gpu
answer(used=3 * GB, fail={LIST: NO_PERMISSION})
os.environ["CUDA_VISIBLE_DEVICES"] = UUID
gpu = Gpu()
gpu.start()
answer(used=5 * GB, fail={LIST: NO_PERMISSION})
say(gpu.used(ME), gpu.source)
""") == [2 * GB, "NVML, growth of the whole device, from outside"]


def test_any_number_of_processes_may_come(says):
    assert says("""
answer((ME, 2 * GB))
usage = NvmlUsage(UUID, Allocator(GB))
answer(*((ME + n, GB) for n in range(1, 500)), (ME, 3 * GB))
say(usage.read(), usage.source)
""") == [3 * GB, "NVML, this process"]


# "All of the memory used by the application", says NVML of every entry.
def test_a_process_that_is_listed_twice_holds_its_memory_once(says):
    assert says("""
answer((ME, 2 * GB), (ME, 2 * GB), (ME, NOT_AVAILABLE))
say(NvmlUsage(UUID, Allocator(GB)).read())
""") == [2 * GB]


def test_a_mig_instance_is_found_by_its_own_name(says):
    named, bare = says("""
answer((ME, 2 * GB), device=MIG_UUID)
say(*(NvmlUsage(name, Allocator(GB)).source for name in (MIG_UUID, MIG_UUID.removeprefix("MIG-"))))
""")
    assert named == bare == "NVML, this process"


def test_cuda_s_name_of_a_gpu_has_no_prefix(says):
    assert says("""
answer((ME, 2 * GB))
say(NvmlUsage(UUID.removeprefix("GPU-"), Allocator(GB)).source)
""") == ["NVML, this process"]


# A container's process does not know its number outside. The one process in the list may be it, or another's.
def test_in_a_container_all_that_is_used_on_the_card_stands_in_and_is_named(says):
    first, grown, source = says("""
answer((ME + 1, 2 * GB), used=2 * GB + 5)
allocator = Allocator(GB + GB // 2)
usage = NvmlUsage(UUID, allocator)
first = usage.read()
allocator.reserved += GB
answer((ME + 1, 3 * GB), used=3 * GB + 5)
say(first, usage.read(), usage.source)
""")
    assert (first, grown) == (2 * GB + 5, 3 * GB + 5)
    assert source == (
        "NVML, all that is used on the card instead of this process's figure "
        "(NVML does not list this process, as in a container)"
    )


def test_what_others_held_at_the_start_is_taken_off_and_a_context_is_left(says):
    first, grown, source, context = says("""
answer(used=40 * GB)
allocator = Allocator(2 * GB)
usage = NvmlUsage(UUID, allocator)
first = usage.read()
allocator.reserved += GB
answer(used=41 * GB)
say(first, usage.read(), usage.source, MOST_CONTEXT)
""")
    assert (first, grown) == (2 * GB + context, 3 * GB + context)
    assert source.endswith("; at the start 39.73 GB was taken for others' and 1.07 GB for the context")


def test_others_that_free_their_memory_hide_nothing_of_ours(says):
    assert says("""
answer(used=40 * GB)
allocator = Allocator(2 * GB)
usage = NvmlUsage(UUID, allocator)
allocator.reserved = 6 * GB
answer(used=7 * GB)
say(usage.read() - MOST_CONTEXT)
""") == [6 * GB]


def test_what_the_driver_keeps_for_itself_is_nobody_s_where_it_says_so(says):
    new, old = says("""
answer(used=2 * GB, driver=GB // 2)
new = NvmlUsage(UUID, Allocator(GB + GB // 2)).read()
answer(used=2 * GB, driver=GB // 2, fail={MEMORY_V2: FUNCTION_NOT_FOUND})
say(new, NvmlUsage(UUID, Allocator(GB + GB // 2)).read())
""")
    assert (new, old) == (2 * GB, 2.5 * GB)


def test_a_process_in_a_pid_namespace_is_found_by_its_outer_number_where_proc_shows_it(says):
    namespace = ("unshare", "--user", "--pid", "--fork")
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no pid namespaces for this user")
    inner, held, source = says(
        """
status = open("/proc/self/status").read()
outer = int(status.partition("NSpid:")[2].split()[0])
answer((outer, 2 * GB))
usage = NvmlUsage(UUID, Allocator(GB))
say(ME, usage.read(), usage.source)
""",
        before=namespace,
    )
    assert (inner, held, source) == (1, 2 * GB, "NVML, this process")


def test_under_wsl_nvml_knows_of_no_process_what_it_holds(says):
    held, source = says("""
answer((ME, NOT_AVAILABLE), used=2 * GB)
usage = NvmlUsage(UUID, Allocator(GB + GB // 2))
say(usage.read(), usage.source)
""")
    assert held == 2 * GB
    assert source.startswith("NVML, all that is used on the card ")
    assert "(NVML says of no process what it holds, as under WSL)" in source


# Some drivers list a container's own numbers, and 0 bytes for each: HAMi-core issue 112. Or the number is another's outside.
@pytest.mark.parametrize("figure", ["0", "GB - 1"])
def test_a_figure_below_torch_s_own_count_is_not_believed(says, figure):
    held, source = says(f"""
answer((ME, {figure}), used=2 * GB)
usage = NvmlUsage(UUID, Allocator(GB + GB // 2))
say(usage.read(), usage.source)
""")
    assert held == 2 * GB
    assert "(what NVML says of this process is less than torch's own count)" in source


def test_memory_that_is_reserved_between_nvml_s_answer_and_torch_s_is_looked_for_again(says):
    assert says("""
answer((ME, 2 * GB))
allocator = Allocator(GB)

def reserved():
    if allocator.reserved > GB:
        answer((ME, 6 * GB))
    return allocator()

usage = NvmlUsage(UUID, reserved)
allocator.reserved = 5 * GB
say(usage.read(), usage.source)
""") == [6 * GB, "NVML, this process"]


def test_a_mig_instance_that_shows_no_processes_shows_its_memory(says):
    held, source = says("""
answer((ME, 2 * GB), used=2 * GB + 5, device=MIG_UUID, fail={LIST: NO_PERMISSION})
usage = NvmlUsage(MIG_UUID, Allocator(GB + GB // 2))
say(usage.read(), usage.source)
""")
    assert held == 2 * GB + 5
    assert "all that is used on the card instead of this process's figure (Insufficient Permissions)" in source


def test_where_nvml_says_neither_torch_s_own_count_stands_in(says):
    held, source = says("""
answer(fail={LIST: NOT_SUPPORTED, MEMORY: NO_PERMISSION, MEMORY_V2: NO_PERMISSION})
usage = NvmlUsage(UUID, Allocator(GB))
say(usage.read(), usage.source)
""")
    assert held == GB
    assert source == (
        "torch's reserved memory (NVML: Not Supported; of the whole card: Insufficient Permissions; the context is not counted)"
    )


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ("fail={'nvmlInitWithFlags': DRIVER_NOT_LOADED}", "Driver Not Loaded"),
        ("device='GPU-another'", "Not Found"),
    ],
)
def test_without_a_driver_or_the_device_torch_s_own_count_stands_in(says, answers, reason):
    held, source = says(f"""
answer({answers})
usage = NvmlUsage(UUID, Allocator(GB))
say(usage.read(), usage.source)
""")
    assert (held, source) == (GB, f"torch's reserved memory (NVML: {reason}; the context is not counted)")


def test_without_the_library_torch_s_own_count_stands_in(says, tmp_path):
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"no library, whatever else there is on this machine")
    held, source = says("usage = NvmlUsage(UUID, Allocator(GB)); say(usage.read(), usage.source)", folder=tmp_path)
    assert (held, source) == (GB, "torch's reserved memory (NVML: NVML Shared Library Not Found; the context is not counted)")


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("fail={LIST: GPU_IS_LOST}", "GPU is lost"),
        ("fail={LIST: UNKNOWN}", "Unknown Error"),
        ("fail={LIST: 998}", "an error that nvidia-ml-py has no words for"),
        ("(ME, NOT_AVAILABLE)", "NVML says of no process what it holds, as under WSL"),
        ("", "NVML does not list this process, as in a container"),
    ],
)
def test_where_nvml_fails_during_the_run_torch_s_count_and_the_context_stand_in(says, failure, reason):
    before, after, source = says(f"""
answer((ME, GB + 500 * 10**6))
allocator = Allocator(GB)
usage = NvmlUsage(UUID, allocator)
before = usage.read()
answer({failure})
usage.read()
allocator.reserved = 3 * GB
say(before, usage.read(), usage.source)
""")
    assert (before, after) == (GB + 500 * 10**6, 3 * GB + 500 * 10**6)
    assert source == (
        f"NVML, this process; it failed ({reason}), and torch's reserved memory and 500.0 MB for the context "
        "stood in at 2 of 3 looks"
    )


def test_nvml_that_answers_again_is_believed_again_and_its_first_failure_is_said(says):
    held, source = says("""
answer((ME, 2 * GB))
usage = NvmlUsage(UUID, Allocator(GB))
for failure in (UNKNOWN, GPU_IS_LOST):
    answer(fail={LIST: failure})
    usage.read()
answer((ME, 5 * GB))
say(usage.read(), usage.source)
""")
    assert held == 5 * GB
    assert "it failed (Unknown Error)" in source
    assert source.endswith(" stood in at 2 of 3 looks")


def test_a_context_is_not_learned_from_a_look_at_which_torch_reserves_memory(says):
    assert says("""
answer((ME, 2 * GB))
allocator = Allocator(GB)
usage = NvmlUsage(UUID, allocator)
allocator.reserved = 0  # set free between the two looks, of which NVML's came first
usage.read()
answer((ME, 2 * GB), fail={LIST: GPU_IS_LOST})
say(usage.read())
""") == [GB]


def test_the_whole_card_that_fails_is_stood_in_for_too(says):
    held, source = says("""
answer(used=2 * GB)
allocator = Allocator(GB + GB // 2)
usage = NvmlUsage(UUID, allocator)
answer(fail={MEMORY_V2: GPU_IS_LOST})
allocator.reserved = 3 * GB
say(usage.read(), usage.source)
""")
    assert held == 3.5 * GB
    assert "all that is used on the card" in source
    assert "it failed (GPU is lost)" in source


def test_the_thread_that_samples_goes_on_without_the_driver_and_the_proof_says_so(says):
    peak, label, proof = says("""
import time
from types import SimpleNamespace
from seqpart.device.sampler import Proof, Sampler

answer((ME, 2 * GB))
allocator = Allocator(GB)
usage = NvmlUsage(UUID, allocator)
sampler = Sampler(SimpleNamespace(read=usage.read, watch=lambda: None), limit=3 * GB, interval=0.001)
sampler.start()
answer(fail={LIST: GPU_IS_LOST})
sampler.label = lambda: "B1.0"
allocator.reserved = 3 * GB  # nobody else looks: the thread must find it
for _ in range(1000):
    if sampler.violations:
        break
    time.sleep(0.01)
peak, label = sampler.peak, sampler.violation_label
sampler.stop()
proof = Proof(
    limit=sampler.limit, peak=peak, source=usage.source, predicted=GB, runtime=GB, allocator_peak=None, host=0, file_growth=0,
    samples=sampler.samples, violations=sampler.violations,
)
say(peak, label, str(proof))
""")
    assert (peak, label) == (4 * GB, "B1.0")
    assert "measured peak 4.29 GB (NVML, this process; it failed (GPU is lost), and torch's reserved memory " in proof
    assert " and 1.07 GB for the context stood in at " in proof
