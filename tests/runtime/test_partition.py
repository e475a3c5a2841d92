"""A partition that comes and goes trains exactly as one that stays, to the bit."""

import copy

import pytest
import torch
from torch import nn

from seqpart.device.device import Device
from seqpart.device.opening import open_device
from seqpart.device.pages import aligned
from seqpart.errors import CorruptFile
from seqpart.model.blocks import as_chain
from seqpart.model.optimizers import choose, total_norm
from seqpart.model.tensors import tensors_of
from seqpart.profile.blocks import measure_chain
from seqpart.profile.partition import gradient_layouts, slot_bytes, state_layouts
from seqpart.runtime.partition import Partition
from seqpart.runtime.slots import Slot, at_once
from seqpart.store.host_pool import HostPool
from seqpart.store.store import Store

SHAPE, SEED = (6,), 11
CHOICES = {
    "adam": choose("adam", lr=0.01),
    "adamw": choose("adamw", lr=0.01, weight_decay=0.1),
    "sgd": choose("sgd", lr=0.05),
    "momentum": choose("sgd", lr=0.05, momentum=0.9),
}
choices = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU on this machine")


def network():
    """Weights, statistics, a frozen parameter and a block with nothing."""
    frozen = nn.Linear(12, 12)
    frozen.bias.requires_grad_(False)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), frozen, nn.Linear(12, 3))


class Home:
    """One partition of all blocks of `model`, its weights at home; the slot is spoiled whenever it is free."""

    def __init__(self, folder, model, choice=CHOICES["adam"], *, shape=SHAPE, device=None, budget=0):
        folder.mkdir(exist_ok=True)
        self.device = device or Device()
        host_pool = HostPool(budget, self.device) if budget else None
        self.chain, self.store = as_chain(model), Store(folder, self.device, host_pool)
        self.costs = measure_chain(self.chain, shape, 4)
        self.partition = Partition(0, self.chain, self.costs, self.store, self.device, optimizer=choice, seed=SEED)
        self.slot = self.device.empty(slot_bytes(self.costs, state_layouts(self.chain, self.costs, choice), gradients=True))
        for block, cost in zip(self.chain, self.costs, strict=True):
            flat = aligned(cost.layout.padded_nbytes)
            tensors = tensors_of(block.build(self.device, SEED))
            with torch.no_grad():
                for name, view in cost.layout.views(flat).items():
                    view.copy_(tensors[name])
            self.store.put(block.home, cost.layout, flat)
        self.partition.release()

    def load(self, *, to_update=True, learns=True):
        """A whole visit's beginning; the bytes that it read."""
        self.slot.fill_(0xAB)
        filled = self.device.mark()
        self.partition.begin_load(Slot(self.slot, lambda: self.device.after(filled)), to_update=to_update)
        read = self.partition.finish_load(learns=learns)
        self.partition.finish_state()
        return read

    def forward(self, x, **options):
        """What the partition makes of its input."""
        (entering,) = self.partition.entering
        (output,) = self.partition.forward({entering.number: x}, **options).values()
        return output

    def drop(self, *, keep_state=True, gradients=False):
        """A whole visit's end; the bytes that it wrote."""
        slot, free, written = self.partition.begin_drop(keep_state=keep_state, gradients=gradients)
        free()
        assert slot.buffer is self.slot
        return written

    def tensors(self):
        """Everything at home, by the model's own names."""
        found = {}
        for block in self.chain:
            layout = self.store.layout(block.home)
            flat = aligned(layout.padded_nbytes)
            self.store.get(block.home, flat)
            found |= {f"{block.name}.{name}": view for name, view in layout.views(flat).items()}
        return found


@pytest.fixture
def home(tmp_path):
    made = Home(tmp_path, network())
    yield made
    made.store.close()


def batches(count, device="cpu"):
    generator = torch.Generator().manual_seed(5)
    made = [(torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)) for _ in range(count)]
    return [(x.to(device), labels.to(device)) for x, labels in made]


