"""`sil` on whole models: what passes by the value that is judged waits in the boundary cache with it, and comes along."""

import functools
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from seqpart import Trainer
from seqpart.data.boundary_cache import Boundaries
from seqpart.data.row_packs import Column, PackReader, PackWriter, RowPack
from seqpart.device.device import Device
from seqpart.errors import CorruptFile, ModelError, OptionError
from seqpart.model.packs import Value
from seqpart.store.row_file import RowLayout
from tests.choice import only_quick
from tests.exactly import How
from tests.model.test_packs import MODELS, made
from tests.resuming import Arm, Killed, Stopping, flip, interrupt, kill
from tests.whole_models import Decoder, Dense, UNet


class Untied(Decoder):
    """`sil` trains partitions apart, so its head has a weight of its own."""

    def __init__(self):
        super().__init__()
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())


KINDS = {**{name: kind for name, (kind, _) in MODELS.items()}, "decoder": Untied}
STARTS = {
    "unet": (0, 2, 4),
    "decoder": (0, 2, 4),
    "dense": (0, 1, 3),
    "bands": (0, 2, 3),
    "fan": (0, 3, 5),
    "mixture": (0, 2, 3),
    "states": (0, 2, 4),
}
models = pytest.mark.parametrize("name", KINDS)


def trained(name, folder, *, kind=None, data=None, reporter=None, **options):
    """Returns the model and the result."""
    train, test = data or MODELS[name][1]()
    options = {
        "method": "sil", "mem_limit": "2GB", "partitions": STARTS[name], "epochs": 2, "batch_size": 8, "lr": 0.05,
        "quiet": True,
    } | options  # fmt: skip
    model = made(kind or KINDS[name])
    return model, Trainer(model, None, "sgd", output_dir=folder, **options).fit(train, test, reporter=reporter)


def loss_of(model, x, y):
    found = model(x)
    found = found["logits"] if isinstance(found, dict) else getattr(found, "logits", found)
    return F.cross_entropy(found.flatten(0, -2), y.flatten())


