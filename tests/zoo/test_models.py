"""The ready-made models: what their blocks promise beside shapes."""

import pytest
import torch
from torch import nn

from seqpart.data.splits import as_split
from seqpart.model.losses import loss_named
from seqpart.zoo import models, text

CONTEXT, VOCABULARY = 12, 20


def built(**options):
    options = {"width": 32, "depth": 2, "heads": 4, **options}
    return nn.Sequential(
        *[part if isinstance(part, nn.Module) else part() for part in models.gpt(VOCABULARY, CONTEXT, **options)]
    )


def tokens(rows=3):
    return torch.randint(VOCABULARY, (rows, CONTEXT))


def test_a_gpt_is_an_embedding_equal_blocks_from_one_factory_and_an_output():
    embedding, *between, _ = models.gpt(VOCABULARY, CONTEXT, width=32, depth=3, heads=4)
    assert len({id(part) for part in between}) == 1
    assert len(between) == 3
    assert isinstance(embedding(), models.TokenEmbedding)
    assert built()(tokens()).shape == (3, CONTEXT, VOCABULARY)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_prediction_depends_on_no_later_token(depth):
    model, x = built(depth=depth).double(), tokens(1)
    for place in range(CONTEXT):
        other = x.clone()
        other[0, place] = (other[0, place] + 1) % VOCABULARY
        changed = (model(x) != model(other)).any(2)[0]
        assert not changed[:place].any()
        assert changed[place]
        assert depth == 0 or changed[place:].all()


def test_a_shorter_row_is_judged_as_the_beginning_of_a_longer_one():
    model, x = built().double(), tokens()
    torch.testing.assert_close(model(x)[:, :5], model(x[:, :5]))


def test_dropout_is_for_training_alone():
    model, x = built(dropout=0.5), tokens()
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_attention_is_that_of_torch_s_own_layer():
    block = models.TransformerBlock(32, 4, 0.0).double()
    theirs = nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64)
    theirs.load_state_dict(
        {
            "in_proj_weight": block.qkv.weight, "in_proj_bias": block.qkv.bias,
            "out_proj.weight": block.mixed.weight, "out_proj.bias": block.mixed.bias,
        }
    )  # fmt: skip
    x = torch.randn(3, CONTEXT, 32, dtype=torch.float64)
    normed, mask = block.norm(x), nn.Transformer.generate_square_subsequent_mask(CONTEXT, dtype=torch.float64)
    between = x + theirs(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
    torch.testing.assert_close(block(x), between + block.mlp(between))


def test_tied_weights_are_one_parameter_in_two_blocks():
    model = built(tied=True)
    assert model[0].token.weight is model[-1][1].weight
    assert sum(p.numel() for p in built().parameters()) - sum(p.numel() for p in model.parameters()) == VOCABULARY * 32


def test_a_gpt_learns_a_text(tmp_path):
    (tmp_path / "a.txt").write_text("to be, or not to be: that is the question. " * 40)
    train, test = (as_split(part, "some") for part in text.load(tmp_path / "a.txt", CONTEXT))
    model, loss = built(depth=1), loss_named(None, train.labels, VOCABULARY)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, y = torch.cat(list(train.open())).long(), train.labels.long()
    for _ in range(40):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        assert loss(model(torch.cat(list(test.open())).long()), test.labels.long()) < 0.5
