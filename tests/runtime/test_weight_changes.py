"""`session.change_weights`: rules between weights at home."""

import copy
import re

import pytest
import torch
from torch import nn

from seqpart import Trainer
from seqpart.errors import ModelError, OptionError

WAYS = [{"method": "streamed", "partitions": 3}, {"method": "full"}, {"method": "auto"}]
MOVE = 0.1


class Followed(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.head = nn.Linear(4, 4)

    def forward(self, one, other):
        return self.head(self.student(one)), self.teacher(other)


def loss(output):
    return (output[0] - output[1]).square().mean()


def model():
    torch.manual_seed(2)
    return Followed()


def batches(count=3):
    numbers = torch.Generator().manual_seed(5)
    return [{name: torch.randn(12, 5, generator=numbers) for name in ("one", "other")} for _ in range(count)]


def session(folder, both, **options):
    options = {"mem_limit": "2GB", "method": "full", "batch_size": 12, "micro_batch_size": 12, "lr": 1e-2, **options}
    return Trainer(both, loss, offload_dir=folder / "homes", quiet=True, **options).session(batches(1)[0])


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.few(1)
def test_a_teacher_that_follows_its_student_has_the_bits_of_a_plain_loop(options, tmp_path):
    found, plain = model(), model()
    with session(tmp_path, found, **options) as steps:
        for batch in batches():
            steps.step(batch)
            steps.change_weights(lambda teacher, student: teacher.lerp_(student, MOVE), "teacher", "student")
        steps.change_weights(lambda weight: weight.clamp(-0.2, 0.2), "head")
    step = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0, fused=True)
    for batch in batches():
        step.zero_grad()
        loss(plain(**batch)).backward()
        step.step()
        with torch.no_grad():
            for teacher, student in zip(plain.teacher.parameters(), plain.student.parameters(), strict=True):
                teacher.lerp_(student, MOVE)
    with torch.no_grad():
        for weight in plain.head.parameters():
            weight.clamp_(-0.2, 0.2)
    expected = plain.state_dict()
    assert [name for name, tensor in found.state_dict().items() if not torch.equal(tensor, expected[name])] == []


def test_blocks_that_factories_build_are_changed_too(tmp_path):
    torch.manual_seed(0)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    trainer = Trainer(
        [lambda: nn.Linear(4, 4), nn.ReLU, lambda: nn.Linear(4, 4)], mem_limit="2GB", method="streamed", partitions=2,
        batch_size=8, quiet=True, offload_dir=tmp_path,
    )  # fmt: skip
    with trainer.session((x, y)) as steps:
        steps.step((x, y))
        before = steps.state_dict()
        steps.change_weights(lambda one, other: one.copy_(other), "2", "0")
        after = steps.state_dict()
    assert torch.equal(after["2.weight"], before["0.weight"]) and not torch.equal(before["2.weight"], before["0.weight"])
    assert torch.equal(after["0.bias"], before["0.bias"])


def test_a_rule_that_cannot_be_applied_leaves_the_session_as_it_was(tmp_path):
    def number(one, other):
        return 0.5

    def zero(one, other):
        return one.zero_()

    def some(one, other):
        if one.shape == (4, 7):
            raise ValueError("not this one")
        one.zero_()

    refused = [
        (
            zero,
            ("mentor", "student"),
            ModelError,
            "parts of the model with parameters, such as student; found 'mentor'",
        ),
        (zero, ("teacher", "head"), ModelError, "found 0.weight in teacher or head alone, or unlike"),
        (zero, (), OptionError, "expected a rule and parts of the model by name"),
        (zero, ("head",), TypeError, "missing 1 required positional argument"),
        (some, ("student", "teacher"), ValueError, "not this one"),
        (number, ("head", "head"), ModelError, "returns another of shape (4, 4); found 0.5 for head.weight"),
    ]
    with session(tmp_path, model()) as steps:
        loss_before = steps.step(batches(1)[0])
        before = steps.state_dict()
        for rule, parts, error, words in refused:
            with pytest.raises(error, match=re.escape(words)):
                steps.change_weights(rule, *parts)
            assert all(torch.equal(tensor, before[name]) for name, tensor in steps.state_dict().items())
        with pytest.raises(OptionError, match="export: expected the name of a file"):
            steps.export(tmp_path)
        with pytest.raises(OSError, match="File name too long"):  # it ended the session, and what was trained was lost
            steps.export(tmp_path / ("x" * 300))
        assert steps.step(batches(1)[0]) < loss_before


def test_a_tied_weight_is_changed_once_by_either_name_and_one_in_tiles_is_refused(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x).relu())

    x, y, tied = torch.randn(8, 8), torch.randn(8, 8), Tied()
    options = {"mem_limit": "2GB", "method": "streamed", "batch_size": 8, "quiet": True, "offload_dir": tmp_path}
    with Trainer(tied, **options).session((x, y)) as steps:
        before = steps.state_dict()["a.weight"]
        steps.change_weights(lambda weight: weight.mul_(0.5), "b")
        steps.change_weights(lambda weight: weight.mul_(0.5), "")
        assert torch.equal(steps.state_dict()["a.weight"], before * 0.25)
    wide = Trainer(nn.Sequential(nn.Linear(8, 256)), **options, tile="4KB").session((x, torch.randn(8, 256)))
    with wide as steps, pytest.raises(ModelError, match=r"0\.weight is in tiles"):
        steps.change_weights(lambda weight: weight / weight.norm(), "")


def test_what_a_rule_changed_is_not_lost_where_the_next_step_fails(tmp_path):
    class Failing(nn.Module):
        fails = False

        def forward(self, x):
            if Failing.fails:
                raise RuntimeError("as asked")
            return x

    x, y = torch.randn(8, 4), torch.randn(8, 4)
    model = [nn.Linear(4, 4), Failing(), nn.Linear(4, 4)]
    trainer = Trainer(model, mem_limit="2GB", method="streamed", partitions=2, batch_size=8, quiet=True, offload_dir=tmp_path)
    with trainer.session((x, y)) as steps:
        steps.step((x, y))
        steps.change_weights(lambda weight: weight.fill_(0.25), "0")
        Failing.fails = True
        with pytest.raises(Exception, match="as asked"):
            steps.step((x, y))
        Failing.fails = False
        assert steps.state_dict()["0.weight"].unique().tolist() == [0.25]
