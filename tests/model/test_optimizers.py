"""State that has a home: with adopted zeros an optimizer does exactly what torch's own does, or it is refused."""

import copy
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from seqpart import Trainer
from seqpart.device.pages import aligned
from seqpart.errors import CorruptFile, OptionError
from seqpart.model.optimizer_trials import Temporaries
from seqpart.model.optimizers import Adopted, choose, describe, refuse_unknown
from seqpart.store.layout import TensorSpec, spec_of

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
BEGINS_ELSEWHERE = {
    "nadam": lambda p: torch.optim.NAdam(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "sgd, dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
}


def parameters():
    torch.manual_seed(1)
    return {
        "weight": nn.Parameter(torch.randn(6, 5)),
        "bias": nn.Parameter(torch.randn(6)),
        "gain": nn.Parameter(torch.ones(())),
        "kernel": nn.Parameter(torch.randn(4, 3, 2, 2)),
    }


def found(build, *shapes, dtype=torch.float32):
    """The optimizer, tried on parameters of these shapes."""
    choice = describe("", build)
    choice.try_on({f"p{number}": TensorSpec(name="", shape=shape, dtype=dtype) for number, shape in enumerate(shapes)})
    return choice


def adopted(choice, named):
    """An optimizer whose state is views of one flat buffer of zeros."""
    layout = choice.state_layout({name: spec_of(name, parameter) for name, parameter in named.items()})
    flat = aligned(layout.nbytes).zero_()
    optimizer = Adopted(choice, choice.build(list(named.values())))
    optimizer.take(named.items(), layout.views(flat), begun=False)
    optimizer.restore()
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


CARRIED = {name: choose(kind.__name__.lower(), lr=0.03, **options) for name, (kind, options) in CHOICES.items()} | {
    name: describe("", build) for name, build in {**OTHERS, **BEGINS_ELSEWHERE}.items()
}


@pytest.mark.parametrize("choice", CARRIED.values(), ids=CARRIED)
def test_the_state_lives_in_the_buffer_and_can_be_carried_to_another_optimizer(choice):
    """Build a new optimizer before each step, as when a partition comes and goes, with a copy of the same bytes."""
    mine, theirs = parameters(), parameters()
    kept, _, _ = adopted(choice, theirs)
    layout = choice.state_layout({name: spec_of(name, parameter) for name, parameter in mine.items()})
    home = bytes(layout.nbytes)
    for _ in range(4):
        flat = aligned(layout.nbytes)
        flat[: layout.nbytes] = torch.frombuffer(bytearray(home), dtype=torch.uint8) if home else flat[:0]
        optimizer = Adopted(choice, choice.build(list(mine.values())))
        optimizer.take(mine.items(), layout.views(flat))
        optimizer.restore()
        same_after_steps(optimizer, mine, kept, theirs, steps=1)
        optimizer.write()
        home = flat[: layout.nbytes].numpy().tobytes()


def test_the_state_of_each_optimizer_is_known_before_there_is_a_parameter():
    def names(choice):
        layout = choice.state_layout({"w": TensorSpec(name="w", shape=(5, 4), dtype=torch.float32)})
        return sorted((spec.name.removeprefix("w."), spec.shape == (5, 4)) for spec in layout.specs)

    assert names(choose("sgd", lr=0.1)) == []
    assert names(choose("sgd", lr=0.1, momentum=0.9)) == [("momentum_buffer", True)]
    for name in ("adam", "adamw"):
        assert names(choose(name, lr=0.1)) == [("exp_avg", True), ("exp_avg_sq", True), ("step", False)]
        assert not any(choose(name, lr=0.1).temporaries())


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
    assert any(describe("own", build).temporaries()) is not in_place


@pytest.mark.parametrize(
    ("options", "in_lists", "found"),
    [
        ({"foreach": False}, False, Temporaries(largest=2, second=1)), ({"foreach": True}, False, Temporaries(total=1)),
        ({}, False, Temporaries(largest=2, second=1)), ({}, True, Temporaries(total=1)), ({"fused": True}, True, Temporaries()),
    ],
)  # fmt: skip
def test_a_step_on_lists_of_parameters_is_given_memory_for_all_of_them(options, in_lists, found):
    """The plan had room for the largest alone: a step of foreach, which torch takes on a GPU by itself, needs it for all, and
    one parameter after the other also what is left of the one before."""
    choice = describe("own", lambda parameters: torch.optim.AdamW(parameters, lr=0.1, **options))
    assert choice.temporaries(in_lists=in_lists) == found
    room = choice.step_room(100, 50, 1000, in_lists=in_lists)
    assert room == 100 * found.largest + 50 * found.second + 1000 * found.total


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


def test_an_optimizer_that_calls_the_model_again_is_refused_in_words():
    with pytest.raises(OptionError, match="calls the whole model again inside its step"):
        found(torch.optim.LBFGS, (2, 3), (5,), (4, 2, 3))


class Sharpness(torch.optim.SGD):
    """Calls the model again itself (as SAM does)."""

    def step(self, closure=None):
        super().step()
        closure()


def test_an_optimizer_that_wants_a_closure_is_told_that_there_is_none():
    """It was told that a NoneType is not callable, and to freeze the parameter."""
    with pytest.raises(OptionError, match="It may want a closure: a step is made of one gradient"):
        found(lambda p: Sharpness(p, lr=0.1), (2, 3))


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(OptionError, match=r"expected a function that returns .*, or a list of several; found list"):
        describe("mine", lambda parameters: parameters)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(OptionError, match=r"expected one of adam, adamw, .* lion8bit; found 'adagrad'"):
        choose("adagrad", lr=0.1)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
@pytest.mark.parametrize("option", ["lr", "weight_decay", "momentum"])
def test_numbers_must_be_finite_and_not_negative(option, value):
    with pytest.raises(OptionError, match=f"{option}: expected a finite number"):
        choose("sgd", **({"lr": 0.1} | {option: value}))


def test_momentum_goes_with_sgd_only():
    with pytest.raises(OptionError, match='momentum goes with optimizer="sgd"'):
        choose("adam", lr=0.1, momentum=0.9)


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


@pytest.mark.parametrize("build", [lambda p: torch.optim.SGD(p, lr=-1.0), lambda p: torch.optim.SparseAdam(p)])
def test_what_an_optimizer_itself_refuses_is_an_option_error(build):
    """ValueError and RuntimeError came through as tracebacks."""
    with pytest.raises(OptionError, match=r"optimizer theirs: a trial step .*failed"):
        describe("theirs", build).try_on({"w": TensorSpec(name="w", shape=(2, 3), dtype=torch.float32)})


# --- what hangs on size, dimensions and type --------------------------------------------------------------------------


class Narrow(torch.optim.Optimizer):
    """Momentum, kept in bfloat16 where that saves much."""

    least = 4096

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            dtype = torch.bfloat16 if p.numel() >= self.least else p.dtype
            moment = self.state[p].setdefault("moment", torch.zeros_like(p, dtype=dtype))
            moment.mul_(0.9).add_(p.grad)
            p.sub_(moment.to(p.dtype), alpha=self.param_groups[0]["lr"])


class Hybrid(torch.optim.Optimizer):
    """Momentum for matrices, and two moments of vectors, made where there is no state yet; its groups have no learning rate."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update({name: torch.zeros_like(p) for name in (["momentum"] if p.ndim > 1 else ["mean", "square"])})
            if p.ndim > 1:
                p.sub_(state["momentum"].mul_(0.9).add_(p.grad), alpha=0.01)
            else:
                square = state["square"].lerp_(p.grad**2, 0.01)
                p.sub_(0.01 * state["mean"].lerp_(p.grad, 0.1) / (square.sqrt() + 1e-3))


class Averages(torch.optim.Optimizer):
    """Draws weights to their own mean, which it finds by a count of steps in its group (FOCUS of pytorch_optimizer does)."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01, "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                state = self.state[p]
                for name in ("momentum", "mean"):
                    state.setdefault(name, torch.zeros_like(p))
                mean = state["mean"].lerp_(p, 0.001) / (1 - 0.999 ** group["steps"])
                p.sub_((p - mean).sign() * 0.1 + state["momentum"].lerp_(p.grad, 0.1).sign(), alpha=group["lr"])


class FindsItsRate(torch.optim.SGD):
    """Takes larger steps once gradients agree with those before, over all parameters (as D-Adaptation does)."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        for p in parameters:
            self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
        agreed = sum(float((self.state[p]["sum"] * p.grad).sum() - 2 * p.grad.square().sum()) for p in parameters)
        for p in parameters:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] * (1 + max(0.0, agreed)))


class EveryHundredth(torch.optim.SGD):
    """Does another thing in each 100th step, which it counts itself."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.made = 0

    def step(self, closure=None):
        self.made += 1
        if self.made % 100 == 0:
            for p in self.param_groups[0]["params"]:
                p.data.mul_(0.5)
        super().step(closure)


class FromItsStart(torch.optim.SGD):
    """Keeps where each parameter began, and one zero of those that began as zeros (as Prodigy does)."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if "start" not in state:
                state["start"] = p.clone() if p.any() else torch.tensor(0.0)
            p.lerp_(state["start"].expand_as(p), 0.1).sub_(p.grad, alpha=self.param_groups[0]["lr"])


class InGroups(torch.optim.SGD):
    """Counts its steps, and makes nothing of it."""

    def step(self, closure=None):
        self.param_groups[0]["step"] = self.param_groups[0].get("step", 0) + 1
        super().step(closure)


class Layer(torch.Tensor):
    pass


class OfItsOwnKind(torch.optim.SGD):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("codes", torch.zeros_like(p).as_subclass(Layer))


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["step"] = self.state[p].get("step", 0) + 1


def kept(choice, shape):
    layout = choice.state_layout({"w": TensorSpec(name="w", shape=shape, dtype=torch.float32)})
    return {spec.name.removeprefix("w."): (spec.shape, spec.dtype) for spec in layout.specs}


def test_state_is_that_of_the_parameter_s_own_size_and_dimensions():
    """Found on a matrix of 2 x 3 it was taken for all: 8-bit moments were float32 ones, and those of vectors had no home."""
    by_size, by_dimensions = describe("", Narrow), describe("", Hybrid)
    assert kept(by_size, (63, 65)) == {"moment": ((63, 65), torch.float32)}
    assert kept(by_size, (64, 64)) == {"moment": ((64, 64), torch.bfloat16)}
    assert kept(by_size, (100_000, 4096)) == {"moment": ((100_000, 4096), torch.bfloat16)}
    assert kept(by_dimensions, (8, 6)) == {"momentum": ((8, 6), torch.float32)}
    assert kept(by_dimensions, (8,)) == {"mean": ((8,), torch.float32), "square": ((8,), torch.float32)}


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_no_parameter_is_too_large_to_be_looked_at(name):
    """torch runs a kernel that it knows no shapes of, as that of fused SGD, with real tensors."""
    choice = choose(name, lr=0.1, momentum=0.9 if name == "sgd" else 0.0)
    assert kept(choice, (1 << 22, 1 << 20))


def test_a_type_of_parameters_has_state_of_its_own():
    choice = found(lambda parameters: torch.optim.AdamW(parameters), (4, 3), dtype=torch.float64)
    layout = choice.state_layout({"w": TensorSpec(name="w", shape=(4, 3), dtype=torch.float64)})
    assert {spec.name: spec.dtype for spec in layout.specs} == {
        "w.step": torch.float32, "w.exp_avg": torch.float64, "w.exp_avg_sq": torch.float64,
    }  # fmt: skip


def test_state_that_lies_as_its_parameter_does_has_its_strides():
    kernel = nn.Parameter(torch.randn(64, 32, 3, 3).to(memory_format=torch.channels_last))
    layout = describe("", torch.optim.AdamW).state_layout({"w": spec_of("w", kernel)})
    assert {spec.name: spec.stride for spec in layout.specs if spec.shape} == dict.fromkeys(
        ("w.exp_avg", "w.exp_avg_sq"), kernel.stride()
    )


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


ROWS = torch.randn(48, 8), torch.arange(48) % 4


def in_a_plain_loop(build, epochs=3, *, named=False):
    model = network()
    built = build(list(model.named_parameters() if named else model.parameters()))
    for _ in range(epochs):
        for x, y in zip(*(part.split(16) for part in ROWS), strict=True):
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            for optimizer in built if isinstance(built, list) else [built]:
                optimizer.step()
    return model.state_dict()


def trained(build, folder, *, model=None, **options):
    model, rates = model or network(), []
    trainer = Trainer(
        model, None, build, mem_limit="2GB", epochs=3, batch_size=16, shuffle=False, quiet=True, output_dir=folder / "run",
        **{"method": "streamed", "partitions": 3, **options},
    )  # fmt: skip
    trainer.fit(ROWS, callbacks=[SimpleNamespace(on_step=lambda event: rates.append(event.learning_rate))])
    return model.state_dict(), rates


@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize(
    ("build", "rate"),
    [(Narrow, 0.01), (Hybrid, None), (lambda p: FromItsStart(p, lr=0.1), 0.1)],
    ids=["by size", "by dimensions", "by values"],
)
def test_a_run_has_the_bits_of_a_plain_loop_whatever_its_state_hangs_on(build, rate, tmp_path):
    """Weights were others, in silence; without `lr` in a group the first update ended in a KeyError. What hangs on values was
    refused: Prodigy could not be used at all."""
    weights, rates = trained(build, tmp_path)
    plain = in_a_plain_loop(build)
    assert [name for name, value in plain.items() if not torch.equal(value, weights[name])] == []
    assert rates == [rate] * 9


@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{}, {"method": "sil", "partitions": 2}], ids=["streamed", "sil"])
@pytest.mark.few(1)
def test_torch_s_default_type_is_nothing_to_parameters_that_have_one(dtype, options, tmp_path):
    """AdamW was refused: its state was float32's, and that of the trial steps of the default type."""

    def build(parameters):
        return torch.optim.AdamW(parameters, lr=0.01)

    expected = trained(build, tmp_path / "a", **options)[0] if options else in_a_plain_loop(build)
    model = network()
    torch.set_default_dtype(dtype)
    try:
        weights, _ = trained(build, tmp_path / "b", model=model, **options)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [name for name, value in expected.items() if not torch.equal(value, weights[name])] == []


def test_a_parameter_that_an_optimizer_does_not_take_is_named_before_anything_is_planned():
    """Muon's ValueError came when homes had been written, and said no name."""
    trainer = Trainer(
        network(), None, lambda parameters: torch.optim.Muon(parameters), mem_limit="2GB", method="full", quiet=True
    )
    with pytest.raises(OptionError, match=r"optimizer Muon: a trial step on 0\.bias of shape \(64,\) .*only supports 2D"):
        trainer.plan(ROWS)


class Delayed(torch.optim.SGD):
    """Waits two steps with each gradient, in a queue; keeps its words and numbers beside it, in an object too."""

    class Notes:
        pass

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(queue=deque(maxlen=2), notes=self.Notes(), shape=p.shape, rates={0.5: 1, None: 2.0**0.5})
                state["notes"].count = 0
            state["notes"].count += 1
            state["queue"].append(p.grad.clone())
            p.data.sub_(state["queue"][0], alpha=0.01 * state["notes"].count / state["rates"][None])


class Swaps(torch.optim.SGD):
    """Two moments that change places in each step, from the second on."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            one, other = state.get("one", p.grad.clone()), state.get("other", p.grad * 2)
            state["one"], state["other"] = other, one.mul_(0.9).add_(p.grad)
            p.data.sub_(state["one"], alpha=0.01)


class FindsByViews(torch.optim.SGD):
    """Has lists of its parameters, and views of them by parameter and by place in memory; notes what has begun in a set."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.pairs, self.views, self.places = [(f"p{n}", p) for n, p in enumerate(parameters)], {}, {}

    def step(self, closure=None):
        for number, (_, p) in enumerate(self.pairs):
            self.views[p] = [p.data.view(-1)]
            self.places[p.data_ptr(), p.shape] = p, number
            begun = self.state[p].setdefault("begun", set())
            self.views[p][0].sub_(p.grad.reshape(-1), alpha=0.1 if "first" in begun else 0.01)
            begun.add("first")


class CountsByParameter(torch.optim.SGD):
    """Keeps its counts in a dict of its own, where they are by parameter."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.counts = {}

    def step(self, closure=None):
        super().step(closure)
        self.counts |= {p: self.counts.get(p, 0) + 1 for p in self.param_groups[0]["params"]}


class InSilence(torch.optim.SGD):
    """Keeps in a closure what no one else can see."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        last = {}

        def last_of(p, gradient):
            found = last.get(id(p), gradient)
            last[id(p)] = gradient
            return found

        self.last_of = last_of

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data.sub_(self.last_of(p, p.grad), alpha=0.01)


class Noisy(torch.optim.SGD):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data.sub_(torch.randn(p.shape), alpha=0.01)


OF_ALL_KINDS = {
    "a count in a group": Averages,
    "a count of its own": lambda p: EveryHundredth(p, lr=0.1),
    "a tensor of the gradient": lambda p: Odd(p, lr=0.1),
    "a tensor of some": lambda p: Halves(p, lr=0.1),
    "a whole number": lambda p: Counting(p, lr=0.1),
    "views of parameters": lambda p: FindsByViews(p, lr=0.1),
    "a rate that it changes": lambda p: CountsInItsGroup(p, lr=0.1),
    "a copy of the weights": lambda p: Lookahead(p, lr=0.1),
    "a queue and an object": lambda p: Delayed(p, lr=0.1),
    "tensors that change places": lambda p: Swaps(p, lr=0.1),
    "several": lambda p: [torch.optim.Muon([o for o in p if o.ndim == 2]), torch.optim.NAdam([o for o in p if o.ndim != 2])],
}


@pytest.mark.parametrize("build", OF_ALL_KINDS.values(), ids=OF_ALL_KINDS)
@pytest.mark.few(6)
def test_an_optimizer_that_is_built_anew_knows_all_that_it_knew(build):
    """Whatever was no tensor that began as zeros was refused: 90 of 142 optimizers of torch and pytorch_optimizer."""
    choice = describe("", build)
    mine, theirs = parameters(), parameters()
    plain = choice.build(list(theirs.values()))
    layout = choice.state_layout({name: spec_of(name, parameter) for name, parameter in mine.items()})
    flat = aligned(layout.nbytes).zero_()
    for step in range(103):
        optimizer = Adopted(choice, choice.build(list(mine.values())))
        optimizer.take(mine.items(), layout.views(flat), begun=step > 0)
        optimizer.restore()
        same_after_steps(optimizer, mine, plain, theirs, steps=1)
        optimizer.write()
    assert not choice.found.joint


@pytest.mark.parametrize("fused", [True, False])
def test_what_torch_notes_of_a_fused_step_is_no_count(fused):
    """SGD forgets that it has to look at its parameters once more: a list with it was refused where partitions come and go."""

    def by_dimensions(parameters):
        matrices, rest = [one for one in parameters if one.ndim > 1], [one for one in parameters if one.ndim < 2]
        made = [torch.optim.SGD(matrices, lr=0.01, momentum=0.9, fused=fused)] if matrices else []
        return [*made, torch.optim.AdamW(rest, fused=fused)] if rest else made

    choice = describe("by_dimensions", by_dimensions)
    choice.try_on({name: spec_of(name, torch.zeros(shape)) for name, shape in (("w", (6, 5)), ("v", (6, 6)), ("b", (6,)))})
    assert not choice.found.joint and not choice.found.counts


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda p: OfItsOwnKind(p, lr=0.1), "its state 'codes' is a tensor of a kind of its own, Layer.* of p0 of shape"),
        (lambda p: InSilence(p, lr=0.1), "its step 2 has another result when it is built anew"),
        (lambda p: CountsByParameter(p, lr=0.1), "its state 'counts' is dict"),
        (lambda p: Noisy(p, lr=0.1), "its steps draw random numbers"),
    ],
    ids=["OfItsOwnKind", "InSilence", "CountsByParameter", "Noisy"],
)
def test_an_optimizer_that_knows_what_has_no_home_is_refused_in_words(build, words):
    with pytest.raises(OptionError, match=words):
        found(build, (6, 5), (6,))


