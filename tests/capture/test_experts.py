"""Layers whose shapes depend on values: fake tensors have none, so planning runs these for real."""

import functools
import re

import pytest
import torch
from torch import nn

from seqpart import Trainer
from seqpart.capture.capture import trace
from seqpart.model.blocks import as_chain
from seqpart.profile.blocks import _watch_training, measure_chain
from tests.replay import assert_same_as_whole
from tests.whole_models import Experts, Mixture


def experts_at(rows, width=64):
    (cost,) = measure_chain(as_chain([lambda: Experts(width)]), (8, width), rows)
    return cost


def test_experts_are_run_for_real_and_cost_what_a_real_run_of_so_many_rows_does():
    """Planning has no values, so which token goes to which expert is another question every time: the sums are alike."""
    torch.manual_seed(1)
    counted, module = experts_at(64), Experts(64)
    value = counted.takes[0]
    block = as_chain([module])[0]
    real = _watch_training(block, module, dict(module.named_parameters()), [value], 1)
    for name in ("saved", "forward_peak"):
        assert getattr(counted, name) == pytest.approx(getattr(real, name), rel=0.15), name
    assert counted.gives[0].shape == (64, 8, 64)
    assert counted.gradients == sum(parameter.nbytes for parameter in module.parameters())


def test_experts_cost_the_more_the_more_rows_there_are_and_little_to_look_at():
    few, more, most = (experts_at(rows) for rows in (8, 64, 4096))
    assert few.saved < more.saved < most.saved
    assert most.saved == pytest.approx(64 * more.saved, rel=0.1)
    before = torch.random.get_rng_state()
    experts_at(32)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_block_that_reads_a_number_out_of_a_tensor_is_measured_with_numbers():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (1.0 if x.detach().abs().max().item() > 1 else 2.0)

    (plain,), (cost,) = (measure_chain(as_chain([functools.partial(kind, 24, 10)]), (24,), 6) for kind in (nn.Linear, Scaled))
    assert cost.gradients == plain.gradients
    assert cost.saved >= plain.saved


class Sorted(nn.Module):
    """Its own forward, between layers, picks rows by their values."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        hidden = self.first(x)
        rows = (hidden[:, 0] > 0).nonzero()[:, 0]
        return self.last(hidden.index_add(0, rows, hidden[rows]))


def test_such_a_layer_is_a_block_and_a_model_with_such_code_between_its_layers_is_one():
    assert_same_as_whole(Mixture(), torch.randint(0, 11, (6, 7)))
    assert_same_as_whole(Sorted(), torch.randn(6, 4), 1, 1)
    (why,) = trace(Sorted(), (4,), torch.float32).whole_parts
    assert re.search(r"nonzero: it makes a shape of the values in a tensor.*test_experts\.py:\d+", why)


@pytest.mark.parametrize("method", ["auto", "streamed", "checkpointed"])
@pytest.mark.few(1)
def test_experts_are_blocks_of_a_list_too_and_keep_the_limit(method, tmp_path):
    width, rows = 32, torch.Generator().manual_seed(0)
    blocks = [lambda: nn.Embedding(11, width), lambda: Experts(width), lambda: Experts(width), lambda: nn.Linear(width, 11)]
    x = torch.randint(0, 11, (40, 7), generator=rows)
    result = Trainer(
        blocks, None, "sgd", mem_limit="2GB", method=method, partitions="auto" if method == "auto" else 2, batch_size=16,
        epochs=2, lr=0.1, quiet=True, output_dir=tmp_path / "run",
    ).fit((x, x), (x, x))  # fmt: skip
    assert result.proof.violations == 0
    assert result.train_losses[1] < result.train_losses[0]
