"""Which models of the libraries come in? One of each kind, small and whole, streamed and compared with a plain loop.

    python -m benchmarks.census models --library timm              those not yet tried
    python -m benchmarks.census models --library timm --only NAME  this one once more
    python -m benchmarks.census page                               the table in docs/models.md
    python -m benchmarks.census page --quick                       of a model of torchvision, to see that it runs; not kept

Every outcome is a line of benchmarks/results/census-models.jsonl; the last of a name counts. Each model has a process of its
own with a limit of time and memory: two updates of SGD in a loop that anyone would write, then the same in three partitions,
and the same once more in a process that is killed after the first update and in another that goes on.
What is tried of each library says the page. All is made small by rule, and dropout is off. benchmarks.models tries fewer
models, and more of each.
"""

import argparse
import collections
import contextlib
import copy
import importlib
import inspect
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby, product
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import children, quick, record
from benchmarks.models import CENSUS, PAGE, Rows, made, output_of, plain, returned, some, streamed, the_one, trained
from benchmarks.record import origin
from benchmarks.whole_models import CLASSES, LENGTH, WORDS, Example, everything, judged
from seqpart.errors import SeqpartError

BATCH, ROWS, SECONDS, MEMORY, LARGEST = 2, 4, 60, 8 << 30, 150_000_000
KNOWN, MOST = "census-models.jsonl", 60
FURTHER = "transformers, further heads"
LIBRARIES = (
    "timm", "transformers", "torchvision", FURTHER, "diffusers", "segmentation_models_pytorch", "monai", "open_clip",
    "torchaudio",
)  # fmt: skip
IMPORTED = ("torch._dynamo", "torchao.optim", "torchvision.datasets", "transformers.modeling_utils", "scipy.optimize")
"""What each process would import for itself, for seconds, where it is installed."""
HEADS = (
    "CAUSAL_LM", "SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "MASKED_LM", "TOKEN_CLASSIFICATION",
    "SEQ_TO_SEQ_CAUSAL_LM", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION", "SEMANTIC_SEGMENTATION",
)  # fmt: skip
SMALL: tuple[tuple[str, Any], ...] = (
    (r".*(token_id|token_index)", lambda value: value if isinstance(value, list) or value < WORDS else 1),
    (r"(unpadded_)?vocab_size.*", 99),
    (r"hidden_size|d_model|n_embd|dim|emb_dim|embedding_size|embedding_dim|decoder_hidden_size", 32),
    (r"(shared_|.*moe_|.*experts?_)?intermediate_size(_mlp)?|(.*_)?ffn_dim|d_ff|dff|dim_ff|ffn_hidden_size|d_inner", 64),
    (r"((num_)?(hidden_|encoder_|decoder_)?|n_)layers?|num_blocks|depth", 2),
    (r"(num_|encoder_|decoder_)attention_heads|n_heads?|num_heads", 4),
    (r"num_key_value_heads|num_kv_heads", 2),
    (r"mamba_n_heads|mamba_d_head", 8),
    (r"head_dim|v_head_dim|d_kv|d_head|dim_head|(linear|swa)_.*head_dim", 8),
    (r"qk_(rope|nope)_head_dim|rotary_dim", 8),
    (r"q_lora_rank|kv_lora_rank|.*state_size|mamba_d_state", 8),
    (r"(n|num)_(local_|routed_)?experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k", 2),
    (r"n_group|topk_group|num_expert_group|num_dense_layers|first_k_dense_replace", 1),
    (r"max_.*positions?(_embeddings)?|n_positions|n_ctx|max_seq_len", 64),
    (r"sliding_window|.*chunk_size", 8),
    (r"image_size", 64),
    (r"patch_size", lambda value: value if isinstance(value, list) else min(value, 8)),
    (r"depths|layer_depths", lambda value: [1] * len(value)),
)
"""What the numbers of transformers' configurations become, by their names."""


def _each(small: int) -> Callable[[Any], Any]:
    return lambda value: [small] * len(value) if isinstance(value, list) else small


SMALLER: tuple[tuple[str, Any], ...] = (
    (r".*out_channels|channels|features|.*filters", lambda value: [32] * len(value) if isinstance(value, list) else value or 4),
    (r".*layers_per_block", _each(1)),
    (r"(.*_)?n?(layers|blocks|depth)s?|.*_layers_.*", _each(2)),
    (r"(.*_)?n?(heads|kv_heads)", _each(2)),
    (r"(.*_)?(attention|text|embed|caption|cap_feat|context_in|(?<!caption_)projection)(_hidden)?_(dim|channels|size)", 32),
    (r"sample_(size|height|width)", 16),
    (r"sample_frames", 5),
    (r"max_text_seq_length", 8),
    (r".*(ffn|ff|feed_forward|intermediate)_(dim|size)", 64),
    (r"in_channels|.*_channels", lambda value: value or 4),
    (r"spatial_dims|dimensions", 2),
    (r"num_channel.*|hidden_size", lambda value: value or 8),
    (r"((num|n)_)?class(es)?|(num|n)_features?", lambda value: min(value, 5) or 5),
)
"""What those of the classes of diffusers and MONAI become: the first of these that fits, from 0 where none is given."""
SET = ("head_dim", "vocab_size", "num_key_value_heads", "num_experts_per_tok")
"""Numbers that a configuration may leave open and its model then needs."""
OWN: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"is_decoder": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "xmod": {"default_language": "en_XX"},
    "swin": {"window_size": 2},
    "donut-swin": {"window_size": 2},
    "fsmt": {"use_cache": False},  # with a cache it masks nothing
}
"""What a kind of configuration asks for beside its numbers' names."""


