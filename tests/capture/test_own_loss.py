"""The loss that a model computes itself, from the labels that its forward is given: loss="model"."""

import importlib.util
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seqpart import Trainer
from seqpart.errors import ModelError, OptionError
from seqpart.verify.verification import verify
from tests.resuming import Killed, Stopping, kill
from tests.whole_models import Dense


class Shifted(nn.Module):
    """As a causal model of transformers: labels are the tokens themselves, and those of padding do not count."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, tokens, labels=None):
        scores = self.head(torch.tanh(self.mix(self.embed(tokens))))
        if labels is None:
            return {"logits": scores}
        loss = F.cross_entropy(scores.float()[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return {"loss": loss, "logits": scores}


class Targets(Dense):
    """A tuple of scores and loss, as nanoGPT has it; a loss module with weights of classes."""

    def __init__(self):
        super().__init__()
        self.judge = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]))

    def forward(self, x, targets=None):
        scores = super().forward(x)
        return scores, None if targets is None else self.judge(scores, targets)


class LossAlone(nn.Module):
    """A sum over rows of squares and a penalty, in a forward that is never without labels."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 1)
        self.register_buffer("width", torch.tensor(0.5))

    def forward(self, x, labels):
        found = self.last(torch.tanh(self.first(x))).squeeze(1)
        return ((found - labels) ** 2).sum() + self.width * found.abs().sum()


def tokens(rows=22, seed=1):
    found = torch.randint(1, 11, (rows, 7), generator=torch.Generator().manual_seed(seed))
    return found, torch.where(torch.arange(7) < 3 + torch.arange(rows)[:, None] % 5, found, -100)


