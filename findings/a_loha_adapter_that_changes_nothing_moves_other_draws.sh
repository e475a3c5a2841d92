#!/usr/bin/env bash
# peft 0.21.2 with torch 2.14.1: in training each layer with a LoHa or LoKr adapter draws a random number in its forward pass,
# also where module_dropout is 0 and no number can leave the adapter out. So a fresh adapter, which adds exactly 0, changes the
# masks of all dropout behind it: with one seed a model has other outputs with the adapter than without, and evaluation has the
# same. LoRA, OFT and BOFT draw nothing. What repeats a forward pass (activation checkpointing without the state of the
# generator, a second run from the middle) must count these draws; and code that decides by them cannot be traced as if it did
# not. Fails if peft does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 peft==0.21.2 numpy
"$folder/env/bin/python" -W ignore - <<'PY'
import copy

import peft
import torch
from torch import nn

print("peft", peft.__version__, "torch", torch.__version__)
torch.manual_seed(0)
plain, rows = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.randn(4, 8)


def outputs(model, training):
    model.train(training)
    torch.manual_seed(1)
    return model(rows)


found = {}
for name, config in {
    "LoRA": peft.LoraConfig(r=2, target_modules=["0"]),
    "LoHa": peft.LoHaConfig(r=2, target_modules=["0"], module_dropout=0.0),
    "LoKr": peft.LoKrConfig(r=2, target_modules=["0"], module_dropout=0.0),
    "OFT": peft.OFTConfig(r=0, oft_block_size=4, target_modules=["0"]),
    "BOFT": peft.BOFTConfig(boft_block_size=4, target_modules=["0"]),
}.items():
    adapted = peft.get_peft_model(copy.deepcopy(plain), config)
    found[name] = [torch.allclose(outputs(adapted, mode), outputs(plain, mode), atol=1e-6) for mode in (True, False)]
    print(f"{name}: the outputs of the model without it in training {found[name][0]}, in evaluation {found[name][1]}")
assert found == {name: [name not in ("LoHa", "LoKr"), True] for name in found}
PY
