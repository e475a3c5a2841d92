"""Models that people have, small and whole: no list of blocks, no wrapper. Each is what one line of a user's code makes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

CLASSES, WORDS, LENGTH, ROWS = 5, 60, 16, 24


@dataclass(frozen=True)
class Example:
    make: Callable[[], nn.Module]
    images: int = 0
    """Their size; 0: rows of tokens."""
    frames: int = 0
    labels: str = "row"
    """row: one label each; token: one for each token; pixel: one for each pixel; vector: the loss is the mean square of what
    comes out; all: of all floats that come out, in whatever."""
    named: Callable[[torch.Generator], dict[str, torch.Tensor]] | None = None
    """Rows of a model that takes several tensors, by name."""

    def rows(self, seed: int) -> tuple[torch.Tensor | dict[str, torch.Tensor], torch.Tensor]:
        made = torch.Generator().manual_seed(seed)
        x: torch.Tensor | dict[str, torch.Tensor]
        if self.named is not None:
            x = self.named(made)
        elif not self.images:
            x = torch.randint(2, WORDS, (ROWS, LENGTH), generator=made)
        else:
            shape = (self.frames, self.images, self.images) if self.frames else (self.images, self.images)
            x = torch.randn(ROWS, 3, *shape, generator=made)
        shape = {"row": (), "token": (LENGTH,), "pixel": (self.images, self.images), "vector": ()}[self.labels]
        most = WORDS if self.labels == "token" else CLASSES
        y = torch.randint(0, most, (ROWS, *shape), generator=made)
        return x, (y.float() if self.labels == "vector" else y)


def _words(made: torch.Generator) -> torch.Tensor:
    return torch.randint(2, WORDS, (ROWS, LENGTH), generator=made)


def _padded(made: torch.Generator) -> dict[str, torch.Tensor]:
    mask = torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=made)
    ids = torch.where(mask, _words(made), 0)
    return {"input_ids": ids, "attention_mask": mask.long(), "token_type_ids": torch.randint(2, ids.shape, generator=made)}


def _translated(made: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_ids": _words(made), "decoder_input_ids": _words(made)}


def _heard(made: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(ROWS, 80, 2 * LENGTH, generator=made), "decoder_input_ids": _words(made)}


def judged(kind: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The loss for labels of that kind: mean over the rows."""
    if kind == "all":
        return lambda output, labels: ((everything(output) - labels[:, None]) ** 2).mean()
    if kind == "vector":
        return lambda output, labels: ((output.flatten(1) - labels[:, None]) ** 2).mean()
    if kind == "token":
        return lambda output, labels: nn.functional.cross_entropy(output.transpose(1, 2), labels)
    return nn.functional.cross_entropy


def everything(found: Any) -> torch.Tensor:
    """All floats of a model's output that are as many rows as the first."""

    def floats(part: Any) -> list[torch.Tensor]:
        if isinstance(part, dict):
            part = tuple(part.values())
        if isinstance(part, tuple | list):
            return [tensor for one in part for tensor in floats(one)]
        return [part] if isinstance(part, torch.Tensor) and part.is_floating_point() and part.dim() else []

    tensors = floats(found)
    return torch.cat([one.reshape(len(one), -1) for one in tensors if len(one) == len(tensors[0])], 1)


def _torchvision(name: str, **options: Any) -> nn.Module:
    import torchvision.models as models

    return models.get_model(name, weights=None, num_classes=CLASSES, **options)


def _maxvit() -> nn.Module:
    from torchvision.models import MaxVit

    return MaxVit(
        input_size=(64, 64), stem_channels=16, partition_size=2, block_channels=[16, 32], block_layers=[1, 1], head_dim=8,
        stochastic_depth_prob=0.0, num_classes=CLASSES,
    )  # fmt: skip


def _timm(name: str) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=CLASSES)


def _transformers(kind: str, config: str, **options: Any) -> nn.Module:
    import transformers

    small = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": WORDS}
    return getattr(transformers, kind)(getattr(transformers, config)(**{**small, "pad_token_id": 0, **options}))


