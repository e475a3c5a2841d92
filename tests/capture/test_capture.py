"""A model that is cut at its layers does what it did whole: outputs, gradients, names, in training and in evaluation."""

import copy
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seqpart import Trainer
from seqpart.capture.capture import chain_of
from seqpart.errors import ModelError
from tests.replay import assert_same_as_whole, images, quantities, replayed, tokens
from tests.whole_models import Bands, Decoder, Dense, Layer, UNet


class Start(nn.Module):
    """A row of its own before the others, expanded to the batch, and positions that are added."""

    def __init__(self):
        super().__init__()
        self.first, self.places = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x.reshape(x.size(0), 4, 8)], 1) + self.places
        with torch.no_grad():
            shift = x.mean(0, keepdim=True)
        for layer in self.layers:
            x = layer(x - shift)
        return self.head(x[:, 0])


class InPlace(nn.Module):
    """A value is changed in place by a layer, and the name that it had before is used again."""

    def __init__(self):
        super().__init__()
        self.one, self.act, self.two, self.three = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = self.one(x)
        kept, row = x, x[:, 1:]
        self.act(x)
        x = self.two(kept)
        return self.three(x + kept + row.sum(1, keepdim=True))


class Spare(nn.Module):
    """A part that no call needs, and one weight under two names."""

    def __init__(self):
        super().__init__()
        self.used, self.unused, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.again = self.used
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        return self.head(F.relu(self.again(x)) * self.count)


