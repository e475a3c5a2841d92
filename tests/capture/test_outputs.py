"""A loss gets what the model returns, of any form, and trains to the bits of a plain loop."""

import copy
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seqpart import Trainer
from seqpart.errors import DataError, ModelError, OptionError
from seqpart.verify import verify

ROWS, BATCH = 48, 16
X, Y = torch.randn(ROWS, 12, generator=torch.Generator().manual_seed(0)), torch.arange(ROWS) % 5
Heads = namedtuple("Heads", ["scores", "value"])


@dataclass
class Output:
    scores: torch.Tensor
    hidden: torch.Tensor
    count: int = 3


class Net(nn.Module):
    """Two heads; `form` makes what is returned of a batch's hidden rows, scores and values."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.body, self.norm = nn.Linear(12, 16), nn.LayerNorm(16)
        self.scores, self.value = nn.Linear(16, 5), nn.Linear(16, 1)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        hidden = self.norm(self.body(x)).relu()
        return self.form(self, hidden, self.scores(hidden), self.value(hidden))


def plain(model, loss, data, *, epochs=2):
    """Trains in a plain loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    x, y = data
    for _ in range(epochs):
        for at in range(0, ROWS, BATCH):
            optimizer.zero_grad()
            labels = {name: part[at : at + BATCH] for name, part in y.items()} if isinstance(y, dict) else y[at : at + BATCH]
            found = loss(model(x[at : at + BATCH]), labels)
            (sum(found.values()) if isinstance(found, dict) else found).backward()
            optimizer.step()
    return model


