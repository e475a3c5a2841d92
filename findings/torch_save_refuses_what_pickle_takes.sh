#!/usr/bin/env bash
# torch 2.14.1, safetensors 0.8.0: a module whose parameters and buffers are views of one buffer, as flattened or offloaded weights are,
# trains, is copied, pickled and has a state_dict like any other; torch.save refuses it as soon as two of its tensors have different
# dtypes, such as a BatchNorm's floats and its count of batches, though none of them overlap. With one dtype torch.save takes it, and
# writes the whole buffer, however few of its tensors are saved. safetensors' save_model refuses it in both cases, and save_file takes it
# in both.
# Fails if they do otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 safetensors==0.8.0 numpy packaging
FOLDER="$folder" "$folder/env/bin/python" - <<'PY'
import copy
import io
import os
import pickle

import safetensors
import torch
from safetensors.torch import save_file, save_model
from torch import nn

print("torch", torch.__version__, "safetensors", safetensors.__version__)
path = os.path.join(os.environ["FOLDER"], "saved.safetensors")


def in_one_buffer(module):
    """Moves all tensors of the module into one buffer, each at a multiple of 64 bytes."""
    buffer, at = torch.empty(1 << 16, dtype=torch.uint8), 0
    for owner in module.modules():
        for kind in (owner._parameters, owner._buffers):
            for name, tensor in kind.items():
                view = buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                view.copy_(tensor.detach())
                if isinstance(tensor, nn.Parameter):
                    tensor.data = view
                else:
                    kind[name] = view
                at += -(-tensor.nbytes // 64) * 64
    return module


def taken(work):
    try:
        work()
    except RuntimeError as error:
        return f"refused: {str(error)[:70]}"
    return "taken"


found = {}
for said, module in {"one dtype": nn.Linear(8, 8), "two dtypes": nn.BatchNorm1d(8)}.items():
    module, saved = in_one_buffer(module), io.BytesIO()
    module(torch.randn(4, 8)).sum().backward()
    copy.deepcopy(module)
    pickle.dumps(module)
    found[said] = [
        taken(lambda: torch.save(module.state_dict(), saved)),
        taken(lambda: save_model(module, path)),
        taken(lambda: save_file(module.state_dict(), path)),
    ]
    print(said, dict(zip(("torch.save", "save_model", "save_file"), found[said], strict=True)), "of", saved.tell(), "bytes")
    if said == "one dtype":
        assert saved.tell() > 1 << 16 > 100 * module.bias.nbytes
assert [one.partition(":")[0] for one in found["one dtype"]] == ["taken", "refused", "taken"]
assert [one.partition(":")[0] for one in found["two dtypes"]] == ["refused", "refused", "taken"]
PY
