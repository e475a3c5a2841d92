"""Sessions whose steps have losses of their own, and train parts of the model of their own."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.functional import mse_loss

from seqpart import Trainer
from seqpart.errors import BadInput, ModelError, OptionError

WAYS = [{"method": "streamed", "partitions": 3}, {"method": "full"}, {"method": "auto"}]


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 6))
        self.d = nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))

    def forward(self, x, z):
        return self.d(x), self.d(self.g(z))


def d_loss(output):
    real, fake = output
    return {"real": bce(real, torch.ones_like(real)), "fake": bce(fake, torch.zeros_like(fake))}


def g_loss(output):
    return bce(output[1], torch.ones_like(output[1]))


def optimizers(named_parameters):
    """One for each network of which there are parameters."""
    parts = [([p for name, p in named_parameters if name.startswith(part)], lr) for part, lr in (("d.", 3e-3), ("g.", 1e-3))]
    return [torch.optim.Adam(own, lr=lr, betas=(0.5, 0.999)) for own, lr in parts if own]


def batches(count=4):
    numbers = torch.Generator().manual_seed(7)
    return [{"x": torch.randn(16, 6, generator=numbers), "z": torch.randn(16, 4, generator=numbers)} for _ in range(count)]


def model():
    torch.manual_seed(3)
    return Both()


def trainer(folder, both=None, losses=None, **options):
    options = {"mem_limit": "2GB", "method": "full", "batch_size": 16, "micro_batch_size": 16, "quiet": True, **options}
    optimizer = options.pop("optimizer", optimizers)
    losses = losses or {"d": d_loss, "g": g_loss}
    return Trainer(both or model(), losses, optimizer, offload_dir=folder / "homes", **options)


LEARNS = {"d": "d.*", "g": ["g.*"]}


def session(folder, both=None, losses=None, learns=LEARNS, **options):
    return trainer(folder, both, losses, **options).session(batches(1)[0], learns=learns)


def plainly(rounds):
    """The losses and the weights of a plain GAN loop whose discriminator learns twice in each round."""
    both, losses = model(), []
    for_d = torch.optim.Adam(both.d.parameters(), lr=3e-3, betas=(0.5, 0.999))
    for_g = torch.optim.Adam(both.g.parameters(), lr=1e-3, betas=(0.5, 0.999))
    for batch in rounds:
        for optimizer in (for_d, for_d, for_g):
            optimizer.zero_grad()
            fake = both.g(batch["z"])
            if optimizer is for_d:
                loss = sum(d_loss((both.d(batch["x"]), both.d(fake.detach()))).values())
            else:
                loss = g_loss((None, both.d(fake)))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, both.state_dict()


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.few(1)
def test_two_networks_that_take_turns_have_the_bits_of_a_plain_gan_loop(options, tmp_path):
    both, losses = model(), []
    asked = trainer(tmp_path, both, **options)
    with asked.session(batches(1)[0], learns=LEARNS) as steps:
        for number, batch in enumerate(batches()):
            losses += [steps.step("d", batch), steps.step("d", batch), steps.step("g", batch)]
            if number == 1:
                copied = copy.deepcopy(steps.state_dict())
                found = steps.evaluate(batch)
    expected_losses, expected = plainly(batches())
    assert losses == expected_losses
    assert [name for name, tensor in both.state_dict().items() if not torch.equal(tensor, expected[name])] == []
    whole = model()
    whole.load_state_dict(copied)
    with torch.no_grad():
        output = whole.eval()(**batches()[1])
    by_name = {"loss/d/real", "loss/d/fake", "loss/g"}
    assert found.metrics.keys() == by_name and found.loss == pytest.approx(sum(found.metrics.values()))
    assert found.metrics["loss/g"] == pytest.approx(g_loss(output).item(), rel=1e-5)
    assert asked.evaluate(batches()[1]).metrics.keys() == by_name


def test_steps_without_learns_train_everything_by_their_own_losses(tmp_path):
    def first(output, labels):
        return mse_loss(output, labels)

    def second(output):
        return output.square().mean()

    torch.manual_seed(1)
    layer, x, y = nn.Linear(4, 4), torch.randn(8, 4), torch.randn(8, 4)
    plain = copy.deepcopy(layer)
    trainer = Trainer(
        [layer], {"first": first, "second": second}, "sgd", mem_limit="2GB", method="full", batch_size=8, lr=0.1, quiet=True,
        offload_dir=tmp_path,
    )  # fmt: skip
    with trainer.session((x, y)) as steps:
        found = [steps.step("first", (x, y)), steps.step("second", (x, y))]
    step = torch.optim.SGD(plain.parameters(), lr=0.1, fused=True)
    for number, loss in enumerate((first(plain(x), y), None)):
        value = second(plain(x)) if loss is None else loss
        step.zero_grad()
        value.backward()
        step.step()
        assert found[number] == value.item()
    assert torch.equal(layer.weight, plain.weight)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.u, self.v = nn.Linear(6, 6), nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x):
        h = self.body(x).relu()
        return self.u(h), self.v(h)


@pytest.mark.parametrize("tile", [None, "100B"], ids=["whole", "tiles"])
@pytest.mark.parametrize("learns", [None, {"u": "*", "v": ["body.weight", "v.*"]}], ids=["all", "patterns"])
@pytest.mark.few(2)
def test_what_a_steps_loss_does_not_take_is_left_alone_as_by_a_plain_loop(learns, tile, tmp_path):
    """It had a gradient of zeros where a plain loop has none: weight decay and moments moved it all the same."""
    losses = {"u": lambda output: output[0].square().mean(), "v": lambda output: output[1].square().mean()}
    torch.manual_seed(5)
    found, rounds = Heads(), [batch["x"] for batch in batches(6)]
    plain = copy.deepcopy(found)
    options = {"method": "streamed", "tile": tile} if tile else {"method": "full"}
    asked = Trainer(
        found, losses, mem_limit="2GB", batch_size=16, micro_batch_size=16, lr=1e-2, weight_decay=0.1, quiet=True,
        offload_dir=tmp_path, **options,
    )  # fmt: skip
    with asked.session(rounds[0], learns=learns) as steps:
        for number, x in enumerate(rounds):
            steps.step("uv"[number % 2], x)
    step = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for number, x in enumerate(rounds):
        plain.body.bias.requires_grad_(learns is None or not number % 2)
        step.zero_grad()
        losses["uv"[number % 2]](plain(x)).backward()
        step.step()
    difference = {name: float((tensor - found.state_dict()[name]).abs().max()) for name, tensor in plain.state_dict().items()}
    assert max(difference.values()) < (1e-6 if tile else 1e-30), difference


def test_a_step_without_its_name_or_with_another_is_refused_and_the_session_goes_on(tmp_path):
    (batch,) = batches(1)
    with session(tmp_path) as steps:
        with pytest.raises(BadInput, match=re.escape("expected the name of a step and a batch; found 1 arguments")):
            steps.step(batch)
        with pytest.raises(OptionError, match="step: expected 'd' or 'g'; found 'e'"):
            steps.step("e", batch)
        assert steps.step("g", batch) > 0


def test_requires_grad_that_was_changed_beside_learns_is_refused(tmp_path):
    both, (batch,) = model(), batches(1)
    with pytest.raises(ModelError, match="Leave one of them out"), session(tmp_path, both) as steps:
        steps.step("d", batch)
        both.d[0].requires_grad_(False)
        steps.step("d", batch)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"learns": {"d": "d.*"}}, "learns: expected what learns in each of the steps d, g; found d."),
        ({"learns": {"d": "d.*, e.*", "g": "g.*"}}, "found 'e.*' for step 'd'"),
        ({"learns": {"d": "d.*", "g": "h.*"}}, "such as d.0.weight; found 'h.*' for step 'g'"),
        ({"losses": {"d": d_loss, "g": "mse"}}, "expected functions by the names of a session's steps"),
        ({"losses": {"d": d_loss, "g": lambda output: (output[1].sum(), 16)}}, "the loss of step 'g'; found a tuple"),
    ],
    ids=["not all steps", "one of two patterns", "no parameter", "a name", "a pair"],
)  # fmt: skip
def test_what_cannot_take_turns_is_refused_in_words(given, words, tmp_path):
    with pytest.raises(BadInput, match=re.escape(words)), session(tmp_path, **given):
        pass


def test_losses_by_step_belong_to_sessions_alone():
    trainer = Trainer(model(), {"d": d_loss}, mem_limit="2GB", method="full", quiet=True)
    with pytest.raises(OptionError, match="found one for each step of a session"):
        trainer.fit(batches(1)[0])
    single = Trainer(model(), d_loss, mem_limit="2GB", method="full", quiet=True, batch_size=16)
    with (
        pytest.raises(OptionError, match="learns: it goes with losses by step"),
        single.session(batches(1)[0], learns={"d": "*"}),
    ):
        pass
