"""The networks of the comparison, as lists of block factories. Without seqpart, which would set up our allocator.

S, L  the residual MLPs of benchmarks/streamed_networks.py on digits: 1.6 GB and 6.4 GB of training state in plain Adam
T     a GPT on characters: 151 million parameters, 2.4 GB of training state
"""

import functools
import hashlib
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import streamed_networks

Factory = Callable[[], nn.Module]

NAMES = ("S", "L", "T")
VOCABULARY, CONTEXT, HEADS = 65, 128, 16
WIDTHS = streamed_networks.WIDTHS | {"T": 1024}
DEPTHS = {"S": streamed_networks.DEPTH, "L": streamed_networks.DEPTH, "T": 12}
BATCHES = {"S": streamed_networks.BATCH, "L": streamed_networks.BATCH, "T": 8}
RATES = {"S": 1e-4, "L": 1e-4, "T": 3e-4}


class Embedding(nn.Module):
    """Tokens (R, T) to (R, T, W): what each is, and where it stands."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # The position table is called, and not sliced: ZeRO and FSDP gather weights in hooks around a module's call.
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); (R, T, W) in and out. A token sees itself and those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.mixed = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attention(x)
        return x + self.mlp(x)

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(2, (3, self.heads, -1))  # (R, T, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # (R, H, T, D) each
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mixed(seen.transpose(1, 2).flatten(2))


def _last(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))


def factories(network: str, width: int, depth: int) -> list[Factory]:
    """One factory per block. Equal blocks share one, so that seqpart measures them once."""
    if network != "T":
        return streamed_networks.network(width, depth)
    between = functools.partial(TransformerBlock, width, HEADS)
    return [functools.partial(Embedding, width), *[between] * depth, functools.partial(_last, width)]


def build(made_by: Factory, number: int, seed: int) -> nn.Module:
    """Block `number` with the initial weights that every arm starts from: keyed as seqpart keys them."""
    key = hashlib.blake2b(repr((seed, "build", number)).encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(key, "little") >> 1)
    return made_by()


def build_all(made_by: Sequence[Factory], seed: int) -> list[nn.Module]:
    return [build(factory, number, seed) for number, factory in enumerate(made_by)]


def mean_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of rows, or of all positions of all rows."""
    return F.cross_entropy(output.flatten(0, -2), labels.flatten())
