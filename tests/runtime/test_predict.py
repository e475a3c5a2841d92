"""What the model returns for given rows, under the limit, in the bits of its own forward."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from seqpart import Trainer
from seqpart.errors import ModelError

X, Y = torch.randn(23, 8, generator=torch.Generator().manual_seed(0)), torch.arange(23) % 4
FORMS = {
    "x": X,
    "pair": (X, Y),
    "data set": TensorDataset(X, Y),
    "items without labels": list(X),
    "loader": DataLoader(TensorDataset(X), batch_size=7),
    "dict": {"x": X},
}


class Several(nn.Module):
    """Returns a tree of scores, states and whole numbers."""

    def __init__(self):
        super().__init__()
        self.body, self.scores = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5)), nn.Linear(16, 4)

    def forward(self, x):
        states = self.body(x).relu()
        scores = self.scores(states)
        return {"logits": scores, "rest": (states, scores.argmax(1))}


def trainer(model, folder, loss=None, **options):
    options = {"mem_limit": "2GB", "method": "streamed", "partitions": 2, "batch_size": 8, "epochs": 1, **options}
    return Trainer(model, loss, output_dir=folder / "run", quiet=True, **options)


@pytest.mark.parametrize("form", FORMS)
def test_predictions_are_those_of_the_models_own_forward_in_evaluation(form, tmp_path):
    torch.manual_seed(0)
    model = Several()
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(X[:20]), copy.deepcopy(model).eval()(X[20:])
    found = trainer(model, tmp_path, lambda output, labels: nn.functional.cross_entropy(output["logits"], labels)).predict(
        FORMS[form]
    )
    every = [found["logits"], *found["rest"]]
    parts = [[one["logits"], *one["rest"]] for one in expected]
    for tensor, *own in zip(every, *parts, strict=True):
        torch.testing.assert_close(tensor, torch.cat(own), rtol=1e-6, atol=1e-6)  # batches of other sizes
    assert isinstance(found["rest"], tuple) and found["rest"][1].dtype == torch.int64
    assert model.training and not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_after_a_fit_the_trained_model_predicts_and_a_file_stands_in_for_it(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    before = copy.deepcopy(model)
    one = trainer(model, tmp_path, batch_size=23)
    result = one.fit((X, Y))
    assert torch.equal(one.predict(X), model(X).detach())
    assert not torch.equal(one.predict(X), before(X).detach())
    assert torch.equal(trainer(before, tmp_path / "other", batch_size=23).predict(X, weights=result.weights), model(X).detach())


@pytest.mark.own_process
def test_predictions_larger_than_the_limit_are_in_a_file(tmp_path):
    x = torch.randn(1500, 8)
    one = trainer(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1 << 16)), tmp_path, mem_limit="370MB", batch_size=16)
    found = one.predict(x)
    assert found.nbytes > 370e6 and torch.equal(found[:16], one.predict(x[:16]))


@pytest.mark.own_process
def test_predictions_of_a_session_larger_than_its_limit_are_kept_while_it_trains(tmp_path):
    """They were mapped privately, which the enforced limit counts."""
    x, y = torch.randn(1500, 8), torch.arange(1500) % 4
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1 << 16))
    one = Trainer(model, mem_limit="390MB", method="streamed", batch_size=16, output_dir=tmp_path / "run", quiet=True)
    with one.session((x[:16], y[:16])) as session:
        found = session.predict(x)
        session.step((x[:16], y[:16]))
        assert found.nbytes > 390e6 and not torch.equal(session.predict(x[:16]), found[:16])


class Recurrent(nn.Module):
    """Returns scores, states (layers, rows, ...), a weight, and the mean of a batch."""

    def __init__(self, mean=False):
        super().__init__()
        self.gru, self.scores, self.mean = nn.GRU(4, 5, num_layers=2, batch_first=True), nn.Linear(5, 3), mean

    def forward(self, x):
        found, states = self.gru(x.view(-1, 2, 4))
        scores = self.scores(found[:, -1])
        return {
            "scores": scores,
            "states": states,
            "weight": self.scores.weight,
            **({"mean": scores.mean()} if self.mean else {}),
        }


@pytest.mark.parametrize("micro_batch_size", [2, 3, 8])
def test_rows_in_another_dimension_and_tensors_without_rows_are_as_the_model_returns_them(micro_batch_size, tmp_path):
    """States (2, rows, 5) of micro-batches of two rows were joined along the layers."""
    model = Recurrent()
    found = trainer(model, tmp_path, method="streamed", partitions=2, micro_batch_size=micro_batch_size).predict(X[:8])
    for name, tensor in model(X[:8]).items():
        torch.testing.assert_close(found[name], tensor.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("make", [lambda y: (y, torch.stack([y, y.relu() * 0])), lambda y: (y, (y > 9).t())])
def test_tensors_that_functions_make_of_others_have_their_rows_where_they_have_them(make, tmp_path):
    """Where they were equal in all micro-batches, those of the first stood for all rows."""
    model = Made(make)
    for tensor, expected in zip(
        trainer(model, tmp_path, method="full", partitions=1).predict(X), make(model.layer(X)), strict=True
    ):
        torch.testing.assert_close(tensor, expected.detach())


def test_a_number_of_each_micro_batch_is_refused(tmp_path):
    with pytest.raises(ModelError, match="found numbers, or a tensor without rows, that differ between micro-batches"):
        trainer(Recurrent(mean=True), tmp_path, method="full", partitions=1).predict(X)


def test_several_sets_are_predicted_by_name_and_labels_are_left_out(tmp_path):
    model = nn.Linear(8, 4)
    one = trainer(model, tmp_path, method="full", partitions=1)
    found = one.predict({"a": (X, Y), "b": [(x, "text") for x in X[:5]]})
    assert torch.equal(found["a"], model(X).detach()) and torch.equal(found["b"], model(X[:5]).detach())
    with Trainer(model, mem_limit="2GB", method="full", batch_size=8, quiet=True).session((X[:8], Y[:8])) as session:
        assert [len(part) for part in session.predict({"a": (X, Y), "b": (X[:5], Y[:5])}).values()] == [23, 5]


def judged(found, labels):
    return sum(part.sum() for part in found.values()) + labels["b"].sum()


def test_a_session_whose_rows_have_several_labels_predicts_several_outputs():
    """It was an AttributeError of ours, where `Trainer.predict` had the outputs."""
    model, labels = Recurrent(), {"a": Y, "b": torch.randn(23)}
    expected = {name: tensor.detach() for name, tensor in model(X[:8]).items()}
    one = Trainer(model, judged, mem_limit="2GB", method="full", batch_size=8, micro_batch_size=8, quiet=True)
    with one.session((X[:8], {name: part[:8] for name, part in labels.items()})) as session:
        for name, tensor in session.predict(X[:8]).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)


def test_ids_alone_are_predicted(tmp_path):
    model, ids = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 4)), torch.arange(23) % 9
    one = trainer(model, tmp_path, method="full", partitions=1)
    for data in (ids, ids.tolist(), TensorDataset(ids)):
        assert torch.equal(one.predict(data), model(ids).detach())


def test_a_session_predicts_with_the_weights_of_its_last_step(tmp_path):
    """What a policy does, and which rows are labelled next, is chosen by the model that is being trained."""
    torch.manual_seed(0)
    model, plain = (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adam(plain.parameters())
    one = Trainer(model, None, torch.optim.Adam, mem_limit="2GB", method="streamed", partitions=2, batch_size=8, quiet=True)
    with one.session((X[:8], Y[:8])) as session:
        for at in (0, 8):
            session.step((X[at : at + 8], Y[at : at + 8]))
            optimizer.zero_grad()
            nn.functional.cross_entropy(plain(X[at : at + 8]), Y[at : at + 8]).backward()
            optimizer.step()
            assert torch.equal(session.predict(X[:8]), plain(X[:8]).detach())
        assert torch.equal(session.predict((X[:8], Y[:8])), session.predict(X[:8]))
        assert session.predict(X).shape == (23, 4)


def test_a_session_predicts_whatever_its_loss_thinks_of_labels_that_there_are_not(tmp_path):
    """Rows had the example's first label, and the prediction ended where the loss of that was not finite."""
    model, labels = nn.Linear(8, 4), torch.where(torch.arange(8) == 0, -100, Y[:8])

    def loss(output, labels):
        return nn.functional.cross_entropy(output, labels)

    expected = model(X).detach()
    one = Trainer(model, loss, mem_limit="2GB", method="full", batch_size=8, micro_batch_size=8, quiet=True)
    with one.session((X[:8], labels)) as session:
        assert torch.equal(session.predict(X), expected)


