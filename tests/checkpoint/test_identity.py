"""A checkpoint is gone on with by its model and on its rows: others with the same labels and shapes are refused."""

import os
import subprocess
import sys

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

import seqpart.checkpoint.manifest as manifests
from seqpart import Trainer
from seqpart.capture.capture import chain_of
from seqpart.checkpoint.changes import layers_of
from seqpart.errors import Interrupted, OptionError
from tests.resuming import Stopping, ended, interrupt

import torch  # isort: skip
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 24, 12


def values(seed=3):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)), torch.arange(ROWS) % 4


class Items(Dataset):
    def __init__(self, x, y, noise=None):
        self._x, self._y, self._noise = x, y, noise

    def __len__(self):
        return len(self._y)

    def __getitem__(self, number):
        x = self._x[number]
        return x if self._noise is None else x + self._noise(x), self._y[number]


class Stream(IterableDataset):
    def __init__(self, x, y):
        self._rows = list(zip(x, y, strict=True))

    def __len__(self):
        return len(self._rows)

    def __iter__(self):
        return iter(self._rows)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, 4)

    def forward(self, x, scale):
        return self.second(torch.relu(self.first(x)) * scale[:, None])


def two(act):
    return nn.Sequential(nn.Linear(WIDTH, 8), act, nn.Linear(8, 4))


def small():
    return two(nn.ReLU())


def fit(folder, model, rows, *, resume=False, reporter=None, **options):
    torch.manual_seed(1)
    options = {"mem_limit": "2GB", "method": "streamed", "epochs": 2, "lr": 0.01, "batch_size": 8, "partitions": 2, **options}
    trainer = Trainer(model(), output_dir=None if resume else folder, quiet=True, **options)
    return trainer.fit(rows, resume=folder if resume else None, reporter=reporter)


def stopped(folder, model, rows, **options):
    with pytest.raises(Interrupted):
        fit(folder, model, rows, reporter=Stopping(12, interrupt), **options)


GIVEN = {
    "tensors": lambda x, y: (x, y),
    "several inputs": lambda x, y: ({"x": x, "scale": x[:, 0]}, y),
    "items": Items,
    "items read anew": Items,
    "a stream": Stream,
    "a loader": lambda x, y: DataLoader(Items(x, y), batch_size=8, shuffle=True),
    "a loader with a collate_fn": lambda x, y: DataLoader(Items(x, y), batch_size=8, collate_fn=list_of_pairs),
    "augmented": lambda x, y: DataLoader(Items(x, y, torch.rand_like), batch_size=8),
}


def list_of_pairs(items):
    return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.few(1)
def test_other_rows_with_the_same_labels_are_refused_and_the_same_ones_taken(name, tmp_path):
    """Only labels were compared: of kept rows the checkpoint had its own whatever was given, and others were trained on."""
    x, y = values()
    model = TwoInputs if name == "several inputs" else small
    options = {"cache": "none"} if "anew" in name else {}
    rows = GIVEN[name](x, y)
    whole = ended(fit(tmp_path / "whole", model, rows, **options))
    stopped(tmp_path / "run", model, rows, **options)
    with pytest.raises(OptionError, match="the training rows differ, though their labels are the same"):
        fit(tmp_path / "run", model, GIVEN[name](x * 1.01, y), resume=True, **options)
    assert ended(fit(tmp_path / "run", model, rows, resume=True, **options)) == whole


def test_one_row_of_a_tensor_that_is_another_is_seen(tmp_path):
    x, y = values()
    stopped(tmp_path / "run", small, (x, y))
    changed = x.clone()
    changed[17, 5] += 1e-6
    with pytest.raises(OptionError, match="the training rows differ"):
        fit(tmp_path / "run", small, (changed, y), resume=True)


def test_rows_that_are_others_whenever_they_are_read_are_left_alone(tmp_path):
    """A generator of the data set's own goes on from read to read."""
    own = torch.Generator().manual_seed(5)
    rows = DataLoader(Items(*values(), lambda x: torch.rand(x.shape, generator=own)), batch_size=8)
    stopped(tmp_path / "run", small, rows)
    assert fit(tmp_path / "run", small, rows, resume=True).weights.exists()


# --- the model's layers -----------------------------------------------------------------------------------------------


class Called(nn.Module):
    """function: between two layers. heads: a setting of its own. act: what a layer does."""

    def __init__(self, function=F.relu, heads=2, act=torch.tanh):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), Act(heads, act)
        self._function = function

    def forward(self, x):
        return self.second(self._function(self.first(x)))


class Act(nn.Module):
    def __init__(self, heads, act):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.heads, self.act = heads, act

    def forward(self, x):
        return self.linear(self.act(x * self.heads))


class Frozen(Called):
    def __init__(self):
        super().__init__()
        self.first.bias.requires_grad_(False)


def blocks(*layers):
    return lambda: [lambda: nn.Linear(WIDTH, 8), *layers, lambda: nn.Linear(8, 4)]


OTHERS = {
    "activation": (blocks(nn.ReLU), blocks(nn.GELU), "block 1 is a GELU, and was a ReLU"),
    "activation in a block": (lambda: nn.Sequential(two(nn.ReLU()), nn.Linear(4, 4)), lambda: nn.Sequential(
        two(nn.GELU()), nn.Linear(4, 4)), "block 0 "),
    "kind of GELU": (blocks(nn.GELU), blocks(lambda: nn.GELU("tanh")), "block 1 "),
    "eps": (blocks(lambda: nn.LayerNorm(8)), blocks(lambda: nn.LayerNorm(8, 1e-3)), "block 1 "),
    "dropout": (blocks(nn.Dropout), blocks(lambda: nn.Dropout(0.1)), "block 1 "),
    "a setting of its own": (Called, lambda: Called(heads=4), "block 1 "),
    "an activation of its own": (Called, lambda: Called(act=torch.sigmoid), "block 1 "),
    "between layers": (Called, lambda: Called(F.gelu), "block . "),
    "frozen": (Called, Frozen, "block 0 "),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.few(1)
def test_other_layers_of_the_same_shapes_are_refused_by_the_first_that_differs(name, tmp_path):
    """The checkpoint knew names and shapes alone."""
    model, other, words = OTHERS[name]
    whole = ended(fit(tmp_path / "whole", model, values()))
    stopped(tmp_path / "run", model, values())
    words = words if "was" in words else f"{words}.*has another layer, setting"
    with pytest.raises(OptionError, match=f"holds another model: {words}"):
        fit(tmp_path / "run", other, values(), resume=True)
    assert ended(fit(tmp_path / "run", model, values(), resume=True)) == whole


def test_a_checkpoint_that_says_nothing_of_rows_and_layers_is_gone_on_with(tmp_path):
    """Those of earlier builds."""
    whole = ended(fit(tmp_path / "whole", small, values()))
    stopped(tmp_path / "run", small, values())
    file = tmp_path / "run" / manifests.CHECKPOINT
    manifest = manifests.load(file)
    assert manifest.state.pop("rows") and manifest.state.pop("layers")
    file.write_text(manifest.to_json())
    assert ended(fit(tmp_path / "run", small, values(), resume=True)) == whole


def digests():
    return [layers_of(chain_of(model(), (WIDTH,), torch.float32)) for model in (small, Called, blocks(nn.GELU))]


@pytest.mark.slow
def test_layers_have_the_same_digests_in_another_process():
    """Addresses, and the order of sets, are others there."""
    code = "from tests.checkpoint.test_identity import digests; ballast = [object() for _ in range(999)]; print(digests())"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True
    )  # fmt: skip
    assert done.stdout.strip() == str(digests())
