"""Data sets with augmentation and data loaders: rows are read anew in every epoch, whoever reads them, to the same bits."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from seqpart import Trainer
from seqpart.data.boundary_cache import Boundaries
from seqpart.data.generators import generators_kept, seed_generators
from seqpart.data.source import Draws, row_order, seed_row
from seqpart.device.device import Device
from seqpart.errors import DataError, OptionError
from tests.augmented import (
    BATCH,
    CLASSES,
    EPOCHS,
    ROWS,
    SEED,
    WIDTH,
    Noisy,
    Pixels,
    Streamed,
    Words,
    bits,
    clean,
    mixed,
    network,
    padded,
    trained,
)
from tests.choice import in_turn


def plainly(items, *, batch=BATCH, epochs=EPOCHS, order=row_order, collate=None, rows=None):
    """What a loop in plain PyTorch makes of the same draws: its weights, by the names of a run's."""
    modules = []
    for number, factory in enumerate(network()):
        Device().seed(SEED, "build", number)
        modules.append(factory())
    chain = nn.Sequential(*modules)
    optimizer = torch.optim.SGD(chain.parameters(), lr=0.1, fused=True)
    for epoch in range(1, epochs + 1):
        numbers = order(SEED, epoch, len(items))[:rows]
        for start in range(0, len(numbers), batch):
            read = []
            for index in numbers[start : start + batch]:
                seed_row(SEED, epoch, index, items)
                read.append(items[int(index)])
            if collate is None:
                x, y = torch.stack([x for x, _ in read]), torch.tensor([y for _, y in read])
            else:
                seed_generators(Draws(SEED, "train", 0, epoch).seed_for("batch", start // batch))
                x, y = collate(read)
            F.cross_entropy(chain(x.float()), y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return chain.state_dict()


def assert_plain(result, expected):
    found = result.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def in_order(seed, epoch, count):
    return np.arange(count)


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("items", [Noisy, Pixels])
def test_augmentation_is_alive_and_equals_a_plain_loop_over_the_same_draws(items, tmp_path):
    assert_plain(trained(tmp_path, items(), batch_size=BATCH), plainly(items()))


def test_a_loader_brings_its_batches_order_and_workers(tmp_path):
    loader = DataLoader(Noisy(), batch_size=12, shuffle=True, drop_last=True, num_workers=2)
    assert_plain(trained(tmp_path, loader), plainly(Noisy(), batch=12, rows=36))


class WithTargets(Noisy):
    """As torchvision's: it knows the labels of all rows."""

    def __init__(self):
        super().__init__()
        self.targets = self.targets.tolist()


def test_a_session_takes_the_loader_that_its_loop_reads(tmp_path):
    """Of a data set with `targets` it was told that there are 8 rows and 40 labels."""
    loader = DataLoader(WithTargets(), batch_size=BATCH)
    model = nn.Sequential(*(made() for made in network()))
    with Trainer(model, mem_limit="2GB", method="full", batch_size=BATCH, quiet=True).session(loader) as session:
        assert len([session.step(batch) for batch in loader]) == ROWS // BATCH


class InBatches(BatchSampler):
    """A library's own class for what its loaders do with `batch_size`."""


def test_a_loader_of_a_library_may_batch_by_a_class_of_its_own(tmp_path):
    """torchdata's StatefulDataLoader was refused, as if its batches had any size."""
    loader = DataLoader(Noisy(), batch_size=BATCH)
    vars(loader)["batch_sampler"] = InBatches(loader.sampler, BATCH, drop_last=False)
    assert_plain(trained(tmp_path, loader), plainly(Noisy(), order=in_order))


def test_a_loader_that_does_not_shuffle_keeps_the_order(tmp_path):
    loader = DataLoader(Noisy(), batch_size=BATCH)
    assert_plain(trained(tmp_path, loader), plainly(Noisy(), order=in_order))


class Boxes(Noisy):
    def __getitem__(self, index):
        return self.x[index], {"boxes": torch.rand(1 + index % 3, 4)}


@pytest.mark.parametrize(
    "collate", [lambda b: (torch.stack([x for x, _ in b]), [y for _, y in b]), lambda b: tuple(zip(*b, strict=True))]
)
def test_a_collate_fn_that_lists_the_labels_of_each_row_is_told_how_to_pad_them(collate, tmp_path):
    """As torchvision's detection does: a RuntimeError of torch."""
    with pytest.raises(DataError, match=r"found lists of what is no number: .*dict\. .*Padding"):
        trained(tmp_path, DataLoader(Boxes(), batch_size=BATCH, collate_fn=collate))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.few(1)
def test_a_collate_fn_makes_whole_batches_whatever_the_micro_batch(workers, tmp_path):
    loader = DataLoader(Noisy(), batch_size=BATCH, shuffle=True, collate_fn=mixed)
    result = trained(tmp_path, loader, workers=workers, micro_batch_size=BATCH)
    assert_plain(result, plainly(Noisy(), collate=mixed))
    parted = trained(tmp_path, loader, name="parted", workers=workers, micro_batch_size=3)
    for name, tensor in result.state_dict().items():
        assert torch.allclose(parted.state_dict()[name], tensor, atol=1e-5), name


SAMPLERS = {
    "weights": lambda items: WeightedRandomSampler(torch.arange(1.0, ROWS + 1), 24),
    "with replacement": lambda items: RandomSampler(items, replacement=True, num_samples=24),
}


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_a_sampler_is_asked_anew_in_every_epoch(sampler, tmp_path):
    def order(seed, epoch, count):
        seed_generators(Draws(seed, "train", 0, epoch).seed_for("order"))
        return np.array(list(sampler(items)))

    items = Noisy()
    loader = DataLoader(items, batch_size=BATCH, sampler=sampler(items))
    assert_plain(trained(tmp_path, loader), plainly(items, order=order))


class Saying:
    """A sampler of the first `rows` rows whose len() says `length`."""

    def __init__(self, rows, length):
        self.rows, self.length = rows, length

    def __iter__(self):
        return iter(range(self.rows))

    def __len__(self):
        return self.length


@pytest.mark.parametrize(("rows", "length", "drops"), [(40, 16, False), (12, 16, False), (16, 15, True)])
def test_a_sampler_that_disagrees_with_its_len_is_refused(rows, length, drops, tmp_path):
    """One of 40 numbers that said 16 was cut short in silence: a plain loop over its loader made 5 updates, the run 2."""
    loader = DataLoader(Noisy(), batch_size=8, sampler=Saying(rows, length), drop_last=drops)
    with pytest.raises(DataError, match=rf"gave {rows} numbers in epoch 1; its len\(\) said {length}\. Let __len__"):
        trained(tmp_path, loader)


def test_a_sampler_with_drop_last_gives_more_numbers_than_an_epoch_has_rows(tmp_path):
    loader = DataLoader(Noisy(), batch_size=8, sampler=Saying(20, 20), drop_last=True)
    assert_plain(trained(tmp_path, loader), plainly(Noisy(), batch=8, order=in_order, rows=16))


EMPTY = {
    r"training data: the set is empty: the DataLoader's sampler has len\(\) 0": {"dataset": Noisy(), "sampler": Saying(0, 0)},
    r"sampler has len\(\) 0, or none\. Let its __len__ return": {"dataset": Noisy(), "sampler": Sampler()},
    f"training data: the DataLoader has drop_last, {ROWS} rows and batches of 64: nothing": {
        "dataset": Streamed(Noisy()), "batch_size": 64, "drop_last": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("words", EMPTY)
def test_a_loader_without_a_batch_is_refused(words, tmp_path):
    """A sampler of no rows, or without a length, and a stream too short for its drop_last, ended in Python's own error."""
    with pytest.raises(DataError, match=words):
        trained(tmp_path, DataLoader(**EMPTY[words]))


WAYS = {
    "a data set": Noisy,
    "a loader": lambda: DataLoader(Noisy(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(7)),
    "a collate_fn": lambda: DataLoader(Noisy(), batch_size=BATCH, shuffle=True, collate_fn=mixed),
    "a stream": lambda: Streamed(Noisy()),
    "a loader of a stream": lambda: DataLoader(Streamed(Noisy()), batch_size=BATCH, drop_last=True),
}


@pytest.mark.parametrize(("way", "method"), in_turn([*WAYS], ["full", "streamed"]))
@pytest.mark.few(1)
def test_any_number_of_workers_gives_the_same_bits(way, method, tmp_path):
    options = {"method": method, "partitions": 2 if method == "streamed" else 1, "batch_size": BATCH, "micro_batch_size": 3}
    runs = [bits(trained(tmp_path, WAYS[way](), name=f"{n}", workers=n, **options)) for n in (0, 1, 3)]
    assert runs[0] == runs[1] == runs[2]


def test_a_loaders_own_generator_makes_another_order_and_other_draws(tmp_path):
    one, other = (
        trained(tmp_path, DataLoader(Noisy(), batch_size=BATCH, shuffle=True, generator=generator), name=name)
        for name, generator in (("one", None), ("other", torch.Generator().manual_seed(7)))
    )
    assert bits(one) != bits(other)


class Noted(Noisy):
    """Writes down what it reads."""

    read: list = []  # noqa: RUF012 (shared by every copy)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        self.read.append((index, x))
        return x, y


def test_two_epochs_see_other_draws_of_every_row_and_the_test_rows_the_same(tmp_path):
    Noted.read.clear()
    trained(tmp_path, Noted(), Noted(9), batch_size=BATCH, epochs=2, test_every=1)
    read = Noted.read[-2 * (ROWS + 9) :]
    epochs = [dict(read[:ROWS]), dict(read[ROWS + 9 : 2 * ROWS + 9])]
    tests = [read[ROWS : ROWS + 9], read[2 * ROWS + 9 :]]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(ROWS))
    assert not any(torch.equal(epochs[0][index], epochs[1][index]) for index in range(ROWS))
    assert [index for index, _ in tests[0]] == [index for index, _ in tests[1]] == list(range(9))
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(*tests, strict=True))


def test_the_callers_random_numbers_go_on_as_if_nothing_was_drawn(tmp_path):
    def drawn():
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    with generators_kept():
        expected = drawn()
    trained(tmp_path, Noisy(), batch_size=BATCH)
    assert drawn() == expected


# --- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cache", "kept"), [("auto", []), ("rows", [("train", torch.uint8), ("test", torch.uint8)])])
def test_rows_are_kept_only_where_that_is_asked_for_and_in_the_type_in_which_they_come(cache, kept, tmp_path, monkeypatch):
    created, create = [], Boundaries.create

    def noting(self, split, partition, layout, count):
        created.append((split, layout.dtype))
        return create(self, split, partition, layout, count)

    monkeypatch.setattr(Boundaries, "create", noting)
    trained(tmp_path, Pixels(), Pixels(9), cache=cache, batch_size=BATCH)
    assert created == kept


@pytest.mark.parametrize("data", [Noisy, Pixels])
@pytest.mark.few(1)
def test_kept_rows_are_one_draw(data, tmp_path):
    one = trained(tmp_path, data(), name="one", cache="rows", batch_size=BATCH)
    x, y = [], []
    for index in range(ROWS):
        seed_row(SEED, 0, index)
        row, label = data()[index]
        x.append(row)
        y.append(label)
    other = trained(tmp_path, (torch.stack(x).float(), torch.tensor(y)), name="other", batch_size=BATCH)
    assert bits(one)[1] == bits(other)[1]
    assert bits(one) != bits(trained(tmp_path, data(), name="alive", batch_size=BATCH))


def test_kept_rows_of_a_loader_come_in_its_batches_and_order(tmp_path):
    """They came in batches of 64 rows, shuffled, whatever the loader said; its sampler was not asked."""
    items = [Pixels()[index] for index in range(ROWS)]
    one = trained(tmp_path, DataLoader(items, batch_size=BATCH), name="one", cache="rows")
    assert bits(one) == bits(trained(tmp_path, DataLoader(items, batch_size=BATCH), name="other"))
    shuffled = trained(tmp_path, DataLoader(items, batch_size=BATCH), name="shuffled", cache="rows", shuffle=True)
    assert bits(one) != bits(shuffled)
    sampler = WeightedRandomSampler(torch.arange(1.0, ROWS + 1), 24)
    with pytest.raises(OptionError, match="keeps each row once"):
        trained(tmp_path, DataLoader(items, batch_size=BATCH, sampler=sampler), name="sampled", cache="rows")


class Stored:
    """An array in a file as zarr gives it: with a shape and rows, without len()."""

    def __init__(self, values):
        self._values, self.shape, self.dtype = np.asarray(values), tuple(np.shape(values)), np.asarray(values).dtype

    def __getitem__(self, rows):
        return self._values[rows]

    def __array__(self, dtype=None, copy=None):
        return self._values.astype(dtype or self.dtype)


@pytest.mark.parametrize("cache", ["auto", "none"])
def test_a_pair_of_arrays_without_len_is_a_pair(cache, tmp_path):
    """TypeError: object of type 'Array' has no len()."""
    x, y = clean()
    result = trained(tmp_path, (Stored(x), Stored(y)), cache=cache, batch_size=BATCH, shuffle=False)
    assert_plain(result, plainly([(x[i], int(y[i])) for i in range(ROWS)], order=in_order))


def test_a_pair_can_be_read_anew_without_a_copy(tmp_path):
    x, y = clean()
    result = trained(tmp_path, (x, y), cache="none", batch_size=BATCH)
    assert_plain(result, plainly([(x[i], int(y[i])) for i in range(ROWS)]))


@pytest.mark.parametrize("views", [2, 3])
@pytest.mark.few(1)
def test_later_partitions_of_sil_take_cached_views_in_turn(views, tmp_path):
    sil = {"method": "sil", "partitions": 2, "batch_size": BATCH, "epochs": 4}
    one = trained(tmp_path, Noisy(), name="one", **sil)
    several = trained(tmp_path, Noisy(), name="several", cached_views=views, **sil)
    assert several.train_losses[:5] == one.train_losses[:5]  # the first partition, and the first view
    assert several.train_losses[5] != one.train_losses[5]
    # Of rows that are not drawn all views are the same.
    sil["cache"] = "none"
    same = [trained(tmp_path, clean(), name=f"{n}", cached_views=n, **sil) for n in (1, views)]
    assert bits(same[0]) == bits(same[1])


def test_views_of_rows_that_are_kept_are_refused(tmp_path):
    with pytest.raises(OptionError, match=r"cached_views keeps several draws of rows that are read again"):
        trained(tmp_path, clean(), method="sil", partitions=2, cached_views=2)


# --- several inputs ---------------------------------------------------------------------------------------------------


def as_tuple(items):
    return tuple(padded(items).values())


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.end = nn.Embedding(10, 8), nn.Linear(8, CLASSES)

    def forward(self, input_ids, attention_mask):
        x = self.words(input_ids) * attention_mask[:, :, None]
        return self.end(x.sum(1) / attention_mask.sum(1, keepdim=True))


@pytest.mark.parametrize("collate", [padded, as_tuple])
def test_batches_of_a_collate_fn_may_be_dicts_and_tuples_with_labels(collate, tmp_path):
    options = {"method": "full", "mem_limit": "2GB", "epochs": 1, "optimizer": "sgd", "lr": 0.1, "quiet": True}

    def fit(train, name):
        torch.manual_seed(0)
        return Trainer(Reader(), output_dir=tmp_path / name, batch_size=BATCH, **options).fit(train, whole)

    x = padded([Words()[i] for i in range(ROWS)])
    labels = x.pop("labels")
    whole = (x, labels)
    loader = DataLoader(Words(), batch_size=BATCH, collate_fn=collate, num_workers=1)
    if collate is as_tuple:
        whole = (tuple(x.values()), labels)
    found = fit(loader, "loader")
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for start in range(0, ROWS, BATCH):
        at = slice(start, start + BATCH)
        F.cross_entropy(model(*(part[at] for part in x.values())), labels[at]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    expected = model.state_dict()
    assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in expected.items())


def test_subnets_read_their_shares_anew(tmp_path):
    def layered():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))

    options = {
        "method": "ist",
        "subnets": 2,
        "local_steps": 2,
        "batch_size": BATCH,
        "mem_limit": "2GB",
        "epochs": 2,
        "quiet": True,
    }
    runs = [
        Trainer(layered(), output_dir=tmp_path / str(n), workers=n, seed=SEED, **options).fit(Noisy(), clean(9)) for n in (0, 1)
    ]
    assert bits(runs[0]) == bits(runs[1])
    assert runs[0].train_losses[0] != runs[0].train_losses[-1]
    with pytest.raises(OptionError, match=r"gives every subnet rows by their numbers"):
        Trainer(layered(), output_dir=tmp_path / "stream", **options).fit(Streamed(Noisy()), clean(9))


def test_evaluate_takes_what_fit_takes(tmp_path):
    trainer = Trainer(
        network(), method="full", mem_limit="2GB", epochs=1, batch_size=BATCH, output_dir=tmp_path / "run", quiet=True
    )
    tested = DataLoader(TensorDataset(*clean(9)), batch_size=4, num_workers=1)
    result = trainer.fit(Noisy(), tested)
    found = trainer.evaluate(tested)
    assert (found.loss, found.accuracy) == pytest.approx((result.test_loss, result.accuracy))
    assert trainer.evaluate(clean(9)).loss == pytest.approx(result.test_loss)
    assert not found.proof.violations


@pytest.mark.parametrize("options", [{"method": "full"}, {"method": "streamed", "partitions": 2}], ids=["full", "streamed"])
@pytest.mark.few(1)
def test_a_loader_of_tests_may_have_labels_by_position(options, tmp_path):
    """Where partitions are tested one after the other only the first batch's labels were there: an IndexError at its end."""
    x = torch.arange(60).view(20, 3) % 7
    rows = TensorDataset(x, x.roll(-1, 1))
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    trainer = Trainer(
        model, mem_limit="2GB", epochs=1, batch_size=BATCH, output_dir=tmp_path / "run", quiet=True, **options
    )  # fmt: skip
    result = trainer.fit(DataLoader(rows, batch_size=BATCH), DataLoader(rows, batch_size=6))
    with torch.no_grad():
        expected = F.cross_entropy(model(x).flatten(0, 1), x.roll(-1, 1).flatten()).item()
    assert result.test_loss == pytest.approx(expected, rel=1e-5)
    assert trainer.evaluate(DataLoader(rows, batch_size=6)).loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("cache", ["auto", "rows"])
def test_tests_leave_out_what_the_loader_drops(cache, tmp_path):
    """They were of all rows, where a loop over the loader sees whole batches alone."""
    rows, model = clean(10), nn.Linear(WIDTH, CLASSES)
    first = TensorDataset(*(part[:8] for part in rows))
    options = {"method": "full", "mem_limit": "2GB", "batch_size": BATCH, "quiet": True}
    loader, batches = DataLoader(TensorDataset(*rows), batch_size=4, drop_last=True), DataLoader(first, batch_size=4)
    trainer = Trainer(model, epochs=1, cache=cache, output_dir=tmp_path / "run", **options)
    result = trainer.fit(Noisy(), {"dropped": loader, "whole": batches})
    assert result.metrics["dropped/loss"] == pytest.approx(result.metrics["whole/loss"])
    assert trainer.evaluate(loader).loss == pytest.approx(trainer.evaluate(first).loss)
    refused = {
        "drop_last leaves out 2 of 10 rows, which it draws": {"dataset": loader.dataset, "shuffle": True, "drop_last": True},
        "drop_last leaves out 2 of 10 rows, the last of a": {"dataset": Streamed(TensorDataset(*rows)), "drop_last": True},
        "evaluation data: all rows of it are tested, in order": {"dataset": loader.dataset, "sampler": [1, 2, 3]},
    }
    with Trainer(model, **options).session((rows[0][:BATCH], rows[1][:BATCH])) as session:
        assert session.evaluate(loader).loss == pytest.approx(session.evaluate(first).loss)
        for evaluate in (trainer.evaluate, session.evaluate):
            for words, given in refused.items():
                with pytest.raises(DataError, match=words):
                    evaluate(DataLoader(batch_size=4, **given))


def test_a_trainer_takes_another_loader_the_next_time():
    trainer = Trainer(network(), method="full", mem_limit="2GB", epochs=1, seed=SEED, optimizer="sgd", lr=0.1, quiet=True)
    for batch in (8, 12):
        plan = trainer.plan(DataLoader(Noisy(), batch_size=batch, shuffle=True), clean(9))
        assert plan.partitions[0].micro_batch == batch
    with pytest.raises(DataError, match=r"without a sampler"):
        trainer.plan(Noisy(), DataLoader(Noisy(), batch_size=4, sampler=[1, 2, 3]))


def test_a_sampler_of_torch_over_other_numbers_than_the_data_set_s_is_one_of_its_own():
    """`SequentialSampler(range(20))` over 40 rows was taken for their order: all 40 were trained and tested."""
    rows = TensorDataset(torch.randn(40, 6), torch.arange(40) % 4)
    loader = DataLoader(rows, 10, sampler=SequentialSampler(range(20)))
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    trainer = Trainer(model, mem_limit="2GB", method="full", batch_size=10, quiet=True)
    with pytest.raises(DataError, match="all rows of it are tested, in order"):
        trainer.evaluate(loader)
