"""Buffers that a layer registers in its forward pass, as a cache of a mask."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from seqpart import Trainer
from seqpart.errors import ModelError
from tests.capture.test_remembering_layers import Layer
from tests.choice import in_turn

pytestmark = pytest.mark.usefixtures("known_machine")
ROWS, BATCH, LENGTH = 40, 16, 6


class Mixing(Layer):
    """Positions are mixed by a mask that is made when rows come."""

    def forward(self, x):
        if getattr(self, "mask", None) is None or self.mask.size(0) != x.size(1):
            self.make(torch.tril(torch.ones(x.size(1), x.size(1))))
        return x + torch.einsum("ts,bsd->btd", self.mask, self.linear(x))


class Registers(Mixing):
    def make(self, mask):
        self.register_buffer("mask", mask, persistent=False)


class Fills(Mixing):
    def begin(self):
        self.register_buffer("mask", None)

    def make(self, mask):
        self.mask = mask


class Grows(Registers):
    def begin(self):
        self.register_buffer("mask", torch.ones(1, 1))


class Retypes(Grows):
    def begin(self):
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH))

    def forward(self, x):
        self.mask = self.mask.double()
        return self.linear(x)


class Forgets(Grows):
    def begin(self):
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH))

    def forward(self, x):
        self.mask = None
        return self.linear(x)


class Learns(Mixing):
    def make(self, mask):
        self.mask = nn.Parameter(mask)


class Network(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.second, self.head = kind(), kind(), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.second(self.first(x).relu()).mean(1))


def data(length=LENGTH):
    chance = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, length, 8, generator=chance), torch.randint(0, 4, (ROWS,), generator=chance)


def network(kind):
    torch.manual_seed(0)
    return Network(kind)


def trainer(model, folder, method):
    return Trainer(
        model, nn.CrossEntropyLoss(), mem_limit="2GB", method=method, partitions=1 if method == "full" else 2, optimizer="sgd",
        lr=0.1, momentum=0.0, batch_size=BATCH, epochs=2, shuffle=False, quiet=True, output_dir=folder, overwrite=True,
    )  # fmt: skip


def looped(model):
    optimizer, (x, y) = torch.optim.SGD(model.parameters(), lr=0.1), data()
    for _ in range(2):
        for at in range(0, ROWS, BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[at : at + BATCH]), y[at : at + BATCH]).backward()
            optimizer.step()
    return model


@pytest.mark.parametrize(("method", "kind"), in_turn(["streamed", "checkpointed", "full"], [Registers, Fills]))
@pytest.mark.few(1)
def test_a_mask_that_is_made_in_the_forward_pass_trains_to_the_bits_of_a_plain_loop(kind, method, tmp_path):
    """The run ended in a KeyError when its weights were to be written, or the mask was empty at the second visit."""
    model, expected = network(kind), looped(network(kind))
    training = trainer(model, tmp_path, method)
    weights = load_file(training.fit(data(), data()).weights)
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter) and torch.equal(weights[name], parameter), name
    assert weights.keys() == dict(expected.named_parameters()).keys(), "what a fresh model has"
    assert model.state_dict().keys() == expected.state_dict().keys()
    assert torch.equal(model(data()[0]), expected(data()[0]))
    assert training.evaluate(data()).loss == pytest.approx(F.cross_entropy(expected(data()[0]), data()[1]).item())
    trainer(model, tmp_path, method).fit(data())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            Grows,
            r"makes 0\.mask a tensor of shape \(6, 6\) and type torch.float32, and it came with \(1, 1\) and torch.float32",
        ),
        (
            Retypes,
            r"makes 0\.mask a tensor of shape \(6, 6\) and type torch.float64, and it came with \(6, 6\) and torch.float32",
        ),
        (Forgets, r"its forward pass removes its buffer 0\.mask"),
        (Learns, r"its forward pass makes the parameter 0\.mask, which no optimizer knows. Make it in __init__"),
    ],
)
def test_a_buffer_that_changes_its_shape_or_type_and_a_parameter_that_is_made_are_refused_by_name(kind, words, tmp_path):
    """A RuntimeError of a shape at the end of the first update, whole numbers cut off in silence, and a KeyError at the end."""
    model = network(kind)
    with pytest.raises(ModelError, match=words):
        trainer(model, tmp_path, "streamed").fit(data())
    assert all(
        tensor.numel() and type(tensor) in (torch.Tensor, nn.Parameter) for tensor in model.state_dict(keep_vars=True).values()
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU on this machine")
@pytest.mark.parametrize("kind", [Registers, Fills])
def test_on_a_gpu_what_a_layer_made_comes_back_with_its_weights(kind, tmp_path):
    model = network(kind)
    trainer(model, tmp_path, "streamed").fit(data())
    assert model(data()[0]).device.type == "cpu"
