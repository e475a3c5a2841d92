"""Generators that a data set holds for itself are seeded before each item, as torch's, Python's and numpy's are."""

import os
import random
import signal
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from seqpart.data.generators import own_generators, seed_generators, states
from seqpart.data.splits import as_split
from seqpart.errors import DataError, Interrupted
from tests.augmented import BATCH, SEED, WIDTH, Noisy, bits, trained
from tests.data.test_loaders import assert_plain, plainly

KINDS = {
    "numpy": lambda: (rng := np.random.default_rng(), lambda: rng.normal()),
    "numpy, as it was": lambda: (rng := np.random.RandomState(), lambda: rng.normal()),
    "numpy, of another kind": lambda: (rng := np.random.RandomState(np.random.Philox()), lambda: rng.normal()),
    "python": lambda: (rng := random.Random(), rng.random),
    "torch": lambda: (rng := torch.Generator(), lambda: float(torch.rand((), generator=rng))),
}
GLOBAL = np.random.default_rng()


class Augmented(Noisy):
    def __init__(self, hold, draw):
        super().__init__()
        self.hold, self.draw = hold, draw

    def __getitem__(self, index):
        return self.x[index] * self.draw(), int(self.targets[index])


class OfTheModule(Noisy):
    def __getitem__(self, index):
        return self.x[index] + GLOBAL.normal(), int(self.targets[index])


class Transform:
    def __init__(self):
        self.rng = np.random.default_rng()

    def __call__(self, x):
        return x + self.rng.normal()


class Late:
    """Makes its generator when it needs it, and has no dict of attributes."""

    __slots__ = ("rng",)

    def __call__(self, x):
        if not hasattr(self, "rng"):
            self.rng = np.random.default_rng()
        return x * self.rng.normal()


class Transformed(Noisy):
    """As transforms of a library are held: in a list, in an object."""

    def __init__(self):
        super().__init__()
        self.transforms = {"train": [Transform(), Transform(), Late()]}

    def __getitem__(self, index):
        x = self.x[index]
        for transform in self.transforms["train"]:
            x = transform(x)
        return x, int(self.targets[index])


SETS = {name: lambda make=make: Augmented(*make()) for name, make in KINDS.items()}
SETS |= {"of a module": OfTheModule, "of transforms": Transformed}


def stop(event):
    if event.update == 7:  # in the middle of the second epoch
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("items", SETS.values(), ids=SETS)
@pytest.mark.few(1)
def test_a_generator_of_a_data_set_s_own_draws_the_same_in_every_process(items, tmp_path, capsys):
    """Each worker process drew the same from its copy, and a run that went on in another process drew otherwise."""
    whole = trained(tmp_path, items(), batch_size=BATCH)
    _ = (plain := items())[0]  # which makes the generator of `Late`
    assert_plain(whole, plainly(plain))
    assert bits(whole) == bits(trained(tmp_path, items(), name="workers", batch_size=BATCH, workers=2))
    with pytest.raises(Interrupted):
        trained(tmp_path, items(), name="parted", batch_size=BATCH, save_every=99, callbacks=[SimpleNamespace(on_step=stop)])
    ended = trained(tmp_path, items(), name="parted", batch_size=BATCH, resume=tmp_path / "parted", save_every=99, quiet=False)
    assert bits(whole)[0] == bits(ended)[0]
    assert "others each time" not in capsys.readouterr().out


def test_a_generator_that_a_callback_makes_for_each_epoch_is_seeded_too(tmp_path):
    """A run that went on in the middle of an epoch would have drawn otherwise from it, without a word."""

    def remade(name, *, stops=False, resume=None):
        items = Augmented(None, None)

        def renew(event=None):
            items.hold = np.random.default_rng()
            items.draw = items.hold.normal

        renew()
        on_step = {"on_step": stop} if stops else {}
        callbacks = [SimpleNamespace(on_epoch=renew, **on_step)]
        return trained(tmp_path, items, name=name, batch_size=BATCH, save_every=99, callbacks=callbacks, resume=resume)

    whole = remade("whole")
    with pytest.raises(Interrupted):
        remade("parted", stops=True)
    assert bits(whole)[0] == bits(remade("parted", resume=tmp_path / "parted"))[0]


def test_generators_of_a_data_set_s_own_go_on_as_if_nothing_had_been_drawn(tmp_path):
    """Each evaluation left the generator of a shared transform where the last had left it, so that a loop of one's own drew the
    same in every epoch; and a loader with the same generator had another order in a second run."""
    shared = torch.Generator().manual_seed(5)
    items = Augmented(shared, lambda: float(torch.rand((), generator=shared)))
    before = shared.get_state()
    loader = DataLoader(items, BATCH, shuffle=True, generator=shared)
    one, other = (trained(tmp_path, loader, items, name=name) for name in ("one", "other"))
    assert torch.equal(shared.get_state(), before) and shared.initial_seed() == 5
    assert bits(one) == bits(other)


def rarely(rng, x):
    return x + 1 if rng.random() < 1e-9 else x


def test_an_item_that_draws_and_is_the_same_is_no_kept_row():
    """The augmentation was frozen for good, where none of the items that are read twice had it."""
    items = Augmented(hold := random.Random(), None)
    items.draw = partial(rarely, hold, 1.0)
    with pytest.raises(DataError, match="is another one when it is read again, or draws random numbers"):
        as_split(items, "training")


class Pairs(list):
    """A data set that is a list, and has no item of a slice."""

    def __init__(self):
        super().__init__(range(24))
        self.rng = random.Random()

    def __getitem__(self, index):
        return torch.full((WIDTH,), float(super().__getitem__(index)) + self.rng.random()), index % 3


def test_a_list_with_items_of_its_own_is_looked_through(tmp_path):
    """Its own `__getitem__` was asked for a slice: a TypeError."""
    assert_plain(trained(tmp_path, Pairs(), batch_size=BATCH), plainly(Pairs()))


def helper(x, rng=random.Random()):  # noqa: B008
    return [x + rng.random() + GLOBAL.normal() for _ in range(2)]


class Closed:
    """Has attributes that nobody may read, and what has ended."""

    def __init__(self):
        self.ended = weakref.proxy(Transform())

    @property
    def __dict__(self):
        raise RuntimeError("closed")


class Holder(torch.nn.Module):
    """Of each generator that a method may know."""

    of_the_class = np.random.default_rng()

    def forward(self, x):
        return helper(x)


def test_generators_are_found_once_wherever_they_are_held_and_no_others():
    ours = [np.random.default_rng(), random.Random(), torch.Generator(), np.random.RandomState()]

    def closure(x):
        return ours[1].random() * x

    holder = Transform()
    held = {
        "a": [ours[0]],
        "b": closure,
        "c": partial(max, ours[2]),
        "d": (holder.__call__, ours[3]),
        "e": Holder(),
        "f": Closed(),
    }
    held["all"] = [held, random, np.random, torch.default_generator, random.SystemRandom(), torch.nn.Linear(2, 2)]
    held["boxes"] = [{"box": [[0.5] * 4] * 40, "id": number} for number in range(20_000)]
    known = {id(one) for one in (*ours, holder.rng, Holder.of_the_class, helper.__defaults__[0], GLOBAL)}
    found = own_generators(held)
    assert len(found) == len(known) and {id(one) for one in found} == known
    assert [id(one) for one in found] == [id(one) for one in own_generators(held)]
    seed_generators(SEED, found)
    before = states(found)
    assert len({repr(state) for state in before}) == len(before) == 3 + 8
    torch.rand(WIDTH, generator=ours[2])
    assert states(found) != before
    seed_generators(SEED, found)
    assert states(found) == before