def loss_of(output, labels):
    return nn.functional.cross_entropy(output, labels)


def train_plain(model, choice, data, *, micro_batches=1, clip=None):
    """What anyone would write: the model stays, one optimizer, gradients summed over micro-batches."""
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = choice.build(parameters)
    for m, (x, labels) in enumerate(data, start=1):
        loss_of(model(x), labels).backward()
        if m % micro_batches == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
            optimizer.zero_grad()
    return {name: tensor.detach().cpu() for name, tensor in tensors_of(model).items()}


def train_visits(home, data, *, visit=1, micro_batches=1, clip=None):
    """The same steps, but the partition goes home after every `visit` micro-batches."""
    for first in range(0, len(data), visit):
        home.load()
        for m, (x, labels) in enumerate(data[first : first + visit], start=1):
            loss_of(home.forward(x, training=True, key=(first, m)), labels).backward()
            if m % micro_batches == 0:
                update(home.partition, clip)
        home.drop()


def update(partition, clip=None):
    """With the norm of this partition alone, as where each is trained by itself."""
    norm = total_norm([*partition.gradient_norms().values()])
    partition.update(clip=None if clip is None else (clip, norm))


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@choices
@pytest.mark.parametrize("visit", [1, 2, 6])
@pytest.mark.parametrize("budget", [0, 1 << 20], ids=["disk", "ram"])
def test_coming_and_going_trains_as_staying_does(tmp_path, choice, visit, budget):
    model = network()
    plain = copy.deepcopy(model)
    home = Home(tmp_path, model, choice, budget=budget)
    train_visits(home, batches(6), visit=visit)
    assert home.store.tier(home.chain[0].home) == ("ram" if budget else "disk")
    assert_same(home.tensors(), train_plain(plain, choice, batches(6)))
    home.store.close()


@pytest.mark.parametrize("clip", [None, 0.05])
def test_micro_batches_and_clipping_are_those_of_a_plain_loop(tmp_path, clip):
    model = network()
    plain = copy.deepcopy(model)
    home = Home(tmp_path, model)
    train_visits(home, batches(6), visit=3, micro_batches=3, clip=clip)
    assert_same(home.tensors(), train_plain(plain, CHOICES["adam"], batches(6), micro_batches=3, clip=clip))
    home.store.close()


def test_each_gradient_s_norm_is_told(home):
    (x, labels), *_ = batches(1)
    home.load()
    assert home.partition.gradient_norms() == {}
    loss_of(home.forward(x, training=True, key=(0,)), labels).backward()
    trainable = home.partition.trainable.items()
    found = {place: one.norm for place, one in home.partition.gradient_norms().items()}
    assert found == {place: parameter.grad.norm() for place, parameter in trainable}


def test_gradients_that_wait_at_home_for_their_norm_come_back_bit_for_bit(home, tmp_path):
    torch.manual_seed(0)  # the weights that `home` was made with
    stays = Home(tmp_path / "stays", network())
    for x, labels in batches(2):
        for visited in (home, stays):
            visited.load(to_update=visited is stays)
            loss_of(visited.forward(x, training=True, key=(0,)), labels).backward()
        home.drop(gradients=True)
        home.load()
        assert home.partition.gradient_norms() == stays.partition.gradient_norms()
        for visited in (home, stays):
            update(visited.partition, 0.05)
            visited.drop()
        assert_same(home.tensors(), stays.tensors())
    stays.store.close()


def test_each_step_is_at_its_own_rate_whatever_the_last_one_was(tmp_path):
    """Powers of two scale a learning rate exactly."""
    model, data = network(), batches(3)
    plain, home = copy.deepcopy(model), Home(tmp_path, model, CHOICES["sgd"])
    for rate, batch in zip((1.0, 0.5, 2.0), data, strict=True):
        expected = train_plain(plain, choose("sgd", lr=0.05 * rate), [batch])
        home.load()
        loss_of(home.forward(batch[0], training=True, key=(0,)), batch[1]).backward()
        home.partition.update(rate)
        home.drop()
    assert_same(home.tensors(), expected)
    home.store.close()


