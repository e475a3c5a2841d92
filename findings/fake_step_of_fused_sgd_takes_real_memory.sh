#!/usr/bin/env bash
# torch 2.14.1: a step of torch.optim.SGD(fused=True) under FakeTensorMode, which is to compute shapes without memory, makes real tensors
# of the parameter's size: torch knows no shapes of the kernel behind it and runs it on zeros (allow_fallback_kernels, on by default).
# A parameter of 400 MB that has no memory costs 800 MB for a moment, and one that does not fit ends the process. Adam and AdamW do not.
# Fails if torch does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 numpy
"$folder/env/bin/python" - <<'PY'
import resource

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

print("torch", torch.__version__)


def growth(kind, numbers):
    """Bytes by which the process's peak grows while a step is made on so many fake numbers."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with FakeTensorMode():
        parameter = torch.nn.Parameter(torch.empty(numbers))
        optimizer = kind([parameter], lr=0.1, fused=True)
        parameter.grad = torch.empty_like(parameter)
        optimizer.step()
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
    growth(kind, 10)  # what a first step imports
    grown = growth(kind, 100_000_000)
    print(f"{kind.__name__}: the peak grew by {grown / 1e6:.0f} MB for a fake parameter of 400 MB")
    assert (grown > 700e6) == (kind is torch.optim.SGD)
PY