ABOUT = """\
Two updates of SGD in three partitions against a plain loop on another copy, dropout off, one thread: are all weights and
buffers the same, bit for bit? {versions}.
Of timm and torchvision the smallest model of each module, of transformers each kind of configuration with its first head and
then with others, of diffusers and MONAI each class, of open_clip what differs in more than numbers, of
segmentation_models_pytorch each architecture with a few encoders, of torchaudio those that take no labels; all made small, by
rules for the names of numbers. Where no image was found that fits, a model of texts and images has texts alone. One that
returns several tensors has a loss of all. *refused*: seqpart says why, below. *no plain*: a plain loop does not train it
either. *skipped*: the rule made no model of it that runs, or none that is small."""
Choice = tuple[Callable[[], nn.Module], Rows]
"""A way to make a model, and rows that it may take."""


def shrunk(kind: Any, **more: Any) -> Any:
    """A configuration of that class, small, without dropout or random masks."""
    return kind(**{**_smaller(kind().to_dict()), "pad_token_id": 0, "num_labels": CLASSES, **more})


def _smaller(values: dict[str, Any], rules: tuple[tuple[str, Any], ...] = SMALL) -> dict[str, Any]:
    """The numbers of a configuration that change, and those of its parts."""
    changed: dict[str, Any] = {}
    for key, value in values.items():
        if value is None and key in SET:
            value = 0
        if isinstance(value, dict) and "model_type" in value:
            changed[key] = {"model_type": value["model_type"], **_smaller(value)}
        elif isinstance(value, float) and ("drop" in key or key.startswith("mask_")):
            changed[key] = 0.0
        elif isinstance(value, list) and "drop" in key:
            changed[key] = [0.0] * len(value)
        elif isinstance(value, int | list) and not isinstance(value, bool):
            for pattern, small in rules:
                if re.fullmatch(pattern, key) and isinstance(value, list) <= callable(small):
                    changed[key] = small(value) if callable(small) else small
                    break
    if "num_key_value_heads" in values and values["num_key_value_heads"] == values.get("num_attention_heads"):
        changed["num_key_value_heads"] = changed.get("num_attention_heads", 4)
    return changed


def of_transformers(name: str) -> tuple[list[Choice], str]:
    import transformers

    kind_of_config, _, head = name.partition(" ")
    config = shrunk(transformers.CONFIG_MAPPING[kind_of_config], **OWN.get(kind_of_config, {}))
    if getattr(config, "is_encoder_decoder", False):
        config.decoder_start_token_id = 0
    kind = getattr(transformers, head or next(one for known, one in _heads() if known == kind_of_config))
    takes, main = inspect.signature(kind.forward).parameters, kind.main_input_name
    words = torch.randint(3, WORDS, (ROWS, LENGTH))
    words[:, -1] = config.eos_token_id if isinstance(getattr(config, "eos_token_id", None), int) else 1
    if "MultipleChoice" in kind.__name__:
        words = words[:, None].repeat(1, 2, 1)
    if "QuestionAnswering" in kind.__name__:
        config.num_labels = 2
    more: dict[str, list[torch.Tensor]] = {
        "decoder_input_ids": [words.flip(1)],
        "bbox": [torch.arange(4).repeat(*words.shape, 1)],
    }
    own = getattr(config, "image_size", getattr(getattr(config, "vision_config", None), "image_size", 64))
    sides = dict.fromkeys(one for one in (own, 64, 224) if isinstance(one, int))
    if main.startswith("pixel_values"):
        shape = (config.num_frames,) if "Video" in kind.__name__ else ()
        channels = getattr(config, "num_channels", 3)
        mains = [torch.randn(ROWS, *shape, channels, side, side) for side in sides]
        mains += [torch.randn(ROWS, 8, channels, 64, 64)] if "ideo" in main + kind.__name__ else []
    elif main == "input_values":
        mains = [torch.randn(ROWS, 4000), torch.randn(ROWS, 1024, 128)]
    elif main == "input_features":
        bins = getattr(config, "num_mel_bins", 80)
        mains = [torch.randn(ROWS, bins, 2 * getattr(config, "max_source_positions", 64)), torch.randn(ROWS, 64, bins)]
    else:
        mains = [words]
        more["pixel_values"] = [torch.randn(ROWS, 3, side, side) for side in sides]
    more = {key: tensors for key, tensors in more.items() if key in takes}
    beside = [dict(zip(more, few, strict=True)) for few in product(*more.values()) if more]
    rows: list[Rows] = [{main: one, **others} for one, others in product(mains, beside)]
    rows += mains
    return list(product([lambda: kind(copy.deepcopy(config))], rows)), kind.__name__


