#!/usr/bin/env bash
# torch 2.14.1: HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=True), and consolidate_safetensors_files
# (which torchtitan calls), write zero for every tensor without dimensions: a scale, a temperature, a gate of a model. Nothing
# is said, the file and its index are whole, and the shards beside it have the right number. Tensors of integers, such as
# BatchNorm's num_batches_tracked, end it with a TypeError (pytorch issue 192485); whoever casts them to save them gets zeros.
# Who loads such a directory should take these from sharded/. Fails if torch does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 numpy safetensors
FOLDER="$folder/saved" "$folder/env/bin/python" -W ignore - <<'PY'
import os
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException


def save(state, name):
    folder = os.path.join(os.environ["FOLDER"], name)
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True))
    return Path(folder)


state = {"weight": torch.arange(6.0).view(2, 3), "scale": torch.tensor(2.5)}
folder = save(state, "floats")
(shard,), (whole,) = ([load_file(path) for path in place.glob("*.safetensors")] for place in (folder / "sharded", folder))
print(f"torch {torch.__version__}: scale is {state['scale'].item()}, {shard['scale'].item()} in its shard, "
      f"{whole['scale'].item()} where shards are put together")
assert torch.equal(whole["weight"], state["weight"]) and shard["scale"] == 2.5
assert whole["scale"] == 0.0
try:
    save({"num_batches_tracked": torch.tensor([3])}, "integers")
except CheckpointException as error:
    print("integers:", str(error).strip().splitlines()[-1])
else:
    raise SystemExit("integers are put together now")
PY
