#!/usr/bin/env bash
# transformers 5.24.0, peft 0.21.2, accelerate 1.15.0, torch 2.14.1: with peft's prompt tuning, transformers' Trainer divides the loss of a causal
# language model by fewer labels than it sums. peft puts virtual tokens before each row, so that its first token is predicted too; the
# Trainer counts the labels without each row's first, which nothing predicts in the model itself. For rows of L tokens the loss that it
# trains and logs, and the gradients, are L / (L - 1) times the mean: 1.5 times for 3 tokens. It is the mean without prompt tuning.
# Fails if they do otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 numpy transformers==5.24.0 accelerate==1.15.0 peft==0.21.2
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PY'
import accelerate
import peft
import torch
import transformers

print("transformers", transformers.__version__, "peft", peft.__version__, "accelerate", accelerate.__version__)
config = transformers.LlamaConfig(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
)
prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)


def losses(length, tuned):
    """Returns the mean loss over a batch's predicted labels, by the model alone, and what the Trainer logs for that batch."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    if tuned:
        model = peft.get_peft_model(model, prompt)
    tokens = torch.randint(5, 40, (8, length))
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in tokens]
    with torch.no_grad():
        alone = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss.item()
    arguments = transformers.TrainingArguments(
        output_dir="run", per_device_train_batch_size=8, max_steps=1, logging_steps=1, learning_rate=0.0, use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True, logging_strategy="steps",
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    return alone, next(logs["loss"] for logs in trainer.state.log_history if "loss" in logs)


for length in (3, 6, 12):
    for tuned in (False, True):
        alone, logged = losses(length, tuned)
        expected = length / (length - 1) if tuned else 1.0
        what = "prompt tuning" if tuned else "the model itself"
        print(f"{length} tokens, {what}: mean loss {alone:.4f}, logged {logged:.4f}: {logged / alone:.4f} x, expected {expected:.4f}")
        assert abs(logged / alone - expected) < 1e-3
PY
