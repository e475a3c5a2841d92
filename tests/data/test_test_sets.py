"""Several test sets by name, in `fit`, `evaluate` and sessions."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from seqpart import Trainer
from seqpart.errors import DataError

SIZES = {"val": 21, "shifted": 8, "one": 1}


def network():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))


def rows(count, seed=4, shift=0.0):
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, generator=numbers) + shift, torch.randint(0, 3, (count,), generator=numbers)


def sets():
    return {name: rows(count, seed, shift=seed) for seed, (name, count) in enumerate(SIZES.items())}


class Noisy(Dataset):
    """Rows that differ each time that they are read, unless generators are seeded."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index] + 0 * torch.randn(6), int(self.y[index])


class Right:
    """The share of right answers, as an object that is reset."""

    def reset(self):
        self.right = self.rows = 0

    def update(self, outputs, labels):
        self.right += int((outputs.argmax(1) == labels).sum())
        self.rows += len(labels)

    def compute(self):
        return {"right": self.right / self.rows}


def expected(model, data):
    model.eval()
    found = {}
    with torch.no_grad():
        for name, (x, y) in data.items():
            output = model(x)
            found[f"{name}/loss"] = F.cross_entropy(output, y).item()
            found[f"{name}/accuracy"] = found[f"{name}/right"] = (output.argmax(1) == y).float().mean().item()
    return found


def trainer(folder, model, **options):
    options = {"mem_limit": "2GB", "method": "full", "batch_size": 8, "micro_batch_size": 8, "epochs": 1, **options}
    return Trainer(model, output_dir=folder / "run", quiet=True, **options)


@pytest.mark.parametrize("how", [{"method": "full"}, {"method": "streamed", "partitions": 2}, {"method": "sil"}], ids=str)
@pytest.mark.few(2)
def test_each_set_is_reported_by_its_name(how, tmp_path):
    model = network()
    result = trainer(tmp_path, model, **how).fit(rows(40), sets(), compute_metrics=Right())
    by_name = expected(model, sets())
    assert result.metrics == pytest.approx(by_name, rel=1e-5)
    share = {name: count / sum(SIZES.values()) for name, count in SIZES.items()}
    assert result.test_loss == pytest.approx(sum(by_name[f"{name}/loss"] * share[name] for name in SIZES), rel=1e-5)
    assert result.accuracy == pytest.approx(sum(by_name[f"{name}/accuracy"] * share[name] for name in SIZES), rel=1e-5)


@pytest.mark.parametrize("kind", ["data sets", "loaders"])
def test_sets_that_are_read_anew_are_reported_too(kind, tmp_path):
    def made(x, y):
        return Noisy(x, y) if kind == "data sets" else DataLoader(TensorDataset(x, y), batch_size=8)

    model = network()
    named = {name: made(*pair) for name, pair in sets().items()}
    result = trainer(tmp_path, model, cache="none" if kind == "data sets" else "auto").fit(made(*rows(40)), named)
    by_name = {name: value for name, value in expected(model, sets()).items() if "right" not in name}
    assert result.metrics == pytest.approx(by_name, rel=1e-5)


def test_the_best_by_one_of_the_sets_is_kept_in_evaluations_between_updates(tmp_path):
    seen = []

    class Sees:
        def on_eval(self, event):
            seen.append((event.metrics["shifted/loss"], event.update))

    model = network()
    options = {"eval_every": 2, "keep_best": True, "best_by": "min:shifted/loss", "epochs": 3}
    result = trainer(tmp_path, model, **options).fit(rows(40), sets(), callbacks=[Sees()])
    assert result.best_update == min(seen)[1] and result.metrics["shifted/loss"] == min(seen)[0]


def test_evaluate_and_sessions_take_several_sets_too(tmp_path):
    model = network()
    asked = trainer(tmp_path, model)
    assert asked.evaluate(sets(), compute_metrics=Right()).metrics == pytest.approx(expected(model, sets()), rel=1e-5)
    own = Trainer(model, mem_limit="2GB", method="full", batch_size=8, quiet=True, offload_dir=tmp_path / "homes")
    with own.session(rows(8)) as session:
        session.step(rows(8))
        found = session.evaluate(sets())
        single = session.evaluate(rows(5))
    mixture = {**sets(), "shifted": DataLoader(TensorDataset(*sets()["shifted"]), batch_size=3)}
    by_name = {name: value for name, value in expected(model, sets()).items() if "right" not in name}
    assert asked.evaluate(mixture).metrics == pytest.approx(by_name, rel=1e-5)
    assert found.metrics == pytest.approx(by_name, rel=1e-5) and single.metrics == {}


def test_sets_for_a_loss_without_labels_are_reported(tmp_path):
    model = nn.Linear(6, 6)

    def loss(output):
        return output.square().mean()

    named = {name: x for name, (x, _) in sets().items()}
    named = {name: TensorDataset(x) for name, x in named.items()}
    result = Trainer(
        model, loss, mem_limit="2GB", method="full", batch_size=8, epochs=1, quiet=True, output_dir=tmp_path / "run"
    ).fit(rows(40)[0], named)
    with torch.no_grad():
        by_name = {f"{name}/loss": loss(model(x)).item() for name, (x, _) in sets().items()}
    assert result.metrics == pytest.approx(by_name, rel=1e-5)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ((torch.randn(4, 7), torch.zeros(4, dtype=torch.int64)), "test sets: expected rows of one form; found"),
        ((torch.randn(4, 6), torch.randn(4)), "test sets: expected labels of one form; found"),
        (None, "test sets: expected data sets by name; found no data for 'other'"),
        ((torch.randn(4, 6), torch.tensor([0, 1, 7, 1])), "class 7 does not occur in the training rows"),
    ],
    ids=["rows", "labels", "none", "a class"],
)  # fmt: skip
def test_sets_that_are_unlike_are_refused_in_words(other, words, tmp_path):
    with pytest.raises(DataError, match=re.escape(words)):
        trainer(tmp_path, network()).plan(rows(40), {"val": rows(8), "other": other})
