"""What a model does between its layers and no program holds is refused by name: each trained to other weights, in silence."""

import ast
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seqpart import Trainer
from seqpart.errors import DataError, ModelError, SeqpartError
from tests.capture.test_beside_layers import data, norm_twice, ours, plain, same

pytestmark = pytest.mark.usefixtures("known_machine")


class Net(nn.Module):
    """Three layers, and what stands between them."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.begin()

    def begin(self):
        pass

    def between(self, h):
        return h

    def forward(self, x):
        return self.c(self.between(self.b(self.a(x).relu())).relu())


class Counter(Net):
    def begin(self):
        self.register_buffer("steps", torch.tensor(0))

    def between(self, h):
        if self.training:
            self.steps += 1
        return 2 * h if self.steps > 3 else h


class Warmup(Counter):
    def between(self, h):
        self.steps += 1
        return h * min(1.0, self.steps.item() / 5)


class Number(Net):
    def begin(self):
        self.temperature = 1.0

    def between(self, h):
        self.temperature *= 0.9
        return h / self.temperature


class Carried(Net):
    def begin(self):
        self.state = torch.zeros(16)

    def between(self, h):
        self.state = 0.9 * self.state + h.detach().mean(0)
        return h + self.state


class Penalty(Net):
    """A loss reads it: it was 0 for ever."""

    def begin(self):
        self.penalty = 0.0

    def between(self, h):
        self.penalty = h.square().mean()
        return h


class DrawsAndLooks(Net):
    def between(self, h):
        return 2 * h if torch.rand(()) < 0.5 else h


class DrawsInPython(Net):
    def between(self, h):
        return 2 * h if random.random() < 0.5 else h


class DrawsInNumpy(Net):
    def between(self, h):
        return 2 * h if np.random.uniform(0, 1) < 0.5 else h


class DrawsWholeNumbers(Net):
    def between(self, h):
        return h * int(torch.randint(1, 3, ()))


class DrawsInALayer(Net):
    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x) * random.random()

    def begin(self):
        self.b = self.Layer(16, 16)


class OtherMode(Net):
    def begin(self):
        self.norm = nn.BatchNorm1d(16)

    def between(self, h):
        self.norm.eval()
        return self.norm(h)


class Masked(Net):
    class Layer(nn.Linear):
        mask = None

        def forward(self, x):
            return super().forward(x) * self.mask

    def begin(self):
        self.b = self.Layer(16, 16)

    def forward(self, x):
        self.b.mask = torch.full((16,), 0.5)
        return super().forward(x)


class Functional(Net):
    def between(self, h):
        return torch.func.functional_call(self.b, {"weight": 2 * self.b.weight, "bias": self.b.bias}, (h,))


class Momentum(Net):
    """MoCo's key encoder: it never moved."""

    def begin(self):
        self.key = nn.Linear(16, 16)

    def between(self, h):
        self.key.weight.data = 0.9 * self.key.weight.data + 0.1 * self.b.weight.data
        return h + self.key(h).detach()


class MomentumInPlace(Momentum):
    def between(self, h):
        self.key.weight.data.mul_(0.9)
        return h + self.key(h).detach()


class Differentiates(Net):
    def forward(self, x):
        x = x.requires_grad_()
        h = super().forward(x)
        return h + torch.autograd.grad(h.sum(), x, create_graph=True)[0][:, :3]


class Backward(Net):
    def between(self, h):
        h.sum().backward(retain_graph=True)
        return h


class Hooked(Net):
    def begin(self):
        self.register_full_backward_hook(lambda _, grads, __: tuple(2 * grad if grad is not None else None for grad in grads))


class Freezes(Net):
    def between(self, h):
        self.c.weight.requires_grad_(False)
        return h


WORDS = {
    Counter: "changes its buffer steps and reads it as a number", Warmup: "changes its buffer steps and reads it as a number",
    Number: "keeps temperature from one step for the next", Carried: "keeps state from one step for the next",
    Penalty: "keeps penalty beside what it returns, which has gradients",
    DrawsAndLooks: "nor on a random number|calls other modules when it trains",
    DrawsInPython: "random numbers from Python's generator",
    DrawsInNumpy: "random numbers from numpy's generator", DrawsWholeNumbers: "draws a random number and looks at it",
    DrawsInALayer: "draws random numbers from Python's generator", OtherMode: "changes training of this layer from outside",
    Masked: "changes mask of this layer from outside",
    Functional: "changes weight of this layer from outside", Momentum: "changes parameter",
    MomentumInPlace: "changes parameter", Differentiates: "asks for gradients in its forward pass",
    Backward: "asks for gradients in its forward pass", Hooked: "its hooks on gradients would be left out",
    Freezes: "changes requires_grad of c.weight",
}  # fmt: skip


