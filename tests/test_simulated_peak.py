"""What the simulator foretells is what the executor does: the same steps, the same bytes, the memory it said."""

import itertools

import pytest
import torch

from seqpart import Trainer
from seqpart.costs import LiveBytes
from seqpart.executor import Executor, StepDone
from seqpart.plan import buffers_of
from seqpart.report import Reporter
from seqpart.schedule import Verb, checked, parse, steps_of, to_text
from seqpart.simulate import Simulator
from seqpart.zoo.models import mlp

ROWS, TEST_ROWS, CLASSES = 150, 40, 4


def data(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 16, generator=generator), torch.arange(rows) % CLASSES


class Listener(Reporter):
    """Keeps every executed step, with the live bytes that a dispatch mode saw during it."""

    def __init__(self, live):
        super().__init__(quiet=True)
        self.live, self.steps = live, []

    def listen(self, event):
        if isinstance(event, StepDone):
            self.steps.append((event, self.live.peak, self.live.live))
            self.live.peak = self.live.live
        super().listen(event)


def run(tmp_path, monkeypatch, **options):
    """(preparation, prepared, executed steps) of one real fit."""
    live = LiveBytes()
    plain = Executor.run

    def watched(self, steps):
        live.ignore([self._slot])
        with live:
            plain(self, steps)

    monkeypatch.setattr(Executor, "run", watched)
    trainer = Trainer(mlp(16, CLASSES, width=128, depth=5), mem_limit="2GB", output_dir=tmp_path / "run", **options)
    train, test = data(ROWS, 0), data(TEST_ROWS, 1)
    preparation = trainer.prepare(train, test)
    listener = Listener(live)
    trainer.fit(train, test, reporter=listener)
    return preparation, preparation.planned(), listener.steps


CASES = {
    "sil in three partitions": {"partitions": 3, "epochs": 2, "batch_size": 32},
    "sil by the paper": {"partitions": 2, "objective": "mse", "optimizer": "sgd", "momentum": 0.9, "batch_size": 50},
    "sil in micro-batches": {"partitions": 2, "batch_size": 48, "micro_batch_size": 16},
    "sil with its own settings for each partition": {
        "partitions": 2, "epochs": [1, 3], "batch_size": [64, 25], "lr": [1e-3, 1e-4], "optimizer": "adam,sgd",
    },
    "full": {"method": "full", "epochs": 2, "batch_size": 40},
    "full in micro-batches": {"method": "full", "batch_size": 64, "micro_batch_size": 20},
}  # fmt: skip


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_the_run_does_the_steps_and_moves_the_bytes_that_were_foretold(options, tmp_path, monkeypatch):
    _, prepared, executed = run(tmp_path, monkeypatch, **options)
    foretold = list(
        Simulator(prepared.phases, prepared.partition_costs, prepared.rates).run(checked(steps_of(prepared.phases)))
    )
    assert [done.step for done, _, _ in executed] == [moment.step for moment in foretold]
    for (done, _, _), moment in zip(executed, foretold, strict=True):
        assert (done.bytes_read, done.bytes_written) == (moment.bytes_read, moment.bytes_written), str(done.step)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_no_step_takes_more_live_bytes_than_was_foretold_and_the_peak_is_close(options, tmp_path, monkeypatch):
    preparation, prepared, executed = run(tmp_path, monkeypatch, **options)
    request = preparation.request(None, None)
    simulator = Simulator(prepared.phases, prepared.partition_costs, prepared.rates)
    slot, highest_seen, highest_foretold = 0, 0, 0
    for done, peak, _ in executed:
        moment = simulator.take(done.step)
        slot = max(slot, prepared.partition_costs[done.step.partition].slot)
        if done.step.verb in (Verb.LOAD, Verb.DROP):
            continue
        part = prepared.plan.partitions[done.step.partition]
        reading, writing = buffers_of(request, part.first, part.last, part.micro_batch)
        # Scalars of the optimizer and the tally of losses, a few hundred bytes, are not planned one by one.
        foretold = moment.peak - slot + reading + (writing if done.step.verb is Verb.FORWARD else 0) + 4096
        assert peak <= foretold, f"{done.step}: {peak} bytes were live, {foretold} foretold"
        highest_seen, highest_foretold = max(highest_seen, peak), max(highest_foretold, foretold)
    assert highest_foretold <= 1.5 * highest_seen, "the highest step is foretold far above what it takes"


def test_the_printed_schedule_is_the_executed_one(tmp_path, monkeypatch):
    _, prepared, executed = run(tmp_path, monkeypatch, partitions=2, batch_size=64)
    printed = to_text(steps_of(prepared.phases), prepared.phases)
    assert parse(printed) == [done.step for done, _, _ in executed]
    assert printed.startswith("[train 0.1] L0 B0.0 U0 B0.1 U0 B0.2 U0 [train 0.2] B0.0")


def test_when_the_simulated_schedule_ends_nothing_is_loaded_and_no_gradient_is_left(tmp_path, monkeypatch):
    _, _, executed = run(tmp_path, monkeypatch, partitions=3, epochs=1)
    steps = [done.step for done, _, _ in executed]
    assert steps[-1].verb is Verb.DROP
    for before, after in itertools.pairwise(steps):
        if before.verb is Verb.BACKWARD:
            assert after.verb in (Verb.BACKWARD, Verb.UPDATE)
