"""Layers of experts of transformers that are too large for the limit, as tiles of some experts each."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from seqpart import Trainer
from seqpart.errors import DoesNotFit
from seqpart.model.tiling import TiledExperts, tiling

transformers = pytest.importorskip("transformers")

SHARED = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
TILE = 13_000
"""One expert of Qwen3, 32 x 96 numbers; of Mixtral a quarter of one, which is not cut."""


def mixtral():
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SHARED, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2)
    )


def qwen():
    of_experts = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 4, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SHARED, **of_experts, intermediate_size=64))


def made(make, implementation="eager"):
    torch.manual_seed(0)
    model = make()
    model.config._experts_implementation = implementation
    return model


def rows(positions=16):
    return torch.randint(0, 64, (8, positions), generator=torch.Generator().manual_seed(3))


def plain_loop(model, x):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for _ in range(2):
        for at in range(0, 8, 4):
            optimizer.zero_grad()
            F.cross_entropy(model.train()(x[at : at + 4]).logits.flatten(0, 1), x[at : at + 4].flatten()).backward()
            optimizer.step()


def trainer(model, folder, **options):
    return Trainer(
        model, method="streamed", optimizer="adamw", lr=1e-2, weight_decay=0.1, epochs=2, batch_size=4, micro_batch_size=4,
        shuffle=False, output_dir=folder / "run", quiet=True, **{"mem_limit": "1.2GB", "tile": TILE, **options},
    )  # fmt: skip


def alike(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.few(1)
@pytest.mark.own_process
@pytest.mark.parametrize("make", [qwen, mixtral])
def test_experts_one_by_one_have_the_bits_of_the_whole_layer(make, tmp_path):
    """transformers' own loop over experts adds them in their order; so do the tiles."""
    model, whole, x = made(make), made(make), rows()
    found = trainer(model, tmp_path).fit((x, x))
    assert found.plan.tile == TILE
    assert found.plan.partitions[-1].last > 10  # blocks
    plain_loop(whole, x)
    assert alike(model, whole)
    assert load_file(found.weights).keys() == set(whole.state_dict())


@pytest.mark.slow
@pytest.mark.own_process
@pytest.mark.parametrize("make", [qwen, mixtral])
def test_grouped_products_have_the_bits_of_a_plain_loop_over_the_same_tiles(make, tmp_path):
    """The default. (The bits of its `batched_mm` differ from one plain loop to the next, on CPUs too.)"""
    model, other, x = made(make, "grouped_mm"), made(make, "grouped_mm"), rows()
    trainer(model, tmp_path).fit((x, x))
    with tiling(other, TILE) as tiled:
        assert any(isinstance(module, TiledExperts) for module in tiled.modules())
        plain_loop(tiled, x)
    assert alike(model, other)


def test_experts_that_no_token_takes_are_decayed_as_in_the_whole_layer(tmp_path):
    """Their gradients are zeros there, and would be missing in a tile of their own."""
    model, whole, x = made(qwen), made(qwen), rows(positions=2) % 3
    trainer(model, tmp_path).fit((x, x))
    plain_loop(whole, x)
    assert alike(model, whole)


@pytest.mark.slow
@pytest.mark.own_process
def test_an_expert_layer_that_does_not_fit_does_in_tiles(tmp_path):
    def large():
        of_experts = {"moe_intermediate_size": 256, "num_experts": 64, "num_experts_per_tok": 2, "head_dim": 64}
        sizes = {**SHARED, "hidden_size": 256, "intermediate_size": 256}
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **of_experts))

    x, model = rows(), made(large)
    limit = "660MB"  # a layer takes 50 MB of weights, and four times that to train
    with pytest.raises(DoesNotFit):
        trainer(model, tmp_path / "whole", tile="never", mem_limit=limit).fit((x, x))
    found = trainer(model, tmp_path / "tiles", tile="auto", mem_limit=limit).fit((x, x))
    assert found.plan.tile
    assert found.proof.violations == 0
