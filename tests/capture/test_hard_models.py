"""Models with the habits of real ones do in blocks what they do whole, or are refused in words."""

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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("lengths", [(7, 4, 2), (7, 7, 7)])
@pytest.mark.parametrize("first", [False, True])
def test_padding_is_zero_in_evaluation_where_an_encoder_of_torch_makes_it_so(final, lengths, first):
    """Without gradients, and only where no padding comes first, it packs rows in nested tensors: what was padding is 0 then,
    and means over all positions are others than in training. Cut into blocks it did not."""
    torch.manual_seed(0)
    model, rows = models.Padded(final=final), torch.randint(1, 50, (ROWS, 7))
    for row, length in zip(rows, lengths, strict=True):
        row[length:] = 0
    rows = rows.flip(1) if first else rows
    chain = chain_of(model, (7,), LONG)
    assert len(chain) == 6 + 2 * final
    for training in (True, False):
        model.train(training)
        with torch.set_grad_enabled(training):
            expected = model(rows)
            assert torch.allclose(replayed(chain, rows, training=training)[0], expected, rtol=1e-5, atol=1e-6)
    assert torch.allclose(model.eval()(rows), expected, atol=1e-4) == (first or lengths[-1] == 7)  # gradients: none is 0