def classes(rows=22, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def numbers(rows=22, seed=1):
    x, _ = classes(rows, seed)
    return x, x.sum(1)


class Checked(nn.Module):
    """As a model of images in transformers: it checks values, and returns a tensor of each row beside its states."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(4, 6)

    def forward(self, x):
        if x.isnan().any():
            raise ValueError("no numbers")
        states = torch.tanh(self.mix(x))
        return {"states": states, "pieces": list(states * 2)}


class Pieces(nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.last = Checked(), nn.Linear(6, 3)

    def forward(self, x, labels=None):
        found = self.model(x)
        logits = self.last(found["states"])
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits, "pieces": found["pieces"]}


MODELS = {"shifted": (Shifted, tokens), "targets": (Targets, classes), "loss alone": (LossAlone, numbers)}
models = pytest.mark.parametrize("name", MODELS)


def made(kind):
    torch.manual_seed(0)
    return kind()


def trained(kind, folder, train, test, *, reporter=None, resume=None, loss="model", **options):
    given = {
        "mem_limit": "2GB", "method": "streamed", "partitions": 2, "batch_size": 8, "micro_batch_size": 8, "epochs": 2,
        "lr": 0.01, "shuffle": False, "quiet": True, **options,
    }  # fmt: skip
    if resume is None:
        given["output_dir"] = folder
    model = made(kind)
    return model, Trainer(model, loss, "sgd", **given).fit(train, test, reporter=reporter, resume=resume)


def own(model, x, y):
    found = model(x, y)
    return found["loss"] if isinstance(found, dict) else found[1] if isinstance(found, tuple) else found


@pytest.mark.parametrize("loss", ["model", lambda found, y: F.cross_entropy(found["logits"], y)], ids=["model", "function"])
@pytest.mark.parametrize("micro", [8, 1])
def test_a_layer_may_return_a_list_of_its_rows_which_the_loss_does_not_use(loss, micro, tmp_path):
    """As LlavaModel, a layer since it looks at values: what came after it had other numbers in the runs that are compared, and
    the refusal was of "other things with 6 rows than with 4"."""
    (x, y), test = classes(), classes(8, 2)
    options = {"loss": loss, "micro_batch_size": micro}
    model, _ = trained(Pieces, tmp_path / "run", (x, y), test, **options)
    plain = made(Pieces)
    step = torch.optim.SGD(plain.parameters(), lr=0.01, fused=True)
    for first in (0, 8, 16) * 2:
        rows, labels = x[first : first + 8], y[first : first + 8]
        for one, its in zip(rows.split(micro), labels.split(micro), strict=True):
            (F.cross_entropy(plain(one)["logits"], its) * len(one) / len(rows)).backward()
        step.step()
        step.zero_grad()
    expected, ours = plain.state_dict(), model.state_dict()
    assert all(torch.allclose(ours[key], one, atol=1e-6, rtol=0) for key, one in expected.items())
    assert micro < 8 or all(torch.equal(ours[key], one) for key, one in expected.items())


LOSSES_OF_PIECES = {
    "gradients": lambda pieces: torch.stack(pieces).square().mean(),
    "values": lambda pieces: torch.stack(pieces).detach().square().mean(),
    "their number": len,
}


@pytest.mark.parametrize("name", LOSSES_OF_PIECES)
def test_a_loss_that_takes_a_list_of_the_rows_is_refused(name, tmp_path):
    """It would get those of the four rows that were recorded; a loss that took the length of such a list did."""

    def loss(found, y):
        return F.cross_entropy(found["logits"], y) + LOSSES_OF_PIECES[name](found["pieces"])

    with pytest.raises(ModelError, match=r"a list of as many tensors as (it has )?rows"):
        trained(Pieces, tmp_path / "run", classes(), classes(8, 2), loss=loss)


@models
@pytest.mark.parametrize("method", ["streamed", "full"])
@pytest.mark.few(1)
def test_a_model_learns_by_its_own_loss_as_in_a_plain_loop(name, method, tmp_path):
    kind, data = MODELS[name]
    (x, y), test = data(), data(8, 2)
    options = {"method": method, "partitions": 2 if method == "streamed" else "auto"}
    model, result = trained(kind, tmp_path / "run", (x, y), test, **options)
    plain = made(kind).train()
    step = torch.optim.SGD(plain.parameters(), lr=0.01, fused=True)
    for _ in range(2):
        for first in range(0, len(x), 8):
            own(plain, x[first : first + 8], y[first : first + 8]).backward()
            step.step()
            step.zero_grad()
    expected, ours = plain.state_dict(), model.state_dict()
    assert [key for key in expected if not torch.equal(ours[key], expected[key])] == []
    with torch.no_grad():
        told = float(own(plain.eval(), *test)) / (8 if name == "loss alone" else 1)
    assert result.test_loss == pytest.approx(told, rel=1e-5)


@pytest.mark.parametrize("name", ["shifted", "loss alone"])
@pytest.mark.few(1)
def test_micro_batches_add_up_to_the_loss_of_the_whole_batch(name, tmp_path):
    """Of labels that do not count there are more in one micro-batch than in another; a sum is added up as it is."""
    kind, data = MODELS[name]
    whole, parts = (
        trained(kind, tmp_path / str(micro), data(), data(8, 2), micro_batch_size=micro)[0].state_dict() for micro in (8, 3)
    )
    assert max(float((parts[key] - whole[key]).abs().max()) for key in whole) < 1e-5


def test_a_loss_whose_parts_do_not_add_up_is_not_divided(tmp_path):
    with pytest.raises(OptionError, match='"model": the loss of a batch is neither the mean of its parts'):
        trained(Targets, tmp_path / "run", classes(), classes(8, 2), micro_batch_size=3)


def test_accuracy_is_of_the_labels_that_the_loss_looks_at(tmp_path):
    x, y = tokens(8, 2)
    model, result = trained(Shifted, tmp_path / "run", tokens(), (x, y))
    with torch.no_grad():
        found, theirs = model(x)["logits"][:, :-1].argmax(-1), y[:, 1:]
    assert result.accuracy == pytest.approx(float((found == theirs)[theirs != -100].float().mean()))


def test_it_judges_the_end_of_a_network_that_sil_trains(tmp_path):
    x, y = classes(8, 2)
    model, result = trained(Targets, tmp_path / "run", classes(), (x, y), method="sil")
    with torch.no_grad():
        assert result.test_loss == pytest.approx(float(model.eval()(x, y)[1]), rel=1e-5)


def test_sil_refuses_a_loss_that_shifts_the_labels(tmp_path):
    """Its inner partitions would learn to say which token they were given."""
    data = tokens()[0], tokens()[0]
    with pytest.raises(ModelError, match="method sil trains inner partitions on the labels as they are"):
        trained(Shifted, tmp_path / "run", data, data, method="sil")


class Writing(Shifted):
    """Its loss writes into the labels that it is given."""

    def forward(self, tokens, labels=None):
        scores = self.head(torch.tanh(self.mix(self.embed(tokens))))
        labels[labels < 3] = -100
        return {"loss": F.cross_entropy(scores.flatten(0, 1), labels.flatten()), "logits": scores}


def test_labels_that_a_loss_writes_into_stay_the_users(tmp_path):
    x, y = tokens()
    y = y.clamp(min=0)
    before = y.clone()
    one, two = (
        trained(Writing, tmp_path / str(micro), (x, y), (x, y), micro_batch_size=micro, method=method)[1]
        for micro, method in ((8, "streamed"), (4, "checkpointed"))
    )
    assert torch.equal(y, before)
    assert one.test_loss == pytest.approx(two.test_loss, rel=1e-5)
    assert one.accuracy == two.accuracy


def test_a_run_that_was_killed_goes_on_with_the_models_loss(tmp_path):
    train, test = tokens(), tokens(8, 2)
    whole = trained(Shifted, tmp_path / "whole", train, test)[1]
    with pytest.raises(Killed):
        trained(Shifted, tmp_path / "cut", train, test, reporter=Stopping(20, kill), save_every="1")
    again = trained(Shifted, tmp_path / "cut", train, test, resume=tmp_path / "cut", save_every="1")[1]
    assert again.weights.read_bytes() == whole.weights.read_bytes()
    assert again.test_loss == whole.test_loss


def test_it_is_verified_and_evaluates_as_it_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train, (x, y) = tokens(), tokens(8, 2)
    options = {"mem_limit": "2GB", "batch_size": 8, "lr": 0.01, "partitions": 2}
    found = verify(made(Shifted), train, "model", "sgd", micro_batch_size=4, **options)
    assert "bit for bit" in str(found)
    model = made(Shifted)
    told = Trainer(model, "model", "sgd", method="streamed", quiet=True, **options).evaluate((x, y))
    with torch.no_grad():
        assert told.loss == pytest.approx(float(model.eval()(x, y)["loss"]), rel=1e-5)


class Smoothing(Shifted):
    def loss(self, scores, labels):
        smoothing = 0.3 if self.training else 0.0
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)

    def forward(self, tokens, labels=None):
        scores = super().forward(tokens)["logits"]
        return {"loss": self.loss(scores, labels), "logits": scores}


class Penalizing(Smoothing):
    def loss(self, scores, labels):
        found = F.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return found + 0.1 * scores.square().mean() if self.training else found


@pytest.mark.parametrize(("kind", "options"), [(Smoothing, {}), (Penalizing, {}), (Smoothing, {"loss_chunks": 3})], ids=str)
def test_a_loss_that_is_another_in_evaluation_is_evaluated_as_that(kind, options, tmp_path):
    """Tests had the loss of training, and with it the best weights, early stopping and metrics of transformers' Trainer."""
    x, y = tokens(8)[0], tokens(8, 2)[1]
    model, result = trained(kind, tmp_path / "run", (x, y), (x, y), **options)
    with torch.no_grad():
        found, smooth = float(model.eval()(x, y)["loss"]), float(model.train()(x, y)["loss"])
    assert result.test_loss == pytest.approx(found, rel=1e-5) and abs(found - smooth) > 0.01


class Halving(Smoothing):
    def loss(self, scores, labels):
        found = F.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return found if self.training else found / 2


def test_a_loss_that_is_no_cross_entropy_in_evaluation_is_not_computed_over_chunks(tmp_path):
    with pytest.raises(ModelError, match="the loss is not torch's cross_entropy"):
        trained(Halving, tmp_path / "run", tokens(8), None, loss_chunks=3)


class Fed(Shifted):
    """As a translator without decoder_input_ids."""

    def forward(self, tokens, labels=None):
        scores = self.head(self.mix(self.embed(tokens)) + self.embed(labels.clamp(min=0).roll(1, 1)))
        return {"logits": scores, "loss": F.cross_entropy(scores.flatten(0, 1), labels.flatten())}


class Moving(Shifted):
    """Its loss remembers something."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(11))

    def forward(self, tokens, labels=None):
        scores = self.head(self.mix(self.embed(tokens)))
        loss = F.cross_entropy((scores - self.center).flatten(0, 1), labels.flatten())
        self.center.lerp_(labels.float().mean() * torch.ones(11), 0.1)
        return {"logits": scores, "loss": loss + 0 * self.center.sum()}


class Learning(Shifted):
    """Its loss has a weight of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens, labels=None):
        scores = self.head(self.mix(self.embed(tokens)))
        return {"logits": scores, "loss": F.cross_entropy(scores.flatten(0, 1) * self.scale, labels.flatten())}


