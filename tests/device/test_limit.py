"""The limit: sampled, enforced by the kernel, proven."""

import mmap
import resource
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from seqpart import Trainer
from seqpart.device.device import Device
from seqpart.device.limit import WARM_UP_BYTES, enforced, growth_beside, measure_runtime, too_small, translate_oom, warm_up
from seqpart.device.sampler import Proof, Sampler
from seqpart.device.usage import MemoryUsage, Reading, read_process
from seqpart.errors import DataError, DoesNotFit, OptionError, OutOfMemory
from seqpart.model.optimizers import choose
from seqpart.profile.fake_mode import LiveBytes
from seqpart.profile.machine import measure_speeds, seconds_of
from seqpart.units import parse_size
from seqpart.zoo.libraries import called
from tests import machine

MB = 10**6


class Scripted:
    """A memory usage that shows the given figures one after the other, and the last one for ever."""

    source = "a script"

    def __init__(self, *figures):
        self.figures = list(figures)
        self.exhausted = threading.Event()

    def watch(self):
        pass

    def read(self):
        if len(self.figures) > 1:
            return self.figures.pop(0)
        self.exhausted.set()
        return self.figures[0]


def held_now():
    return read_process().held


def test_the_peak_and_what_was_running_then_are_remembered():
    sampler = Sampler(Scripted(5, 9, 7), limit=10)
    for step in ("F0", "B0", "U0"):
        sampler.label = lambda step=step: step
        sampler.sample()
    assert (sampler.peak, sampler.peak_label, sampler.samples, sampler.violations) == (9, "B0", 3, 0)


def test_each_sample_over_the_limit_is_a_violation_and_the_first_is_named():
    sampler = Sampler(Scripted(10, 11, 12, 3), limit=10)
    for step in ("F0", "B0", "B1", "U0"):
        sampler.label = lambda step=step: step
        sampler.sample()
    assert (sampler.violations, sampler.violation_label, sampler.peak_label) == (2, "B0", "B1")


def test_the_thread_samples_until_it_is_stopped():
    usage = Scripted(1, 50, 2)
    sampler = Sampler(usage, limit=100, interval=0.001)
    sampler.start()
    assert usage.exhausted.wait(60), "the thread did not look"
    sampler.stop()
    assert not sampler._thread.is_alive()
    assert sampler.peak == 50
    assert sampler.samples >= 3


def test_a_limit_that_becomes_known_later_has_counted_from_the_start():
    """What planning took was in the peak, and was no violation."""
    sampler = Sampler(Scripted(50, 9), limit=1 << 62)
    sampler.sample()
    sampler.set_limit(50)
    assert sampler.violations == 0
    sampler.set_limit(49)
    assert (sampler.violations, sampler.violation_label, sampler.limit) == (1, "planning", 49)


def test_a_peak_that_is_shorter_than_a_look_is_seen_all_the_same():
    """At 405 MB a watcher outside saw 408.6 MB for one sample, and our own sampler 402, with "violations 0"."""
    sampler = Sampler(MemoryUsage(Device()), limit=1 << 62, interval=60)
    sampler.start()
    before = sampler.peak
    for nbytes in (90 << 20, 40 << 20):
        held = torch.ones(nbytes, dtype=torch.uint8)
        del held  # gone before anybody looks
    sampler.stop()
    assert sampler.peak - before == pytest.approx(90 << 20, abs=4 << 20)


def test_a_sampler_that_never_started_still_takes_the_last_look():
    sampler = Sampler(Scripted(7), limit=5)
    sampler.stop()
    assert (sampler.samples, sampler.peak, sampler.violations) == (1, 7, 1)


@pytest.mark.parametrize("allocate", [lambda: torch.empty(4 << 30, dtype=torch.uint8), lambda: bytearray(4 << 30)])
def test_an_allocation_beyond_the_limit_fails_and_can_be_caught(allocate):
    device = Device()
    with enforced(device, held_now() + (256 << 20)):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            allocate()
        assert device.is_out_of_memory(caught.value)
        torch.ones(16 << 20, dtype=torch.uint8)  # what fits goes on
    torch.empty(4 << 30, dtype=torch.uint8)  # reserved and not touched; the limit is gone


def runs_out():
    raise MemoryError("no room for 262144 bytes")


def test_memory_that_runs_out_in_code_of_the_user_s_is_no_mistake_of_the_user_s():
    """A failed allocation in the function of --model ended with the exit code of a wrong option."""
    said = r"while the model was read: .*runs_out\(\) failed: MemoryError: no room"
    with pytest.raises(OutOfMemory, match=said), translate_oom(Device(), "the model was read"):
        called(f"{__name__}:runs_out", "--model")