class Modes(nn.Module):
    """It drops by hand, and only in training."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.one(x)
        if self.training:
            x = x * (torch.rand(x.shape[0], 1, device=x.device) > 0.3)
        return self.two(x)


class Lists(nn.Module):
    """Layers that take a list and change it: one puts what it makes in the place of what it got, one takes out the last."""

    class Widened(nn.Linear):
        def forward(self, values):
            values[-1] = super().forward(values[-1])
            return values[-1]

    class Last(nn.Linear):
        def forward(self, values):
            return super().forward(values.pop() * values[-1])

    def __init__(self):
        super().__init__()
        self.one, self.two, self.last = nn.Linear(4, 4), Lists.Widened(4, 4), Lists.Last(4, 3)

    def forward(self, x):
        values = [x, self.one(x)]
        values.append(self.two([values[0], values[1]]))
        return self.last(values) + sum(value.sum(1, keepdim=True) for value in values)


class Shared(nn.Module):
    """Layers that leave values for later ones in a dict that all get (Gemma's shared keys), and for the model behind them."""

    class Leaves(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("table", torch.arange(4.0))

        def forward(self, x, shared, seen):
            seen.append(self.table)
            shared |= {"scale": [self.weight.sum() * x.mean(), x.tanh()], "own": self.weight}
            return super().forward(x).relu()

    class Takes(nn.Linear):
        def forward(self, x, shared):
            scale, shift = shared["scale"]
            shared["left"] = scale * x
            return super().forward(x) * scale + shift

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three, self.last = Shared.Leaves(), nn.Linear(4, 4), Shared.Takes(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        shared = {}
        x = self.three(self.two(self.one(x, shared, [])), shared=shared)
        return self.last((x + shared["left"]) @ shared["own"])


class Captioner(nn.Module):
    """A language model inside another model: its configuration is its own, and asks for a cache of what its layers made."""

    class Cache:
        def __init__(self):
            self.values = []

    class Cached(nn.Linear):
        def forward(self, x, cache):
            if cache is not None:
                cache.values.append(x)
            return super().forward(x).relu()

    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = SimpleNamespace(use_cache=True)
            self.layers = nn.ModuleList(nn.ModuleDict({"one": Captioner.Cached(4, 4)}) for _ in range(3))

        def forward(self, x):
            cache = Captioner.Cache() if self.config.use_cache else None
            for layer in self.layers:
                x = layer["one"](x, cache)
            return x

    def __init__(self):
        super().__init__()
        self.config, self.language, self.head = SimpleNamespace(), Captioner.Language(), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.language(x))


OURS = {
    "a language model inside, with a cache": (Captioner, quantities, 4, 1),
    "a dict that layers share": (Shared, quantities, 4, 3),
    "lists that layers change": (Lists, quantities, 3, 3),
    "unet": (UNet, lambda: images(8, 1), 6, 3),
    "decoder": (Decoder, tokens, None, None),
    "dense": (Dense, quantities, 5, 6),
    "bands": (Bands, quantities, 6, 2),
    "a row of its own": (Start, lambda: quantities(32), None, None),
    "in place": (InPlace, quantities, 4, 3),
    "spare parts": (Spare, quantities, 2, None),
    "modes": (Modes, quantities, 2, 1),
}


@pytest.mark.parametrize(("kind", "rows", "blocks", "widest"), OURS.values(), ids=OURS)
def test_a_model_does_in_blocks_what_it_does_whole(kind, rows, blocks, widest):
    torch.manual_seed(0)
    assert_same_as_whole(kind(), rows(), blocks, widest)


def test_lists_of_blocks_stay_what_they_are():
    blocks = [nn.Linear(4, 4), nn.ReLU()]
    assert [block.alive for block in chain_of(blocks, (4,), torch.float32)] == blocks
    assert [block.alive for block in chain_of(nn.Sequential(*blocks), (4,), torch.float32)] == blocks


def swish(x):
    return x * torch.sigmoid(x)


class Looks(nn.Module):
    def __init__(self, look):
        super().__init__()
        self.one, self.two, self._look = nn.Linear(4, 4), nn.Linear(4, 3), look

    def forward(self, x):
        return self._look(self, self.one(x))


def number_of_a_tensor(self, x):
    return self.two(x) if x.sum() > 0 else self.two(-x)


def many_outputs(self, x):
    return self.two(x), x


def named_outputs(self, x):
    return {"depth": self.two(x), "edges": x}


def under_vmap(self, x):
    return self.two(torch.vmap(lambda row: row * row.new_ones(()))(x))


def other_calls_for_other_rows(self, x):
    return self.two(x) if len(x) < 5 else self.two(self.one(x))


def hidden_in_an_object(self, x):
    class Held:
        tensor = x

    return self.two(torch.nn.functional.linear(x, self.two.weight, Held()))


@pytest.mark.parametrize(
    ("look", "said"),
    [
        (number_of_a_tensor, r"reads a number out of a tensor.*the model \(Looks, .*test_capture\.py:\d+\)"),
        (under_vmap, "new_ones: it computes under torch.vmap, and calls in there cannot be recorded one by one"),
        (other_calls_for_other_rows, "does other things with 6 rows than with 4"),
    ],
)
def test_a_model_that_cannot_be_cut_is_one_block_which_says_why(look, said):
    """All of them were refused, though a model of one block trains where it fits."""
    model = Looks(look)
    (block,) = chain = chain_of(model, (4,), torch.float32)
    assert re.search(said, "".join(chain.whole_parts))
    assert [block.exported(name) for name in block.alive.state_dict()] == [*model.state_dict()]
    assert_same_as_whole(model, quantities(), 1, 1)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_a_model_that_calls_a_scripted_function_is_cut_at_its_layers():
    """Its operations were not seen: the model was one block, for a line of the interpreter's as a reason."""
    scripted = torch.jit.script(swish)
    model = Looks(lambda self, x: self.two(scripted(self.one(scripted(x)))))
    assert_same_as_whole(model, quantities(), 3)


@pytest.mark.slow
def test_a_model_is_cut_by_an_interpreter_without_assertions_too():
    """Under `python -O` the rows had no number in the recording, and the model was said to have a weight in a list."""
    code = (
        "import torch; from torch import nn; from seqpart.capture.capture import chain_of\n"
        "class Two(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)\n"
        "    def forward(self, x):\n"
        "        return self.b(self.a(x).relu())\n"
        "print(len(chain_of(Two(), (4,), torch.float32)), __debug__)"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "2 False\n", done.stderr


@pytest.mark.parametrize(
    ("look", "said"),
    [
        (many_outputs, "Looks returned a tuple, of 2 tensors, and it is not known which one the loss takes"),
        (named_outputs, "Looks returned a dict with depth, edges, of 2 tensors"),
        (hidden_in_an_object, r"the model cannot be cut into blocks: linear\(\): argument 'bias'"),
    ],
)
def test_what_does_not_run_or_cannot_be_judged_is_refused_with_its_place(look, said):
    with pytest.raises(ModelError, match=said):
        chain_of(Looks(look), (4,), torch.float32)


class Held:
    def __init__(self, tensor):
        self.tensor = tensor


class Opener(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, held):
        return self.layer(held.tensor)


class Hides(nn.Module):
    """It hands an object with a tensor in it from layer to layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Opener() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(Held(x))
        return x


class Whole(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(4, 4), middle, nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.middle(self.first(x)))


def test_what_cannot_be_looked_into_is_a_block_as_a_whole():
    model = Whole(Hides())
    assert [block.name for block in chain_of(model, (4,), torch.float32)] == ["first", "middle", "head"]
    assert_same_as_whole(model, quantities())


class Skips(nn.Module):
    """As peft's LoHa, and stochastic depth in many scripts: a number decides in training."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x):
        if self.training and not torch.rand(1) > 0.0:
            return x
        return x + self.layers[1](self.layers[0](x).relu())


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.between, self.other = Skips(), nn.Linear(4, 4), Skips()

    def forward(self, x):
        return self.other(self.between(self.one(x)))


def test_a_module_that_decides_by_a_drawn_number_is_a_block_and_so_are_others_of_its_class():
    """The whole model was one block, whatever else it had."""
    model = Whole(Twice())
    chain = chain_of(model, (4,), torch.float32)
    assert [block.name for block in chain] == ["first", "middle.one", "middle.between", "middle.other", "head"]
    assert len(chain.whole_parts) == 1
    assert_same_as_whole(model, quantities())
    model.config = SimpleNamespace(layerdrop=0.1)  # as models of transformers have it
    (why,) = chain_of(model, (4,), torch.float32).whole_parts
    assert why.endswith("build the model with config.layerdrop = 0.0")


class Commits(nn.Module):
    """As a layer with a code book: its second output is a loss in training."""

    def __init__(self):
        super().__init__()
        self.book = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        near = self.book[torch.cdist(x.detach(), self.book.detach()).argmin(-1)]
        return x + near - x.detach(), F.mse_loss(x, near.detach()) if self.training else torch.zeros(())


class Coded(Whole):
    def forward(self, x):
        x, penalty = self.middle(self.first(x))
        return self.head(x), penalty


def test_the_loss_may_take_more_of_a_layer_in_training_than_in_evaluation(tmp_path):
    """The model was one block."""
    torch.manual_seed(0)
    model, (x, y) = Coded(Commits()), (torch.randn(8, 4), torch.randn(8, 3))
    plain = copy.deepcopy(model)

    def loss(found, y):
        return F.mse_loss(found[0], y) + found[1]

    result = Trainer(
        model, loss, lambda given: torch.optim.SGD(given, lr=0.1), mem_limit="2GB", method="streamed", partitions=3, epochs=1,
        batch_size=8, micro_batch_size=8, shuffle=False, output_dir=tmp_path, quiet=True,
    ).fit((x, y))  # fmt: skip
    loss(plain(x), y).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert len(result.plan.partitions) == 3
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


class Doubled(torch.autograd.Function):
    """Its backward is its own."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 5


class Counts(nn.Module):
    """Between its layers: a function with a backward of its own, a buffer that counts, narrow types for a while."""

    def __init__(self):
        super().__init__()
        self.layers, self.unused = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.unused(x)
        x = Doubled.apply(self.layers[0](x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = x @ torch.ones(4, 4)
        rows = list(self.layers[1](x.float()))
        return self.layers[2](torch.stack(rows[::-1]) if len(rows) == 3 else torch.stack(rows))


def test_functions_between_layers_do_what_they_did(monkeypatch):
    model = Counts()
    assert "does other things with 6 rows than with 4" in chain_of(model, (4,), torch.float32).whole_parts[0]
    monkeypatch.setattr(Counts, "forward", lambda self, x: _without_rows(self, x))
    assert_same_as_whole(model, quantities())
    chain = chain_of(model, (4,), torch.float32)
    replayed(chain, quantities(), training=True)
    assert (float(model.calls), int(model.unused.num_batches_tracked)) == (1.0, 1)


def _without_rows(self, x):
    self.calls += 1
    self.unused(x)
    x = Doubled.apply(self.layers[0](x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = x @ torch.ones(4, 4)
    return self.layers[2](self.layers[1](x.float()))


class LooksAtAutocast(nn.Module):
    """Between its layers: what autocast decides, and what it turns off."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = self.layers[0](x)
        x = (2.1 * x.float()).to(x.dtype) if torch.is_autocast_enabled("cpu") else x
        x = self.layers[1](x)
        with torch.autocast("cpu", enabled=False):
            x = x.float() @ torch.full((4, 4), 0.1)
        return self.layers[2](x @ torch.full((4, 4), 0.3))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_what_a_model_does_under_autocast_is_what_is_noted(autocast):
    """It was run without, so that types were others, and what it computes in float32 was computed in bfloat16."""
    model, rows = LooksAtAutocast(), quantities()
    chain = chain_of(model, (4,), torch.float32, autocast=autocast)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        whole, (found, _) = model(rows), replayed(chain, rows, training=True)
    assert whole.dtype == (autocast or torch.float32) and torch.equal(found, whole)


def test_a_layer_says_what_it_is():
    chain = chain_of(Decoder(), (7,), torch.int64)
    assert [str(block) for block in chain if block.kind == Layer.__name__] == [f"block {n} (Layer)" for n in (2, 3, 4)]
