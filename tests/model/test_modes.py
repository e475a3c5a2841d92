"""A part that came in evaluation mode though the model trains stays so, as in a loop that lets it evaluate after train()."""

import pytest

from seqpart import Trainer
from seqpart.errors import ModelError
from seqpart.verify.verification import verify

import torch  # isort: skip
from torch import nn

WIDTH = 12


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 8), nn.BatchNorm1d(8)
        self.drop = nn.Sequential(nn.Dropout(0.4), nn.Linear(8, 8))
        self.last = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, x):
        return self.last(torch.relu(self.drop(torch.relu(self.norm(self.first(x))))))


def stacked():
    return nn.Sequential(*Normed().children())


def listed():
    return nn.ModuleList(Normed().children())


class Pretrained(Normed):
    """As a library leaves it."""

    @classmethod
    def from_pretrained(cls):
        return cls().eval()


class Wrapped(nn.Module):
    """As peft, or a class of a script, has such a model."""

    def __init__(self):
        super().__init__()
        self.base = Pretrained.from_pretrained()

    def forward(self, x):
        return self.base(x)


def normed_of(model):
    parts = model if isinstance(model, nn.Sequential | nn.ModuleList) else list(model.children())
    return parts[1], parts[2]


def fitted(folder, model, method="streamed", **options):
    x, y = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(2)), torch.arange(32) % 3
    options = {"mem_limit": "2GB", "epochs": 2, "batch_size": 8, "shuffle": False, "lr": 0.1, **options}
    given = list(model) if isinstance(model, nn.ModuleList) else model
    trainer = Trainer(given, None, "sgd", method=method, output_dir=folder / "run", quiet=True, overwrite=True, **options)
    return trainer, (x, y)


def plain(model, rows, evaluating):
    model = nn.Sequential(*model) if isinstance(model, nn.ModuleList) else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    for part in evaluating:
        part.eval()
    for _ in range(2):
        for start in range(0, 32, 8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(rows[0][start : start + 8]), rows[1][start : start + 8]).backward()
            optimizer.step()
    return model.state_dict()


CASES = [(Normed, "streamed"), (stacked, "full"), (stacked, "streamed"), (listed, "streamed"), (Normed, "checkpointed")]


@pytest.mark.parametrize(("make", "method"), CASES)
@pytest.mark.few(1)
def test_a_part_that_came_in_evaluation_trains_to_the_bits_of_a_plain_loop_that_lets_it_evaluate(make, method, tmp_path):
    """It trained with the batch's statistics, and its own moved, in silence: a frozen BatchNorm for small batches."""
    torch.manual_seed(1)
    model, other = make(), make()
    other.load_state_dict(model.state_dict())
    for part in normed_of(model):
        part.eval()
    modes = [part.training for part in model.modules()]
    trainer, rows = fitted(tmp_path, model, method)
    assert "in evaluation while the rest trains, as they came: " in str(trainer.plan(rows))
    found = trainer.fit(rows, rows)
    expected = plain(other, rows, normed_of(other))
    assert [name for name, value in expected.items() if not torch.equal(value, model.state_dict()[name])] == []
    assert int(normed_of(model)[0].num_batches_tracked) == 0 and [part.training for part in model.modules()] == modes
    assert not any("train" in vars(part) for part in model.modules())
    whole = nn.Sequential(*model) if make is listed else model
    assert found.test_loss == pytest.approx(nn.functional.cross_entropy(whole.eval()(rows[0]), rows[1]).item(), rel=1e-5)


def renewed():
    """A pretrained model with a new head."""
    model = Pretrained.from_pretrained()
    [*model.children()][-1].train()
    return model