def trained(model, loss, data, folder, *, x=None, **options):
    given = {"mem_limit": "3GB", "method": "streamed", "partitions": 2, "epochs": 2, "batch_size": BATCH, "shuffle": False}
    optimizer = {"optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.1}
    both = (data, data) if x is None else (x, x)
    return Trainer(model, loss, quiet=True, offload_dir=folder, **given | optimizer | options).fit(*both)


def two(out, y):
    return F.cross_entropy(out[0], y) + out[1].square().mean()


CASES = {
    "a tuple": (lambda net, h, s, v: (s, v), two),
    "a list": (lambda net, h, s, v: [s, v], two),
    "a named tuple": (lambda net, h, s, v: Heads(s, v), lambda out, y: two((out.scores, out.value), y)),
    "a dataclass": (
        lambda net, h, s, v: Output(s, h),
        lambda out, y: F.cross_entropy(out.scores, y) + out.count * out.hidden.abs().mean(),
    ),
    "a nested dict": (
        lambda net, h, s, v: {"heads": [s, {"value": v}], "note": None},
        lambda out, y: two((out["heads"][0], out["heads"][1]["value"]), y),
    ),
    "logits beside others": (
        lambda net, h, s, v: {"logits": s, "value": v},
        lambda out, y: two((out["logits"], out["value"]), y),
    ),
    "a dict of losses": (
        lambda net, h, s, v: (s, v),
        lambda out, y: {"classes": F.cross_entropy(out[0], y), "size": out[1].square().mean()},
    ),
    "a head that the loss leaves out": (lambda net, h, s, v: (s, v), lambda out, y: F.cross_entropy(out[0], y)),
    "parts of one tensor": (
        lambda net, h, s, v: h.chunk(2, 1),
        lambda out, y: (out[0] - out[1].exp()).square().mean() + F.cross_entropy(out[0], y),
    ),
    "a number of the batch": (
        lambda net, h, s, v: (s, h.square().mean()),
        lambda out, y: F.cross_entropy(out[0], y) + 0.1 * out[1],
    ),
    "a parameter": (
        lambda net, h, s, v: (s, net.scale),
        lambda out, y: F.cross_entropy(out[0] * out[1].exp(), y),
    ),
    "whole numbers and bools": (
        lambda net, h, s, v: (s, s.argmax(1), h > 0, s.argsort(1).to(torch.int16)),
        lambda out, y: F.cross_entropy(out[0], y) + (out[0] * (out[1] == y)[:, None]).mean() + (out[0] * out[3]).mean(),
    ),
    "several types": (
        lambda net, h, s, v: (s, v.double(), v.bfloat16()),
        lambda out, y: F.cross_entropy(out[0], y) + out[1].square().mean().float() + out[2].square().mean(),
    ),
    "complex numbers": (
        lambda net, h, s, v: (s, torch.complex(v, v * 2)),
        lambda out, y: F.cross_entropy(out[0], y) + out[1].abs().mean(),
    ),
    "rows in several pieces": (
        lambda net, h, s, v: (s, h.view(-1, 4)),
        lambda out, y: F.cross_entropy(out[0], y) + out[1].softmax(1).square().sum(1).mean(),
    ),
    "one tensor in a tuple": (lambda net, h, s, v: (s,), lambda out, y: F.cross_entropy(out[0], y)),
    "a loss and nothing else": (lambda net, h, s, v: s.square().mean() + (v - 1).abs().mean(), lambda out, y: 2 * out),
    **{
        f"{count} positions first, then rows": (
            lambda net, h, s, v, count=count: h.view(len(h), count, -1).transpose(0, 1).contiguous(),
            lambda out, y: F.cross_entropy(out.flatten(0, 1), y.repeat(len(out)) % out.shape[2]),
        )
        for count in (2, 4, 8)
    },
    "rows second beside rows first": (
        lambda net, h, s, v: (s, h.view(len(h), 4, 4).transpose(0, 1)),
        lambda out, y: F.cross_entropy(out[0], y) + out[1].mul(2)[1].square().mean(),
    ),
    **{
        f"constants of shape {shape}": (
            lambda net, h, s, v, shape=shape: (s, torch.ones(shape) * net.scale),
            lambda out, y: F.cross_entropy(out[0], y) + (out[1] - 0.5).square().mean(),
        )
        for shape in ((8, 4), (5, 6), (6, 4), (4, 6), (4, 4))
    },
    "the same tensor twice": (lambda net, h, s, v: (s, s), lambda out, y: F.cross_entropy(out[0] + out[1], y)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.few(5)
def test_a_loss_of_what_the_model_returns_has_the_bits_of_a_plain_loop(case, tmp_path):
    form, loss = CASES[case]
    torch.manual_seed(0)
    model = Net(form)
    expected = plain(copy.deepcopy(model), loss, (X, Y))
    result = trained(model, loss, (X, Y), tmp_path)
    assert {name: torch.equal(one, expected.get_parameter(name)) for name, one in model.named_parameters()} == dict.fromkeys(
        dict(expected.named_parameters()), True
    )
    found = loss(expected.eval()(X), Y)
    found = sum(found.values()) if isinstance(found, dict) else found
    assert float(result.test_loss) == pytest.approx(found.item(), rel=1e-4)


def test_labels_of_several_parts_meet_several_outputs(tmp_path):
    labels = {"classes": Y, "size": X[:, :1]}

    def loss(out, y):
        return F.cross_entropy(out[0], y["classes"]) + F.mse_loss(out[1], y["size"])

    torch.manual_seed(0)
    model = Net(lambda net, h, s, v: (s, v))
    expected = plain(copy.deepcopy(model), loss, (X, labels))
    trained(model, loss, (X, labels), tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected.parameters(), strict=True))


def test_micro_batches_add_up_also_with_a_number_of_the_whole_batch(tmp_path):
    form, loss = CASES["a number of the batch"]
    torch.manual_seed(0)
    model = Net(form)
    expected = plain(copy.deepcopy(model), loss, (X, Y))
    trained(model, loss, (X, Y), tmp_path, micro_batch_size=4)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


class Auxiliary(Net):
    """Returns both heads in training and the scores alone in evaluation, as GoogLeNet does."""

    def forward(self, x):
        found = super().forward(x)
        return found if self.training else found[0]


def test_a_model_may_return_something_else_in_evaluation(tmp_path):
    def loss(out, y):
        return two(out, y) if isinstance(out, tuple) else F.cross_entropy(out, y)

    torch.manual_seed(0)
    model = Auxiliary(lambda net, h, s, v: (s, v))
    expected = plain(copy.deepcopy(model), loss, (X, Y))
    result = trained(model, loss, (X, Y), tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected.parameters(), strict=True))
    scores = expected.eval()(X)
    assert float(result.test_loss) == pytest.approx(F.cross_entropy(scores, Y).item(), rel=1e-4)
    assert float(result.accuracy) == pytest.approx(float((scores.argmax(1) == Y).float().mean()), abs=1e-6)


def test_a_loss_that_takes_training_outputs_alone_is_refused_in_words(tmp_path):
    def loss(out, y):
        return F.cross_entropy(out["scores"], y)

    class Dict(Net):
        def forward(self, x):
            found = super().forward(x)
            return found if self.training else (found["scores"], 1)

    with pytest.raises(ModelError, match=r"fails on what it returns in evaluation, a tuple: .*Let it take both"):
        trained(Dict(lambda net, h, s, v: {"scores": s, "value": v}), loss, (X, Y), tmp_path)


def test_metrics_get_what_the_model_returns(tmp_path):
    model = Net(lambda net, h, s, v: {"heads": (s, v)})
    trainer = Trainer(
        model, lambda out, y: two(out["heads"], y), mem_limit="3GB", method="streamed", partitions=2, batch_size=BATCH,
        quiet=True, offload_dir=tmp_path, epochs=1,
    )  # fmt: skip
    result = trainer.fit((X, Y), (X, Y), compute_metrics=lambda out, y: {"size": float(out["heads"][1].abs().mean())})
    assert result.metrics["size"] == pytest.approx(model.eval()(X)["heads"][1].abs().mean().item(), rel=1e-4)


def test_a_dict_with_the_sum_as_loss_trains_by_that(tmp_path):
    """As Lightning returns it: the sum was added to its own parts."""

    def parts(out, y):
        found = {"classes": F.cross_entropy(out[0], y), "size": out[1].square().mean()}
        return {"loss": sum(found.values()), **found}

    torch.manual_seed(0)
    model = Net(lambda net, h, s, v: (s, v))
    expected = plain(copy.deepcopy(model), two, (X, Y))
    result = trained(model, parts, (X, Y), tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected.parameters(), strict=True))
    assert result.metrics["loss/loss"] == pytest.approx(float(result.test_loss), rel=1e-5)


