"""A run goes on with another learning rate, schedule, clipping or number of epochs, and says what is other."""

import pytest
from safetensors.torch import load_file

import seqpart.checkpoint.manifest as manifests
from seqpart import Trainer
from seqpart.errors import Interrupted, OptionError
from seqpart.model.reductions import name_with_settings
from seqpart.schedule.steps import Verb
from tests.checkpoint.test_resume import stopped_after
from tests.choice import only_quick
from tests.exactly import How, numbers
from tests.given import classified
from tests.resuming import Arm, Stopping, ended, interrupt
from tests.runtime.test_exact import dropping, fresh
from tests.runtime.test_failures import data, network
from tests.runtime.test_same_as_plain import plain_modules

import torch  # isort: skip
from dataclasses import replace
from functools import partial

from torch import nn

CUT = {"partitions": (0, 1, 3), "momentum": 0.9, "epochs": 2}
TESTED = {"test_every": 1}


@pytest.fixture(scope="module")
def known():
    return {}


@pytest.fixture
def arms(monkeypatch, tmp_path, known):
    def of(how, **options):
        return Arm(monkeypatch, tmp_path, how, fresh(dropping), numbers((12,)), **{**CUT, **options}, known=known)

    return of


def within(arm, *, phase, update=1, **options):
    """Stop the run behind that update of the phase with that number (0: as soon as it begins)."""
    _, steps = arm.whole(**options)
    here = [n for n, step in enumerate(steps, 1) if step.phase == phase]
    updates = [n for n in here if steps[n - 1].verb is Verb.UPDATE]
    learning = len({steps[n - 1].partition for n in updates}) or 1
    stopped_after(arm, updates[update * learning - 1] if update else here[0] - 1, how=interrupt, **options)


OTHER = {"lr": 3e-3, "clip_grad_norm": 0.5, "weight_decay": 0.1, "lr_schedule": "linear", "warmup_updates": 2}


@pytest.mark.parametrize("how", [How(slots=2), How("sil")], ids=str)
@pytest.mark.few(1)
def test_other_numbers_hold_from_the_next_update_on_and_are_said(how, arms):
    """The three methods agree with one another where one partition learns all, and each with a run that changed at a save."""
    arm = arms(how)
    within(arm, phase=0, update=2)
    reporter = Stopping()
    found = ended(arm.fit(resume=arm.root, reporter=reporter, **OTHER))
    assert found != arm.whole()[0] and found != ended(arm.fit("other", **OTHER))
    (said,) = (text for text in reporter.said if "from here on" in text)
    for words in ("lr was 0.01, is 0.003", "clip_grad_norm was None, is 0.5", "lr_schedule was constant, is linear"):
        assert words in said


def test_what_was_changed_holds_when_the_run_is_killed_and_goes_on_again(arms):
    """The job is the checkpoint's: until the first save a second --resume went on with the rate of before, and said nothing."""
    arm = arms(How("full"), save_every="1000")
    within(arm, phase=0, update=1)
    stopped_after(arm, 8, resume=arm.root, lr=3e-3)  # killed, so nothing is saved at its end
    reporter = Stopping()
    arm.fit(resume=arm.root, reporter=reporter, lr=3e-3)
    assert not [text for text in reporter.said if "lr was" in text]


