"""What the guides take from the network: models, tokenizers and data, here little ones that are made on the spot."""

import datasets
import numpy as np
import PIL.Image
import tokenizers
import torch
import transformers

WORDS = "good bad film plot dull fine never ever again star light far near wave cold warm".split()  # noqa: SIM905


def reviews():
    """Some with 2 words and others with 9; the first word says whether the review is a good one."""
    generator = np.random.default_rng(0)

    def some(count):
        labels = generator.integers(0, 2, count)
        texts = [" ".join([WORDS[1 - label], *generator.choice(WORDS[2:], generator.integers(1, 9))]) for label in labels]
        return datasets.Dataset.from_dict({"label": labels, "text": texts})

    return datasets.DatasetDict(train=some(50), test=some(20))


def answers():
    generator = np.random.default_rng(1)
    texts = [[" ".join(generator.choice(WORDS, 12)) for _ in range(2)] for _ in range(40)]
    return datasets.Dataset.from_dict({"answers.text": texts, "title": ["?"] * len(texts)})


def pictures():
    generator = np.random.default_rng(2)
    labels = generator.integers(0, 3, 40)
    images = [PIL.Image.fromarray(generator.integers(0, 60, (20, 20, 3), np.uint8) + np.uint8(60 * label)) for label in labels]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["pie", "soup", "tart"])})
    return datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)


def make_checkpoints(folder):
    """Directories under the names that the scripts ask the hub for. No dropout: its draws differ between two trainers."""
    torch.manual_seed(0)
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    bert = transformers.DistilBertConfig(
        vocab_size=32, dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=32, dropout=0.0,
        attention_dropout=0.0, seq_classif_dropout=0.0,
    )  # fmt: skip
    place = folder / "distilbert" / "distilbert-base-uncased"
    transformers.DistilBertModel(bert).save_pretrained(place)
    _tokenizer(special, [*special.values(), *WORDS]).save_pretrained(place)
    gpt = transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    place = folder / "distilbert" / "distilgpt2"
    transformers.GPT2LMHeadModel(gpt).save_pretrained(place)
    end = {"eos_token": "<end>", "unk_token": "<end>"}
    _tokenizer(end, ["<end>", *WORDS]).save_pretrained(place)
    llama = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    transformers.LlamaForCausalLM(llama).save_pretrained(folder / "little" / "llama")
    vit = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    place = folder / "google" / "vit-base-patch16-224-in21k"
    transformers.ViTModel(vit).save_pretrained(place)
    transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(place)


def _tokenizer(special, words):
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, unk_token=special["unk_token"])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)