REFUSED = {
    "it writes into tensor 0 of what the model returns, which shares its memory": (
        lambda net, h, s, v: (s, s[:, :2]),
        lambda out, y: F.cross_entropy(out[0].mul_(2), y) + out[1].square().mean(),
    ),
    "asks for the gradient of one output of the model with respect to another": (
        lambda net, h, s, v: (s, h),
        lambda out, y: (
            F.cross_entropy(out[0], y)
            + sum(
                one.square().mean()
                for one in torch.autograd.grad(out[0].sum(), out[1], create_graph=True, allow_unused=True)
                if one is not None
            )
            if out[0].requires_grad
            else F.cross_entropy(out[0], y)
        ),
    ),
    "a SimpleNamespace is not read: expected tuples, lists, dicts, dataclasses": (
        lambda net, h, s, v: SimpleNamespace(scores=s),
        lambda out, y: F.cross_entropy(out.scores, y),
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_a_loss_cannot_have_of_outputs_is_refused_in_words(words, tmp_path):
    form, loss = REFUSED[words]
    with pytest.raises((ModelError, OptionError, DataError), match=words):
        trained(Net(form), loss, (X, Y), tmp_path)


def test_a_dict_of_losses_is_reported_by_name(tmp_path):
    class Seen:
        def __init__(self):
            self.found = []

        def on_epoch(self, event):
            self.found.append(event)

    def loss(out, y):
        return {"classes": F.cross_entropy(out[0], y), "sizes": {"value": out[1].square().mean()}}

    model, seen = Net(lambda net, h, s, v: (s, v)), Seen()
    trainer = Trainer(
        model, loss, mem_limit="3GB", method="streamed", partitions=2, batch_size=BATCH, micro_batch_size=6, quiet=True,
        offload_dir=tmp_path, epochs=2,
    )  # fmt: skip
    result = trainer.fit((X, Y), (X, Y), callbacks=[seen], compute_metrics=lambda out, y: {"size": 1.0})
    scores, values = model.eval()(X)
    expected = {"loss/classes": F.cross_entropy(scores, Y).item(), "loss/sizes/value": values.square().mean().item()}
    assert result.metrics == pytest.approx({**expected, "size": 1.0}, rel=1e-4)
    assert sum(expected.values()) == pytest.approx(float(result.test_loss), rel=1e-4)
    for event in seen.found:
        assert sum(event.metrics[name] for name in expected) == pytest.approx(event.loss, rel=1e-4)


def test_a_loss_of_one_tensor_gets_the_logits_as_before(tmp_path):
    model = Net(lambda net, h, s, v: {"logits": s, "value": v})
    assert float(trained(model, F.cross_entropy, (X, Y), tmp_path).accuracy) > 0


def test_a_loss_that_fails_either_way_is_quoted(tmp_path):
    with pytest.raises(ModelError, match=r"of 2 tensors, .*With all of them it failed: KeyError: 'scores'"):
        trained(Net(lambda net, h, s, v: {"a": s, "b": v}), lambda out, y: out["scores"].mean(), (X, Y), tmp_path)


def test_a_mistake_in_a_loss_is_quoted_where_it_fails_on_the_logits_too(tmp_path):
    """It was hidden: the message was about the logits alone."""
    model = Net(lambda net, h, s, v: {"logits": s, "value": v})
    with pytest.raises(ModelError, match=r"the loss fails on what the model returns: KeyError: 'valeu'"):
        trained(model, lambda out, y: F.cross_entropy(out["logits"], y) + out["valeu"].mean(), (X, Y), tmp_path)


def test_outputs_that_compare_rows_train_in_whole_batches(tmp_path):
    def loss(out, y):
        return F.cross_entropy(out[0], y) + out[1].square().mean()

    torch.manual_seed(0)
    model = Net(lambda net, h, s, v: (s, h @ h.T))
    with pytest.raises(OptionError, match=f"micro_batch_size={BATCH}"):
        trained(model, loss, (X, Y), tmp_path)
    expected = plain(copy.deepcopy(model), loss, (X, Y))
    trained(model, loss, (X, Y), tmp_path, micro_batch_size=BATCH)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected.parameters(), strict=True))


