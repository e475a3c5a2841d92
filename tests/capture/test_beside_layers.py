"""What a user's model, loss or optimizer does beside its layers: done as in a plain loop, or refused, and never left out."""

import copy
import gc
from functools import cache, lru_cache, partial

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from seqpart import Trainer
from seqpart.errors import ModelError, OptionError
from tests.exactly import FULL, How, Trained, first_difference

pytestmark = pytest.mark.usefixtures("known_machine")
ROWS, BATCH = 32, 8


class Doubled(nn.Sequential):
    """Its forward was passed over: it was taken for a list of layers."""

    def forward(self, x):
        return 2 * super().forward(x) + 1


class Scaled(nn.Sequential):
    def __init__(self, *layers):
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.scale * super().forward(x)


class KeepsStatistics(nn.Module):
    """Its own `train` was never called: BatchNorm learned statistics that were to stay."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()


class Attends(nn.Module):
    """With another kernel of attention than the process has: its last bits were those of the default one."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 3)

    def forward(self, x):
        h = self.first(x).view(len(x), 4, 4, 4).transpose(1, 2)
        with sdpa_kernel(SDPBackend.MATH):
            h = F.scaled_dot_product_attention(h, h, h)
        return self.last(h.transpose(1, 2).flatten(1))


class Fourier(nn.Module):
    """A complex value is all that a layer hands to the next, and a buffer without dimensions says what was begun."""

    def __init__(self):
        super().__init__()
        self.first, self.beside, self.last = Spectrum(8, 16), Weighted(9), Size(9, 3)
        self.register_buffer("begun", torch.tensor(False))

    def forward(self, x):
        return self.last(self.beside(self.first(x)))


class Spectrum(nn.Linear):
    def forward(self, x):
        return torch.fft.rfft(super().forward(x))


class Weighted(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, z):
        return z * self.weight


class Size(nn.Linear):
    def forward(self, z):
        return super().forward((z * z.roll(1, -1).conj()).abs() + z.conj().imag)


class Rotates(nn.Module):
    """A part without parameters that is called twice: its constants were refused, since each has one home."""

    class Angles(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("frequencies", torch.arange(1.0, 17.0) / 16, persistent=False)

        def forward(self, h):
            return (h.detach() * self.frequencies).cos()

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.angles = self.Angles()

    def forward(self, x):
        h = self.first(x)
        h = self.second(h * self.angles(h)).relu()
        return self.last(h * self.angles(h))


class Siamese(nn.Module):
    """A layer with weights and constants is called twice: the constants were refused, since each has one home."""

    class Layer(nn.Linear):
        def __init__(self):
            super().__init__(8, 16)
            self.register_buffer("places", torch.arange(16.0) / 16, persistent=False)

        def forward(self, x):
            return super().forward(x).relu() + self.places

    def __init__(self):
        super().__init__()
        self.layer, self.inner, self.last = self.Layer(), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.inner(self.layer(x)) * self.inner(self.layer(x.flip(1))).tanh())


class PassesADict(nn.Module):
    """Layers write into the dict that they get, as those of sentence-transformers: a new tensor was taken for an input."""

    class Layer(nn.Linear):
        def forward(self, features):
            features["found"] = super().forward(features["x"]).relu()
            return features

    def __init__(self):
        super().__init__()
        self.first, self.last = self.Layer(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.first({"x": x})["found"])


class FrozenNorm(nn.BatchNorm1d):
    def train(self, mode=True):
        return super().train(False)


class Spectral(nn.Module):
    """A complex value waits beside a layer: its gradient was dropped where partitions meet."""

    def __init__(self):
        super().__init__()
        self.first, self.beside, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        y = self.first(x)
        spectrum = torch.fft.rfft(y)
        return self.last(torch.fft.irfft(spectrum.conj() * 2, n=16) + self.beside(y))


def layers():
    return nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)


def hooked():
    model = nn.Sequential(*layers())
    model.register_forward_hook(lambda module, given, found: found * 2)
    return model