@pytest.mark.parametrize("kind", WORDS, ids=lambda kind: kind.__name__)
def test_what_would_be_done_once_and_never_again_is_refused_by_name(kind, tmp_path):
    torch.manual_seed(0)
    with pytest.raises(SeqpartError, match=WORDS[kind]):
        ours(kind(), tmp_path / "run")


class Masks(Net):
    """As wav2vec2 of transformers does as it is configured: masks from numpy, and layers that are left out."""

    def __init__(self, **settings):
        super().__init__()
        self.config = SimpleNamespace(**{"apply_spec_augment": True, "layerdrop": 0.5, **settings})

    def between(self, h):
        if self.training and self.config.apply_spec_augment:
            h = h * torch.from_numpy(np.random.permutation(16).astype(np.float32))
        return h * 0 if self.training and torch.rand([]) < self.config.layerdrop else h


@pytest.mark.parametrize("settings", [{}, {"layerdrop": 0.0}, {"apply_spec_augment": False}], ids=str)
@pytest.mark.few(1)
def test_draws_that_a_configuration_of_a_library_asks_for_are_refused_with_what_turns_them_off(settings, tmp_path):
    """The cure was for whoever writes the layers: "let that be a module of its own"."""
    with pytest.raises(ModelError, match="Its configuration asks for that: build the model with") as told:
        ours(Masks(**settings), tmp_path / "refused")
    cure = dict(re.findall(r"config\.(\w+) = (0\.0|False)", str(told.value)))
    assert len(cure) == 2 - len(settings)
    ours(Masks(**settings, **{name: ast.literal_eval(value) for name, value in cure.items()}), tmp_path / "run")


class Drops(Net):
    """As layers of transformers with layerdrop=0."""

    def between(self, h):
        if self.training and (torch.rand([]) < 0.0 or np.random.uniform(0, 1) < 0.0 or random.random() < 0.0):
            return h * 0
        return h


class Caches(Net):
    def begin(self):
        self.longest, self.table = 0, None

    def between(self, h):
        if self.longest < h.shape[1]:
            self.longest, self.table = h.shape[1], torch.arange(h.shape[1]) / 16
        return h + self.table


class SharesAPart(Net):
    """What one layer does to a part that another has too is no change from outside."""

    class Layer(nn.Module):
        def __init__(self, part):
            super().__init__()
            self.own, self.part = nn.Linear(16, 16), part

        def forward(self, x):
            self.part.calls = getattr(self.part, "calls", 0) + 1
            return self.part(self.own(x))

    def begin(self):
        part = nn.Tanh()
        self.b, self.d = self.Layer(part), self.Layer(part)

    def between(self, h):
        return self.d(h)


class ReadsConstant(Net):
    def begin(self):
        self.register_buffer("times", torch.tensor(2))

    def between(self, h):
        return h * self.times.item()


class ForwardHooked(Net):
    def begin(self):
        self.register_forward_hook(lambda _, __, output: 2 * output)


@pytest.mark.parametrize("kind", [Drops, Caches, SharesAPart, ReadsConstant, ForwardHooked], ids=lambda kind: kind.__name__)
@pytest.mark.few(2)
def test_what_is_the_same_at_every_step_is_done_as_in_a_plain_loop(kind, tmp_path):
    torch.manual_seed(0)
    model = kind()
    torch.manual_seed(0)
    expected = plain(kind())
    ours(model, tmp_path / "run")
    same(expected, model)


class Holding(nn.Module):
    """Holds a layer, or several in a plain list."""

    def __init__(self, held):
        super().__init__()
        self.held = held if isinstance(held, list) else nn.Sequential(held)
        self.every = nn.ParameterList(one for part in self.held for one in part.parameters())

    def forward(self, x):
        for part in self.held:
            x = part(x)
        return x


class InPlace(nn.Linear):
    """torch's words for it advise anomaly detection, which is refused here."""

    def __init__(self):
        super().__init__(8, 3)

    def forward(self, x):
        return super().forward(x).sigmoid().mul_(2)


class Hooks(nn.Linear):
    def __init__(self):
        super().__init__(8, 3)

    def forward(self, x):
        found = super().forward(x)
        if self.training:
            found.register_hook(lambda gradient: gradient)
        return found


