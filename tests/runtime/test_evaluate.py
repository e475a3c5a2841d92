"""The model as it came, or was trained, judged on given rows under the limit; and the weights of a result."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from seqpart import Trainer
from seqpart.device.device import Device
from seqpart.device.limit import measure_runtime
from seqpart.errors import CorruptFile, DataError, DoesNotFit, StoreError
from tests.choice import in_turn
from tests.runtime.test_same_as_plain import data, network, plain_modules

ROWS = data(30, 1)


def trainer(folder, model=None, loss=None, **options):
    options = {"mem_limit": "2GB", "method": "streamed", "epochs": 1, "batch_size": 16, "lr": 1e-2, "seed": 5, **options}
    return Trainer(network() if model is None else model, loss, output_dir=folder / "run", quiet=True, **options)


def alive():
    return nn.Sequential(*plain_modules(network(), 5))


def judged(model, rows):
    """Loss and accuracy of plain PyTorch."""
    x, y = rows
    with torch.no_grad():
        outputs = model.eval()(x)
    return F.cross_entropy(outputs, y).item(), (outputs.argmax(1) == y).float().mean().item()


def close(evaluation, expected):
    """Micro-batches are added in another order than one batch: the last digits of a float32 differ."""
    assert (evaluation.loss, evaluation.accuracy) == pytest.approx(expected, rel=1e-5)
    return True


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("kind", ["factories", "modules"])
def test_before_any_fit_the_model_is_judged_as_it_came(kind, tmp_path):
    run = trainer(tmp_path, None if kind == "factories" else alive())
    found = run.evaluate(ROWS)
    assert close(found, judged(alive(), ROWS))
    assert found.proof.violations == 0 and 0 < found.proof.peak <= found.proof.limit
    assert files(tmp_path) == [], "nothing is left"


@pytest.mark.parametrize(
    ("kind", "options"),
    in_turn(["factories", "modules"], [{}, {"partitions": 3}, {"method": "sil", "partitions": 3}, {"method": "full"}]),
    ids=str,
)
@pytest.mark.few(1)
def test_after_a_fit_the_trained_weights_are_judged(kind, options, tmp_path):
    run = trainer(tmp_path, None if kind == "factories" else alive(), **options)
    result = run.fit(data(), ROWS)
    plain = alive()
    plain.load_state_dict(result.state_dict())
    assert close(run.evaluate(ROWS), judged(plain, ROWS))
    assert close(run.evaluate(ROWS), (result.test_loss, result.accuracy)), "and again"
    assert close(run.evaluate(data(47, 3)), judged(plain, data(47, 3)))
    assert set(files(tmp_path)) == set(files(result.weights.parent))


def test_a_model_given_alive_is_left_as_it_was(tmp_path):
    model = alive()
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer(tmp_path, model).evaluate(ROWS)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())


class Normed(nn.Module):
    """Statistics, weights that lie otherwise, and a buffer that no state_dict has."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(12, 12), nn.BatchNorm1d(12)
        self.linear.weight.data = self.linear.weight.data.t()
        self.register_buffer("scale", torch.full((12,), 1.5), persistent=False)

    def forward(self, x):
        return x + torch.relu(self.norm(self.linear(x)) * self.scale)


@pytest.mark.parametrize("rows", [17])
def test_statistics_and_weights_that_lie_otherwise_come_back_from_the_file(rows, tmp_path):
    """The last row stands alone in its batch, which a BatchNorm that learns would refuse."""
    x, y = torch.randn(48, 12), torch.arange(48) % 4
    blocks = [Normed, Normed, lambda: nn.Linear(12, 4)]
    run = trainer(tmp_path, blocks, partitions=3)
    result = run.fit((x, y), (x, y))
    plain = nn.Sequential(*(block() for block in blocks))
    plain.load_state_dict(result.state_dict())
    assert close(run.evaluate((x[:rows], y[:rows])), judged(plain, (x[:rows], y[:rows])))


def test_rows_of_one_class_and_a_regression_are_judged_too(tmp_path):
    x, y = ROWS
    assert close(trainer(tmp_path).evaluate((x, torch.full_like(y, 2))), judged(alive(), (x, torch.full_like(y, 2))))
    target = torch.randn(30)
    blocks = [lambda: nn.Linear(x[0].numel(), 1)]
    found = trainer(tmp_path, [nn.Flatten, *blocks]).evaluate((x, target))
    assert found.accuracy is None and found.loss > 0


def test_a_weight_that_two_blocks_share_is_one(tmp_path):
    first = nn.Linear(8, 8)
    last = nn.Linear(8, 8)
    last.weight = first.weight
    model = nn.Sequential(first, nn.ReLU(), last)
    rows = torch.randn(24, 8), torch.arange(24) % 8
    expected = judged(nn.Sequential(first, nn.ReLU(), last), rows)
    assert close(trainer(tmp_path, model).evaluate(rows), expected)


@pytest.mark.own_process
def test_a_model_larger_than_the_limit_is_judged_inside_it(tmp_path):
    blocks = [lambda: nn.Linear(64, 1800)] + [lambda: nn.Linear(1800, 1800)] * 14 + [lambda: nn.Linear(1800, 10)]
    limit = measure_runtime(Device()) + (94 << 20)
    run = trainer(tmp_path, blocks, mem_limit=f"{limit >> 20}MB")
    x, y = torch.randn(64, 64), torch.arange(64) % 10
    found = run.evaluate((x, y))
    weights = 4 * 14 * 1800 * 1800
    assert found.proof.violations == 0 and found.proof.peak - found.proof.runtime < weights / 2
    assert found.proof.peak <= found.proof.limit < weights + found.proof.runtime


def test_what_cannot_be_evaluated_is_refused_in_words(tmp_path):
    run = trainer(tmp_path, mem_limit="1MB")
    with pytest.raises(DoesNotFit):
        run.evaluate(ROWS)
    with pytest.raises(DataError):
        trainer(tmp_path).evaluate((ROWS[0], ROWS[1][:5]))


def test_a_result_gives_its_weights_and_says_where_they_are_gone(tmp_path):
    run = trainer(tmp_path)
    result = run.fit(data(), ROWS)
    found, expected = result.state_dict(), load_file(result.weights)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    whole = result.weights.read_bytes()
    result.weights.write_bytes(whole[:-8])
    with pytest.raises(CorruptFile, match="is damaged"):
        result.state_dict()
    with pytest.raises(CorruptFile, match="ends before its last tensor"):
        run.evaluate(ROWS)
    result.weights.unlink()
    with pytest.raises(StoreError):
        result.state_dict()
    with pytest.raises(StoreError):
        run.evaluate(ROWS)


@pytest.mark.parametrize("shape", [(), (3, 3)])
def test_one_score_of_yes_or_no_has_no_accuracy(shape, tmp_path):
    """With whole labels (rows,) it was the share of the rows that are labelled 0, and decided which weights were the best."""
    model = nn.Linear(4, 1) if not shape else nn.Conv2d(4, 1, 1)
    x, y = torch.randn(16, 4, *shape), torch.randint(2, (16, *shape))
    assert (
        Trainer(model, "bce", mem_limit="2GB", method="full", quiet=True, output_dir=tmp_path).evaluate((x, y)).accuracy is None
    )
