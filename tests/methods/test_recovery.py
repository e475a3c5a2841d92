"""Recovery: after SIL, back-propagation from the true loss through the whole network, one side of it frozen, one partition
on the device at a time. Equal to a plain loop, bit for bit."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from seqpart import Trainer
from seqpart.errors import OptionError
from seqpart.methods.method import PartitionTraining, Recovery, Workload
from seqpart.methods.sil import SIL
from tests.command import run
from tests.runtime.test_same_as_plain import CLASSES, OPTIMIZERS, data, network, plain_modules, row_order

STARTS = (0, 2, 4)


def trained(folder, model=None, **options):
    options = {
        "method": "sil", "mem_limit": "2GB", "partitions": STARTS, "optimizer": "sgd", "momentum": 0.9, "lr": 1e-2, "epochs": 1,
        "batch_size": 25, "shuffle": True, "seed": 5, **options,
    }  # fmt: skip
    return Trainer(model or network(), output_dir=folder, quiet=True, **options).fit(data(), data(30, 1))


def loaded(result, modules):
    weights = load_file(result.weights)
    for number, module in enumerate(modules):
        module.load_state_dict({name: weights[f"{number}.{name}"] for name in module.state_dict()})
    return modules


@pytest.mark.parametrize("recover", ["all", "left"])
@pytest.mark.parametrize(("micro_batch", "rate"), [(10, 3e-3), (25, None)])
@pytest.mark.few(1)
def test_recovery_equals_a_plain_loop_from_the_weights_that_sil_left(recover, micro_batch, rate, tmp_path):
    x, y = data()
    before = trained(tmp_path / "before", micro_batch_size=micro_batch)
    after = trained(tmp_path / "after", micro_batch_size=micro_batch, recovery_epochs=2, recover=recover, recovery_lr=rate)
    modules = loaded(before, plain_modules(network(), 5))
    for frozen in modules[4:] if recover == "left" else []:
        frozen.requires_grad_(False)
    chain = nn.Sequential(*modules).train()
    optimizer = OPTIMIZERS["sgd"]([p for p in chain.parameters() if p.requires_grad], rate or 1e-2)
    for epoch in (1, 2):
        rows = row_order(x, True, 5, 0)(epoch)
        for picked in rows.split(25):
            for part in picked.split(micro_batch):
                loss = F.cross_entropy(chain(x[part]), y[part])
                (loss if len(part) == len(picked) else loss * (len(part) / len(picked))).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = load_file(after.weights)
    for number, module in enumerate(modules):
        for name, tensor in module.state_dict().items():
            assert torch.equal(found[f"{number}.{name}"], tensor), f"{number}.{name}"


def test_the_frozen_side_keeps_its_weights_and_statistics_move_with_what_comes_in(tmp_path):
    def model():
        return [*network()[:-1], lambda: nn.Sequential(nn.BatchNorm1d(32), nn.Linear(32, CLASSES))]

    before = load_file(trained(tmp_path / "before", model()).weights)
    after = load_file(trained(tmp_path / "after", model(), recovery_epochs=1).weights)
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert {name for name in changed if int(name.split(".")[0]) >= 4} == {
        "5.0.running_mean", "5.0.running_var", "5.0.num_batches_tracked",
    }  # fmt: skip
    assert {name for name in before if int(name.split(".")[0]) < 4} <= changed


def test_recovery_brings_the_true_loss_down(tmp_path):
    options = {"optimizer": "adam", "momentum": 0.0}
    before = trained(tmp_path / "before", **options)
    after = trained(tmp_path / "after", recovery_epochs=6, recover="all", **options)
    assert after.train_losses[: len(before.train_losses)] == before.train_losses
    recovering = after.train_losses[len(before.train_losses) :]
    assert len(recovering) == 6
    assert recovering[-1] < before.train_losses[-1]
    assert sorted(recovering, reverse=True) == list(recovering)


@pytest.mark.slow
def test_recovery_keeps_the_limit_and_is_in_the_plan(tmp_path):
    done = run(
        tmp_path, "--mem-limit", "340MB", "--partitions", 3, "--width", 128, "--depth", 4, "--epochs", 1,
        "--recovery-epochs", 1, "--output-dir", "run",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "recovery: 1 epoch(s) of streamed back-propagation, all partitions but the last learn" in done.out
    assert "violations 0" in done.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recovery_epochs": -1}, "recovery_epochs"),
        ({"recovery_epochs": 1, "recover": "right"}, "recover: expected left or all; found 'right'"),
        ({"recovery_epochs": 1, "method": "full", "partitions": "auto"}, "recovery"),
        ({"recovery_epochs": 1, "partitions": 1}, "nothing to recover"),
        ({"recovery_epochs": 1, "recovery_batch_size": 0}, "recovery_batch_size"),
        ({"recovery_epochs": 1, "recovery_lr": 0}, "recovery_lr"),
        ({"recovery_lr": 1e-3}, "recovery_lr goes with recovery_epochs only"),
    ],
)
def test_what_cannot_be_recovered_is_refused_in_words(options, words, tmp_path):
    with pytest.raises(OptionError, match=words):
        trained(tmp_path / "run", **options)


def test_recovery_is_tested_in_its_own_micro_batches():
    """They were those of the partitions' training, which recovery may have no room for."""
    part = PartitionTraining(epochs=1, batch_size=20, micro_batch=20)
    recovery = Recovery(epochs=1, batch_size=20, micro_batch=5, frozen=frozenset())
    work = Workload(train_rows=60, test_rows=20, shuffle=False, partitions=(part, part), recovery=recovery)
    assert {phase.micro_batch for phase in SIL.phases(work) if phase.stage} == {5}
