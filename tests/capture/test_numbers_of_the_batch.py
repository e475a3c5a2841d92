"""A number that a model computes over a whole batch adds up rightly, whatever the micro-batch, or is refused.

Once such a number of each micro-batch counted by its rows whatever it was: the limit, which decides the micro-batch, decided
what was learned.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seqpart.errors import DataError, ModelError, OptionError
from tests.capture.test_outputs import BATCH, CASES, ROWS, Net, X, Y, plain, trained


def same(model, expected, **near):
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, **near or {"rtol": 0, "atol": 0})


NEAR = {"rtol": 1e-3, "atol": 2e-5}
ADD_UP = {
    "a mean": (lambda net, h, s, v: (s, h.square().mean()), lambda out, y: F.cross_entropy(out[0], y) + out[1]),
    "sums": (
        lambda net, h, s, v: (s, h.square().sum()),
        lambda out, y: F.cross_entropy(out[0], y, reduction="sum") + 0.01 * out[1],
    ),
    "a vector of means": (
        lambda net, h, s, v: (s, h.mean(0)),
        lambda out, y: F.cross_entropy(out[0], y) + (out[1] * torch.arange(16.0)).sum(),
    ),
    "a mean times the constant of a parameter": (
        lambda net, h, s, v: (s, v.mean() * net.scale.exp().square()),
        lambda out, y: F.cross_entropy(out[0], y) + out[1],
    ),
    "what is counted": (
        lambda net, h, s, v: (s, (h > 0).sum(), h.shape),
        lambda out, y: F.cross_entropy(out[0], y) + 0 * out[1] / out[2][0],
    ),
}
DO_NOT = {
    "a deviation": (lambda net, h, s, v: (s, h.std()), lambda out, y: F.cross_entropy(out[0], y) + out[1]),
    "the square of a mean": (lambda net, h, s, v: (s, h.mean()), lambda out, y: F.cross_entropy(out[0], y) + out[1].square()),
    "one number for each row, of all pairs": (
        lambda net, h, s, v: (s, (h @ h.T).logsumexp(1)),
        lambda out, y: F.cross_entropy(out[0], y) + out[1].mean(),
    ),
    "a sum beside a mean": (lambda net, h, s, v: (s, h.sum()), lambda out, y: F.cross_entropy(out[0], y) + 0.01 * out[1]),
    "what a loss divides by": (
        lambda net, h, s, v: (s, (h > 0).sum()),
        lambda out, y: F.cross_entropy(out[0], y, reduction="sum") / out[1],
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("case", ADD_UP)
def test_micro_batches_add_up_to_the_batch(case, tmp_path):
    form, loss = ADD_UP[case]
    torch.manual_seed(0)
    model = Net(form)
    start = copy.deepcopy(model)
    expected = plain(copy.deepcopy(model), loss, (X, Y))
    whole = trained(model, loss, (X, Y), tmp_path / "whole", micro_batch_size=BATCH)
    same(model, expected)
    divided = trained(start, loss, (X, Y), tmp_path / "divided", micro_batch_size=4)
    same(start, expected, **NEAR)
    assert float(divided.test_loss) == pytest.approx(float(whole.test_loss), rel=1e-3)


@pytest.mark.few(1)
@pytest.mark.parametrize("case", DO_NOT)
def test_what_does_not_add_up_needs_a_micro_batch_that_the_limit_does_not_choose(case, tmp_path):
    form, loss = DO_NOT[case]
    torch.manual_seed(0)
    model = Net(form)
    start = copy.deepcopy(model)
    with pytest.raises(OptionError, match=f"number of the whole batch.*would depend on the.*micro_batch_size={BATCH}"):
        trained(model, loss, (X, Y), tmp_path)
    expected = plain(copy.deepcopy(model), loss, (X, Y))
    trained(model, loss, (X, Y), tmp_path / "whole", micro_batch_size=BATCH)
    same(model, expected)
    accumulated = in_parts(copy.deepcopy(start), loss)
    trained(start, loss, (X, Y), tmp_path / "parts", micro_batch_size=4, epochs=1)
    same(start, accumulated)


def in_parts(model, loss):
    """Trains for an epoch in a plain loop that accumulates gradients of four rows at a time."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for at in range(0, ROWS, BATCH):
        optimizer.zero_grad()
        for part in range(at, at + BATCH, 4):
            (loss(model(X[part : part + 4]), Y[part : part + 4]) / 4).backward()
        optimizer.step()
    return model


