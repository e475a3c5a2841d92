"""Blocks that are compiled one by one have the bits of a plain loop whose layers are compiled in the same way."""

import copy
import functools
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from seqpart import Trainer
from seqpart.errors import DoesNotFit, OptionError
from tests.resuming import Killed

ROWS, BATCH, MICRO = 22, 8, 3  # micro-batches of 3, 3, 2 rows, and of 3, 3 at the end of an epoch
X, Y = torch.randn(ROWS, 6, 16, generator=torch.Generator().manual_seed(1)), torch.arange(ROWS) % 3
OPTIONS = {
    "mem_limit": "2GB", "compile": True, "batch_size": BATCH, "micro_batch_size": MICRO, "epochs": 2, "lr": 1e-2,
    "shuffle": False, "quiet": True,
}  # fmt: skip
CUT = {"method": "streamed", "partitions": 3}


class Layer(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm, self.up, self.down, self.dropout = (
            nn.LayerNorm(16),
            nn.Linear(16, 32),
            nn.Linear(32, 16),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(6)

    def forward(self, x):
        return x + torch.relu(self.norm(self.linear(x)))


class Checkpointed(Layer):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Network(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layers, self.head = nn.ModuleList(layer() for _ in range(4)), nn.Linear(16, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Graphs:
    """After each update, the number of graphs that were compiled until then."""

    def __init__(self, at=None):
        self.seen, self._at = [], at

    def on_step(self, event):
        self.seen.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        if event.update == self._at:
            raise Killed


def warnings_of_torch_aside(function):
    @functools.wraps(function)
    def called(*args):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*args)

    return called


def network(dropout=0.0, layer=None):
    torch.manual_seed(3)
    return Network(layer or functools.partial(Layer, dropout))


def trained(model, folder, *callbacks, test=(X[:5], Y[:5]), resume=None, **options):
    trainer = Trainer(model, "cross-entropy", "adam", output_dir=folder, **{**OPTIONS, **options})
    return trainer.fit((X, Y), test, callbacks=callbacks, resume=resume)


@warnings_of_torch_aside
def trained_plainly(model):
    for layer in model.layers:
        layer.compile(dynamic=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    for _ in range(2):
        for rows in torch.arange(ROWS).split(BATCH):
            for part in rows.split(MICRO):
                (F.cross_entropy(model(X[part]), Y[part]) * (len(part) / len(rows))).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def assert_same(found, expected):
    found, expected = found.state_dict(), expected.state_dict()
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter), name


@pytest.mark.slow
@pytest.mark.parametrize("way", [CUT, {"method": "checkpointed"}, {"method": "full"}], ids=lambda way: way["method"])
def test_compiled_layers_have_the_bits_of_a_plain_loop_with_compiled_layers(way, tmp_path):
    model, plain, graphs = network(), network(), Graphs()
    result = trained(model, tmp_path / "run", graphs, **way)
    assert graphs.seen[0] > 0
    assert len({*graphs.seen, torch._dynamo.utils.counters["stats"]["unique_graphs"]}) == 1  # all while the plan was made
    assert result.proof.violations == 0
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())
    torch._dynamo.reset()
    trained_plainly(plain)
    assert_same(model, plain)


@pytest.mark.slow
@pytest.mark.parametrize("layer", [Normed, functools.partial(Checkpointed, 0.0)], ids=["batch norm", "checkpointing"])
def test_running_statistics_and_checkpoints_inside_compiled_layers_are_those_of_a_plain_loop(layer, tmp_path):
    model, plain = network(layer=layer), network(layer=layer)
    trained(model, tmp_path / "run", **CUT)
    torch._dynamo.reset()
    trained_plainly(plain)
    assert_same(model, plain)


@pytest.mark.slow
def test_dropout_in_compiled_layers_does_not_depend_on_the_cut(tmp_path):
    cut, whole, without = network(0.2), network(0.2), network()
    trained(cut, tmp_path / "cut", **CUT)
    trained(whole, tmp_path / "whole", method="full")
    assert_same(cut, whole)
    trained(without, tmp_path / "without", method="full")
    assert not torch.equal(without.head.weight, whole.head.weight)


@pytest.mark.slow
def test_a_run_that_goes_on_compiles_again_and_ends_with_the_same_bits(tmp_path):
    alone, resumed = network(), network()
    trained(alone, tmp_path / "alone", **CUT)
    with pytest.raises(Killed):
        trained(resumed, tmp_path / "run", Graphs(at=4), save_every=1, **CUT)
    with pytest.raises(OptionError, match="compile was yes, not no"):
        trained(network(), None, resume=tmp_path / "run", save_every=1, **{**CUT, "compile": False})
    torch._dynamo.reset()
    again, graphs = network(), Graphs()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    trained(again, None, graphs, resume=tmp_path / "run", save_every=1, **CUT)
    assert graphs.seen[0] > before
    assert_same(again, alone)


@pytest.mark.slow
def test_layers_of_a_transformer_are_compiled_as_in_a_plain_loop(tmp_path):
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(num_hidden_layers=3, vocab_size=64, max_position_embeddings=32, **shape)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    plain, tokens = copy.deepcopy(model).train(), torch.randint(64, (8, 8))
    options = OPTIONS | CUT | {"batch_size": 4, "micro_batch_size": 4, "output_dir": tmp_path / "run"}
    Trainer(model, "model", "adamw", weight_decay=0.0, **options).fit(({"input_ids": tokens}, tokens))
    torch._dynamo.reset()
    for layer in plain.model.layers:
        layer.compile(dynamic=False)
    tuned_plainly(plain, tokens)
    assert_same(model, plain)


@warnings_of_torch_aside
def tuned_plainly(plain, tokens):
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    for _ in range(2):
        for rows in tokens.split(4):
            plain(input_ids=rows, labels=rows).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


LARGE = """
import torch
from torch import nn
from seqpart import Trainer

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

x, y = torch.randn(16, 1024), torch.arange(16) % 3
blocks = [Layer] * 40 + [lambda: nn.Linear(1024, 3)]
trainer = Trainer(
    blocks, "cross-entropy", "sgd", mem_limit="1.25GB", method="streamed", compile=True, batch_size=8, epochs=1, quiet=True
)
proof = trainer.fit((x, y)).proof
assert proof.violations == 0, proof
assert proof.peak <= min(proof.limit, 1.15 * proof.predicted), proof  # a C++ compiler takes more or less
print(sum(4 * 2 * 1024 * 4096 for _ in range(40)) > proof.limit)
"""


@pytest.mark.slow
def test_weights_larger_than_the_limit_come_and_go_through_compiled_layers(tmp_path):
    ran = subprocess.run([sys.executable, "-c", LARGE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.stdout.strip(), ran.returncode) == ("True", 0), ran.stderr[-2000:]


@pytest.mark.own_process
def test_a_limit_without_room_for_the_compiler_is_refused_with_one_that_has_room(tmp_path):
    with pytest.raises(DoesNotFit, match=r"compiling takes .* C\+\+ compiler") as refusal:
        trained(network(), tmp_path / "run", mem_limit="750MB", **CUT)
    assert refusal.value.smallest > 750 * 10**6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "sil"}, "--compile goes with --method auto, streamed"),
        ({"method": "psl"}, "--compile goes with --method auto, streamed"),
        ({"method": "streamed", "tile": "16MB"}, "--compile does not go with --tile"),
        ({"method": "full", "unfreeze": "head.*=epoch 1"}, "--compile does not go with --unfreeze"),
        ({"method": "full", "device": "sim"}, "--compile goes with the CPU"),
    ],
    ids=str,
)
def test_compile_is_refused_where_it_does_not_hold(options, said, tmp_path):
    with pytest.raises(OptionError) as refusal:
        trained(network(), tmp_path / "run", **options)
    assert said in refusal.value.with_flags


def test_a_loop_of_ones_own_refuses_compile():
    with pytest.raises(OptionError, match="batches of any size"), Trainer(network(), **OPTIONS, **CUT).session((X, Y)):
        pass


def test_a_model_without_layers_to_compile_and_one_that_is_compiled_are_refused(tmp_path):
    with pytest.raises(OptionError, match="expected layers that hold other modules"):
        trained(nn.Sequential(nn.Flatten(), nn.Linear(96, 8), nn.ReLU(), nn.Linear(8, 3)), tmp_path / "run", **CUT)
    with pytest.raises(OptionError, match="compiled already"):
        trained(torch.compile(network()), tmp_path / "run", **CUT)
