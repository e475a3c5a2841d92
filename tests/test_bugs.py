"""One test for each bug that there was, with its story. Append only."""

import copy
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from seqpart import Trainer
from seqpart.costs.blocks import LiveBytes, measure_chain, measure_loss
from seqpart.costs.hardware import measure_speeds
from seqpart.costs.partition import slot_bytes
from seqpart.data.row_file import RowLayout, Rows
from seqpart.errors import CorruptFile, DirectoryUnusable, OptionError, OutOfMemory, ScheduleError
from seqpart.execution.partition import Partition
from seqpart.execution.slots import Slot, at_once
from seqpart.files.direct import PAGE, aligned, probe_disk
from seqpart.memory.device import Device, open_device
from seqpart.memory.sampler import Sampler
from seqpart.memory.usage import Reading
from seqpart.model.blocks import as_chain
from seqpart.model.optimizers import choose, describe
from seqpart.offload.host_pool import Extents, HostPool
from seqpart.offload.layout import Layout, TensorSpec
from seqpart.offload.store import Store
from seqpart.schedule.steps import parse


def at_home(tmp_path, module, shape):
    """One partition of one block whose weights are at home; with the store and its slot."""
    device, chain = Device(), as_chain([module])
    costs = measure_chain(chain, shape, 2)
    store, choice = Store(tmp_path, device), choose("sgd", lr=0.1, momentum=0.9)
    block, cost = chain[0], costs[0]
    flat = aligned(cost.layout.padded_nbytes)
    built = block.build(device, 0)
    tensors = {**dict(built.named_parameters()), **dict(built.named_buffers())}
    with torch.no_grad():
        for name, view in cost.layout.views(flat).items():
            view.copy_(tensors[name])
    store.put(block.home, cost.layout, flat)
    partition = Partition(0, chain, costs, store, device, optimizer=choice, seed=0)
    return partition, store, Slot(device.empty(slot_bytes(costs, choice)), at_once)


def load(partition, slot):
    partition.begin_load(slot, to_update=True)
    partition.finish_load(learns=True)


def drop(partition, *, keep_state=True):
    _, free, _ = partition.begin_drop(keep_state=keep_state)
    free()


def read_home(partition, store):
    block = partition.blocks[0]
    flat = aligned(store.layout(block.home).padded_nbytes)
    store.get(block.home, flat)
    return store.layout(block.home).views(flat)


def test_one_activation_used_twice_is_two_links_of_the_chain():
    """Sequential.named_children() names a module once, so a ReLU used twice was left out the second time: another network."""
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu)
    assert [(block.name, block.kind) for block in as_chain(model)] == [
        ("0", "Linear"),
        ("1", "ReLU"),
        ("2", "Linear"),
        ("3", "ReLU"),
    ]


def test_probing_a_file_as_if_it_were_a_folder_is_explained(tmp_path):
    """The clean-up after the failed probe raised NotADirectoryError itself and hid the explanation."""
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(DirectoryUnusable, match="Give a directory"):
        probe_disk(path)


