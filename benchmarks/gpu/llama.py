"""Full fine-tuning of a Llama on a GPU: tokens a second, device and host memory, of plain PyTorch, its offloading and seqpart.

    python -m benchmarks.gpu.llama [--size 1.1B] [--limits 8GB,16GB,24GB] [--seconds 300]
    python -m benchmarks.gpu.llama --device cpu --quick      the same arms, small

Float32 weights, products in bfloat16, AdamW (fused), 2,048 tokens a row, 16 rows an update. Weights are all 0.01: that takes no
time, and kernels take as long. Each arm is a fresh process, watched by NVML from outside, and is kept when it has ended;
--seconds starts no further arm after so long. --trace FILE: of seqpart's first arm. Results: benchmarks/results.

plain            the model's own forward pass, as many rows at once as were tried to fit
checkpointed     with its own gradient checkpointing
fsdp2            `fully_shard` of every layer, checkpointed, CPUOffloadPolicy, one rank
ramtorch         its OffloadModel: layers streamed from pinned memory, recomputed, steps on the host (where it is installed)
LIMIT            `--method auto` under that limit
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks import children, record
from benchmarks.peers.common import one_process
from benchmarks.peers.on_gpu import without_gpu

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from profiling.watching import Gpu, watched

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512},
    "1.1B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
             "num_key_value_heads": 4, "vocab_size": 32000},
    "3B": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
           "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True},
}  # fmt: skip
"""TinyLlama's and Llama 3.2's published sizes."""
ROWS, TOKENS, WARM_UP, UPDATES = 16, 2048, 2, 3
"""Of an update; of a row; updates that are not looked at, and that are."""


def model_of(size: str, device: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES[size], max_position_embeddings=TOKENS, use_cache=False))
    rotary = type(model.model.rotary_emb)(model.config)
    model.to_empty(device=device)
    model.model.rotary_emb = rotary.to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    model.tie_weights()
    return model.train()


def rows_of(options: argparse.Namespace) -> torch.Tensor:
    rows, tokens = (4, 32) if options.quick else (ROWS, TOKENS)
    return torch.randint(0, SIZES[options.size]["vocab_size"], (rows * (WARM_UP + UPDATES), tokens))


def timed(options: argparse.Namespace, ids: torch.Tensor, update: Callable[[torch.Tensor], None]) -> list[float]:
    ends = [time.perf_counter()]
    for rows in ids.chunk(WARM_UP + UPDATES):
        update(rows)
        if options.device == "cuda":
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(ends)]


def plain(options: argparse.Namespace, *, checkpointed: bool, sharded: bool) -> list[float]:
    """A loop of plain PyTorch, with so many rows at once as `options` say."""
    device = options.device
    model: Any = model_of(options.size, "cpu" if sharded else device)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if sharded:
        import torch.distributed as dist
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        one_process()
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        for part in (*model.model.layers, model):
            fully_shard(part, offload_policy=CPUOffloadPolicy(pin_memory=device == "cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = rows_of(options)

    def update(rows: torch.Tensor) -> None:
        parts = rows.split(options.rows)
        for part in parts:
            there = part.to(device)
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = model(input_ids=there, labels=there).loss / len(parts)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return timed(options, ids, update)


class Chunk(nn.Module):
    """A layer of the model, with the places of its tokens: hidden states in and out."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)[None]
        hidden: torch.Tensor = self.layer(x, position_embeddings=self.rotary(x, places), attention_mask=None)
        return hidden


