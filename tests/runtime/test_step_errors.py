"""Errors in the middle of an update, and of a batch: what is left of a session and of a run, and that it is said."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from seqpart import Trainer
from seqpart.errors import DataError, Diverged, ModelError
from seqpart.plan.prediction import predict
from seqpart.plan.problem import parts_of
from seqpart.plan.simulator import Resources
from tests.forced import plans

pytestmark = pytest.mark.usefixtures("known_machine")
STARTS, BATCH = (0, 2, 4), 8
RESOURCES = {
    "weights stay": Resources(slots=1, weights_stay=frozenset({0, 1, 2})),
    "one stays": Resources(slots=1, stays=frozenset({1})),
    "all in turn": Resources(slots=1),
}


class Fails(torch.autograd.Function):
    """In a backward pass, when it is told to: partitions above have made their step by then."""

    now = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Fails.now:
            raise ZeroDivisionError("of the model's own")
        return gradient


class Fragile(nn.Linear):
    def forward(self, x):
        return super().forward(Fails.apply(x))


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 16), Fragile(16, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))


def batch(rows=BATCH, seed=0):
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 12, generator=chance), torch.randint(0, 5, (rows,), generator=chance)


def trainer(**options):
    return Trainer(
        model(),
        mem_limit="2GB",
        method="auto",
        partitions=STARTS,
        batch_size=BATCH,
        lr=1e-2,
        shuffle=False,
        quiet=True,
        **options,
    )


@pytest.fixture(params=RESOURCES)
def resources(request, monkeypatch):
    def chosen(problem, method, micro_batch):
        if method.stays:
            return SimpleNamespace(peak=1 << 60)  # does not fit
        return predict(problem, method, micro_batch, parts_of(problem, micro_batch, STARTS), RESOURCES[request.param])

    plans(monkeypatch, chosen)
    monkeypatch.setattr(Fails, "now", False)
    return request.param


def same(one, other):
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.few(1)
def test_an_error_between_the_steps_of_partitions_takes_nothing_away_in_silence(resources):
    """Where weights stay a session went back to where it began, with `updates` as before and no word."""
    behind = []
    with trainer().session(batch()) as session:
        behind.append(session.state_dict())  # all is at home
        for update in range(4):
            session.step(batch(seed=update))
        Fails.now = True
        with pytest.raises(ZeroDivisionError if resources == "all in turn" else ModelError) as caught:
            session.step(batch(seed=4))
        Fails.now = False
        left, now = session.updates, session.state_dict()
        for update in range(left, 5):
            session.step(batch(seed=update))
        end = session.state_dict()
    with trainer().session(batch()) as session:
        for update in range(5):
            session.step(batch(seed=update))
            behind.append(session.state_dict())
    if resources == "all in turn":
        assert left == 4
    else:
        assert left == 0 and "in the middle of update 5" in str(caught.value) and "went back to update 0" in str(caught.value)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert same(now, behind[left]) and same(end, behind[5])


class Arms:
    def on_step(self, event):
        Fails.now = event.update >= 5


def test_a_run_says_where_it_was_saved(resources, tmp_path):
    """It was "saved as it stood there", and the checkpoint was of the beginning."""
    with pytest.raises(ZeroDivisionError) as caught:
        trainer(output_dir=tmp_path / "run", epochs=1).fit(batch(64), callbacks=[Arms()])
    there = "as it stood there" if resources == "all in turn" else r"as it stood after update 0 of [train 0-2.1], when all"
    assert f"The run is saved {there}" in " ".join(caught.value.__notes__)


def nothing(session):
    pass


@pytest.mark.parametrize(
    "before", [nothing, lambda s: s.evaluate(batch()), lambda s: s.state_dict()], ids=["step", "test", "dict"]
)
@pytest.mark.parametrize("rows", [BATCH, 5])
@pytest.mark.few(3)
def test_a_batch_with_a_nan_leaves_a_session_that_goes_on_and_keeps_what_was_trained(before, rows):
    """With other rows than the batch before it, or behind an evaluation, it left a pass that had no batch: the end of the block
    was a false lack of memory, and all weights were lost."""
    x, y = batch(rows)
    x[0, 0] = torch.nan
    module = model()
    with Trainer(module, mem_limit="2GB", method="full", batch_size=BATCH, lr=1e-2, quiet=True).session(batch()) as session:
        session.step(batch(seed=1))
        before(session)
        with pytest.raises(DataError, match="NaN"):
            session.step((x, y))
        trained = session.state_dict()
        assert session.updates == 1
        with pytest.raises(DataError, match="NaN"):
            session.step((x, y))
    assert same(module.state_dict(), trained) and not same(model().state_dict(), trained)


@pytest.mark.parametrize("options", [{"method": "full"}, {"method": "streamed", "partitions": 2}], ids=["full", "streamed"])
def test_a_loss_that_is_not_finite_leaves_the_session_as_it_was(options):
    """It ended the session, and all that had been trained was lost."""

    def loss(output, y):
        return nn.functional.cross_entropy(output, y) + torch.where(output.detach().abs().max() > 1e3, torch.nan, 0.0)

    def adam(parameters):
        return torch.optim.AdamW(parameters, lr=1e-2, fused=True)

    module, plain = model(), model()
    trainer = Trainer(module, loss, adam, mem_limit="2GB", batch_size=BATCH, micro_batch_size=BATCH, quiet=True, **options)
    with trainer.session(batch()) as session:
        session.step(batch(seed=1))
        x, y = batch()
        with pytest.raises(Diverged, match="The session is as it was before"):
            session.step((x * 1e6, y))
        assert session.updates == 1
        session.step(batch(seed=2))
    optimizer = adam(plain.parameters())
    for seed in (1, 2):
        optimizer.zero_grad()
        x, y = batch(seed=seed)
        loss(plain(x), y).backward()
        optimizer.step()
    assert same(module.state_dict(), plain.state_dict())
