#!/usr/bin/env bash
# safetensors 0.8.0: a dict of tensors that is saved and loaded comes back in another order, and in which one depends on how it is loaded.
# load(bytes) gives the order of a hash table, another one at each call; load_file(path) gives that of the file, which save sorted by the
# size of the dtype and then by name; safe_open(path).keys() gives that of the names. The order of the dict that was saved is nowhere. So
# whoever pairs tensors by place (parameters of an optimizer, a zip with the model's own) or adds something up over them gets other pairs
# or other last bits from one call to the next.
# Fails if safetensors does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q safetensors==0.8.0 numpy
FOLDER="$folder" "$folder/env/bin/python" - <<'PY'
import os

import numpy as np
import safetensors
from safetensors import safe_open
from safetensors.numpy import load, load_file, save, save_file

print("safetensors", safetensors.__version__)
kinds = ("float32", "float16", "float64")
saved = {f"layer.{9 - place}": np.full(3, place, kinds[place % 3]) for place in range(10)}
path = os.path.join(os.environ["FOLDER"], "saved.safetensors")
save_file(saved, path)
data = save(saved)
orders = {tuple(load(data)) for _ in range(50)}
print(f"the same bytes, loaded 50 times: {len(orders)} orders")
assert len(orders) > 10

with safe_open(path, "numpy") as opened:
    by_name = list(opened.keys())
of_file = list(load_file(path))
print("saved as    ", *saved)
print("load_file   ", *of_file)
print("safe_open   ", *by_name)
assert by_name == sorted(saved)
assert of_file == list(load_file(path)) == sorted(saved, key=lambda name: (-saved[name].itemsize, name))
assert len({tuple(saved), tuple(of_file), tuple(by_name)}) == 3
PY
