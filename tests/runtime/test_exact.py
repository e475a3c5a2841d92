"""`streamed` and `checkpointed` equal `full`, bit for bit, whatever is trained and however it is brought to the device.

Compared before every update and at the end: weights, gradients, optimizer state, buffers, losses. The first tensor that
differs is named. Every model meets every way; options are spread over the models so that each pair of them meets.
"""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seqpart.zoo.models import gpt, mlp
from tests.choice import only_quick
from tests.exactly import FULL, HOWS, Trained, first_difference, numbers, tokens
from tests.runtime.test_same_as_plain import plain_modules


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, *layers):
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x):
        return x + self.inner(x)


class Averaged(nn.Module):
    """Divides by the running mean of |x|, which it moves before it uses it, and counts its calls in another buffer."""

    def __init__(self, width, *, replaces):
        super().__init__()
        self.linear, self.replaces = nn.Linear(width, width), replaces
        self.register_buffer("scale", torch.ones(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x):
        if self.training:
            now = 0.9 * self.scale + 0.1 * x.detach().abs().mean(0)
            self.calls += 1
            if self.replaces:
                self.scale = now
            else:
                self.scale.copy_(now)
        return self.linear(x) / self.scale


class Replaced(nn.Module):
    """Uses its buffer and then, to learn, puts another tensor in its place."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x):
        y = self.linear(x) * self.scale
        if self.training:
            self.scale = self.scale * 0.5
        return y


class Shuffled(nn.Module):
    """Its output is not contiguous: dimensions 1 and 2 change places."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x).transpose(1, 2)


class Last(nn.Module):
    """Its output is a part of a larger tensor: the last position."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x)[:, -1]


class Unused(nn.Module):
    """One of its parameters never gets a gradient, and one in some micro-batches only."""

    def __init__(self, width):
        super().__init__()
        self.linear, self.unused = nn.Linear(width, width), nn.Linear(width, width)
        self.rare = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        return y * self.rare if len(x) < 3 else y


class Placed(nn.Module):
    """x + a parameter of one row, through a view, as the last operation."""

    def __init__(self, *shape):
        super().__init__()
        self.place, self.again = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(shape))

    def forward(self, x):
        return x + self.place.unsqueeze(0) + torch.tanh(self.again)


class Attention(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(width, 2, dropout=dropout, batch_first=True), nn.LayerNorm(width)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


def frozen(module):
    return module.requires_grad_(False)


def dense():
    return mlp(12, 4, width=12, depth=4)


def doubles():
    kind = {"dtype": torch.float64}
    return [
        lambda: nn.Linear(12, 10, **kind), lambda: nn.Sequential(nn.BatchNorm1d(10, **kind), nn.Tanh()),
        lambda: Residual(nn.LayerNorm(10, **kind), nn.Linear(10, 10, **kind)), lambda: nn.Linear(10, 4, **kind),
    ]  # fmt: skip


def dropping():
    return [
        lambda: nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.3)),
        lambda: Residual(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2)),
        lambda: nn.Dropout(0.1),
        lambda: Residual(nn.Linear(16, 16), nn.Dropout(0.5, inplace=True)),
        lambda: nn.Linear(16, 4),
    ]


def pictures():
    return [
        lambda: nn.Conv2d(2, 6, 3, padding=1),
        lambda: nn.BatchNorm2d(6),
        lambda: nn.ReLU(inplace=True),
        lambda: nn.Sequential(nn.Conv2d(6, 6, 3, stride=2), nn.BatchNorm2d(6)),
        lambda: nn.Flatten(),
        lambda: nn.ReLU(inplace=True),
        lambda: nn.Sequential(nn.Linear(24, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)),
    ]


def channels_last():
    return [
        lambda: nn.Conv2d(2, 8, 3, padding=1).to(memory_format=torch.channels_last),
        lambda: nn.BatchNorm2d(8),
        lambda: nn.Sequential(nn.Hardswish(inplace=True), nn.Conv2d(8, 8, 3)),
        lambda: nn.Sequential(nn.GELU(), nn.Flatten(), nn.Linear(32, 4)),
    ]


def statistics():
    return [
        lambda: nn.Linear(12, 9),
        lambda: Averaged(9, replaces=False),
        lambda: Averaged(9, replaces=True),
        lambda: Replaced(9),
        lambda: nn.BatchNorm1d(9, affine=False, momentum=None),
        lambda: nn.Linear(9, 4),
    ]


def strided():
    return [
        lambda: Shuffled(12),
        lambda: Shuffled(6),
        lambda: nn.Sequential(nn.GELU(), nn.Linear(12, 12)),
        lambda: Last(12),
        lambda: nn.Sequential(nn.GELU(), nn.Linear(12, 4)),
    ]


def partly_frozen(which):
    blocks = [
        nn.Linear(12, 10),
        nn.BatchNorm1d(10),
        Residual(nn.Linear(10, 10), nn.Tanh()),
        nn.Linear(10, 10),
        nn.Linear(10, 4),
    ]
    return nn.Sequential(*(frozen(block) if number in which else block for number, block in enumerate(blocks)))


def unused():
    return [lambda: nn.Linear(12, 9), lambda: Unused(9), lambda: Unused(9), lambda: nn.Linear(9, 4)]


def placed():
    return [
        lambda: nn.Linear(12, 12), lambda: Placed(4, 12), lambda: Placed(4, 12),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 4)),
    ]  # fmt: skip


def attentive():
    return [
        lambda: nn.Linear(12, 8), lambda: Attention(8, 0.3),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(32, 4)),
    ]  # fmt: skip


def narrowing():
    """Under autocast its boundaries are bfloat16, float32 and bfloat16."""
    return [
        lambda: nn.Linear(12, 16), lambda: nn.Sequential(nn.LayerNorm(16), nn.Softmax(1)), lambda: nn.Linear(16, 16),
        lambda: nn.BatchNorm1d(16), lambda: nn.ReLU(inplace=True), lambda: nn.Linear(16, 4),
    ]  # fmt: skip


def language(**options):
    return gpt(11, 6, width=8, depth=2, heads=2, **options)


dropping_language = functools.partial(language, dropout=0.2)


SGD, ADAM, ADAMW = (
    {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.01}, {"optimizer": "adam"},
    {"optimizer": "adamw", "weight_decay": 0.1},
)  # fmt: skip


def repeated():
    """One layer five times, twice in partitions that borrow it: the gradients of its uses are added from the last on."""
    again = nn.Sequential(nn.Linear(12, 12), nn.Tanh())
    return nn.Sequential(nn.Linear(12, 12), *[again] * 5, nn.Linear(12, 4))


CLIP, NARROW = {"clip_grad_norm": 0.2}, {"dtype": "bf16"}
COSINE, LINEAR = {"lr_schedule": "cosine", "warmup_updates": 2}, {"lr_schedule": "linear"}
WHOLE, ONE, ODD = {"micro_batch_size": 8}, {"micro_batch_size": 1}, {"micro_batch_size": 3}

CASES = {
    "mlp, sgd": (dense, (12,), (0, 1, 3, 5), SGD | COSINE | ODD),
    "mlp, adam, clipped, bf16": (dense, (12,), (0, 3), ADAM | CLIP | NARROW | WHOLE),
    "mlp, adamw, clipped": (dense, (12,), (0, 1, 2, 3, 4, 5), ADAMW | CLIP | LINEAR | ODD),
    "dropout, sgd": (dropping, (12,), (0, 1, 2, 3), SGD | ODD),
    "dropout, adam, clipped": (dropping, (12,), (0, 2, 4), ADAM | CLIP | ONE | LINEAR),
    "convolutions, adamw": (pictures, (2, 6, 6), (0, 1, 2, 3, 4, 5, 6), ADAMW | ODD | LINEAR),
    "convolutions, sgd, bf16": (pictures, (2, 6, 6), (0, 2, 4, 6), SGD | CLIP | NARROW | WHOLE),
    "channels last, adam": (channels_last, (2, 4, 4), (0, 1, 2, 3), ADAM | COSINE | ODD),
    "statistics, sgd, clipped": (statistics, (12,), (0, 1, 2, 3, 4, 5), SGD | CLIP | ODD),
    "statistics, adam": (statistics, (12,), (0, 2, 4), ADAM | WHOLE | LINEAR),
    "strides, adamw": (strided, (6, 12), (0, 1, 2, 3, 4), ADAMW | COSINE | ODD),
    "strides, sgd, bf16": (strided, (6, 12), (0, 1, 2, 4), SGD | NARROW | ONE),
    "frozen first, sgd": (functools.partial(partly_frozen, {0, 1}), (12,), (0, 1, 2, 4), SGD | LINEAR | ODD),
    "frozen middle, adam, clipped": (functools.partial(partly_frozen, {2, 3}), (12,), (0, 2, 3, 4), ADAM | CLIP | COSINE | ODD),
    "frozen last, adamw, bf16": (functools.partial(partly_frozen, {3, 4}), (12,), (0, 1, 3), ADAMW | NARROW | WHOLE),
    "unused, adamw, clipped": (unused, (12,), (0, 1, 2, 3), ADAMW | CLIP | ODD),
    "unused, sgd": (unused, (12,), (0, 2), SGD | WHOLE),
    "a gradient passed on whole, adam": (placed, (4, 12), (0, 1, 2, 3), ADAM | ONE | COSINE),
    "attention, adamw, bf16": (attentive, (4, 12), (0, 1, 2, 3), ADAMW | NARROW | ODD),
    "attention, sgd, clipped": (attentive, (4, 12), (0, 2), SGD | CLIP | WHOLE | COSINE),
    "narrow and wide boundaries, adam": (narrowing, (12,), (0, 1, 2, 3, 4, 5), ADAM | NARROW | LINEAR | ODD),
    "gpt with dropout, adamw, clipped": (dropping_language, None, (0, 1, 2, 3), ADAMW | CLIP | COSINE | ODD),
    "gpt, sgd, bf16": (language, None, (0, 2), SGD | NARROW | WHOLE),
    "tied, adam, clipped": (functools.partial(language, tied=True, dropout=0.1), None, (0, 1, 2, 3), ADAM | CLIP | ODD),
    "tied, sgd, bf16": (functools.partial(language, tied=True), None, (0, 3), SGD | NARROW | ODD | LINEAR),
    "one layer again and again, sgd": (repeated, (12,), (0, 2, 4, 6), SGD | ODD),
    "one layer again and again, adam, clipped": (repeated, (12,), (0, 3, 5), ADAM | CLIP | WHOLE),
    "float64, sgd, clipped": (doubles, (12,), (0, 1, 2, 3), SGD | CLIP | LINEAR | ODD),
    "float64, adam": (doubles, (12,), (0, 2), ADAM | COSINE | WHOLE),
}  # fmt: skip


@pytest.fixture
def arms(monkeypatch, tmp_path):
    """Runs of a case by name: `arms(name)(how)`."""

    def of(name):
        model, shape, partitions, options = CASES[name]
        dtype = torch.float64 if model is doubles else torch.float32
        data = tokens() if shape is None else numbers(shape, dtype=dtype)
        return Trained(monkeypatch, tmp_path, fresh(model), data, partitions=partitions, **options)

    return of


def fresh(model):
    """Modules that are given alive have the same initial weights in each run."""

    def build():
        torch.manual_seed(3)
        return model()

    return build


QUICK = [
    "mlp, adam, clipped, bf16",
    "tied, adam, clipped",
]


@pytest.mark.parametrize("name", only_quick(CASES, QUICK))
def test_every_way_to_train_gives_the_bits_of_full_training(name, arms):
    """Each case in a quarter of the ways, in turn, so that each way is taken by six cases or more; and two in an eighth."""
    arm, number = arms(name), [*CASES].index(name)
    hows = HOWS[number % 4 :: 8 if name in QUICK else 4]
    expected = arm.run(FULL)
    assert any(key[1] == "gradient" for key in expected)
    for how in hows:
        found = arm.run(how)
        if name.startswith("strides"):  # between partitions that are tested one by one, rows lie one behind the other
            tested = "end", "loss", "test"
            assert found.pop(tested).item() == pytest.approx(expected[tested].item(), rel=1e-3)
            found[tested] = expected[tested]
        assert first_difference(found, expected) is None, str(how)


PLAIN = [
    "mlp, sgd",
    "mlp, adamw, clipped",
    "convolutions, adamw",
    "frozen middle, adam, clipped",
    "gpt, sgd, bf16",
    "float64, adam",
]


@pytest.mark.parametrize("name", only_quick(PLAIN, ["mlp, sgd", "gpt, sgd, bf16"]))
def test_without_dropout_the_bits_are_those_of_a_plain_loop(name, arms):
    model, shape, _, options = CASES[name]
    arm = arms(name)
    expected = plain_loop(fresh(model)(), *arm.rows(), {**arm.options, **options}, positions=shape is None)
    for how in (FULL, HOWS[2], HOWS[5]):
        found = {key: value for key, value in arm.run(how, shuffle=False).items() if key[0] == "end" and key[1] == "value"}
        assert first_difference(found, expected) is None, str(how)


def plain_loop(model, x, y, options, *, positions):
    """The final weights and buffers, by PyTorch alone with its own optimizer, clipping and autocast."""
    chain, batch, micro_batch = built(model, options["seed"]), options["batch_size"], options["micro_batch_size"]
    parameters = [parameter for parameter in chain.parameters() if parameter.requires_grad]
    optimizer = optimizer_of(parameters, options)
    starts = [*range(0, len(x), batch)] * options["epochs"]
    for done, start in enumerate(starts):
        picked = slice(start, min(start + batch, len(x)))
        rows = picked.stop - picked.start
        for at in range(picked.start, picked.stop, micro_batch):
            part = slice(at, min(at + micro_batch, picked.stop))
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled="dtype" in options):
                output, labels = chain(x[part]), y[part]
                loss = F.cross_entropy(output.flatten(0, 1), labels.flatten()) if positions else F.cross_entropy(output, labels)
            share = (part.stop - part.start) / rows
            (loss if share == 1 else loss * share).backward()
        if "clip_grad_norm" in options:
            nn.utils.clip_grad_norm_(parameters, options["clip_grad_norm"])
        for group in optimizer.param_groups:
            group["lr"] = options["lr"] * rate(done, len(starts), options)
        optimizer.step()
        optimizer.zero_grad()
    return {("end", "value", name): tensor for name, tensor in chain.state_dict().items()}


def built(model, seed):
    """Blocks from factories take their initial weights from a random state of their own."""
    if isinstance(model, nn.Module):
        return model.train()
    return nn.Sequential(*plain_modules(model, seed)).train()


def optimizer_of(parameters, options):
    keywords = {key: options[key] for key in ("lr", "momentum", "weight_decay") if key in options}
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[options["optimizer"]]
    return kind(parameters, fused=True, **keywords)


def rate(done, updates, options):
    warmup = options.get("warmup_updates", 0)
    if done < warmup:
        return (done + 1) / (warmup + 1)
    share = (done - warmup) / (updates - warmup)
    schedule = options.get("lr_schedule", "constant")
    return {"constant": 1.0, "linear": 1 - share, "cosine": 0.5 * (1 + math.cos(math.pi * share))}[schedule]
