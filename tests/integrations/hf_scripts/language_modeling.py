"""The guide to causal language modelling of transformers' documentation, with little data of its own."""

import math

from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments

from transformers import Trainer  # isort: skip

from tests.integrations.hf_scripts.little import answers

eli5 = answers().train_test_split(test_size=0.2, seed=0)
tokenizer = AutoTokenizer.from_pretrained("distilbert/distilgpt2")


def preprocess_function(examples):
    return tokenizer([" ".join(x) for x in examples["answers.text"]])


tokenized_eli5 = eli5.map(preprocess_function, batched=True, remove_columns=eli5["train"].column_names)
block_size = 16


def group_texts(examples):
    concatenated_examples = {k: sum(examples[k], []) for k in examples}  # noqa: RUF017 (as the guide has it)
    total_length = len(concatenated_examples[next(iter(examples))])
    if total_length >= block_size:
        total_length = (total_length // block_size) * block_size
    result = {k: [t[i : i + block_size] for i in range(0, total_length, block_size)] for k, t in concatenated_examples.items()}
    result["labels"] = result["input_ids"].copy()
    return result


lm_dataset = tokenized_eli5.map(group_texts, batched=True)
tokenizer.pad_token = tokenizer.eos_token
data_collator = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False)
model = AutoModelForCausalLM.from_pretrained("distilbert/distilgpt2")
training_args = TrainingArguments(
    output_dir="my_awesome_eli5_clm-model",
    eval_strategy="epoch",
    learning_rate=2e-3,
    weight_decay=0.01,
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=lm_dataset["train"],
    eval_dataset=lm_dataset["test"],
    data_collator=data_collator,
    processing_class=tokenizer,
)
trainer.train()
eval_results = trainer.evaluate()
print(f"Perplexity: {math.exp(eval_results['eval_loss']):.2f}")
trainer.save_model("final")