@models
@pytest.mark.parametrize("micro_batch", [8, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.few(3)
def test_the_last_partition_is_given_what_the_whole_model_computes(name, micro_batch, tmp_path):
    """Its test rows went through three partitions and two boundaries, and the loss is that of the model in one go."""
    model, result = trained(name, tmp_path / "run", micro_batch_size=micro_batch)
    assert len(result.plan.partitions) == 3
    assert result.proof.violations == 0
    _, (x, y) = MODELS[name][1]()
    with torch.no_grad():
        assert result.test_loss == pytest.approx(float(loss_of(model.eval(), x, y)), rel=1e-5)


@pytest.mark.parametrize(("name", "theirs"), [("dense", "layers.0."), ("bands", "first."), ("fan", "layers.0.")])
@pytest.mark.few(1)
def test_the_last_partition_learns_as_in_a_plain_loop_behind_frozen_layers(name, theirs, tmp_path):
    """Bit for bit: through the values of the first layer that later ones take, beside the one that was judged."""
    options = {"micro_batch_size": 8, "shuffle": False, "partitions": (0, 1), "epochs": (1, 2)}
    _, result = trained(name, tmp_path / "run", **options)
    plain, (x, y) = made(KINDS[name]), MODELS[name][1]()[0]
    found = load_file(result.weights)
    begun = plain.state_dict() | {key: tensor for key, tensor in found.items() if key.startswith(theirs)}
    plain.load_state_dict(begun)
    for key, parameter in plain.named_parameters():
        parameter.requires_grad_(not key.startswith(theirs))
    step = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.05, fused=True)
    for _ in range(2):
        for first in range(0, len(x), 8):
            F.cross_entropy(plain(x[first : first + 8]), y[first : first + 8]).backward()
            step.step()
            step.zero_grad()
    expected = plain.state_dict()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    first = made(KINDS[name]).state_dict()
    assert all(not torch.equal(found[key], first[key]) for key, _ in plain.named_parameters()), "all of them learned"


@pytest.mark.parametrize("name", only_quick(KINDS, ["dense"]))
def test_a_run_that_is_stopped_goes_on_to_the_same_bits(name, monkeypatch, tmp_path):
    """Also while rows of several values are written, between their boundary and the next, and in recovery."""
    arm = Arm(
        monkeypatch, tmp_path, How(method="sil", slots=2), functools.partial(made, KINDS[name]), MODELS[name][1](),
        partitions=STARTS[name], recovery_epochs=1,
    )  # fmt: skip
    chance = random.Random(name)
    whole, steps = arm.whole()
    events = [(chance.randint(len(steps) // 8, len(steps) // 4), how) for how in (interrupt, kill, interrupt)]
    found, stops = arm.stopped(iter(events), save_every="1")
    assert stops == len(events)
    assert found == whole, events


@pytest.mark.slow
def test_a_damaged_value_that_all_rows_share_is_named(monkeypatch, tmp_path):
    arm = Arm(
        monkeypatch, tmp_path, How(method="sil"), functools.partial(made, Untied), MODELS["decoder"][1](),
        partitions=STARTS["decoder"],
    )  # fmt: skip
    with pytest.raises(Killed):
        arm.fit(reporter=Stopping(60, kill), save_every="1")
    for kept in arm.root.rglob("train-once-*.safetensors"):
        flip(kept, 4096)
    with pytest.raises(CorruptFile, match="train-once"):
        arm.fit(resume=arm.root)


@pytest.mark.parametrize(
    "options", [{"cache_dtype": "bf16"}, {"cache_dtype": "bf16", "ram_limit": "100MB"}], ids=["disk", "ram"]
)
@pytest.mark.slow
def test_what_learns_waits_in_bfloat16_and_masks_and_positions_as_they_are(options, tmp_path):
    exact = trained("decoder", tmp_path / "exact")[1]
    narrow = trained("decoder", tmp_path / "narrow", **options)[1]
    assert narrow.test_loss != exact.test_loss
    assert narrow.test_loss == pytest.approx(exact.test_loss, rel=0.05)
    wide, thin = (result.plan.partitions[0].boundary_row for result in (exact, narrow))
    hidden = 7 * 8 * 4
    assert wide - thin == hidden // 2, "the mask of 7 x 7 positions is as large as before"


@pytest.mark.parametrize("name", only_quick(["unet", "decoder"], ["decoder"]))
@pytest.mark.slow
def test_a_simulated_accelerator_gives_the_same_bits(name, tmp_path):
    """Its copies come late and in any order: what is read before it is there, or freed too early, is noticed."""
    here, there = (
        trained(name, tmp_path / device[:3], device=device, micro_batch_size=4)[1] for device in ("cpu", "sim:rtx3060-12gb@3")
    )
    assert there.weights.read_bytes() == here.weights.read_bytes()
    assert there.proof.violations == 0


def test_as_many_positions_as_rows_are_not_taken_for_rows(tmp_path):
    """Of 7 rows alone the rotary table, (1, 7, 4), and a causal mask, (7, 7), could be either."""
    (x, y), test = MODELS["decoder"][1]()
    model, result = trained("decoder", tmp_path / "run", data=((x[:21], y[:21]), test), batch_size=7)
    with torch.no_grad():
        assert result.test_loss == pytest.approx(float(loss_of(model.eval(), *test)), rel=1e-5)


class Square(nn.Module):
    """A mask of (positions, positions), and nothing that says how many rows there are, passes by its layers."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, tokens):
        hidden, length = self.embed(tokens), tokens.shape[1]
        mask = torch.ones(length, length, device=tokens.device).tril() / length
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(mask @ hidden))
        return self.head(hidden)


def test_a_square_of_as_many_positions_as_rows_is_kept_once(tmp_path):
    """It did not grow with the rows, and was taken for rows all the same: the last micro-batch, which is smaller, broke."""
    (x, y), test = MODELS["decoder"][1]()
    model, result = trained("decoder", tmp_path / "run", kind=Square, data=((x, y), test), batch_size=7, partitions=(0, 3))
    with torch.no_grad():
        assert result.test_loss == pytest.approx(float(loss_of(model.eval(), *test)), rel=1e-5)


class Mean(nn.Module):
    """Later layers take a value without rows that is another for every batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        mean = x.mean(dim=0)
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))) + mean.sum())


def test_a_value_without_rows_that_every_batch_has_another_of_is_refused(tmp_path):
    with pytest.raises(
        ModelError, match="goes past the end of partition 0, has no dimension of rows and differs from batch to batch"
    ):
        trained("dense", tmp_path / "run", kind=Mean, partitions=(0, 2))


def test_synthetic_inputs_stand_for_one_value(tmp_path):
    with pytest.raises(OptionError, match="other tensors go past it, and synthetic inputs stand for one tensor alone"):
        trained("dense", tmp_path / "run", sil_inputs="synthetic", objective="mse", kappa=10.0, shuffle=False)