def test_a_changed_learning_rate_gives_the_bits_of_a_plain_loop_that_changes_it_there(tmp_path):
    def fit(lr, **named):
        options = {"mem_limit": "2GB", "method": "full", "optimizer": "sgd", "momentum": 0.9, "shuffle": False}
        if "resume" not in named:
            options["output_dir"] = tmp_path / "run"
        trainer = Trainer(network(), epochs=2, batch_size=32, micro_batch_size=32, quiet=True, lr=lr, **options)
        return trainer.fit(data(), data(12, 1), **named)

    with pytest.raises(Interrupted):
        fit(1e-2, reporter=Stopping(2 + 2 * 2))  # a LOAD, two updates of two steps, and one step more
    result = fit(1e-3, resume=tmp_path / "run")
    chain = torch.nn.Sequential(*plain_modules(network(), 0))
    optimizer = torch.optim.SGD(chain.parameters(), 1e-2, momentum=0.9, fused=True)
    x, y = data()
    for update in range(6):
        if update == 3:
            optimizer.param_groups[0]["lr"] = 1e-3
        rows = slice(update % 3 * 32, update % 3 * 32 + 32)
        torch.nn.functional.cross_entropy(chain(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, tensor in load_file(result.weights).items():
        assert torch.equal(tensor, chain.state_dict()[name]), name


RECOVERING = {"recovery_epochs": 2, "recover": "all"}
EPOCHS = {
    "more, full": (How("full"), {}, (1, 1), {"epochs": 4}, {"epochs": 4}),
    "more, streamed, tested between": (How(slots=2), TESTED, (0, 2), {"epochs": 3}, {"epochs": 3}),
    "more, as the tests between run": (How(), TESTED | {"epochs": 3}, (2, 0), {"epochs": 5}, {"epochs": 5}),
    "fewer, to those that are done": (How(), TESTED | {"epochs": 4}, (4, 0), {"epochs": 1}, {"epochs": 1}),
    "sil, of the partitions that follow": (How("sil"), {}, (5, 1), {"epochs": 3}, {"epochs": (2, 3, 3)}),
    "sil, as outputs are cached": (How("sil"), {}, (2, 0), {"epochs": (2, 1, 3)}, {"epochs": (2, 1, 3)}),
    "sil, recovery added": (How("sil"), {}, (4, 1), RECOVERING, RECOVERING),
    "sil, recovery left out": (How("sil"), RECOVERING, (5, 1), {"recovery_epochs": 0, "recover": None}, {}),
    "sil, more recovery": (How("sil"), RECOVERING, (11, 1), {"recovery_epochs": 3}, {"recovery_epochs": 3}),
}


LONGER = {
    "more, as the tests between run", "sil, as outputs are cached", "sil, recovery added",
    "sil, recovery left out", "less recovery", "of sil, as it recovers", "after the last",
}  # fmt: skip


@pytest.mark.parametrize("name", only_quick(EPOCHS, EPOCHS.keys() - LONGER))
@pytest.mark.few(2)
def test_a_run_that_goes_on_with_other_epochs_ends_as_one_that_had_them_from_the_start(name, arms):
    how, options, (phase, update), other, as_if = EPOCHS[name]
    arm = arms(how, **options)
    within(arm, phase=phase, update=update)
    found = ended(arm.fit(resume=arm.root, **other))
    arm.options.update({"recover": None} if other.get("recover", 0) is None else {})
    assert found == arm.whole(**{**({"recovery_epochs": 0} if "recover" in other else {}), **as_if})[0]


REFUSED = {
    "fewer than are done": (How(), {"epochs": 3}, (1, 1), {"epochs": 1}, r"epochs=1: 2 epoch\(s\) are done or under way"),
    "after the last": (How(), {}, (2, 0), {"epochs": 5}, r"epochs cannot be changed any more: all of them are done \(2\)"),
    "of sil, as it recovers": (How("sil"), RECOVERING, (11, 1), {"epochs": 5}, r"recovery_epochs says how long it recovers"),
    "less recovery": (
        How("sil"),
        RECOVERING,
        (12, 1),
        {"recovery_epochs": 1},
        r"recovery_epochs=1: 2 epoch\(s\) are done or",
    ),
    "recovery otherwise": (How("sil"), RECOVERING, (11, 1), {"recover": "left"}, r"recover was all, not left.*may be changed"),
    "another batch": (How(), {}, (0, 1), {"batch_size": 4}, r"batch_size was 8, not 4.*What may be changed: epochs, lr"),
}


@pytest.mark.parametrize("name", only_quick(REFUSED, REFUSED.keys() - LONGER))
@pytest.mark.few(1)
def test_what_cannot_be_changed_is_refused_in_words_and_the_run_goes_on_as_it_was(name, arms):
    how, options, (phase, update), other, words = REFUSED[name]
    arm = arms(how, **options)
    within(arm, phase=phase, update=update)
    with pytest.raises(OptionError, match=words):
        arm.fit(resume=arm.root, **other)
    assert ended(arm.fit(resume=arm.root)) == arm.whole()[0]


def test_a_checkpoint_that_kept_settings_as_they_were_typed_is_gone_on_with(arms):
    """Version 0.2.0 kept texts: `1e-2`, `2 `, `0, 1,3`. What is another number is still another."""
    arm = arms(How())
    within(arm, phase=0)
    file = arm.root / manifests.CHECKPOINT
    manifest = manifests.load(file)
    typed = {"lr": "1e-2", "epochs": "2 ", "partitions": "0, 1,3", "shuffle": "auto", "overwrite": "False", "batch_size": " 8"}
    assert manifest.state["settings"].keys() > typed.keys()
    manifest.state["settings"].update(typed)
    file.write_text(manifest.to_json())
    with pytest.raises(OptionError, match="batch_size was  8, not 4"):
        arm.fit(resume=arm.root, batch_size=4)
    reporter = Stopping()
    assert ended(arm.fit(resume=arm.root, reporter=reporter)) == arm.whole()[0]
    assert not [text for text in reporter.said if "from here on:" in text]


def test_a_run_does_not_go_on_with_another_optimizer_or_loss_function(tmp_path):
    """Functions are no settings, so nobody compared them: moments were misread, or another rate was taken silently."""

    def trainer(rate=0.1, loss=None, of=torch.optim.SGD, momentum=0.9):
        return Trainer(
            [lambda: nn.Linear(12, 12), lambda: nn.Linear(12, 4)], loss,
            lambda parameters: of(parameters, lr=rate, momentum=momentum), mem_limit="2GB", method="streamed",
            partitions=2, epochs=2, batch_size=8, quiet=True,
        )  # fmt: skip

    rows = classified(24, (12,), 4)
    first = trainer()
    first.settings = replace(first.settings, output_dir=tmp_path / "run")
    with pytest.raises(Interrupted):
        first.fit(rows, rows, reporter=Stopping(12))
    for other in ({"of": torch.optim.RMSprop}, {"momentum": 0.5}):
        with pytest.raises(OptionError, match="was trained with optimizer"):
            trainer(**other).fit(rows, rows, resume=tmp_path / "run")
    with pytest.raises(OptionError, match="was trained with loss"):
        trainer(loss=nn.functional.multi_margin_loss).fit(rows, rows, resume=tmp_path / "run")
    reporter = Stopping()
    assert trainer(rate=0.01).fit(rows, rows, resume=tmp_path / "run", reporter=reporter).weights.exists()
    assert any("the optimizer's options were" in text and "0.01" in text for text in reporter.said)


@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, lambda **options: partial(nn.functional.cross_entropy, **options)])
def test_a_run_does_not_go_on_with_another_weight_or_setting_of_its_loss(kind, tmp_path):
    """Only its name was compared."""

    def trainer(**options):
        blocks = [lambda: nn.Linear(12, 12), lambda: nn.Linear(12, 4)]
        trained = {"method": "streamed", "partitions": 2, "epochs": 2, "batch_size": 8, "quiet": True, "micro_batch_size": 8}
        return Trainer(blocks, kind(**options), mem_limit="2GB", **trained)

    rows, weight = classified(24, (12,), 4), torch.tensor([1.0, 2.0, 3.0, 4.0])
    first = trainer(weight=weight)
    first.settings = replace(first.settings, output_dir=tmp_path / "run")
    with pytest.raises(Interrupted):
        first.fit(rows, reporter=Stopping(12))
    for other in ({}, {"weight": weight + 1}, {"weight": weight, "label_smoothing": 0.1}):
        with pytest.raises(OptionError, match=r"was trained with loss .*2\.0, 3\.0"):
            trainer(**other).fit(rows, resume=tmp_path / "run")
    assert trainer(weight=weight).fit(rows, resume=tmp_path / "run").weights.exists()


def test_a_loss_of_one_s_own_may_count_its_calls():
    """Its count was taken for a setting, and the run could not go on."""

    class Counting(nn.Module):
        calls = 0

        def forward(self, output, labels):
            self.calls += 1
            return nn.functional.cross_entropy(output, labels)

    loss = Counting()
    before = name_with_settings(loss)
    loss(torch.ones(2, 3), torch.tensor([0, 1]))
    assert name_with_settings(loss) == before
    some, other = (partial(partial(nn.CrossEntropyLoss(label_smoothing=by)), by) for by in (0.0, 0.1))
    assert name_with_settings(some) == name_with_settings(some) != name_with_settings(other)