@pytest.mark.parametrize(
    ("later", "words"),
    [
        (
            lambda state, p: state.update(late=torch.zeros(3)),
            "'late' is a Tensor of .* there was none in the trial",
        ),
        (
            lambda state, p: state.update(sum=torch.zeros(1)),
            r"'sum' is a Tensor of shape \(1,\) .* it was a Tensor",
        ),
        (lambda state, p: state.update(word="x" * 1000), "beside tensors has grown to .* bytes, beyond 256"),
    ],
    ids=["another", "of another shape", "a long word"],
)
def test_state_that_is_other_than_in_the_trial_is_named(later, words):
    """It had no home: it began anew in the next visit, in silence."""

    class Late(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state.setdefault("sum", torch.zeros_like(p))
                if state["count"] > 20:
                    later(state, p)

    choice, w = describe("", lambda parameters: Late(parameters, lr=0.1)), nn.Parameter(torch.ones(4, 3))
    layout = choice.state_layout({"w": spec_of("w", w)})
    optimizer = Adopted(choice, choice.build([w]))
    optimizer.take([("w", w)], layout.views(aligned(layout.nbytes).zero_()), lambda name: f"0.{name}")
    for _ in range(20):
        optimizer.step()
        optimizer.write()
    with pytest.raises(OptionError, match=f"optimizer Late: its state of 0.w.*{words}"):
        optimizer.step()
        optimizer.write()


def test_a_parameter_that_was_frozen_for_a_while_takes_no_old_count_from_its_text():
    """The count of a group is in the text of each parameter: that of one which did not learn is older."""
    choice = describe("", Averages)
    mine, theirs = parameters(), parameters()
    layout = choice.state_layout({name: spec_of(name, parameter) for name, parameter in mine.items()})
    flat = aligned(layout.nbytes).zero_()
    plain = choice.build(list(theirs.values()))
    for step in range(6):
        learn = {name: p for name, p in mine.items() if name != "kernel" or step not in (2, 3)}
        theirs_learn = {name: theirs[name] for name in learn}
        theirs["kernel"].grad = None
        optimizer = Adopted(choice, choice.build(list(learn.values())))
        optimizer.take(learn.items(), layout.views(flat))
        optimizer.restore()
        plain.param_groups[0]["params"] = [*theirs_learn.values()]
        same_after_steps(optimizer, learn, plain, theirs_learn, steps=1)
        optimizer.write()


def test_a_count_that_changes_nothing_is_kept_as_one_that_does():
    choice = found(lambda parameters: InGroups(parameters, lr=0.1, momentum=0.9), (6, 5), (6,))
    assert choice.found.counts and choice.begins_itself
    assert not found(lambda parameters: torch.optim.AdamW(parameters), (6, 5), (6,)).found.counts


def test_a_state_that_only_large_parameters_have_is_refused_where_they_are_too_large_to_be_tried():
    class Packed(Narrow):
        def step(self, closure=None):
            super().step()
            for p in self.param_groups[0]["params"]:
                if p.numel() > 1 << 20:
                    self.state[p].setdefault("scale", torch.zeros(()))

    assert kept(found(Packed, (64, 64)), (256, 256))
    with pytest.raises(OptionError, match=r"keeps other state for p0 of shape \(2048, 2048\) .* than for a smaller one"):
        found(Packed, (2048, 2048))


def test_state_that_was_saved_without_a_text_goes_on():
    """0.2.0 kept tensors alone, where a count in a group changes nothing: a momentum would have begun anew."""
    w, theirs = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3))
    plain = torch.optim.SGD([theirs], lr=0.1, momentum=0.9)
    theirs.grad = torch.randn(4, 3)
    plain.step()
    choice = describe("", lambda parameters: InGroups(parameters, lr=0.1, momentum=0.9))
    layout = choice.state_layout({"w": spec_of("w", w)})
    views = layout.views(aligned(layout.nbytes).zero_())
    views["w.momentum_buffer"].copy_(plain.state[theirs]["momentum_buffer"])
    w.data.copy_(theirs.data)
    optimizer = Adopted(choice, choice.build([w]))
    optimizer.take([("w", w)], views)
    optimizer.restore()
    same_after_steps(optimizer, {"w": w}, plain, {"w": theirs})


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        '[1,[[["d",["x",["t","nowhere"]]],{},{},{}]]]',
        '[1,[[["o","os.system",["x",1]],{},{},{}]]]',
        '[1,[[["y","ones"],{},{},{}]]]',
    ],
)
def test_a_text_that_no_optimizer_wrote_is_refused_in_words_and_makes_no_object(text):
    w = nn.Parameter(torch.ones(4, 3))
    choice = describe("", lambda parameters: InGroups(parameters, lr=0.1, momentum=0.9))
    views = choice.state_layout({"w": spec_of("w", w)}).views(aligned(1 << 12).zero_())
    optimizer = Adopted(choice, choice.build([w]))
    optimizer.take([("w", w)], views)
    views["w.plain"][: len(text)] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    with pytest.raises(CorruptFile, match="expected the state that it wrote; found another one"):
        optimizer.restore()


