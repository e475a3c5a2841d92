"""Randomness of rows: a function of the seed, the pass and the number of a row, whoever reads it and when.

Before an item of a data set is read, torch's, Python's and numpy's generators are seeded for it, so crops and flips differ
in every epoch, and are the same with any number of worker processes and after a kill. A plain loop over the same rows:

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
    """The random draws of one pass over the rows of a split, one of SPLITS."""

    seed: int
    split: str
    stage: int
    """1 in recovery."""
    epoch: int
    """From 1 in training; 0 in passes without updates, so that all draw the same; negative for further views of the rows."""

    def seed_for(self, what: str, number: int = 0) -> int:
        """Returns a seed. what: "row", "batch" (a collate_fn's draws, by the batch's number in its epoch) or "order"."""
        return keyed_seed(self.seed, what, self.split, self.stage, self.epoch, int(number))


def seed_generators(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


def seed_row(seed: int, epoch: int, index: int) -> None:
    """Seeds the generators as a run of that seed does before it reads item `index` in a training epoch (from 1)."""
    seed_generators(Draws(seed, "train", 0, epoch).seed_for("row", index))


def row_order(seed: int, epoch: int, count: int) -> Ints:
    """Returns the order in which a run of that seed reads `count` rows in a training epoch, if it shuffles."""
    return shuffled(Draws(seed, "train", 0, epoch), count)


def shuffled(draws: Draws, count: int) -> Ints:
    return np.random.default_rng(draws.seed_for("order")).permutation(count)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restores the random generators afterwards, as if nothing had been drawn inside."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
