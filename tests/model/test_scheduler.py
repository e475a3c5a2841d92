"""Any scheduler of torch's, as a function from an optimizer: the bits of a plain loop that steps it behind every update."""

import copy
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.optim import lr_scheduler

from seqpart import Settings, Trainer
from seqpart.errors import Interrupted, OptionError
from seqpart.model.optimizers import choose
from seqpart.model.scheduler import Scheduler, Whole
from tests.exactly import FULL, How, Trained, first_difference, numbers
from tests.resuming import Arm, Stopping, interrupt, kill

ROWS, BATCH, EPOCHS = 22, 8, 3
UPDATES = EPOCHS * math.ceil(ROWS / BATCH)

pytestmark = pytest.mark.usefixtures("known_machine")


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=UPDATES)


def restarts(optimizer):
    return lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2, T_mult=2)


def in_turn(optimizer):
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.ExponentialLR(optimizer, 0.7)], milestones=[3])


def cyclic(optimizer):
    return lr_scheduler.CyclicLR(optimizer, 0.001, 0.02, step_size_up=2, cycle_momentum=True)


class ByHand:
    """A scheduler of one's own, which derives from nothing."""

    def __init__(self, optimizer):
        self.optimizer, self.done, self.base = optimizer, 0, [group["lr"] for group in optimizer.param_groups]

    def step(self):
        self.done += 1
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            group["lr"] = base / (1 + self.done)


class LikeTimm(ByHand):
    t_in_epochs = False

    def step(self, epoch, metric=None):
        raise AssertionError("it counts updates")

    def step_update(self, updates, metric=None):
        self.done = updates - 1
        super().step()


SCHEDULES = [
    one_cycle, restarts, in_turn, cyclic, ByHand, LikeTimm,
    lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (1 + done)),
    lambda optimizer: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(optimizer, 2), lr_scheduler.ConstantLR(optimizer)]),
]  # fmt: skip


def network():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def trained(folder, schedule, **options):
    trainer = Trainer(
        network(), mem_limit="2GB", batch_size=BATCH, epochs=EPOCHS, lr=0.01, shuffle=False, quiet=True, output_dir=folder,
        lr_schedule=schedule, **{"method": "full", **options},
    )  # fmt: skip
    return load_file(trainer.fit(*numbers((6,))).weights)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.few(5)
def test_a_run_has_the_bits_of_a_plain_loop_that_steps_the_scheduler(schedule, name, tmp_path):
    model, (train, _) = network(), numbers((6,))
    x, y = train.open()[0].float(), train.labels
    momentum = {"momentum": 0.9} if name == "sgd" else {}
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
    optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.0, fused=True, **momentum)
    scheduler = schedule(optimizer)
    for _ in range(EPOCHS):
        for start in range(0, ROWS, BATCH):
            F.cross_entropy(model(x[start : start + BATCH]), y[start : start + BATCH]).backward()
            optimizer.step()
            scheduler.step_update(1 + scheduler.done) if schedule is LikeTimm else scheduler.step()
            optimizer.zero_grad()
    found = trained(tmp_path, schedule, optimizer=name, micro_batch_size=BATCH, **momentum)
    for key, tensor in model.state_dict().items():
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("momentum", [{}, {"momentum": 0.5}], ids=["none of its own", "some"])
@pytest.mark.parametrize(
    "given", [None, lambda parameters: torch.optim.SGD(parameters, lr=0.01)], ids=["by name", "a function"]
)
@pytest.mark.few(1)
def test_a_momentum_that_the_scheduler_sets_is_planned_and_kept(given, momentum, monkeypatch, tmp_path):
    """SGD has none unasked, so that no state was planned; OneCycleLR gives it one, which each partition forgot as it left."""
    if given is None:
        arm = Trained(monkeypatch, tmp_path, network, numbers((6,)), partitions=(0, 2, 4))
        options = {"optimizer": "sgd", "epochs": EPOCHS, "lr_schedule": one_cycle, **momentum}
        whole = arm.run(FULL, **options)
        assert first_difference(arm.run(How(), **options), whole) is None
        assert any("momentum_buffer" in key for key in map(str, whole))
    plan = Trainer(
        network(), None, given or "sgd", mem_limit="2GB", method="full", batch_size=BATCH, epochs=EPOCHS, lr_schedule=one_cycle,
        quiet=True, **({} if given else {"lr": 0.01, **momentum}),
    ).plan(numbers((6,))[0])  # fmt: skip
    assert sum(part.state for part in plan.partitions) >= 4 * plan.parameters