def test_what_an_error_says_of_its_cause_holds():
    """An error that was its own cause made a run hang; one that hides what led to it, by `from None`, became another."""
    itself, hiding = ValueError("of its own"), ValueError("use a smaller cache")
    itself.__cause__ = itself
    hiding.__context__, hiding.__suppress_context__ = MemoryError("no room"), True
    for error in (itself, hiding):
        with pytest.raises(ValueError, match=str(error)), translate_oom(Device(), "the data were read"):
            raise error


@pytest.mark.parametrize("error", [OptionError("wrong"), DataError("bad"), DoesNotFit("too large")], ids=repr)
def test_a_mistake_that_no_failed_allocation_led_to_stays_what_it_is(error):
    with pytest.raises(type(error)), translate_oom(Device(), "the model was read"):
        try:
            raise ValueError("of another kind")
        except ValueError as cause:
            raise error from cause


def test_memory_that_is_reserved_for_generated_code_is_granted_on_top_of_the_limit():
    """A ResNet's convolutions reserved 50 MB for kernels during a run, touched one of them, and an allocation inside the limit
    failed."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with enforced(Device(), held_now() + (256 << 20)) as grant:
        capped = resource.getrlimit(resource.RLIMIT_DATA)[0]
        assert not grant()
        with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7):  # read, write and execute
            assert grant()
            assert (60 << 20) <= resource.getrlimit(resource.RLIMIT_DATA)[0] - capped < (64 << 20)
            assert not grant(), "it is granted once"
    grant()
    assert resource.getrlimit(resource.RLIMIT_DATA) == before, "also where somebody asks behind the end"


def test_what_kernels_will_reserve_and_not_use_is_granted_on_top():
    """Two thirds of an LSTM's workspace are: graphs that waited met the kernel's limit 20 MB under the predicted peak."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with enforced(Device(), held_now() + (256 << 20)), pytest.raises(OSError, match="Cannot allocate memory"):
        mmap.mmap(-1, 512 << 20, flags=flags)
    with enforced(Device(), held_now() + (256 << 20), untouched=512 << 20):
        mmap.mmap(-1, 512 << 20, flags=flags).close()
        with pytest.raises(OSError, match="Cannot allocate memory"):
            mmap.mmap(-1, 1 << 30, flags=flags)


def test_what_one_kernel_will_reserve_and_not_use_is_granted_for_its_time():
    """A dilated convolution's backward pass: a trial of it met the kernel's limit, and the run that went on unmeasured died."""
    with enforced(Device(), held_now() + (256 << 20)) as grant:
        capped = resource.getrlimit(resource.RLIMIT_DATA)[0]
        assert not grant(untouched=64 << 20), "nothing was reserved yet"
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == capped + (64 << 20)
        grant()
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == capped


def test_at_rest_all_that_is_reserved_and_not_used_is_granted_on_top():
    """A heap that was kept could not shrink, because its last bytes were in use: the run that went on without it had 260 MB
    less than its plan, and ended."""
    with enforced(Device(), held_now() + (256 << 20)) as grant:
        capped = resource.getrlimit(resource.RLIMIT_DATA)[0]
        with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
            assert not grant(), "a run is under way: it may be used in a moment"
            assert grant(at_rest=True)
            assert (60 << 20) <= resource.getrlimit(resource.RLIMIT_DATA)[0] - capped <= (68 << 20)


def test_what_was_reserved_and_unused_is_charged_once_it_is_used():
    """Where an earlier session had run out of memory, its holes in the heap were granted as unused: a callback filled them, and
    the run passed its limit by 27 MB."""
    with (
        mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as hole,
        enforced(Device(), held_now() + (256 << 20)) as grant,
    ):
        capped = resource.getrlimit(resource.RLIMIT_DATA)[0]
        hole.write(bytes(64 << 20))
        assert not grant()
        assert (60 << 20) <= capped - resource.getrlimit(resource.RLIMIT_DATA)[0] <= (68 << 20)
        hole.madvise(mmap.MADV_DONTNEED)
        assert not grant()
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == capped