# --- weights that are divided -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "whole"),
    [
        (lambda p: torch.optim.Muon(p), True),
        (lambda p: torch.optim.Adafactor(p), True),
        (lambda p: torch.optim.AdamW(p), False),
        (lambda p: torch.optim.AdamW(p, fused=True), False),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), False),
        (lambda p: torch.optim.RMSprop(p, centered=True), False),
        (lambda p: torch.optim.Adadelta(p), False),
        (lambda p: torch.optim.RAdam(p), False),
    ],
    ids=["muon", "adafactor", "adamw", "adamw, fused", "sgd", "rmsprop", "adadelta", "radam"],
)
def test_an_optimizer_that_looks_at_a_weight_as_a_whole_is_known_by_its_steps(build, whole):
    """It was known by the shape of its state, and Muon's is the weight's: each tile was made orthogonal alone."""
    assert describe("", build).whole is whole


@pytest.mark.parametrize("options", [{"tile": "8KB", "method": "streamed"}, {"method": "ist", "subnets": 2}, {"method": "psl"}])
def test_muon_goes_with_nothing_that_divides_weights(options):
    with pytest.raises(OptionError, match=r"optimizer Muon needs each weight as a whole, and .* divides it"):
        Trainer([nn.Linear(2, 2)], None, torch.optim.Muon, mem_limit="2GB", **options)