class Later(lr_scheduler.LRScheduler):
    def get_lr(self):
        self.optimizer.param_groups[0]["momentum"] = 0.9 * (self.last_epoch > 2)
        return self.base_lrs


class Between(lr_scheduler.LRScheduler):
    def get_lr(self):
        self.optimizer.param_groups[0]["momentum"] = 0.9 * (1 < self.last_epoch < 4)
        return self.base_lrs


@pytest.mark.parametrize("schedule", [Later, Between])
@pytest.mark.few(1)
def test_a_momentum_that_comes_and_goes_is_kept_where_the_optimizer_has_one(schedule, monkeypatch, tmp_path):
    arm = Trained(monkeypatch, tmp_path, network, numbers((6,)), partitions=(0, 2, 4))
    options = {"optimizer": "sgd", "epochs": EPOCHS, "lr_schedule": schedule, "momentum": 0.9}
    assert first_difference(arm.run(How(), **options), arm.run(FULL, **options)) is None
    with pytest.raises(OptionError, match="begins without momentum and sets it later"):
        trained(tmp_path / "bare", schedule, optimizer="sgd")


def test_a_momentum_that_comes_later_is_refused(tmp_path):
    with pytest.raises(OptionError, match="begins without momentum and sets it later"):
        trained(tmp_path, Later, optimizer="sgd")


@pytest.mark.parametrize("how", [How(), How(slots=2, stays=0.5), How(method="checkpointed")], ids=str)
@pytest.mark.few(1)
def test_every_way_gives_the_bits_of_full_training(how, monkeypatch, tmp_path):
    options = {"optimizer": "adamw", "epochs": EPOCHS, "lr_schedule": one_cycle}
    arm = Trained(monkeypatch, tmp_path, network, numbers((6,)), partitions=(0, 2, 4))
    assert first_difference(arm.run(how, **options), arm.run(FULL, **options)) is None


