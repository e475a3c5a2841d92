#!/usr/bin/env bash
# torch 2.14.1: torch.nn.utils.clip_grad_norm_ over parameters of several dtypes adds their norms up group by group, and the groups
# come in the order of a C++ hash table: not that of the parameters, and not of first appearance. Behind float32, parameters of
# float64 and bfloat16 come as float64, bfloat16, float32 whichever of the two is first. So the total norm has other last bits than
# the norm of all norms in the order of the parameters, and a loop that gathers norms one by one has to ask for the order.
# Fails if torch does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 numpy
"$folder/env/bin/python" - <<'PY'
import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

print("torch", torch.__version__)


def order(*names):
    tensors = [torch.empty(1, dtype=getattr(torch, name)) for name in names]
    return [str(dtype).removeprefix("torch.") for _, dtype in _group_tensors_by_device_and_dtype([tensors])]


for names in (("float32", "float64", "bfloat16"), ("float32", "bfloat16", "float64")):
    print(names, "come as", order(*names))
    assert order(*names) == ["float64", "bfloat16", "float32"]

differ = 0
for seed in range(100):
    torch.manual_seed(seed)
    gradients = [torch.randn(50, dtype=(torch.float32, torch.float64)[place % 2]) for place in range(6)]
    norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
    differ += not torch.equal(torch.linalg.vector_norm(norms), torch.nn.utils.get_total_norm(gradients))
print(f"of 100 total norms {differ} differ from the norm of the norms in the order of the parameters")
assert 0 < differ < 100
PY