class _Shifted(nn.Module):
    """A diffusion network: noise is told from an image, by blocks that a time shifts and scales (DiT)."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.patches, self.time = (
            nn.Conv2d(3, width, 8, 8),
            nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width)),
        )
        self.blocks = nn.ModuleList(_ShiftedBlock(width) for _ in range(depth))
        self.out = nn.ConvTranspose2d(width, 3, 8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        condition = self.time(x.mean(dim=(1, 2, 3))[:, None])
        hidden = self.patches(x)
        shape = hidden.shape[2:]
        hidden = hidden.flatten(2).transpose(1, 2)
        for block in self.blocks:
            hidden = block(hidden, condition=condition)
        return self.out(hidden.transpose(1, 2).unflatten(2, shape))


class _ShiftedBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift, self.norm = nn.Linear(width, 3 * width), nn.LayerNorm(width, elementwise_affine=False)
        self.mix = nn.MultiheadAttention(width, 4, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, hidden: torch.Tensor, *, condition: torch.Tensor) -> torch.Tensor:
        shift, scale, gate = self.shift(condition)[:, None].chunk(3, 2)
        x = self.norm(hidden) * (1 + scale) + shift
        hidden = hidden + gate * self.mix(x, x, x, need_weights=False)[0]
        return hidden + self.feed(self.norm(hidden))


class _UNet(nn.Module):
    """A diffusion U-Net: skips from the way down to the way up, and an embedded time in every block."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU())
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(_Residual(width * 2**n, width * 2 ** (n + 1), width) for n in range(3))
        self.middle = _Residual(width * 8, width * 8, width)
        self.up = nn.ModuleList(_Residual(width * 2 ** (n + 2), width * 2**n, width) for n in (2, 1, 0))
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time, skips = self.time(x.mean(dim=(1, 2, 3))[:, None]), []
        x = self.first(x)
        for block in self.down:
            x = block(x, time)
            skips.append(x)
            x = nn.functional.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for block in self.up:
            x = torch.cat([nn.functional.interpolate(x, scale_factor=2), skips.pop()], 1)
            x = block(x, time)
        return self.last(x)