class Scattered(nn.Linear):
    """A few learned numbers are added to its weight, as in peft's SHiRA, for which sparse=False was the cure."""

    def __init__(self):
        super().__init__(8, 3)
        self.few = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return F.linear(x, self.weight + torch.sparse_coo_tensor(torch.tensor([[0, 2], [1, 5]]), self.few, (3, 8)))


@pytest.mark.parametrize(
    ("build", "x", "words"),
    [
        (Net, torch.eye(32, 8).to_sparse(), r"expected x with all its numbers; .* x.to_dense\(\)"),
        (
            lambda: nn.Sequential(nn.Embedding(9, 8, sparse=True), nn.Flatten(), nn.Linear(32, 3)), torch.zeros(32, 4).long(),
            r"it makes sparse tensors \(gradients, .* Give nn\.Embedding .* sparse=False",
        ),
        (Scattered, None, r"weights for one call\), which .* Another layer of that kind cannot be trained"),
        (lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 16))), None, r"parametrizations\.spectral_norm"),
        (lambda: Holding(nn.utils.spectral_norm(nn.Linear(8, 16))), None, r"parametrizations\.spectral_norm"),
        (lambda: Holding(Hooks()), None, r"a hook .* without a graph.* Ask before: if tensor\.requires_grad"),
        (InPlace, None, r"changes a tensor from which a gradient is computed later\. Let it return a new tensor"),
        (lambda: Holding([nn.Linear(8, 3)]), None, "is not found in the model, as a weight of a layer in a plain list"),
        (lambda: list(norm_twice()), None, "running_mean is 1.running_mean|is of a module that is called twice"),
    ],
    ids=[
        "sparse rows", "sparse gradients", "sparse weights", "old spectral norm", "the same inside",
        "a hook", "in place", "layers in a list", "norm called twice",
    ],
)  # fmt: skip
def test_what_is_refused_is_blamed_on_what_it_is_and_the_cure_helps(build, x, words, tmp_path):
    labels = torch.arange(32) % 3
    with pytest.raises((DataError, ModelError), match=words):
        Trainer(build(), mem_limit="2GB", method="streamed", batch_size=8, quiet=True, output_dir=tmp_path / "run").fit(
            (data()[0] if x is None else x, labels)
        )


def test_anomaly_detection_is_refused_by_name(tmp_path):
    """The loss was blamed, or a layer, behind pages of tracebacks."""
    with torch.autograd.set_detect_anomaly(True), pytest.raises(ModelError, match="anomaly detection is on"):
        ours(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), tmp_path / "run")


def test_a_loss_whose_graph_reaches_a_layer_that_is_elsewhere_is_told_in_words(tmp_path):
    class Kept(nn.Linear):
        kept = torch.tensor(0.0)

        def forward(self, x):
            found = super().forward(x)
            self.kept = found.square().mean()
            return found

    model = nn.Sequential(Kept(8, 16), nn.ReLU(), nn.Linear(16, 3))
    with pytest.raises(SeqpartError, match="its graph reaches layers of other partitions"):
        Trainer(
            model, lambda output, y: F.cross_entropy(output, y) + model[0].kept, mem_limit="2GB", method="streamed",
            partitions=(0, 2), batch_size=8, quiet=True, output_dir=tmp_path / "run",
        ).fit(data())  # fmt: skip


class MomentumInLists(Momentum):
    def between(self, h):
        with torch.no_grad():
            torch._foreach_lerp_(list(self.key.parameters()), list(self.b.parameters()), 0.1)
        return h + self.key(h).detach()


class MomentumAnew(Momentum):
    def between(self, h):
        self.key.weight = nn.Parameter(0.9 * self.key.weight.detach(), requires_grad=False)
        return h + self.key(h).detach()


class Teacher(Net):
    def begin(self):
        self.key = torch.optim.swa_utils.AveragedModel(self.b, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))

    def between(self, h):
        self.key.update_parameters(self.b)
        return h + self.key(h).detach()


@pytest.mark.parametrize("kind", [Momentum, MomentumInPlace, MomentumInLists, MomentumAnew, Teacher])
def test_a_block_that_changes_a_parameter_is_refused_however_it_does_so(kind):
    """Where no version counted the change, the next visit loaded the parameter without it: MoCo's key encoder never moved."""
    for model in kind(), [kind()]:
        with pytest.raises(ModelError, match=r"changes parameter (0\.)?key\.(module\.)?(weight|bias)"):
            Trainer(model, mem_limit="2GB", method="full", quiet=True).fit((torch.randn(8, 8), torch.arange(8) % 3))
