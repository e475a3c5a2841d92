#!/usr/bin/env bash
# torch 2.14.1: CyclicLR.load_state_dict removes an entry from the dict that it is given, so the same dict can be loaded once. A loop that
# keeps its best state in memory and goes back to it twice, or that writes the dict to a file after having loaded it, ends with
# KeyError: '_scale_fn_custom'. All the other schedulers of torch leave the dict as it was.
# Fails if torch does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 numpy
"$folder/env/bin/python" - <<'PY'
import copy

import torch
from torch.optim import lr_scheduler as schedulers

print("torch", torch.__version__)
made = {
    "StepLR": (2,), "MultiStepLR": ([2, 5],), "ConstantLR": (), "LinearLR": (), "ExponentialLR": (0.9,), "PolynomialLR": (),
    "CosineAnnealingLR": (8,), "CosineAnnealingWarmRestarts": (3,), "OneCycleLR": (0.3, 12), "CyclicLR": (0.01, 0.3),
    "LambdaLR": (lambda epoch: 0.9**epoch,), "MultiplicativeLR": (lambda epoch: 0.9,), "ReduceLROnPlateau": (),
}
changed = []
for name, values in made.items():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    scheduler = getattr(schedulers, name)(optimizer, *values)
    state = scheduler.state_dict()
    before = copy.copy(state)
    scheduler.load_state_dict(state)
    if state.keys() != before.keys():
        changed.append(name)
        print(f"{name}: its state has lost", *(before.keys() - state.keys()))
        try:
            scheduler.load_state_dict(state)
        except KeyError as error:
            print("loaded once more: KeyError", error)
        else:
            raise AssertionError("it was loaded twice")
assert changed == ["CyclicLR"]
PY