class NoLoss(Shifted):
    def forward(self, tokens, labels=None):
        return {"logits": self.head(self.mix(self.embed(tokens)))}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Fed, r"takes its labels into its layers too, in .*Give what they are made from as an input of its own"),
        (Moving, "goes with a buffer that its forward changes"),
        (Learning, "the loss takes scale, which is the model's"),
        (NoLoss, "returned a dict in which the loss cannot be identified"),
        (Dense, "takes no `labels`"),
        (lambda: nn.Sequential(nn.Linear(7, 11)), "a list of blocks computes no loss"),
    ],
)
def test_what_is_no_loss_of_an_output_and_labels_is_refused_in_words(kind, words, tmp_path):
    data = classes() if kind is Dense else tokens()
    if kind not in (Dense, NoLoss, Shifted):
        data = data[0], data[1].clamp(min=0)
    with pytest.raises(ModelError, match=words):
        trained(kind, tmp_path / "run", data, data)


def test_labels_among_the_inputs_are_asked_for_elsewhere(tmp_path):
    x, y = tokens()
    with pytest.raises(ModelError, match=r"labels is among the inputs of a row. Give it as y"):
        trained(Shifted, tmp_path / "run", ({"tokens": x, "labels": y}, y), ({"tokens": x, "labels": y}, y))


