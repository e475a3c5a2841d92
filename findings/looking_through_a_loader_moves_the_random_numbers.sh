#!/usr/bin/env bash
# torch 2.14.1: to begin a pass over a DataLoader draws a number from the process's generator, also where nothing is random: no shuffling,
# no workers, rows that are tensors. So an evaluation between two epochs, in which a model draws nothing, changes the dropout masks of
# the epoch behind it, and a loop that evaluates every epoch has other weights than one that evaluates at the end. A loader with a
# generator of its own (generator=torch.Generator()) leaves the process's alone.
# Fails if torch does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 numpy
"$folder/env/bin/python" - <<'PY'
import torch
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

print("torch", torch.__version__)
rows = TensorDataset(torch.arange(48.0).reshape(12, 4))


def trained(evaluates, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    test = DataLoader(rows, 4, shuffle=False, num_workers=0, **options)
    assert isinstance(test.sampler, SequentialSampler)
    for _ in range(2):
        for x in rows.tensors[0].split(4):
            model.train()(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if evaluates:
            with torch.no_grad():
                for (x,) in test:
                    model.eval()(x)
    return model[0].weight.detach()


alone = trained(False)
for said, options in {"no generator": {}, "a generator of its own": {"generator": torch.Generator()}}.items():
    same = torch.equal(trained(True, **options), alone)
    print(f"{said}: with an evaluation between the epochs the weights are {'the same' if same else 'others'}")
    assert same == bool(options)
PY
