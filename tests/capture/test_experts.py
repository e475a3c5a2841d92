"""Layers whose shapes depend on values: fake tensors have none, so planning runs these for real."""

import copy
import functools
import re

import numpy as np
import pytest
import torch
from torch import nn

from seqpart import Trainer
from seqpart.capture.capture import chain_of
from seqpart.errors import ModelError
from seqpart.model.blocks import as_chain
from seqpart.profile.blocks import _watch_training, measure_chain
from tests.replay import assert_same_as_whole
from tests.whole_models import Experts, Mixture


def experts_at(rows, width=64):
    (cost,) = measure_chain(as_chain([lambda: Experts(width)]), (8, width), rows)
    return cost


def test_experts_are_run_for_real_and_cost_what_a_real_run_of_so_many_rows_does():
    """Planning has no values, so which token goes to which expert is another question every time: the sums are alike."""
    torch.manual_seed(1)
    counted, module = experts_at(64), Experts(64)
    value = counted.takes[0]
    block = as_chain([module])[0]
    real = _watch_training(block, module, dict(module.named_parameters()), [value], 1)
    for name in ("saved", "forward_peak"):
        assert getattr(counted, name) == pytest.approx(getattr(real, name), rel=0.15), name
    assert counted.gives[0].shape == (64, 8, 64)
    assert counted.gradients == sum(parameter.nbytes for parameter in module.parameters())


def test_experts_cost_the_more_the_more_rows_there_are_and_little_to_look_at():
    few, more, most = (experts_at(rows) for rows in (8, 64, 4096))
    assert few.saved < more.saved < most.saved
    assert most.saved == pytest.approx(64 * more.saved, rel=0.1)
    before = torch.random.get_rng_state()
    experts_at(32)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_block_that_reads_a_number_out_of_a_tensor_is_measured_with_numbers():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (1.0 if x.detach().abs().max().item() > 1 else 2.0)

    (plain,), (cost,) = (measure_chain(as_chain([functools.partial(kind, 24, 10)]), (24,), 6) for kind in (nn.Linear, Scaled))
    assert cost.gradients == plain.gradients
    assert cost.saved >= plain.saved


class Matches(nn.Linear):
    """Matches rows by a library that knows numpy, as DETR does."""

    def forward(self, x):
        y = super().forward(x)
        with torch.no_grad():
            order = np.argsort((y @ y.T).sum(1).numpy())
        return y[torch.from_numpy(order)]


class Matching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.matched, self.last = nn.Linear(4, 8), Matches(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.matched(self.first(x)))


def test_a_block_that_computes_with_numpy_is_measured_and_cut_out():
    """`numpy()` of a tensor without values has words of its own in torch: such a layer was refused."""
    assert_same_as_whole(Matching(), torch.randn(6, 4))


