"""A run that is stopped, by a signal or a kill, goes on to the bits of one that was left alone; what cannot go on is told."""

import functools
import json
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import seqpart.plan.exact as exactplan
from seqpart.errors import DoesNotFit, Interrupted, OptionError, OutOfMemory, SeqpartError
from seqpart.report.reporter import EVENTS
from seqpart.runtime import weight_store
from seqpart.runtime.executor import Executor
from seqpart.schedule.steps import Verb
from seqpart.store.scratch import has_checkpoint
from seqpart.store.store import Store
from tests.choice import only_quick
from tests.exactly import FULL, How, numbers, tokens
from tests.resuming import Arm, Killed, Stopping, ended, interrupt, kill
from tests.runtime.test_exact import (
    ADAM,
    ADAMW,
    CLIP,
    COSINE,
    LINEAR,
    NARROW,
    SGD,
    attentive,
    dense,
    dropping,
    fresh,
    language,
    partly_frozen,
    pictures,
    statistics,
)  # fmt: skip
from tests.runtime.test_failures import REFUSAL

SEED = 3
tied = functools.partial(language, tied=True, dropout=0.1)
SIL = How(method="sil", slots=2)
CASES = {
    "full, adam, cosine": (dense, (12,), FULL, ADAM | COSINE),
    "checkpointed, statistics, clipped": (pictures, (2, 6, 6), How(method="checkpointed"), SGD | CLIP),
    "one slot, statistics, clipped": (statistics, (12,), How(), SGD | CLIP | {"partitions": (0, 2, 4)}),
    "two slots, boundaries on disk, dropout": (dropping, (12,), How(slots=2, boundary_tier="disk"), SGD | COSINE),
    "boundaries in three places, graphs kept": (dropping, (12,), How(keeps=0.5, boundary_tier="mixed"), ADAM),
    "tied, graphs kept, clipped": (tied, None, How(slots=2, keeps=0), ADAM | CLIP),
    "half stay, statistics, clipped": (statistics, (12,), How(stays=0.5), ADAM | CLIP | {"partitions": (0, 2, 4)}),
    "weights stay, statistics, clipped": (
        statistics, (12,), How(slots=2, weights=1), ADAM | CLIP | {"partitions": (0, 2, 4)},
    ),
    "one stays, weights of others, graphs kept": (
        dropping, (12,), How(stays=0.25, weights=0.75, keeps=0), ADAM | {"test_every": 1},
    ),
    "the last stay, graphs kept, dropout": (dropping, (12,), How(slots=2, stays=-0.5, keeps=0), SGD | {"test_every": 1}),
    "partly frozen, bf16": (functools.partial(partly_frozen, {2, 3}), (12,), How(keeps=0.5), ADAM | NARROW),
    "in host memory, attention, bf16": (attentive, (4, 12), How(slots=2, boundary_tier="host"), ADAMW | NARROW | LINEAR),
    "sil, recovery, dropout": (dropping, (12,), SIL, ADAM | {"partitions": (0, 2, 4), "recovery_epochs": 1}),
    "sil, recovery of all, statistics, clipped": (
        statistics, (12,), SIL, SGD | CLIP | LINEAR | {"recovery_epochs": 1, "objective": "mse", "recover": "all"},
    ),
    "tested between epochs, statistics": (statistics, (12,), How(), SGD | {"partitions": (0, 2, 4), "test_every": 1}),
    "sil, recovery, tested between epochs": (
        dropping, (12,), SIL, ADAM | {"partitions": (0, 2, 4), "recovery_epochs": 2, "test_every": 1},
    ),
}  # fmt: skip


@pytest.fixture
def arms(monkeypatch, tmp_path):
    def of(model, shape, how, **options):
        data = tokens() if shape is None else numbers(shape)
        return Arm(monkeypatch, tmp_path, how, fresh(model), data, **{"partitions": (0, 1, 2, 3), **options})

    return of


@pytest.fixture(scope="module")
def known():
    return {}


@pytest.fixture
def arm(arms, known):
    """Streamed, with momentum and dropout; three partitions."""
    return arms(dropping, (12,), How(slots=2), partitions=(0, 1, 3), momentum=0.9, known=known)


def stopped_after(arm, steps, *, how=kill, **options):
    """A run that made so many steps."""
    with pytest.raises((Interrupted, Killed)):
        arm.fit(reporter=Stopping(steps, how), **options)


QUICK = [
    "one slot, statistics, clipped",
    "two slots, boundaries on disk, dropout",
    "half stay, statistics, clipped",
    "tied, graphs kept, clipped",
    "in host memory, attention, bf16",
    "sil, recovery, tested between epochs",
]


