"""Models of torchvision, timm and transformers, looked at in a process of their own: these libraries take 150 MB and more,
which would count against the limits of other tests.

    python -m tests.library_models NAME ...     a line of JSON: {name: what is wrong, or ""}
"""

import copy
import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from seqpart import Trainer
from seqpart.capture.capture import chain_of
from seqpart.zoo.libraries import Asked, made
from tests.replay import assert_same_as_whole, images, tokens


def torchvision_model(name, **options):
    import torchvision.models as models

    return models.get_model(name, weights=None, num_classes=5, **options)


def timm_model(name):
    import timm

    return timm.create_model(name, num_classes=5)


def transformers_model(name, config, **options):
    import transformers

    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 60}
    return getattr(transformers, name)(getattr(transformers, config)(**small | options, pad_token_id=0))


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
SEEN = {"image_size": 32, "patch_size": 8}
THEIRS = {
    "resnet18": (lambda: torchvision_model("resnet18"), images),
    "mobilenet_v3_small": (lambda: torchvision_model("mobilenet_v3_small"), images),
    "convnext_atto": (lambda: timm_model("convnext_atto"), images),
    "gpt2": (lambda: transformers_model("GPT2LMHeadModel", "GPT2Config", **GPT2), tokens),
    "llama": (lambda: transformers_model("LlamaForCausalLM", "LlamaConfig", **GROUPED), tokens),
    "llama, tied": (lambda: transformers_model("LlamaForCausalLM", "LlamaConfig", **GROUPED, tie_word_embeddings=True), tokens),
    "bert": (lambda: transformers_model("BertForSequenceClassification", "BertConfig"), tokens),
    "vit": (lambda: transformers_model("ViTForImageClassification", "ViTConfig", **SEEN), images),
    "t5 encoder": (
        lambda: transformers_model("T5EncoderModel", "T5Config", d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8),
        tokens,
    ),
}
FURTHER = {
    "swin_t": (lambda: torchvision_model("swin_t"), images),
    "vit_tiny": (lambda: timm_model("vit_tiny_patch16_224"), lambda: images(224)),
    "qwen3, mixture": (
        lambda: transformers_model(
            "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **GROUPED, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
        ),
        tokens,
    ),
    "gemma2": (lambda: transformers_model("Gemma2ForCausalLM", "Gemma2Config", **GROUPED), tokens),
    "mamba": (lambda: transformers_model("MambaForCausalLM", "MambaConfig", state_size=4), tokens),
    "deberta": (lambda: transformers_model("DebertaV2ForSequenceClassification", "DebertaV2Config"), tokens),
}


def same_as_whole(name):
    torch.manual_seed(0)
    make, rows = {**THEIRS, **FURTHER}[name]
    assert_same_as_whole(make(), rows())


def layers_alike():
    model = transformers_model("LlamaForCausalLM", "LlamaConfig", **GROUPED | {"num_hidden_layers": 6})
    chain = chain_of(model, (12,), torch.int64)
    assert len({block.same_as for block in chain}) == len(chain) - 4, "the first takes them in another order"
    assert len({block.name for block in chain}) == len(chain)


def left_as_it_is():
    model = transformers_model("LlamaForCausalLM", "LlamaConfig", **GROUPED)
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    chain_of(model, (12,), torch.int64)
    assert model.config.use_cache
    assert all(model.state_dict(keep_vars=True)[name] is tensor for name, (tensor, _) in before.items())
    assert all(torch.equal(tensor, value) for tensor, value in before.values())


def from_directory(model, folder, **options):
    """Trained from the files of a directory, without existing whole, it is what it is from memory; and it is written as
    from_pretrained reads it, with what lay beside it, and then makes text."""
    import transformers

    model.save_pretrained(folder / "given", **options)
    (folder / "given" / "tokenizer.json").write_text("{}")
    found = made("hf", str(folder / "given"), Asked(classes=1, shape=(12,), seed=0))
    assert found.weights is not None and all(parameter.is_meta for parameter in found.model.parameters())
    whole = type(model).from_pretrained(folder / "given")
    assert next(whole.parameters()).dtype == next(found.model.parameters()).dtype
    rows = tokens(), tokens()
    results = [
        Trainer(
            model, mem_limit="4GB", method="streamed", partitions=3, batch_size=4, epochs=1, output_dir=folder / name,
            weights=weights, weights_partial=found.partial and weights is not None, quiet=True,
        ).fit(rows, rows)
        for name, model, weights in (("1", whole, None), ("2", found.model, found.weights))
    ]  # fmt: skip
    one, other = (result.state_dict() for result in results)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    results[1].save_pretrained(folder / "out")
    assert (folder / "out" / "tokenizer.json").is_file()
    read, said = type(model).from_pretrained(folder / "out", output_loading_info=True)
    assert not any(said.values()), said
    assert isinstance(read, transformers.PreTrainedModel) and read.dtype == whole.dtype
    assert all(torch.equal(tensor, one[name]) for name, tensor in read.state_dict().items())
    assert read.generate(torch.tensor([[1, 3, 4]]), max_new_tokens=4, do_sample=False).shape[1] > 3


