"""Whole models with a forward of their own, as people have them: none of them is a list of blocks."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


class Twice(nn.Module):
    def __init__(self, inside, outside, dropout=0.1):
        super().__init__()
        self.first, self.norm, self.dropout = (
            nn.Conv2d(inside, outside, 3, padding=1),
            nn.BatchNorm2d(outside),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        return self.dropout(F.relu(self.norm(self.first(x)), inplace=True))


class UNet(nn.Module):
    """Its skips pass over everything between the way down and the way up."""

    def __init__(self, classes=3, width=4):
        super().__init__()
        self.down = nn.ModuleList([Twice(1, width), Twice(width, 2 * width), Twice(2 * width, 4 * width)])
        self.up = nn.ModuleList([Twice(6 * width, 2 * width), Twice(3 * width, width)])
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        skips = []
        for number, block in enumerate(self.down):
            if number:
                x = F.max_pool2d(x, 2)
            x = block(x)
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = block(torch.cat([x, skips.pop()], dim=1))
        return self.head(x.mean(dim=(2, 3)))


class Rotary(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("frequencies", 100.0 ** -torch.linspace(0, 1, width // 2), persistent=False)

    def forward(self, positions):
        angles = positions[:, :, None].float() * self.frequencies
        return angles.cos(), angles.sin()


class Layer(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads, self.norm, self.mix = heads, nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.feed = (
            nn.Linear(width, width),
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)),
        )

    def forward(self, hidden, *, mask=None, rotary=None):
        parts = self.mix(self.norm(hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        cos, sin = (part[:, None, :, :] for part in rotary)
        query, key = ((part * cos[..., : part.shape[-1]] + part.roll(1, -1) * sin[..., : part.shape[-1]]) for part in parts[:2])
        mixed = F.scaled_dot_product_attention(query, key, parts[2], attn_mask=mask)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return (hidden + self.feed(hidden), None)


class Decoder(nn.Module):
    """One rotary table and one mask of padding for all layers, a head that is the embedding, and a dict for a result."""

    def __init__(self, words=11, width=8, layers=3):
        super().__init__()
        self.embed, self.rotary = nn.Embedding(words, width), Rotary(width)
        self.start = nn.Parameter(torch.zeros(1, 1, width))
        self.layers, self.norm = nn.ModuleList(Layer(width) for _ in range(layers)), nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, labels=None):
        rows, length = tokens.shape
        positions = torch.arange(length, device=tokens.device)[None]
        causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        mask = causal[None, None] & (tokens != 0)[:, None, None, :] | torch.eye(length, dtype=torch.bool, device=tokens.device)
        hidden = F.dropout(self.embed(tokens), 0.1, self.training) + self.start.expand(rows, -1, -1)
        rotary = self.rotary(positions)
        for layer in self.layers:
            hidden, _ = layer(hidden, mask=mask, rotary=rotary)
        return {"loss": None, "logits": self.head(self.norm(hidden))}


class Dense(nn.Module):
    """Each layer takes what all before it gave."""

    def __init__(self, classes=3, width=6, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4 + number * width, width) for number in range(layers))
        self.register_buffer("scale", torch.tensor([2.0, 0.5]))
        self.head = nn.Linear(4 + layers * width, classes)

    def forward(self, x):
        found = [x]
        for layer in self.layers:
            found.append(torch.relu(layer(torch.cat(found, 1))) * self.scale[0])
        return self.head(torch.cat(found, 1)) * self.scale[1]


class Bands(nn.Module):
    """The sum of a value's gradients shows in which order they were added: it is taken again and again, at all scales."""

    def __init__(self, classes=3, width=8):
        super().__init__()
        self.first = nn.Linear(4, width)
        self.layers, self.head = nn.ModuleList(nn.Linear(width, width) for _ in range(4)), nn.Linear(width, classes)

    def forward(self, x):
        first = hidden = torch.tanh(self.first(x))
        for number, layer in enumerate(self.layers):
            hidden = torch.tanh(layer(hidden)) * 3.0**number + first * first * 0.7**number + first
        return self.head(hidden)


class Fan(nn.Module):
    """What all layers gave comes together at the end: more values than boundaries on the disk have buffers."""

    def __init__(self, classes=3, width=8):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, width), *(nn.Linear(width, width) for _ in range(9))])
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        found = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            found.append(x)
        return self.head(sum(x * (n + 1) for n, x in enumerate(found)))


class Experts(nn.Module):
    """Each token goes to two of four: which of them, and so the shapes inside, depends on values."""

    def __init__(self, width, experts=4):
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, hidden):
        flat = hidden.flatten(0, -2)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        found = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if rows.numel():
                found.index_add_(0, rows, expert(flat[rows]) * weights[rows, place, None])
        return found.view_as(hidden)


class ExpertLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mix, self.experts = nn.LayerNorm(width), nn.Linear(width, width), Experts(width)

    def forward(self, hidden):
        hidden = hidden + self.mix(self.norm(hidden)).cumsum(1) / 8
        scale = 1.0 if float(hidden.detach().abs().sum()) > 0 else 2.0
        return hidden + scale * self.experts(hidden)


class Mixture(nn.Module):
    """A decoder whose layers are mixtures of experts, and read a number out of a tensor."""

    def __init__(self, words=11, width=16, layers=3):
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers = nn.ModuleList(ExpertLayer(width) for _ in range(layers))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


@dataclass
class State:
    """What layers hand to each other, with tensors in it."""

    hidden: torch.Tensor
    mask: torch.Tensor
    step: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    logits: torch.Tensor
    state: State


class StateLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, state):
        hidden = state.hidden + torch.tanh(self.mix(state.hidden)) * state.mask
        return State(hidden, state.mask, state.step + 1)


class States(nn.Module):
    """With heads that only training calls, whose running statistics move although nobody learns from them."""

    def __init__(self, classes=3, width=8):
        super().__init__()
        self.first, self.layers = nn.Linear(4, width), nn.ModuleList(StateLayer(width) for _ in range(4))
        self.spare = nn.Sequential(nn.BatchNorm1d(width), nn.Linear(width, classes))
        self.head, self.late = nn.Linear(width, classes), nn.BatchNorm1d(width)

    def forward(self, x):
        state = State(self.first(x), (x[:, :1] > 0).float())
        for number, layer in enumerate(self.layers):
            state = layer(state)
            if number == 1 and self.training:
                self.spare(state.hidden)
        scores = self.head(state.hidden)
        if self.training:
            self.late(state.hidden)
        return Found(scores, state)
