"""What is random about rows: a function of the seed, the pass and the number of a row, whoever reads it and when.

Before an item of a data set is read torch's, Python's and numpy's generators are seeded for it, so crops and flips are others
in every epoch, and the same with any number of worker processes and behind a kill. A plain loop over the same rows:

    for epoch in range(1, epochs + 1):
        for index in row_order(seed, epoch, len(data)):
            seed_row(seed, epoch, index)
            row = data[index]
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from seqpart.data.reader import Ints
from seqpart.device.device import keyed_seed

SPLITS = "train", "test"


@dataclass(frozen=True, slots=True)
class Draws:
    """Of one pass over the rows of a split, one of SPLITS."""

    seed: int
    split: str
    stage: int
    """1 in recovery."""
    epoch: int
    """From 1 in training; 0 in passes without updates, which so are all alike, and below for further views of the rows."""

    def seed_for(self, what: str, number: int = 0) -> int:
        """what: "row", "batch" (what a collate_fn draws, by the number of the batch in its epoch) or "order"."""
        return keyed_seed(self.seed, what, self.split, self.stage, self.epoch, int(number))


def seed_generators(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


def seed_row(seed: int, epoch: int, index: int) -> None:
    """As a run of that seed does before it reads item `index` in an epoch of training, which count from 1."""
    seed_generators(Draws(seed, "train", 0, epoch).seed_for("row", index))


def row_order(seed: int, epoch: int, count: int) -> Ints:
    """The order in which a run of that seed reads so many rows in an epoch of training, where it shuffles."""
    return shuffled(Draws(seed, "train", 0, epoch), count)


def shuffled(draws: Draws, count: int) -> Ints:
    return np.random.default_rng(draws.seed_for("order")).permutation(count)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Behind it random numbers go on as if nothing had been drawn inside."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
