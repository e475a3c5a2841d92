"""Data of every kind comes in by one way: `fit`, `plan`, `evaluate`, sessions and `verify` take the same."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from seqpart import Trainer
from seqpart.errors import DataError
from seqpart.verify import verify

ROWS, BATCH = 48, 16
X, OTHER, Y = (
    torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(0)),
    torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1)),
    torch.arange(ROWS) % 4,
)


class Net(nn.Module):
    """Takes one input, or two whose sum it takes."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 24), nn.Linear(24, 4)

    def forward(self, x, other=None):
        return self.last(self.first(x if other is None else x + other).relu())


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


class Augmented(TensorDataset):
    """Items that differ each time they are read."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.randn(6) / 100, y


KINDS = {
    "a pair": lambda: (X, Y),
    "arrays": lambda: (X.numpy(), Y.numpy()),
    "a dict": lambda: {"x": X, "labels": Y},
    "two inputs and labels": lambda: (X, OTHER, Y),
    "two inputs in a tuple": lambda: ((X, OTHER), Y),
    "a data set": lambda: TensorDataset(X, Y),
    "a data set of two inputs": lambda: TensorDataset(X, OTHER, Y),
    "items": lambda: [(X[i], int(Y[i])) for i in range(ROWS)],
    "a loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=BATCH),
    "a loader of two inputs": lambda: DataLoader(TensorDataset(X, OTHER, Y), batch_size=BATCH),
    "a stream": Stream,
    "augmented items": lambda: Augmented(X, Y),
}


def trainer(tmp_path):
    torch.manual_seed(0)
    given = {"mem_limit": "3GB", "method": "streamed", "batch_size": BATCH, "partitions": 2, "quiet": True}
    return Trainer(Net(), optimizer="sgd", lr=0.1, offload_dir=tmp_path, **given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(2)
def test_every_kind_of_data_is_planned_trained_evaluated_and_stepped_on(kind, tmp_path):
    data = KINDS[kind]
    asked = trainer(tmp_path)
    assert len(asked.plan(data()).partitions) == 2
    result = asked.fit(data(), data())
    assert asked.evaluate(data()).loss == pytest.approx(float(result.test_loss), rel=0.01)  # where items differ each time
    with trainer(tmp_path).session(data()) as session:
        batch = data()[:BATCH] if kind == "items" else next(iter(data())) if kind.startswith("a loader") else None
        if batch is not None:
            assert session.step(batch) > 0
        assert session.evaluate(data()).loss > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a loader of two inputs", "a stream", "augmented items"])
def test_data_of_kinds_that_are_read_anew_are_verified(kind, tmp_path):
    torch.manual_seed(0)
    found = verify(
        Net(), KINDS[kind](), mem_limit="3GB", partitions=2, batch_size=BATCH, steps=2, offload_dir=tmp_path, optimizer="sgd",
        lr=0.1,
    )  # fmt: skip
    assert found.steps == 2


def test_several_inputs_with_their_labels_train_like_a_pair_of_them(tmp_path):
    """All rows as (a, b, y) were read as a data set of three items."""
    weights = [trainer(tmp_path).fit(data).state_dict() for data in ((X, OTHER, Y), ((X, OTHER), Y), [X, OTHER, Y])]
    assert all(torch.equal(weights[0][name], other[name]) for other in weights[1:] for name in other)


@pytest.mark.parametrize("data", [DataLoader(TensorDataset(X, Y), batch_size=ROWS), TensorDataset(X, Y), Stream()])
def test_the_example_of_a_session_is_a_whole_batch_where_rows_are_read_in_pieces(data, tmp_path, monkeypatch):
    """The first 64 rows were taken for the first batch, and an example of 128 refused as too small."""
    monkeypatch.setattr("seqpart.data.source.PIECE_ROWS", 8)
    with trainer(tmp_path).session(data) as session:
        assert session.step((X[:BATCH], Y[:BATCH])) > 0


def spread_out(output):
    """A loss without labels."""
    return (output.mean(0).square() + (1 - output.var(0)).square()).sum()


class Rows(IterableDataset):
    """A stream of inputs alone; torch's class has a `[i]` that fails."""

    def __iter__(self):
        return iter(X)


