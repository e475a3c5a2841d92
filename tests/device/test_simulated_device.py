"""Training on an accelerator that is simulated: the bits of the CPU, the limit held, and every missing wait found."""

import functools
import itertools
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from seqpart import Trainer
from seqpart.device.caching_allocator import GRANULE, CachingAllocator
from seqpart.device.device import DOWN, UP
from seqpart.device.limit import enforced, margin_of
from seqpart.device.opening import open_device
from seqpart.device.ordering import Unordered
from seqpart.errors import DoesNotFit, OptionError
from seqpart.profile.trials import Trials
from seqpart.runtime.slots import Slots
from seqpart.zoo.models import mlp
from tests.exactly import FULL, HOWS, How, Trained, first_difference, numbers, tokens
from tests.mutated import sites, without
from tests.runtime.test_exact import CASES, fresh

SIM = "sim:rtx3060-12gb"
MB = 1 << 20


# --- the context ------------------------------------------------------------------------------------------------------


def load_kernels(device, nbytes):
    """Kernels are loaded when they are first used, and lie in the context."""
    device.hardware = replace(device.hardware, context=device.hardware.context + nbytes)


def test_what_the_context_grows_by_is_taken_from_the_allocator_s_cap():
    """The cap was computed once: kernels that were loaded later, and more than the margin, passed the limit."""
    device, held = open_device(SIM), []
    limit = device.hardware.context + 200 * MB
    with enforced(device, limit) as lower:
        load_kernels(device, 40 * MB)
        assert not lower()
        with pytest.raises(torch.OutOfMemoryError):
            while True:
                held.append(device.empty(4 * MB))
        assert limit - 2 * margin_of(limit) < device.used() <= limit - margin_of(limit)


def test_kernels_that_trials_load_are_part_of_the_runtime_that_is_planned(monkeypatch):
    """The runtime was measured before the blocks were run, and the peak of a GPU predicted too low by what they loaded."""
    trainer = Trainer(mlp(16, 4, width=32, depth=2), None, "sgd", mem_limit="2GB", method="full", batch_size=8, device=SIM)
    rows, to_come = (torch.randn(16, 16), torch.arange(16) % 4), [40 * MB]

    def run(*_):
        if to_come:
            load_kernels(trainer.device, to_come.pop())
            return True
        return False

    monkeypatch.setattr(Trials, "run", run)
    with closing(trainer.prepare(*trainer.rows(rows, rows))) as planner:
        before = planner.runtime
        assert planner.planned().plan.runtime == before + 40 * MB


# --- the allocator ----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30 * MB)), max_size=40))
def test_what_the_allocator_reserves_holds_what_is_allocated_and_never_passes_its_cap(requests):
    allocator, held = CachingAllocator(200 * MB), []
    allocator.cap(100 * MB)
    for gives, nbytes in requests:
        if gives and held:
            allocator.give(held.pop(nbytes % len(held))[0])
            continue
        try:
            held.append((allocator.take(nbytes), nbytes))
        except torch.OutOfMemoryError:
            assert sum(size for _, size in held) + nbytes + 20 * MB * (len(held) + 1) > 100 * MB
        assert sum(size for _, size in held) <= allocator.allocated <= allocator.reserved <= 100 * MB
    for number, _ in held:
        allocator.give(number)
    allocator.release_cached()
    assert (allocator.allocated, allocator.reserved) == (0, 0)


@pytest.mark.parametrize(
    ("nbytes", "reserved"), [(1, 2 * MB), (MB, 2 * MB), (MB + 1, 20 * MB), (10 * MB, 10 * MB), (11 * MB + 1, 12 * MB)]
)
def test_segments_are_as_large_as_pytorch_s(nbytes, reserved):
    allocator = CachingAllocator(1 << 30)
    allocator.take(nbytes)
    assert (allocator.reserved, allocator.allocated % GRANULE) == (reserved, 0)


def test_a_freed_block_is_used_again_and_joins_its_neighbours():
    allocator = CachingAllocator(20 * MB)
    first, second = allocator.take(8 * MB), allocator.take(8 * MB)
    allocator.give(first)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory on the simulated device"):
        allocator.take(12 * MB)
    allocator.give(second)
    allocator.take(18 * MB)
    assert allocator.reserved == 20 * MB


# --- the device by itself ---------------------------------------------------------------------------------------------


@pytest.fixture
def device():
    device = open_device(SIM)
    with device.at_work():
        yield device


def test_its_memory_is_not_a_number_until_it_is_written(device):
    assert torch.empty(3, device=device.torch).isnan().all()
    assert device.empty(16).view(torch.float32).isnan().all()