def test_state_that_hangs_on_the_size_of_a_weight_goes_with_no_tiles():
    class Large(Narrow):
        least = 1 << 15

    model = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    trainer = Trainer(model, None, Large, mem_limit="2GB", method="streamed", tile="64KB", quiet=True)
    with pytest.raises(OptionError, match="keeps other state for a whole weight than for pieces of it, and tile divides it"):
        trainer.plan(ROWS)


# --- several optimizers, and names ------------------------------------------------------------------------------------


def two(parameters):
    return [torch.optim.Muon([p for p in parameters if p.ndim == 2]), torch.optim.AdamW([p for p in parameters if p.ndim != 2])]


def by_name(named_parameters):
    """Muon for matrices but the last, AdamW for the rest, without decay for biases and norms."""
    hidden = [(name, p) for name, p in named_parameters if p.ndim == 2 and not name.startswith("5.")]
    others = [(name, p) for name, p in named_parameters if p.ndim != 2 or name.startswith("5.")]
    decays = [p for name, p in others if name.endswith("weight") and not name.startswith("1.")]
    rest = [p for name, p in others if not (name.endswith("weight") and not name.startswith("1."))]
    return [
        torch.optim.Muon([p for _, p in hidden]),
        torch.optim.AdamW([{"params": decays, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=0.01),
    ]


@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize("options", [{}, {"method": "full", "partitions": 1}], ids=["streamed", "full"])
@pytest.mark.parametrize("build", [two, by_name])
@pytest.mark.few(1)
def test_a_function_may_return_several_optimizers_and_know_names(build, options, tmp_path):
    """A partition, or one parameter of a trial, may need one of them alone: "optimizer got an empty parameter list"."""
    weights, _ = trained(build, tmp_path, **options)
    plain = in_a_plain_loop(build, named=build is by_name)
    assert [name for name, value in plain.items() if not torch.equal(value, weights[name])] == []


@pytest.mark.usefixtures("known_machine")
def test_a_schedule_sets_the_groups_of_several_optimizers(tmp_path):
    def build(parameters):
        return [
            torch.optim.SGD([p for p in parameters if p.ndim == 2], lr=1.0),
            torch.optim.NAdam(p for p in parameters if p.ndim != 2),
        ]

    _, rates = trained(build, tmp_path, lr_schedule=lambda one: torch.optim.lr_scheduler.LambdaLR(one, lambda done: 0.5**done))
    assert rates == [0.5**done for done in range(9)]


def test_torch_refuses_an_optimizer_without_parameters_as_before():
    describe("", two)
    with pytest.raises(ValueError, match="empty parameter list"):
        torch.optim.SGD([], lr=0.1)


def test_names_do_not_go_with_what_divides_weights():
    trainer = Trainer(network(), None, by_name_alone, mem_limit="2GB", method="streamed", tile="8KB", quiet=True)
    with pytest.raises(OptionError, match="by_name_alone chooses by names, and tile divides weights into rows that have none"):
        trainer.plan(ROWS)


def by_name_alone(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)


# --- without a learning rate ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"lr_schedule": "cosine"}, "lr_schedule"),
        ({"warmup_updates": 3}, "warmup_updates"),
        ({"lr_schedule": lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer)}, "lr_schedule"),
    ],
)
def test_a_schedule_for_an_optimizer_without_a_learning_rate_is_refused(options, word):
    with pytest.raises(OptionError, match=f"{word}: the groups of optimizer Hybrid have no learning rate"):
        Trainer(network(), None, Hybrid, mem_limit="2GB", method="full", **options)