def _heads(of: Iterable[str] = HEADS) -> Iterator[tuple[str, str]]:
    """Kinds of configurations and their models of those heads."""
    found = importlib.import_module("transformers.models.auto.modeling_auto")
    for head in of:
        for kind, models in getattr(found, f"MODEL_FOR_{head}_MAPPING_NAMES" if head else "MODEL_MAPPING_NAMES").items():
            for model in (models,) if isinstance(models, str) else models:
                yield kind, model


def _further_heads() -> list[str]:
    """Those of configurations that have none of HEADS, and then one more of each in turn."""
    found = vars(importlib.import_module("transformers.models.auto.modeling_auto"))
    every = [match[1] or "" for one in found if (match := re.fullmatch("MODEL_(?:FOR_(.*)_)?MAPPING_NAMES", one))]
    first, turns, by_model = dict(reversed(list(_heads()))), collections.Counter[str](), dict[str, str]()
    for kind, model in _heads(every):
        by_model.setdefault(model, kind)
    wanted = []
    for model, kind in by_model.items():
        if first.get(kind) != model:
            turns[kind] += 1
            wanted.append((kind in first, turns[kind], f"{kind} {model}"))
    return [name for *_, name in sorted(wanted)]


def of_timm(name: str) -> tuple[list[Choice], str]:
    import timm

    sizes = {}
    for model in timm.list_models(module=name):
        with contextlib.suppress(Exception), torch.device("meta"):
            sizes[model] = sum(one.numel() for one in timm.create_model(model).parameters())
    smallest = min((one for one in sizes if not one.startswith("test_")), key=lambda one: sizes[one])
    channels, side, _ = timm.get_pretrained_cfg(smallest).input_size
    ways: list[tuple[dict[str, int], int]] = [
        ({"img_size": 64, "depth": 4}, 64), ({"img_size": 64}, 64), ({}, 64), ({}, 128), ({}, side),
    ]  # fmt: skip

    def made_by(options: dict[str, int]) -> nn.Module:
        model: nn.Module = timm.create_model(smallest, num_classes=CLASSES, **options)
        for part in model.modules():
            if isinstance(getattr(part, "drop_rate", None), float):
                part.drop_rate = 0.0  # type: ignore[assignment]  # for nn.functional.dropout
        return model

    return [(partial(made_by, options), torch.randn(ROWS, channels, one, one)) for options, one in ways], smallest