class Skip(nn.Module):
    """Where it would be cut in balance, a value that learns passes by."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(4, 4) for _ in range(7)), nn.Linear(4, 3)

    def forward(self, x):
        x = first = torch.relu(self.layers[0](x))
        for layer in self.layers[1:5]:
            x = torch.relu(layer(x))
        x = x + first
        for layer in self.layers[5:]:
            x = torch.relu(layer(x))
        return self.head(x)


def test_a_cut_is_where_nothing_else_that_learns_passes_if_there_is_such_a_place(tmp_path):
    cut = trained("dense", tmp_path / "run", kind=Skip, partitions=2)[1].plan.partitions[1].first
    asked = trained("dense", tmp_path / "asked", kind=Skip, partitions=(0, 3))[1].plan.partitions[1]
    assert cut >= 5
    assert asked.first == 3, "elsewhere if that is asked for"


def test_a_mask_that_passes_by_makes_no_cut_worse(tmp_path):
    """Behind the last layer no mask is needed any more, and there the smaller partition would be all but empty."""
    result = trained("decoder", tmp_path / "run", partitions=2)[1]
    assert 2 <= result.plan.partitions[1].first <= 3


@pytest.mark.slow
def test_more_partitions_than_such_places_are_cut_through_skips(tmp_path):
    assert len(trained("dense", tmp_path / "run", kind=Dense, partitions=4)[1].plan.partitions) == 4
    assert len(trained("unet", tmp_path / "unet", kind=UNet, partitions=4)[1].plan.partitions) == 4


# --- Rows of several values ---------------------------------------------------------------------------------------------

TYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float64]
tensors = st.lists(
    st.tuples(st.lists(st.integers(1, 4), max_size=3).map(tuple), st.sampled_from(TYPES)), min_size=1, max_size=5
)


def columns_of(drawn, first):
    found, offset = [], 0
    for number, (shape, dtype) in enumerate(drawn, first):
        found.append(Column(number, shape, dtype, offset))
        offset += found[-1].nbytes
    return tuple(found)


def filled(column, *rows):
    return torch.randint(0, 2, (*rows, *column.shape)).to(column.dtype)


def value_of(number, shape, dtype):
    return Value(number=number, shape=shape, dtype=dtype, nbytes=0, rows=1, learns=True, giver=0, uses=(1,))


@given(with_rows=tensors, once=st.just([]) | tensors, count=st.integers(1, 9), micro_batch=st.integers(1, 4))
def test_what_is_put_together_comes_apart_again(with_rows, once, count, micro_batch, tmp_path_factory):
    columns = columns_of(with_rows, 1)
    layout = RowLayout((sum(column.nbytes for column in columns),), torch.uint8)
    if len(columns) == 1:
        layout = RowLayout(columns[0].shape, columns[0].dtype)
    pack, device = RowPack(1, layout, columns, columns_of(once, 10)), Device()
    boundaries = Boundaries(tmp_path_factory.mktemp("rows"), device, None)
    all_rows = {column.number: filled(column, count) for column in columns}
    shared = {column.number: filled(column) for column in pack.once}
    writer, written = PackWriter(pack, boundaries, "train", 2, count, device), 0
    for first in range(0, count, micro_batch):
        some = {number: tensor[first : first + micro_batch] for number, tensor in all_rows.items()}
        written += writer.append({1: some.pop(1)}, (some | shared).__getitem__)
    writer.finish()
    assert written == count * layout.nbytes
    entering = [value_of(c.number, (1, *c.shape), c.dtype) for c in columns]
    entering += [value_of(c.number, c.shape, c.dtype) for c in pack.once]
    reader = PackReader(pack, boundaries, "train", 2, entering, device)
    kept = boundaries.rows("train", 2)
    memory = torch.empty(kept.layout.chunk_bytes, dtype=torch.uint8)
    kept.read_chunk(0, memory)
    rows = memory.view(-1, layout.stride)[:count, : layout.nbytes].contiguous().view(layout.dtype).view(count, *layout.shape)
    taken = reader.take(rows)
    assert all(torch.equal(taken[number], tensor) for number, tensor in (all_rows | shared).items())
    assert all(tensor.dtype == taken[number].dtype for number, tensor in (all_rows | shared).items())
    boundaries.discard("train", 2)
    assert ("train-once", 2) not in boundaries
