#!/usr/bin/env bash
# torchdata 0.11.0, torch 2.14.1: StatefulDataLoader, "a drop-in replacement for torch.utils.data.DataLoader", takes its seed when it is made and not
# when an epoch begins. So for the same seed it shuffles otherwise than DataLoader; torch.manual_seed before an epoch, by which a loop repeats
# that epoch with DataLoader, changes nothing; and the order depends on all that was drawn before the loader was made. To make one draws a
# number too, so a model that is built behind it has other weights. Its state_dict does repeat the order, in mid-epoch as well.
# Fails if torchdata does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 torchdata==0.11.0 numpy
"$folder/env/bin/python" -W ignore - <<'PY'
from importlib.metadata import version

import torch
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

print("torch", torch.__version__, "torchdata", version("torchdata"))
rows = TensorDataset(torch.arange(8))


def order(loader, seed=None):
    if seed is not None:
        torch.manual_seed(seed)
    return torch.cat([x for (x,) in loader]).tolist()


found = {}
for kind in (DataLoader, StatefulDataLoader):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    loader = kind(rows, 2, shuffle=True)
    draws = not torch.equal(before, torch.get_rng_state())
    found[kind] = [order(loader, 0), order(loader, 0)]
    print(f"{kind.__name__}: seed 0 before each of two epochs: {found[kind][0]}, {found[kind][1]}; making it draws a number: {draws}")
    assert draws == (kind is StatefulDataLoader)
assert found[DataLoader][0] == found[DataLoader][1] != found[StatefulDataLoader][0] != found[StatefulDataLoader][1]

loader = StatefulDataLoader(rows, 2, shuffle=True)
begun = iter(loader)
next(begun)
state = loader.state_dict()
rest = [x.tolist() for (x,) in begun]
again = StatefulDataLoader(rows, 2, shuffle=True)
again.load_state_dict(state)
assert [x.tolist() for (x,) in again] == rest
PY
