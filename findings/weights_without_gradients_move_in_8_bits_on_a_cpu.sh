#!/usr/bin/env bash
# bitsandbytes 0.50.2, CPU: quantize_blockwise, which takes the nearest of 256 values elsewhere, makes of every number below 2e-5 of
# the largest in its block 2e-5 with its sign, and of zero +2e-5, though its table has a zero. So no moment of an 8-bit optimizer
# ever becomes zero: a weight whose gradient is zero from the first step on is moved by Lion8bit as far as all others, by 5 in 500
# steps at a rate of 0.01, and a little by AdamW8bit. Rows of an embedding that no batch names are such weights. In 32 bits they stay.
# Fails if bitsandbytes does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 numpy bitsandbytes==0.50.2
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import bitsandbytes
import torch

print("torch", torch.__version__, "bitsandbytes", bitsandbytes.__version__)
table = bitsandbytes.functional.create_dynamic_map(signed=True)
numbers = torch.linspace(-1, 1, 256)
numbers[:4] = torch.tensor([0.0, 1e-7, -1e-7, 1.0])
codes, scale = torch.ops.bitsandbytes.quantize_blockwise(numbers, table, 256)
found = torch.ops.bitsandbytes.dequantize_blockwise(codes, scale, table, 256, torch.float32)
for before, after in zip(numbers[:4].tolist(), found[:4].tolist()):
    print(f"{before:8.1e} comes back as {after:8.1e}; the nearest of the table is {table[(table - before).abs().argmin()]:8.1e}")
assert bool((table == 0).any()) and found[0] > 1e-5

moved = {}
for name in ("Lion8bit", "AdamW8bit", "Lion", "AdamW"):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 256))
    before = weight.detach().clone()
    optimizer = getattr(bitsandbytes.optim, name)([weight], lr=1e-2, weight_decay=0)
    for _ in range(500):
        weight.grad = torch.randn(64, 256)
        weight.grad[:, ::2] = 0
        optimizer.step()
    change = (weight.detach() - before).abs()
    moved[name] = float(change[:, ::2].max())
    print(f"{name}: weights without gradient moved by {moved[name]:.3g}, others by up to {float(change[:, 1::2].max()):.3g}")
assert moved["Lion8bit"] > 4 and moved["AdamW8bit"] > 1e-3 and moved["Lion"] == moved["AdamW"] == 0
PY