def test_tensors_made_there_are_counted_and_freed_ones_are_not(device):
    before = device.allocated()
    x = torch.ones(1000, device=device.torch)
    y = x * 2
    assert device.allocated() == before + 2 * 4096
    del x, y
    assert device.allocated() == before
    assert device.reserved() > 0
    device.release_cached()
    assert device.reserved() == 0


def test_beyond_the_cap_memory_runs_out_as_on_a_gpu(device):
    device.cap(30 * MB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.zeros(40 * MB, device=device.torch)
    assert device.is_out_of_memory(caught.value)
    device.cap(None)


def test_a_kernel_that_uses_host_memory_is_refused(device):
    host, there = device.host(16), torch.ones(16, device=device.torch)
    with pytest.raises(Unordered, match=r"aten\.add.* uses pinned memory"):
        there + host[:16]


def copied(device):
    """(host memory, memory of the device, the event behind the copy of one into the other)."""
    host, there = device.host(4096), device.empty(4096)
    made = device.mark()
    with device.copying(UP):
        device.after(made)
        device.copy(host, there)
        return host, there, device.mark()


def test_what_computes_without_waiting_for_a_copy_is_named(device):
    _, there, behind = copied(device)
    with pytest.raises(Unordered, match=r"a copy up \(writes .* and aten\.sum.*not ordered by any event"):
        there.sum()
    device.after(behind)
    there.sum()


def test_host_memory_that_is_written_while_it_is_copied_is_named(device):
    host, _, behind = copied(device)
    with pytest.raises(Unordered, match="a copy up"):
        host.fill_(1)
    device.wait(behind)
    host.fill_(1)


def test_memory_that_is_freed_while_another_stream_uses_it_is_named_unless_it_was_lent():
    for lent in (False, True):
        for seed in range(8):  # by chance the copy has happened before
            device = open_device(f"{SIM}@{seed}")
            with device.at_work():
                host, there = device.host(4096), torch.ones(4096, dtype=torch.uint8, device=device.torch)
                made = device.mark()
                with device.copying(DOWN):
                    device.after(made)
                    device.copy(there, host)
                    if lent:
                        device.lend(there)
                    behind = device.mark()
                del there
                try:
                    device.wait(behind)
                except Unordered as error:
                    assert not lent and "was freed while" in str(error)
                    break
        else:
            assert lent


def test_a_new_buffer_of_a_slot_comes_behind_the_copy_out_of_the_one_before(device):
    """One slot that grows: its small buffer may still be on its way home when it is let go."""
    grow(device)
    site = next(site for site in sites("seqpart.runtime.slots") if site.text == "best.free()")
    with without(site), pytest.raises(Unordered, match="was freed while"):
        for seed in range(8):
            other = open_device(f"{SIM}@{seed}")
            with other.at_work():
                other.wait(grow(other))


def grow(device):
    slots, host = Slots([8192], device), device.host(4096)
    slot = slots.take(0, 4096)
    made = device.mark()
    with device.copying(DOWN):
        device.after(made)
        device.copy(slot.buffer, host)
        home = device.mark()
    slots.give(slot, lambda: device.after(home))
    del slot
    grown = slots.take(1, 8192)
    grown.buffer.fill_(0)
    assert len(grown.buffer) == 8192
    return home


def test_copies_take_as_long_as_the_link_and_run_beside_kernels(device):
    there, up = device.empty(100 * MB), device.host(100 * MB)
    made, x = device.mark(), torch.ones(2000, 2000, device=device.torch)
    with device.copying(UP):
        device.after(made)
        device.copy(up, there)
        behind = device.mark()
    for _ in range(4):
        x = x @ x
    device.wait(device.mark())
    device.wait(behind)
    assert device.busy[UP] == pytest.approx(100 * MB / device.hardware.h2d, rel=0.01)
    assert device.streams.seconds < 0.8 * (device.busy[UP] + device.busy["computing"])


@pytest.mark.parametrize("name", ["sim:", "sim:no-such-card", "sim:rtx4090@x", "sim:rtx4090@-1", "simulated"])
def test_a_card_that_is_not_known_is_refused(name):
    with pytest.raises(OptionError, match="sim"):
        open_device(name)


# --- training on it ---------------------------------------------------------------------------------------------------


@pytest.fixture
def arm(monkeypatch, tmp_path):
    def of(name="dropout, sgd"):
        model, shape, partitions, options = CASES[name]
        return Trained(monkeypatch, tmp_path, fresh(model), numbers(shape), partitions=partitions, **options)

    return of


NAMES = ["dropout, sgd", "statistics, sgd, clipped", "mlp, adam, clipped, bf16", "frozen middle, adam, clipped"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), [*enumerate(NAMES)])
def test_every_way_to_train_on_it_gives_the_bits_of_the_cpu_whatever_the_delays(number, name, arm):
    """Each way with one of the models, and a seed of its own for each: 31 orders of copies."""
    trained = arm(name)
    expected = trained.run(FULL)
    for seed, how in [*enumerate([FULL, *HOWS])][number::4]:
        in_host = bool({"host", "mixed"} & {how.boundary_tier, how.offloads}) or how.host_steps
        ram = {"ram_limit": "1"} if seed % 3 == 0 and not in_host else {}  # homes on the disk
        found = trained.run(how, device=f"{SIM}@{100 * number + seed}", **ram)
        assert first_difference(found, expected) is None, f"{how}, seed {100 * number + seed}"


