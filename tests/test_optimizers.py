"""State that has a home: with adopted zeros an optimizer does exactly what torch's own does, or it is refused."""

import pytest
import torch
from torch import nn

from seqpart.errors import OptionError
from seqpart.files.direct import aligned
from seqpart.model.optimizers import choose, describe
from seqpart.offload.layout import spec_of

CHOICES = {
    "adam": (torch.optim.Adam, {}),
    "adam, decay": (torch.optim.Adam, {"weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.01}),
    "sgd": (torch.optim.SGD, {}),
    "sgd, decay": (torch.optim.SGD, {"weight_decay": 0.1}),
    "sgd, momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "adafactor": (torch.optim.Adafactor, {}),
    "adafactor, decay": (torch.optim.Adafactor, {"weight_decay": 0.1}),
}


class Odd(torch.optim.SGD):
    """Keeps the first number of each parameter's gradient, of whatever shape that is."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["corner"] = parameter.grad.flatten()[:1]


class Halves(torch.optim.SGD):
    """Keeps the first row of matrices, and of nothing with more dimensions."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.ndim == 2:
                self.state[parameter]["half"] = parameter.grad[:1].clone()


OTHERS = {
    "sgd, nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1, weight_decay=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
}
REFUSED = {
    "Odd": (lambda parameters, lr: Odd(parameters, lr=lr), "its state 'corner' has no fixed layout"),
    "Halves": (lambda parameters, lr: Halves(parameters, lr=lr), "its state 'half' has no fixed layout"),
    "NAdam": (torch.optim.NAdam, "does not start at zero"),
    "Rprop": (torch.optim.Rprop, "does not start at zero"),
    "ASGD": (torch.optim.ASGD, "does not start at zero"),
    "LBFGS": (torch.optim.LBFGS, "calls the whole model again inside its step"),
}


def parameters():
    torch.manual_seed(1)
    return {
        "weight": nn.Parameter(torch.randn(6, 5)),
        "bias": nn.Parameter(torch.randn(6)),
        "gain": nn.Parameter(torch.ones(())),
        "kernel": nn.Parameter(torch.randn(4, 3, 2, 2)),
    }


def adopted(choice, named):
    """An optimizer whose state is views of one flat buffer of zeros."""
    layout = choice.state_layout({name: spec_of(name, parameter) for name, parameter in named.items()})
    flat = aligned(layout.nbytes).zero_()
    optimizer = choice.build(list(named.values()))
    choice.adopt(optimizer, named.items(), layout.views(flat))
    return optimizer, layout, flat


def same_after_steps(ours, mine, plain, theirs, steps=5):
    """Equal gradients, some of them zero, for both; equal parameters to the bit after each step."""
    for step in range(steps):
        for name, parameter in mine.items():
            gradient = torch.randn(parameter.shape) * (step != 2)
            parameter.grad, theirs[name].grad = gradient.clone(), gradient.clone()
        ours.step()
        plain.step()
        for name in mine:
            assert torch.equal(mine[name], theirs[name]), f"{name} differs after step {step}"


@pytest.mark.parametrize(("kind", "options"), CHOICES.values(), ids=CHOICES)
def test_adopted_state_gives_the_parameters_of_a_plain_optimizer_to_the_bit(kind, options):
    choice = choose(kind.__name__.lower(), lr=0.03, **options)
    mine, theirs = parameters(), parameters()
    ours, _, _ = adopted(choice, mine)
    fused = {} if kind is torch.optim.Adafactor else {"fused": True}
    plain = kind(theirs.values(), lr=0.03, **({"weight_decay": 0.0} | fused | options))
    same_after_steps(ours, mine, plain, theirs)


@pytest.mark.parametrize("build", OTHERS.values(), ids=OTHERS)
def test_any_optimizer_that_starts_at_zero_is_taken_and_stays_exact(build):
    mine, theirs = parameters(), parameters()
    ours, _, _ = adopted(describe("theirs", build), mine)
    same_after_steps(ours, mine, build(list(theirs.values())), theirs)


@pytest.mark.parametrize(("kind", "options"), CHOICES.values(), ids=CHOICES)
def test_the_state_lives_in_the_buffer_and_can_be_carried_to_another_optimizer(kind, options):
    """Build a new optimizer before each step, as when a partition comes and goes, with a copy of the same bytes."""
    choice = choose(kind.__name__.lower(), lr=0.03, **options)
    mine, theirs = parameters(), parameters()
    kept, _, _ = adopted(choice, theirs)
    layout = choice.state_layout({name: spec_of(name, parameter) for name, parameter in mine.items()})
    home = bytes(layout.nbytes)
    for _ in range(4):
        flat = aligned(layout.nbytes)
        flat[: layout.nbytes] = torch.frombuffer(bytearray(home), dtype=torch.uint8) if home else flat[:0]
        optimizer = choice.build(list(mine.values()))
        choice.adopt(optimizer, mine.items(), layout.views(flat))
        same_after_steps(optimizer, mine, kept, theirs, steps=1)
        home = flat[: layout.nbytes].numpy().tobytes()


def test_the_state_of_each_optimizer_is_known_before_there_is_a_parameter():
    def names(choice):
        return [(tensor.name, tensor.like_parameter) for tensor in choice.state]

    assert names(choose("sgd", lr=0.1)) == []
    assert names(choose("sgd", lr=0.1, momentum=0.9)) == [("momentum_buffer", True)]
    for name in ("adam", "adamw"):
        assert names(choose(name, lr=0.1)) == [("step", False), ("exp_avg", True), ("exp_avg_sq", True)]
        assert choose(name, lr=0.1).fused


@pytest.mark.parametrize(
    ("build", "in_place"),
    [
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), True),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), True),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True), False),
        (lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=False), False),
        (lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True), True),
    ],
)
def test_a_step_in_place_is_given_no_memory_for_temporaries(build, in_place):
    """Any function was: the peak of SGD was predicted 14 % too high."""
    assert describe("own", build).fused is in_place


