#!/usr/bin/env bash
# torch 2.14.1: autocast keeps its casts of weights until the outermost autocast ends. A loop of updates inside one
# `with torch.autocast(...)` so computes every forward pass with the weights of the first: the optimizer changes them, no error
# comes, and the loss stays where it was. With an autocast around each forward pass, or cache_enabled=False, it falls. A
# checkpoint of the first loop, read back, shows yet another loss. Fails if torch does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 numpy
cat > "$folder/look.py" <<'PY'
import contextlib

import torch
from torch import nn
from torch.nn.functional import cross_entropy

x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
y = x[:, :4].argmax(1)


def losses(around_loop, around_step):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    before = model[0].weight.detach().clone()
    with around_loop():
        for _ in range(60):
            with around_step():
                loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    assert not torch.equal(before, model[0].weight), "the optimizer changes the weights in every case"
    return found


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def without_cache():
    return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)


nothing = contextlib.nullcontext
ways = {"around the loop": (autocast, nothing), "without its cache": (without_cache, nothing), "around each step": (nothing, autocast)}
found = {name: losses(*way) for name, way in ways.items()}
for name, way in found.items():
    print(f"torch {torch.__version__}, autocast {name}: loss {way[0]:.3f} at first, {way[-1]:.3f} after 60 updates")
assert len(set(found["around the loop"])) == 1
assert found["without its cache"] == found["around each step"]
assert found["around each step"][-1] < 0.7 * found["around each step"][0]
PY
"$folder/env/bin/python" "$folder/look.py"