def test_scores_of_all_pairs_that_a_parameter_scales_train_in_whole_batches(tmp_path):
    """As CLIP's: `to` gave the scale of a parameter another number, and the scores were refused."""

    def loss(out, y):
        return F.cross_entropy(out["pairs"], torch.arange(len(out["pairs"])))

    torch.manual_seed(0)
    model = Net(lambda net, h, s, v: {"pairs": (s @ h[:, :5].T.to(s.device)) * net.scale.exp().to(s.device)})
    expected = plain(copy.deepcopy(model), loss, (X, Y))
    trained(model, loss, (X, Y), tmp_path, micro_batch_size=BATCH)
    same(model, expected)


class Gates(nn.Module):
    """A layer of two experts that returns how unequally they are used."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 2)

    def forward(self, h):
        return (self.gate(h).softmax(1).mean(0).square().sum(),)


def balanced():
    torch.manual_seed(0)
    model = Net(lambda net, h, s, v: (s, net.gates(h)[0]))
    model.gates = Gates()
    return model


def balance(out, y):
    return F.cross_entropy(out[0], y) + out[1]


def test_a_number_from_inside_a_layer_needs_a_micro_batch_that_the_limit_does_not_choose(tmp_path):
    """As the balance of experts: there it is what gradient accumulation makes of it, if that is asked for."""
    with pytest.raises(OptionError, match=f"a number of the whole batch.*micro_batch_size={BATCH}"):
        trained(balanced(), balance, (X, Y), tmp_path)
    model, expected = balanced(), balanced()
    trained(model, balance, (X, Y), tmp_path, micro_batch_size=BATCH)
    same(model, plain(expected, balance, (X, Y)))
    model, expected = balanced(), balanced()
    trained(model, balance, (X, Y), tmp_path, micro_batch_size=4, epochs=1)
    same(model, in_parts(expected, balance))


def test_a_micro_batch_that_was_given_is_kept_to_also_where_a_trial_adds_up(tmp_path):
    """The penalty is 0 in the trial, and was compared with that of whole batches later, which ended the run."""

    def loss(out, y):
        return F.cross_entropy(out[0], y) + F.relu(out[1] - 1e3) + F.relu(100 * (1e3 - out[1])) * (out[0].abs().max() > 4)

    torch.manual_seed(0)
    model = Net(lambda net, h, s, v: (s, 20 * v.mean()))
    trained(model, loss, (X, Y), tmp_path, micro_batch_size=4, lr=0.1)


def test_a_number_from_inside_a_layer_that_the_loss_leaves_out_does_no_harm(tmp_path):
    model = balanced()
    loss = CASES["a head that the loss leaves out"][1]
    expected = plain(copy.deepcopy(model), loss, (X, Y))
    trained(model, loss, (X, Y), tmp_path)
    same(model, expected)


class Reconstructs(nn.Module):
    """Computes its own loss of inputs alone; `kind` is what it returns of the reconstruction and the input."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.body, self.norm, self.head = nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 12)

    def forward(self, x):
        h = self.norm(self.body(x)).relu()
        found = self.head(h)
        return {"loss": self.kind(found, x, h), "hidden": h}


def alternate(x):
    """A mask that leaves equally much of every row, as masked autoencoders have it."""
    return (x.argsort(1) % 2).to(x.dtype)


OWN = {
    "a mean": lambda found, x, h: F.mse_loss(found, x) + 0.1 * h.mean(),
    "a sum": lambda found, x, h: F.mse_loss(found, x, reduction="sum") + h.square().sum(),
    "a mean under a mask": lambda found, x, h: ((found - x).square() * alternate(x)).sum() / alternate(x).sum(),
    "a mean of sums": lambda found, x, h: (found - x).square().sum(1).mean() - h.detach().mean(),
}