def test_the_kernel_s_limit_is_the_old_one_again_whatever_happens_inside():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(KeyError), enforced(Device(), held_now() + (1 << 30)):
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] != before[0]
        raise KeyError
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_stricter_limit_that_was_there_already_stays():
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    stricter = read_process().data + (512 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (stricter, hard))
    try:
        with enforced(Device(), held_now() + (1 << 40)):
            assert resource.getrlimit(resource.RLIMIT_DATA)[0] == stricter
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == stricter
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def test_a_limit_that_the_libraries_fill_is_refused_with_one_that_they_do_not():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(DoesNotFit, match="used up before training begins") as caught, enforced(Device(), MB):
        pass
    named = str(caught.value).rpartition("Give more than ")[2].rstrip(".")
    assert parse_size(named) > MB
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_the_refusal_names_the_least_megabyte_that_is_enough():
    assert str(too_small(100 * MB, 300 * MB + 1)).endswith("Give more than 301MB.")


@given(st.integers(0, 1 << 32), st.integers(1, 1 << 32))
def test_more_work_never_has_less_room_to_grow_and_never_more_than_is_allowed(work, more):
    """All of it was allowed beside the smallest network, and with a small runtime its peak was predicted 8 % too high."""
    allowed = 12 << 20
    assert allowed // 2 <= growth_beside(allowed, work) <= growth_beside(allowed, work + more) <= allowed
    assert (growth_beside(allowed, work) == allowed) == (work // 32 >= allowed // 2)


def test_the_runtime_is_measured_after_its_libraries_have_warmed_up():
    warm_up(Device())
    runtime = measure_runtime(Device())
    # What the garbage collector and the allocator return between the two looks is a few megabytes.
    assert abs(runtime - held_now()) < 64 * MB
    assert runtime > 20 * MB, "an interpreter with torch is never smaller"


@pytest.mark.own_process
def test_what_is_done_before_a_plan_takes_no_more_than_the_least_peak(tmp_path):
    """The disk was probed with 16 MB: for a moment, and a network of less was seen to pass its prediction."""
    device = Device()
    if not device.restart_peaks():
        pytest.skip("/proc is read-only: the kernel's mark cannot be set back")

    def work():
        warm_up(Device())
        measure_speeds(Device(), choose("adam", lr=0.1), 256, tmp_path)

    with Device().settled():  # as in a run: what was free before would hide what is taken
        work()  # libraries are loaded, and threads started
        device.restart_peaks()
        held = device.allocated()
        work()
        assert 1 << 20 < device.allocated_peak() - held <= WARM_UP_BYTES


def test_the_proof_says_all_in_one_line():
    figures = {"limit": 2000 * MB, "peak": 1940 * MB, "source": "a script", "predicted": 1900 * MB, "runtime": 350 * MB}
    proof = Proof(**figures, host=0, allocator_peak=None, file_growth=5 * MB, samples=812, violations=0)
    assert str(proof) == (
        "proof: limit 2.00 GB, measured peak 1.94 GB (a script, 812 samples), predicted 1.90 GB, "
        "of it runtime 350.0 MB; file pages grew 5.0 MB; violations 0"
    )
    with_allocator = Proof(**figures, host=0, allocator_peak=1500 * MB, file_growth=0, samples=1, violations=2)
    assert ", allocator peak 1.50 GB, " in str(with_allocator)
    assert str(with_allocator).endswith("violations 2")


def test_the_shortest_of_several_timings_is_taken(monkeypatch):
    clock = iter([0.0, 5.0, 10.0, 12.0, 20.0, 29.0])
    monkeypatch.setattr("seqpart.profile.machine.time.perf_counter", lambda: next(clock))
    calls = []
    assert seconds_of(lambda: calls.append(1)) == 2.0
    assert len(calls) == 3


def test_a_run_shorter_than_twenty_samples_has_its_file_pages_counted(monkeypatch):
    """File pages were looked at with every twentieth sample only, so the proof of a short run said that they grew by 0."""

    class Still:
        def read(self):
            return 0

    sizes = iter([1000, 5000])
    monkeypatch.setattr("seqpart.device.sampler.read_process", lambda: Reading(file=next(sizes)))
    sampler = Sampler(Still(), limit=1)
    sampler.stop()
    assert sampler.file_growth == 4000


def test_measuring_the_machine_takes_little_memory_whatever_the_batch(tmp_path, monkeypatch):
    """The matrix rate was measured on a whole batch of rows 1024 wide: 0.5 GB for 60,000 rows, unplanned and unlimited."""
    held = []

    def watched(*arguments):
        with LiveBytes() as live:
            rates = measure_speeds(*arguments)
        held.append(live.peak)
        return rates

    machine.measured_by(monkeypatch, watched)
    data = (torch.zeros(5000, 1), torch.arange(5000) % 3)
    trainer = Trainer([nn.Linear(1, 3)], mem_limit="2GB", method="sil", batch_size=5000, output_dir=tmp_path)
    trainer.prepare(*trainer.rows(data, data))
    assert held[0] < 12 << 20