def classes(rows, width=16):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(5)), torch.arange(rows) % 4


def network():
    return mlp(16, 4, width=512, depth=8)


@pytest.mark.parametrize("method", ["auto", "sil"])
def test_the_limit_of_its_memory_is_planned_held_and_proven(method, tmp_path):
    limit = 520_000_000
    result = Trainer(
        network(), device=SIM, method=method, mem_limit=limit, batch_size=32, epochs=1, output_dir=tmp_path / method, quiet=True
    ).fit(classes(64), classes(8))
    assert result.proof.violations == 0
    assert result.proof.peak <= result.proof.predicted <= limit
    assert "simulated" in result.proof.source
    assert result.proof.allocator_peak > 0


def test_a_limit_that_its_context_uses_up_is_refused_with_one_that_fits(tmp_path):
    trainer = functools.partial(Trainer, device=SIM, method="auto", batch_size=32, epochs=1, quiet=True)
    with pytest.raises(DoesNotFit, match="smallest limit that fits") as caught:
        trainer(network(), mem_limit="360MB", output_dir=tmp_path / "small").fit(classes(64), classes(8))
    result = trainer(network(), mem_limit=caught.value.smallest, output_dir=tmp_path / "fits").fit(classes(64), classes(8))
    assert result.proof.violations == 0


def test_the_three_tiers_are_used(tmp_path):
    def tiers(ram):
        trainer = Trainer(
            network(), device=SIM, method="streamed", partitions=4, mem_limit="2GB", batch_size=32, epochs=1, quiet=True,
            output_dir=tmp_path / ram, ram_limit=ram,
        )  # fmt: skip
        return [part.tier for part in trainer.plan(classes(64), classes(8)).partitions]

    assert set(tiers("1GB")) == {"pinned"}
    assert set(tiers("1")) == {"disk"}
    assert set(tiers("20MB")) == {"pinned", "disk"}


def test_gradients_that_wait_for_their_norm_wait_in_pinned_memory_like_the_other_homes(tmp_path):
    """They went to the disk, and were priced as if they did not."""
    trainer = Trainer(
        network(), device=SIM, method="streamed", partitions=4, mem_limit="2GB", batch_size=32, epochs=1, quiet=True,
        output_dir=tmp_path / "run", ram_limit="1GB", clip_grad_norm=1.0,
    )  # fmt: skip
    with closing(trainer.prepare(*trainer.rows(classes(64), classes(8)))) as planner:
        prepared = planner.planned()
    homes = [block.gradient_home for block in prepared.chain]
    assert set(homes) <= prepared.hosted().keys()


def test_a_plan_says_what_an_update_waits_for(tmp_path):
    def reasons(ram):
        trainer = Trainer(
            network(), device=SIM, method="streamed", partitions=8, mem_limit="600MB", batch_size=4, epochs=1, quiet=True,
            output_dir=tmp_path / ram, ram_limit=ram,
        )  # fmt: skip
        return " ".join(trainer.plan(classes(64), classes(8)).reasons)

    assert "it waits for the device's link" in reasons("1GB")
    assert "it waits for the disk" in reasons("1")


def test_more_host_memory_than_this_machine_has_may_be_planned_with_and_not_used(tmp_path):
    trainer = functools.partial(
        Trainer, device=SIM, method="auto", mem_limit="2GB", batch_size=4, quiet=True, ram_limit="900TB"
    )
    assert trainer(network()).plan(classes(64), classes(8)).method
    with pytest.raises(OptionError, match="of RAM are free"):
        trainer(network(), output_dir=tmp_path / "run").fit(classes(64), classes(8))


# --- every wait is needed ---------------------------------------------------------------------------------------------

MODULES = ("runtime.boundary_io", "runtime.partition", "runtime.slots", "runtime.executor", "runtime.host_steps",
           "store.store", "store.tensor_file", "store.graph_ranges", "data.reader")  # fmt: skip
