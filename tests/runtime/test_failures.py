"""What goes wrong while a run is under way: nothing stays loaded, the message names the step, nothing is lost."""

import copy
import json
import mmap
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from seqpart import DoesNotFit, LimitExceeded, OutOfMemory, Trainer
from seqpart.device.usage import read_process
from seqpart.errors import DataError
from seqpart.runtime.partition import Partition
from seqpart.zoo.models import mlp
from tests.command import SMALL, call, refused
from tests.given import classified, trained
from tests.runtime.test_same_as_plain import plain_modules

CLASSES = 3
REFUSAL = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
)


def data(rows=96, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=generator), torch.arange(rows) % CLASSES


class Picky(nn.Module):
    """Raises `error` at its `call`-th real forward pass of more than `rows` rows."""

    def __init__(self, error, *, rows=0, call=1):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self._error, self._rows, self._call, self._calls = error, rows, call, 0  # private: a run goes on where they are others

    def forward(self, x):
        if type(x) is torch.Tensor and len(x) > self._rows:  # costs are found on fake tensors
            self._calls += 1
            if self._calls >= self._call:
                raise self._error
        return torch.relu(self.linear(x))


def network(picky=None):
    blocks = mlp(8, CLASSES, width=16, depth=3)
    return blocks if picky is None else [*blocks[:2], picky, *blocks[2:]]


def fit(tmp_path, model, name="run", **options):
    options = {"mem_limit": "2GB", "method": "sil", "epochs": 2, "batch_size": 32, "partitions": (0, 2), **options}
    return Trainer(model, quiet=True, output_dir=tmp_path / name, **options).fit(data(), data(12, 1))


