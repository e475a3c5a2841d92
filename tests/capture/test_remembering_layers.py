"""Layers that go on from what they remember: in buffers a run that is stopped has it again, and in attributes nobody would."""

import collections
import copy
import itertools
import random
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from seqpart import Trainer
from seqpart.capture.capture import chain_of
from seqpart.errors import Interrupted, ModelError
from tests.resuming import Stopping, ended

pytestmark = pytest.mark.usefixtures("known_machine")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.begin()

    def begin(self):
        pass


class Counts(Layer):
    def begin(self):
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * (1 + self.calls / 100)


class CountsInAList(Layer):
    def begin(self):
        self.calls = [0]

    def forward(self, x):
        self.calls[0] += 1
        return self.linear(x) * (1 + self.calls[0] / 100)


class CountsDeeper(Layer):
    def begin(self):
        self.notes = {"of": {"calls": 0}}
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        self.notes["of"]["calls"] += 1
        return self.linear(x) * (1 + self.notes["of"]["calls"] / 100) * self.scale


class Mean(Layer):
    def begin(self):
        self.mean = torch.zeros(8)

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return self.linear(x) - self.mean


class FirstMean(Layer):
    """Where the first rows decide."""

    def begin(self):
        self.register_buffer("mean", None)

    def forward(self, x):
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return self.linear(x) - self.mean


class Drawn(Layer):
    """Random features of its own, drawn when they are first needed."""

    def begin(self):
        self.features = None

    def forward(self, x):
        if self.features is None:
            self.features = torch.randn(8, 8)
        return self.linear(x) @ self.features


class OwnGenerator(Layer):
    def begin(self):
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        return self.linear(x) + torch.rand(8, generator=self.generator)


@dataclass
class Calls:
    number: int = 0


class Slotted:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = Calls()


def counted():
    number = 0
    while True:
        number += 1
        yield number


def of_slots(state):
    state.calls.number += 1
    return state.calls.number


OBJECTS = {
    "a dataclass in an object with slots": (Slotted, of_slots),
    "a namespace": (lambda: SimpleNamespace(calls=Calls()), of_slots),
    "a random generator": (lambda: random.Random(0), lambda state: state.random()),
    "one of numpy": (lambda: np.random.default_rng(0), lambda state: state.random()),
    "a counter of itertools": (itertools.count, next),
    "an iterator": (lambda: iter(range(900)), next),
    "a generator": (counted, next),
    "a set": (set, lambda state: state.add(len(state)) or len(state)),
    "a queue": (collections.deque, lambda state: state.append(0) or len(state)),
    "a queue that is soon full": (lambda: collections.deque(maxlen=5), lambda state: state.append(0) or len(state)),
    "the end of a long list": (lambda: [0] * 64, lambda state: state.append(state.pop() + 1) or state[-1]),
}


class Keeps(Layer):
    """What it keeps in an attribute, and what it computes with."""

    def __init__(self, state, used):
        super().__init__()
        self.state, self.used = state, used

    def forward(self, x):
        return self.linear(x) * (1 + 0.1 * self.used(self.state))


class Calling(Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x))


class CountsInItsClass(Layer):
    calls = 0

    def begin(self):
        type(self).calls = 0

    def forward(self, x):
        type(self).calls += 1
        return self.linear(x) * (1 + 0.1 * self.calls)


class CountsInABuffer(Layer):
    def begin(self):
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * (1 + int(self.calls) / 100)


class MeanInABuffer(Mean):
    def begin(self):
        self.register_buffer("mean", torch.zeros(8))


class Notes(Layer):
    """For its user alone: what it last gave, and how often it was called."""

    def begin(self):
        self.calls, self.latest, self.shapes = 0, None, {}

    def forward(self, x):
        self.calls += 1
        self.shapes[tuple(x.shape)] = self.calls
        self.latest = self.linear(x)
        return self.latest + nn.functional.dropout(x, 0.1, self.training)


def data():
    chance = torch.Generator().manual_seed(1)
    return torch.randn(40, 8, generator=chance), torch.randint(0, 4, (40,), generator=chance)


def trained(kind, folder, method, *, stop=None, resume=None):
    torch.manual_seed(0)
    model = nn.Sequential(kind(), nn.ReLU(), nn.Linear(8, 4))
    place = {} if resume else {"output_dir": folder}
    trainer = Trainer(
        model, mem_limit="2GB", method=method, batch_size=8, epochs=2, seed=5, quiet=True,
        **({} if method == "full" else {"partitions": 2}), **place,
    )  # fmt: skip
    return trainer.fit(data(), data(), resume=resume, reporter=Stopping(stop))


