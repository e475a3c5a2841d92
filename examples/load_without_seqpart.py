"""The default job's model.safetensors, loaded and evaluated with torch alone:

python examples/load_without_seqpart.py runs/.../model.safetensors
"""

import json
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

raw = open(sys.argv[1], "rb").read()  # noqa: SIM115
start = 8 + int.from_bytes(raw[:8], "little")
entries = {name: entry for name, entry in json.loads(raw[8:start]).items() if name != "__metadata__"}
flat = torch.frombuffer(bytearray(raw[start:]), dtype=torch.float32)
w = {n: flat[e["data_offsets"][0] // 4 : e["data_offsets"][1] // 4].view(e["shape"]) for n, e in entries.items()}
last = max(int(name.split(".")[0]) for name in w)

x, y = (torch.tensor(part[4::5]) for part in load_digits(return_X_y=True))  # every fifth row is a test row
h = F.linear(x.float() / 16, w["0.1.weight"], w["0.1.bias"])
h = F.relu(F.layer_norm(h, h.shape[1:], w["0.2.weight"], w["0.2.bias"]))
for b in range(1, last):
    normed = F.layer_norm(h, h.shape[1:], w[f"{b}.norm.weight"], w[f"{b}.norm.bias"])
    h = h + F.relu(F.linear(normed, w[f"{b}.linear.weight"], w[f"{b}.linear.bias"]))
h = F.layer_norm(h, h.shape[1:], w[f"{last}.0.weight"], w[f"{last}.0.bias"])
logits = F.linear(h, w[f"{last}.1.weight"], w[f"{last}.1.bias"])
print(f"test accuracy {100 * int((logits.argmax(1) == y).sum()) / len(y):.2f} %")
