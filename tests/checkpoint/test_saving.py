"""A run that diverges says in which update, and keeps a checkpoint from before that."""

import re

import pytest
import torch
from torch import nn

from seqpart.errors import Diverged
from seqpart.store.scratch import PREVIOUS
from tests.exactly import How, numbers
from tests.resuming import Arm, Stopping, ended
from tests.runtime.test_exact import dropping, fresh

CUT = {"partitions": (0, 1, 3), "momentum": 0.9}


@pytest.fixture
def arms(monkeypatch, tmp_path):
    def of(model, how, **options):
        return Arm(monkeypatch, tmp_path, how, model, numbers((12,)), **{**CUT, **options})

    return of


class Spoiled(torch.autograd.Function):
    """Its argument; the gradient of it is NaN at one call of all."""

    at, calls = 0, 0

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        Spoiled.calls += 1
        return gradient * (float("nan") if Spoiled.calls == Spoiled.at else 1.0)


class Overflowing(nn.Linear):
    """Its own weight alone becomes NaN in one update, whose loss is finite."""

    def forward(self, x):
        return nn.functional.linear(x, Spoiled.apply(self.weight), self.bias)


def overflowing():
    return [
        lambda: nn.Linear(12, 16), lambda: nn.Sequential(nn.GELU(), Overflowing(16, 16)), lambda: nn.Linear(16, 16),
        lambda: nn.Linear(16, 4),
    ]  # fmt: skip


class Counting(Stopping):
    """Backward passes count from the run's first step: planning runs every block too."""

    def listen(self, event):
        super().listen(event)
        if len(self.steps) == 1:
            Spoiled.calls = 0


@pytest.fixture
def spoiled():
    """Let the gradient of this backward pass be NaN."""

    def at(call):
        Spoiled.at, Spoiled.calls = call, -1_000

    yield at
    at(0)


def advised(error):
    """The path that the message names to go on from."""
    return re.search(r"--resume (\S+)", error.with_flags)[1]


@pytest.mark.parametrize(
    ("how", "call", "words", "path"),
    [
        (How("full"), 7, r"weight is not finite after update 3 of \[train 0\.1\]", ""),
        (How("checkpointed"), 7, r"weight is not finite after update 3 of \[train 0-2\.1\]", ""),
        (How("sil"), 7, r"weight is not finite after update 3 of \[train 1\.1\]", ""),
        (How(), 4, r"the loss is nan in update 3 of \[train 0-2\.1\]", PREVIOUS),
        (How(slots=2), 7, r"the loss is nan in update 1 of \[train 0-2\.2\]", PREVIOUS),
        (How(), 16, r"the loss is nan in \[test 2\]", PREVIOUS),
    ],
    ids=str,
)
@pytest.mark.few(1)
def test_an_optimizer_step_that_overflows_leaves_a_checkpoint_from_before_it(how, call, words, path, arms, spoiled):
    """With a save after every update both checkpoints held NaN by the end of the pass, where alone it was noticed; a run
    that goes on from the one that the message names ends with the bits of one in which nothing overflowed."""
    arm = arms(overflowing, how, save_every="1")
    whole, _ = arm.whole()
    spoiled(call)
    with pytest.raises(Diverged, match=f"training diverged: .*{words}") as ending:
        arm.fit(reporter=Counting())
    assert advised(ending.value) == str(arm.root / path if path else arm.root)
    assert ended(arm.fit(resume=advised(ending.value))) == whole


def test_a_run_that_diverged_before_anything_was_saved_says_so(arms):
    arm = arms(fresh(dropping), How("full"), lr=1e30, save_every="never")
    words = r"the loss is (nan|inf) in update 2 of .*Nothing had been saved: start again with"
    with pytest.raises(Diverged, match=words) as ending:
        arm.fit()
    assert ending.value.exit_code == 2


def test_a_checkpoint_that_is_the_only_one_and_led_to_it_is_not_advised(arms):
    with pytest.raises(Diverged, match=r"in update 2 of .*The run diverges right after the only checkpoint: start again"):
        arms(fresh(dropping), How("full"), lr=1e30, momentum=0.0, save_every="1").fit()


def test_partitions_that_sil_has_done_survive_when_recovery_diverges(arms):
    """Nothing had been saved within the ten minutes of --save-every, and all that was trained went with the run."""
    recovering = {"recovery_epochs": 2, "recover": "all", "lr_schedule": "constant"}
    arm = arms(fresh(dropping), How("sil"), **recovering)
    reporter = Stopping()
    said = r"in update \d of \[train 0-2\.1\].* go on from it with fit\(\.\.\., resume=.*\) and another recovery_lr"
    with pytest.raises(Diverged, match=said) as ending:
        arm.fit(recovery_lr=1e30)
    found = ended(arm.fit(resume=advised(ending.value), reporter=reporter, recovery_lr=1e-3))
    assert {step.phase for step in reporter.steps} == set(range(11, 16)), "none of sil's phases is run again"
    assert found == arm.whole(recovery_lr=1e-3)[0]
