#!/usr/bin/env bash
# transformers 5.24.0, accelerate 1.15.0, torch 2.14.1: transformers' Trainer cannot train its own GLPNForDepthEstimation, in one process
# on a CPU. For models whose forward takes **kwargs it multiplies the loss in place by the number of processes, here 1. A loss that ends
# in an operation whose backward pass needs its own result (a square root, exp, sigmoid) is spoilt by that: backward raises
# RuntimeError, "modified by an inplace operation". A plain loop trains it, and so does the Trainer with
# average_tokens_across_devices=False. Fails if they do otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 numpy transformers==5.24.0 accelerate==1.15.0
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PY'
import accelerate
import torch
import transformers

print("transformers", transformers.__version__, "accelerate", accelerate.__version__, "torch", torch.__version__)
config = transformers.GLPNConfig(
    depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16
)
torch.manual_seed(0)
rows = [{"pixel_values": torch.randn(3, 32, 32), "labels": torch.rand(32, 32) + 0.1} for _ in range(8)]


def ends(**options):
    """Returns what one epoch of the Trainer ends in."""
    arguments = transformers.TrainingArguments(
        output_dir="run", per_device_train_batch_size=4, num_train_epochs=1, use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True, **options,
    )
    try:
        transformers.Trainer(transformers.GLPNForDepthEstimation(config), arguments, train_dataset=rows).train()
    except RuntimeError as error:
        return f"RuntimeError: {str(error).partition(': [')[0]}"
    return "trained"


model = transformers.GLPNForDepthEstimation(config)
model(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}).loss.backward()
print("plain loop: trained")
usual, without = ends(), ends(average_tokens_across_devices=False)
print(f"Trainer: {usual}\nTrainer, average_tokens_across_devices=False: {without}")
assert "modified by an inplace operation" in usual and without == "trained"
PY
