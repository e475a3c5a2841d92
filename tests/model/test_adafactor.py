"""Adafactor, whose state is a row and a column of each matrix; and AdamW, which Python takes where nothing else is said."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from seqpart import Settings, Trainer
from seqpart.cli.job import Job
from seqpart.errors import OptionError
from tests.exactly import FULL, How, Trained, first_difference, numbers
from tests.resuming import Arm, interrupt, kill

pytestmark = pytest.mark.usefixtures("known_machine")


def network():
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.GroupNorm(2, 6), nn.Flatten(), nn.Linear(54, 12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 4)
    )


@pytest.mark.parametrize(
    "how",
    [How(), How(slots=2, keeps=0), How(method="checkpointed"), How(slots=2, boundary_tier="disk", stays=0.5)],
    ids=str,
)
@pytest.mark.parametrize("optimizer", ["adafactor", lambda parameters: torch.optim.Adafactor(parameters, lr=0.02)])
@pytest.mark.few(1)
def test_every_way_gives_the_bits_of_full_training_row_and_column_included(how, optimizer, monkeypatch, tmp_path):
    options = {"optimizer": optimizer, "clip_grad_norm": 0.5}
    arm = Trained(monkeypatch, tmp_path, network, numbers((2, 5, 5)), partitions=(0, 3, 5))
    if optimizer != "adafactor":
        del arm.options["lr"]
    expected = arm.run(FULL, **options)
    assert {key[1] for key in expected} >= {"row_var", "col_var", "variance", "step"}
    assert first_difference(arm.run(how, **options), expected) is None


@pytest.mark.parametrize("end", [interrupt, kill])
@pytest.mark.few(1)
def test_a_run_that_is_stopped_goes_on_to_the_same_bits(end, monkeypatch, tmp_path):
    options = {"optimizer": "adafactor", "lr": 0.02, "partitions": (0, 3, 5)}
    arm = Arm(monkeypatch, tmp_path, How(slots=2), network, numbers((2, 5, 5)), **options)
    whole, steps = arm.whole()
    found, stops = arm.stopped(iter([(len(steps) // 3, end), (len(steps) // 4, end)]), save_every="1")
    assert stops == 2 and found == whole


def test_the_plan_counts_a_row_and_a_column_where_adam_has_two_matrices(tmp_path):
    data = numbers((64,))

    def state(optimizer):
        model = [lambda: nn.Linear(64, 4096, bias=False), lambda: nn.Linear(4096, 4, bias=False)]
        plan = Trainer(model, None, optimizer, mem_limit="2GB", method="full", quiet=True).plan(*data)
        return plan.full_state - 2 * 4 * plan.parameters  # less weights and gradients

    weights = 64 * 4096 + 4096 * 4
    assert state("adam") == 4 * (2 * weights + 2)
    lines = 2 * 64  # between a row, a column and what comes behind
    assert 0 <= state("adafactor") - 4 * (64 + 4096 + 4096 + 4 + 2) <= lines


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tile": "16MB"}, "tile divides it"),
        ({"method": "ist", "subnets": 2}, "method ist divides it"),
        ({"method": "psl"}, "method psl divides it"),
    ],
)
def test_what_divides_weights_is_refused_by_name_or_as_a_function(options, words):
    for optimizer in ("adafactor", torch.optim.Adafactor):
        with pytest.raises(OptionError, match=f"needs each weight as a whole, and .*{words}"):
            Trainer([nn.Linear(2, 2)], None, optimizer, mem_limit="2GB", **{"method": "auto", **options})


def fitted(folder, *optimizer, **options):
    trainer = Trainer(
        network(), None, *optimizer, mem_limit="2GB", method="full", batch_size=8, epochs=2, lr=0.01, quiet=True,
        output_dir=folder, **options,
    )  # fmt: skip
    return load_file(trainer.fit(*numbers((2, 5, 5))).weights)


def test_python_takes_adamw_which_is_adam_but_for_weight_decay(tmp_path):
    assert Settings(mem_limit="2GB", method="auto").optimizer == "adamw"
    assert {field.name: field.default for field in dataclasses.fields(Job)}["optimizer"] == "adam"
    found = {
        (name, decay): fitted(tmp_path / f"{name}{decay}", *([] if name == "default" else [name]), weight_decay=decay)
        for name in ("default", "adam", "adamw") for decay in (0.0, 0.1)
    }  # fmt: skip

    def same(one, other):
        return all(torch.equal(found[one][key], found[other][key]) for key in found[one])

    assert same(("default", 0.0), ("adam", 0.0)) and same(("default", 0.1), ("adamw", 0.1))
    assert not same(("adam", 0.1), ("adamw", 0.1))
