"""What the simulation of many ranks counts is what `device/ranks.py` does."""

import math
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from benchmarks.scaling_simulated import SMALL, Lockstep, Network, Shared, chunks_of, planned
from benchmarks.what_fits import QUICK
from seqpart import Trainer
from seqpart.device import ranks as exchange
from seqpart.plan.simulator import simulate
from seqpart.schedule.steps import Verb

FREE = Network(latency=0.0, bandwidth=math.inf)
COUNT = 4


class Counted(exchange.Group):
    """A rank of four that are not there: what it is sent is whatever lies in its memory."""

    def __init__(self):
        self.number, self.count, self._sums, self._words, self.calls = 1, COUNT, None, None, {}
        self.chunk, self._device = exchange.chunk_of(COUNT), SimpleNamespace(torch="cpu")
        self._buffers = torch.ones(2, 2, self.chunk, dtype=torch.uint8)

    def _bytes_of_all(self, own):
        return torch.tensor(own, dtype=torch.uint8).expand(COUNT, -1)

    def counting(self, name):
        def call(*_, **__):
            self.calls[name] = self.calls.get(name, 0) + 1
            return SimpleNamespace(wait=lambda: None)

        return call


def test_chunks_and_bytes_are_those_that_a_rank_sends():
    sizes = (700_000, 3, 1_200_000, 4_000_001, 65_536)
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    rank = Counted()
    with patch.multiple(exchange.dist, **{name: rank.counting(name) for name in ("all_to_all_single", "broadcast")}):
        sent = rank.add_up(parameters)
        rank.give(parameters, owner=1)
    chunks, given = chunks_of(sizes, COUNT, COUNT), chunks_of(sizes, 1, COUNT)
    assert rank.calls == {"all_to_all_single": 2 * chunks, "broadcast": given} and min(chunks, given) > 4
    _, seconds = Network(latency=0.0, bandwidth=1.0).adding(4 * sum(sizes), chunks, COUNT)
    assert sent == pytest.approx(seconds, rel=1e-5)  # a part is rounded up to whole numbers
    waits, _ = replace(FREE, latency=1.0).adding(4 * sum(sizes), chunks, COUNT)
    assert waits == (2 * chunks + 1) * (COUNT - 1)  # to all, twice, and the word about what each has


@pytest.fixture(scope="module")
def whole():
    with planned(QUICK["a small vit"], SMALL[0], 8, alone=False) as plan:
        yield Lockstep(plan), plan


def steady(plan):
    """Seconds of an update by the planner's own simulator, without the first, and the last, behind which nothing is loaded."""
    _, steps, _ = simulate(plan.phases.of_stage(0), plan.partition_costs, plan.speeds, plan.stages[0].resources)
    first, *_, before, _ = (one.ends for one in steps if one.step.verb is Verb.UPDATE and one.step.partition == 0)
    return (before - first) / 2


def test_ranks_on_an_endless_network_take_the_seconds_of_one_and_what_an_exchange_takes_is_added(whole):
    walk, plan = whole
    one = walk.run(FREE, 1)
    assert one["seconds"] == pytest.approx(steady(plan)) and one["bound"] == "device"
    assert walk.run(FREE, 1024)["seconds"] == pytest.approx(one["seconds"])
    slow = walk.run(Network(latency=0.0, bandwidth=1e6), 1024)
    gradients = sum(cost.gradients for cost in plan.partition_costs)
    assert slow["bound"] == "bandwidth"
    assert slow["seconds"] - one["seconds"] == pytest.approx(2 * 1023 / 1024 * gradients / 1e6)
    assert walk.run(Network(latency=1e-3, bandwidth=math.inf), 1024)["bound"] == "latency"


def test_of_a_divided_optimizer_state_a_rank_moves_its_part_and_all_wait_for_the_weights(tmp_path):
    model, ranks = QUICK["a small vit"], patch("seqpart.runtime.setup.ranks_of", return_value=Shared())
    x, y = model.rows(64)
    trainer = Trainer(
        model.blocks(), method="streamed", partitions=3, mem_limit="11GB", ram_limit="4GB", optimizer="adam", batch_size=16,
        device="sim:rtx3060-12gb", epochs=1, save_every="never", output_dir=tmp_path / "run", quiet=True,
    )  # fmt: skip
    with ranks, trainer.planned((x, y), (x[:1], y[:1]), dry=True) as (_, plan):
        walk = Lockstep(plan)
    one, several = walk.run(FREE, 1), walk.run(FREE, 4)
    assert one["seconds"] == pytest.approx(steady(plan))
    moved = sum(one["busy"][way] for way in ("disk", "link"))
    assert 0 < sum(several["busy"][way] for way in ("disk", "link")) < moved
    assert several["seconds"] <= one["seconds"]
    parameters = sum(cost.gradients for cost in plan.partition_costs)
    slow = walk.run(Network(latency=0.0, bandwidth=1e3), 4)
    assert slow["busy"]["bandwidth"] == pytest.approx((2 * 3 / 4 + 1) * parameters / 1e3)
