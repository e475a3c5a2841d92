"""A plan measures a loss on tensors without values. One that asks for a value was refused as "aten._local_scalar_dense", as was
one_hot with num_classes; one that counted classes by the largest label of a part failed with torch's own traceback, and one
that asked by numpy() got whatever lay there."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seqpart import Trainer
from seqpart.errors import OptionError

ROWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 5


def squares(output, labels):
    return ((output - F.one_hot(labels)) ** 2).mean()


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