@pytest.mark.parametrize("make", [lambda: Normed().eval(), Pretrained.from_pretrained, Wrapped, renewed])
@pytest.mark.few(1)
def test_a_model_that_came_in_evaluation_as_a_whole_trains(make, tmp_path):
    """So does one that a library left so inside another: it says nothing of what is to evaluate."""
    model = make()
    trainer, rows = fitted(tmp_path, model)
    trainer.fit(rows)
    counted = [int(part.num_batches_tracked) for part in model.modules() if isinstance(part, nn.BatchNorm1d)]
    assert counted == [8, 8]


class Probed(Normed):
    """A pretrained model inside another."""

    def __init__(self):
        super().__init__()
        self.drop = Pretrained()
        self.last = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
        self.first, self.norm = nn.Identity(), nn.Identity()


@pytest.mark.parametrize(("make", "method"), [(Normed, "streamed"), (stacked, "full"), (Probed, "checkpointed")])
@pytest.mark.few(2)
def test_a_part_that_came_in_training_inside_a_model_in_evaluation_alone_does_not_evaluate(make, method, tmp_path):
    """Linear probing: model.eval(), model.head.train(). All of it was in training, and statistics of the frozen part moved."""
    torch.manual_seed(1)
    model, other = make().eval(), make()
    other.load_state_dict(model.state_dict())
    *evaluating, head = model.children()
    head.train()
    for part in evaluating:
        part.requires_grad_(False)
    modes = [part.training for part in model.modules()]
    trainer, rows = fitted(tmp_path, model, method)
    assert "in evaluation while the rest trains, as they came: " in str(trainer.plan(rows))
    trainer.fit(rows)
    for part in [*other.children()][:-1]:
        part.requires_grad_(False)
    expected = plain(other, rows, [*other.children()][:-1])
    assert [name for name, value in expected.items() if not torch.equal(value, model.state_dict()[name])] == []
    assert [part.training for part in model.modules()] == modes


def test_a_train_of_its_own_is_left_to_a_part(tmp_path):
    """The idiom of many scripts, in either direction."""
    model = stacked()
    model[1].eval()
    model[1].train = lambda mode=True: nn.Module.train(model[1], True)
    trainer, rows = fitted(tmp_path, model)
    trainer.fit(rows)
    assert int(model[1].num_batches_tracked) == 8 and "train" in vars(model[1])


class Merges(nn.Linear):
    """A layer of LoRA that adds its product to its weight in evaluation, as loralib's do."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.a, self.b, self.merged = nn.Parameter(torch.ones(1, inputs)), nn.Parameter(torch.ones(outputs, 1)), False

    def train(self, mode=True):
        if mode is self.merged:
            self.weight.data += (-1.0 if mode else 1.0) * self.b @ self.a
            self.merged = not mode
        return super().train(mode)


class Replaces(Merges):
    def train(self, mode=True):
        self.weight.data = self.weight * 2.0
        return super().train(mode)


class Cools(Merges):
    """Lowers a temperature whenever it is put into training."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.register_buffer("temperature", torch.ones(()))

    def train(self, mode=True):
        if mode:
            self.temperature.mul_(0.9)
        return nn.Module.train(self, mode)


class Caches(Cools):
    """Computes in evaluation what its forward pass takes then."""

    def train(self, mode=True):
        if not mode:
            self.temperature.copy_(self.a.detach().mean())
        return nn.Module.train(self, mode)


def test_a_train_of_its_own_that_keeps_a_buffer_for_evaluation_is_taken(tmp_path):
    trainer, rows = fitted(tmp_path, nn.Sequential(nn.Linear(WIDTH, 8), Caches(8, 3)))
    trainer.fit(rows)


@pytest.mark.parametrize("kind", [Merges, Replaces, Cools])
@pytest.mark.parametrize("built", [True, False], ids=["a model", "factories"])
def test_a_train_of_its_own_that_changes_weights_is_refused(kind, built, tmp_path):
    """Weights were merged when a test began, and went home so, or were dropped: each evaluation had another loss. A
    buffer was changed whenever a partition came."""
    made = [lambda: nn.Linear(WIDTH, 8), lambda: kind(8, 8), lambda: nn.Linear(8, 3)]
    trainer, rows = fitted(tmp_path, nn.Sequential(*(make() for make in made)) if built else made)
    for run in (trainer.fit, trainer.evaluate):
        with pytest.raises(
            ModelError,
            match=r"block 1 .*its train\(\) or eval\(\) changes (parameter weight|buffer temperature).*merge_weights=False",
        ):
            run(rows)