def plain_own(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for at in range(0, ROWS, BATCH):
        optimizer.zero_grad()
        model(X[at : at + BATCH])["loss"].backward()
        optimizer.step()
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", OWN)
def test_a_loss_of_the_models_own_adds_up_without_labels(kind, tmp_path):
    torch.manual_seed(0)
    model = Reconstructs(OWN[kind])
    start, expected = copy.deepcopy(model), plain_own(copy.deepcopy(model))
    whole = trained_own(model, tmp_path / "whole", micro_batch_size=BATCH)
    same(model, expected)
    divided = trained_own(start, tmp_path / "divided", micro_batch_size=4)
    same(start, expected, **NEAR)
    assert float(divided.test_loss) == pytest.approx(float(whole.test_loss), rel=1e-3)


def trained_own(model, folder, **options):
    return trained(model, "model", None, folder, epochs=1, x=X, **options)


COMPARES = {
    "scores of all pairs": lambda found, x, h: F.cross_entropy(found @ x.T, torch.arange(len(x))),
    "one number of them for each row": lambda found, x, h: ((found @ x.T).logsumexp(1) - (found * x).sum(1)).mean(),
    "what differs from their mean": lambda found, x, h: F.mse_loss(found, x) + (h - h.mean(0)).abs().mean(),
}


@pytest.mark.parametrize("kind", COMPARES)
@pytest.mark.few(1)
def test_a_loss_of_the_models_own_that_compares_rows_needs_whole_batches(kind, tmp_path):
    """As contrastive learning does."""
    torch.manual_seed(0)
    model = Reconstructs(COMPARES[kind])
    with pytest.raises(OptionError, match=f"micro_batch_size={BATCH}"):
        trained_own(model, tmp_path)
    expected = plain_own(copy.deepcopy(model))
    trained_own(model, tmp_path, micro_batch_size=BATCH)
    same(model, expected)


def test_numbers_of_rows_among_the_outputs_follow_the_rows(tmp_path):
    """They were frozen at the rows of the recorded batch."""

    def loss(out, y):
        assert out["rows"] == len(out["scores"]) and out["twice"] == 2 * len(out["scores"]) and out["kind"] is torch.float32
        return F.cross_entropy(out["scores"], y, reduction="sum") / out["rows"]

    torch.manual_seed(0)
    model = Net(lambda net, h, s, v: {"scores": s, "rows": len(h), "twice": 2 * len(h), "kind": h.dtype})
    expected = plain(copy.deepcopy(model), loss, (X, Y))
    trained(model, loss, (X, Y), tmp_path)
    same(model, expected)


class Cache:
    """A value that may hold anything."""


def test_a_value_that_cannot_be_kept_is_refused_when_it_is_used(tmp_path):
    loss = CASES["a head that the loss leaves out"][1]
    torch.manual_seed(0)
    model = Net(lambda net, h, s, v: (s, Cache(), len(h) ** 2))
    expected = plain(copy.deepcopy(model), loss, (X, Y))
    trained(model, loss, (X, Y), tmp_path)
    same(model, expected)

    def curious(place):
        seen = []

        def loss(out, y):
            seen.append(None)
            return F.cross_entropy(out[0], y) + (out[place] * 0 if len(seen) > 2 else 0)

        return loss

    with pytest.raises((DataError, ModelError), match="a Cache of what the model returns is not kept"):
        trained(model, curious(1), (X, Y), tmp_path)
    with pytest.raises((DataError, ModelError), match="the value 16 of what the model returns depends on the number of rows"):
        trained(model, curious(2), (X, Y), tmp_path)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "form",
    [lambda net, h, s, v: (s, v.expand(-1, 7)), lambda net, h, s, v: (s, net.scale.expand(len(h), 7)),
     lambda net, h, s, v: (s, h[:, None, ::2].expand(-1, 3, -1)), lambda net, h, s, v: (s, h.unfold(1, 4, 2))],
    ids=["columns", "rows of a parameter", "between", "windows"],
)  # fmt: skip
def test_expanded_tensors_keep_their_bits(form, tmp_path):
    def loss(out, y):
        return F.cross_entropy(out[0], y) + (out[1].sum(-1) * 1.7).exp().mean()

    torch.manual_seed(0)
    model = Net(form)
    expected = plain(copy.deepcopy(model), loss, (X, Y))
    trained(model, loss, (X, Y), tmp_path)
    same(model, expected)


def test_a_loss_may_write_into_what_it_gets(tmp_path):
    def loss(out, y):
        out[1].mul_(2).clamp_(min=0)
        return F.cross_entropy(out[0].div_(2), y) + out[1].mean()

    torch.manual_seed(0)
    model = Net(lambda net, h, s, v: (s * 1, v * 1))
    expected = plain(copy.deepcopy(model), loss, (X, Y))
    trained(model, loss, (X, Y), tmp_path)
    same(model, expected)


def test_class_weights_among_the_outputs_get_no_gradient(tmp_path):
    def loss(out, y):
        return F.cross_entropy(out[0], y, weight=out[1], reduction="sum") / len(y)

    torch.manual_seed(0)
    model = Net(lambda net, h, s, v: (s, torch.arange(1.0, 6.0)))
    expected = plain(copy.deepcopy(model), loss, (X, Y))
    trained(model, loss, (X, Y), tmp_path)
    same(model, expected)