def events(tmp_path, name="run"):
    return [json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("call", [1, 3, 5])
@pytest.mark.few(1)
def test_a_failed_allocation_halves_the_micro_batch_and_goes_on_from_the_last_finished_update(call, tmp_path):
    result = fit(tmp_path, network(lambda: Picky(RuntimeError(REFUSAL), rows=16, call=call)))
    assert result.final_micro_batch == 16
    first, failure = [event for event in events(tmp_path) if event["event"] == "allocation failed"]
    assert (first["micro_batch"], failure["micro_batch"]) == (32, 16), "first without the heap that was kept"
    assert first["step"] == f"B1.{(call - 1) % 3}"
    phases = [event["phase"] for event in events(tmp_path) if event["event"] == "phase"]
    assert phases == [
        "[train 0.1]", "[train 0.2]", "[cache 0]", "[test 0]", "[train 1.1]", "[train 1.2]", "[test 1]",
    ]  # fmt: skip


def test_a_run_that_failed_at_its_first_update_ends_with_the_bits_of_one_that_began_with_the_half(tmp_path):
    halved = fit(tmp_path, network(lambda: Picky(RuntimeError(REFUSAL), rows=16)), "halved", partitions=1)
    small = fit(tmp_path, network(lambda: Picky(None, rows=99)), "small", partitions=1, micro_batch_size=16)
    assert halved.weights.read_bytes() == small.weights.read_bytes()


def same_as_plain(result, *, updates, whole):
    """Every bit is that of a plain loop whose first `whole` updates are made in one piece, and the others in halves."""
    chain = nn.Sequential(*plain_modules(network(lambda: Picky(None, rows=99)), 0))
    optimizer = torch.optim.SGD(chain.parameters(), 1e-2, momentum=0.9, fused=True)
    x, y = data()
    for update in range(updates):
        of = slice(update % 3 * 32, update % 3 * 32 + 32)
        for part, labels in zip(*(rows[of].split(32 if update < whole else 16) for rows in (x, y)), strict=True):
            (nn.functional.cross_entropy(chain(part), labels) * (len(part) / 32)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    found = load_file(result.weights)
    for name, tensor in chain.state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_no_update_is_lost_or_done_twice_when_an_allocation_fails(tmp_path):
    """With momentum and a mid-epoch failure: bit-equal to a plain loop whose micro-batch changes at the same update."""
    result = fit(
        tmp_path, network(lambda: Picky(RuntimeError(REFUSAL), rows=16, call=2)), method="full", partitions=1,
        optimizer="sgd", momentum=0.9, lr=1e-2, epochs=2, shuffle=False,
    )  # fmt: skip
    same_as_plain(result, updates=6, whole=1)


@pytest.mark.parametrize(
    ("save_every", "call", "trained_with_half"), [("never", 12, 9), ("4", 12, 5), ("4", 4, 9), ("never", 11, 4)]
)
@pytest.mark.few(1)
def test_where_partitions_stay_a_failed_update_goes_back(save_every, call, trained_with_half, tmp_path):
    """Partitions that stay are updated at once, so an update that fails later on cannot be taken back alone: the run goes
    back to its beginning, or to the last checkpoint. Compared with a plain loop whose micro-batch changes there."""
    rows = {"method": "auto", "partitions": (0, 2, 3), "optimizer": "sgd", "momentum": 0.9, "lr": 1e-2, "shuffle": False}
    options = {**rows, "mem_limit": "2GB", "epochs": 3, "batch_size": 32, "save_every": save_every}

    def model():
        return network(lambda: Picky(RuntimeError(REFUSAL), rows=16, call=call))

    plan = Trainer(model(), quiet=True, output_dir=tmp_path / "planned", **options).plan(data(), data(12, 1))
    parts = tuple(replace(part, stays=p != 1, graph="again") for p, part in enumerate(plan.partitions))
    plan = replace(plan, method="streamed", partitions=parts, slots=1)
    result = Trainer(model(), quiet=True, output_dir=tmp_path / "run", **options).fit(data(), data(12, 1), reuse=plan)
    assert (result.plan.stays, result.final_micro_batch, len(result.train_losses)) == ({0, 2}, 16, 3)
    same_as_plain(result, updates=9, whole=9 - trained_with_half)


class Once(nn.Module):
    """A layer that runs out of memory in the pass number `calls[0]` of a run in `place`, once."""

    def __init__(self, width, calls, place):
        super().__init__()
        self.linear, self.calls, self.place = nn.Linear(width, width), calls, place

    def forward(self, x):
        if (self.place / "homes").exists():  # planning runs it too
            self.calls[0] -= 1
            if self.calls[0] == 0:
                raise RuntimeError(REFUSAL)
        return torch.relu(self.linear(x))


@pytest.mark.slow
@pytest.mark.own_process
def test_a_plan_that_can_do_with_less_memory_is_tried_before_the_micro_batch_is_halved(tmp_path):
    """A ResNet-50 whose plan was 5 % too small went on with halves: its BatchNorm then learned something else."""
    width, options = 700, {"method": "auto", "partitions": tuple(range(9)), "save_every": "never", "epochs": 3}

    def model(calls):
        left = [calls]
        once = partial(Once, width, left, tmp_path / str(calls))
        return [*mlp(8, width, width=width, depth=7), once, lambda: nn.Linear(width, CLASSES)]

    with pytest.raises(DoesNotFit) as refusal:
        fit(tmp_path, model(0), mem_limit="250MB", **options)
    limit = refusal.value.smallest + (4 << 20)  # which has 32 for blocks that could not be run
    plain, failed = (fit(tmp_path, model(calls), str(calls), mem_limit=limit, **options) for calls in (0, 5))
    assert plain.plan.stays, "there is something to give up"
    assert (plain.final_micro_batch, failed.final_micro_batch) == (32, 32)
    told = [event for event in events(tmp_path, "5") if event["event"] == "allocation failed"]
    assert told[-1]["micro_batch"] == 32
    assert failed.weights.read_bytes() == plain.weights.read_bytes()


def test_memory_that_runs_out_at_micro_batch_one_is_said_with_the_step_and_the_cures(tmp_path):
    with pytest.raises(OutOfMemory, match=r"B1\.0 at micro-batch 1.*partitions=3"):
        fit(tmp_path, network(lambda: Picky(RuntimeError(REFUSAL))))


@pytest.mark.parametrize(
    ("place", "code", "told"),
    [
        ("seqpart.profile.machine.MEASURED.speeds", 3, "is too small to plan in"),
        ("seqpart.runtime.run.data_digest", 4, "OutOfMemory: memory ran out while"),
    ],
)
def test_memory_that_runs_out_before_training_is_one_message_too(place, code, told, tmp_path, monkeypatch, capsys):
    """A campaign let the K-th allocation fail: in the measuring of rates that was a traceback and exit code 1."""

    def failing(*_, **__):
        raise RuntimeError(REFUSAL)

    monkeypatch.setattr(place, failing)
    ran = call(capsys, *SMALL, "--method", "full", "--epochs", "1", "--output-dir", tmp_path / "run")
    assert refused(ran, code, told)


def test_memory_that_runs_out_above_the_least_rows_that_a_model_takes_is_no_bad_input(tmp_path):
    """BatchNorm refuses a single row: the half of two was measured, and the user was told to change the block."""
    picky = [lambda: Picky(RuntimeError(REFUSAL), rows=1), lambda: nn.BatchNorm1d(16)]
    blocks = mlp(8, CLASSES, width=16, depth=3)
    with pytest.raises(OutOfMemory, match=r"at micro-batch 2, .*does not take 1 row\(s\) at once\. Give more than 2000MB"):
        fit(tmp_path, [*blocks[:2], *picky, *blocks[2:]], batch_size=4, partitions=1, micro_batch_size=2)


def test_an_error_inside_a_block_names_the_step_and_leaves_nothing_behind(tmp_path):
    with pytest.raises(ZeroDivisionError, match="in the block") as caught:
        fit(tmp_path, network(lambda: Picky(ZeroDivisionError("in the block"), call=2)), save_every="never")
    assert caught.value.__notes__ == ["while running B1.1 in [train 1.1]"]
    left = sorted(path.name for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert not [name for name in left if name.endswith((".safetensors", ".part"))], left


WAYS = [
    {"method": "sil"}, {"method": "full", "partitions": 1}, {"method": "streamed", "partitions": 4},
    {"method": "checkpointed", "partitions": 2}, {"method": "streamed", "partitions": 4, "micro_batch_size": 8},
]  # fmt: skip


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.few(1)
def test_a_run_that_an_error_of_a_block_ended_goes_on_to_the_bits_of_one_without(options, tmp_path):
    """What had been trained since the last checkpoint was lost: ten minutes, or all."""
    whole = fit(tmp_path, network(lambda: Picky(None, call=10**9)), "whole", **options)
    with pytest.raises(ZeroDivisionError) as caught:
        fit(tmp_path, network(lambda: Picky(ZeroDivisionError("in the block"), call=5)), **options)
    notes = " ".join(caught.value.__notes__)
    assert "The run is saved as it stood there" in notes and "checkpoint is intact" not in notes
    at = [event for event in events(tmp_path) if event["event"] == "checkpoint"][-1]
    assert (at["phase"], at["updates"]) != (0, 0)
    trainer = Trainer(
        network(lambda: Picky(None, call=10**9)), quiet=True, output_dir=tmp_path / "run", mem_limit="2GB", epochs=2,
        batch_size=32, **{"partitions": (0, 2), **options},
    )  # fmt: skip
    found = trainer.fit(data(), data(12, 1), resume=tmp_path / "run")
    assert found.weights.read_bytes() == whole.weights.read_bytes()
    assert (found.train_losses, found.test_loss) == (whole.train_losses, whole.test_loss)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.out = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.embedding(x).mean(1))


@pytest.mark.parametrize("save_every", ["never", "10min"])
@pytest.mark.parametrize("options", WAYS[1:4], ids=str)
@pytest.mark.few(1)
def test_test_rows_that_the_model_does_not_take_do_not_cost_what_was_trained(options, save_every, tmp_path):
    """Twenty epochs were trained, a token of the test rows was in no vocabulary, and the model had its first weights."""
    rows, expected, found = (torch.arange(96 * 4).view(96, 4) % 50, torch.arange(96) % 3), Tokens(), Tokens()

    def train(model, test, name):
        Trainer(
            model, mem_limit="2GB", batch_size=32, epochs=2, quiet=True, save_every=save_every, output_dir=tmp_path / name,
            **{**options, "partitions": min(2, options["partitions"])},
        ).fit(rows, test)  # fmt: skip

    train(expected, rows, "whole")
    with pytest.raises(DataError, match="no vector for") as caught:
        train(found, (rows[0] + 60, rows[1]), "run")
    weights = tmp_path / "run" / "model.safetensors"
    assert f"its weights are in {weights}" in " ".join(caught.value.__notes__)
    assert weights.read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert all(torch.equal(expected.state_dict()[name], tensor) for name, tensor in found.state_dict().items())


def test_a_label_that_is_no_class_is_told_in_a_loop_of_ones_own():
    """Where rows are known beforehand it is refused before training; here it was an IndexError of torch."""
    x, y = torch.randn(16, 8), torch.arange(16) % CLASSES
    trainer = Trainer(nn.Linear(8, CLASSES), None, "sgd", mem_limit="2GB", method="full", batch_size=8, quiet=True)
    with (
        pytest.raises(DataError, match=f"no class: Target {CLASSES} is out of bounds"),
        trainer.session((x[:8], y[:8])) as session,
    ):
        session.step((x[:8], y[:8]))
        session.step((x[8:], y[8:] + 1))


def test_modules_given_alive_have_their_weights_back_after_an_error(tmp_path):
    model = nn.Sequential(nn.Linear(8, 16), Picky(ZeroDivisionError("in the block"), call=2), nn.Linear(16, CLASSES))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, model, partitions=1)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_diverging_run_says_so(tmp_path):
    with pytest.raises(Exception, match=r"training diverged.*another lr"):
        fit(tmp_path, network(), method="full", partitions=1, optimizer="sgd", lr=1e30)


PROGRAM = """
    import mmap, sys
    from pathlib import Path
    import numpy as np
    import torch
    from torch import nn
    from seqpart import SeqpartError, Trainer

    class Hungry(nn.Module):
        kept = []
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 3)
        def forward(self, x):
            if type(x) is torch.Tensor and (Path(sys.argv[1]) / "homes").exists():  # planning runs it too, and would see it
                {take}
            return self.linear(x)

    x, y = torch.randn(96, 16), torch.arange(96) % 3
    try:
        result = Trainer(
            [lambda: nn.Linear(16, 16), Hungry], mem_limit="1GB", method="sil", batch_size=32, epochs=1, partitions=1,
            output_dir=sys.argv[1],
        ).fit((x, y), (x[:9], y[:9]))
    except SeqpartError as error:
        print(type(error).__name__, error)
        sys.exit(error.exit_code)
    print("micro-batch", result.final_micro_batch, "peak", result.proof.peak)
"""


def run_hungry(tmp_path, take):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM.format(take=take)))
    return subprocess.run([sys.executable, program, tmp_path / "out"], capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_the_kernel_refuses_what_a_block_takes_beyond_the_limit_and_the_run_goes_on_smaller(tmp_path):
    # 30 MB for each row, out of every account: 960 MB at 32 rows, 240 MB at 8.
    done = run_hungry(tmp_path, "np.ones((len(x), 30_000_000), np.uint8)")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "an allocation failed in B0.0 inside the limit" in done.stdout
    words = done.stdout.split()
    assert int(words[words.index("micro-batch", len(words) - 4) + 1]) in (8, 16)
    assert int(words[-1]) <= 1_000_000_000


class Mapping(nn.Module):
    """Takes shared memory in a run, which RLIMIT_DATA does not count and the sampler does."""

    def __init__(self, nbytes, place):
        super().__init__()
        self.linear, self.nbytes, self.place = nn.Linear(16, 16), nbytes, place
        self.kept = []

    def forward(self, x):
        if type(x) is torch.Tensor and (self.place / "homes").exists():  # planning runs it too, and would see it
            self.kept.append(torch.frombuffer(mmap.mmap(-1, self.nbytes), dtype=torch.uint8))
            self.kept[-1][::4096] = 1
        return self.linear(x)


@pytest.mark.own_process
def test_memory_taken_behind_the_kernels_limit_is_seen_and_ends_the_run_with_exit_code_4(tmp_path):
    limit = read_process().held + (250 << 20)
    with pytest.raises(LimitExceeded, match="was passed") as ended:
        fit(tmp_path, network(lambda: Mapping(300 << 20, tmp_path / "run")), mem_limit=limit, partitions=1, batch_size=96)
    assert ended.value.exit_code == 4


def test_memory_that_runs_out_in_an_update_leaves_nothing_loaded(tmp_path, monkeypatch):
    """Only a failed forward or backward was cleaned up after: a module given alive kept half-updated views of the slot."""
    model = nn.Sequential(nn.Linear(4, 3))
    before = copy.deepcopy(model.state_dict())

    def half_done(partition, *_, **__):
        with torch.no_grad():
            next(iter(partition.trainable.values())).add_(1)
        raise MemoryError

    monkeypatch.setattr(Partition, "update", half_done)
    with pytest.raises(OutOfMemory, match="memory ran out in U0"):
        trained(tmp_path, model, (4,))
    for name, tensor in before.items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_a_second_plan_does_not_ask_again_for_the_memory_that_the_first_took(tmp_path, monkeypatch):
    """After a failed allocation --ram-limit was compared with what the run's own host pool had left free, and refused."""
    free = iter([1 << 30])
    monkeypatch.setattr("seqpart.plan.inputs.host_memory_free", lambda: next(free, 0))
    trainer = Trainer([nn.Linear(4, 3)], mem_limit="2GB", method="sil", ram_limit="64MB", output_dir=tmp_path)
    planner = trainer.prepare(*trainer.rows(classified(48, (4,)), classified(12, (4,))))
    first = planner.planned()
    again = planner.prepare(replace(first.request, micro_batch=8, starts=first.plan.starts))
    assert again.places.nbytes == first.places.nbytes > 0


def test_memory_that_runs_out_before_the_loop_is_said_in_words(tmp_path):
    """A block whose factory takes more than the limit for a moment ended the run in a traceback and exit code 1."""

    def greedy():
        torch.empty(8 << 30, dtype=torch.uint8).fill_(1)
        return nn.Linear(4, 2)

    data = torch.zeros(4, 4), torch.tensor([0, 1, 0, 1])
    with pytest.raises(OutOfMemory, match=r"ran out while the blocks were built, inside the limit of 2\.00 GB.*mem_limit"):
        Trainer([greedy], mem_limit="2GB", method="sil", device="cpu", output_dir=tmp_path / "out", quiet=True).fit(data, data)
    assert not list(tmp_path.rglob("*.safetensors"))


class Greedy:
    """A metric, and a callback, that fails at the end of a test."""

    def __init__(self, error):
        self.error = error

    def update(self, outputs, labels):
        pass

    def reset(self):
        pass

    def compute(self):
        raise self.error


@pytest.mark.parametrize("options", [{}, {"test_every": 1}], ids=["after all training", "between epochs"])
@pytest.mark.parametrize(("kind", "text"), [(ValueError, "no F1 of one class"), (RuntimeError, REFUSAL)])
def test_an_error_of_a_metric_costs_nothing_that_was_trained(kind, text, options, tmp_path):
    """It came after the test's last step, and what nobody had saved was lost; memory that ran out there was an IndexError."""
    options = {"mem_limit": "2GB", "method": "streamed", "epochs": 2, "batch_size": 32, **options}
    made = Trainer(network(), quiet=True, output_dir=tmp_path / "run", **options)
    with pytest.raises((ValueError, OutOfMemory)) as caught:
        made.fit(data(), data(12, 1), compute_metrics=Greedy(kind(text)))
    notes = " ".join(caught.value.__notes__)
    assert "The run is saved" in notes and ("its weights are in" in notes) == ("test_every" not in options)
    resumed = Trainer(network(), quiet=True, output_dir=tmp_path / "run", **options).fit(
        data(), data(12, 1), resume=tmp_path / "run"
    )
    plain = Trainer(network(), quiet=True, output_dir=tmp_path / "plain", **options).fit(data(), data(12, 1))
    if kind is ValueError or "test_every" not in options:  # else it goes on with the smaller micro-batch
        assert resumed.weights.read_bytes() == plain.weights.read_bytes()


def test_memory_that_runs_out_in_a_callback_ends_the_run_which_is_saved(tmp_path):
    """The loop went on with a smaller plan, and the callback was not called for that update again."""

    class Callback:
        def on_step(self, event):
            raise RuntimeError(REFUSAL)

    with pytest.raises(OutOfMemory, match="memory ran out while a callback ran") as caught:
        Trainer(network(), mem_limit="2GB", method="full", epochs=2, batch_size=32, quiet=True, output_dir=tmp_path).fit(
            data(), callbacks=[Callback()]
        )
    assert "The run is saved as it stood there" in " ".join(caught.value.__notes__)


def test_memory_that_runs_out_at_micro_batch_one_costs_no_finished_update(tmp_path):
    """What nobody had saved was lost."""
    options = {"method": "streamed", "partitions": 3, "epochs": 1}
    picky = Picky(RuntimeError(REFUSAL), call=4)
    with pytest.raises(OutOfMemory, match=r"micro-batch 1") as caught:
        fit(tmp_path, network(picky), **options)
    assert "The run is saved" in " ".join(caught.value.__notes__)
    assert json.loads((tmp_path / "run" / "checkpoint.json").read_text())


class Keeping:
    """Keeps all outputs, as torchmetrics' curves do."""

    def __init__(self):
        self.kept = []

    def reset(self):
        self.kept = []

    def update(self, outputs, labels):
        self.kept.append(outputs.clone())

    def compute(self):
        return {"mean": torch.cat(self.kept).mean()}


@pytest.mark.slow
@pytest.mark.own_process
def test_a_metric_that_keeps_all_outputs_does_not_pass_the_limit(tmp_path):
    """After an allocation had failed, the C library served others from holes of its heaps, and the run passed by 3 MB."""
    x, y = torch.randn(8192, 64), torch.arange(8192) % 512
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8192))
    options = {"mem_limit": "450MB", "method": "streamed", "batch_size": 64, "epochs": 1}
    made = Trainer(model, quiet=True, output_dir=tmp_path, **options)
    with pytest.raises((OutOfMemory, DoesNotFit)) as caught:  # in the test, or when a smaller plan is made for it
        made.fit((x[:512], y[:512]), (x, y), compute_metrics=Keeping())
    assert "its weights are in" in " ".join(caught.value.__notes__)


@pytest.mark.slow
@pytest.mark.own_process
def test_a_callback_that_keeps_tensors_does_not_pass_the_limit(tmp_path):
    """Memory that was reserved before the limit, and used after it, took the run past it by 1 MB, and nothing was saved."""
    kept = []

    class Callback:
        def on_step(self, event):
            kept.append(torch.ones(1 << 20))

    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())]
    made = Trainer(
        nn.Sequential(*layers, nn.Linear(512, 3)), mem_limit="600MB", method="streamed", epochs=3, batch_size=8, lr=1e-3,
        quiet=True, output_dir=tmp_path,
    )  # fmt: skip
    with pytest.raises(OutOfMemory, match="memory ran out while a callback ran") as caught:
        made.fit((torch.randn(512, 512), torch.arange(512) % 3), callbacks=[Callback()])
    assert "The run is saved" in " ".join(caught.value.__notes__)