NOT_FOUND = {
    "runtime.boundary_io:InHost.put: self._device.copying(DOWN)": "in the stream that computes it is right, and slow",
    "runtime.host_steps:HostSteps.bring: used.wait()": "steps are over too soon: has a test of its own",
    "runtime.host_steps:HostSteps.bring: self._device.copying(DOWN)": "in the stream that computes it is right, and slow",
    "store.graph_ranges:HostRanges.finish: self._device.copying(DOWN)": "in the stream that computes it is right, and slow",
    "store.graph_ranges:HostRanges._bring: self._device.copying(UP)": "in the stream that computes it is right, and slow",
    "store.graph_ranges:HostRanges.close: self._device.wait(event)": "behind an allocation that failed only",
    "store.store:Store._move: self._device.copying(way)": "in the stream that computes it is right, and slow",
    "store.store:Transfer.settle: self._device.wait(part.result())": "behind errors only",
    "store.store:Store._all: Transfer(self._device, work).wait()": "between threads of the host",
    "store.store:Store.get_all: self.begin_get(items, at_once).wait()": "between threads of the host",
    "runtime.partition:Partition.begin_drop: self.finish_state()": "behind failed allocations only",
    "runtime.partition:Partition.begin_drop: self._stepping.wait()": "a planned home keeps its memory for itself",
    "runtime.partition:Partition.update: self.finish_state()": "the executor has done so before",
    "runtime.executor:Executor._wait_for_homes: partition.transfer.wait()": "who saves a checkpoint waits as well",
    "runtime.partition:Partition._update_on_host: before.wait()": "the mark of the homes waits, unless others changed",
    "runtime.executor:Executor.flush: transfer.wait()": "who saves a checkpoint waits as well",
    "runtime.executor:Executor._roll_back: transfer.follow()": "behind failed allocations only",
    "runtime.slots:Slots.take: best.free()": "where a slot grows: has a test of its own",
}
SITES = [site for site in sites(*(f"seqpart.{module}" for module in MODULES)) if str(site) not in NOT_FOUND]


def deep():
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(7)), nn.Linear(8, 4))


ADAM = {"optimizer": "adam", "partitions": (0, 2, 4, 6)}
WAYS = [
    (How(slots=2, boundary_tier="host"), ADAM),
    (How(slots=1), ADAM | {"clip_grad_norm": 0.1}),
    (How(slots=2, boundary_tier="disk"), ADAM | {"ram_limit": "1", "micro_batch_size": 1}),
    (How(slots=2), ADAM | {"clip_grad_norm": 0.1, "save_every": 2, "partitions": (0, 4)}),
    (How(slots=2, keeps=0, offloads="host"), ADAM),
    (How(slots=1, keeps=0, offloads="disk"), ADAM | {"micro_batch_size": 2}),
    (How(slots=2, weights=1), ADAM | {"save_every": 1}),
    (How(slots=2, stays=0.5, host_steps=True), ADAM),
    (How(slots=2, host_steps=True), ADAM | {"clip_grad_norm": 0.1}),
    (How(slots=1, host_steps=True), ADAM | {"save_every": 1}),
]
FIRST = {"OnDisk": 2, "TensorFiles": 2, "HostRanges": 4, "DiskRanges": 5, "Partition.begin_load": 6, "HostSteps": 7}
"""The way that is tried first for the waits of a class or a method, which others do without."""


def is_right(seed, trained, how, options, right):
    return first_difference(trained.run(how, device=f"{SIM}@{seed}", **options), right) is None


def noticed(ways):
    """Whether training by one of `ways`, arguments of `is_right`, is found to be wrong. The first is tried at length first."""
    every = [(0, way) for way in ways] + [(seed, ways[0]) for seed in range(1, 12)]
    for seed, way in [*every, *itertools.product(range(1, 12), ways[1:])]:
        try:
            if not is_right(seed, *way):
                return True
        except Exception as error:
            assert not isinstance(error, OptionError | DoesNotFit)
            return True
    return False


@pytest.fixture(scope="module")
def ways(tmp_path_factory):
    """For `noticed`, each of them right as it is: one that always failed found every wait needed."""
    with pytest.MonkeyPatch.context() as patch:
        deep_one = Trained(patch, tmp_path_factory.mktemp("deep"), fresh(deep), numbers((8,)))
        model, _, partitions, options = CASES["tied, sgd, bf16"]
        tied = Trained(patch, tmp_path_factory.mktemp("tied"), fresh(model), tokens(), partitions=partitions, **options)
        found = [
            (trained, how, asked, trained.run(FULL, **{key: value for key, value in asked.items() if key != "ram_limit"}))
            for trained, how, asked in [*((deep_one, *way) for way in WAYS), (tied, How(slots=2), {})]
        ]
        assert all(is_right(0, *way) for way in found)
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("site", SITES, ids=str)
def test_without_any_one_wait_the_bits_differ_or_two_accesses_are_named(site, ways):
    first = ways[FIRST.get(site.owner, FIRST.get(site.owner.partition(".")[0], 0))]
    with without(site):
        assert noticed([first, *(way for way in ways if way is not first)]), f"{site} is not needed, or is not checked"
