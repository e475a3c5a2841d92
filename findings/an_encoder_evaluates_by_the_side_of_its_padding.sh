#!/usr/bin/env bash
# torch 2.14.1: an nn.TransformerEncoder (batch_first, an even number of heads: its defaults otherwise) in evaluation mode sets
# its outputs at padding to 0 if nobody wants gradients and padding is last in all rows of the batch. With gradients, or with
# one row that is padded in front, it does not. So of one model in one mode, means over positions, and losses that count
# padding, depend on torch.no_grad() and on the other rows of the batch; outputs at words are equal, up to rounding.
# enable_nested_tensor=False is the cure. Fails if torch does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 numpy
"$folder/env/bin/python" -W ignore - <<'PY'
import torch
from torch import nn

print("torch", torch.__version__)
torch.manual_seed(0)
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
rows, padding = torch.randn(2, 6, 8), torch.zeros(2, 6, dtype=torch.bool)
padding[0, 4:] = True  # the first row is padded at its end
in_front = padding.clone()
in_front[1, 0] = True  # and the second one in front

with_gradients = encoder(rows, src_key_padding_mask=padding).detach()
with torch.no_grad():
    without = encoder(rows, src_key_padding_mask=padding)
    beside_another = encoder(rows, src_key_padding_mask=in_front)
found = {
    "gradients": with_gradients[0, 4:].abs().max().item(),
    "no gradients": without[0, 4:].abs().max().item(),
    "no gradients, the other row is padded in front": beside_another[0, 4:].abs().max().item(),
}
print("largest output at the first row's padding:", found)
assert torch.allclose(with_gradients[0, :4], without[0, :4], atol=1e-5)
assert [value > 0.1 for value in found.values()] == [True, False, True] and found["no gradients"] == 0
PY
