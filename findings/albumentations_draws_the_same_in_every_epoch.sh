#!/usr/bin/env bash
# albumentations 2.0.8, the last release under the MIT license, torch 2.14.1: a Compose without a seed has generators of its own, which worker
# processes get as they were when the epoch began. So all workers of a DataLoader draw the same, and draw it again in every epoch: the row at a
# place of the order has the crop and the flip that it had in the epoch before. persistent_workers=True ends the second, and no seed of
# torch, numpy or random changes either; transforms of torchvision differ in all of these.
# Fails if albumentations does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 torchvision==0.29.1 albumentations==2.0.8 numpy
NO_ALBUMENTATIONS_UPDATE=1 "$folder/env/bin/python" -W ignore - <<'PY'
from importlib.metadata import version

import albumentations
import numpy
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

print("torch", torch.__version__, "albumentations", version("albumentations"))


class Draws(Dataset):
    """Each item is where its crop begins in a picture of 256 different numbers."""

    def __init__(self, library):
        self.library, self.picture = library, numpy.arange(256, dtype=numpy.uint8).reshape(16, 16, 1)
        self.crop = albumentations.Compose([albumentations.RandomCrop(4, 4)]) if library == "albumentations" else v2.RandomCrop(4)

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if self.library == "albumentations":
            return int(self.crop(image=self.picture)["image"].min())
        return int(self.crop(torch.from_numpy(self.picture[..., 0])[None]).min())


def drawn(library, persistent):
    loader = DataLoader(Draws(library), batch_size=4, num_workers=2, persistent_workers=persistent)
    found = []
    for epoch in range(3):
        torch.manual_seed(epoch), numpy.random.seed(epoch)
        found.append([x.tolist() for x in loader])
    return found


for library in ("albumentations", "torchvision"):
    for persistent in (False, True):
        first, *others = drawn(library, persistent)
        alike, twice = others == [first, first], (first[0], first[2]) == (first[1], first[3])
        print(f"{library}, persistent_workers={persistent}: {first}; the same in every epoch: {alike}, in both workers: {twice}")
        assert alike == (library == "albumentations" and not persistent)
        assert twice == (library == "albumentations")
PY
