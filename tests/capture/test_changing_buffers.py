"""Buffers that forward passes change: kept twice while an update may be done again, which is planned; and changed by tests."""

import json
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seqpart import Trainer
from seqpart.model.blocks import as_chain
from seqpart.profile.blocks import measure_chain
from tests.command import run
from tests.exactly import FULL, How, Trained, first_difference

WIDTH = 6


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(WIDTH))

    def forward(self, x):
        return self.linear(x) * self.mask


class Counts(Masked):
    def forward(self, x):
        self.mask += 1
        return super().forward(x)


class CountsInTraining(Masked):
    def forward(self, x):
        if self.training:
            self.mask.mul_(1.01)
        return super().forward(x)


class Replaces(Masked):
    def forward(self, x):
        self.mask = 0.9 * self.mask + x.detach().mean(0)
        return super().forward(x)


class NormedByHand(Masked):
    """A kernel that writes into statistics and does not say so."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x):
        return F.batch_norm(super().forward(x), self.mean, self.variance, training=self.training)


class Inside(nn.Sequential):
    def __init__(self):
        super().__init__(nn.BatchNorm1d(WIDTH), Masked())


class ByData(Masked):
    """Its version says nothing."""

    def forward(self, x):
        self.mask.data.mul_(1.01)
        return super().forward(x)


class InAList(Masked):
    def forward(self, x):
        torch._foreach_mul_([self.mask], 1.01)
        return super().forward(x)


class Gated(Masked):
    """A value says whether it changes, as in torch's fake quantization."""

    def __init__(self):
        super().__init__()
        self.register_buffer("on", torch.tensor([1]))

    def forward(self, x):
        if self.on[0]:
            self.mask += x.detach().mean(0)
        return super().forward(x)


class Sometimes(Masked):
    """At every third call of a forward pass, and where gradients are wanted."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls += 1
        if torch.is_grad_enabled() and self.calls % 3 == 0:
            self.mask.data.add_(x.detach().mean(0))
        return super().forward(x)


class Always(NormedByHand):
    def forward(self, x):
        return F.batch_norm(Masked.forward(self, x), self.mean, self.variance, training=True)


KINDS = {
    Masked: False, Counts: True, CountsInTraining: False, Replaces: True, NormedByHand: False, Inside: False, ByData: True,
    InAList: True, Gated: True, Sometimes: True, Always: True,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alive", [True, False])
def test_a_pass_in_evaluation_that_changes_buffers_is_known(kind, alive):
    (cost,) = measure_chain(as_chain([kind() if alive else kind]), (WIDTH,), 4)
    assert cost.tests_change == KINDS[kind]
    assert cost.changing == tuple(name for name, _ in kind().named_buffers())
    assert cost.buffers == sum(buffer.nbytes for buffer in kind().buffers())


class Both(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.second, self.last = kind(), kind(), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.last(self.second(self.first(x).relu()).relu())


@pytest.mark.parametrize("kind", [ByData, InAList, Gated, Sometimes, Always])
@pytest.mark.parametrize("how", [How(), How(slots=2, keeps=0), How(method="checkpointed")], ids=str)
@pytest.mark.few(1)
def test_buffers_that_change_unseen_or_at_some_updates_have_the_bits_of_full(kind, how, monkeypatch, tmp_path):
    def model():
        torch.manual_seed(0)
        return Both(kind)

    rows = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 3
    arm = Trained(monkeypatch, tmp_path, model, [rows, rows], partitions=(0, 1, 2), micro_batch_size=8)
    found, expected = arm.run(how), arm.run(FULL)
    found.pop(("end", "loss", "test")), expected.pop(("end", "loss", "test"))
    assert first_difference(found, expected) is None


class Watched(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = Counts(), Replaces(), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.last(self.second(self.first(x).relu()).relu())


@pytest.mark.parametrize("options", [{}, {"method": "checkpointed", "partitions": 3}, {"method": "streamed", "partitions": 3}])
@pytest.mark.usefixtures("known_machine")
@pytest.mark.few(1)
def test_what_tests_change_is_changed_by_every_method_as_in_a_plain_loop(options, tmp_path):
    """Where partitions come and go, those whose homes were written last had what the tests made of them, and others had not."""
    torch.manual_seed(0)
    x, y, model = torch.randn(20, WIDTH), torch.arange(20) % 3, Watched()
    torch.manual_seed(1)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Trainer(
        model, None, "sgd", lr=0.1, mem_limit="2GB", batch_size=8, micro_batch_size=8, epochs=2, shuffle=False, quiet=True,
        output_dir=tmp_path / "run", **{"method": "full", **options},
    ).fit((x, y), (x[:8], y[:8]))  # fmt: skip
    plain = Watched()
    plain.load_state_dict(first)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        for at in range(0, 20, 8):
            optimizer.zero_grad()
            F.cross_entropy(plain(x[at : at + 8]), y[at : at + 8]).backward()
            optimizer.step()
    plain.eval()(x[:8])
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


MODEL = """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(256, 256)
            self.register_buffer("mask", torch.tril(torch.ones(2048, 2048, dtype=torch.bool)), persistent=False)

        def forward(self, x):
            return x + self.linear(x).masked_fill(~self.mask[:256, 1024], 0.0).relu()

    def model():
        return [lambda: nn.Linear(64, 256), *[Block for _ in range(24)], lambda: nn.Linear(256, 10)]
"""


@pytest.mark.parametrize("options", [["--method", "streamed", "--clip-grad-norm", "1"], ["--method", "auto"]])
@pytest.mark.slow
def test_copies_of_large_masks_are_planned_and_a_plan_that_fits_does(options, tmp_path):
    """Each partition whose gradients or graph waited elsewhere kept a copy of its masks: memory ran out again and again."""
    (tmp_path / "masks.py").write_text(textwrap.dedent(MODEL))
    ran = run(
        tmp_path, "--model", "masks:model", "--mem-limit", "380MB", "--max-steps", 3, "--batch-size", 16, *options, "-o", "out"
    )
    assert ran.code == 0 and "going on" not in ran.err + ran.out, ran.err
    proof = json.loads((tmp_path / "out" / "result.json").read_text())["proof"]
    assert proof["peak"] <= 1.01 * proof["predicted"]
