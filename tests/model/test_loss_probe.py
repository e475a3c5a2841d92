"""A plan measures a loss on tensors without values. One that asks for a value was refused as "aten._local_scalar_dense", as was
one_hot with num_classes; one that counted classes by the largest label of a part failed with torch's own traceback, and one
that asked by numpy() got whatever lay there."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence

from seqpart import Trainer
from seqpart.data.generators import generators_kept
from seqpart.errors import DataError, OptionError
from seqpart.model.loss_probe import seed_all

ROWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 5


@pytest.mark.parametrize("seed", [-1, 0, 2**32 - 1, 2**32, 2**64 - 1])
def test_every_seed_of_64_bits_seeds_all_generators(seed):
    """numpy takes 32 bits: `--seed -1 --model package.module:function` ended in its traceback."""
    with generators_kept():
        drawn = [(seed_all(seed), torch.rand(1).item(), random.random(), np.random.rand()) for _ in range(2)]
        np.random.seed(seed % 2**32)
        assert drawn[0] == drawn[1] and drawn[0][3] == np.random.rand()


def squares(output, labels):
    return ((output - F.one_hot(labels)) ** 2).mean()


def connected(output, labels):
    scores = output.log_softmax(1).expand(6, -1, -1)
    return F.ctc_loss(scores, labels[:, None], (6,) * len(labels), (1,) * len(labels))


class Squares(nn.Module):
    def forward(self, output, labels):
        return squares(output, labels)


def logged(output, labels):
    loss = F.cross_entropy(output, labels)
    loss.item()
    return loss


def capped(output, labels):
    loss = F.cross_entropy(output, labels)
    return loss if loss < 100 else loss / 2


def rebuilt(output, labels):
    return F.cross_entropy(output, torch.from_numpy(labels.numpy()))


def masked(output, labels):
    counts = labels > 2
    return F.cross_entropy(output[counts], labels[counts], reduction="sum"), counts.sum()


def trainer(loss, **options):
    torch.manual_seed(0)
    return Trainer(
        nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 5)), mem_limit="2GB", method="full", batch_size=8, quiet=True, loss=loss,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (squares, "loss squares: .* calls F.one_hot without num_classes, .* Give F.one_hot.labels, num_classes=K"),
        (Squares(), "loss Squares: .* Give F.one_hot.labels, num_classes=K"),
        (logged, "loss logged: .* found that it reads a number out of a tensor .* detach.. in the place of item"),
        (rebuilt, "loss rebuilt: .* found that it reads a number out of a tensor"),
        (capped, "loss capped: .* found that it branches on a value .* torch.where"),
        (connected, "loss connected: .* found that it calls F.ctc_loss, .* return the loss of each row"),
        (masked, "loss masked: .* found that it makes a shape of values .* return .sum, count."),
    ],
)
def test_a_loss_that_asks_for_a_value_is_told_what_it_asks_and_what_helps(loss, words):
    with pytest.raises(OptionError, match=words):
        trainer(loss).plan(ROWS)


def test_several_labels_and_a_loop_of_ones_own_hear_the_same():
    x, y = ROWS
    with pytest.raises(OptionError, match="num_classes=K"):
        trainer(lambda output, labels: squares(output, labels["class"])).plan((x, {"class": y, "other": y}))
    with pytest.raises(OptionError, match="num_classes=K"), trainer(squares).session((x[:8], y[:8])):
        pass


def test_the_cures_are_taken(tmp_path):
    def by_classes(output, labels):
        return ((output - F.one_hot(labels, num_classes=5)) ** 2).mean()

    def by_mask(output, labels):
        counts = labels > 2
        return (F.cross_entropy(output, labels, reduction="none") * counts).sum(), counts.sum()

    for loss in (by_classes, by_mask):
        assert trainer(loss, epochs=1, output_dir=tmp_path / loss.__name__).fit(ROWS, ROWS).test_loss > 0


class Two(nn.Module):
    """Returns two heads by name; `joined`: in one tensor."""

    def __init__(self, *, joined):
        super().__init__()
        self.body, self.out, self.aux, self.joined = nn.Linear(4, 8), nn.Linear(8, 5), nn.Linear(8, 5), joined

    def forward(self, x):
        x = self.body(x).relu()
        out, aux = self.out(x), self.aux(x)
        return torch.cat((out, aux), 1) if self.joined else {"out": out, "aux": aux}


def by_name(output, labels):
    return F.cross_entropy(output["out"], labels) + 0.5 * F.cross_entropy(output["aux"], labels)


def fitted(model, loss, place):
    return Trainer(model, loss, mem_limit="2GB", method="full", batch_size=8, quiet=True, output_dir=place).fit(ROWS)


def test_a_loss_gets_a_models_dict_and_one_of_a_tensor_by_name_is_told_what_it_gets(tmp_path):
    """It was told of an invalid data type 'str', and of micro-batches."""
    assert fitted(Two(joined=False), by_name, tmp_path / "run").train_losses[-1] > 0
    with pytest.raises(OptionError, match=r"by_name: .*looks a value up by its name"):
        fitted(Two(joined=True), by_name, tmp_path / "one")


def test_a_loss_of_features_that_a_hook_keeps_is_told_so_and_the_cure_works(tmp_path):
    """Shapes and data were blamed: "Trying to backward through the graph a second time"."""
    kept = {}
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5))
    model[0].register_forward_hook(lambda layer, taken, given: kept.update(features=given))
    with pytest.raises(OptionError, match=r"a tensor of the network that it was not given.*Let the model return it too"):
        fitted(model, lambda o, y: F.cross_entropy(o, y) + 0.1 * kept["features"].pow(2).mean(), tmp_path / "run")
    fitted(Two(joined=True), lambda o, y: F.cross_entropy(o[:, :5], y) + 0.1 * o[:, 5:].pow(2).mean(), tmp_path / "cured")


def test_a_loss_of_ones_own_makes_of_its_labels_what_it_likes(tmp_path):
    """Labels of one class, as of a loss that takes none, were refused: training needs two."""

    def contrastive(output, _):
        output = F.normalize(output, dim=-1)
        return F.cross_entropy(output @ output.roll(1, 0).T / 0.1, torch.arange(len(output)))

    for value in (0, -1):
        labels = torch.full((24,), value)
        trained = Trainer(
            nn.Linear(4, 8), contrastive, mem_limit="2GB", method="full", batch_size=8, micro_batch_size=8, quiet=True,
            output_dir=tmp_path / f"run{value}",
        ).fit((ROWS[0], labels), (ROWS[0], labels))  # fmt: skip
        assert trained.test_loss > 0
    with pytest.raises(DataError, match="Training needs at least two classes"):
        Trainer(nn.Linear(4, 8), mem_limit="2GB", method="full", quiet=True).plan((ROWS[0], torch.zeros(24).long()))


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), nn.BCELoss()], ids=repr)
def test_a_loss_of_numbers_is_told_that_labels_are_whole_numbers(loss):
    """It was told `Found dtype Long but expected Float`, of labels given as bool."""
    trainer = Trainer(nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()), loss, mem_limit="2GB", method="full", quiet=True)
    with pytest.raises(DataError, match=r"Labels are whole numbers here, as classes are: give such a loss floats \(y\.float"):
        trainer.plan((ROWS[0], (ROWS[1] > 2)[:, None]))
    assert trainer.plan((ROWS[0], (ROWS[1] > 2)[:, None].float()))


class MeanAndVariance(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mean, self.variance = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x):
        h = self.first(x).relu()
        return self.mean(h), F.softplus(self.variance(h))


class Draws(nn.Module):
    """Returns its draw beside its divergence from the standard normal distribution."""

    def __init__(self):
        super().__init__()
        self.first, self.mean, self.spread, self.last = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 2), nn.Linear(2, 4)

    def forward(self, x):
        h = self.first(x).relu()
        found = Normal(self.mean(h), F.softplus(self.spread(h)))
        return self.last(found.mean), kl_divergence(found, Normal(0.0, 1.0)).sum(1)


of_torch = nn.GaussianNLLLoss()
PROBABLE = {
    "a normal distribution": (MeanAndVariance, lambda output, y: -Normal(*output).log_prob(y).mean()),
    "one that is to check": (MeanAndVariance, lambda output, y: -Normal(*output, validate_args=True).log_prob(y).mean()),
    "a function of torch": (MeanAndVariance, lambda output, y: F.gaussian_nll_loss(output[0], y, output[1])),
    "a loss of torch": (MeanAndVariance, lambda output, y: of_torch(output[0], y, output[1])),
    "classes": (lambda: nn.Linear(4, 8), lambda output, y: -Categorical(logits=output).log_prob(y[:, 0].abs().long()).mean()),
    "in the model": (Draws, lambda output, y: F.mse_loss(output[0][:, :2], y) + output[1].mean()),
    "one class that is meant": (lambda: nn.Linear(4, 8), nn.CrossEntropyLoss()),
}


@pytest.mark.parametrize("kind", PROBABLE)
@pytest.mark.few(3)
def test_a_loss_whose_arguments_torch_checks_trains_as_in_a_plain_loop(kind, tmp_path):
    """torch.distributions and gaussian_nll_loss look whether a variance is below 0, and were refused for that; so was MoCo."""
    build, loss = PROBABLE[kind]
    torch.manual_seed(0)
    model, x, y = build(), ROWS[0], torch.randn(24, 2)
    if kind == "one class that is meant":
        y = torch.zeros(24, dtype=torch.int64)
    expected = copy.deepcopy(model)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for first in range(0, 24, 8):
        loss(expected(x[first : first + 8]), y[first : first + 8]).backward()
        optimizer.step()
        optimizer.zero_grad()
    Trainer(
        model, loss, mem_limit="2GB", method="streamed", batch_size=8, micro_batch_size=8, epochs=1, lr=0.1, optimizer="sgd",
        shuffle=False, quiet=True, output_dir=tmp_path / "run",
    ).fit((x, y))  # fmt: skip
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    with pytest.raises(ValueError, match="Expected parameter scale"):
        Normal(0.0, -torch.ones(1), validate_args=True)  # torch checks as before


def test_models_that_make_a_loss_of_boxes_are_told_that_they_cannot_be_trained():
    """The advice was to give a function of their outputs, which are losses in training and boxes in tests."""
    labels = {"boxes": torch.rand(24, 1, 4), "labels": torch.ones(24, 1).long()}
    with pytest.raises(DataError, match=r"torchvision's detectors do, cannot be trained here"):
        Trainer(nn.Linear(4, 8), "model", mem_limit="2GB", method="full", quiet=True).plan((ROWS[0], labels))