@pytest.mark.parametrize("end", [interrupt, kill])
@pytest.mark.few(1)
def test_a_run_that_is_stopped_goes_on_to_the_same_bits(end, monkeypatch, tmp_path):
    options = {"optimizer": "adamw", "epochs": EPOCHS, "lr_schedule": one_cycle, "partitions": (0, 2, 4)}
    arm = Arm(monkeypatch, tmp_path, How(slots=2), network, numbers((6,)), **options)
    whole, steps = arm.whole()
    found, stops = arm.stopped(iter([(len(steps) // 3, end), (len(steps) // 4, end)]), save_every="1")
    assert stops == 2 and found == whole


def test_another_schedule_may_be_taken_on_resume_and_is_told(monkeypatch, tmp_path):
    arm = Arm(monkeypatch, tmp_path, How(), network, numbers((6,)), optimizer="adamw", epochs=EPOCHS, partitions=(0, 2, 4))
    events, said = iter([(9, interrupt)]), []
    monkeypatch.setattr(Stopping, "say", lambda _, text: said.append(text))
    plain, _ = arm.stopped(events, "plain", save_every="1")
    assert not any("lr_schedule" in text for text in said)
    with pytest.raises(Interrupted):
        arm.fit("other", reporter=Stopping(9, interrupt), save_every="1")
    result = arm.fit(resume=tmp_path / "other", lr_schedule=restarts, reporter=Stopping())
    assert result.weights.read_bytes() != plain[0]
    assert any("lr_schedule was constant, is restarts" in text for text in said)


@given(st.sampled_from(SCHEDULES), st.lists(st.integers(0, UPDATES - 1), min_size=1, max_size=6))
def test_what_a_schedule_says_depends_on_the_updates_alone(schedule, asked):
    def of_one():
        build, parameter = choose("sgd", lr=0.01, momentum=0.9).build, nn.Parameter(torch.zeros(2))
        return Scheduler(schedule, Whole(build, [("weight", parameter)]))

    one = of_one()
    assert [one.at(done) for done in asked] == [of_one().at(done) for done in asked]


def test_sil_begins_it_anew_in_every_partition(tmp_path):
    found = trained(tmp_path / "a", one_cycle, method="sil", partitions=(0, 2))
    assert all(tensor.isfinite().all() for tensor in found.values())


def falls_short(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=UPDATES - 2)


def broken(optimizer):
    raise ZeroDivisionError("no rate")


def plateau(optimizer):
    """Halves the rate after every evaluation that is not much better than the best."""
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)


def test_one_that_waits_for_evaluations_steps_by_their_loss(tmp_path):
    x, y = torch.randn(ROWS, 6), torch.arange(ROWS) % 3
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    expected = copy.deepcopy(model)

    def trainer(model, **options):
        given = {"method": "streamed", "partitions": 2, "epochs": 6, "batch_size": BATCH, "eval_every": "1 epoch"}
        return Trainer(
            model, F.cross_entropy, lambda own: torch.optim.SGD(own, lr=0.5), mem_limit="3GB", shuffle=False, quiet=True,
            lr_schedule=plateau, **given | options,
        )  # fmt: skip

    class Stops:
        def on_epoch(self, event):
            if event.update == 3 * -(-ROWS // BATCH) and stops:
                raise KeyboardInterrupt

    start, stops = copy.deepcopy(model), False
    trainer(model, output_dir=tmp_path / "whole").fit((x, y), (x, y))
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    scheduler, rates = plateau(optimizer), []
    for _ in range(6):
        for at in range(0, ROWS, BATCH):
            optimizer.zero_grad()
            F.cross_entropy(expected(x[at : at + BATCH]), y[at : at + BATCH]).backward()
            optimizer.step()
        with torch.no_grad():
            scheduler.step(F.cross_entropy(expected(x), y))
        rates.append(optimizer.param_groups[0]["lr"])
    assert len(set(rates)) > 2
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected.parameters(), strict=True))

    stops = True
    with pytest.raises(KeyboardInterrupt):
        trainer(start, output_dir=tmp_path / "resumed").fit((x, y), (x, y), callbacks=[Stops()])
    trainer(start, output_dir=tmp_path / "resumed").fit((x, y), (x, y), resume=tmp_path / "resumed")
    assert all(torch.equal(one, other) for one, other in zip(start.parameters(), expected.parameters(), strict=True))


def test_one_that_waits_for_a_larger_number_needs_one_of_which_larger_is_better(tmp_path):
    with pytest.raises(OptionError, match=r"ReduceLROnPlateau has mode='max', and .*of which smaller is better"):
        trained(tmp_path, lambda own: lr_scheduler.ReduceLROnPlateau(own, mode="max"), eval_every="1 epoch")


REFUSED = {
    r"ReduceLROnPlateau steps by the value of each evaluation. Give eval_every": lr_scheduler.ReduceLROnPlateau,
    r"its step 8 failed \(does it end before the run's last update\?\): ValueError": falls_short,
    "it failed: ZeroDivisionError: no rate": broken,
    r"a scheduler, with a step\(\) for each update; it returned dict": lambda optimizer: {},
    "EpochsLikeTimm counts epochs, .*Give t_in_epochs=False": type("EpochsLikeTimm", (LikeTimm,), {"t_in_epochs": True}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_no_schedule_of_updates_is_refused_before_the_run(words, tmp_path):
    with pytest.raises(OptionError, match=words):
        trained(tmp_path, REFUSED[words])


def test_a_warm_up_of_ours_goes_with_schedules_of_ours():
    with pytest.raises(OptionError, match="warmup_updates goes with a schedule given by name"):
        Settings(mem_limit="2GB", method="auto", lr_schedule=one_cycle, warmup_updates=3)
    with pytest.raises(OptionError, match=r"lr_schedule: expected constant, linear or cosine, .*; found 7"):
        Settings(mem_limit="2GB", method="auto", lr_schedule=7)


def by_dimensions(parameters):
    groups = [[one for one in parameters if one.ndim > 1], [one for one in parameters if one.ndim < 2]]
    return torch.optim.SGD([{"params": group} for group in groups if group], lr=0.01)


def head_and_rest(named_parameters):
    """A rate of its own for the last layer, in groups that a partition may lack."""
    groups = {True: [], False: []}
    for name, parameter in named_parameters:
        groups[name.startswith("4.")].append(parameter)
    return torch.optim.AdamW(
        [{"params": own, "lr": 0.03 if head else 0.001} for head, own in groups.items() if own], fused=True
    )


def by_depth(named_parameters):
    """Each layer's rate by the number in its name, each parameter in a group of its own."""
    groups = [{"params": [one], "lr": 0.01 * 0.8 ** int(name.split(".")[0])} for name, one in named_parameters]
    return torch.optim.AdamW(groups, fused=True)


def of_two_kinds(named_parameters):
    named = list(named_parameters)
    first, last = ([one for name, one in named if name.startswith("4.") is head] for head in (False, True))
    made = [torch.optim.SGD(first, lr=0.01)] if first else []
    return made + ([torch.optim.AdamW(last, lr=0.02, fused=True)] if last else [])


def by_identity(model):
    fast = {id(one) for one in model[2].parameters()}

    def build(parameters):
        groups = [{"params": [one], "lr": 0.05 if id(one) in fast else 0.002} for one in parameters]
        return torch.optim.AdamW(groups, fused=True)

    return build


def constant(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda done: 1.0)


@pytest.mark.parametrize("schedule", [constant, restarts])
@pytest.mark.parametrize("build", [by_dimensions, head_and_rest, by_depth, of_two_kinds, by_identity])
def test_each_partition_has_the_rates_of_its_own_groups(build, schedule, tmp_path):
    """Of a scheduler whose optimizer had one parameter alone the head learned, in silence, at the rate of the rest."""
    model, (train, _) = network(), numbers((6,))
    x, y = train.open()[0].float(), train.labels
    given = model.parameters() if build in (by_dimensions, by_identity) else model.named_parameters()
    made = (build(model) if build is by_identity else build)([*given])
    optimizers = made if isinstance(made, list) else [made]
    schedulers = [schedule(optimizer) for optimizer in optimizers]
    for _ in range(EPOCHS):
        for start in range(0, ROWS, BATCH):
            F.cross_entropy(model(x[start : start + BATCH]), y[start : start + BATCH]).backward()
            for one in (*optimizers, *schedulers):
                one.step()
            model.zero_grad()
    ours = network()
    trainer = Trainer(
        ours, None, build(ours) if build is by_identity else build, mem_limit="2GB", method="streamed", partitions=(0, 2, 4),
        batch_size=BATCH, epochs=EPOCHS,
        micro_batch_size=BATCH, shuffle=False, quiet=True, output_dir=tmp_path, lr_schedule=schedule,
    )  # fmt: skip
    found = load_file(trainer.fit(*numbers((6,))).weights)
    for key, tensor in model.state_dict().items():
        assert torch.equal(found[key], tensor), key


def test_the_page_about_optimizers_runs_as_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    snippet, recipe, *others = re.findall(
        r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs/optimizers.md").read_text(), re.DOTALL
    )
    exec(snippet + recipe, names := {})
    assert len(names["muon_and_adamw"](list(names["model"].named_parameters()))) == 2
    accuracy, average = map(float, capsys.readouterr().out.splitlines()[-1].split())
    assert 0.5 < accuracy <= 1 and 0.5 < average <= 1
    for other in others:
        exec(other, {})


def test_the_rate_that_is_told_is_that_of_the_first_group_wherever_its_parameters_are(tmp_path):
    """It was that of the last partition's first group, whose rate stays where that group has no parameters there."""
    rates = []

    class Callback:
        def on_step(self, event):
            rates.append(event.learning_rate)

    def optimizer(named_parameters):
        first = [parameter for name, parameter in named_parameters if name.startswith("2.")]
        others = [parameter for name, parameter in named_parameters if not name.startswith("2.")]
        return torch.optim.SGD([{"params": first, "lr": 0.1}, {"params": others, "lr": 0.01}])

    Trainer(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), None, optimizer, mem_limit="2GB", method="streamed",
        partitions=2, epochs=3, batch_size=8, lr_schedule=lambda one: lr_scheduler.LambdaLR(one, lambda done: 1 / (1 + done)),
        output_dir=tmp_path, quiet=True,
    ).fit((torch.randn(8, 6), torch.arange(8) % 4), callbacks=[Callback()])  # fmt: skip
    assert rates == pytest.approx([0.1, 0.05, 0.1 / 3])
