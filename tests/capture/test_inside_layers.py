"""What one layer does inside itself, that saved tensors, weights or buffers may notice: done as in a plain loop, or refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seqpart.errors import ModelError
from tests.capture.test_beside_layers import Fourier, data, ours
from tests.exactly import FULL, How, Trained, first_difference

pytestmark = pytest.mark.usefixtures("known_machine")


class Forces(nn.Linear):
    """Gradients that a layer asks for itself, of what has just been saved."""

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            return x + torch.autograd.grad(super().forward(x).tanh().sum(), x, create_graph=True)[0]


class Noisy(nn.Linear):
    """Its kernel draws behind the moment at which autograd saves what it drew."""

    def forward(self, x):
        return F.rrelu(super().forward(x), training=self.training)


@pytest.mark.parametrize("offloads", ["disk", "host"])
@pytest.mark.parametrize("kind", [Forces, Noisy])
@pytest.mark.few(1)
def test_a_layer_whose_saved_tensors_are_asked_for_early_or_made_late_may_wait_elsewhere(kind, offloads, monkeypatch, tmp_path):
    """A KeyError, and gradients of what memory happened to hold."""

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), kind(8, 8), nn.Linear(8, 8), kind(8, 8), nn.Linear(8, 3))

    arm = Trained(monkeypatch, tmp_path, model, [data(), data()], partitions=(0, 2, 4))
    assert first_difference(arm.run(How(keeps=0, offloads=offloads)), arm.run(FULL)) is None


class Transformed(nn.Linear):
    def forward(self, x):
        return x + torch.func.grad(lambda y: super(Transformed, self).forward(y).tanh().sum())(x)


def test_function_transforms_inside_a_layer_are_refused_in_words_where_weights_come_and_go(tmp_path):
    def model():
        return nn.Sequential(Transformed(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    with pytest.raises(ModelError, match=r"a layer uses torch\.func .* method=\"full\""):
        ours(model(), tmp_path / "streamed")
    ours(model(), tmp_path / "full", method="full")


class Uncompiled(Fourier):
    """As timm's NaFlexVit."""

    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)


class Listed(nn.Linear):
    """What it changes is in a list too: the list would keep the tensor that the buffer was."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("scale", torch.ones(sizes[1]))
        self.scales = [self.scale]

    def forward(self, x):
        self.scales[0].mul_(1.01)
        return super().forward(x) * self.scale


def test_a_method_that_is_never_to_be_compiled_is_an_ordinary_one(tmp_path):
    ours(Uncompiled(), tmp_path)


@pytest.mark.parametrize("method", ["streamed", "full"])
def test_a_buffer_that_is_changed_through_a_list_is_not_left_behind_in_silence(method, tmp_path):
    with pytest.raises(ModelError, match="it changes its buffer scale, which it also holds in an attribute or a list"):
        ours(nn.Sequential(Listed(8, 8), nn.Linear(8, 3)), tmp_path, method=method)