# --- of other libraries -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("library", "name", "size", "words"),
    [
        ("pytorch_optimizer", "Kron", 8, "its steps draw random numbers"),
        # Below 4,096 numbers its state is a plain tensor.
        pytest.param("torchao.optim", "AdamW8bit", 64, "a tensor of a kind of its own, OptimState8bit", marks=pytest.mark.slow),
    ],
)
def test_optimizers_of_other_libraries_that_would_train_otherwise_are_refused_by_name(library, name, size, words):
    kind = getattr(pytest.importorskip(library), name)
    with pytest.raises(OptionError, match=f"optimizer {name}: .*{words}"):
        found(kind, (size, size), (size,))


@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("pytorch_optimizer", "Lion"),
        ("pytorch_optimizer", "SM3"),
        ("pytorch_optimizer", "FOCUS"),
        ("pytorch_optimizer", "AdaBelief"),
        ("pytorch_optimizer", "ScheduleFreeAdamW"),
        ("transformers.optimization", "Adafactor"),
        ("timm.optim", "AdafactorBigVision"),
        ("timm.optim", "Lion"),
    ],
)
@pytest.mark.few(3)
def test_optimizers_of_other_libraries_whose_state_has_a_home_have_the_same_bits(library, name):
    """adafactorbv's row and column have no dimension of 1, and its momentum is bfloat16."""
    kind, options = getattr(pytest.importorskip(library), name), {"lr": 0.01} if library != "transformers.optimization" else {}
    options |= {"momentum": 0.9} if name == "AdafactorBigVision" else {}
    mine, theirs = parameters() | {"wide": nn.Parameter(torch.ones(48, 40))}, parameters()
    theirs["wide"] = nn.Parameter(torch.ones(48, 40))
    ours, _, _ = adopted(describe("", lambda p: kind(p, **options)), mine)
    same_after_steps(ours, mine, kind(list(theirs.values()), **options), theirs)


