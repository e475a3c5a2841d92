"""What kernels take inside one operation: every kind of block is run once for real while planning, and nothing is disturbed."""

import functools
import json
import math
import random
import subprocess
import sys
from contextlib import closing
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from seqpart import DoesNotFit, Trainer
from seqpart.device.device import Device
from seqpart.device.process_limits import highest
from seqpart.device.usage import read_process
from seqpart.errors import ModelError
from seqpart.profile import trials
from seqpart.profile.machine import Speeds
from seqpart.zoo.models import mlp
from tests import kinds, machine
from tests.whole_models import Experts

RUN = """
import json, sys, torch
from torch import nn
from seqpart import Trainer

class Recurrent(nn.Module):
    def __init__(self, inputs, width):
        super().__init__()
        self.layer = nn.LSTM(inputs, width, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]

blocks = [lambda: Recurrent(32, 256), *[lambda: Recurrent(256, 256)] * 3, nn.Flatten, lambda: nn.Linear(48 * 256, 4)]
rows = torch.randn(64, 48, 32), torch.arange(64) % 4
trainer = Trainer(blocks, mem_limit="2GB", method="full", batch_size=64, epochs=2, output_dir=sys.argv[1], quiet=True)
proof = trainer.fit(rows, rows).proof
print(json.dumps([proof.predicted, proof.peak, proof.violations]))
"""


@pytest.mark.slow
def test_the_peak_of_an_lstm_is_predicted_although_its_gates_are_inside_one_operation(tmp_path):
    """They are other operations on fake tensors: the prediction was 22 % under the measured peak."""
    done = subprocess.run([sys.executable, "-c", RUN, str(tmp_path / "run")], capture_output=True, text=True, check=True)
    predicted, peak, violations = json.loads(done.stdout.splitlines()[-1])
    # Beside other work a trial's own peak varies by 2 % of the process: the table of architectures holds the 5 %.
    assert violations == 0 and 0.99 <= predicted / peak <= 1.07, (predicted, peak)


@pytest.mark.slow
@pytest.mark.own_process
def test_what_an_lstm_reserves_and_does_not_touch_is_known_and_where_it_is_tight_few_rows_are_tried():
    """Tried with all rows it met the limit, and oneDNN makes no kernel any more where memory for one was refused."""
    rows = torch.randn(64, 768), torch.arange(64) % 10
    seen = {}
    for limit in ("4GB", read_process().held + (64 << 20)):
        trainer = Trainer(kinds.lstm(), None, "sgd", mem_limit=limit, method="streamed", batch_size=64, quiet=True)
        with closing(trainer.prepare(*trainer.rows(rows, rows))) as planner:
            plan = planner.planned().plan
            assert not planner.trials.new_notes, planner.trials.new_notes
            seen[limit] = plan.untouched(planner.costs_at(plan.micro_batch), 64)
    assert all(untouched > 4 << 20 for untouched in seen.values()), seen