BARE = {
    "a tensor": lambda: X,
    "an array": lambda: X.numpy(),
    "a data set": lambda: TensorDataset(X),
    "items": lambda: list(X),
    "a loader": lambda: DataLoader(TensorDataset(X), batch_size=BATCH),
    "a loader of its own batches": lambda: DataLoader(list(X), batch_size=BATCH, collate_fn=torch.stack),
    "a dict": lambda: {"x": X},
    "a stream": lambda: Rows(),
    "a loader of a stream": lambda: DataLoader(Rows(), batch_size=BATCH),
}


@pytest.mark.parametrize("kind", BARE)
@pytest.mark.few(2)
def test_data_without_labels_train_by_a_loss_of_the_output_alone(kind, tmp_path):
    torch.manual_seed(0)
    model = Net()
    expected = copy.deepcopy(model)
    given = {"mem_limit": "3GB", "method": "streamed", "batch_size": BATCH, "micro_batch_size": BATCH, "partitions": 2}
    given |= {"optimizer": "sgd", "lr": 0.1, "offload_dir": tmp_path, "quiet": True}
    asked = Trainer(model, spread_out, epochs=1, shuffle=False, **given)
    result = asked.fit(BARE[kind](), BARE[kind]())
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, fused=True)
    for rows in X.split(BATCH):
        optimizer.zero_grad()
        spread_out(expected(rows)).backward()
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected.parameters(), strict=True))
    assert result.accuracy is None
    assert asked.evaluate(BARE[kind]()).loss == pytest.approx(float(result.test_loss))
    with Trainer(Net(), spread_out, **given).session(BARE[kind]()) as session:
        assert session.step({"x": X[:BATCH]} if kind == "a dict" else X[:BATCH]) > 0
        if kind == "a loader":  # its batches are lists of one tensor
            assert session.step(next(iter(BARE[kind]()))) > 0


def test_labels_that_a_collate_fn_adds_are_labels(tmp_path):
    """Items without labels were given zeros, and the labels became an input."""

    def collate(items):
        return {"x": torch.stack([x for (x,) in items]), "labels": torch.zeros(len(items), dtype=torch.int64)}

    class Judging(Net):
        def forward(self, x, labels):
            found = super().forward(x)
            return {"loss": nn.functional.cross_entropy(found, labels), "logits": found}

    loader = DataLoader(TensorDataset(X), batch_size=BATCH, collate_fn=collate)
    trainer = Trainer(Judging(), "model", mem_limit="3GB", method="full", epochs=1, offload_dir=tmp_path, quiet=True)
    assert trainer.fit(loader, loader).accuracy is not None


class Masked(Net):
    """Computes its own loss, and takes no labels, as masked autoencoders do."""

    def forward(self, x):
        found = self.last(self.first(x).relu())
        return {"loss": (found - x[:, :4]).square().mean(), "logits": found}


def test_a_model_that_computes_its_own_loss_may_need_no_labels(tmp_path):
    torch.manual_seed(0)
    model = Masked()
    expected = copy.deepcopy(model)
    given = {"mem_limit": "3GB", "method": "streamed", "batch_size": BATCH, "partitions": 2, "quiet": True, "shuffle": False}
    Trainer(model, "model", optimizer="sgd", lr=0.1, offload_dir=tmp_path, epochs=1, **given).fit(X, X)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, fused=True)
    for rows in X.split(BATCH):
        optimizer.zero_grad()
        expected(rows)["loss"].backward()
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected.parameters(), strict=True))


def test_a_loss_that_takes_labels_is_told_where_there_are_none(tmp_path):
    with pytest.raises(DataError, match=r"Tensor alone, .*or a loss of what the model returns alone"):
        Trainer(Net(), nn.MSELoss(), mem_limit="3GB", method="full", quiet=True).plan(X)
