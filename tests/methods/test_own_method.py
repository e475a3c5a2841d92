"""A method of one's own is one class: nothing else knows it, and it is planned, limited and resumed all the same."""

from dataclasses import dataclass, replace

import pytest
import torch.nn.functional as F
from torch import nn

from seqpart import Interrupted, Trainer
from seqpart.methods import METHODS, register
from seqpart.methods.method import Method
from seqpart.schedule.phase import Phase, PhaseKind
from seqpart.schedule.phases import Epochs, Phases
from tests.given import classified
from tests.methods.test_objectives import plainly
from tests.resuming import Stopping
from tests.runtime.test_same_as_plain import assert_equal, plain_modules


@dataclass
class FirstFeatures:
    classes: int
    nbytes: int = 0

    def __call__(self, output, labels):
        return F.cross_entropy(*self.scores(output, labels))

    def scores(self, output, labels):
        return output[:, : self.classes], labels


class Greedy(Method):
    name, exact, alone = "greedy", False, True

    def phases(self, work):
        stretches, last = [], len(work.partitions) - 1
        for p, part in enumerate(work.partitions):
            test = Phase(kind=PhaseKind.TEST, partition=p, rows=work.test_rows, batch=20, micro_batch=20)
            outputs = replace(test, kind=PhaseKind.CACHE, rows=work.train_rows)
            train = replace(outputs, kind=PhaseKind.TRAIN, batch=part.batch_size, epochs=part.epochs, shuffle=work.shuffle)
            behind = (test,) if p == last else (outputs, test)
            stretches.append(Epochs(train=train, epochs=part.epochs, following=behind))
        return Phases(stretches)

    def loss(self, targets):
        return super().loss(targets) or FirstFeatures(targets.classes)


@pytest.fixture(autouse=True)
def known():
    register(Greedy())
    yield
    del METHODS["greedy"]


BLOCKS = [lambda: nn.Linear(8, 600), lambda: nn.Sequential(nn.ReLU(), nn.Linear(600, 600)), lambda: nn.Linear(600, 3)]
ROWS = classified(60, (8,))


def trainer(folder, **options):
    return Trainer(
        BLOCKS, mem_limit="2GB", method="greedy", partitions=3, epochs=2, batch_size=20, optimizer="sgd", momentum=0.9, lr=0.01,
        seed=3, output_dir=folder / "run", quiet=True, **options,
    )  # fmt: skip


@pytest.mark.own_process
def test_it_is_planned_kept_within_the_limit_and_learns_what_its_loss_says(tmp_path):
    result, (x, y), modules = trainer(tmp_path).fit(ROWS, ROWS), ROWS, plain_modules(BLOCKS, 3)
    plainly(modules, (0, 1, 2), x, y, lambda p, shape: F.cross_entropy if p == 2 else FirstFeatures(3), seed=3)
    assert_equal(result.weights, modules)
    assert result.plan.method == "greedy" and not result.proof.violations and result.proof.peak <= 1.01 * result.plan.peak


def test_it_goes_on_where_it_was_stopped(tmp_path):
    whole = trainer(tmp_path / "whole").fit(ROWS, ROWS)
    with pytest.raises(Interrupted):
        trainer(tmp_path).fit(ROWS, ROWS, reporter=Stopping(9))
    assert trainer(tmp_path).fit(ROWS, ROWS, resume=tmp_path / "run").weights.read_bytes() == whole.weights.read_bytes()