def test_two_threads_never_get_the_same_range_of_an_arena(monkeypatch):
    """The store's two threads place new homes at once; without a lock both could be given the same bytes."""
    entered, met, real = threading.Lock(), threading.Event(), Extents.take

    def take(self, nbytes):
        if not entered.acquire(blocking=False):
            met.set()
            return real(self, nbytes)
        met.wait(0.2)  # long enough for another thread to come in, if anything lets it
        entered.release()
        return real(self, nbytes)

    monkeypatch.setattr(Extents, "take", take)
    host_pool = HostPool(4 * PAGE, Device())
    threads = [threading.Thread(target=host_pool.take, args=(PAGE,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not met.is_set()


def test_any_flipped_bit_of_a_home_s_header_is_named(tmp_path):
    """A longer header length, another end of a tensor or a changed word of metadata was taken for the file we wrote."""
    store = Store(tmp_path, Device())
    layout = Layout.of([TensorSpec(name="w", shape=(8,), dtype=torch.float32)])
    flat = aligned(layout.nbytes)
    flat.zero_()
    store.put("home", layout, flat)
    path = store.path("home")
    whole = path.read_bytes()
    for bit in [*range(8 * 200), 8 * PAGE - 1]:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(CorruptFile, match=r"home.*\.safetensors"):
            store.get("home", flat)
    store.close()


def test_a_file_cut_off_in_its_header_is_not_judged_by_an_earlier_one(tmp_path):
    """The header was read into a reused buffer and compared whole, so an empty file passed as the one read before."""
    store = Store(tmp_path, Device())
    layout = Layout.of([])
    store.put("home", layout, aligned(0))
    store.path("home").write_bytes(b"")
    with pytest.raises(CorruptFile, match=r"home.*\.safetensors"):
        store.get("home", aligned(0))
    store.close()


def test_a_put_that_fails_leaves_the_old_home_readable_under_its_old_layout(tmp_path, monkeypatch):
    """The home took the new layout before its bytes were written, so after a full disk the good old file looked damaged."""
    store = Store(tmp_path, Device())
    small, large = (Layout.of([TensorSpec(name="w", shape=(n,), dtype=torch.float32)]) for n in (4, 8))
    flat = aligned(large.nbytes)
    small.views(flat)["w"].fill_(3)
    store.put("home", small, flat)

    def broken(*_):
        raise MemoryError

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr("seqpart.offload.tensor_file.encode_header", broken)
        store.put("home", large, flat)
    back = aligned(small.nbytes)
    store.get("home", back)
    assert small.views(back)["w"].tolist() == [3, 3, 3, 3]
    store.close()


def test_more_rows_than_announced_are_refused(tmp_path):
    """Rows beyond the last chunk had no room, so append waited for it in an endless loop."""
    rows = Rows(RowLayout((2,), torch.float32), 3, tmp_path / "rows.safetensors", Device(), None)
    rows.append(torch.zeros(2, 2))
    with pytest.raises(AssertionError, match="4 rows came, 3 were expected"):
        rows.append(torch.zeros(2, 2))
    rows.discard()


def test_a_word_in_brackets_is_not_taken_for_a_phase():
    """Any word from [ to ] counted as a phase, and steps without a space between them as two."""
    for text in ("[lunch] L0", "[train] L0", "L0D0"):
        with pytest.raises(ScheduleError, match="expected a step"):
            parse(text)


def test_an_optimizer_whose_first_step_is_special_is_refused():
    """SGD with dampening takes its first gradient undamped; from a momentum of zeros it would take another step."""
    with pytest.raises(OptionError, match="not a step from a state of zeros"):
        describe("sgd", lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5))


class LastTwo(nn.Module):
    """Keeps what it saw last and before that, by giving one tensor another name."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("last", torch.zeros(1))
        self.register_buffer("before", torch.zeros(1))

    def forward(self, x):
        self.before = self.last
        self.last = x.detach().sum().reshape(1)
        return x * self.weight


def test_a_buffer_that_takes_another_s_place_keeps_its_value(tmp_path):
    """Replaced buffers were copied home one by one, so one that lay in another's place was overwritten first."""
    partition, store, slot = at_home(tmp_path, LastTwo(), (1,))
    for value in (5.0, 7.0):
        load(partition, slot)
        partition.forward(torch.full((1, 1), value), training=True, key=(0,)).sum().backward()
        partition.update()
        drop(partition)
    views = read_home(partition, store)
    assert (views["last"].item(), views["before"].item()) == (7.0, 5.0)
    store.close()


def test_statistics_of_a_partition_without_parameters_go_home(tmp_path):
    """Only an optimizer's step marked a partition as changed, so a BatchNorm without weights lost its statistics."""
    partition, store, slot = at_home(tmp_path, nn.BatchNorm1d(3, affine=False), (3,))
    load(partition, slot)
    partition.forward(torch.randn(8, 3), training=True, key=(0,))
    partition.update()
    expected = partition.blocks[0].module.running_mean.clone()
    drop(partition, keep_state=False)
    assert expected.count_nonzero() == 3
    assert torch.equal(read_home(partition, store)["running_mean"], expected)
    store.close()


def test_a_loss_does_not_count_the_output_that_it_judges():
    """The output was born under the counter, so each prediction held it twice: once with the block, once with the loss."""
    loss, its_gradient, gradient_of_the_output = 4, 4, 2 * 1000 * 4
    assert measure_loss(lambda y: y.sum(), (1000,), 2) == loss + its_gradient + gradient_of_the_output


def test_optimizer_state_that_is_not_kept_is_not_found_again(tmp_path):
    """The state of an earlier visit stayed at home, to be loaded as if it were the last one's."""
    partition, store, slot = at_home(tmp_path, nn.Linear(3, 3), (3,))
    for keep_state in (True, False):
        load(partition, slot)
        partition.forward(torch.ones(2, 3), training=True, key=(0,)).sum().backward()
        partition.update()
        drop(partition, keep_state=keep_state)
        assert (partition.blocks[0].state_home in store) == keep_state
    store.close()


def test_a_run_shorter_than_twenty_samples_has_its_file_pages_counted(monkeypatch):
    """File pages were looked at with every twentieth sample only, so the proof of a short run said that they grew by 0."""

    class Still:
        def read(self):
            return 0

    sizes = iter([1000, 5000])
    monkeypatch.setattr("seqpart.memory.sampler.read_process", lambda: Reading(file=next(sizes)))
    sampler = Sampler(Still(), limit=1)
    sampler.stop()
    assert sampler.file_growth == 4000


def test_a_device_whose_number_was_forgotten_is_not_taken_for_the_first():
    """`cuda:` was read as cuda:0."""
    with pytest.raises(OptionError, match="expected auto, cpu, cuda or cuda:N"):
        open_device("cuda:")


class Sharing(nn.Module):
    """Two submodules that hold the same buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        self.second.running_mean = self.first.running_mean

    def forward(self, x):
        return self.second(self.first(x))


def test_a_buffer_shared_by_two_submodules_stays_shared(tmp_path):
    """It was attached under its first name only: the second kept old values, and nothing at all after the first drop."""
    module = Sharing()
    plain = copy.deepcopy(module)
    partition, store, slot = at_home(tmp_path, module, (3,))
    for _ in range(3):
        x = torch.randn(8, 3)
        load(partition, slot)
        assert torch.equal(partition.forward(x, training=True, key=(0,)), plain(x))
        partition.update()
        drop(partition)
    assert torch.equal(read_home(partition, store)["first.running_mean"], plain.second.running_mean)
    assert plain.first.running_mean is plain.second.running_mean
    store.close()


def classified(rows, shape, classes=3):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, *shape, generator=generator), torch.arange(rows) % classes


def trained(tmp_path, model, shape, **options):
    options = {"mem_limit": "2GB", "method": "sil", "epochs": 1, "batch_size": 16, "output_dir": tmp_path / "run", **options}
    return Trainer(model, quiet=True, **options).fit(classified(48, shape), classified(12, shape))


def test_two_batch_norms_in_one_partition_train(tmp_path):
    """Buffers were views of one slot, so the second's statistics counted as a change of what backward needs of the first."""
    plain = nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    model = copy.deepcopy(plain)
    trained(tmp_path, model, (2, 4, 4), method="full", optimizer="sgd", lr=0.1, shuffle=False)
    x, y = classified(48, (2, 4, 4))
    step = torch.optim.SGD(plain.parameters(), lr=0.1, fused=True)
    for rows, labels in zip(x.split(16), y.split(16), strict=True):
        nn.functional.cross_entropy(plain(rows), labels).backward()
        step.step()
        step.zero_grad()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_a_block_that_writes_into_its_input_is_no_user_s_mistake(tmp_path):
    """Its cost was found on a leaf, which must not be written into: Linear, ReLU(inplace=True) was refused as a model."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
    in_place = measure_chain(as_chain(model), (4,), 2)[1]
    assert (in_place.saved, in_place.saved_alone, in_place.inference_peak) == (0, 0, 0)
    assert trained(tmp_path, model, (4,), partitions=(0, 2)).accuracy is not None


def test_memory_that_runs_out_in_an_update_leaves_nothing_loaded(tmp_path, monkeypatch):
    """Only a failed forward or backward was cleaned up after: a module given alive kept half-updated views of the slot."""
    model = nn.Sequential(nn.Linear(4, 3))
    before = copy.deepcopy(model.state_dict())

    def half_done(partition, *_):
        with torch.no_grad():
            partition.trainable[0].add_(1)
        raise MemoryError

    monkeypatch.setattr(Partition, "update", half_done)
    with pytest.raises(OutOfMemory, match="memory ran out in U0"):
        trained(tmp_path, model, (4,))
    for name, tensor in before.items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_copies_of_the_ram_tier_start_no_threads(tmp_path):
    """tensor.copy_ started an OpenMP team in the reader's and in each I/O thread; their stacks are charged to the limit."""
    device = Device()
    host_pool, flat = HostPool(8 << 20, device), aligned(1 << 20).zero_()
    layout = Layout.of([TensorSpec(name="w", shape=(1 << 18,), dtype=torch.float32)])
    store = Store(tmp_path, device, host_pool)
    rows = Rows(RowLayout((256,), torch.float32), 1024, tmp_path / "rows", device, host_pool)
    rows.append(torch.zeros(1024, 256))
    rows.finish()
    counts = []

    def work():
        counts.append(len(list(Path("/proc/self/task").iterdir())))
        store.put("home", layout, flat)
        store.get("home", flat)
        rows.read_chunk(0, flat)
        counts.append(len(list(Path("/proc/self/task").iterdir())))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert counts[0] == counts[1]
    store.close()


def test_measuring_the_machine_takes_little_memory_whatever_the_batch(tmp_path, monkeypatch):
    """The matrix rate was measured on a whole batch of rows 1024 wide: 0.5 GB for 60,000 rows, unplanned and unlimited."""
    held = []

    def watched(*arguments):
        with LiveBytes() as live:
            rates = measure_speeds(*arguments)
        held.append(live.peak)
        return rates

    monkeypatch.setattr("seqpart.planning.inputs.measure_speeds", watched)
    data = (torch.zeros(5000, 1), torch.arange(5000) % 3)
    Trainer([nn.Linear(1, 3)], mem_limit="2GB", method="sil", batch_size=5000, output_dir=tmp_path).prepare(data, data)
    assert held[0] < 12 << 20


def test_a_second_plan_does_not_ask_again_for_the_memory_that_the_first_took(tmp_path, monkeypatch):
    """After a failed allocation --ram-limit was compared with what the run's own host pool had left free, and refused."""
    free = iter([1 << 30])
    monkeypatch.setattr("seqpart.planning.inputs.host_memory_free", lambda: next(free, 0))
    preparation = Trainer([nn.Linear(4, 3)], mem_limit="2GB", method="sil", ram_limit="64MB", output_dir=tmp_path).prepare(
        classified(48, (4,)), classified(12, (4,))
    )
    first = preparation.planned()
    again = preparation.prepare(micro_batch=8, starts=first.plan.starts)
    assert again.host_pool_bytes == first.host_pool_bytes > 0


@pytest.mark.parametrize(("shape", "regress"), [((2, 4, 4), False), ((6,), True)])
def test_full_training_asks_its_loss_about_the_last_block_only(shape, regress, tmp_path):
    """Planning put the true loss behind inner blocks too, so images and every regression with a hidden layer were refused."""
    x, y = classified(48, shape)
    model = [nn.Dropout(0.0), nn.Flatten(), nn.Linear(x[0].numel(), 4), nn.Linear(4, 1 if regress else 3)]
    data = (x, y.float() if regress else y)
    result = Trainer(model, mem_limit="2GB", method="full", epochs=1, quiet=True, output_dir=tmp_path / "run").fit(data, data)
    assert result.test_loss > 0
