"""`seqpart verify` of a plan that was saved, and of other plans that are drawn: the bits of full training in every answer."""

from dataclasses import replace
from random import Random

import pytest
import torch
from torch import nn

from seqpart import Trainer
from seqpart.errors import OptionError, VerifyMismatch
from seqpart.train import run_command
from seqpart.verify.answers import Answers, Space
from tests.verify.test_verify import command
from tests.verifying import MODELS, check, normal, numbers


@pytest.fixture(autouse=True)
def surroundings(known_machine, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


SPACE = Space(starts=(0, 1, 3, 4, 7), tiers=("device", "disk"), graph_tiers=("disk",), heap=True, streams=True)


def drawn(space, count, seed=0):
    random, found = Random(seed), []
    while len(found) < count:
        found.append(space.draw(random, found))
    return found


# --- what is drawn ----------------------------------------------------------------------------------------------------


def test_a_few_draws_answer_everything_in_every_way():
    found = drawn(SPACE, 8)
    assert len(set(found)) == 8
    assert {tier for answers in found for tier in answers.tiers} == {"device", "disk"}, "some in one place, some in two"
    assert any(not answers.tiers for answers in found)
    assert {answers.keeps_heap for answers in found} == {True, False}
    assert {1, 2} <= {answers.slots for answers in found}
    assert len({answers.starts for answers in found}) > 3
    assert any(answers.stays for answers in found) and any(answers.offloads for answers in found)
    assert any(answers.weights_stay for answers in found)
    assert any(answers.keeps - answers.offloads for answers in found)


def test_the_same_seed_draws_the_same_plans_and_another_others():
    assert drawn(SPACE, 5) == drawn(SPACE, 5) != drawn(SPACE, 5, seed=1)


def test_what_is_drawn_can_be_carried_out():
    for answers in drawn(SPACE, 20):
        count = len(answers.starts)
        assert answers.starts[0] == 0 and set(answers.starts) <= set(SPACE.starts) and count > 1
        assert min(1, count - len(answers.stays)) <= answers.slots <= count - len(answers.stays)
        assert count - 1 not in answers.keeps and answers.offloads <= answers.keeps
        assert len(answers.tiers) in (0, count) and set(answers.tiers) != {"device"}
        assert not (answers.tiers and answers.keeps_heap)
    for answers in drawn(replace(SPACE, streams=False, heap=False), 8):
        assert answers.slots == len(answers.stays) == len(answers.starts) and not answers.keeps_heap


def test_nothing_is_drawn_twice_or_where_nothing_can_be_cut():
    small = replace(SPACE, starts=(0, 1), tiers=("disk",), heap=False, streams=False)
    *every, nothing = drawn(small, 4)  # the inner graph is computed again, kept or offloaded
    assert len(set(every)) == 3 and nothing is None
    assert replace(SPACE, starts=(0,)).draw(Random(0), []) is None


# --- plans that are drawn ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_answer_of_a_plan_gives_the_bits_of_full_training():
    found = check(*MODELS["batch norm and dropout"], batch_size=16, partitions=3, steps=2, sweep=9, clip_grad_norm=1.0)
    assert len(found.plans) == 9
    assert len({Answers.of(plan) for plan in (found.plan, *found.plans)}) == 10
    assert any(plan.stays for plan in found.plans) and any(plan.keeps - plan.offloads for plan in found.plans)
    assert any(plan.offloads for plan in found.plans)
    assert any(plan.slots == 2 for plan in found.plans) and any("disk" in plan.tiers for plan in found.plans)
    assert {plan.partitions[0].micro_batch for plan in found.plans} == {4}
    assert "the same bits by 9 other plan(s)" in str(found)


@pytest.mark.slow
def test_plans_of_checkpointed_training_are_drawn_too():
    found = check(*MODELS["gpt"], method="checkpointed", partitions=3, steps=2, sweep=4)
    assert {plan.method for plan in found.plans} == {"checkpointed"} and len(found.plans) == 4


def test_plans_that_a_model_refuses_are_drawn_again():
    model = normal()
    model[3] = nn.Linear(8, 8)
    model[3].weight = model[0].weight  # who borrows a weight reads it from its home: its owner cannot stay
    found = check(lambda: model, numbers(8), partitions=2, steps=1, sweep=3)
    assert len(found.plans) == 3


class Remembers(nn.Linear):
    """Does something else with large rows that it has seen while its partition was on the device. No plan tries such rows."""

    def __init__(self):
        super().__init__(8, 8)
        self.seen = set()

    def forward(self, x):
        y = super().forward(x)
        if type(x) is not torch.Tensor or not self.training or x.abs().max() < 20:
            return y
        rows = x.detach().numpy().tobytes()
        again = rows in self.seen
        self.seen.add(rows)
        return y * (2.0 if again else 1.0)


@pytest.mark.slow
def test_a_block_that_knows_what_it_has_seen_on_the_device_is_found_by_another_plan():
    """Where all graphs are kept, and where its partition leaves between forward and backward, nobody notices."""
    blocks = [lambda: nn.Linear(8, 8), Remembers, lambda: nn.Linear(8, 8), lambda: nn.Linear(8, 4)]
    options, rows = {"partitions": 2, "steps": 2, "epochs": 1}, numbers(8)
    rows = (1000 * rows[0], rows[1])
    assert check(lambda: blocks, rows, **options).cuts
    with pytest.raises(
        VerifyMismatch, match=r"as it was planned .* and with another plan \(cut at .*staying: .* differ, first in"
    ):
        check(lambda: blocks, rows, sweep=8, **options)


# --- a plan that was saved --------------------------------------------------------------------------------------------

OPTIONS = {"mem_limit": "2GB", "batch_size": 8, "micro_batch_size": 4, "lr": 1e-2}


def saved(model, **options):
    return Trainer(model(), quiet=True, **{**OPTIONS, "method": "auto", **options}).plan(numbers(8), numbers(8))


def test_a_saved_plan_is_verified_as_it_is():
    model = MODELS["batch norm and dropout"][0]
    plan = saved(model, method="streamed", partitions=4)
    answers = replace(
        Answers.of(plan),
        slots=1,
        stays=frozenset({1}),
        weights_stay=frozenset({2}),
        keeps=frozenset({0}),
        offloads=frozenset({0}),
        graphs_at_host=frozenset(),
        tiers=("device", "disk", "disk", "device"),
        keeps_heap=False,
    )
    found = check(model, numbers(8), micro_batch_size=None, reuse=answers.asked(plan, 4), steps=1)
    assert Answers.of(found.plan) == answers
    assert found.plan.micro_batch == plan.micro_batch


def test_a_plan_that_would_not_be_carried_out_as_it_is_is_refused_in_words():
    plan = saved(MODELS["mlp"][0], method="streamed", partitions=3)
    kept = replace(Answers.of(plan), stays=frozenset(range(3)), slots=2)  # nothing is left that could take a slot
    with pytest.raises(OptionError, match=r"reuse: that plan \(cut at .* would not be carried out as it is"):
        check(MODELS["mlp"][0], numbers(8), reuse=kept.asked(plan, 5))
    with pytest.raises(OptionError, match=r"reuse: that plan is by method streamed\. Leave method=.*checkpointed"):
        check(MODELS["mlp"][0], numbers(8), reuse=plan, method="checkpointed")
    with pytest.raises(OptionError, match="sweep: expected a number of plans from 0 up; found -1"):
        check(MODELS["mlp"][0], numbers(8), sweep=-1)


@pytest.mark.slow
def test_the_command_verifies_a_saved_plan_and_others(monkeypatch, capsys, tmp_path):
    job = ["--width", "16", "--depth", "2", "--mem-limit", "2GB"]
    assert run_command("plan", [*job, "--method", "streamed", "--partitions", "3", "--plan-out", "plan.json"]) == 0
    arguments = [*job, "--plan", "plan.json", "--steps", "1", "--sweep", "2"]
    code, out, err = command(monkeypatch, capsys, *arguments)
    assert (code, err) == (0, "")
    for word in ("limited streamed", "plan 2 streamed", "proof: streamed in 3 partitions", "by 2 other plan(s)"):
        assert word in out
    code, _, err = command(monkeypatch, capsys, *arguments, "--partitions", "2")
    assert code == 2
    assert "--plan brings its own cut and micro-batch" in err
