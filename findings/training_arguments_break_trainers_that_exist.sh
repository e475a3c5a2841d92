#!/usr/bin/env bash
# transformers 5.24.0, accelerate 1.15.0: making a TrainingArguments resets accelerate's state of the process, which Trainers that
# exist look at in train(). One that was made before, by itself in order, then fails with AttributeError: `AcceleratorState` object
# has no attribute `distributed_type`. So the arguments of a second Trainer have to be made before the first Trainer, or be given
# accelerator_config={"use_configured_state": True}. (Its issue 40376 tells of the same reset.)
# Fails if transformers does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 numpy transformers==5.24.0 accelerate==1.15.0
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import accelerate
import torch
import transformers

print("transformers", transformers.__version__, "accelerate", accelerate.__version__)
config = transformers.BertConfig(
    vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
)
rows = [{"input_ids": torch.tensor([1, 2, 3]), "labels": 0}] * 4


def arguments(**more):
    return transformers.TrainingArguments(
        output_dir="run", use_cpu=True, max_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, **more
    )


def trains(between):
    model = transformers.BertForSequenceClassification(config)
    trainer = transformers.Trainer(model, arguments(), train_dataset=rows)
    between()
    try:
        trainer.train()
    except AttributeError as error:
        return str(error).partition(".")[0]
    return "it trained"


found = {
    "nothing in between": trains(lambda: None),
    "other arguments in between": trains(arguments),
    "with use_configured_state": trains(lambda: arguments(accelerator_config={"use_configured_state": True})),
}
for what, how in found.items():
    print(f"{what}: {how}")
assert found["nothing in between"] == found["with use_configured_state"] == "it trained"
assert found["other arguments in between"] == "`AcceleratorState` object has no attribute `distributed_type`"
PY
