"""Streams: how many rows they have, how long one is read that has no end, and what comes of one that is not what it says."""

import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from seqpart import Trainer
from seqpart.checkpoint.changes import refuse_other_rows
from seqpart.data import loaders as given
from seqpart.errors import DataError

X, Y = torch.randn(50, 8, generator=torch.Generator().manual_seed(1)), torch.arange(50) % 3
OPTIONS = {"mem_limit": "2GB", "method": "full", "batch_size": 10, "micro_batch_size": 10, "lr": 0.01, "quiet": True}

pytestmark = pytest.mark.usefixtures("known_machine")


class Stream(IterableDataset):
    """The rows, so often one behind the other; None: without an end. `given`: how many were."""

    def __init__(self, times, labels=Y, length=None):
        self.times, self.labels, self.given, self.length = times, labels, 0, length

    def __iter__(self):
        time = 0
        while self.times is None or time < self.times:
            for x, y in zip(X, self.labels, strict=True):
                self.given += 1
                yield x, y
            time += 1


class Sized(Stream):
    def __len__(self):
        return self.length


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def plain(steps, times):
    """A loop over a DataLoader of as many rows, begun anew where they end."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, fused=True)
    done = 0
    while done < steps:
        for x, y in DataLoader(Stream(times), batch_size=10):
            if done == steps:
                break
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            done += 1
    return model


def assert_equal(model, other):
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("wrapped", [False, True], ids=["stream", "loader"])
@pytest.mark.parametrize("steps", [3, 7])
def test_a_stream_without_an_end_is_read_as_long_as_max_steps_says(wrapped, steps, tmp_path):
    """It was counted to its end, for ever and without a word, though nobody needed the count."""
    stream, model = Stream(None), net()
    data = DataLoader(stream, batch_size=10) if wrapped else stream
    Trainer(model, **OPTIONS, max_steps=steps, output_dir=tmp_path / "run").fit(data)
    assert_equal(model, plain(steps, 100))
    assert stream.given < 500


def test_a_stream_without_an_end_may_be_the_example_of_a_session(tmp_path):
    with Trainer(net(), **OPTIONS).session(DataLoader(Stream(None), batch_size=10)) as session:
        assert session.step((X[:10], Y[:10])) > 0


def test_a_short_stream_has_epochs_also_where_updates_are_counted(tmp_path):
    model = net()
    Trainer(model, **OPTIONS, max_steps=12, output_dir=tmp_path / "run").fit(Stream(1))
    assert_equal(model, plain(12, 1))


def test_a_long_stream_that_is_not_counted_begins_anew_where_it_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(given, "LOOKED_AT", 20)
    model, begun = net(), []
    stream = Stream(1)
    stream.set_epoch = begun.append
    Trainer(model, **OPTIONS, max_steps=12, output_dir=tmp_path / "run").fit(stream)
    assert_equal(model, plain(12, 1))
    assert begun[-3:] == [1, 2, 3]


@pytest.mark.parametrize("wrapped", [False, True], ids=["stream", "loader"])
def test_a_stream_without_labels_is_told_the_epoch_too(wrapped, tmp_path):
    """The wrapper that adds zeros as labels hid `set_epoch`: every epoch had the order of the first."""

    class Unlabelled(Stream):
        def __iter__(self):
            return (x for x, _ in super().__iter__())

    stream, begun = Unlabelled(1), []
    stream.set_epoch = begun.append
    data = DataLoader(stream, batch_size=10) if wrapped else stream
    Trainer(net(), lambda output: output.square().mean(), **OPTIONS, epochs=2, output_dir=tmp_path / "run").fit(data)
    assert begun[-2:] == [1, 2]


def test_classes_that_are_not_among_the_first_rows_of_a_stream_are_no_surprise(tmp_path):
    stream = Stream(None, torch.zeros(50, dtype=torch.long))
    result = Trainer(net(), **OPTIONS, max_steps=30, output_dir=tmp_path / "run").fit(stream, (X, Y))
    assert result.accuracy is not None


def test_who_counts_says_how_far_he_is_and_may_be_interrupted(monkeypatch, capsys):
    monkeypatch.setattr(given, "SECONDS_BETWEEN_LINES", 0.0)

    class Interrupted(Stream):
        def __iter__(self):
            for number, row in enumerate(super().__iter__()):
                if number == 1000:
                    raise KeyboardInterrupt
                yield row

    with pytest.raises(KeyboardInterrupt), suppress(DataError):
        Trainer(net(), **OPTIONS).plan(Interrupted(None))
    assert "training data: still counting, 1,000 rows. Give max_steps where it has no end" in capsys.readouterr().err
    assert sys.exc_info() == (None, None, None)


@pytest.mark.parametrize("labels", [Y, Y.float()], ids=["classes", "floats"])
@pytest.mark.parametrize("length", [30, 70])
def test_a_stream_of_another_length_than_its_len_is_refused(length, labels, tmp_path):
    """Of one that was longer the rest was left out in silence."""
    model = nn.Linear(8, 3) if labels is Y else nn.Linear(8, 1)
    trainer = Trainer(model, **OPTIONS, epochs=1, output_dir=tmp_path / "run")
    with pytest.raises(DataError, match=rf"expected {length} rows in every pass.*found {'more' if length < 50 else 50}"):
        trainer.fit(DataLoader(Sized(1, labels, length), batch_size=10))
    Trainer(model, **OPTIONS, epochs=1, output_dir=tmp_path / "cured").fit(DataLoader(Stream(1, labels), batch_size=10))


class Itself(IterableDataset):
    """Is its own iterator, which begins anew whenever it is asked for one."""

    def __iter__(self):
        self.rows = zip(X, Y, strict=True)
        return self

    def __next__(self):
        return next(self.rows)


def test_a_stream_that_is_its_own_iterator_begins_anew_in_every_epoch(tmp_path):
    """litdata's was refused: "can be read once"."""
    model = net()
    Trainer(model, **OPTIONS, epochs=2, output_dir=tmp_path / "run").fit(Itself())
    assert_equal(model, plain(10, 1))


class Wrapped:
    """What a library or a progress bar puts around a loader."""

    def __init__(self, loader):
        self.stages = [loader]

    def __iter__(self):
        return iter(self.stages[0])


def test_batches_of_a_loader_inside_a_stream_are_not_taken_for_rows(tmp_path):
    """As webdataset's WebLoader gives them: each was one row with labels by position, and an epoch had a few updates."""
    with pytest.raises(
        DataError, match="expected rows; found batches of 10, which the Wrapped has from a DataLoader inside it"
    ):
        Trainer(net(), **OPTIONS, epochs=1, output_dir=tmp_path / "run").fit(Wrapped(DataLoader(Stream(6), batch_size=10)))


def test_a_resumed_run_says_that_rows_are_others_each_time():
    """As a stream's that counts its passes: it went on to other bits without a word."""
    (said,) = refuse_other_rows(Path("run"), {"training": ""}, {"training": ""})
    assert "the training rows are others each time that they are read" in said
    assert refuse_other_rows(Path("run"), {"training": "1a"}, {"training": "1a"}) == []
