"""Processes that read rows: in the limit and in the proof, to the same errors; and what cannot be read anew."""

import os

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler

from seqpart.device.usage import held_by_tree, read_process
from seqpart.errors import BadInput, DataError, DoesNotFit, OptionError, OutOfMemory
from tests.augmented import BATCH, ROWS, WIDTH, Noisy, Streamed, Words, clean, mixed, padded, trained

RUN = os.getpid()


# --- the limit --------------------------------------------------------------------------------------------------------


class Heavy(Noisy):
    """Rows that take a while and some memory, so that a sampler sees them."""

    def __getitem__(self, index):
        scratch = torch.ones(2 << 20)
        return super().__getitem__(index)[0] + scratch[0] * 0, int(self.targets[index])


def test_workers_are_in_the_limit_the_prediction_and_the_proof(tmp_path):
    alone = trained(tmp_path, Heavy(), name="alone", batch_size=BATCH, workers=0).proof
    two = trained(tmp_path, Heavy(), name="two", batch_size=BATCH, workers=2).proof
    assert two.peak > alone.peak + 2 * 150e6  # each has Python and PyTorch
    for proof in (alone, two):
        assert not proof.violations
        assert -0.01 < proof.predicted / proof.peak - 1 < 0.05
    assert abs(held_by_tree(os.getpid()) - read_process().held) < 4 << 20  # none is left


def test_too_little_room_means_fewer_workers_and_then_none(tmp_path):
    held = held_by_tree(os.getpid())
    result = trained(tmp_path, Noisy(), batch_size=BATCH, workers=4, mem_limit=int(held * 2.6) + (60 << 20))
    assert any("of 4 worker processes" in reason for reason in result.plan.reasons), result.plan.reasons
    assert result.proof.peak <= result.proof.limit
    none = trained(tmp_path, Noisy(), name="none", batch_size=BATCH, workers=4, mem_limit=int(held * 1.5) + (40 << 20))
    assert any("0 of 4 worker processes" in reason for reason in none.plan.reasons), none.plan.reasons
    with pytest.raises(DoesNotFit, match=r"Give more|smallest limit that fits"):
        trained(tmp_path, Noisy(), name="nothing", batch_size=BATCH, workers=4, mem_limit=held)


class Greedy(Noisy):
    """Takes far more than it did when the run was planned."""

    read = 0

    def __getitem__(self, index):
        self.read += os.getpid() != RUN
        if self.read > 2 * ROWS + 10:
            torch.ones(400 << 20, dtype=torch.uint8)
        return super().__getitem__(index)


def test_a_worker_that_takes_more_than_was_planned_is_stopped_by_the_kernel_and_told(tmp_path):
    with pytest.raises(OutOfMemory, match=r"memory ran out in a worker process.*fewer workers"):
        trained(tmp_path, Greedy(), batch_size=BATCH, workers=1)


# --- what goes wrong --------------------------------------------------------------------------------------------------


class Failing(Noisy):
    anywhere = True

    def __getitem__(self, index):
        if index == 13 and (self.anywhere or os.getpid() != RUN):
            raise self.how()
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_item_that_cannot_be_read_is_named(workers, tmp_path):
    items = Failing()
    items.how = lambda: ValueError("truncated file")
    with pytest.raises(DataError, match="training data: item 13 cannot be read: ValueError: truncated file"):
        trained(tmp_path, items, batch_size=BATCH, workers=workers)


def test_a_worker_that_ends_is_told(tmp_path):
    items = Failing()
    items.how, items.anywhere = lambda: os._exit(1), False
    with pytest.raises(DataError, match=r"worker process . has ended while it read rows.*workers=0"):
        trained(tmp_path, items, batch_size=BATCH, workers=2)


class Uneven(Noisy):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x[: WIDTH - (index == 20)], y


class Nothing(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.randn(WIDTH)


class Stateful(Sampler):
    """Another order whenever it is asked."""

    asked = 0

    def __len__(self):
        return ROWS

    def __iter__(self):
        self.asked += 1
        return iter(np.roll(np.arange(ROWS), self.asked).tolist())


REFUSED = {
    "differ|expected rows of shape": Uneven,
    r"expected a pair \(x, label\)": lambda: DataLoader(Nothing(), batch_size=2),
    "batches of its own, of any size .batch_size=None": lambda: DataLoader(Noisy(), batch_size=None),
    "batches of its own, of any size .Pairs": lambda: DataLoader(
        Noisy(), batch_sampler=Pairs(RandomSampler(Noisy()), 2, False)
    ),
    "gives another order for the same epoch": lambda: DataLoader(Noisy(), batch_size=BATCH, sampler=Stateful()),
    "can be read once": lambda: iter([(torch.zeros(2), 1)]),
    r"shape input_ids .3,..*padding=seqpart.Padding": lambda: DataLoader(
        Words(), batch_size=2, collate_fn=lambda items: padded(items, None)
    ),
    "made 7 rows of 8 items": lambda: DataLoader(Noisy(), batch_size=BATCH, collate_fn=lambda items: mixed(items[1:])),
    "collate_fn failed: TypeError": lambda: DataLoader(Noisy(), batch_size=BATCH, collate_fn=lambda items: items[0]["x"]),
    "expected a dict with labels": lambda: DataLoader(
        Noisy(), batch_size=BATCH, collate_fn=lambda items: {"x": torch.stack([x for x, _ in items])}
    ),
    "the set is empty": lambda: Streamed([]),
    "drop_last, 40 rows and batches of 64": lambda: DataLoader(Noisy(), batch_size=64, drop_last=True),
}


class Pairs(BatchSampler):
    pass


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_read_anew_is_refused_in_words(words, tmp_path):
    with pytest.raises(BadInput, match=words):
        trained(tmp_path, REFUSED[words]())


OPTIONS = {
    "batch_size=5: the DataLoader has batches of 8": {"batch_size": 5},
    "shuffle.*the DataLoader says otherwise": {"shuffle": False},
    "psl.*cache": {"method": "psl"},
    "workers: expected 0 to 256": {"workers": -1},
}


@pytest.mark.parametrize("words", OPTIONS)
def test_options_that_contradict_a_loader_are_refused(words, tmp_path):
    with pytest.raises(OptionError, match=words):
        trained(tmp_path, DataLoader(Noisy(), batch_size=BATCH, shuffle=True), **OPTIONS[words])


def test_workers_for_rows_that_are_kept_are_refused(tmp_path):
    with pytest.raises(OptionError, match=r"workers.*kept"):
        trained(tmp_path, clean(), workers=2)


def test_sil_needs_every_row_in_every_epoch(tmp_path):
    loader = DataLoader(Noisy(), batch_size=12, drop_last=True)
    with pytest.raises(OptionError, match=r"method.*sil.*all 40 rows.*36"):
        trained(tmp_path, loader, method="sil")