def by_place(parameters):
    return torch.optim.SGD([{"params": parameters[:1], "lr": 0.01}, {"params": parameters[1:], "lr": 0.1}])


@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize("build", [by_place, lambda p: FindsItsRate(p, lr=0.1)], ids=["groups by place", "FindsItsRate"])
@pytest.mark.few(1)
def test_an_optimizer_of_all_parameters_together_goes_with_one_partition_alone(build, tmp_path):
    """It was refused everywhere; streamed, only the first partition's parameters would have had their group."""
    for number, options in enumerate(({}, {"method": "sil"}, {"method": "auto"}, {"method": "checkpointed"})):
        with pytest.raises(OptionError, match=r"looks at several parameters together .*their places.*method=\"full\""):
            trained(build, tmp_path / str(number), **options)
    plain = in_a_plain_loop(build)
    for number, options in enumerate(({"method": "full"}, {"method": "auto"})):
        weights, _ = trained(build, tmp_path / f"full {number}", partitions="auto", **options)
        assert [name for name, value in plain.items() if not torch.equal(value, weights[name])] == []


class Guarded(torch.optim.SGD):
    """Makes no step where one number of any gradient is too large."""

    def step(self, closure=None):
        if not any(p.grad.abs().max() > self.defaults["most"] for group in self.param_groups for p in group["params"]):
            super().step(closure)

    def __init__(self, parameters, most):
        super().__init__(parameters, lr=0.1)
        self.defaults["most"] = most


