"""Small models with the habits of real ones."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    """Skips, with a ReLU in place."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(x))
        y += x
        return self.fc(F.relu_(y).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(3 if i == 0 else 4, 4, 3, padding=1) for i in range(3))
        self.up = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(2))

    def forward(self, x):
        skips = []
        for i, layer in enumerate(self.down):
            x = F.gelu(layer(x))
            if i < 2:
                skips.append(x)
                x = F.max_pool2d(x, 2)
        for layer in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = layer(torch.cat([x, skips.pop()], 1)).tanh()
        return x


class Dense(nn.Module):
    """Every layer takes what all before it gave."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4 * (i + 1), 4) for i in range(4))

    def forward(self, x):
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, -1)).sigmoid())
        return found[-1]


class Dropped(nn.Module):
    """Functional dropout, which asks for the mode, and drop path, which skips itself in evaluation."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            y = F.dropout(layer(x), 0.5, training=self.training)
            if self.training:
                y = y * torch.bernoulli(torch.full((x.shape[0], 1), 0.8, device=x.device)) / 0.8
            x = x + y
        return x


class Tokens(nn.Module):
    """A class token for every row, positions, and a mask from a range."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.cls_token, self.pos_embed = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 6, 8))
        self.register_buffer("scale", torch.tensor([0.5]))
        self.register_buffer("shift", torch.ones(8), persistent=False)
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        rows = x.shape[0]
        x = torch.cat([self.cls_token.expand(rows, -1, -1), self.embed(x)], dim=1) + self.pos_embed
        x = x * self.scale + self.shift
        x = self.blocks(x).reshape(rows * 6, 8)
        chosen = torch.arange(rows, device=x.device) * 6
        return {"logits": self.head(x[chosen]), "features": x}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x).relu()
        return F.linear(x, self.embedding.weight)


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x, *, turn, mask=None, scale=1.0):
        cos, sin = turn
        return {"x": self.proj(x * cos + x.flip(-1) * sin) * scale, "unused": None}


class Angles(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.rand(8))

    def forward(self, positions):
        angles = positions[..., None] * self.frequencies
        return angles.cos(), angles.sin()


class Rotary(nn.Module):
    """Cos and sin are made once and used in every layer, whose arguments have names; a part that learns nothing."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.embedding, self.angles = nn.Embedding(50, 8), Angles()
        self.layers = nn.ModuleList(Turned() for _ in range(3))
        self.gate = nn.Parameter(torch.ones(8))

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        turn = self.angles(torch.arange(input_ids.shape[1], device=input_ids.device)[None])
        with torch.no_grad():
            size = (x * self.gate).norm()
        for layer in self.layers:
            x = x + layer(x, turn=turn, scale=0.5)["x"] / size
        return x


class Half(nn.Module):
    """Half of a tensor is a view of it, and is changed in place; then the whole is used."""

    def __init__(self, in_a_later_block):
        super().__init__()
        self.first, self.between, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.in_a_later_block = in_a_later_block

    def forward(self, x):
        x = self.first(x)
        half = x[:, :4]
        y = self.between(x.clone()) if self.in_a_later_block else x.clone()
        half *= y[:, :4]
        x[:, 4:] = 1.0
        return self.last(x if self.in_a_later_block else self.between(x))


class Doubling(torch.autograd.Function):
    """Its backward is not that of its forward."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        first, second = self.a(x).T.mT.chunk(2, dim=1)
        x = torch.cat([*torch.stack([first, second])], 1)
        return self.b(Doubling.apply(x)) + (torch.zeros_like(x)[:, :1].fill_(x.shape[0]))


class Auxiliary(nn.Module):
    """A head that is used in training only."""

    def __init__(self):
        super().__init__()
        self.a, self.aux, self.b = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        aux = self.aux(x) if self.training else None
        return {"out": self.b(x), "aux": aux}


class Late(nn.Module):
    """A layer that is used in evaluation only."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.b(self.a(x))
        return x if self.training else self.c(x)


class Recurrent(nn.Module):
    """A module that keeps its weights in a list once more, and gives a tuple in a tuple."""

    def __init__(self):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(50, 8), nn.LSTM(8, 8, 2, batch_first=True, dropout=0.1)
        self.fc = nn.Linear(8, 3)

    def forward(self, input_ids):
        x, (hidden, _) = self.lstm(self.embedding(input_ids))
        return self.fc(x[:, -1] + hidden[-1])


class Narrowed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.a(x)
        with torch.autocast("cpu", torch.bfloat16):
            x = self.b(x @ x.new_ones(8, 8))
        return x.float()


class Repeated(nn.Module):
    """One module under two names, and every module called twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList([self.first, nn.Linear(4, 4)])

    def forward(self, x):
        for _ in range(2):
            for layer in self.layers:
                x = layer(x).relu()
        return x


class RunningMean(nn.Module):
    """Statistics outside of any block, in training only."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        x = self.a(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0) * 0.1)
        return self.b(x - self.mean)


class Uneven(nn.Module):
    """A skip in one mode only; the modes hand on different tensors. `made`: it skips what only this mode makes."""

    def __init__(self, in_training, made):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.in_training, self.made = in_training, made

    def forward(self, x):
        x = self.a(x)
        skips = self.training == self.in_training
        skip = x * 2 if self.made and skips else x
        y = self.b(x)
        return self.c(y + skip if skips else y)


@dataclass
class State:
    x: torch.Tensor
    scale: float
    skip: torch.Tensor | None = None


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, state):
        return State(self.proj(state.x) * state.scale, state.scale / 2, state.x)


class Described(nn.Module):
    """Blocks hand on a dataclass."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Stateful() for _ in range(3))

    def forward(self, x):
        state = State(x, 1.0)
        for layer in self.layers:
            state = layer(state)
        return state.x + state.skip


class Filled(nn.Module):
    """A tensor that several blocks fill, and a mask that is filled too."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        filled = torch.zeros_like(x)
        filled[:, :2] = x[:, :2]
        filled[:, 2:] = self.b(x)[:, 2:]
        mask = x.new_zeros(x.shape[0], 4, dtype=torch.bool)
        mask[:, 1] = True
        return self.c(filled.masked_fill(mask, 0.0))


class Between(nn.Module):
    """Calls a function between two layers."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 6), nn.Linear(6, 3), function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


class Looped(nn.TransformerEncoder):
    """Calls the layers itself, and packs nothing."""

    def forward(self, src, src_key_padding_mask=None):
        for layer in self.layers:
            src = layer(src, src_key_padding_mask=src_key_padding_mask)
        return src


class Padded(nn.Module):
    """A transformer over words, of which 0 is padding, passed twice; the mean over all positions. final: with a norm. kind: of
    encoder. shared: all of its layers are one. evaluates: it stays in evaluation mode. frozen: it and words do not learn."""

    def __init__(self, *, final=False, kind=nn.TransformerEncoder, shared=False, evaluates=False, frozen=False):
        super().__init__()
        self.words, norm = nn.Embedding(50, 8), nn.LayerNorm(8) if final else None
        self.encoder = kind(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, norm)
        self.head, self.evaluates = nn.Linear(8, 3), evaluates
        if shared:
            self.encoder.layers = nn.ModuleList([self.encoder.layers[0]] * 2)
        for part in (self.words, self.encoder) if frozen else ():
            part.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.encoder.train(mode and not self.evaluates)
        return self

    def forward(self, x):
        x, padding = self.words(x), x == 0
        return self.head(self.encoder(self.encoder(x, src_key_padding_mask=padding)).mean(1))