class _Residual(nn.Module):
    def __init__(self, inside: int, outside: int, time: int) -> None:
        super().__init__()
        self.norm, self.one = nn.GroupNorm(4, inside), nn.Conv2d(inside, outside, 3, padding=1)
        self.time, self.two, self.skip = (
            nn.Linear(time, outside),
            nn.Conv2d(outside, outside, 3, padding=1),
            nn.Conv2d(inside, outside, 1),
        )

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        inner = self.one(nn.functional.silu(self.norm(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.two(nn.functional.silu(inner))


OF_TORCHVISION = (
    "resnet18", "resnet50", "resnext50_32x4d", "densenet121", "swin_t", "swin_v2_t", "mobilenet_v2", "mobilenet_v3_small",
    "efficientnet_b0", "convnext_tiny", "regnet_y_400mf", "shufflenet_v2_x1_0", "squeezenet1_1", "mnasnet0_5", "vgg11_bn",
)  # fmt: skip
OF_TIMM_AT_224 = (
    "vit_tiny_patch16_224", "deit_tiny_patch16_224", "eva02_tiny_patch14_224", "mixer_s32_224", "xcit_nano_12_p16_224",
    "coat_tiny", "levit_128s", "vit_tiny_r_s16_p8_224",
)  # fmt: skip
OF_TIMM = ("efficientnet_b0", "convnext_atto", "regnety_002", "pvt_v2_b0", "mobilevit_xxs", "nf_regnet_b0", "resnet26d")
T5 = {"d_model": 64, "d_ff": 128, "num_heads": 4, "d_kv": 16, "dropout_rate": 0.0}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
SEEN = {"image_size": 32, "patch_size": 8, "num_labels": CLASSES}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": CLASSES}


def _vision(name: str, images: int = 64, **more: Any) -> Example:
    return Example(partial(_torchvision, name), images=images, **more)


def _by_timm(name: str, images: int = 64) -> Example:
    return Example(partial(_timm, name), images=images)


def _language(kind: str, config: str, **options: Any) -> Example:
    return Example(partial(_transformers, kind, config, **options), labels="token")


def _sentence(kind: str, config: str, **options: Any) -> Example:
    return Example(partial(_transformers, kind, config, **QUIET, **options))


EXAMPLES: dict[str, Example] = {
    **{f"torchvision {name}": _vision(name) for name in OF_TORCHVISION},
    "torchvision googlenet": Example(partial(_torchvision, "googlenet", aux_logits=False, init_weights=True), images=64),
    "torchvision googlenet, auxiliary heads": Example(
        partial(_torchvision, "googlenet", aux_logits=True, init_weights=True), images=64
    ),
    "torchvision inception_v3": Example(partial(_torchvision, "inception_v3", aux_logits=False, init_weights=True), images=80),
    "torchvision vit_b_16": Example(partial(_torchvision, "vit_b_16", image_size=64), images=64),
    "torchvision maxvit": Example(_maxvit, images=64),
    "torchvision deeplabv3_mobilenet": Example(
        partial(_torchvision, "deeplabv3_mobilenet_v3_large", weights_backbone=None), images=64, labels="pixel"
    ),
    "torchvision fcn_resnet50": Example(
        partial(_torchvision, "fcn_resnet50", weights_backbone=None), images=64, labels="pixel"
    ),
    "torchvision r3d_18": Example(partial(_torchvision, "r3d_18"), images=32, frames=4),
    **{f"timm {name}": _by_timm(name, 224) for name in OF_TIMM_AT_224},
    **{f"timm {name}": _by_timm(name) for name in OF_TIMM},
    "transformers GPT-2": _language(
        "GPT2LMHeadModel", "GPT2Config", n_embd=64, n_layer=4, n_head=4, n_positions=LENGTH, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
    ),
    "transformers Llama": _language("LlamaForCausalLM", "LlamaConfig", **GROUPED),
    "transformers Llama, tied": _language("LlamaForCausalLM", "LlamaConfig", **GROUPED, tie_word_embeddings=True),
    "transformers Mistral": _language("MistralForCausalLM", "MistralConfig", num_key_value_heads=2),
    "transformers Qwen3": _language("Qwen3ForCausalLM", "Qwen3Config", **GROUPED),
    "transformers Qwen3-MoE": _language(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **GROUPED, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2
    ),
    "transformers Mixtral": _language("MixtralForCausalLM", "MixtralConfig", **GROUPED, num_local_experts=4),
    "transformers OLMoE": _language("OlmoeForCausalLM", "OlmoeConfig", num_experts=4, num_experts_per_tok=2),
    "transformers GPT-OSS": _language("GptOssForCausalLM", "GptOssConfig", **GROUPED, num_local_experts=4),
    "transformers DeepSeek-V3": _language(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=32, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
        first_k_dense_replace=1,
    ),
    "transformers JetMoE": _language(
        "JetMoeForCausalLM", "JetMoeConfig", num_local_experts=4, kv_channels=16, num_key_value_heads=2
    ),
    "transformers Gemma2": _language("Gemma2ForCausalLM", "Gemma2Config", **GROUPED),
    "transformers Gemma3": _language("Gemma3ForCausalLM", "Gemma3TextConfig", **GROUPED),
    "transformers Phi": _language("PhiForCausalLM", "PhiConfig"),
    "transformers GPT-NeoX": _language("GPTNeoXForCausalLM", "GPTNeoXConfig"),
    "transformers OPT": _language("OPTForCausalLM", "OPTConfig", ffn_dim=128, word_embed_proj_dim=64, dropout=0.0),
    "transformers BLOOM": _language("BloomForCausalLM", "BloomConfig", n_layer=4, n_head=4),
    "transformers Falcon": _language("FalconForCausalLM", "FalconConfig"),
    "transformers Mamba": _language("MambaForCausalLM", "MambaConfig", state_size=8),
    "transformers BERT, classifier": _sentence("BertForSequenceClassification", "BertConfig"),
    "transformers RoBERTa, classifier": _sentence("RobertaForSequenceClassification", "RobertaConfig"),
    "transformers DeBERTa-v2, classifier": _sentence("DebertaV2ForSequenceClassification", "DebertaV2Config"),
    "transformers ModernBERT, classifier": _sentence("ModernBertForSequenceClassification", "ModernBertConfig"),
    "transformers T5 encoder": Example(
        partial(_transformers, "T5EncoderModel", "T5Config", **T5, num_layers=4), labels="vector",
    ),
    "transformers T5": Example(
        partial(_transformers, "T5ForConditionalGeneration", "T5Config", **T5, num_layers=2, num_decoder_layers=2),
        labels="token", named=_translated,
    ),
    "transformers BART": Example(
        partial(
            _transformers, "BartForConditionalGeneration", "BartConfig", d_model=64, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, dropout=0.0,
        ), labels="token", named=_translated,
    ),
    "transformers Whisper": Example(
        partial(
            _transformers, "WhisperForConditionalGeneration", "WhisperConfig", d_model=64, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, dropout=0.0,
            max_source_positions=LENGTH, max_target_positions=LENGTH, bos_token_id=1, eos_token_id=1, decoder_start_token_id=1,
            suppress_tokens=None, begin_suppress_tokens=None,
        ), labels="token", named=_heard,
    ),
    "transformers BERT, padded": Example(
        partial(_transformers, "BertForSequenceClassification", "BertConfig", **QUIET), named=_padded
    ),
    "transformers ViT": Example(
        partial(_transformers, "ViTForImageClassification", "ViTConfig", **SEEN, hidden_dropout_prob=0.0), images=32
    ),
    "transformers SigLIP, images": Example(
        partial(_transformers, "SiglipVisionModel", "SiglipVisionConfig", image_size=32, patch_size=8), images=32,
        labels="vector",
    ),
    "transformers CLIP, images": Example(
        partial(_transformers, "CLIPVisionModel", "CLIPVisionConfig", image_size=32, patch_size=8), images=32, labels="vector"
    ),
    "a diffusion transformer (DiT)": Example(_Shifted, images=32, labels="vector"),
    "a diffusion U-Net": Example(_UNet, images=32, labels="vector"),
}  # fmt: skip