@pytest.mark.parametrize("most", [0.05, 2.0, 100.0])
def test_a_step_that_is_left_out_for_one_large_gradient_looks_at_all_parameters(most):
    """All gradients of the trial were on one side of such a threshold, so that partitions made the step, each alone."""
    choice = describe("Guarded", lambda p: Guarded(p, most))
    choice.try_on({name: spec_of(name, torch.zeros(shape)) for name, shape in (("w", (6, 5)), ("b", (6,)))})
    assert choice.found.joint


def test_a_state_that_is_called_as_the_average_is_does_not_go_with_one():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                self.state[p].setdefault("average", torch.zeros_like(p)).lerp_(p.detach(), 0.1)
            super().step(closure)

    choice = replace(describe("", lambda parameters: Own(parameters, lr=0.1)), average=0.9)
    with pytest.raises(OptionError, match="ema: optimizer Own keeps a state 'average' of its own"):
        kept(choice, (3, 2))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.norm(self.embed(x)).relu())


@pytest.mark.parametrize("schedule", ["linear", lambda own: torch.optim.lr_scheduler.LambdaLR(own, lambda done: 1 - done / 6)])
def test_weight_decay_leaves_out_biases_norms_and_patterns_of_names(schedule, tmp_path):
    torch.manual_seed(0)
    model, (x, y) = Normed(), (torch.randn(24, 6), torch.arange(24) % 3)
    expected = copy.deepcopy(model)
    spared = [p for name, p in expected.named_parameters() if p.ndim < 2 or name == "embed.weight"]
    groups = [{"params": [expected.head.weight]}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.5, fused=True)
    for update in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - update / 6)
        rows = slice(update % 3 * 8, update % 3 * 8 + 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(expected(x[rows]), y[rows]).backward()
        optimizer.step()
    given = {"mem_limit": "3GB", "method": "streamed", "partitions": 3, "epochs": 2, "batch_size": 8, "shuffle": False}
    given |= {"optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.5, "lr_schedule": schedule, "quiet": True}
    Trainer(model, offload_dir=tmp_path, no_decay="bias, norm,embed.*", **given).fit((x, y), (x, y))
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected.parameters(), strict=True))


