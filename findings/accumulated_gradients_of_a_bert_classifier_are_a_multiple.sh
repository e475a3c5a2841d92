#!/usr/bin/env bash
# transformers 5.24.0: with gradient_accumulation_steps=N the Trainer's loss and gradients of a BertForSequenceClassification are N
# times those of the same rows in one batch. It does not divide by N where the model's forward takes **kwargs, since such a model gets
# num_items_in_batch and is to divide by that itself; this one takes the keyword and leaves it alone: its loss is a mean over each
# part. What it logs, what max_grad_norm clips and the steps of SGD are all N times larger; Adam's are the same.
# Its issue 47688 says so too, of an earlier version.
# Fails if transformers does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 numpy transformers==5.24.0 accelerate==1.15.0
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import torch
import transformers

print("transformers", transformers.__version__)
config = transformers.BertConfig(
    vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)
rows = [
    {"input_ids": torch.arange(6) + number, "attention_mask": torch.ones(6, dtype=torch.int64), "labels": number % 2}
    for number in range(8)
]


def logged(size, steps):
    torch.manual_seed(0)
    arguments = transformers.TrainingArguments(
        output_dir="run", use_cpu=True, max_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1,
        per_device_train_batch_size=size, gradient_accumulation_steps=steps, max_grad_norm=1e9,
    )
    trainer = transformers.Trainer(transformers.BertForSequenceClassification(config), arguments, train_dataset=rows)
    trainer.train()
    logs = trainer.state.log_history[0]
    return logs["loss"], logs["grad_norm"]


loss, norm = logged(8, 1)
for steps in (1, 2, 4):
    own_loss, own_norm = logged(8 // steps, steps)
    print(f"8 rows in {steps} parts: loss {own_loss:.4f}, norm of the gradients {own_norm:.4f}")
    assert abs(own_loss - steps * loss) < 1e-4 * own_loss and abs(own_norm - steps * norm) < 1e-3 * own_norm
PY
