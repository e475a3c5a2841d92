"""What a visit of a partition leaves to the next: its buffers whatever became of them; no state that is not kept, no error."""

import copy

import pytest
import torch
from torch import nn

from seqpart.device.pages import aligned
from seqpart.errors import CorruptFile
from seqpart.model.optimizers import choose
from seqpart.runtime.slots import Slot, at_once
from tests.runtime.test_partition import Home


def through(partition, x, **options):
    """What the partition makes of its input."""
    (entering,) = partition.entering
    (output,) = partition.forward({entering.number: x}, **options).values()
    return output


def at_home(tmp_path, module, shape):
    """One partition of one block whose weights are at home; with the store and its slot."""
    made = Home(tmp_path, [module], choose("sgd", lr=0.1, momentum=0.9), shape=shape)
    return made.partition, made.store, Slot(made.slot, at_once)


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
        through(partition, torch.full((1, 1), value), training=True, key=(0,)).sum().backward()
        partition.update()
        drop(partition)
    views = read_home(partition, store)
    assert (views["last"].item(), views["before"].item()) == (7.0, 5.0)
    store.close()


def test_statistics_of_a_partition_without_parameters_go_home(tmp_path):
    """Only an optimizer's step marked a partition as changed, so a BatchNorm without weights lost its statistics."""
    partition, store, slot = at_home(tmp_path, nn.BatchNorm1d(3, affine=False), (3,))
    load(partition, slot)
    through(partition, torch.randn(8, 3), training=True, key=(0,))
    partition.update()
    expected = partition.blocks[0].module.running_mean.clone()
    drop(partition, keep_state=False)
    assert expected.count_nonzero() == 3
    assert torch.equal(read_home(partition, store)["running_mean"], expected)
    store.close()


def test_optimizer_state_that_is_not_kept_is_not_found_again(tmp_path):
    """The state of an earlier visit stayed at home, to be loaded as if it were the last one's."""
    partition, store, slot = at_home(tmp_path, nn.Linear(3, 3), (3,))
    for keep_state in (True, False):
        load(partition, slot)
        through(partition, torch.ones(2, 3), training=True, key=(0,)).sum().backward()
        partition.update()
        drop(partition, keep_state=keep_state)
        assert (partition.blocks[0].state_home in store) == keep_state
    store.close()


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
        assert torch.equal(through(partition, x, training=True, key=(0,)), plain(x))
        partition.update()
        drop(partition)
    assert torch.equal(read_home(partition, store)["first.running_mean"], plain.second.running_mean)
    assert plain.first.running_mean is plain.second.running_mean
    store.close()


def test_a_transfer_that_failed_is_not_told_again_in_the_next_visit(tmp_path):
    """A visit waits for the partition's transfer before it, and that one's error was raised in every visit from then on."""
    partition, store, slot = at_home(tmp_path, nn.Linear(3, 3), (3,))
    path = store.path(partition.blocks[0].home)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CorruptFile):
        load(partition, slot)
    partition.release()
    path.write_bytes(whole)
    load(partition, Slot(slot.buffer, at_once))
    drop(partition)
    store.close()
