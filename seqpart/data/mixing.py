"""Mixes the rows of each training batch, and their labels: the options --mixup and --cutmix, by torchvision's transforms."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from seqpart.config import Config
from seqpart.data.classes import count_classes
from seqpart.data.loaders import Pair, is_loader
from seqpart.data.source import Source
from seqpart.data.splits import Split, is_pair
from seqpart.errors import DataError
from seqpart.fields import values_of

_OTHERWISE = "Mix them in a collate_fn of your own, which may return shares of classes as labels."


@dataclass(frozen=True, slots=True)
class Mixing:
    """A collate_fn that mixes each row of a batch with the one before it, as `collate` makes them.

    mixup, cutmix: parameter of the Beta distribution that shares are drawn from; 0: not done. If both
    are given, each batch gets one of them.
    """

    collate: Callable[[list[Any]], Any]
    mixup: float
    cutmix: float
    classes: int

    def __call__(self, items: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        from torchvision.transforms import v2  # it takes a second, and memory

        x, y = self.collate(items)
        rows = x if x.is_floating_point() else x.float()
        cuts = bool(self.cutmix) and (not self.mixup or bool(torch.rand(()) < 0.5))
        mix = v2.CutMix(alpha=self.cutmix) if cuts else v2.MixUp(alpha=self.mixup)
        shares = torch.nn.functional.one_hot(y.long(), self.classes).float()
        mixed, labels = mix(rows if cuts else rows.reshape(len(rows), 1, 1, -1), shares)  # of images alone, it says
        return mixed.reshape(rows.shape), labels


def mixed(data: object, rows: Split, settings: Config) -> object:
    """Returns a loader of the training data with mixed batches. rows: the data as they are. Raises DataError."""
    options = " and ".join(f"--{name}" for name in ("mixup", "cutmix") if getattr(settings, name))
    if isinstance(rows.source, Source) and isinstance(rows.source.collate, Mixing):
        return data
    if rows.form or rows.label_form or rows.tokens or rows.labels.ndim != 1 or rows.labels.is_floating_point():
        raise DataError(f"{options}: expected rows of one tensor of numbers, with a class each. {_OTHERWISE}")
    if settings.cutmix and len(rows.shape) != 3:
        raise DataError(f"{options}: expected images of shape (channels, height, width); found rows of shape {rows.shape}.")
    if not rows.has_all_labels or (is_loader(data) and not isinstance(data, DataLoader)):
        raise DataError(f"{options}: the classes of a stream are not known before it is read. {_OTHERWISE}")
    if isinstance(data, DataLoader):
        loader = copy.copy(data)
    else:
        items, shuffle = _items(data, rows), settings.shuffle is not False
        loader = DataLoader(items, batch_size=values_of(settings.batch_size)[0], shuffle=shuffle)
    mixing = Mixing(loader.collate_fn or default_collate, settings.mixup, settings.cutmix, count_classes(rows, rows))
    object.__setattr__(loader, "collate_fn", mixing)
    return loader


def _items(data: Any, rows: Split) -> Any:
    """Returns the rows by number. Those that a file has in order are read into memory."""
    if isinstance(rows.source, Source):
        return rows.source.items
    if isinstance(data, Split):
        return Pair(torch.cat([*data.open()]), data.labels)
    return Pair(*data) if is_pair(data) else data
