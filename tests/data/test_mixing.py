"""Batches that are mixed: --mixup and --cutmix."""

import re

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torchvision.transforms import v2

from seqpart import Trainer
from seqpart.data.generators import seed_generators
from seqpart.data.mixing import Mixing
from seqpart.data.source import Draws, row_order
from seqpart.errors import BadInput
from tests.command import SMALL, call

ROWS, BATCH, EPOCHS = 50, 16, 2


def images():
    numbers = torch.Generator().manual_seed(3)
    x = torch.randint(0, 256, (ROWS, 3, 6, 6), dtype=torch.uint8, generator=numbers)
    return x, torch.arange(ROWS) % 5


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 24), nn.ReLU(), nn.Linear(24, 5))


def plainly(mixing, *, collate=default_collate, shuffled=True):
    """The weights of a plain loop that mixes its batches by torchvision, with seqpart's keyed draws."""
    (x, y), model = images(), network()
    step = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    for epoch in range(1, EPOCHS + 1):
        order = row_order(0, epoch, ROWS) if shuffled else range(ROWS)
        for batch, at in enumerate(range(0, ROWS, BATCH)):
            rows, labels = collate([(x[i], y[i]) for i in order[at : at + BATCH]])
            seed_generators(Draws(0, "train", 0, epoch).seed_for("batch", batch))
            rows, labels = mixing(rows.float(), labels)
            step.zero_grad()
            F.cross_entropy(model(rows), labels).backward()
            step.step()
    return model.state_dict()


def both(rows, labels):
    cuts = torch.rand(()) < 0.5
    return (v2.CutMix(alpha=1.0, num_classes=5) if cuts else v2.MixUp(alpha=0.3, num_classes=5))(rows, labels)


WAYS = {
    "mixup": ({"mixup": 0.3}, v2.MixUp(alpha=0.3, num_classes=5)),
    "cutmix": ({"cutmix": 1.0}, v2.CutMix(alpha=1.0, num_classes=5)),
    "both": ({"mixup": 0.3, "cutmix": 1.0}, both),
}


@pytest.mark.parametrize("how", [{"method": "full"}, {"method": "streamed", "partitions": 2, "micro_batch_size": 16}], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.few(1)
def test_mixed_batches_are_those_of_torchvision_in_a_plain_loop(way, how, tmp_path):
    options, mixing = WAYS[way]
    model = network()
    options = {"mem_limit": "2GB", "epochs": EPOCHS, "batch_size": BATCH, "quiet": True, **how, **options}
    result = Trainer(model, lr=1e-3, output_dir=tmp_path / "run", **options).fit(images(), images())
    expected = plainly(mixing)
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, expected[name])] == []
    assert 0 < result.accuracy <= 1  # of test rows that are not mixed


def test_a_loader_keeps_its_own_collate_fn_and_order(tmp_path):
    def collate(items):
        x, y = default_collate(items)
        return x.float() / 255, y

    model, loader = network(), DataLoader(TensorDataset(*images()), batch_size=BATCH, collate_fn=collate)
    Trainer(
        model, mem_limit="2GB", method="full", epochs=EPOCHS, mixup=0.3, lr=1e-3, quiet=True, output_dir=tmp_path / "run"
    ).fit(loader)
    expected = plainly(v2.MixUp(alpha=0.3, num_classes=5), collate=collate, shuffled=False)
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, expected[name])] == []


def test_rows_of_any_shape_are_mixed_and_shares_add_up_to_one():
    torch.manual_seed(0)
    items = [(torch.randn(7), label) for label in (0, 1, 2, 1)]
    x, y = Mixing(default_collate, 0.5, 0.0, 3)(items)
    first = y[1, 1]  # its own share, and the rest of the row before it
    assert torch.allclose(x[1], first * items[1][0] + (1 - first) * items[0][0]) and torch.allclose(y.sum(1), torch.ones(4))


def test_a_run_that_was_ended_in_mid_epoch_goes_on_with_the_same_mixtures(tmp_path):
    class Ends:
        def on_step(self, event):
            if event.update == 6:
                raise KeyboardInterrupt

    options = {"mem_limit": "2GB", "method": "full", "epochs": EPOCHS, "batch_size": BATCH, "mixup": 0.3, "cutmix": 1.0}
    options |= {"lr": 1e-3, "save_every": 2, "quiet": True}
    with pytest.raises(KeyboardInterrupt):
        Trainer(network(), output_dir=tmp_path / "run", **options).fit(images(), callbacks=[Ends()])
    model = network()
    Trainer(model, output_dir=tmp_path / "run", **options).fit(images(), resume=tmp_path / "run")
    expected = plainly(both)
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, expected[name])] == []


def test_the_command_mixes_data_of_a_name(tmp_path, capsys):
    def trained(name, *options):
        found = call(capsys, *SMALL, "--method", "full", "--epochs", "1", "--output-dir", tmp_path / name, *options)
        assert found.code == 0, found.err
        return load_file(tmp_path / name / "model.safetensors")

    plain, one, again = trained("plain"), trained("one", "--mixup", "0.2"), trained("again", "--mixup", "0.2")
    assert all(torch.equal(tensor, again[name]) for name, tensor in one.items())
    assert not all(torch.equal(tensor, plain[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("options", "data", "words"),
    [
        ({"mixup": -1}, images, "--mixup: expected the parameter of a Beta distribution, such as 0.2"),
        ({"mixup": 0.2, "method": "sil"}, images, 'mixup goes with method="auto", streamed'),
        ({"mixup": 0.2, "loss": "mse"}, images, 'and with loss="cross-entropy"'),
        ({"cutmix": 0.2}, lambda: (torch.randn(20, 7), torch.arange(20) % 2), "expected images of shape (channels, height"),
        ({"mixup": 0.2}, lambda: (torch.randn(20, 7), torch.randn(20)), "with a class each. Mix them in a collate_fn"),
    ],
    ids=["below zero", "sil", "mse", "no images", "floats"],
)  # fmt: skip
def test_what_cannot_be_mixed_is_refused_in_words(options, data, words):
    with pytest.raises(BadInput, match=re.escape(words.replace("--", "")[:40])):
        Trainer(network(), **{"mem_limit": "2GB", "method": "full", "quiet": True, **options}).plan(data())
