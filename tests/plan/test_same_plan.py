"""A run that goes on has the plan that it had, and says so, where nothing that it was made for is another now."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch import nn

from seqpart import Trainer
from seqpart.device.usage import read_process
from seqpart.errors import DoesNotFit, Interrupted
from seqpart.plan.plan import Plan
from seqpart.store.scratch import PLAN
from tests.choice import in_turn
from tests.machine import SPEEDS, known_runtime, known_speeds
from tests.resuming import interrupt
from tests.runtime.test_same_as_plain import data

WIDTH, ROWS = 768, 96
SLOW = replace(SPEEDS, read=SPEEDS.read / 50, write=SPEEDS.write / 50)
FAST = replace(SPEEDS, read=SPEEDS.read * 50, write=SPEEDS.write * 50)
WAYS = {
    "full of auto": {"method": "auto"},
    "streamed of auto, in little more than the least": {"method": "auto", "tight": True},
    "checkpointed": {"method": "checkpointed"},
    "streamed": {"method": "streamed"},
    "streamed, in little more than the least": {"method": "streamed", "tight": True},
    "streamed, as asked": {"method": "streamed", "partitions": 3, "micro_batch_size": 32},
    "sil, in little more than the least": {"method": "sil", "tight": True},
    "sil, and recovery": {"method": "sil", "partitions": 3, "recovery_epochs": 1},
    "ist": {"method": "ist", "subnets": 2, "local_steps": 1},
}


@pytest.fixture(autouse=True)
def runtime(known_machine, monkeypatch):
    """Of the plans: what tests before these have loaded into this process is no part of it, and it has to be less."""
    nbytes = max(1 << 30, read_process().held + (256 << 20))
    known_runtime(monkeypatch, nbytes)
    return nbytes


def network():
    hidden = [lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())] * 6
    return [lambda: nn.Sequential(nn.Linear(12, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()), *hidden, lambda: nn.Linear(WIDTH, 5)]


def trainer(folder, **options):
    options = {"mem_limit": "2GB", "epochs": 2, "batch_size": ROWS, "save_every": 1, **options}
    return Trainer(network(), output_dir=folder / "run", quiet=True, **options)


def way(folder, name, runtime):
    """The options, with a limit a little above the smallest where that is to be tight."""
    options = dict(WAYS[name])
    if options.pop("tight", False):
        with pytest.raises(DoesNotFit) as refused:
            trainer(folder, **options, mem_limit=runtime + (6 << 20)).plan(data(2 * ROWS))
        options["mem_limit"] = refused.value.smallest * 103 // 100
    return options


def stopped(folder, **options):
    """A run that a signal ended behind its first update, and its plan."""
    with pytest.raises(Interrupted) as saved:
        trainer(folder, **options).fit(data(2 * ROWS), callbacks=[SimpleNamespace(on_step=lambda event: interrupt())])
    directory = saved.value.directory
    return directory, Plan.from_json((directory / PLAN).read_text(), PLAN)


def answers(plan):
    parts = [(part.first, part.last, part.micro_batch, part.stays, part.graph, part.boundary_tier) for part in plan.partitions]
    return plan.method, parts, plan.slots, bool(plan.heap), plan.rows_in_memory


@pytest.mark.parametrize(("name", "first", "then"), in_turn([*WAYS], [SPEEDS, SLOW], [SLOW, SPEEDS]))
@pytest.mark.few(1)
def test_a_run_goes_on_with_the_plan_that_it_had_however_fast_the_machine_is_now(
    name, first, then, runtime, tmp_path, monkeypatch
):
    """It planned anew within the old cut: peaks were others, nobody had asked for what was said to be as asked, and `auto`
    compared methods in one partition, where all are full."""
    known_speeds(monkeypatch, first)
    options = way(tmp_path, name, runtime)
    directory, before = stopped(tmp_path, **options)
    known_speeds(monkeypatch, then)
    now = trainer(tmp_path, **options).fit(data(2 * ROWS), resume=directory).plan
    assert (len(before.partitions) > 1) is (name != "full of auto")
    assert answers(now) == answers(before)
    assert now.peak == pytest.approx(before.peak, rel=0.01)
    said = "\n".join(now.reasons)
    assert "as asked" not in said and "does not fit" not in said and "per update in" not in said
    assert ("as before" in said) is (name != "ist")
    assert ("method full as before" in said) is (name == "full of auto")


@pytest.mark.slow
@pytest.mark.own_process
def test_with_another_limit_the_cut_is_as_before_and_the_rest_is_chosen_anew(runtime, tmp_path, monkeypatch):
    """The disk is fast: where an update waits for it, graphs that would save computing are not kept, whatever the limit."""
    known_speeds(monkeypatch, FAST)
    directory, before = stopped(tmp_path, **way(tmp_path, "streamed, in little more than the least", runtime))
    now = trainer(tmp_path, method="streamed").fit(data(2 * ROWS), resume=directory).plan
    assert now.peak > before.peak and now.starts == before.starts
    said = "\n".join(now.reasons)
    assert "as asked" not in said and f"{len(before.partitions)} partitions as before" in said


def test_a_cut_that_is_asked_for_now_is_said_to_be(tmp_path):
    directory, _ = stopped(tmp_path, **WAYS["streamed"])
    now = trainer(tmp_path, method="streamed", partitions=4).fit(data(2 * ROWS), resume=directory).plan
    assert len(now.partitions) == 4 and any(text.startswith("4 partitions as asked") for text in now.reasons)


def test_methods_are_not_compared_where_there_is_one_partition(tmp_path):
    plan = trainer(tmp_path, method="auto", partitions=1).plan(data(2 * ROWS))
    assert plan.method == "full" and not any("per update" in text for text in plan.reasons)


def test_subnets_do_not_say_that_a_micro_batch_was_asked_for_which_was_chosen(runtime, tmp_path):
    plan = trainer(tmp_path, method="ist", subnets=2, partitions=1, batch_size=4096, mem_limit=runtime + (136 << 20)).plan(
        data(8192)
    )
    said = "\n".join(plan.reasons)
    assert plan.micro_batch < 4096 and "the largest that fits" in said and "as asked" not in said
