"""Data sets whose items are drawn anew whenever they are read, and short runs on them."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from seqpart import Trainer

ROWS, WIDTH, CLASSES = 40, 6, 3
SEED, EPOCHS, BATCH = 3, 2, 8


def clean(rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=generator), torch.arange(rows) % CLASSES


class Noisy(Dataset):
    """Draws from all three generators: a flip, a factor and noise."""

    def __init__(self, rows=ROWS):
        self.x, self.targets = clean(rows)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index].flip(0) if random.random() < 0.5 else self.x[index]
        return x * float(np.random.uniform(0.5, 1.5)) + 0.1 * torch.randn(WIDTH), int(self.targets[index])


class Pixels(Dataset):
    """Bytes, each cropped at random out of a larger row."""

    def __init__(self, rows=ROWS):
        self.x = torch.randint(0, 256, (rows, 2 * WIDTH), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        at = random.randrange(WIDTH)
        return self.x[index, at : at + WIDTH], index % CLASSES


class Streamed(IterableDataset):
    """The items of a data set through a buffer that is shuffled as they come, without a length."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        held = []
        for index in range(len(self.items)):
            held.append(self.items[index])
            if len(held) > 4:
                yield held.pop(random.randrange(len(held)))
        yield from held


def mixed(items):
    """A collate_fn that draws: every row is mixed with another of its batch; labels are kept."""
    x, y = torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])
    return 0.9 * x + 0.1 * x[torch.randperm(len(x))], y


def network():
    return [lambda: nn.Linear(WIDTH, 12), lambda: nn.Sequential(nn.ReLU(), nn.Linear(12, CLASSES))]


def trained(folder, train, test=None, *, name="run", resume=None, callbacks=(), **options):
    options = {
        "method": "full", "mem_limit": "2GB", "epochs": EPOCHS, "optimizer": "sgd", "lr": 0.1, "seed": SEED, "quiet": True,
        "save_every": "never", **options,
    }  # fmt: skip
    trainer = Trainer(network(), output_dir=folder / name, **options)
    return trainer.fit(train, clean(9) if test is None else test, resume=resume, callbacks=callbacks)


def bits(result):
    return result.weights.read_bytes(), result.train_losses, result.test_loss


class Words(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {"ids": [1 + (index + k) % 9 for k in range(2 + index % 4)], "labels": index % CLASSES}


def padded(items, width=6):
    ids = torch.zeros(len(items), width or max(len(item["ids"]) for item in items), dtype=torch.int64)
    for row, item in enumerate(items):
        ids[row, : len(item["ids"])] = torch.tensor(item["ids"])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([item["labels"] for item in items])}
