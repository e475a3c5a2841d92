"""Copies beside the computation, by the seconds of the simulated device: a run takes little more than its longest part."""

import pytest
import torch

from seqpart import Trainer
from seqpart.zoo.models import mlp
from tests.mutated import sites, without

TABLE = """
name = "a card of a test"
memory = "12GB"
context = "330MB"
memory_bandwidth = 900e9
h2d = {link}
d2h = {link}
copy_latency = 1e-7
launch = 5e-7
disk_read = 3e9
disk_write = 1e9

[flops]
float32 = {flops}
bfloat16 = {flops}
"""
CARDS = {"both alike": (25e9, 8e11), "a slow link": (2e9, 8e12), "a slow processor": (50e9, 1e11)}
DEPTH = 24


def after(epochs, card, folder):
    """(seconds, seconds of work of each part) of a streamed run from homes in pinned memory."""
    x, y = torch.randn(64, 64), torch.arange(64) % 4
    trainer = Trainer(
        mlp(64, 4, width=512, depth=DEPTH), optimizer="adam", device=f"sim:{card}", method="streamed", partitions=DEPTH,
        mem_limit="2GB", batch_size=32, epochs=epochs, output_dir=folder / str(epochs), overwrite=True, quiet=True,
    )  # fmt: skip
    result = trainer.fit((x, y), (x[:8], y[:8]))
    assert {part.tier for part in result.plan.partitions} == {"pinned"}
    return trainer.device.streams.current.seconds, dict(trainer.device.busy)


def to_longest(card, folder):
    """Seconds of a whole epoch, by those of its longest part."""
    first, busy_first = after(1, card, folder)
    last, busy_last = after(3, card, folder)
    return (last - first) / max(busy_last[part] - busy_first[part] for part in busy_last)


@pytest.fixture
def card(tmp_path):
    def of(name):
        link, flops = CARDS[name]
        path = tmp_path / "card.toml"
        path.write_text(TABLE.format(link=link, flops=flops))
        return path

    return of


@pytest.mark.slow
@pytest.mark.parametrize("name", CARDS)
def test_a_streamed_epoch_takes_at_most_a_tenth_more_than_its_longest_part(name, card, tmp_path):
    assert to_longest(card(name), tmp_path) <= 1.10


@pytest.mark.slow
def test_without_streams_of_their_own_copies_come_on_top_of_the_computation(card, tmp_path):
    site = next(site for site in sites("seqpart.store.store") if "copying" in site.text)
    with without(site):
        assert to_longest(card("both alike"), tmp_path) > 1.3