@pytest.mark.parametrize("method", ["full", "streamed"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Counts, "calls"), (CountsInAList, "calls"), (CountsDeeper, "notes"), (Mean, "mean"), (FirstMean, "mean"),
        (Drawn, "features"),
        (OwnGenerator, "generator"), (CountsInItsClass, "calls"),
        *((lambda state=state, used=used: Keeps(state(), used), "state") for state, used in OBJECTS.values()),
    ],
)  # fmt: skip
@pytest.mark.few(9)
def test_a_layer_whose_outputs_hang_on_an_attribute_that_it_changes_is_refused_by_name(kind, name, method, tmp_path):
    """A run that was stopped and went on had other weights, in silence: no checkpoint has an attribute. State in objects was
    not seen at all, and planning filled queues for good, so that `verify` compared with a model that had changed already."""
    with pytest.raises(
        ModelError, match=rf"gives other outputs for the same rows .* in an attribute \({name}\).*register_buffer"
    ):
        trained(kind, tmp_path, method)


def elsewhere():
    """Functions that go on from a state in their closures."""
    numbers, calls, chance, first = np.zeros(1), [], torch.Generator().manual_seed(0), []

    def of_an_array(x):
        numbers[0] += 1
        return x * (1 + 0.01 * float(numbers[0]))

    def of_a_list(x):
        calls.append(0)
        return x * (1 + 0.01 * len(calls))

    def of_a_generator(x):
        return x + torch.rand(8, generator=chance)

    def of_first_rows(x):
        first.append(x.detach().mean(0))
        return x - first[0]

    return [of_an_array, of_a_list, of_a_generator, of_first_rows]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(("method", "number"), [("full", 0), ("streamed", 1), ("streamed", 2), ("checkpointed", 3)])
@pytest.mark.few(2)
def test_a_layer_whose_outputs_hang_on_what_its_function_keeps_elsewhere_is_refused(method, number, tmp_path):
    """It trained to other weights than a plain loop, in silence, or ended in a traceback of torch."""
    found = "it keeps state in a closure, a global, an array or a generator" if number < 3 else "kept in a global or a closure"
    with pytest.raises(ModelError, match=rf"block 0 .*{found}.*register_buffer"):
        trained(lambda: Calling(elsewhere()[number]), tmp_path, method)


@pytest.mark.parametrize("method", ["full", "streamed", "checkpointed"])
@pytest.mark.parametrize("kind", [CountsInABuffer, MeanInABuffer])
@pytest.mark.few(2)
def test_in_a_buffer_it_is_there_again_when_a_run_goes_on(kind, method, tmp_path):
    whole = ended(trained(kind, tmp_path / "whole", method))
    with pytest.raises(Interrupted):
        trained(kind, tmp_path / "stopped", method, stop=12)
    assert ended(trained(kind, tmp_path / "stopped", method, resume=tmp_path / "stopped")) == whole


def test_what_a_layer_notes_for_its_user_alone_is_no_matter(tmp_path):
    trained(Notes, tmp_path, "streamed")


class Config(dict):
    """As diffusers has one in every model: torch's pytree takes a container of a type of its own for a leaf."""


class Pair(tuple):
    __slots__ = ()


class Named(list):
    pass


class WithoutLength(tuple):
    """As e3nn's irreps, whose length could be the number of them or of their numbers."""

    __slots__ = ()

    def __len__(self):
        raise NotImplementedError


def holding_itself():
    found = [1]
    found.append(found)
    return found


@pytest.mark.parametrize(
    "kept",
    [
        Config(width=8),
        [Config(width=8)],
        Pair((1, Config())),
        Named([1, {"deep": Config(a=Config())}]),
        holding_itself(),
        WithoutLength((1, 2)),
    ],
    ids=["dict", "inside a list", "tuple", "list", "a list in itself", "without len()"],
)
@pytest.mark.few(3)
def test_a_layer_may_have_containers_of_a_type_of_its_own(kept, tmp_path):
    """The model was looked through without end: RecursionError. One without len() ended in a NotImplementedError."""

    class Configured(Layer):
        def begin(self):
            self.kept = kept

        def forward(self, x):
            return self.linear(x)

    trained(Configured, tmp_path, "streamed")


def test_a_counter_in_a_container_of_a_type_of_its_own_is_seen(tmp_path):
    class Counting(Layer):
        def begin(self):
            self.calls = Config(number=0)

        def forward(self, x):
            self.calls["number"] += 1
            return self.linear(x) * (1 + self.calls["number"] / 100)

    with pytest.raises(ModelError, match=r"in an attribute \(calls\)"):
        trained(Counting, tmp_path, "streamed")


# --- what a layer leaves for another call -------------------------------------------------------------------------------


class Reversible(nn.Module):
    """Takes the rows' mean away, and gives it back to the output when it is called again, as RevIN does."""

    def forward(self, x, *, back=False):
        if back:
            return x + self.mean
        self.mean = x.detach().mean(1, keepdim=True)
        return x - self.mean