class Untaken(nn.Module):
    """Most of its layers count statistics of what nobody takes: an IndexError where a partition was to begin at one."""

    def __init__(self):
        super().__init__()
        self.layers, self.last = (
            nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16)) for _ in range(4)),
            nn.Linear(16, 3),
        )

    def forward(self, x):
        *_, taken, _ = [layer(x) for layer in self.layers]
        return self.last(taken)


class Cached(nn.Module):
    """Its class keeps positions, which were those of the fake rows that it was recorded with."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)

    @staticmethod
    @lru_cache(maxsize=1)
    def positions(width):
        return torch.arange(width).float()

    def forward(self, x):
        return self.last(self.first(x) + self.positions(16))


class CachedInside(nn.Sequential):
    """The same in layers."""

    def __init__(self):
        super().__init__(nn.Sequential(CachedLayer(), nn.ReLU()), nn.Linear(8, 3))


class CachedLayer(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)

    @cache  # noqa: B019
    def positions(self, width):
        return torch.arange(width).float()

    def forward(self, x):
        return super().forward(x) + self.positions(x.shape[1])


class SiameseNorm(nn.Module):
    """Refused: the statistics of its BatchNorm belonged to two blocks."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))
        self.last = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x):
        return self.last(torch.cat([self.encoder(x), self.encoder(-x)], 1))


def norm_twice():
    norm = nn.BatchNorm1d(16)
    return nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Linear(16, 16), norm, nn.Linear(16, 3))


class Stems(nn.Module):
    """Two parts that have a normalisation in common."""

    def __init__(self):
        super().__init__()
        self.one, self.other = (nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16)) for _ in range(2))
        self.other[1] = self.one[1]
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.one(x) * self.other(x))


def nested_norm():
    norm = nn.BatchNorm1d(16)
    first, second = nn.Sequential(nn.Linear(8, 16), norm), nn.Sequential(nn.Linear(16, 16), norm)
    return nn.Sequential(first, nn.ReLU(), second, nn.Linear(16, 3))


MODELS = {
    "a sequential with a forward of its own": lambda: Doubled(*layers()),
    "and with a parameter": lambda: Scaled(*layers()),
    "a hook on a sequential": hooked,
    "a model whose train leaves a part in evaluation": KeepsStatistics,
    "a layer whose train does": lambda: nn.Sequential(nn.Linear(8, 16), FrozenNorm(16), nn.ReLU(), nn.Linear(16, 3)),
    "a complex value beside a layer": Spectral,
    "attention by another kernel": Attends,
    "complex values from layer to layer": Fourier,
    "constants of a part that is called twice": Rotates,
    "weights and constants of a layer that is called twice": Siamese,
    "statistics of a layer that is called twice": SiameseNorm,
    "a sequential that has a layer with statistics twice": norm_twice,
    "statistics of two parts": Stems,
    "and of layers of a sequential": nested_norm,
    "layers in a module of torch.fx": lambda: torch.fx.symbolic_trace(Doubled(nn.Sequential(*layers()), nn.ReLU())),
    "a layer that writes into a dict": PassesADict,
    "layers whose output nobody takes": Untaken,
    "a cache of the class beside layers": Cached,
    "a cache of a layer's class": CachedInside,
}


def data():
    torch.manual_seed(7)
    return torch.randn(ROWS, 8), torch.randint(0, 3, (ROWS,))


def plain(model, loss=F.cross_entropy):
    x, y = data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    model.train()
    for first in range(0, ROWS, BATCH):
        optimizer.zero_grad()
        loss(model(x[first : first + BATCH]), y[first : first + BATCH]).backward()
        optimizer.step()
    return model


def ours(model, folder, loss=F.cross_entropy, optimizer="adamw", method="streamed", **options):
    cut = {} if method == "full" else {"partitions": 2}
    rate = {} if callable(optimizer) else {"lr": 1e-2}
    Trainer(
        model, loss, optimizer, mem_limit="2GB", method=method, epochs=1, batch_size=BATCH, shuffle=False, quiet=True,
        output_dir=folder, **{"micro_batch_size": BATCH, **rate, **cut, **options},
    ).fit(data())  # fmt: skip
    return model


