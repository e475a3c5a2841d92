"""Recurrent networks, and those of attention and its relatives, over (rows, positions, width)."""

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.architectures.rows import CLASSES, TOKENS, WORDS

Blocks = list[Callable[[], nn.Module]]
WIDTH = 256


class Recurrent(nn.Module):
    """The outputs of one recurrent layer, without its last state."""

    def __init__(self, kind: type[nn.RNNBase], inputs: int, width: int, **options: bool) -> None:
        super().__init__()
        self.layer = kind(inputs, width, batch_first=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(x)[0]
        return outputs


class Last(nn.Module):
    """Of a sequence (rows, positions, width) the last position."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, -1]


def lstm() -> Blocks:
    return [lambda: Recurrent(nn.LSTM, 64, 512), *[lambda: Recurrent(nn.LSTM, 512, 512)] * 3, Last, _linear(512)]


def gru() -> Blocks:
    return [lambda: Recurrent(nn.GRU, 64, 512), *[lambda: Recurrent(nn.GRU, 512, 512)] * 3, Last, _linear(512)]


def bidirectional_lstm() -> Blocks:
    layer = functools.partial(Recurrent, nn.LSTM, 512, 256, bidirectional=True)
    return [lambda: Recurrent(nn.LSTM, 64, 256, bidirectional=True), *[layer] * 3, Last, _linear(512)]


def lstm_language() -> Blocks:
    return [lambda: nn.Embedding(WORDS, 512), *[lambda: Recurrent(nn.LSTM, 512, 512)] * 2, lambda: nn.Linear(512, WORDS)]


def _linear(width: int, outputs: int = CLASSES) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(width, outputs)


class Norm(nn.Module):
    """Root mean square normalization, as in Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Adapted(nn.Module):
    """A frozen linear layer and a trained product of low rank beside it (LoRA)."""

    def __init__(self, inputs: int, outputs: int, rank: int = 8) -> None:
        super().__init__()
        self.whole = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole(x) + self.up(self.down(x))


class Attention(nn.Module):
    """Causal, with rotary places, over (rows, positions, width)."""

    def __init__(self, width: int, heads: int, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.heads, self.joined, self.out = heads, linear(width, 3 * width), linear(width, width)
        rates = 10000.0 ** (-torch.arange(0, width // heads, 2) / (width // heads))
        angles = torch.outer(torch.arange(TOKENS), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = self.joined(x).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        q, k = self._turned(q), self._turned(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(b, t, w))
        return y

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-high, low], dim=-1) * self.sin


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.one, self.attention, self.two = Norm(width), Attention(width, heads, linear), Norm(width)
        self.gate, self.up, self.down = linear(width, 3 * width), linear(width, 3 * width), linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.one(x))
        y = self.two(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _llama(linear: Callable[[int, int], nn.Module], width: int, depth: int) -> Blocks:
    block = functools.partial(LlamaBlock, width, width // 64, linear)
    return [lambda: nn.Embedding(WORDS, width), *[block] * depth, lambda: nn.Sequential(Norm(width), nn.Linear(width, WORDS))]


def llama_untied() -> Blocks:
    return _llama(functools.partial(nn.Linear, bias=False), 512, 6)


def lora() -> Blocks:
    """Only the adapters learn: tokens, norms and head are frozen."""
    first, *middle, last = _llama(Adapted, 768, 6)

    def frozen(factory: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return lambda: factory().requires_grad_(False)

    return [frozen(first), *middle, frozen(last)]


def bert() -> Blocks:
    layer = functools.partial(nn.TransformerEncoderLayer, WIDTH, 4, 4 * WIDTH, batch_first=True)
    return [lambda: nn.Embedding(WORDS, WIDTH), *[layer] * 6, Last, _linear(WIDTH)]


class Patches(nn.Module):
    """Images to tokens (rows, patches + 1, width) with their places, behind a class token."""

    def __init__(self, side: int, width: int, size: int) -> None:
        super().__init__()
        self.project, self.first = nn.Conv2d(3, width, size, stride=size), nn.Parameter(torch.zeros(1, 1, width))
        self.place = nn.Parameter(torch.randn(1, 1 + (side // size) ** 2, width) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.project(x).flatten(2).transpose(1, 2)
        return torch.cat([self.first.expand(len(x), -1, -1), patches], dim=1) + self.place


def vit() -> Blocks:
    layer = functools.partial(nn.TransformerEncoderLayer, 384, 6, 1536, batch_first=True, norm_first=True, activation="gelu")
    return [lambda: Patches(64, 384, 8), *[layer] * 6, Last, _linear(384)]


class Performer(nn.Module):
    """Linear attention by einsum over (rows, positions, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.joined, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.joined(self.norm(x)).chunk(3, dim=-1)
        memory = torch.einsum("btd,bte->bde", F.softmax(k, dim=1), v)
        y: torch.Tensor = x + self.out(torch.einsum("btd,bde->bte", F.softmax(q, dim=-1), memory))
        return y


def performer() -> Blocks:
    return [lambda: nn.Embedding(WORDS, 384), *[lambda: Performer(384)] * 6, Last, _linear(384)]


class Fourier(nn.Module):
    """FNet's mixing by a Fourier transform, and a feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x + torch.fft.fft2(x).real)
        return self.two(x + self.down(F.gelu(self.up(x))))


def fnet() -> Blocks:
    return [lambda: nn.Embedding(WORDS, WIDTH), *[lambda: Fourier(WIDTH)] * 6, Last, _linear(WIDTH)]


class Mixer(nn.Module):
    """MLP-Mixer's layer over (rows, patches, width)."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.one(x).transpose(1, 2)).transpose(1, 2)
        y: torch.Tensor = x + self.channels(self.two(x))
        return y


def mlp_mixer() -> Blocks:
    return [lambda: Patches(64, 384, 8), *[lambda: Mixer(65, 384)] * 6, Last, _linear(384)]