class Reverses(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.first, self.last = Reversible(), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.norm(self.last(self.first(self.norm(x)).relu()), back=True)


class Leaves(Layer):
    def __init__(self, place):
        super().__init__()
        self.place = [place]

    def forward(self, x):
        self.place[0].scale = x.detach().abs().mean(1, keepdim=True)
        return self.linear(x).tanh()


class Finds(Leaves):
    def forward(self, x):
        return self.linear(x)[:, :4] * self.place[0].scale


class LeavesOfItsWeights(Leaves):
    def forward(self, x):
        self.place[0].scale = self.linear.weight.abs().mean()
        return self.linear(x).tanh()


def through_an_object(kind=Leaves):
    place = Config()
    place.scale = torch.ones(1, 1)
    return [kind(place), nn.Linear(8, 8), nn.Tanh(), Finds(place)]


def numbers():
    chance = torch.Generator().manual_seed(1)
    return torch.randn(32, 8, generator=chance) * torch.rand(32, 1, generator=chance) * 9, torch.randn(32, 4, generator=chance)


@pytest.mark.parametrize(
    "kind",
    [
        Reverses, lambda: nn.Sequential(*through_an_object()), through_an_object,
        lambda: nn.Sequential(*through_an_object(LeavesOfItsWeights)),
    ],
    ids=["a layer called twice", "an nn.Sequential", "a list", "a weight"],
)  # fmt: skip
@pytest.mark.few(2)
def test_layers_that_leave_tensors_for_others_are_one_block(kind):
    """Behind a cut the later call had the tensor of other rows: weights and tests were others, in silence."""
    torch.manual_seed(0)
    model, (x, y) = kind(), numbers()
    expected = copy.deepcopy(model if isinstance(model, nn.Module) else nn.Sequential(*model))
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, fused=True)
    for rows, labels in zip(x.split(8), y.split(8), strict=True):
        for part, wanted in zip(rows.split(4), labels.split(4), strict=True):
            (nn.functional.mse_loss(expected(part), wanted) * 0.5).backward()
        optimizer.step()
        optimizer.zero_grad()
    options = {"batch_size": 8, "micro_batch_size": 4, "epochs": 1, "lr": 0.1, "shuffle": False, "quiet": True}
    trainer = Trainer(model, nn.MSELoss(), "sgd", mem_limit="2GB", method="streamed", **options)
    result = trainer.fit((x, y), (x, y))
    assert "it uses a tensor that a call of " in "".join(result.plan.reasons)
    found = (model if isinstance(model, nn.Module) else nn.Sequential(*model)).state_dict()
    assert [name for name, one in expected.state_dict().items() if not torch.equal(one, found[name])] == []
    with torch.no_grad():
        assert result.test_loss == pytest.approx(float(nn.functional.mse_loss(expected(x), y)), rel=1e-6)
    assert trainer.evaluate((x, y)).loss == pytest.approx(result.test_loss, rel=1e-6)


class Positions(nn.Module):
    """Makes its positions when it first sees rows of a length, as older models of transformers do, in every way."""

    def __init__(self):
        super().__init__()
        self.weight, self.known = nn.Parameter(torch.ones(8)), None
        self.register_buffer("frequency", torch.ones(8), persistent=False)

    def forward(self, x):
        if self.known is None or self.known.shape[0] != x.shape[1]:
            self.known = torch.arange(x.shape[1]) * self.frequency + x.new_ones(8) + torch.zeros_like(x[0])
        return self.weight * x * self.known


class TwicePositions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.last = Positions(), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.layer(self.layer(x)))


def test_what_a_layer_keeps_that_depends_on_no_row_and_no_weight_does_not_join_its_calls():
    assert len(chain_of(TwicePositions(), (8,), torch.float32)) == 3


class Solver(nn.Module):
    """Fills new memory bit by bit between its layers, as torchdiffeq's odeint does."""

    def __init__(self):
        super().__init__()
        self.change, self.head = Dirties(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        solution = torch.empty(3, len(x), 8)
        solution[0] = self.change(x)
        for step in (1, 2):
            solution[step] = solution[step - 1] + 0.1 * self.change(solution[step - 1].clone())
        return self.head(solution[-1])


class Dirties(nn.Linear):
    """Leaves other numbers in the memory that it frees each time."""

    calls = itertools.count()

    def forward(self, x):
        torch.full((3, len(x), 8), float(next(self.calls)))
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_memory_that_is_filled_in_later_blocks_is_no_state(tmp_path):
    """What torch.empty gave crossed the cut unset, and the block was said to keep state in a closure."""
    torch.manual_seed(0)
    model = Solver()
    plain = copy.deepcopy(model)
    x, y = torch.randn(8, 8), torch.arange(8) % 4
    Trainer(
        model, nn.functional.cross_entropy, lambda given: torch.optim.SGD(given, lr=0.1), mem_limit="2GB", method="streamed",
        epochs=1, partitions=3, batch_size=8, micro_batch_size=8, shuffle=False, output_dir=tmp_path, quiet=True,
    ).fit((x, y))  # fmt: skip
    nn.functional.cross_entropy(plain(x), y).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