class Made(nn.Module):
    """Returns what `make` makes of its scores."""

    def __init__(self, make):
        super().__init__()
        self.layer, self.make = nn.Linear(8, 4), make

    def forward(self, x):
        return self.make(self.layer(x))


@pytest.mark.parametrize(
    "make",
    [lambda y: y.argmax(1), lambda y: y.topk(2).indices, torch.fft.rfft, lambda y: torch.fft.rfft(y).conj(), lambda y: y > 0],
)
def test_whole_numbers_and_complex_ones_are_predicted_too(make, tmp_path):
    """They were refused in the words of a loss that nobody had given."""
    model = Made(make)
    assert torch.equal(trainer(model, tmp_path, method="full", partitions=1).predict(X[:8]), model(X[:8]).detach())


def test_a_number_that_follows_the_rows_of_a_micro_batch_is_refused(tmp_path):
    """It was that of the first micro-batch."""
    with pytest.raises(ModelError, match=r"differ between micro-batches, \[7\]"):
        trainer(Made(lambda y: {"y": y, "rows": len(y)}), tmp_path, method="full", partitions=1).predict(X)


def test_outputs_of_another_shape_in_another_micro_batch_are_refused(tmp_path):
    """A model that cuts to the longest row of its batch: the first micro-batch's bytes were read in the last one's shape."""

    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x):
            return self.layer(x)[:, : int(x[0, 0])]

    x = torch.ones(16, 8)
    x[:8] = 3
    with pytest.raises(ModelError, match=r"rows of one shape from the model; found \(3,\) and \(1,\)"):
        trainer(Cut(), tmp_path, method="full", partitions=1).predict(x)


def test_one_row_is_predicted_and_evaluated_where_training_would_need_two(tmp_path):
    """BatchNorm was measured as in training."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    one, plain = trainer(model, tmp_path), copy.deepcopy(model).eval()
    assert torch.equal(one.predict(X[:1]), plain(X[:1]).detach())
    assert one.predict(X[:9]).shape == (9, 4)
    expected = nn.functional.cross_entropy(plain(X[:1]), Y[:1]).item()
    assert one.evaluate((X[:1], Y[:1])).loss == pytest.approx(expected)
