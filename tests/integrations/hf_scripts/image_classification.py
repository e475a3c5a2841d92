"""The guide to image classification of transformers' documentation, with little data of its own."""

import numpy as np
from torchvision.transforms import Compose, Normalize, RandomResizedCrop, Resize, ToTensor
from transformers import AutoModelForImageClassification, DefaultDataCollator, TrainingArguments, ViTImageProcessor

from transformers import Trainer  # isort: skip

from tests.integrations.hf_scripts.little import pictures

food = pictures().train_test_split(test_size=0.2, seed=0)
labels = food["train"].features["label"].names
label2id = {label: str(i) for i, label in enumerate(labels)}
id2label = {str(i): label for i, label in enumerate(labels)}
checkpoint = "google/vit-base-patch16-224-in21k"
image_processor = ViTImageProcessor.from_pretrained(checkpoint)
normalize = Normalize(mean=image_processor.image_mean, std=image_processor.image_std)
size = (image_processor.size["height"], image_processor.size["width"])
crop, whole = RandomResizedCrop(size), Resize(size)
_transforms = Compose([crop, ToTensor(), normalize])


def transforms(examples):
    examples["pixel_values"] = [_transforms(img.convert("RGB")) for img in examples["image"]]
    del examples["image"]
    return examples


food = food.with_transform(transforms)
data_collator = DefaultDataCollator()


def compute_metrics(eval_pred):
    predictions, labels = eval_pred
    predictions = np.argmax(predictions, axis=1)
    return {"accuracy": (predictions == labels).mean()}


model = AutoModelForImageClassification.from_pretrained(
    checkpoint, num_labels=len(labels), id2label=id2label, label2id=label2id
)
training_args = TrainingArguments(
    output_dir="my_awesome_food_model",
    remove_unused_columns=False,
    eval_strategy="epoch",
    save_strategy="epoch",
    learning_rate=5e-4,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    per_device_eval_batch_size=16,
    num_train_epochs=3,
    warmup_steps=0.1,
    logging_steps=1,
    load_best_model_at_end=True,
    metric_for_best_model="accuracy",
)
trainer = Trainer(
    model=model,
    args=training_args,
    data_collator=data_collator,
    train_dataset=food["train"],
    eval_dataset=food["test"],
    processing_class=image_processor,
    compute_metrics=compute_metrics,
)
trainer.train()
trainer.save_model("final")
