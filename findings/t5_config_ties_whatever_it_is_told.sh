#!/usr/bin/env bash
# transformers 5.24.0: T5Config, MT5Config and UMT5Config take tie_word_embeddings=False and have True then, without a word. So a T5 v1.1
# or flan-T5 that is made from its configuration has one tensor for the embedding and the head, where these models have two; and a
# checkpoint with two different tensors is loaded untied by from_pretrained, which compares their values, with the advice to set
# tie_word_embeddings=False, which cannot be followed. Who ties by the configuration alone loses one of the two tensors.
# Fails if transformers does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 transformers==5.24.0 safetensors==0.8.0 numpy
FOLDER="$folder" "$folder/env/bin/python" - <<'PY'
import os

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import MT5Config, T5Config, T5ForConditionalGeneration, UMT5Config

print("transformers", transformers.__version__)
shape = dict(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
for kind in (T5Config, MT5Config, UMT5Config):
    found = kind(**shape, tie_word_embeddings=False).tie_word_embeddings
    print(f"{kind.__name__}(tie_word_embeddings=False).tie_word_embeddings is {found}")
    assert found is True

made = T5ForConditionalGeneration(T5Config(**shape, tie_word_embeddings=False))
print("made from it, head and embedding are one tensor:", made.lm_head.weight is made.shared.weight)
assert made.lm_head.weight is made.shared.weight

place = os.path.join(os.environ["FOLDER"], "model")
made.save_pretrained(place)
tensors = load_file(f"{place}/model.safetensors")
tensors["lm_head.weight"] = torch.randn(64, 16)
save_file(tensors, f"{place}/model.safetensors", metadata={"format": "pt"})
loaded = T5ForConditionalGeneration.from_pretrained(place)
print("loaded with two different tensors, they are one:", loaded.lm_head.weight is loaded.shared.weight)
print("and its configuration says tied:", loaded.config.tie_word_embeddings)
assert loaded.lm_head.weight is not loaded.shared.weight and loaded.config.tie_word_embeddings is True
PY