def test_an_update_frees_the_gradients(home):
    (x, labels), *_ = batches(1)
    home.load()
    loss_of(home.forward(x, training=True, key=(0,)), labels).backward()
    assert all(parameter.grad is not None for parameter in home.partition.trainable.values())
    home.partition.update()
    assert all(parameter.grad is None for parameter in home.partition.trainable.values())


def test_frozen_parameters_are_not_trained_and_have_no_state(home):
    assert not any("3.bias" in spec.name for spec in state_layouts(home.chain, home.costs, CHOICES["adam"])[3].specs)
    before = home.tensors()["3.bias"].clone()
    train_visits(home, batches(2))
    assert torch.equal(home.tensors()["3.bias"], before)


def test_state_that_is_not_kept_starts_again_at_zero(tmp_path):
    model = network()
    plain = copy.deepcopy(model)
    home = Home(tmp_path, model)
    for x, labels in batches(3):
        home.load()
        loss_of(home.forward(x, training=True, key=(0,)), labels).backward()
        home.partition.update()
        home.drop(keep_state=False)
    for batch in batches(3):
        expected = train_plain(plain, CHOICES["adam"], [batch])
    assert_same(home.tensors(), expected)
    home.store.close()


def test_dropout_is_a_function_of_place_and_not_of_order(tmp_path):
    home = Home(tmp_path, nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Dropout(0.5)))
    x = torch.ones(4, 6)
    home.load(to_update=False)
    first, other = (home.forward(x, training=True, key=key) for key in ((1, 2, 3), (1, 2, 4)))
    first, other = first.detach().clone(), other.detach().clone()
    home.drop(keep_state=False)
    home.load(to_update=False)
    torch.manual_seed(99)
    assert torch.equal(home.forward(x, training=True, key=(1, 2, 3)), first)
    assert not torch.equal(first, other)
    # Two dropouts with one mask would keep half of the numbers, with a mask each a quarter.
    assert (first != 0).float().mean() < 0.4
    home.store.close()


def test_without_training_dropout_and_statistics_rest(home):
    home.load(to_update=False)
    mean = home.chain[1].module.running_mean.clone()
    home.forward(torch.randn(4, 6), training=False, key=(0,))
    assert torch.equal(home.chain[1].module.running_mean, mean)


def test_weights_that_did_not_change_are_not_written(home):
    home.load(to_update=False)
    home.forward(torch.randn(4, 6), training=False, key=(0,))
    before = home.store.traffic.bytes_written
    assert home.drop() == 0
    assert home.store.traffic.bytes_written == before
    assert home.chain[0].state_home not in home.store


def test_a_loaded_module_lies_in_the_slot_and_an_emptied_one_holds_nothing(home):
    home.partition.begin_load(Slot(home.slot, at_once), to_update=True)
    home.partition.finish_load(learns=True)
    low = home.slot.data_ptr()
    for block in home.chain:
        for tensor in tensors_of(block.module).values():
            assert low <= tensor.data_ptr() < low + len(home.slot)
    home.drop()
    assert all(tensor.numel() == 0 for block in home.chain for tensor in tensors_of(block.module).values())


def test_the_slot_is_filled_from_end_to_end_and_no_further(tmp_path):
    home = Home(tmp_path, network())
    home.load()
    states = state_layouts(home.chain, home.costs, CHOICES["adam"])
    rooms = [cost.layout.padded_nbytes for cost in home.costs]
    assert slot_bytes(home.costs, []) == home.partition.needs(to_update=False, gradients=False) == sum(rooms)
    rooms += [layout.padded_nbytes for layout in states]
    assert slot_bytes(home.costs, states) == home.partition.needs(to_update=True, gradients=False) == sum(rooms)
    rooms += [layout.padded_nbytes for layout in gradient_layouts(home.costs)]
    assert len(home.slot) == home.partition.needs(to_update=True, gradients=True) == sum(rooms)
    home.drop()
    home.store.close()