def test_dropout_that_evaluates_agrees_in_every_exact_method_and_is_verified(tmp_path):
    torch.manual_seed(3)
    came, found = stacked(), []
    for method in ("full", "checkpointed", "streamed"):
        model = stacked()
        model.load_state_dict(came.state_dict())
        model[1].eval()
        model[2].eval()
        trainer, rows = fitted(tmp_path, model, method)
        found.append(trainer.fit(rows).state_dict())
    assert all(torch.equal(one[name], found[0][name]) for one in found[1:] for name in one)
    verify(model, rows, steps=2, mem_limit="2GB", batch_size=8)
    assert not model[1].training and "train" not in vars(model[1])


def test_a_mode_that_is_changed_during_a_run_is_refused_and_one_that_is_put_back_is_no_matter():
    """norm.eval() between two steps was lost in silence: the next pass set every mode again."""
    torch.manual_seed(1)
    model, (x, y) = Normed(), (torch.randn(16, WIDTH), torch.arange(16) % 3)
    trainer = Trainer(model, mem_limit="2GB", method="full", batch_size=8, quiet=True)
    with trainer.session((x, y)) as session:
        session.step((x[:8], y[:8]))
        model.eval()
        session.evaluate((x, y))
        model.train()
        session.step((x[8:], y[8:]))
        model.norm.eval()
        with pytest.raises(ModelError, match=r"mode \(train, eval\) of some modules was changed during a run, of BatchNorm1d"):
            session.step((x[:8], y[:8]))

    class Freezing:
        def on_step(self, event):
            model.last[0].eval()

    with pytest.raises(ModelError, match=r"Call eval\(\) before the run on what is to stay in evaluation"):
        trainer.fit((x, y), callbacks=[Freezing()])


@pytest.mark.parametrize("method", ["full", "streamed"])
def test_the_mode_of_the_whole_model_is_refused_before_a_step_where_it_is_not_that_of_the_run(method):
    """train() unfreezes a BatchNorm in a plain loop, and eval() holds for the next update: both were lost in silence."""
    torch.manual_seed(1)
    model, other = Normed(), Normed()
    other.load_state_dict(model.state_dict())
    for part in (*normed_of(model), *normed_of(other)):
        part.eval()
    x, y = torch.randn(16, WIDTH), torch.arange(16) % 3
    trainer = Trainer(model, None, "sgd", lr=0.1, mem_limit="2GB", method=method, batch_size=8, micro_batch_size=8, quiet=True)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with trainer.session((x, y)) as session:
        for change, first in ((model.train, "BatchNorm1d.* evaluation mode"), (model.eval, "Linear.* training mode")):
            change()
            session.evaluate((x, y))  # as it always does
            with pytest.raises(ModelError, match=rf"some modules was changed during a run, of {first}"):
                session.step((x[:8], y[:8]))
            model.train()
            for part in normed_of(model):
                part.eval()
            session.step((x[:8], y[:8]))
            optimizer.zero_grad()
            nn.functional.cross_entropy(other(x[:8]), y[:8]).backward()
            optimizer.step()
        model.eval()
    assert [name for name, value in other.state_dict().items() if not torch.equal(value, model.state_dict()[name])] == []
    assert model.training and not model.norm.training and "train" not in vars(model.norm)

    class Unfreezing:
        def on_step(self, event):
            model.train()

    with pytest.raises(ModelError, match="BatchNorm1d first"):
        trainer.fit((x, y), callbacks=[Unfreezing()])