def of_torchvision(name: str) -> tuple[list[Choice], str]:
    import torchvision.models as models

    rows: list[Rows] = [torch.randn(ROWS, 3, 64, 64), torch.randn(ROWS, 3, 224, 224)]
    options: dict[str, Any] = {"num_classes": CLASSES}
    if name.startswith("raft"):
        rows, options = [{key: torch.randn(ROWS, 3, 128, 128) for key in ("image1", "image2")}], {}
    if models.get_model_builder(name).__module__.startswith("torchvision.models.video"):
        rows = [torch.randn(ROWS, 3, 8, 64, 64), torch.randn(ROWS, 3, 16, 224, 224)]
    if "segmentation" in models.get_model_builder(name).__module__:
        options["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):
        options |= {"aux_logits": False, "init_weights": True}
        rows = [torch.randn(ROWS, 3, 96, 96)]
    return [(partial(models.get_model, name, weights=None, **options), x) for x in rows], name


OFTEN = r"encoder_hidden_states|timesteps?|pooled.*|.*_ids"
"""Inputs that models need though they may be left out."""
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def of_diffusers(name: str) -> tuple[list[Choice], str]:
    kind = getattr(importlib.import_module("diffusers"), name)
    options = _numbers(kind)
    if {"caption_channels", "num_attention_heads", "attention_head_dim"} <= {key for key, value in options.items() if value}:
        options["cross_attention_dim"] = options["num_attention_heads"] * options["attention_head_dim"]
    c = next(value for key in ("in_channels", "latent_channels", "") if isinstance(value := options.get(key, 3), int))
    shapes = [(c, 32, 32), (c, 5, 16, 16), (5, c, 16, 16), (c, 16, 16), (16, c), (c, 4096)]
    every = [
        partial(kind, **made_with) for made_with in (options, options | _smaller(dict.fromkeys(_open(options), 0), SMALLER))
    ]
    return _taking(kind, every, shapes, options), name


def of_monai(name: str) -> tuple[list[Choice], str]:
    kind = getattr(importlib.import_module("monai.networks.nets"), name)
    options = _numbers(kind)
    c = options["in_channels"] if isinstance(options.get("in_channels"), int) else 4
    asked = [key for key in ("img_size", "image_size", "in_shape", "input_size") if key in options]
    every = [
        partial(kind, **options | dict.fromkeys(asked, size))
        for size in (([32, 32], 32, [c, 32, 32], [64, 64], 64) if asked else ([],))
    ]
    return _taking(kind, every, [(c, 32, 32), (c, 64, 64), (c, 96, 96), (c, 256, 256), (c,)], options), name


def _taking(
    kind: type, every: Iterable[Callable[[], nn.Module]], shapes: Iterable[tuple[int, ...]], options: Any
) -> list[Choice]:
    """Those ways to make a model with rows of those shapes for what its forward takes first, and what else it needs by name."""
    main, *takes = list(inspect.signature(kind.forward).parameters.values())[1:]
    axes = len(next((value for key, value in options.items() if "rope" in key and isinstance(value, list)), (0, 0, 0)))
    inputs = {
        r".*timesteps?(_r)?|t|sigma": torch.randint(1000, (ROWS,)),
        r"pooled.*": torch.randn(ROWS, 32),
        r"(.*encoder|.*text).*|cap_feats": torch.randn(ROWS, 8, 32),
        r".*mask": torch.ones(ROWS, 8),
        r"class_labels": torch.randint(5, (ROWS,)),
        r"guidance|fps|scale": torch.ones(ROWS),
        r"lengths": torch.full((ROWS,), 16),
        r"txt_ids": torch.zeros(ROWS, 8, axes),
        r"img_ids": torch.arange(16.0)[:, None].repeat(ROWS, 1, axes),
        r"original_size|target_size|crop_coords": torch.full((ROWS, 2), 16.0),
        r"controlnet_cond": torch.randn(ROWS, 3, 128, 128),
        r"seg": torch.randn(ROWS, 4, 32, 32),
    }
    needed = [one.name for one in takes if one.default is one.empty]
    likely = [one.name for one in takes if one.default is None and re.fullmatch(OFTEN, one.name)]
    if options.get("guidance_embeds"):
        likely.append("guidance")
    found = {one.name: x for one in takes for rule, x in inputs.items() if re.fullmatch(rule, one.name)}
    rows: list[Rows] = []
    for shape, more, time_type in product(shapes, (likely, [*likely, "class_labels"], []), (torch.int64, torch.float32)):
        beside = {key: found[key] for key in (*needed, *more) if key in found}
        beside = {key: x.to(time_type) if x.dtype == torch.int64 and "time" in key else x for key, x in beside.items()}
        rows.append({main.name: torch.randn(ROWS, *shape), **beside} if beside else torch.randn(ROWS, *shape))
    return list(product(every, rows))


def of_segmentation(name: str) -> tuple[list[Choice], str]:
    kind, encoder = name.split()
    smp = importlib.import_module("segmentation_models_pytorch")
    make = partial(getattr(smp, kind), encoder, encoder_weights=None, classes=CLASSES)
    return [(make, torch.randn(ROWS, 3, side, side)) for side in (64, 128, 224)], name


def of_open_clip(name: str) -> tuple[list[Choice], str]:
    clip = importlib.import_module("open_clip")
    config = _clip_config(name)
    custom = config.pop("custom_text", False)
    kind = (clip.CoCa if "multimodal_cfg" in config else clip.CustomTextCLIP) if custom else clip.CLIP
    words = torch.randint(3, WORDS, (ROWS, config["text_cfg"]["context_length"]))
    side = config["vision_cfg"]["image_size"]
    rows: list[Rows] = [{"image": torch.randn(ROWS, 3, side, side), "text": words}]
    return [(partial(kind, **copy.deepcopy(config)), x) for x in rows], f"{kind.__name__} {name}"


def _clip_config(name: str) -> dict[str, Any]:
    """The configuration of that name, small."""
    config: dict[str, Any] = copy.deepcopy(importlib.import_module("open_clip").get_model_config(name))
    vision = config["vision_cfg"]
    patch = vision.get("patch_size") or 32
    for part in (vision, config["text_cfg"], config.get("multimodal_cfg", {})):
        small = {
            "layers": 2,
            "width": 64,
            "heads": 2,
            "vocab_size": 99,
            "context_length": 16,
            "head_width": 32,
            "embed_dim": 32,
        }
        part |= {key: [1] * len(part[key]) if isinstance(part[key], list) else one for key, one in small.items() if key in part}
    config["text_cfg"]["context_length"] = 16
    vision["image_size"] = vision["image_size"] if "timm_model_name" in vision else 4 * patch if patch < 32 else 64
    return config | {"embed_dim": 64}


def of_torchaudio(name: str) -> tuple[list[Choice], str]:
    options, x = _audio()[name]
    return [(partial(getattr(importlib.import_module("torchaudio.models"), name), **options), x)], name


def _audio() -> dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    """What a model of torchaudio is made with, and its rows: these numbers have no values of their own."""
    lengths, frames = torch.tensor([16, 12, 16, 9]), torch.randn(ROWS, 16, 32)
    layers = {"num_heads": 4, "ffn_dim": 64, "num_layers": 2}
    wav2vec2 = {
        "extractor_mode": "group_norm", "extractor_conv_layer_config": [(32, 10, 5), (32, 3, 2), (32, 2, 2)],
        "extractor_conv_bias": False, "encoder_embed_dim": 32, "encoder_projection_dropout": 0.0, "encoder_pos_conv_kernel": 16,
        "encoder_pos_conv_groups": 4, "encoder_num_layers": 3, "encoder_num_heads": 4, "encoder_attention_dropout": 0.0,
        "encoder_ff_interm_features": 64, "encoder_ff_interm_dropout": 0.0, "encoder_dropout": 0.0,
        "encoder_layer_norm_first": False, "encoder_layer_drop": 0.0, "aux_num_out": 29,
    }  # fmt: skip
    transducer = {
        "input_dim": 32, "encoding_dim": 32, "num_symbols": 29, "segment_length": 4, "right_context_length": 0,
        "time_reduction_input_dim": 32, "time_reduction_stride": 1, "transformer_num_heads": 4, "transformer_ffn_dim": 64,
        "transformer_num_layers": 2, "transformer_dropout": 0.0, "transformer_activation": "gelu",
        "transformer_left_context_length": 4, "transformer_max_memory_size": 0,
        "transformer_weight_init_scale_strategy": "depthwise", "transformer_tanh_on_mem": True, "symbol_embedding_dim": 32,
        "num_lstm_layers": 2, "lstm_layer_norm": True, "lstm_layer_norm_epsilon": 1e-3, "lstm_dropout": 0.0,
    }  # fmt: skip
    wave, targets = torch.randn(ROWS, 1, 4000), torch.randint(29, (ROWS, 7))
    squim = {"feat_dim": 32, "win_len": 16, "d_model": 32, "nhead": 4, "hidden_dim": 32, "num_blocks": 2, "chunk_size": 16}
    words = {"tokens": torch.randint(50, (ROWS, 12)), "token_lengths": torch.full((ROWS,), 12)}
    mel = {"mel_specgram": torch.randn(ROWS, 80, 16), "mel_specgram_lengths": torch.full((ROWS,), 16)}
    return {
        "Conformer": ({**layers, "input_dim": 32, "depthwise_conv_kernel_size": 7}, {"input": frames, "lengths": lengths}),
        "Emformer": ({**layers, "input_dim": 32, "segment_length": 4}, {"input": frames, "lengths": lengths}),
        "ConvTasNet": ({"enc_num_feats": 32, "msk_num_feats": 16, "msk_num_hidden_feats": 32}, {"input": wave}),
        "DeepSpeech": ({"n_feature": 32, "n_hidden": 64}, {"x": frames[:, None]}),
        "HDemucs": (
            {"sources": ["a", "b"], "audio_channels": 1, "channels": 8, "nfft": 1024, "depth": 5},
            {"input": torch.randn(ROWS, 1, 8192)},
        ),
        "Tacotron2": ({"n_symbol": 50, "decoder_dropout": 0.0, "attention_dropout": 0.0}, words | mel),
        "Wav2Letter": ({"input_type": "mfcc", "num_features": 13}, {"x": torch.randn(ROWS, 13, 64)}),
        "WaveRNN": (
            {"upsample_scales": [2, 2, 4], "n_classes": 29, "hop_length": 16, "n_rnn": 32, "n_fc": 32},
            {"waveform": torch.randn(ROWS, 1, 96), "specgram": torch.randn(ROWS, 1, 128, 10)},
        ),
        "emformer_rnnt_model": (
            transducer,
            {"sources": frames, "source_lengths": lengths, "targets": targets, "target_lengths": torch.full((ROWS,), 7)},
        ),
        "squim_objective_model": ({**squim, "rnn_type": "LSTM"}, {"x": wave[:, 0]}),
        "wav2vec2_model": (wav2vec2, {"waveforms": wave[:, 0]}),
        "wavlm_model": ({**wav2vec2, "encoder_num_buckets": 8, "encoder_max_distance": 16}, {"waveforms": wave[:, 0]}),
    }


def _open(options: dict[str, Any]) -> list[str]:
    """Those of a class's options that are None."""
    return [key for key, value in options.items() if value is None]


def _classes(package: str, base: type = nn.Module) -> list[str]:
    """The classes of models there, under their own names."""
    module = importlib.import_module(package)
    found = {name: getattr(module, name) for name in dir(module) if name[0].isupper()}
    found = {name: one for name, one in found.items() if inspect.isclass(one) and issubclass(one, base) and one is not base}
    return [name for name, one in found.items() if name == one.__name__ and inspect.isfunction(one.forward)]


def _needed(one: inspect.Parameter) -> Any:
    """A value for what has none."""
    several = "Sequence[" in str(one.annotation) and "str" not in str(one.annotation)
    return [3 if "kernel" in one.name else 2] * 2 if several else 0


def _numbers(kind: type) -> dict[str, Any]:
    """What a class is made with, or the class that it comes from: numbers small, by rule."""
    takes = {**inspect.signature(kind).parameters}
    if "kwargs" in takes:
        above = inspect.signature(kind.__base__).parameters if kind.__base__ else {}
        takes = {key: above[key] for key in ("spatial_dims", "in_channels", "num_classes") if key in above} | takes
    asked = {key: _needed(one) if one.default is one.empty else one.default for key, one in takes.items() if one.kind in NAMED}
    asked = {key: list(value) if isinstance(value, tuple) else value for key, value in asked.items()}
    asked |= dict.fromkeys({"in_channels", "sample_size"} & set(_open(asked)), 0) | dict.fromkeys({"pretrained"} & set(asked))
    return asked | _smaller(asked, SMALLER)


def names(library: str) -> list[str]:
    if library == "timm":
        return list(importlib.import_module("timm").list_modules())
    if library == "torchvision":
        models = importlib.import_module("torchvision.models")
        smallest: dict[str, str] = {}
        for name in sorted(models.list_models(), key=lambda name: models.get_model_weights(name).DEFAULT.meta["num_params"]):
            smallest.setdefault(models.get_model_builder(name).__module__, name)
        return [name for module, name in smallest.items() if "detection" not in module and "quantization" not in module]
    if library == FURTHER:
        return _further_heads()
    if library == "diffusers":
        return _classes("diffusers", importlib.import_module("diffusers").ModelMixin)
    if library == "monai":
        return _classes("monai.networks.nets")
    if library == "open_clip":
        every = {name: json.dumps(_clip_config(name)) for name in reversed(importlib.import_module("open_clip").list_models())}
        different = {re.sub(r"[\d.]+", "", config): name for name, config in every.items() if "hf_model_name" not in config}
        return sorted(different.values())
    if library == "torchaudio":
        return list(_audio())
    if library == "segmentation_models_pytorch":
        return _segmentation_names()
    return list(dict.fromkeys(kind for kind, _ in _heads()))


MADE_BY: dict[str, Callable[[str], tuple[list[Choice], str]]] = {
    "timm": of_timm, "transformers": of_transformers, "torchvision": of_torchvision, FURTHER: of_transformers,
    "diffusers": of_diffusers, "segmentation_models_pytorch": of_segmentation, "monai": of_monai, "open_clip": of_open_clip,
    "torchaudio": of_torchaudio,
}  # fmt: skip
"""For each library what makes a model of it and rows for it."""


def _segmentation_names() -> list[str]:
    """Each architecture with the smallest encoders of five families, and the first one with those of all."""
    smp = importlib.import_module("segmentation_models_pytorch")
    smallest: dict[str, tuple[int, str]] = {}
    for name, one in smp.encoders.encoders.items():
        with contextlib.suppress(Exception), torch.device("meta"):
            size = sum(part.numel() for part in smp.encoders.get_encoder(name, weights=None).parameters())
            family = one["encoder"].__module__
            smallest[family] = min(smallest.get(family, (size, name)), (size, name))
    encoders = [name for _, name in sorted(smallest.values())]
    first, *others = (kind.__name__ for kind in smp.MODEL_ARCHITECTURES_MAPPING.values())
    return [f"{first} {name}" for name in encoders] + [f"{kind} {name}" for kind in others for name in encoders[:5]]


def tried(library: str, name: str, tell: Callable[[str | dict[str, Any]], None]) -> dict[str, Any]:
    """What came of it, or what is new since it was told. Of each stage the name is told as it begins."""
    tell("skipped")
    torch.manual_seed(0)
    choices, named = MADE_BY[library](name)
    make, x, given, size = _fitting(choices)
    if size > LARGEST:
        return {"model": named, "outcome": "skipped", "why": "still large when made small by rule"}
    output = everything(given) if (one := the_one(given)) is None else one
    example, y = _labelled(make, output, "all" if one is None else "")
    found: dict[str, Any] = {"model": named, "input": _shape(x), "output": list(output.shape)[1:]}
    tell("no plain")
    before, drawn = plain(example, x, y, BATCH, 1), torch.get_rng_state()
    model = made(example)
    if not torch.equal(drawn, torch.get_rng_state()):
        return found | {"outcome": "skipped", "why": "it draws random numbers as it trains, dropout off"}
    model.load_state_dict(before)
    with torch.no_grad():
        if not judged(example.labels)(output_of(model.eval(), x), y).isfinite():
            return found | {"outcome": "no plain", "why": "its loss on the test rows is not finite after two updates"}
    tell("error")
    model = made(example)
    try:
        result = streamed(example, model, x, y, BATCH, 1)
        found |= {key: result[key] for key in ("blocks", "partitions", "peak", "predicted", "violations")}
        if not (off := _different(model.state_dict(), before)):
            found["evaluated"] = _off_in_evaluation(example, model, x, y, result["test_loss"])
            tell(found | {"outcome": "equal"})
            return {"killed": _killed(example, x, y, result["partitions"], before)}
        torch.use_deterministic_algorithms(True, warn_only=True)  # kernels add up in another order each time otherwise
        model, found["asked"] = made(example), off
        streamed(example, model, x, y, BATCH, 1)
        loops = [plain(example, x, y, BATCH, 1) for _ in range(2)]
        if not (off := _different(model.state_dict(), loops[0])):
            return found | {"outcome": "equal"}
        if _different(*loops):
            return found | {"outcome": "skipped", "why": "two plain loops differ"}
        return found | {"outcome": "differs", "why": off}
    except SeqpartError as error:
        return found | {"outcome": "refused", "why": re.sub(r"/\S*/site-packages/", "", error.with_flags.splitlines()[0])}


def _fitting(choices: list[Choice]) -> tuple[Callable[[], nn.Module], Rows, Any, int]:
    """The first of the choices that can be made and run, what comes out, and how many parameters it has."""
    first = None
    for make, few in groupby(choices, lambda one: one[0]):
        try:
            with torch.device("meta"):
                size = sum(one.numel() for one in make().parameters())
        except Exception:
            size = 0
        try:
            model = made(Example(make)).eval() if size <= LARGEST else None
        except Exception as error:
            first = first or error
            continue
        for _, x in few:
            try:
                with torch.no_grad():
                    return make, x, None if model is None else returned(model, x), size
            except Exception as error:
                first = first or error
    assert first is not None
    raise first


def _labelled(make: Callable[[], nn.Module], output: torch.Tensor, kind: str) -> tuple[Example, torch.Tensor]:
    kind = kind or {2: "row", 3: "token", 4: "pixel"}.get(output.dim(), "vector")
    if kind in ("all", "vector") or output.shape[1] < 2:
        return Example(make, labels=kind if kind == "all" else "vector"), torch.randn(len(output))
    classes = output.shape[2] if kind == "token" else output.shape[1]
    shape = {"row": (), "token": output.shape[1:2], "pixel": output.shape[2:]}[kind]
    y = torch.arange(prod((len(output), *shape))).reshape(len(output), *shape)
    return Example(make, labels=kind), y % classes


def _shape(x: Rows) -> dict[str, list[int]] | list[int]:
    return {name: list(one.shape[1:]) for name, one in x.items()} if isinstance(x, dict) else list(x.shape[1:])


class _Kills:
    """A callback that kills its process after the first update."""

    def on_step(self, event: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def _killed(example: Example, x: Rows, y: torch.Tensor, partitions: int, expected: dict[str, torch.Tensor]) -> str:
    """What a run that was killed after its first update is like once it has gone on in another process."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"

        def go(model: nn.Module, *callbacks: object) -> None:
            trained(example, model, x, y, BATCH, 1, partitions, folder, save_every=1, callbacks=callbacks)

        process = multiprocessing.get_context("fork").Process(target=go, args=(made(example), _Kills()))
        process.start()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            return f"it ended with {process.exitcode} before it was killed"
        model = made(example)
        try:
            go(model)
        except SeqpartError as error:
            return f"refused: {error}"
        return _different(model.state_dict(), expected) or "equal"


def _off_in_evaluation(example: Example, model: nn.Module, x: Rows, y: torch.Tensor, found: float) -> float:
    """How far a run's loss on test rows is off that of the model's own evaluation, relative to it."""
    batches = [slice(first, first + BATCH) for first in range(0, len(y), BATCH)]
    with torch.no_grad():
        losses = [float(judged(example.labels)(output_of(model.eval(), some(x, part)), y[part])) for part in batches]
    whole = sum(losses) / len(losses)
    return abs(found - whole) / (abs(whole) or 1.0)


def _different(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> str:
    """How many tensors differ and the first of them; empty: none does."""
    off = [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)]
    return f"{len(off)} of {len(theirs)}, first {off[0]}" if off else ""


def child(to: Connection, library: str, name: str) -> None:
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    reached = "skipped"

    def tell(what: str | dict[str, Any]) -> None:
        nonlocal reached
        reached = what if isinstance(what, str) else reached
        to.send(what)

    try:
        found = tried(library, name, tell)
    except BaseException as error:
        frames = [f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in traceback.extract_tb(error.__traceback__)]
        found = {"outcome": reached, "why": f"{type(error).__name__}: {error}"[:400], "at": frames[-4:]}
    to.send(found)


def in_process(library: str, name: str, seconds: float) -> dict[str, Any]:
    """The outcome of `tried` in a process of its own."""
    context, began, reached = multiprocessing.get_context("fork"), time.monotonic(), "skipped"
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(theirs, library, name))
    process.start()
    theirs.close()
    found: dict[str, Any] = {}
    try:
        while ours.poll(max(0.0, began + seconds - time.monotonic())):
            if isinstance(told := ours.recv(), str):
                reached = told
            else:
                found |= told
        found = found or {"outcome": "skipped", "why": f"longer than {seconds:.0f} s, at: {reached}"}
    except EOFError:
        found = found or {"outcome": reached, "why": "the process ended"}
    process.kill()
    process.join()
    return {"library": library, "name": name, **found, "seconds": round(time.monotonic() - began, 1)}


def package(library: str) -> str:
    return library.partition(",")[0]


def known() -> dict[tuple[str, str], dict[str, Any]]:
    path = record.FOLDER / KNOWN
    lines: Iterator[str] = iter(path.read_text().splitlines() if path.exists() else [])
    return {(one["library"], one["name"]): one for one in map(json.loads, lines)}


def run(asked: argparse.Namespace) -> None:
    for module in (package(asked.library), *IMPORTED):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    number, of = map(int, asked.shard.split("/"))
    until = time.monotonic() + 60 * asked.minutes
    before = known()
    of_library = [(name, before.get((asked.library, name))) for name in names(asked.library)]
    if asked.again:
        new = [name for name, one in of_library if one and one["outcome"] == "equal" and "killed" not in one]
    else:
        new = [name for name, one in of_library if one is None]
    wanted = asked.only or new[number::of]
    for name in wanted:
        if time.monotonic() > until:
            break
        found = in_process(asked.library, name, asked.seconds)
        if asked.again and found.get("why", "").startswith("longer"):
            continue
        with (record.FOLDER / KNOWN).open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(found["outcome"], found.get("model", name), found.get("blocks", ""), found.get("why", ""), flush=True)


_CLOSE = 0.02
COLUMNS = ("equal", "differs", "refused", "error", "no plain", "skipped")


def section() -> str:
    """The part of docs/models.md behind the table of benchmarks.models."""
    found = [one for _, one in sorted(known().items())]
    table = collections.Counter((one["library"], one["outcome"]) for one in found)
    tried_of = [library for library in LIBRARIES if any(one["library"] == library for one in found)]
    return "\n".join(
        [
            CENSUS,
            "",
            f"Written by `python -m benchmarks.census page`. {origin()}",
            "",
            ABOUT.format(
                versions=", ".join(
                    f"{one} {importlib.import_module(one).__version__}" for one in dict.fromkeys(map(package, tried_of))
                )
            ),
            "",
            f"| library | tried | {' | '.join(COLUMNS)} |",
            "|---|---|" + "---|" * len(COLUMNS),
            *(
                f"| {library} | {sum(table[library, one] for one in COLUMNS)} | "
                + " | ".join(str(table[library, one]) for one in COLUMNS)
                + " |"
                for library in tried_of
            ),
            "",
            *_more(found),
            "",
            "| not equal | outcome | why |",
            "|---|---|---|",
            *(
                f"| {one['library']} {one.get('model', one['name'])} | {one['outcome']} | {_told(one['why'])} |"
                for one in found
                if one["outcome"] not in ("equal", "skipped")
            ),
            "",
            "| skipped | models |",
            "|---|---|",
            *(f"| {why} | {len(names)}: {_names(names)} |" for why, names in _skipped(found).items()),
            "",
        ]
    )


def _more(found: list[dict[str, Any]]) -> Iterator[str]:
    """What else was tried of models that were equal."""
    more = [one for one in found if "killed" in one]
    off = [one for one in more if one["killed"] != "equal"]
    errors = [(one["predicted"] / one["peak"] - 1, one["model"]) for one in more]
    far = [f"{model} {error:+.1%}" for error, model in sorted(errors) if abs(error) > _CLOSE]
    passed = sum(one["violations"] for one in more)
    if more:
        yield (
            f"Of {len(more)} that were equal another run was killed after its first update, and went on in another process; "
            f"{len(more) - len(off)} ended equal too. Predicted peaks of {len(more) - len(far)} are within {_CLOSE:.0%} of "
            f"measured ones, {len(far)} are not: {', '.join(far)}. Limits passed: {passed}. One line of code each."
        )
        yield from (f"- {one['library']} {one['model']}: {one['killed']}" for one in off)
    if evaluated := [(one["evaluated"], one["model"]) for one in found if "evaluated" in one]:
        least, most = sum(off == 0 for off, _ in evaluated), max(evaluated)
        yield (
            f"Of {len(evaluated)} the loss on test rows was compared with that of `model.eval()` under `torch.no_grad()`: "
            f"{least} are equal, the others off by {most[0]:.1g} of it at most ({most[1]})."
        )


def _skipped(found: list[dict[str, Any]]) -> dict[str, list[tuple[str, str]]]:
    reasons: dict[str, list[tuple[str, str]]] = {}
    for one in found:
        if one["outcome"] == "skipped":
            why = (
                one["why"]
                if "model" in one or one["why"].startswith(("longer", "still"))
                else "the rule made no model that runs"
            )
            reasons.setdefault(_told(why), []).append((one["library"], one["name"]))
    return reasons


def _names(models: list[tuple[str, str]]) -> str:
    """Those of a reason, or how many of each library where they are many."""
    if len(models) <= MOST:
        return ", ".join(name for _, name in models)
    return "; ".join(f"{count} of {library}" for library, count in collections.Counter(of for of, _ in models).items())


def _told(why: str) -> str:
    return (why.splitlines() or [""])[-1].strip().replace("|", "/")[:300]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["models", "page"])
    parser.add_argument("--library", choices=LIBRARIES, default="timm")
    parser.add_argument("--shard", default="0/1", metavar="I/N")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each model")
    parser.add_argument("--again", action="store_true", help="those that were equal, and were not killed yet")
    parser.add_argument("--only", nargs="*", metavar="NAME")
    quick.add_to(parser)
    asked = parser.parse_args(argv)
    quick.need(
        *({package(one) for one, _ in known()} if asked.what == "page" and not asked.quick else {package(asked.library)})
    )
    if (asked.what == "models" or asked.quick) and os.environ.get("OMP_NUM_THREADS") != "1":  # read as torch is imported
        os.execve(sys.executable, children.command("benchmarks.census", *(argv or sys.argv[1:])), children.one_thread())
    with quick.places(asked.quick) as docs:
        if asked.quick:
            asked.library, asked.only = "torchvision", ["shufflenet_v2_x0_5"]
        if asked.what == "models" or asked.quick:
            run(asked)
        if asked.what == "page":
            text = PAGE.read_text().partition(f"\n{CENSUS}\n")[0] + "\n" + section()
            (docs / PAGE.name).write_text(text)
        return int(asked.quick and {one["outcome"] for one in known().values()} != {"equal"})


if __name__ == "__main__":
    sys.exit(main())
