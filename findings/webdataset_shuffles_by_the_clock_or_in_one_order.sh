#!/usr/bin/env bash
# webdataset 1.0.2: `.shuffle(n)` takes its order from the clock and the process's number. No seed repeats it: not random.seed, not torch's or
# numpy's, and not the `seed` of WebDataset itself, which orders shards alone. `.shuffle(n, seed=0)` has one and the same order in every
# epoch. Only `.shuffle(n, rng=random.Random(0))` has other orders in other epochs, and the same ones in another run.
# Fails if webdataset does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q webdataset==1.0.2 numpy
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PY'
import random
from importlib.metadata import version

import numpy
import webdataset

print("webdataset", version("webdataset"))
with webdataset.TarWriter("rows.tar") as tar:
    for number in range(40):
        tar.write({"__key__": f"{number:04}", "y.cls": number})


def epochs(own=None, **options):
    """The orders of two epochs of a run that seeds everything first."""
    random.seed(0)
    numpy.random.seed(0)
    rows = webdataset.WebDataset("rows.tar", shardshuffle=False, seed=own).decode().to_tuple("y.cls").shuffle(40, **options)
    return [[y for (y,) in rows] for _ in range(2)]


for said, own, options in (
    ("shuffle(40), seeds of the process", None, dict),
    ("WebDataset(seed=0).shuffle(40)", 0, dict),
    ("shuffle(40, seed=0)", None, lambda: {"seed": 0}),
    ("shuffle(40, rng=random.Random(0))", None, lambda: {"rng": random.Random(0)}),
):
    one, other = epochs(own, **options()), epochs(own, **options())
    repeated, varied = one == other, one[0] != one[1]
    print(f"{said}: a second run has the same orders: {repeated}; two epochs have different ones: {varied}")
    assert repeated == bool(options()) and varied == ("seed" not in options())
PY
