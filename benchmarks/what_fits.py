"""Which models train on which cards, how fast, and what they wait for: planned, on any machine, for cards that are not there.

    python -m benchmarks.what_fits                     docs/what_fits.md and benchmarks/results/what-fits.json
    python -m benchmarks.what_fits --models vit-l --ram 32GB    a part of it, which is not kept
    python -m benchmarks.what_fits --quick                      a small model on one card, to see that it runs; not kept

Every line is what `seqpart plan --device sim:CARD --ram-limit RAM --method auto --dtype bf16` says of exact training with Adam:
matrix products in bfloat16, weights and optimizer state in float32, 12 bytes a parameter and 4 of its gradient. Nothing is
trained; blocks have the shapes of the models that they are named for, and random weights.
"""

import argparse
import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import quick
from benchmarks.record import save
from seqpart import Trainer
from seqpart.device.card import load
from seqpart.errors import DoesNotFit, SeqpartError

CARDS = ("rtx4060-laptop-8gb", "rtx3060-12gb", "rtx4080-16gb", "rtx4090")
RAM = ("32GB", "64GB", "128GB")
PRECISIONS = ("float32", "TF32", "bfloat16")
"""Of matrix products, for the last of the cards with the most host memory."""
RESERVED = 0.95
"""Of a card's memory, what is given as the limit: its screen has the rest."""
PAGE = "what_fits.md"


@dataclass(frozen=True)
class Model:
    title: str
    blocks: Callable[[], list[Callable[[], nn.Module]]]
    rows: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    batch: int


class Attention(nn.Module):
    """Causal or not, with as many heads for keys and values as asked for; no biases."""

    def __init__(self, width: int, heads: int, kv_heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.causal = heads, kv_heads, causal
        self.size = width // heads
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.kv_heads, self.kv_heads], 1)
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """SwiGLU, as in Llama."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.gate, self.down = (
            nn.Linear(*size, bias=False) for size in ((width, hidden), (width, hidden), (hidden, width))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Normalization before attention and before what follows it."""

    def __init__(
        self, width: int, heads: int, kv_heads: int, hidden: int, *, gated: bool, causal: bool, modulated: bool
    ) -> None:
        super().__init__()
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.before, self.between = norm(width), norm(width)
        self.attention = Attention(width, heads, kv_heads, causal=causal)
        plain = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.follows = Gated(width, hidden) if gated else plain
        self.condition = nn.Linear(width, 6 * width) if modulated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.condition is None:
            x = x + self.attention(self.before(x))
            return x + self.follows(self.between(x))
        parts = self.condition(x.mean(1, keepdim=True)).chunk(6, -1)  # stands for the embedding of a step and a class
        x = x + parts[2] * self.attention(self.before(x) * (1 + parts[0]) + parts[1])
        return x + parts[5] * self.follows(self.between(x) * (1 + parts[3]) + parts[4])


class Patches(nn.Module):
    def __init__(self, channels: int, patch: int, width: int, tokens: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, width, patch, patch)
        self.place = nn.Parameter(torch.zeros(tokens, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x).flatten(2).transpose(1, 2) + self.place


class Pooled(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x).mean(1))


class Embedded(nn.Module):
    def __init__(self, vocabulary: int, width: int, context: int, *, places: bool) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.zeros(context, width)) if places else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        return x if self.place is None else x + self.place


def language(
    vocabulary: int, context: int, width: int, depth: int, heads: int, kv_heads: int, hidden: int, *, gated: bool
) -> Any:
    def blocks() -> list[Callable[[], nn.Module]]:
        one = functools.partial(Block, width, heads, kv_heads, hidden, gated=gated, causal=True, modulated=False)
        norm = nn.RMSNorm if gated else nn.LayerNorm
        first = functools.partial(Embedded, vocabulary, width, context, places=not gated)
        head = functools.partial(nn.Linear, width, vocabulary, bias=False)
        return [first, *([one] * depth), functools.partial(norm, width), head]

    return blocks