def streamed_by_ramtorch(options: argparse.Namespace) -> list[float]:
    from ramtorch import OffloadModel

    whole: Any = model_of(options.size, "cpu")
    vocabulary = SIZES[options.size]["vocab_size"]
    whole.lm_head.weight = nn.Parameter(whole.lm_head.weight.detach().clone())  # it has no tied weights
    layers = [Chunk(layer, whole.model.rotary_emb) for layer in whole.model.layers]
    model = OffloadModel(
        [whole.model.embed_tokens, *layers, nn.Sequential(whole.model.norm, whole.lm_head)], device=options.device
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def update(rows: torch.Tensor) -> None:
        parts = rows.split(options.rows)

        def loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            found = nn.functional.cross_entropy(logits[:, :-1].float().reshape(-1, vocabulary), ids[:, 1:].reshape(-1))
            return found / len(parts)

        for part in parts:
            with torch.autocast(options.device, dtype=torch.bfloat16, cache_enabled=False):
                model.step(part.to(options.device), targets=part.to(options.device), loss_fn=loss)
        model.flush_grads()
        optimizer.step()
        optimizer.zero_grad()

    found = timed(options, rows_of(options), update)
    model.close()
    return found


class Clock:
    """A callback that notes when each update ended."""

    def __init__(self) -> None:
        self.ends = [time.perf_counter()]

    def on_step(self, event: object) -> None:
        self.ends.append(time.perf_counter())


def ours(options: argparse.Namespace) -> list[float]:
    from seqpart import Trainer

    ids, clock = rows_of(options), Clock()
    with tempfile.TemporaryDirectory(dir=options.folder) as home:
        trainer = Trainer(
            model_of(options.size, "cpu"), "model", "adamw", mem_limit=options.arm, method="auto", dtype="bf16", lr=1e-4,
            batch_size=len(ids) // (WARM_UP + UPDATES), epochs=1, shuffle=False, save_every="never", quiet=True,
            device=options.device, output_dir=Path(home) / "run", trace=options.trace,
        )  # fmt: skip
        trainer.fit((ids, ids), callbacks=[clock])
    return [after - before for before, after in itertools.pairwise(clock.ends)]


def measured(options: argparse.Namespace) -> list[float]:
    """Seconds of each update of one arm."""
    if options.arm in ("plain", "checkpointed", "fsdp2"):
        return plain(options, checkpointed=options.arm != "plain", sharded=options.arm == "fsdp2")
    if options.arm == "ramtorch":
        return streamed_by_ramtorch(options)
    return ours(options)


def run(arm: str, options: argparse.Namespace, folder: Path, trace: Path | None) -> dict[str, Any]:
    """Measures one arm in a process of its own."""
    gpu = Gpu() if options.device == "cuda" else None
    if gpu is not None:
        gpu.start()
    words: list[object] = [
        "--arm",
        arm,
        "--size",
        options.size,
        "--device",
        options.device,
        "--rows",
        options.rows,
        "--folder",
        folder,
    ]
    words += ["--folder", folder, *["--quick"] * options.quick]
    words += ["--trace", trace] if trace is not None else []
    found = watched(children.command("benchmarks.gpu.llama", *words), environment=os.environ, folder=folder, gpu=gpu)
    lines = [line for line in found.errors.splitlines() if line.strip()]
    seconds = next((json.loads(line) for line in reversed(lines) if line.startswith("[")), None)
    peak, ram = (max((getattr(one, name) for one in found.samples), default=0) for name in ("device", "ram"))
    if seconds is None:
        return {"refused": lines[-1] if lines else f"exit code {found.exit_code}", "peak": peak, "ram": ram}
    took = median(seconds[WARM_UP:])
    tokens = rows_of(options).numel() // (WARM_UP + UPDATES)
    return {"seconds": took, "tokens": tokens / took, "peak": peak, "ram": ram, "source": found.source}


def said(found: dict[str, Any]) -> str:
    held = f"device {found['peak'] / 1e9:.2f} GB, host {found['ram'] / 1e9:.2f} GB"
    return f"{found['refused']} ({held})" if "refused" in found else f"{found['tokens']:,.0f} tokens/s, {held}"


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="1.1B")
    parser.add_argument("--limits", default="8GB,16GB,24GB")
    parser.add_argument("--rows", type=int, default=2, help="rows at once of the arms that are not seqpart's")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further arm after so long")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, default=Path(), help="where homes on disk go")
    parser.add_argument("--quick", action="store_true", help="a tiny model and short rows")
    parser.add_argument("--arm", help="measure this one here: what a child process does")
    options = parser.parse_args(words)
    if options.quick:
        options.size = "tiny"
    return options


def main(words: Sequence[str] | None = None) -> int:
    options = arguments(words)
    if options.device == "cuda" and not torch.cuda.is_available():
        return without_gpu("benchmarks.frontier")
    if options.arm is not None:
        torch.manual_seed(0)
        print(json.dumps(measured(options)), flush=True)
        return 0
    began, found, left_out = time.monotonic(), dict[str, Any](), list[str]()
    limits = options.limits.split(",")
    for number, arm in enumerate((limits[0], "checkpointed", *limits[1:], "ramtorch", "fsdp2", "plain")):
        absent = arm == "ramtorch" and find_spec("ramtorch") is None
        if absent or time.monotonic() - began > options.seconds:
            left_out.append(f"{arm} (not installed)" if absent else arm)
            continue
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            found[arm] = run(arm, options, Path(folder), options.trace if not number else None)
        print(f"{options.size} {arm:13} {said(found[arm])}", flush=True)
        result = {"size": options.size, "arms": found, "left_out": left_out}
        record.save("gpu-llama" if options.size == "1.1B" else f"gpu-llama-{options.size}", result, options.device)
    return int(not all("seconds" in one for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