@pytest.mark.parametrize("name", only_quick(CASES, QUICK))
@pytest.mark.few(2)
def test_a_run_stopped_anywhere_and_often_ends_with_the_bits_of_one_that_was_left_alone(name, arms):
    """Mid-update, mid-epoch, mid-partition; signals save where they come, kills fall back to the last save."""
    model, shape, how, options = CASES[name]
    arm, chance = arms(model, shape, how, **options), random.Random(f"{SEED} {name}")
    whole, steps = arm.whole()
    parts = [chance.randint(len(steps) // 8, len(steps) // 4) for _ in range(3)]
    events = list(zip(parts, chance.sample([interrupt, interrupt, kill], 3), strict=True))
    found, stops = arm.stopped(iter(events), save_every=chance.choice(["1", "2"]))
    assert stops == len(events)
    assert found == whole, (SEED, events)


def test_a_run_interrupted_in_every_update_makes_one_at_a_time(arm):
    whole, steps = arm.whole()
    updates = len([step for step in steps if step.verb is Verb.UPDATE]) // 3
    assert arm.stopped(iter([(1, interrupt)] * updates)) == (whole, updates)


# --- Signals ---------------------------------------------------------------------------------------------------------


def twice():
    interrupt()
    interrupt()


def test_a_second_signal_ends_the_run_at_once_and_the_last_checkpoint_serves(arm):
    whole, steps = arm.whole()
    stopped_after(arm, len(steps) // 2, how=twice, save_every="1")
    assert ended(arm.fit(resume=arm.root)) == whole


def test_a_second_signal_before_anything_was_saved_says_that_nothing_is_kept(arm):
    with pytest.raises(KeyboardInterrupt) as ending:
        arm.fit(reporter=Stopping(9, twice))
    assert not isinstance(ending.value, Interrupted)
    assert not list((arm.root / "homes").glob("*"))


def test_a_signal_while_the_checkpoint_is_read_leaves_it(arm, monkeypatch):
    whole, _ = arm.whole()
    stopped_after(arm, 20, how=interrupt)
    with monkeypatch.context() as patched:
        patched.setattr(Store, "verify", lambda _: interrupt())
        with pytest.raises(Interrupted, match="resume"):
            arm.fit(resume=arm.root)
    assert ended(arm.fit(resume=arm.root)) == whole


def test_a_signal_while_the_results_are_written_is_obeyed_behind_them_and_nothing_is_trained_again(arm, monkeypatch):
    whole, _ = arm.whole()
    export = weight_store.export_weights
    with monkeypatch.context() as patched:
        patched.setattr(weight_store, "export_weights", lambda *some, **named: (interrupt(), export(*some, **named)))
        with pytest.raises(Interrupted, match="the run is saved"):
            arm.fit()
    reporter = Stopping()
    assert ended(arm.fit(resume=arm.root, reporter=reporter)) == whole
    assert reporter.steps == []
    begun = f"going on from {arm.root / 'checkpoint.json'}, with the writing of the results"
    assert any(text.startswith(begun) for text in reporter.said)


def test_a_run_that_never_saves_ends_at_once_and_keeps_nothing(arm):
    reporter = Stopping(3, interrupt)
    with pytest.raises(KeyboardInterrupt) as ending:
        arm.fit(reporter=reporter, save_every="never")
    assert (type(ending.value), len(reporter.steps)) == (KeyboardInterrupt, 3)
    assert not has_checkpoint(arm.root)


# --- How often -------------------------------------------------------------------------------------------------------


def saves(root):
    """Position of each checkpoint."""
    events = [json.loads(line) for line in (root / EVENTS).read_text().splitlines()]
    return [(event["phase"], event["updates"]) for event in events if event["event"] == "checkpoint"]


@pytest.mark.parametrize(
    ("every", "expected"), [("2", [(0, 2), (1, 1), (2, 0)]), ("never", []), ("0.000001s", [(0, 1), (0, 2), (1, 0)]), ("1h", [])]
)
@pytest.mark.few(2)
def test_checkpoints_come_every_so_many_updates_or_seconds_or_never(arm, every, expected):
    arm.fit(save_every=every)
    assert saves(arm.root)[:3] == expected


# --- Under other limits ----------------------------------------------------------------------------------------------


def test_a_run_whose_cut_no_longer_fits_goes_on_with_another(arm, monkeypatch):
    whole, steps = arm.whole()
    stopped_after(arm, len(steps) // 2, save_every="1")
    fastest = exactplan.fastest

    def fits_finer(problem, *rest):
        return None if problem.starts == (0, 1, 3) else fastest(replace(problem, starts=(0, 1, 2, 3, 4)), *rest)

    monkeypatch.setattr(exactplan, "fastest", fits_finer)
    result = arm.fit(resume=arm.root, partitions="auto", mem_limit="2GB")
    assert (ended(result), result.plan.starts) == (whole, (0, 1, 2, 3, 4))


def test_a_cut_that_is_asked_for_anew_is_taken_where_it_leaves_the_bits_alone(arm):
    whole, steps = arm.whole()
    stopped_after(arm, len(steps) // 2, save_every="1")
    result = arm.fit(resume=arm.root, partitions=(0, 2))
    assert (ended(result), result.plan.starts) == (whole, (0, 2))


def test_a_smaller_micro_batch_that_is_asked_for_anew_is_taken(arm):
    stopped_after(arm, 40, save_every="1")
    told = Stopping()
    assert arm.fit(resume=arm.root, micro_batch_size=1, reporter=told).final_micro_batch == 1
    assert any("is 1, which gives other bits" in line for line in told.said)


def test_other_threads_are_told_since_products_round_otherwise_with_them(arm, monkeypatch):
    """With one thread for two a small network ended with other weights, and nothing said why."""
    stopped_after(arm, 40, save_every="1")
    threads, told = torch.get_num_threads(), Stopping()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    arm.fit(resume=arm.root, reporter=told)
    assert any(f"the threads were {threads}, are {threads + 1} (OMP_NUM_THREADS), which" in line for line in told.said)


def test_sil_keeps_its_cut_and_says_so_where_that_cannot_be(arms):
    arm = arms(dropping, (12,), SIL, recovery_epochs=1)
    stopped_after(arm, 60, save_every="1")
    with pytest.raises(OptionError, match=r"was cut at blocks \(0, 1, 2, 3\). Give the same method and cut"):
        arm.fit(resume=arm.root, partitions=(0, 2))
    with pytest.raises(DoesNotFit):
        arm.fit(resume=arm.root, mem_limit="510MB")
    assert arm.fit(resume=arm.root, mem_limit="3GB").plan.starts == (0, 1, 2, 3)


# --- Refused ---------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_not_gone_on_with(arm):
    arm.fit()
    with pytest.raises(OptionError, match=r"is finished, and its weights are in .*model.safetensors\. Start another"):
        arm.fit(resume=arm.root)
    stopped_after(arm, 3, overwrite=True)  # the real kill would have left what it had begun to write
    (arm.root / f"{EVENTS}.seqpart-new").touch()
    with pytest.raises(OptionError, match=r"is finished.*ended before anything was saved.*with overwrite"):
        arm.fit(resume=arm.root)


def test_a_run_that_was_ended_before_its_first_checkpoint_begins_anew_and_says_so(arm):
    whole, _ = arm.whole()
    stopped_after(arm, 3)
    reporter = Stopping()
    assert ended(arm.fit(resume=arm.root, reporter=reporter)) == whole
    assert f"{arm.root} was ended before anything was saved: it starts from the beginning" in reporter.said


def test_a_directory_that_is_no_run_s_is_refused(arm, tmp_path):
    """It was said to be one that had saved nothing, and the training began."""
    (tmp_path / "checkpoint-5").mkdir()
    with pytest.raises(OptionError, match=r"expected the directory of a run, with seqpart-run.json in it; found none in .*-5"):
        arm.fit(resume=tmp_path / "checkpoint-5")


def test_other_settings_are_refused_and_named(arm):
    stopped_after(arm, 40, save_every="1")
    refused = [
        ({"batch_size": 4}, r"has other settings: batch_size was 8, not 4\. Give the same, or start a new run elsewhere"),
        ({"method": "full", "seed": 8, "partitions": "auto"}, "method was streamed, not full, seed was 7, not 8"),
        ({"optimizer": "adam", "momentum": 0.0}, r"momentum was 0\.9, not 0\.0, optimizer was sgd, not adam"),
    ]
    for options, words in refused:
        with pytest.raises(OptionError, match=words):
            arm.fit(resume=arm.root, **options)


def test_another_model_and_other_data_are_refused_and_the_checkpoint_stays(arm):
    whole, _ = arm.whole()
    stopped_after(arm, 40, save_every="1")
    model, data = arm.model, arm.data
    arm.model = lambda: [*model()[:-1], lambda: nn.Sequential(nn.Linear(16, 4), nn.Dropout())]
    with pytest.raises(OptionError, match=r"holds another model. Give the same model"):
        arm.fit(resume=arm.root)
    arm.model, arm.data = model, numbers((12,), rows=23)
    with pytest.raises(OptionError, match=r"was trained on other data. Give the same train, in the same order"):
        arm.fit(resume=arm.root)
    arm.data = data
    assert ended(arm.fit(resume=arm.root)) == whole


# --- Memory that runs out in the middle of an update -----------------------------------------------------------------


def fail_once(monkeypatch, verb, partition, micro_batch):
    """The next time that this step is made, its allocation fails. Returns whether it did, in a list."""
    name, failed = f"_{verb.name.lower()}", []
    real = getattr(Executor, name)

    def failing(executor, step):
        if (step.partition, step.micro_batch) == (partition, micro_batch) and not failed:
            failed.append(len(executor.progress.updated))
            raise RuntimeError(REFUSAL)
        return real(executor, step)

    monkeypatch.setattr(Executor, name, failing)
    return failed


def test_an_update_that_memory_ends_half_way_is_taken_back_from_the_disk_and_made_again(arm, monkeypatch):
    """As if memory had run out before anything of it was done: both go on with the smaller micro-batch."""
    results = []
    for verb, done in ((Verb.FORWARD, 0), (Verb.BACKWARD, 2)):
        with monkeypatch.context() as patched:
            failed = fail_once(patched, verb, 0, 3)
            results.append(arm.fit(verb.name, save_every="1"))
            assert failed == [done], "partitions that had made their step"
    before, half_way = results
    assert ended(half_way) == ended(before)
    assert half_way.final_micro_batch == 1


@pytest.mark.parametrize(
    "stays",
    [{"stays": 0.34}, {"stays": -0.34}, {"stays": 1}, {"weights": 1}, {"weights": 0.67, "stays": 0.34}],
    ids=["the first stays", "the last stays", "all stay", "all weights stay", "the first stays, and weights of the second"],
)
@pytest.mark.parametrize("tier", ["disk", "host"])
@pytest.mark.few(1)
def test_partitions_that_stay_are_what_they_were_when_memory_ends_an_update_half_way(arms, monkeypatch, stays, tier):
    """All are taken back from their homes, which those that stay have written at the last checkpoint."""
    options = {"ram_limit": "50MB"} if tier == "host" else {}
    arm = arms(statistics, (12,), How(slots=2, **stays), partitions=(0, 2, 4), momentum=0.9, micro_batch_size=4, **options)
    results = []
    for verb, updated in ((Verb.FORWARD, 0), (Verb.BACKWARD, 2)):
        with monkeypatch.context() as patched:
            failed = fail_once(patched, verb, 0, 3)
            if tier == "host" and updated and stays != {"stays": 1}:  # where all stay, no home is written between checkpoints
                with pytest.raises(OutOfMemory, match="weights in host memory cannot be restored"):
                    arm.fit(verb.name, save_every="1")
                return
            results.append(arm.fit(verb.name, save_every="1"))
            assert failed == [updated], "partitions that had made their step"
    assert ended(results[0]) == ended(results[1])
    assert results[0].final_micro_batch == 2


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.1}], ids=["", "clipped"])
@pytest.mark.parametrize("how", [How(weights=1), How(slots=2, weights=1, keeps=0)], ids=str)
@pytest.mark.few(1)
def test_statistics_are_what_they_were_when_memory_ends_a_backward_pass_though_weights_stay(arms, how, options, monkeypatch):
    """Where the weights stayed, so did the statistics of the update that never was, and went home with them."""
    results = []
    for way in (How(), how):
        arm = arms(statistics, (12,), way, partitions=(0, 2, 4), optimizer="adam", micro_batch_size=4, **options)
        with monkeypatch.context() as patched:
            failed = fail_once(patched, Verb.BACKWARD, 2, 3)
            results.append(ended(arm.fit("run", overwrite=True)))
            assert failed == [0]
    assert results[0] == results[1]


@pytest.mark.parametrize("put", [2, 3])
@pytest.mark.parametrize("how", [How(slots=2, weights=1), How(slots=2, stays=0.34, weights=1)], ids=str)
@pytest.mark.few(1)
def test_state_that_could_not_be_written_is_in_no_checkpoint_though_weights_stay(arms, how, put, monkeypatch, tmp_path):
    """A visit without a slot forgot that it was on its way: the next checkpoint had the state of the update before."""
    arm = arms(dropping, (12,), how, partitions=(0, 2, 3), optimizer="adam", micro_batch_size=4, epochs=2, test_every=1)
    whole, real, calls = ended(arm.fit("whole", save_every="1")), Store._put, []

    def full(store, name, *arguments):
        calls.append(name)
        if name.endswith("optimizer") and calls.count(name) == put:
            raise OSError(28, "No space left on device")
        return real(store, name, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "_put", full)
        with pytest.raises((SeqpartError, OSError)):
            arm.fit("stopped", save_every="1")
    assert ended(arm.fit("stopped", save_every="1", resume=tmp_path / "stopped")) == whole


def test_a_run_that_is_stopped_after_memory_ran_out_goes_on_with_the_smaller_micro_batch(arm, monkeypatch):
    found = {}
    for name, events in (("alone", []), ("stopped", [(120, kill), (30, interrupt)])):
        with monkeypatch.context() as patched:
            failed = fail_once(patched, Verb.BACKWARD, 0, 3)
            found[name], stops = arm.stopped(iter(events), name, save_every="1")
            assert (failed, stops) == ([2], len(events))
    assert found["stopped"] == found["alone"]