def test_a_load_that_fails_leaves_nothing_after_a_release_and_can_be_tried_again(home):
    path = home.store.path(home.chain[3].home)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CorruptFile, match="shorter"):
        home.load()
    home.partition.release()
    assert all(tensor.numel() == 0 for block in home.chain for tensor in tensors_of(block.module).values())
    path.write_bytes(whole)
    home.load()


def test_damaged_optimizer_state_is_named_and_not_trained_with(home):
    train_visits(home, batches(1))
    path = home.store.path(home.chain[0].state_home)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CorruptFile, match=r"optimizer.*\.safetensors is damaged"):
        home.load()


class Remembers(nn.Module):
    """Assigns a new tensor to its buffer instead of writing into the old one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x):
        self.average = 0.5 * self.average + x.detach().mean(0)
        return x * self.weight + self.average


def test_a_buffer_that_the_module_replaced_is_kept(tmp_path):
    model = nn.Sequential(Remembers(), nn.Linear(6, 3))
    plain = copy.deepcopy(model)
    home = Home(tmp_path, model, CHOICES["sgd"])
    train_visits(home, batches(4), visit=2)
    assert_same(home.tensors(), train_plain(plain, CHOICES["sgd"], batches(4)))
    home.store.close()


def test_tied_parameters_of_one_block_train_as_one(tmp_path):
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), nn.Linear(6, 3))
    model[0][1].weight = model[0][0].weight
    plain = copy.deepcopy(model)
    home = Home(tmp_path, model)
    train_visits(home, batches(3))
    assert_same(home.tensors(), train_plain(plain, CHOICES["adam"], batches(3)))
    home.store.close()


@pytest.mark.gpu
@gpu
@choices
def test_on_a_gpu_too_coming_and_going_trains_as_staying_does(tmp_path, choice):
    """Bit for bit: both run the same kernels on the same shapes, and none of them adds in an order of chance."""
    device, model = open_device("cuda"), network()
    plain = copy.deepcopy(model).cuda()
    home = Home(tmp_path, model, choice, device=device)
    train_visits(home, batches(6, "cuda"), visit=2)
    assert_same(home.tensors(), train_plain(plain, choice, batches(6, "cuda")))
    home.store.close()


def test_a_partition_that_begins_to_learn_later_begins_without_a_state(tmp_path):
    """Its BatchNorm's statistics changed while it was frozen, so it was saved, and with it what lay in the memory for its
    optimizer state: moments to begin with were whatever had been there."""
    plain, home = network(), Home(tmp_path, network())
    plain.load_state_dict(home.tensors())
    for frozen in (True, False):
        for block, cost in zip(home.chain, home.costs, strict=True):
            block.learns = dict.fromkeys(cost.trainable, not frozen)
        for x, labels in batches(2):
            home.load()
            loss_of(home.forward(x, training=True, key=(0, 0, 0)), labels).backward() if not frozen else home.forward(
                x, training=True, key=(0, 0, 0)
            )
            home.partition.update()
            home.drop()
        assert any(block.state_home in home.store for block in home.chain) is not frozen
    step = torch.optim.Adam([p for p in plain.parameters() if p.requires_grad], lr=0.01, fused=True)
    for x, _ in batches(2):
        plain(x)
    for x, labels in batches(2):
        step.zero_grad()
        loss_of(plain(x), labels).backward()
        step.step()
    expected = plain.state_dict()
    assert [name for name, tensor in home.tensors().items() if not torch.equal(tensor, expected[name])] == []
    home.store.close()