def test_state_has_its_parameter_s_name_shape_and_type():
    specs = {"w": spec_of("w", torch.zeros(4, 3, dtype=torch.bfloat16))}
    layout = choose("adam", lr=0.1).state_layout(specs)
    assert {(spec.name, spec.shape, spec.dtype) for spec in layout.specs} == {
        ("w.step", (), torch.float32),
        ("w.exp_avg", (4, 3), torch.bfloat16),
        ("w.exp_avg_sq", (4, 3), torch.bfloat16),
    }


def test_adafactor_keeps_a_row_and_a_column_of_matrices_and_all_of_vectors():
    named = parameters()
    layout = choose("adafactor", lr=0.1).state_layout({name: spec_of(name, tensor) for name, tensor in named.items()})
    assert {spec.name: spec.shape for spec in layout.specs} == {
        "weight.step": (), "weight.row_var": (6, 1), "weight.col_var": (1, 5),
        "bias.step": (), "bias.variance": (6,),
        "gain.step": (), "gain.variance": (),
        "kernel.step": (), "kernel.row_var": (4, 3, 2, 1), "kernel.col_var": (4, 3, 1, 2),
    }  # fmt: skip
    plain = torch.optim.Adafactor(named.values())
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    plain.step()
    kept = {f"{name}.{key}": value.shape for name, tensor in named.items() for key, value in plain.state[tensor].items()}
    assert kept == {spec.name: spec.shape for spec in layout.specs}


@pytest.mark.parametrize(("kind", "reason"), REFUSED.values(), ids=REFUSED)
def test_an_optimizer_that_cannot_have_a_home_is_refused_in_words(kind, reason):
    with pytest.raises(OptionError, match=reason):
        describe(kind.__name__, lambda parameters: kind(parameters, lr=0.01))


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(OptionError, match=r"expected a function that returns a torch\.optim\.Optimizer; found list"):
        describe("mine", lambda parameters: parameters)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(OptionError, match="expected one of adam, adamw, sgd, adafactor; found 'lion'"):
        choose("lion", lr=0.1)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
@pytest.mark.parametrize("option", ["lr", "weight_decay", "momentum"])
def test_numbers_must_be_finite_and_not_negative(option, value):
    with pytest.raises(OptionError, match=f"{option}: expected a finite number"):
        choose("sgd", **({"lr": 0.1} | {option: value}))


def test_momentum_goes_with_sgd_only():
    with pytest.raises(OptionError, match='momentum goes with optimizer="sgd"'):
        choose("adam", lr=0.1, momentum=0.9)


def test_an_optimizer_whose_first_step_is_special_is_refused():
    """SGD with dampening takes its first gradient undamped; from a momentum of zeros it would take another step."""
    with pytest.raises(OptionError, match="not a step from a state of zeros"):
        describe("sgd", lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5))


class CountsInItsGroup(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = group["lr"] / (1 + group.setdefault("steps", 0))
            group["steps"] += 1
        return super().step(closure)


class Lookahead(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            slow = self.state[parameter].setdefault("slow", torch.zeros_like(parameter) + parameter.detach())
            self.state[parameter]["step"] = self.state[parameter].get("step", torch.zeros(())) + 1
            if int(self.state[parameter]["step"]) % 3 == 0:
                slow += 0.5 * (parameter.detach() - slow)
                parameter.data.copy_(slow)


@pytest.mark.parametrize("kind", [CountsInItsGroup, Lookahead])
def test_an_optimizer_that_knows_more_than_its_state_of_zeros_is_refused(kind):
    """One trial step looked all right; weights were others from the second or third update on, in all methods alike."""
    with pytest.raises(OptionError, match="is not a step from a state of zeros"):
        describe(kind.__name__, lambda parameters: kind(parameters, lr=0.1))


@pytest.mark.parametrize("build", [lambda p: torch.optim.SGD(p, lr=-1.0), lambda p: torch.optim.SparseAdam(p)])
def test_what_an_optimizer_itself_refuses_is_an_option_error(build):
    """ValueError and RuntimeError came through as tracebacks."""
    with pytest.raises(OptionError, match="a trial step failed"):
        describe("theirs", build)