def images(size: int, patch: int, channels: int, width: int, depth: int, heads: int, *, modulated: bool) -> Any:
    def blocks() -> list[Callable[[], nn.Module]]:
        one = functools.partial(Block, width, heads, heads, 4 * width, gated=False, causal=False, modulated=modulated)
        first = functools.partial(Patches, channels, patch, width, (size // patch) ** 2)
        return [first, *([one] * depth), functools.partial(Pooled, width, 1000)]

    return blocks


def texts(vocabulary: int, context: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    return lambda rows: (torch.arange(rows * context).view(rows, context) % vocabulary,) * 2


def pictures(channels: int, size: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    return lambda rows: (torch.zeros(rows, channels, size, size), torch.arange(rows) % 1000)


_VIT = images(224, 16, 3, 1024, 24, 16, modulated=False)
_DIT = images(64, 2, 4, 2048, 28, 32, modulated=True)
_GPT2 = language(50257, 1024, 1600, 48, 25, 25, 6400, gated=False)
_LLAMA_1 = language(32000, 2048, 2048, 22, 32, 4, 5632, gated=True)
_LLAMA_3 = language(32000, 2048, 3200, 26, 32, 32, 8640, gated=True)
_LLAMA_8 = language(128256, 2048, 4096, 32, 32, 8, 14336, gated=True)
_LONG_8 = language(32000, 16384, 4096, 32, 32, 8, 14336, gated=True)
MODELS = {
    "vit-l": Model("ViT-L/16, 224 x 224", _VIT, pictures(3, 224), 32),
    "gpt2-xl": Model("GPT-2 XL, 1024 tokens", _GPT2, texts(50257, 1024), 16),
    "llama-1.1b": Model("Llama 1.1 B, 2048 tokens", _LLAMA_1, texts(32000, 2048), 16),
    "dit-2b": Model("DiT, 2 B, 64 x 64 latents", _DIT, pictures(4, 64), 32),
    "llama-3b": Model("Llama 3 B, 2048 tokens", _LLAMA_3, texts(32000, 2048), 16),
    "llama-8b": Model("Llama 8 B, 2048 tokens", _LLAMA_8, texts(128256, 2048), 16),
    "llama-7b-long": Model("Llama 7 B with a vocabulary of 32,000, 16384 tokens", _LONG_8, texts(32000, 16384), 2),
}
QUICK = {"a small vit": Model("A small ViT", images(32, 8, 3, 64, 2, 4, modulated=True), pictures(3, 32), 8)}


@contextmanager
def products_in(precision: str) -> Iterator[str]:
    """A context in which products of float32 take TF32 if `precision` says so. Yields the option `dtype`."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32" if precision == "TF32" else "ieee"
    try:
        yield "bf16" if precision == "bfloat16" else "fp32"
    finally:
        matmul.fp32_precision = before


def planned(model: Model, card: str, ram: str, precision: str = "bfloat16") -> dict[str, Any]:
    """What one line of the page says."""
    limit = int(RESERVED * load(card).memory)
    x, y = model.rows(2 * model.batch)
    with tempfile.TemporaryDirectory() as folder, products_in(precision) as dtype:
        trainer = Trainer(
            model.blocks(), optimizer="adam", device=f"sim:{card}", method="auto", mem_limit=limit, ram_limit=ram, seed=0,
            dtype=dtype, batch_size=model.batch, epochs=1, output_dir=Path(folder) / "run", quiet=True,
        )  # fmt: skip
        try:
            plan = trainer.plan((x, y), (x[:1], y[:1]))
        except DoesNotFit as refusal:
            return {"fits": False, "smallest": refusal.smallest}
    tiers = {part.tier for part in plan.partitions if not part.stays}
    waits = next((reason for reason in plan.reasons if "it waits for" in reason), "")
    return {
        "fits": True, "method": plan.method, "partitions": len(plan.partitions), "seconds": plan.update_seconds,
        "homes": " and ".join(sorted(tiers)), "steps": "host" if plan.host_steps else "device",
        "waits for": waits.rpartition("it waits for ")[2].partition(",")[0],
        "micro-batch": plan.partitions[0].micro_batch, "parameters": plan.parameters, "disk": plan.disk_bytes,
    }  # fmt: skip


def cell(found: dict[str, Any]) -> str:
    if not found["fits"]:
        return f"needs {found['smallest'] / 1e9:.1f} GB" if found["smallest"] else "does not fit"
    where = f", {found['homes']}" if found["homes"] else ""
    where += ", steps on the host" if found["steps"] == "host" else ""
    return f"{found['seconds']:.2f} s, {found['method']}{where}; {found['waits for'] or 'the computation'}"


def page(result: dict[str, Any]) -> str:
    lines = [
        "# What fits", "",
        "Predicted seconds of one exact update with Adam and `--dtype bf16` (products in bfloat16, weights and state in",
        "float32), on simulated cards, by `python -m benchmarks.what_fits`, on any machine. After the seconds: the method,",
        "where streamed partitions are stored (pinned host memory, disk), where the optimizer steps if not on the device, and",
        "what the update waits for. The limit is 95 % of the card's memory.", "",
        "Nothing here was measured. Assumed: rates of products, links, disks and memory of `seqpart/device/cards/*.toml`, with",
        "a source each; that all products, those of attention too, run at the rate of large ones; other kernels take no time.",
    ]  # fmt: skip
    for name, cards in result.items():
        model = (MODELS | QUICK)[name]
        parameters = next((found["parameters"] for rams in cards.values() for found in rams.values() if found["fits"]), 0)
        lines += ["", f"## {model.title}", "", f"{parameters / 1e9:.2f} billion parameters, batch {model.batch}.", ""]
        cards, others = {card: rams for card, rams in cards.items() if card != "precisions"}, cards.get("precisions", {})
        rams = list(next(iter(cards.values())))
        lines += ["| card | " + " | ".join(f"--ram-limit {ram}" for ram in rams) + " |", "|---" * (len(rams) + 1) + "|"]
        lines += [
            f"| {load(card).name} | " + " | ".join(cell(found[ram]) for ram in rams) + " |" for card, found in cards.items()
        ]
        said = "; ".join(f"{precision} {cell(found)}" for precision, found in others.items())
        lines += ["", f"By the precision of products, on the last card with the most memory: {said}."] * bool(others)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--cards", nargs="*", default=list(CARDS))
    parser.add_argument("--ram", nargs="*", default=list(RAM))
    quick.add_to(parser)
    options = parser.parse_args()
    if options.quick:
        options.models, options.cards, options.ram = list(QUICK), CARDS[:1], RAM[:1]
    result: dict[str, Any] = {}
    for name in options.models:
        for card in options.cards:
            for ram in options.ram:
                try:
                    found = planned((MODELS | QUICK)[name], card, ram)
                except SeqpartError as error:
                    raise SystemExit(f"{name} on {card} with {ram}: {error}") from error
                result.setdefault(name, {}).setdefault(card, {})[ram] = found
                print(f"{name:13} {card:20} {ram:5} {cell(found)}", flush=True)
        last = {one: planned((MODELS | QUICK)[name], options.cards[-1], options.ram[-1], one) for one in PRECISIONS}
        result[name]["precisions"] = last
    if options.quick or (options.models, options.cards, options.ram) == (list(MODELS), list(CARDS), list(RAM)):
        with quick.places(options.quick) as docs:
            save("what-fits", result)
            (docs / PAGE).write_text(page(result))


if __name__ == "__main__":
    main()