def shards_of_bfloat16():
    torch.manual_seed(0)
    model = transformers_model("LlamaForCausalLM", "LlamaConfig", **GROUPED, tie_word_embeddings=True, dtype="bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        from_directory(model.bfloat16(), Path(folder), max_shard_size="20KB")


def without_its_head():
    """As GPT-2 is published: names without `transformer.`, and no head, which is tied."""
    torch.manual_seed(0)
    model = transformers_model("GPT2LMHeadModel", "GPT2Config", **GPT2)
    with tempfile.TemporaryDirectory() as folder:
        model.transformer.save_pretrained(Path(folder) / "base")
        model.config.save_pretrained(Path(folder) / "base")
        found = made("hf", str(Path(folder) / "base"), Asked(classes=1, shape=(12,), seed=0))
        assert found.weights is not None and not found.partial
        from_directory(model, Path(folder))


def several_inputs(model, x, y, partitions=3):
    """A run in partitions against a plain loop."""
    whole = copy.deepcopy(model)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            model, mem_limit="3GB", method="streamed", partitions=partitions, batch_size=8, epochs=1, shuffle=False, lr=1e-2,
            quiet=True, output_dir=Path(folder) / "run",
        ).fit((x, y), (x, y))  # fmt: skip
    whole.config.use_cache = False
    optimizer = torch.optim.Adam(whole.train().parameters(), lr=1e-2, fused=True)
    for rows in torch.arange(len(y)).split(8):
        optimizer.zero_grad()
        output = whole(**{name: part[rows] for name, part in x.items()}).logits
        torch.nn.functional.cross_entropy(output.flatten(0, -2), y[rows].flatten()).backward()
        optimizer.step()
    one, other = model.state_dict(), whole.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in other)


def bert_with_its_mask():
    torch.manual_seed(0)
    model = transformers_model(
        "BertForSequenceClassification", "BertConfig", num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    mask = torch.ones(22, 9, dtype=torch.int64)
    mask[::2, 6:] = 0
    x = {"input_ids": torch.randint(60, (22, 9)), "attention_mask": mask, "token_type_ids": torch.randint(2, (22, 9))}
    several_inputs(model, x, torch.arange(22) % 3)


T5 = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "d_kv": 8, "dropout_rate": 0.0}


def encoder_and_decoder():
    torch.manual_seed(0)
    model = transformers_model("T5ForConditionalGeneration", "T5Config", **T5)
    x = {"input_ids": torch.randint(1, 60, (22, 9)), "decoder_input_ids": torch.randint(60, (22, 7))}
    several_inputs(model, x, torch.randint(60, (22, 7)))


def marks_in_rows():
    """Its head takes the state at the end of the sentence, which each row must have."""
    torch.manual_seed(0)
    model = transformers_model(
        "T5ForSequenceClassification", "T5Config", **T5, classifier_dropout=0.0, num_labels=3, decoder_start_token_id=0
    )
    words = torch.randint(2, 60, (22, 9))
    words[:, -2] = model.config.eos_token_id
    several_inputs(model, {"input_ids": words, "attention_mask": torch.ones_like(words)}, torch.arange(22) % 3, partitions=1)


OTHERS = {
    "bert with its mask": bert_with_its_mask, "encoder and decoder": encoder_and_decoder,
    "layers alike": layers_alike, "left as it is": left_as_it_is, "shards of bfloat16": shards_of_bfloat16,
    "without its head": without_its_head, "marks in rows": marks_in_rows,
}  # fmt: skip


def main(names):
    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        try:
            OTHERS[name]() if name in OTHERS else same_as_whole(name)
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
