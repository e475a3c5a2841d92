"""`seqpart.verify` on a GPU: the kinds of models that people have, each under a limit against full training, bit by bit.

    python -m benchmarks.gpu.verified [--limit 2GB]
    python -m benchmarks.gpu.verified --device cpu --quick      the same models, smaller

A ResNet with BatchNorm, a vision transformer, a Llama with tied embeddings, LoRA on a Llama in 4 bits. One that cannot be made
or differs says so, and the next one is verified. Results: benchmarks/results.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks import record
from benchmarks.gpu import refusing_in_words
from seqpart.device.opening import open_device
from seqpart.verify import verify

Data = tuple[torch.Tensor, torch.Tensor]
_VOCABULARY = 512


def images(rows: int, side: int) -> Data:
    return torch.randn(rows, 3, side, side), torch.arange(rows) % 10


def texts(rows: int, positions: int) -> Data:
    ids = torch.randint(0, _VOCABULARY, (rows, positions))
    return ids, ids


def resnet(small: bool) -> tuple[nn.Module, Data, Any]:
    from torchvision.models import resnet18

    return resnet18(num_classes=10), images(32, 32 if small else 64), None


def transformer(small: bool) -> tuple[nn.Module, Data, Any]:
    from torchvision.models import VisionTransformer

    width, depth = (64, 2) if small else (512, 8)
    model = VisionTransformer(32, 8, num_layers=depth, num_heads=8, hidden_dim=width, mlp_dim=4 * width, num_classes=10)
    nn.init.normal_(model.heads.head.weight, std=0.02)  # zeros would stop every gradient
    return model, images(32, 32), None


def llama(small: bool, **more: Any) -> tuple[nn.Module, Data, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, depth = (64, 2) if small else (512, 8)
    config = LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=depth,
        num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True, use_cache=False, **more,
    )  # fmt: skip
    return LlamaForCausalLM(config), texts(32, 32 if small else 128), "model"


def lora_in_4_bits(small: bool) -> tuple[nn.Module, Data, Any]:
    import bitsandbytes
    from peft import LoraConfig

    from seqpart.integrations.peft import get_peft_model

    base, data, loss = llama(small)
    for name, layer in list(base.named_modules()):
        if isinstance(layer, nn.Linear) and "lm_head" not in name:
            parent, _, last = name.rpartition(".")
            narrow = bitsandbytes.nn.Linear4bit(layer.in_features, layer.out_features, bias=False, quant_type="nf4")
            narrow.weight = bitsandbytes.nn.Params4bit(layer.weight.detach(), requires_grad=False, quant_type="nf4")
            setattr(base.get_submodule(parent), last, narrow.to("cuda" if torch.cuda.is_available() else "cpu"))
    return get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")), data, loss


MODELS: dict[str, Callable[[bool], tuple[nn.Module, Data, Any]]] = {
    "ResNet with BatchNorm": resnet, "vision transformer": transformer, "Llama, tied embeddings": llama,
    "LoRA on 4 bits": lora_in_4_bits,
}  # fmt: skip


def verified(made: Callable[[bool], tuple[nn.Module, Data, Any]], options: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    torch.manual_seed(0)
    try:
        model, data, loss = made(options.quick)
        steps = 1 if options.quick else 2
        found = verify(
            model, data, loss, "adamw", steps=steps, mem_limit=options.limit, batch_size=16, device=options.device, lr=1e-3
        )
    except ImportError as error:
        return {"left out": str(error)}
    except Exception as error:  # of a library, or a mismatch: the next model is to be verified too
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    return {"equal": found.comparisons, "partitions": len(found.plan.partitions), "seconds": time.perf_counter() - began}


@refusing_in_words
def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", default="2GB")
    parser.add_argument("--quick", action="store_true", help="small models")
    options = parser.parse_args(words)
    kind = open_device(options.device).kind
    result: dict[str, dict[str, Any]] = {}
    for name, made in MODELS.items():
        result[name] = verified(made, options)
        print(f"{name}: {said(result[name])}", flush=True)
        record.save("gpu-verified", result, kind)
    return int(any("failed" in found for found in result.values()))


def said(found: dict[str, Any]) -> str:
    if "equal" not in found:
        return ", ".join(f"{key}: {text}" for key, text in found.items())
    return f"{found['equal']} comparisons equal, {found['partitions']} partitions, {found['seconds']:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