class Sorted(nn.Module):
    """Its own forward, between layers, picks rows by their values."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        hidden = self.first(x)
        rows = (hidden[:, 0] > 0).nonzero()[:, 0]
        return self.last(hidden.index_add(0, rows, hidden[rows]))


def test_such_a_layer_is_a_block_and_a_model_with_such_code_between_its_layers_is_one():
    assert_same_as_whole(Mixture(), torch.randint(0, 11, (6, 7)))
    assert_same_as_whole(Sorted(), torch.randn(6, 4), 1, 1)
    (why,) = chain_of(Sorted(), (4,), torch.float32).whole_parts
    assert re.search(r"nonzero: it makes a shape of the values in a tensor.*test_experts\.py:\d+", why)


@pytest.mark.parametrize("method", ["auto", "streamed", "checkpointed"])
@pytest.mark.few(1)
def test_experts_are_blocks_of_a_list_too_and_keep_the_limit(method, tmp_path):
    width, rows = 32, torch.Generator().manual_seed(0)
    blocks = [lambda: nn.Embedding(11, width), lambda: Experts(width), lambda: Experts(width), lambda: nn.Linear(width, 11)]
    x = torch.randint(0, 11, (40, 7), generator=rows)
    result = Trainer(
        blocks, None, "sgd", mem_limit="2GB", method=method, partitions="auto" if method == "auto" else 2, batch_size=16,
        epochs=2, lr=0.1, quiet=True, output_dir=tmp_path / "run",
    ).fit((x, x), (x, x))  # fmt: skip
    assert result.proof.violations == 0
    assert result.train_losses[1] < result.train_losses[0]


class Marked(nn.Module):
    """Judges a row by its state at the marker, as BartForSequenceClassification does: each row must have one."""

    def __init__(self):
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, ids, weight=None):
        states, marks = self.inner(self.embed(ids)).tanh(), ids.eq(1)
        if marks.sum(1).unique().tolist() != [1]:
            raise ValueError("each row must have one marker")
        return self.head(states[marks])


class Inside(nn.Module):
    def __init__(self, after=False):
        super().__init__()
        self.first, self.marked = nn.Linear(5, 3), Marked()
        self.after = after

    def forward(self, ids, weight=None):
        rotated = ids.roll(1, 1)  # by a function: its values are found from those of a row
        first = self.first(ids / 20) if self.after else 0
        found = first + self.marked(rotated)
        return found if self.after else found + self.first(ids / 20)


class Placed(Marked):
    """Reads numbers outside of operations: the tensors in a tuple that is an index."""

    def forward(self, ids, weight=None):
        marks = torch.stack([torch.arange(len(ids)).to(ids), ids.eq(1).int().argmax(1)], 1)
        rows, places = zip(*marks, strict=True)
        return self.head(self.inner(self.embed(ids)).tanh()[rows, places])


class Packed(nn.Module):
    """Packs its rows by their lengths, which are not to be 0."""

    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, ids, weight=None):
        lengths = ids.eq(1).int().argmax(1)
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.cell(packed)[1][0])


class Ends(Exception):
    pass


class Ending:
    def on_step(self, event):
        raise Ends


def trainer_of(model, folder, partitions=1):
    return Trainer(
        model, None, "sgd", mem_limit="2GB", method="streamed", partitions=partitions, batch_size=4, epochs=2, lr=0.1,
        shuffle=False, save_every=1, quiet=True, output_dir=folder,
    )  # fmt: skip


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(
    ("make", "blocks"), [(Marked, 1), (Inside, 2), (lambda: Inside(after=True), 2), (Placed, 1), (Packed, 1)],
    ids=["whole", "a layer", "after a layer", "an index", "packed"],
)  # fmt: skip
def test_a_model_that_needs_a_marker_in_each_row_trains_as_in_a_plain_loop_also_in_two_halves(make, blocks, by_name, tmp_path):
    torch.manual_seed(0)
    ids, y = torch.randint(2, 20, (12, 5)), torch.arange(12) % 3
    ids[:, 3] = 1
    x = {"ids": ids, "weight": torch.ones(12)} if by_name else ids
    plain = make()
    models = [copy.deepcopy(plain) for _ in range(2)]
    data = (x, y), (x, y)
    assert len(trainer_of(models[0], tmp_path / "whole", blocks).fit(*data).plan.partitions) == blocks
    with pytest.raises(Ends):
        trainer_of(copy.deepcopy(plain), tmp_path / "halves", blocks).fit(*data, callbacks=[Ending()])
    trainer_of(models[1], tmp_path / "halves", blocks).fit(*data, resume=tmp_path / "halves")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for rows in [*torch.arange(12).split(4)] * 2:
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(ids[rows]), y[rows]).backward()
        optimizer.step()
    for name, expected in plain.state_dict().items():
        assert all(torch.equal(model.state_dict()[name], expected) for model in models), name


def test_rows_without_the_marker_are_refused_in_the_words_of_the_model(tmp_path):
    x, y = torch.full((8, 5), 7), torch.arange(8) % 3
    with pytest.raises(ModelError, match="As one block it fails too: each row must have one marker"):
        trainer_of(Marked(), tmp_path / "run").fit((x, y), (x, y))


class Cached(nn.Conv1d):
    """Keeps what it saw last until its model empties it."""

    seen = None

    def forward(self, x):
        before, self.seen = (torch.zeros_like(x) if self.seen is None else self.seen), x
        return super().forward(x + before)


class Emptying(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = Cached(4, 4, 1), nn.Linear(6, 3)

    def forward(self, x):
        found = self.last(self.first(x)).mean(1)
        self.first.seen = None
        return found


def test_a_model_that_empties_its_layers_after_their_last_call_is_one_block():
    assert_same_as_whole(Emptying(), torch.randn(6, 4, 6), 1, 1)
    assert "it changes seen of this layer from outside" in chain_of(Emptying(), (4, 6), torch.float32).whole_parts[0]
