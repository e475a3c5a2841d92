#!/usr/bin/env bash
# torch 2.14.1: Module.load_state_dict copies what it is given, Optimizer.load_state_dict keeps it: the tensors of the dict are the moments
# of the optimizer from then on, and each step changes them there. So a loop that keeps its best state in memory (a deepcopy) and goes
# back to it a second time goes back to the right weights with moments from after the first time, without a word; and two models that are
# continued from one checkpoint that was read once share their moments. With copy.deepcopy of the dict at each load all is as it should be.
# Fails if torch does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 numpy
"$folder/env/bin/python" - <<'PY'
import copy

import torch

print("torch", torch.__version__)
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
rows = torch.randn(6, 16, 8)


def steps(optimizer, some):
    for x in some:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def differs(kind, taken):
    """Do two continuations from one kept state have other weights?"""
    optimizer = kind(model.parameters(), lr=1e-2)
    steps(optimizer, rows[:2])
    weights, kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    found = []
    for _ in range(2):
        model.load_state_dict(weights)
        optimizer.load_state_dict(taken(kept))
        steps(optimizer, rows[2:])
        found.append(model.weight.detach().clone())
    return not torch.equal(*found)


for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam):
    as_is, copied = differs(kind, lambda kept: kept), differs(kind, copy.deepcopy)
    print(f"{kind.__name__}: a second return to the kept state gives other weights: {as_is}; to a copy of it: {copied}")
    assert as_is and not copied

weights = model.state_dict()
kept = copy.deepcopy(weights)
model.load_state_dict(kept)
assert kept["weight"].data_ptr() != model.weight.data_ptr()
PY