def test_bias_and_norm_may_spare_none_beside_one_that_does():
    """The documented "bias,norm" was refused for models without biases, such as Llama."""
    dimensions = {"embed.weight": 2, "norm.weight": 1}
    refuse_unknown("bias, norm", dimensions)
    refuse_unknown("norm,bias,embed.*", dimensions)
    for nothing in ("bias", "bias,norm,headd*", "norm.*,headd*"):
        with pytest.raises(OptionError, match="no_decay: expected bias, norm, or a pattern"):
            refuse_unknown(nothing, dimensions)


def test_weight_decay_that_spares_nothing_is_refused(tmp_path):
    data = torch.randn(24, 6), torch.arange(24) % 3
    with pytest.raises(OptionError, match=r"no_decay: expected bias, norm, or a pattern .*found 'headd\*', .* embed.weight"):
        Trainer(Normed(), mem_limit="3GB", method="full", weight_decay=0.1, no_decay="bias,headd*", quiet=True).plan(data)
    with pytest.raises(OptionError, match="there is no weight decay to leave out"):
        Trainer(Normed(), mem_limit="3GB", method="full", no_decay="bias", quiet=True)


def test_an_attribute_of_the_user_s_parameters_that_trials_lack_is_named_with_the_cure():
    with pytest.raises(OptionError, match=r"no attribute '_optim'\. .* getattr\(parameter, '_optim', \.\.\.\) with a default"):
        describe("", lambda parameters: torch.optim.SGD([{"params": [one], **one._optim} for one in parameters], lr=0.1))
