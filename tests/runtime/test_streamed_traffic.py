"""What `streamed` moves: each partition's weights are loaded at most twice an update and saved once, however thin its slices.

Bytes are counted from the steps of real runs, and expected from the shapes of the model's tensors alone.
"""

import functools
import itertools

import pytest
import torch
from torch import nn

from seqpart import Trainer
from seqpart.device.pages import round_up
from seqpart.plan.prediction import predict
from seqpart.plan.problem import parts_of
from seqpart.plan.simulator import Resources
from seqpart.report.reporter import Reporter
from seqpart.schedule.steps import StepDone, Verb
from seqpart.store.layout import ALIGNMENT, LINE
from tests import forced, machine

ROWS, BATCH, EPOCHS = 24, 8, 2
UPDATES = ROWS // BATCH * EPOCHS
WIDTHS = (6, 16, 10, 12, 4)
"""Four linear blocks, one a partition: of unequal sizes, so that no two are mistaken for each other."""
LAST = len(WIDTHS) - 2

WEIGHTS = [4 * b + round_up(4 * a * b, ALIGNMENT) for a, b in itertools.pairwise(WIDTHS)]
GRADIENTS = [4 * b + round_up(4 * a * b, LINE) for a, b in itertools.pairwise(WIDTHS)]
# Of the weight and of the bias: aligned moments, and a count of steps behind all of them.
STATE = {
    "sgd": [0] * 4, "momentum": GRADIENTS,
    "adam": [
        2 * round_up(4 * a * b, LINE) + round_up(4 * b, LINE) + 4 * b + 2 * 4 for a, b in itertools.pairwise(WIDTHS)
    ],
}  # fmt: skip
"""Momentum: as large as the gradients. Adam: two moments, and for each of two tensors a counter of 4 bytes."""
OPTIONS = {"sgd": {"optimizer": "sgd"}, "momentum": {"optimizer": "sgd", "momentum": 0.9}, "adam": {"optimizer": "adam"}}


class Moves(Reporter):
    """For each partition a list: of the bytes of its loads, or of its saves, one tuple for each update.

    A load belongs to the update that it comes for, a save to the one that it follows. The last tuple of loads is the
    test rows'.
    """

    def __init__(self):
        super().__init__(quiet=True)
        self.loads = [[()] for _ in WEIGHTS]
        self.saves = [[] for _ in WEIGHTS]
        self.gradients = [[()] for _ in WEIGHTS]

    def listen(self, event):
        super().listen(event)
        if not isinstance(event, StepDone):
            return
        p = event.step.partition
        if event.step.verb is Verb.UPDATE:
            for moves in self.loads, self.saves, self.gradients:
                moves[p].append(())
        elif event.step.verb is Verb.LOAD:
            self.loads[p][-1] += (event.bytes_read,)
        elif event.step.verb is Verb.DROP and event.bytes_written:
            moves = self.gradients if event.step.more else self.saves
            moves[p][-1] += (event.bytes_written,)


def moves(folder, patch, *, micro_batches, slots, optimizer, keeps=frozenset(), weights_stay=frozenset(), **options):
    """The traffic of a whole run, by update and partition."""

    def only(problem, method, micro_batch):
        parts = parts_of(problem, micro_batch, problem.starts)
        return predict(problem, method, micro_batch, parts, Resources(slots=slots, weights_stay=weights_stay), keeps)

    forced.plans(patch, only)
    machine.known(patch)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS)))
    trainer = Trainer(
        model, mem_limit="2GB", output_dir=folder / "run", method="streamed", partitions=(0, 1, 2, 3), epochs=EPOCHS,
        batch_size=BATCH, micro_batch_size=BATCH // micro_batches, **OPTIONS[optimizer], **options,
    )  # fmt: skip
    data = (torch.randn(ROWS, WIDTHS[0]), torch.arange(ROWS) % 4), (torch.randn(BATCH, WIDTHS[0]), torch.arange(BATCH) % 4)
    counted = Moves()
    trainer.fit(*data, reporter=counted)
    return counted


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(
    ("micro_batches", "optimizer"), [(1, "adam"), (2, "adam"), (4, "adam"), (8, "adam"), (2, "sgd"), (4, "momentum")]
)
@pytest.mark.few(1)
def test_weights_come_at_most_twice_and_go_home_once(micro_batches, slots, optimizer, tmp_path, monkeypatch):
    counted = moves(tmp_path, monkeypatch, micro_batches=micro_batches, slots=slots, optimizer=optimizer)
    for p, (weights, state) in enumerate(zip(WEIGHTS, STATE[optimizer], strict=True)):
        once = p in (0, LAST)  # the last runs forward and backward in one visit; the first stays for the next update
        assert counted.loads[p] == [
            (weights,) if p == LAST else (weights, weights),
            *([(weights + state,) if once else (weights, weights + state)] * (UPDATES - 1)),
            () if p == 0 else (weights,),
        ]
        assert counted.saves[p] == [(weights + state,)] * (UPDATES - 1) + [(weights,)]
        assert counted.gradients[p] == [()] * (UPDATES + 1)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("defers_updates", [False, True])
@pytest.mark.few(1)
def test_weights_that_stay_come_once_and_go_home_at_the_end(slots, defers_updates, tmp_path, monkeypatch):
    options = {"clip_grad_norm": 0.5} if defers_updates else {}
    counted = moves(
        tmp_path, monkeypatch, micro_batches=2, slots=slots, optimizer="adam", weights_stay=frozenset(range(4)), **options
    )
    for p, (weights, state) in enumerate(zip(WEIGHTS, STATE["adam"], strict=True)):
        gradients = GRADIENTS[p] if defers_updates and p else 0
        assert sum(map(sum, counted.loads[p])) == weights + (UPDATES - 1) * state + UPDATES * gradients
        assert sum(map(sum, counted.saves[p])) == (UPDATES - 1) * state + weights


def test_kept_graphs_save_work_and_cost_no_traffic(tmp_path, monkeypatch):
    of = functools.partial(moves, patch=monkeypatch, micro_batches=2, slots=1, optimizer="adam")
    kept, again = of(tmp_path / "kept", keeps=frozenset(range(3))), of(tmp_path / "again")
    assert (kept.loads, kept.saves) == (again.loads, again.saves)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.few(1)
def test_clipping_costs_one_visit_more_and_the_gradients_way_home_and_back(slots, optimizer, tmp_path, monkeypatch):
    counted = moves(tmp_path, monkeypatch, micro_batches=2, slots=slots, optimizer=optimizer, clip_grad_norm=0.5)
    for p, (weights, state) in enumerate(zip(WEIGHTS, STATE[optimizer], strict=True)):
        visits = (weights,) if p in (0, LAST) else (weights, weights)
        gradients = GRADIENTS[p] if p else 0  # the first partition's are the last to be made: the norm is known then
        assert counted.loads[p] == [
            (*visits, weights + gradients),
            *([(*visits, weights + state + gradients)] * (UPDATES - 1)),
            (weights,),
        ]
        assert counted.saves[p] == [(weights + state,)] * (UPDATES - 1) + [(weights,)]
        assert counted.gradients[p] == [(GRADIENTS[p],) if p else ()] * UPDATES + [()]