class Pairs(nn.Module):
    def forward(self, h):
        return h @ h.T


def test_a_layer_that_compares_rows_is_refused_in_words(tmp_path):
    model = Net(lambda net, h, s, v: (s, net.pairs(h)))
    model.pairs = Pairs()
    with pytest.raises(ModelError, match=r"what the model returns has shape \(6, 6\) for 6 rows"):
        trained(model, lambda out, y: out[1].mean(), (X, Y), tmp_path)


def test_scores_of_pairs_that_take_a_parameter_are_refused_with_what_they_lack(tmp_path):
    """SiglipModel adds its bias to them: the refusal forbade all scores of pairs, and those without a parameter train."""
    model = Net(lambda net, h, s, v: (s, h @ h.T + net.bias))
    model.bias = nn.Parameter(torch.zeros(1))
    with pytest.raises(ModelError, match="or functions that take no parameter must compute it from tensors of rows"):
        trained(model, lambda out, y: out[1].mean(), (X, Y), tmp_path)


def test_outputs_that_compare_rows_are_left_out_where_the_loss_does_not_use_them(tmp_path):
    """As the logits of CLIP, which a loss computes from the embeddings where it has whole batches."""
    loss = CASES["a tuple"][1]
    torch.manual_seed(0)
    model = Net(lambda net, h, s, v: (s, v, net.pairs(h)))
    model.pairs = Pairs()
    expected = plain(copy.deepcopy(model), loss, (X, Y))
    trained(model, loss, (X, Y), tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected.parameters(), strict=True))

    def late(out, y):
        with torch.no_grad():
            size = out[2] * 2
        return two(out, y) + size.mean() * 0

    with pytest.raises(DataError, match="tensor 2 of what the model returns compares rows with each other"):
        trained(model, late, (X, Y), tmp_path)


def test_a_loss_that_compares_rows_needs_whole_batches(tmp_path):
    def info_nce(out, y):
        one, other = F.normalize(out[0], dim=1), F.normalize(out[1], dim=1)
        return F.cross_entropy(one @ other.T, torch.arange(len(one)))

    torch.manual_seed(0)
    model = Net(lambda net, h, s, v: h.chunk(2, 1))
    with pytest.raises(OptionError, match=f"--micro-batch-size {BATCH}|micro_batch_size={BATCH}"):
        trained(copy.deepcopy(model), info_nce, (X, Y), tmp_path, micro_batch_size=8)
    expected = plain(copy.deepcopy(model), info_nce, (X, Y))
    trained(model, info_nce, (X, Y), tmp_path, micro_batch_size=BATCH)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a tuple", "a nested dict", "a head that the loss leaves out", "parts of one tensor"])
