"""Whole models, cut into partitions that hand each other packs, train to the bits of whole training and of a plain loop."""

import pytest
import torch

from tests.choice import only_quick
from tests.exactly import FULL, HOWS, Trained, first_difference
from tests.whole_models import Bands, Decoder, Dense, Fan, Mixture, States, UNet


def images():
    generator = torch.Generator().manual_seed(1)
    return tuple(
        (torch.randn(n, 1, 8, 8, generator=generator), torch.randint(0, 3, (n,), generator=generator)) for n in (22, 5)
    )


def quantities():
    generator = torch.Generator().manual_seed(1)
    return tuple((torch.randn(n, 4, generator=generator), torch.randint(0, 3, (n,), generator=generator)) for n in (22, 5))


def words():
    generator = torch.Generator().manual_seed(1)
    made = []
    for n in (22, 5):
        tokens = torch.randint(1, 11, (n, 7), generator=generator)
        tokens[n // 2 :, 5:] = 0
        made.append((tokens, torch.randint(0, 11, (n, 7), generator=generator)))
    return tuple(made)


MODELS = {
    "unet": (UNet, images), "decoder": (Decoder, words), "dense": (Dense, quantities), "bands": (Bands, quantities),
    "fan": (Fan, quantities), "mixture": (Mixture, words), "states": (States, quantities),
}  # fmt: skip
STARTS = {
    "unet": (0, 1, 2, 4), "decoder": (0, 2, 3, 5), "dense": (0, 1, 3, 4), "bands": (0, 2, 3, 4), "fan": (0, 3, 5, 10),
    "mixture": (0, 1, 3), "states": (0, 2, 3, 5),
}  # fmt: skip


def made(kind):
    torch.manual_seed(0)
    return kind()


@pytest.fixture(scope="module")
def arms(tmp_path_factory):
    """`arms(name)`: runs of a model, whose costs are measured once, and what whole training of it gives."""
    known = {}
    with pytest.MonkeyPatch.context() as patch:

        def of(name):
            if name not in known:
                kind, data = MODELS[name]
                arm = Trained(patch, tmp_path_factory.mktemp(name), lambda: made(kind), data(), partitions=STARTS[name])
                known[name] = arm, arm.run(FULL)
            return known[name]

        yield of


WAYS = {
    f"{name}: {how}": (name, how)
    for number, name in enumerate(MODELS)
    for how in (HOWS if name == "unet" else HOWS[number % 6 :: 6])
}
"""One model in every way, and of the others each in a sixth of them, in turn."""
QUICK = [way for number, (way, (name, how)) in enumerate(WAYS.items()) if number % 9 == 0]


@pytest.mark.parametrize("way", only_quick(WAYS, QUICK))
def test_every_way_gives_the_bits_of_whole_training(way, arms):
    name, how = WAYS[way]
    arm, expected = arms(name)
    assert first_difference(arm.run(how), expected) is None
