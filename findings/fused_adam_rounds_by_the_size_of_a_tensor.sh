#!/usr/bin/env bash
# torch 2.14.1, CPU: a fused AdamW computes the last numbers of a tensor, those that fill no whole vector, one by one, and rounds them
# otherwise than the others. The same 100,003 numbers with the same gradients get other second moments when they are parameters of 999
# numbers each, and the same when these are of 992 (a multiple of 32). So whoever cuts a weight into pieces that are stepped one by one
# keeps the bits of the whole only if each piece but the last has whole vectors.
# Fails if torch does otherwise (on a processor without vector instructions for it, too).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 numpy
"$folder/env/bin/python" - <<'PY'
import torch

print("torch", torch.__version__, torch.backends.cpu.get_cpu_capability())
numbers = 100_003
generator = torch.Generator().manual_seed(0)
start, gradients = torch.randn(numbers, generator=generator), torch.randn(80, numbers, generator=generator)


def second_moments(piece):
    parameters = [torch.nn.Parameter(part.clone()) for part in start.split(piece)]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    for gradient in gradients:
        for parameter, part in zip(parameters, gradient.split(piece)):
            parameter.grad = part.clone()
        optimizer.step()
    return torch.cat([optimizer.state[parameter]["exp_avg_sq"] for parameter in parameters])


whole = second_moments(numbers)
for piece in (999, 992):
    differ = int((second_moments(piece) != whole).sum())
    print(f"pieces of {piece}: {differ} of {numbers} second moments differ from those of the whole")
    assert (differ > 0) == (piece == 999)
PY