def test_several_outputs_are_verified(case, tmp_path):
    form, loss = CASES[case]
    torch.manual_seed(0)
    agreement = verify(Net(form), (X, Y), loss, mem_limit="3GB", partitions=2, batch_size=BATCH, steps=2, offload_dir=tmp_path)
    assert agreement.unlike == ""


class Variational(nn.Module):
    """A VAE that computes its own loss, of more than its output."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8)), nn.Linear(4, 12)

    def forward(self, x, labels=None):
        mean, variance = self.encoder(x).chunk(2, 1)
        found = {"logits": self.decoder(mean)}
        if labels is not None:
            kl = -0.5 * (1 + variance - mean**2 - variance.exp()).sum(1).mean()
            found["loss"] = F.mse_loss(found["logits"], labels) + kl
        return found


class Balanced(Net):
    """Returns only a loss, with a term that its layers compute beside it, as experts are balanced."""

    def forward(self, x, labels=None):
        hidden = self.norm(self.body(x)).relu()
        balance = hidden.softmax(1).mean(0).square().sum()
        scores = self.scores(hidden)
        return (F.cross_entropy(scores, labels) + 0.1 * balance, scores) if labels is not None else scores


@pytest.mark.parametrize(("model", "data"), [(Variational, (X, X)), (lambda: Balanced(None), (X, Y))], ids=["vae", "balanced"])
def test_a_models_own_loss_may_take_more_than_its_output(model, data, tmp_path):
    torch.manual_seed(0)
    model = model()
    expected = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for _ in range(2):
        for at in range(0, ROWS, BATCH):
            optimizer.zero_grad()
            found = expected(data[0][at : at + BATCH], labels=data[1][at : at + BATCH])
            (found["loss"] if isinstance(found, dict) else found[0]).backward()
            optimizer.step()
    trained(model, "model", data, tmp_path, micro_batch_size=BATCH)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected.parameters(), strict=True))


class TimeFirst(nn.Module):
    """Predicts tokens with positions in the first dimension, as the layers of nn.Transformer have them by default."""

    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(9, 16), nn.Linear(16, 16), nn.Linear(16, 9)

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens.t())).relu())


@pytest.mark.parametrize("length", [BATCH, 5])
def test_the_accuracy_of_outputs_with_positions_first_counts_each_row_with_its_own_labels(length, tmp_path):
    torch.manual_seed(0)
    x = torch.randint(0, 9, (ROWS, length))
    model = TimeFirst()
    result = trained(
        model,
        lambda out, y: F.cross_entropy(out.flatten(0, 1), y.t().flatten()),
        None,
        tmp_path,
        x=(x, x),
        micro_batch_size=BATCH,
    )
    assert 0.2 < (right := (model(x).argmax(-1) == x.t()).float().mean().item()) < 0.9
    assert result.accuracy == pytest.approx(right, abs=1e-6)


class Connected(nn.Module):
    """The loss of each row by CTC, as the refusal of F.ctc_loss in a loss says."""

    def forward(self, scores, targets, lengths):
        whole = torch.full_like(lengths, scores.shape[1])
        found = F.ctc_loss(scores.transpose(0, 1), targets, whole, lengths, reduction="none", zero_infinity=True)
        return found / lengths


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.over_time, self.head = nn.Linear(12, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 7)
        self.loss = Connected()

    def forward(self, x, targets, lengths):
        return self.loss(self.head(self.over_time(self.body(x).relu())[0]).log_softmax(-1), targets, lengths)


@pytest.mark.parametrize("method", ["streamed", "checkpointed"])
@pytest.mark.few(1)
def test_a_layer_computes_the_loss_of_each_row_by_ctc(method, tmp_path):
    torch.manual_seed(0)
    x = {"x": torch.randn(ROWS, 10, 12), "targets": torch.randint(1, 7, (ROWS, 4)), "lengths": torch.randint(1, 5, (ROWS,))}
    model = Speech()
    expected = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for at in range(0, ROWS, BATCH):
        optimizer.zero_grad()
        expected(**{name: part[at : at + BATCH] for name, part in x.items()}).mean().backward()
        optimizer.step()
    result = trained(model, lambda losses: losses.mean(), None, tmp_path, x=x, epochs=1, micro_batch_size=BATCH, method=method)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected.parameters(), strict=True))
    assert result.test_loss == pytest.approx(expected(**x).mean().item(), rel=1e-5)