DILATED = """
import json, re, sys, torch
from torch import nn
from seqpart import DoesNotFit, Trainer

torch.set_num_threads(int(sys.argv[2]))

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(64, 2048, 1), nn.Conv2d(256, 64, 1)
        self.wide = nn.Conv2d(2048, 256, 3, padding=12, dilation=12)

    def forward(self, x):
        return x + self.last(self.wide(self.first(x)).relu())

blocks = [lambda: nn.Conv2d(3, 64, 8, 8), Wide, Wide, nn.Flatten, lambda: nn.Linear(64 * 64, 6)]
rows = torch.randn(8, 3, 64, 64), torch.arange(8) % 6

def trainer(limit):
    return Trainer(
        blocks, mem_limit=limit, method="auto", batch_size=4, micro_batch_size=4, epochs=1, output_dir=sys.argv[1], quiet=True
    )

try:
    trainer("150MB").plan(rows)
except DoesNotFit as refusal:
    least = re.search("smallest limit that fits: ([0-9]+MB)", str(refusal))[1]
proof = trainer(least).fit(rows).proof
print(json.dumps([proof.predicted, proof.peak, proof.violations]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_dilated_convolution_trains_under_the_limit_that_a_refusal_names(tmp_path, threads):
    """Its backward pass reserves four times its weights in each thread, and touches a quarter of that; the kernel's limit
    charges all. Neither the trial nor the run had room, under the limit named and for 60 MB above it."""
    command = [sys.executable, "-c", DILATED, str(tmp_path / "run"), threads]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    predicted, peak, violations = json.loads(done.stdout.splitlines()[-1])
    assert violations == 0 and 0.99 <= predicted / peak <= 1.07, (predicted, peak)
    assert "allocation failed" not in (tmp_path / "run" / "events.jsonl").read_text()


def test_all_that_an_lstm_saves_is_counted_where_its_graph_is_offloaded():
    """What had no room in the ranges of a file stayed on the device: 64 workspaces of 300 KB, in no prediction."""
    rows = torch.randn(64, 768), torch.arange(64) % 10
    trainer = Trainer(kinds.lstm(), None, "sgd", mem_limit="4GB", method="streamed", batch_size=64, quiet=True)
    with closing(trainer.prepare(*trainer.rows(rows, rows))) as planner:
        rows_at_once = planner.planned().plan.micro_batch
        counted = planner.costs_at(rows_at_once)[0].saved_sizes
    block, saved = kinds.lstm()[0](), {}
    x = torch.randn(rows_at_once, 768)
    ours = {tensor.data_ptr() for tensor in (x, *block.parameters())}

    def note(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = block(x)
    assert sum(counted) >= sum(size for at, size in saved.items() if at not in ours) > 10 * out.nbytes


@pytest.mark.own_process  # another test's freed memory took a part of it in
def test_what_a_block_takes_while_it_is_tried_is_part_of_the_predicted_peak(monkeypatch):
    """A trial adds up gradients, and SGD in one micro-batch does not: the measured peak was over its prediction."""
    monkeypatch.setattr(Device, "keeps_heap", False)
    rows = torch.randn(64, 64), torch.arange(64) % 10
    trainer = Trainer(mlp(64, 10, width=2048, depth=1), None, "sgd", mem_limit="4GB", method="full", batch_size=64, quiet=True)
    with closing(trainer.prepare(*trainer.rows(rows, rows))) as planner:
        plan, tried = planner.planned().plan, planner.trials.beyond
    assert tried > 3 * 4 * 2048**2, "weights, gradients, and those that are added"
    assert plan.peak >= plan.runtime + tried


class WithoutKernel(nn.Linear):
    def forward(self, x):
        if type(x) is torch.Tensor and torch.is_autocast_enabled("cpu"):
            raise RuntimeError("could not create a primitive descriptor for the LSTM forward propagation primitive.")
        return super().forward(x)


def test_a_block_that_the_processor_cannot_run_is_refused_by_name_before_training():
    """An LSTM of bfloat16 on a processor without instructions for it: a plan was made, and training ended in a traceback."""
    model, rows = nn.Sequential(nn.Linear(8, 8), WithoutKernel(8, 3)), (torch.randn(16, 8), torch.arange(16) % 3)
    trainer = functools.partial(Trainer, model, None, "sgd", mem_limit="2GB", method="full", batch_size=8, quiet=True)
    with pytest.raises(ModelError, match=r"block 1 \(WithoutKernel\) cannot be run .*bfloat16: give dtype=.fp32"):
        trainer(dtype="bf16").plan(rows)
    trainer().plan(rows)


class Seen(nn.Module):
    """Notes how many rows each real pass had, and does what a block may do to the state that others see."""

    rows: ClassVar[list[int]] = []
    refuses = staticmethod(lambda x: None)

    def __init__(self, width=16, norm=nn.BatchNorm1d):
        super().__init__()
        self.linear, self.norm, self.calls = nn.Linear(width, width), norm(width), 0

    def forward(self, x):
        if type(x) is torch.Tensor:
            self.rows.append(len(x))
            self.refuses(x)
            self.calls += 1
            random.random(), np.random.rand(), torch.rand(1)
        return self.norm(self.linear(x))


AGAIN = 6


@pytest.fixture
def seen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Seen, "rows", [])
    monkeypatch.setattr(trials, "_SHORT", math.inf)  # on a busy machine no run is short
    return Seen.rows


def data(rows=32, width=16):
    return torch.randn(rows, width), torch.arange(rows) % 4


def plan_of(blocks, rows=None):
    rows = rows or data()
    return Trainer(blocks, mem_limit="2GB", method="full", batch_size=32, quiet=True).plan(rows, rows)


def test_blocks_of_one_kind_are_run_once(seen):
    """Three micro-batches, of which two are timed, and one without a graph, whether one factory makes them or each its own. As
    they count their calls they are run six times more, to see whether that changes what they give."""
    plan_of([*[functools.partial(Seen, 16) for _ in range(20)], lambda: nn.Linear(16, 4)])
    assert seen == (4 + AGAIN) * [32]


def test_planning_leaves_a_model_and_all_random_states_as_they_were(seen):
    model = nn.Sequential(Seen(), nn.Linear(16, 4)).eval()
    rows, before = data(), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    plan_of(model, rows)
    assert seen and all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module.training for module in model.modules()) and model[0].calls == 0
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


def test_a_block_that_does_not_fit_alone_is_never_run(seen):
    """Planning keeps the limit too."""
    with pytest.raises(DoesNotFit, match="smallest limit that fits"):
        plan_of(
            [
                functools.partial(Seen, 16, nn.LayerNorm), lambda: nn.Linear(16, 40_000),
                functools.partial(Seen, 40_000, nn.LayerNorm), lambda: nn.Linear(40_000, 4),
            ]
        )  # fmt: skip
    assert seen == (4 + AGAIN) * [32], "the small one of the two, at the micro-batch at which the limit that is named is enough"


def test_a_block_that_finds_no_memory_is_run_with_fewer_rows(seen, monkeypatch):
    def refuse(x):
        if len(x) > 8:
            raise MemoryError

    monkeypatch.setattr(Seen, "refuses", staticmethod(refuse))
    plan = plan_of([functools.partial(Seen, 16), lambda: nn.Linear(16, 4)])
    assert seen == [32, 16, 8, 8, 8, 8] + AGAIN * [8]
    assert not any("could not be run" in reason for reason in plan.reasons)


def test_a_block_that_cannot_be_run_on_random_rows_is_counted_and_named(seen, monkeypatch):
    def refuse(x):
        raise ValueError("rows must be sorted")

    monkeypatch.setattr(Seen, "refuses", staticmethod(refuse))
    plan = plan_of([functools.partial(Seen, 16), lambda: nn.Linear(16, 4)])
    assert any("block 0 (Seen) could not be run alone" in reason and "must be sorted" in reason for reason in plan.reasons)


class TakesMore(nn.Module):
    """A kernel that takes another workspace in every process."""

    workspace = 0

    def __init__(self, width=64):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        if type(x) is torch.Tensor:
            torch.ones(self.workspace, dtype=torch.uint8)
        return self.linear(x)


def test_the_cut_of_sil_does_not_hang_on_what_real_runs_take(tmp_path, monkeypatch):
    """Partitions were balanced by measured bytes too: the same command learned something else the next time."""
    rows, found = data(64, 64), set()
    for workspace in (0, 8 << 20, 40 << 20):
        monkeypatch.setattr(TakesMore, "workspace", workspace)
        blocks = [TakesMore, *[lambda: nn.Linear(64, 64)] * 4, lambda: nn.Linear(64, 4)]
        trainer = Trainer(blocks, mem_limit="2GB", method="sil", partitions=2, output_dir=tmp_path, quiet=True)
        found.add(trainer.plan(rows, rows).starts)
    assert len(found) == 1, found


@pytest.mark.parametrize("factor", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("outputs", [2, 3])
@pytest.mark.few(1)
def test_auto_takes_the_simplest_method_of_those_that_tie(outputs, factor, tmp_path, monkeypatch):
    """`full` for a network with 2 outputs and `streamed` with 3: the rates of the disk and the kernels are noise."""
    monkeypatch.chdir(tmp_path)
    rates = Speeds(flops=1e10, optimizer=1e8 * factor, read=1e9 * factor, write=1e9 / factor)
    machine.known_speeds(monkeypatch, rates)
    blocks = [lambda: nn.Sequential(nn.Unflatten(1, (1, 16)), nn.Conv1d(1, 8, 3, padding=1), nn.ReLU())]
    blocks += [lambda: nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.ReLU())] * 4
    blocks += [nn.Flatten, lambda: nn.Linear(128, outputs)]
    x, y = data()
    rows = x, y % outputs
    assert Trainer(blocks, mem_limit="2GB", method="auto", batch_size=32, quiet=True).plan(rows, rows).method == "full"


class Greedy(nn.Module):
    def forward(self, x):
        beside = bytearray(1 << 28)  # nothing that fake tensors count
        return x + len(beside) * 0


@pytest.mark.own_process
def test_planning_keeps_the_limit_too():
    """DenseNet-121 was planned in 387 MB under 325, and where memory ran out its block was called unfit for its rows."""
    rows, limit = (torch.randn(64, 32), torch.arange(64) % 4), highest() + (1 << 26)
    blocks = [lambda: nn.Linear(32, 32), Greedy, lambda: nn.Linear(32, 4)]
    with pytest.raises(DoesNotFit, match="too small to plan in"):
        Trainer(blocks, mem_limit=limit, method="sil", quiet=True).plan(rows, rows)
    assert highest() < limit


@pytest.mark.own_process
def test_experts_given_alive_are_measured_without_their_weights_beside():
    """Of a live model of 444 MB the limit that its refusal named was too small to plan in, and so were 80 MB more."""
    model = [Experts(512) for _ in range(6)]  # 17 MB each, of which a trial takes three times as much
    before = [parameter.detach().clone()[:1] for layer in model for parameter in layer.parameters()]
    rows, limit = torch.randn(8, 4, 512), highest() + (44 << 20)
    Trainer(model, None, "sgd", mem_limit=limit, method="auto", batch_size=8, quiet=True).plan((rows, rows), (rows, rows))
    assert highest() < limit
    assert all(map(torch.equal, before, [parameter[:1] for layer in model for parameter in layer.parameters()]))