LLAMA = """
import torch, transformers
from seqpart import Trainer
config = transformers.LlamaConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=60, tie_word_embeddings=True
)
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(config)
plain = transformers.LlamaForCausalLM(config)
plain.load_state_dict(model.state_dict())
x = torch.randint(1, 60, (16, 12))
y = torch.where(torch.arange(12) < torch.arange(16)[:, None] % 8 + 4, x, -100)
Trainer(
    model, "model", "sgd", mem_limit="3GB", method="streamed", partitions=3, batch_size=8, micro_batch_size=8, epochs=2,
    lr=0.01, shuffle=False, quiet=True, output_dir="run",
).fit((x, y), (x, y))
step = torch.optim.SGD(plain.train().parameters(), lr=0.01, fused=True)
for first in (0, 8, 0, 8):
    plain(input_ids=x[first : first + 8], labels=y[first : first + 8], use_cache=False).loss.backward()
    step.step()
    step.zero_grad()
ours = model.state_dict()
assert all(torch.equal(tensor, ours[key]) for key, tensor in plain.state_dict().items())
"""


@pytest.mark.slow
def test_a_language_model_of_transformers_learns_by_its_own_loss(tmp_path):
    """In a process of its own: the library's memory would count against the limits of other tests."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed: seqpart[hf]")
    subprocess.run([sys.executable, "-c", LLAMA], cwd=tmp_path, check=True)
