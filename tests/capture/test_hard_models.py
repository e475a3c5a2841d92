"""Models with the habits of real ones do in blocks what they do whole, or are refused in words."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from seqpart.capture.capture import chain_of
from tests import hard_models as models
from tests.replay import ROWS, assert_same_as_whole, replayed

FLOAT, LONG = torch.float32, torch.long
SMALL = {
    "residual": (models.Residual, (3, 8, 8), FLOAT),
    "unet": (models.UNet, (3, 16, 16), FLOAT),
    "dense": (models.Dense, (4,), FLOAT),
    "dropped": (models.Dropped, (8,), FLOAT),
    "tokens": (models.Tokens, (5, 6), FLOAT),
    "tied": (models.Tied, (7,), LONG),
    "rotary": (models.Rotary, (7,), LONG),
    "views in one block": (lambda: models.Half(False), (8,), FLOAT),
    "custom backward": (models.Custom, (4,), FLOAT),
    "recurrent": (models.Recurrent, (7,), LONG),
    "half precision inside": (models.Narrowed, (8,), FLOAT),
    "repeated": (models.Repeated, (4,), FLOAT),
    "running mean": (models.RunningMean, (4,), FLOAT),
    "filled piece by piece": (models.Filled, (4,), FLOAT),
    "skip in training": (lambda: models.Uneven(True, False), (4,), FLOAT),
    "skip in evaluation": (lambda: models.Uneven(False, False), (4,), FLOAT),
    "a head in training": (models.Auxiliary, (4,), FLOAT),
    "dataclass": (models.Described, (4,), FLOAT),
    "one module": (lambda: nn.Linear(4, 3), (4,), FLOAT),
}


@pytest.mark.parametrize(("make", "shape", "dtype"), SMALL.values(), ids=SMALL)
def test_a_model_does_in_blocks_what_it_does_whole(make, shape, dtype):
    torch.manual_seed(0)
    rows = torch.randn(ROWS, *shape) if dtype is FLOAT else torch.randint(3, 50, (ROWS, *shape))
    assert_same_as_whole(make(), rows)


WHOLE = {
    "a head in evaluation": (models.Late, "calls other modules when it trains than when it evaluates"),
    "views in two blocks": (lambda: models.Half(True), "changed in place that shares its memory with another"),
    "other tensors in training": (lambda: models.Uneven(True, True), "passes other tensors between them"),
}


@pytest.mark.parametrize(("make", "said"), WHOLE.values(), ids=WHOLE)
def test_what_a_cut_would_change_stays_one_block(make, said):
    torch.manual_seed(0)
    model, shape = make(), (8,) if said.startswith("changed") else (4,)
    assert said in chain_of(model, shape, FLOAT).whole_parts[0]
    assert_same_as_whole(model, torch.randn(ROWS, *shape), 1, 1)


def padded(*, first=False):
    """Rows of 7 words, of which some are padding. first: in front."""
    rows = torch.randint(1, 50, (ROWS, 7))
    for row, length in zip(rows, (7, 4, 2), strict=True):
        row[length:] = 0
    return rows.flip(1) if first else rows


PADDED = {
    "at the end": ({}, False, True), "at the front": ({}, True, False), "a norm behind": ({"final": True}, False, True),
    "one layer twice": ({"shared": True}, False, True), "a forward of its own": ({"kind": models.Looped}, False, False),
    "in evaluation mode": ({"evaluates": True}, False, True), "frozen": ({"evaluates": True, "frozen": True}, False, True),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("options", "first", "zeroes"), PADDED.values(), ids=PADDED)
def test_padding_is_zero_in_evaluation_where_an_encoder_of_torch_makes_it_so(options, first, zeroes):
    """Without gradients, and only where no padding comes first, it packs rows in nested tensors: what was padding is 0 then,
    and means over all positions are others than in training. Cut into blocks it did not."""
    torch.manual_seed(0)
    model, rows = models.Padded(**options), padded(first=first)
    chain = chain_of(model, (7,), LONG)
    assert len(chain) == (8 if "final" in options else 6)
    for training in (True, False):
        model.train(training)
        with torch.set_grad_enabled(training):
            expected = model(rows)
            assert torch.allclose(replayed(chain, rows, training=training)[0], expected, rtol=1e-5, atol=1e-6)
    with_gradients = model.requires_grad_().eval()(rows)
    assert torch.allclose(with_gradients, expected, atol=1e-4) != zeroes


SEEDED = {"for good": nullcontext, "for a moment": torch.random.fork_rng}
ASKED = {
    "are gradients on": lambda x: torch.is_grad_enabled(), "does it require them": lambda x: x.requires_grad,
    "what made it": lambda x: x.grad_fn is not None, "is it a leaf": lambda x: not x.is_leaf,
}  # fmt: skip


@pytest.mark.parametrize("scope", SEEDED.values(), ids=SEEDED)
def test_a_seed_that_is_set_between_layers_makes_a_model_one_block(scope):
    """The numbers drawn after it were others in each pass: a fixed projection was none, in every method."""

    def project(x):
        with scope():
            torch.manual_seed(3)
            return x @ torch.randn(6, 6)

    model = models.Between(project)
    assert "sets the seed of torch's random numbers" in chain_of(model, (4,), FLOAT).whole_parts[0]
    assert_same_as_whole(model, torch.randn(ROWS, 4), 1, 1)


@pytest.mark.parametrize("asks", ASKED.values(), ids=ASKED)
def test_a_model_that_does_other_things_without_gradients_is_one_block(asks):
    """Its tests had the losses of its training pass."""
    model = models.Between(lambda x: x if asks(x) else x.relu())
    assert "in evaluation on whether gradients are wanted" in chain_of(model, (4,), FLOAT).whole_parts[0]
    assert_same_as_whole(model, torch.randn(ROWS, 4), 1, 1)
