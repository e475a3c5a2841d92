"""Models that torch.compile has made run as they were written, with the bits of the plain model."""

import pytest
import torch
from torch import nn

from seqpart import Trainer
from seqpart.model.compiled import SAID, is_compiled
from seqpart.verify.verification import verify

ROWS = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def between(self, x):
        return torch.tanh(self.linear(x))

    def forward(self, x):
        return x + self.norm(self.between(x))


class CompiledMethod(Layer):
    @torch.compile
    def between(self, x):
        return torch.tanh(self.linear(x))


class Network(nn.Module):
    def __init__(self, layer=Layer):
        super().__init__()
        self.layers, self.head = nn.ModuleList(layer() for _ in range(3)), nn.Linear(8, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def whole():
    return torch.compile(Network())


def layers():
    model = Network()
    for number, layer in enumerate(model.layers):
        model.layers[number] = torch.compile(layer)
    return model


def in_place():
    model = Network()
    for layer in model.layers:
        layer.compile()
    return model


def methods():
    return Network(CompiledMethod)


def on_instances():
    model = Network()
    model.forward = torch.compile(model.forward)
    return model


def twice():
    return torch.compile(nn.Sequential(*(torch.compile(Layer()) for _ in range(3)), nn.Linear(8, 3)))


def blocks():
    return [torch.compile(Layer()), nn.Sequential(Layer(), torch.compile(Layer())), nn.Linear(8, 3)]


def seeded(make):
    torch.manual_seed(0)
    return make()


def plain_loop(model, epochs=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for _ in range(epochs):
        for at in range(0, 16, 8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(ROWS[0][at : at + 8]), ROWS[1][at : at + 8]).backward()
            optimizer.step()
    return list(model.parameters())


def trained(model, folder, **options):
    trainer = Trainer(
        model, mem_limit="1GB", optimizer="sgd", lr=0.1, epochs=2, batch_size=8, shuffle=False, output_dir=folder, **options
    )  # fmt: skip
    trainer.fit(ROWS)
    return [p for part in (model if isinstance(model, list) else [model]) for p in part.parameters()]


@pytest.mark.few(3)
@pytest.mark.parametrize("method", ["streamed", "full"])
@pytest.mark.parametrize("make", [whole, in_place, layers, methods, on_instances, twice, blocks])
def test_a_compiled_model_has_the_bits_of_the_plain_one_and_a_line_says_so(make, method, tmp_path, capsys):
    cut = {"partitions": 3} if method == "streamed" else {}
    found = trained(seeded(make), tmp_path / "run", method=method, **cut)
    expected = plain_loop(seeded(Network))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert SAID in " ".join(capsys.readouterr().out.split())


def test_afterwards_it_is_compiled_again_and_computes_with_the_trained_weights(tmp_path):
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    torch.manual_seed(0)
    model = torch.compile(Network(), backend=backend)
    trained(model, tmp_path / "run", method="streamed")
    assert not calls
    expected = seeded(Network)
    plain_loop(expected)
    with torch.no_grad():
        assert torch.allclose(model(ROWS[0]), expected(ROWS[0]))
    assert calls


def test_verify_takes_it_too():
    assert verify(seeded(whole), ROWS, mem_limit="1GB", batch_size=8).steps


def test_a_method_that_is_never_compiled_and_a_plain_model_are_not_compiled():
    assert not is_compiled(Network())
    assert not is_compiled([nn.Linear(2, 2), lambda: nn.Linear(2, 2)])