def same(one, other):
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


@pytest.mark.parametrize("method", ["streamed", "full"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.few(3)
def test_what_a_model_does_beside_its_layers_is_done(name, method, tmp_path):
    torch.manual_seed(0)
    model = MODELS[name]()
    same(plain(copy.deepcopy(model)), ours(model, tmp_path / "run", method=method))


class Joined(nn.Module):
    """Two outputs, of which the loss makes one tensor: their gradients are ranges of its rows, and a bias sums over them."""

    def __init__(self):
        super().__init__()
        self.first, self.scores, self.other = nn.Linear(8, 16 * 8), nn.Linear(8, 99, bias=False), nn.Linear(16 * 8, 2)
        self.bias = nn.Parameter(torch.zeros(99))

    def forward(self, x):
        hidden = self.first(x)
        return self.scores(hidden.view(-1, 16, 8)) + self.bias, self.other(hidden)


def test_a_loss_that_joins_what_the_model_returns_has_the_bits_of_a_plain_loop(tmp_path):
    def loss(found, labels):
        return (torch.cat([one.flatten(1) for one in found], 1) - labels[:, None]).square().mean()

    torch.manual_seed(0)
    model = Joined()
    same(plain(copy.deepcopy(model), loss), ours(model, tmp_path / "run", loss))


def test_a_complex_value_between_partitions_is_tested_and_evaluated_too(tmp_path):
    """A KeyError behind all of the training: the file of rows in which the tests wait has no such type."""
    model, asked = Fourier(), {"mem_limit": "2GB", "partitions": 3, "batch_size": BATCH, "quiet": True}
    x, y = data()
    trainer = Trainer(model, method="streamed", output_dir=tmp_path / "run", **asked)
    expected = trainer.fit((x, y), (x[:4], y[:4])).test_loss
    assert trainer.evaluate((x[:4], y[:4])).loss == expected == F.cross_entropy(model.eval()(x[:4]), y[:4]).item()


@pytest.mark.parametrize("how", [How(keeps=0, offloads="disk"), How(method="checkpointed", keeps=0, offloads="host")], ids=str)
@pytest.mark.few(1)
def test_conjugate_and_negative_views_wait_elsewhere_as_what_they_are(how, monkeypatch, tmp_path):
    """They share the memory of what they are views of, which was read back as it lay: other gradients, in silence."""

    def model():
        torch.manual_seed(0)
        return Fourier()

    arm = Trained(monkeypatch, tmp_path, model, [data(), data()], partitions=(0, 1, 2))
    found, expected = arm.run(how), arm.run(FULL)
    tested = "end", "loss", "test"  # of contiguous rows between partitions, see docs/limitations.md
    assert found.pop(tested) == pytest.approx(expected.pop(tested)) and first_difference(found, expected) is None


@pytest.mark.parametrize("options", [{"ram_limit": "50MB"}, {"method": "checkpointed"}], ids=["in memory", "checkpointed"])
def test_a_complex_value_may_wait_anywhere(options, tmp_path):
    torch.manual_seed(0)
    model = Spectral()
    same(plain(copy.deepcopy(model)), ours(model, tmp_path / "run", **options))


class OfModes(nn.Module):
    """A layer of a Fourier neural operator."""

    def __init__(self, modes):
        super().__init__()
        self.weight, self.beside = nn.Parameter(torch.randn(8, 8, modes, dtype=torch.complex64) / 8), nn.Linear(8, 8)

    def forward(self, x):
        modes = torch.fft.rfft(x, dim=1)[:, : self.weight.shape[-1]]
        there = torch.einsum("bkc,cdk->bkd", modes, self.weight)
        return F.gelu(torch.fft.irfft(there, n=x.shape[1], dim=1) + self.beside(x))


@pytest.mark.parametrize(
    "options",
    [
        {"method": "full"}, {"clip_grad_norm": 0.1}, {"optimizer_on": "host", "ram_limit": "1GB"}, {"optimizer": "adam"},
        {"optimizer": "adam", "ema": 0.9, "optimizer_on": "host", "ram_limit": "1GB"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.few(2)
def test_complex_weights_train_as_in_a_plain_loop(options, tmp_path):
    """They were refused as a type that cannot be stored, which safetensors stores; and by optimizers with a name, as torch's
    fused steps do."""
    torch.manual_seed(0)
    layers = [nn.Unflatten(1, (8, 1)), nn.Linear(1, 8), OfModes(3), OfModes(5), nn.Flatten(), nn.Linear(64, 3)]
    model, (x, y) = nn.Sequential(*layers), data()
    expected = copy.deepcopy(model)
    given = [*expected.parameters()]
    if "optimizer" in options:
        floats = [parameter for parameter in given if not parameter.is_complex()]
        given = [{"params": floats, "fused": True}, {"params": [p for p in given if p.is_complex()], "foreach": False}]
    optimizer = torch.optim.Adam(given, lr=1e-2)
    for rows, labels in zip(x.split(BATCH), y.split(BATCH), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(expected(rows), labels).backward()
        if "clip_grad_norm" in options:
            nn.utils.clip_grad_norm_(expected.parameters(), options["clip_grad_norm"])
        optimizer.step()
    asked = {"optimizer": partial(torch.optim.Adam, lr=1e-2)} if "optimizer" not in options else {}
    same(expected, ours(model, tmp_path / "run", **asked, **options))
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.state_dict().items())


def test_a_model_that_puts_a_hook_on_a_tensor_between_layers_is_one_block(tmp_path):
    """The hook was left out, and the gradients of all layers before it were others; then the model was refused."""

    class Halved(KeepsStatistics):
        def forward(self, x):
            y = self.first(x)
            if y.requires_grad:
                y.register_hook(lambda gradient: gradient / 2)
            return self.last(y)

    model = Halved()
    same(plain(copy.deepcopy(model)), ours(model, tmp_path / "run", method="full"))


class Chooses(nn.Module):
    """It takes and returns several tensors, and looks at them between its layers."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.last = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x, other):
        hidden = self.one(x) if x.sum() > 0 else self.one(x) + self.two(other)
        picked = hidden[(hidden.sum(1) > 0).nonzero()[:, 0]]
        return {"scores": self.last(hidden.relu()), "size": hidden.square().mean(1) + picked.numel()}


@pytest.mark.parametrize("method", ["auto", "streamed", "checkpointed"])
@pytest.mark.few(1)
def test_a_model_of_one_block_trains_on_several_inputs_and_outputs(method):
    torch.manual_seed(0)
    x, other, y = torch.randn(32, 8), torch.randn(32, 8), torch.arange(32) % 3
    model = Chooses()
    expected, parts = copy.deepcopy(model), zip(x.split(8), other.split(8), y.split(8), strict=True)

    def loss(found, labels):
        return F.cross_entropy(found["scores"], labels) + 0.1 * found["size"].mean()

    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, fused=True)
    for rows, others, labels in parts:
        loss(expected(rows, others), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    options = {"epochs": 1, "batch_size": 8, "micro_batch_size": 8, "lr": 0.1, "shuffle": False, "quiet": True}
    result = Trainer(model, loss, "sgd", mem_limit="2GB", method=method, **options).fit(((x, other), y))
    same(expected, model)
    assert "the model is one block, which cannot be cut" in "".join(result.plan.reasons)


class Skipping(nn.Module):
    """A stack of layers that is left out where the values are small: it cannot be cut inside."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if x.max() > 1 else x
        return x


def test_a_model_with_too_few_blocks_is_refused_with_what_keeps_one_of_them_whole(tmp_path):
    with pytest.raises(OptionError, match=r"has 1 blocks (.*\n)*.*stays whole: .*a tensor in an if.* 0 \(Skipping, .*:\d+\)"):
        ours(Doubled(Skipping()), tmp_path / "run")


LOSSES_OF_WEIGHTS = {
    "its sum": lambda model, output: 0.1 * model[0].weight.square().sum() * output.square().mean(),
    "without its gradient": lambda model, output: 0.1 * model[0].weight.detach().square().sum() * output.square().mean(),
    "a number of it": lambda model, output: output.square().mean() * model[0].bias[0].exp(),
    "all numbers of it": lambda model, output: (output @ model[0].weight[:3, :3]).square().mean(),
    "its layer": lambda model, output: model[0](torch.ones(2, 8)).square().mean() * output.mean(),
}


@pytest.mark.parametrize("name", LOSSES_OF_WEIGHTS)
@pytest.mark.few(2)
def test_a_loss_of_weights_is_judged_where_they_are_and_refused_where_they_are_not(name, tmp_path):
    """A weight that was not there counted as an empty tensor, or broke the backward pass in torch's words; and a loss that
    takes a number of one, or multiplies by it, was refused where all weights are there too."""

    def made(model):
        return lambda output, labels: F.cross_entropy(output, labels) + LOSSES_OF_WEIGHTS[name](model, output)

    torch.manual_seed(0)
    model = nn.Sequential(*layers())
    other, third = copy.deepcopy(model), copy.deepcopy(model)
    same(plain(other, made(other)), ours(model, tmp_path / "1", made(model), method="full", micro_batch_size=8))
    with pytest.raises(OptionError, match="it reads a weight of the model"):
        ours(third, tmp_path / "2", made(third), micro_batch_size=8)


class OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale(), None


class Borrows(nn.Module):
    """It uses a weight or a buffer of another layer, beside its own."""

    def __init__(self, other):
        super().__init__()
        self.own, self.others = nn.Linear(16, 16), [other]

    def value(self):
        return 1 + self.others[0].weight.detach().norm()


class BorrowsForward(Borrows):
    def forward(self, x):
        return self.own(x) * self.value()


class BorrowsGradient(Borrows):
    def forward(self, x):
        return self.own(x) * self.others[0].weight.norm()


class BorrowsBuffer(Borrows):
    def forward(self, x):
        return self.own(x) + self.others[0].running_mean.mean()


class BorrowsShape(Borrows):
    """An emptied weight answered with its own shape: 0."""

    def forward(self, x):
        return self.own(x) / (1 + self.others[0].weight.shape[0])


class BorrowsBackward(Borrows):
    def forward(self, x):
        return OwnGradient.apply(self.own(x), self.value)


def hooks(kind):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 3))
    if kind == "weight":
        model[2].weight.register_hook(lambda gradient: gradient * model[0].weight.norm())
    elif kind == "later":
        model[0].weight.register_hook(lambda gradient: gradient * model[3].weight.norm())
    elif kind == "gradient":
        model[0].weight.register_hook(lambda gradient: gradient * model[3].weight.grad.norm())
    elif kind == "module":
        model[2].register_full_backward_hook(lambda layer, given, _: (given[0] * model[0].weight.norm(),))
    else:
        model[2].register_forward_hook(lambda layer, _, found: found * model[3].weight.detach().norm())
    return model


def borrows(kind):
    first = nn.Linear(8, 16) if kind is not BorrowsBuffer else nn.BatchNorm1d(8)
    return nn.Sequential(first, nn.Linear(8 if kind is BorrowsBuffer else 16, 16), nn.ReLU(), kind(first), nn.Linear(16, 3))


WHOLE = "stays whole: .* it uses .*, which is another layer's"
AWAY = "in backward, a hook or an autograd.Function uses a weight of another layer"
USED = {
    "in forward": (lambda: borrows(BorrowsForward), WHOLE), "with a gradient": (lambda: borrows(BorrowsGradient), WHOLE),
    "a shape": (lambda: borrows(BorrowsShape), WHOLE), "a buffer": (lambda: borrows(BorrowsBuffer), WHOLE),
    "in a forward hook": (lambda: hooks("forward"), WHOLE),
    "in backward": (lambda: borrows(BorrowsBackward), AWAY), "in a hook of a weight": (lambda: hooks("weight"), AWAY),
    "of a later layer": (lambda: hooks("later"), AWAY), "its gradient": (lambda: hooks("gradient"), AWAY),
    "in a backward hook": (lambda: hooks("module"), AWAY),
}  # fmt: skip


@pytest.mark.parametrize("kind", USED)
@pytest.mark.few(3)
def test_a_layer_that_uses_another_layer_s_weight_trains_as_a_whole_and_is_refused_in_partitions(kind, tmp_path):
    """The weight was away while another partition computed, and an empty tensor was used: a norm of 0, other weights, in
    silence, and under `auto` only where the limit was small."""
    made, words = USED[kind]
    torch.manual_seed(0)
    model = made()
    torch.manual_seed(0)
    expected = plain(made())
    same(expected, ours(model, tmp_path / "1", method="full"))
    torch.manual_seed(0)
    with pytest.raises((OptionError, ModelError), match=words):
        ours(made(), tmp_path / "2")


class Recomputes(nn.Module):
    """Recomputes its layers as scripts did before `use_reentrant=False`, behind a frozen one."""

    def __init__(self, frozen=2, *, reentrant=True):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.end, self.reentrant = nn.Linear(8, 3), reentrant
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if number else layer(x)
        return self.end(x)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_checkpoint_that_would_leave_its_layers_untrained_is_refused(tmp_path):
    """torch gives none of them a gradient, and here they were trained."""
    torch.manual_seed(0)
    for number, (frozen, reentrant) in enumerate([(0, True), (4, True), (2, False)]):
        model = Recomputes(frozen, reentrant=reentrant)
        same(plain(copy.deepcopy(model)), ours(model, tmp_path / str(number)))
    with pytest.raises(ModelError, match=r"nothing that requires a gradient.*use_reentrant=False"):
        ours(Recomputes(), tmp_path / "refused")


class Emptied(nn.Module):
    """It has an empty parameter of its own, which is used while a pass is recomputed in backward."""

    def __init__(self):
        super().__init__()
        self.own, self.none = nn.Linear(16, 16), nn.Parameter(torch.empty(0, 16))

    def forward(self, x):
        return checkpoint(lambda x: torch.cat([self.own(x), F.linear(x, self.none)], 1), x, use_reentrant=False)


@pytest.mark.parametrize("method", ["full", "streamed"])
def test_an_empty_parameter_of_a_layer_s_own_is_not_away(method, tmp_path):
    def made():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), Emptied(), nn.Linear(16, 3))

    same(plain(made()), ours(made(), tmp_path / "run", method=method))


def step(parameter):
    parameter.detach().sub_(0.01 * parameter.grad)


def steps_in_backward():
    model = nn.Sequential(*layers())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return model


def test_a_hook_that_makes_steps_makes_them_once_an_update(tmp_path):
    torch.manual_seed(0)
    model = steps_in_backward()
    torch.manual_seed(0)
    same(plain(steps_in_backward()), ours(model, tmp_path / "1"))
    torch.manual_seed(0)
    divided = ours(steps_in_backward(), tmp_path / "2", micro_batch_size=4)
    assert all(map(torch.allclose, divided.parameters(), model.parameters()))


def test_a_layer_that_steps_in_backward_is_refused_where_an_update_has_several_micro_batches(tmp_path):
    """All micro-batches went forward first where partitions are streamed, and one after the other where they are not."""

    def decays(layer, *_):
        layer.weight.detach().mul_(0.9)

    model = nn.Sequential(*layers())
    model[2].register_full_backward_hook(decays)
    with pytest.raises(ModelError, match="a hook changes weights in backward"):
        ours(model, tmp_path, micro_batch_size=4)


def clamp(gradient):
    return gradient.clamp(-1e-3, 1e-3)


def clip(parameter):
    parameter.grad.div_(parameter.grad.norm())


@pytest.mark.parametrize("method", ["streamed", "full"])
@pytest.mark.parametrize(("kind", "hook"), [("hook", clamp), ("hook", torch.sign), ("post_accumulate_grad_hook", clip)])
@pytest.mark.few(2)
def test_hooks_on_gradients_are_called_for_the_whole_update(kind, hook, method, tmp_path):
    """They were called for each micro-batch, so what they clamp or divide by depended on the limit, in silence."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers())
    other = copy.deepcopy(model)
    for one in (model, other):
        for parameter in one.parameters():
            getattr(parameter, f"register_{kind}")(hook)
    options = {"optimizer": lambda given: torch.optim.SGD(given, lr=0.1), "method": method}
    ours(model, tmp_path / "whole", **options)
    ours(other, tmp_path / "divided", micro_batch_size=4, **options)
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(model.parameters(), other.parameters(), strict=True))


class Together(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    def step(self, closure=None):
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for parameter in parameters:
            parameter.grad /= norm
        return super().step(closure)


def test_an_optimizer_that_looks_at_several_parameters_together_is_refused(tmp_path):
    with pytest.raises(OptionError, match="its step looks at several parameters together"):
        ours(nn.Sequential(*layers()), tmp_path / "run", optimizer=lambda parameters: Together(parameters, lr=0.1))


def test_an_optimizer_of_other_parameters_than_it_is_called_with_is_refused(tmp_path):
    """It trained the first partition's, and lost its momentum."""
    model = nn.Sequential(*layers())
    with pytest.raises(OptionError, match="Let it pass on what it gets"):
        ours(model, tmp_path / "run", optimizer=lambda parameters: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_run_and_an_evaluation_may_stand_where_the_caller_wants_no_gradients(mode, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*layers())
    expected = plain(copy.deepcopy(model))
    with mode():
        ours(model, tmp_path / "run")
        found = Trainer(model, mem_limit="2GB", method="full", quiet=True).evaluate(data())
        assert not torch.is_grad_enabled()
    same(expected, model)
    x, y = data()
    assert found.loss == pytest.approx(F.cross_entropy(model.eval()(x), y).item())


def test_a_model_that_a_session_has_is_refused_by_name_until_it_is_over(tmp_path):
    """A GAN's second session, or `fit` inside one, blamed a layer: "b must be 2D". It was empty."""
    judge = nn.Sequential(*layers())
    both = nn.Sequential(nn.Linear(8, 8), judge)
    x, y = data()
    asked = {"mem_limit": "2GB", "method": "full", "batch_size": BATCH, "quiet": True}
    with Trainer(judge, **asked).session((x[:BATCH], y[:BATCH])) as session:
        session.step((x[:BATCH], y[:BATCH]))
        for call in (
            lambda: Trainer(judge, **asked).evaluate((x, y)),
            lambda: Trainer(judge, output_dir=tmp_path / "run", **asked).fit((x, y)),
            lambda: Trainer(both, **asked).session((x[:BATCH], y[:BATCH])).__enter__(),
        ):
            with pytest.raises(OptionError, match="is in a session or a run that is not over"):
                call()
    assert Trainer(both, **asked).evaluate((x, y)).loss > 0


def test_another_model_is_taken_where_one_was_whose_preparation_was_dropped_and_never_closed(tmp_path):
    """Tensors were known by their address, which Python gives to the next one: a new model was said to be in a session."""
    x, y = data()
    asked = {"mem_limit": "2GB", "method": "full", "batch_size": BATCH, "quiet": True, "output_dir": tmp_path}
    addresses = set[int]()
    for _ in range(10):
        model = nn.Sequential(*layers())
        trainer = Trainer(model, **asked)
        trainer.prepare(*trainer.rows((x, y)))
        addresses.update(map(id, model.parameters()))
        del model
    gc.collect()
    others = [nn.Sequential(*layers()) for _ in range(50)]
    again = [model for model in others if not addresses.isdisjoint(map(id, model.parameters()))]
    for model in again[:2]:
        assert Trainer(model, **asked).evaluate((x, y)).loss > 0
    assert again
