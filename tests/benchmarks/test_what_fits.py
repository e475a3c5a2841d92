"""What plans for cards that are not there promise of a large model."""

import re

import pytest

from benchmarks.what_fits import MODELS, RESERVED
from seqpart import Trainer
from seqpart.device.card import load

TOKENS = 32_768


@pytest.mark.slow
@pytest.mark.parametrize("card", ["h100", "rtx4090", "rtx3060-12gb"])
def test_an_update_of_llama_8b_takes_little_longer_than_the_longest_of_computing_link_and_steps(card, tmp_path):
    model = MODELS["llama-8b"]
    batch = TOKENS // 2048
    x, y = model.rows(2 * batch)
    plan = Trainer(
        model.blocks(), optimizer="adam", device=f"sim:{card}", method="auto", mem_limit=int(RESERVED * load(card).memory),
        ram_limit="200GB", batch_size=batch, dtype="bf16", optimizer_on="host", output_dir=tmp_path / "run", quiet=True,
    ).plan((x, y), (x[:1], y[:1]))  # fmt: skip
    assert len(plan.host_steps) == len(plan.partitions)
    (said,) = (reason for reason in plan.reasons if "it waits for" in reason)
    seconds = [float(number) for number in re.findall(r"for ([\d.e+-]+) s", said)]
    assert len(seconds) == 3
    assert plan.update_seconds <= 1.10 * max(seconds)
    if all(part.boundary_tier == "device" for part in plan.partitions):  # else activations wait there too
        assert plan.host_limit <= 13 * plan.parameters
